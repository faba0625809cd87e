"""The engine's end of one link over TCP: frames in TLS, without an event loop and without waiting.

`read` takes what the network has, `take` gives the frames in it, `send` encrypts a frame and keeps what the
network does not take. The first reads are the handshake. What fails ends the socket with a reason for the
log; nothing that came before the end of the handshake is a frame. `peers.py` has one for each connection.

A connection may go on as plain bytes for a thread that waits for them (`SecureBytes`). TLS is read a record
of 16 KiB at a time; the network is read in larger pieces, since two system calls for each record cost as much
as its decryption.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from contextlib import suppress
from typing import Any

from holdfast.server.link.frames import READ_BYTES, Frames, framed

__all__ = ["FRAME_MAX", "BoundedFrames", "FrameTooLong", "SecureBytes", "SecureSocket", "set_timeouts"]

FRAME_MAX = 256 << 20
"""The longest frame that an end of a link over TCP accepts, in bytes."""

_LENGTH = struct.Struct("<I")


class FrameTooLong(RuntimeError):
    """The other end announced a frame beyond the limit."""


class BoundedFrames(Frames):
    """Frames of at most `longest` bytes; a longer one is refused before it is received."""

    __slots__ = ("longest",)

    def __init__(self, longest: int = FRAME_MAX) -> None:
        super().__init__()
        self.longest = longest

    def take(self) -> bytes | None:
        """The next frame; None if it has not come whole."""
        if len(self._held) >= self._start + _LENGTH.size:
            length = _LENGTH.unpack_from(self._held, self._start)[0]
            if length > self.longest:
                raise FrameTooLong(f"a frame of {length} bytes, of at most {self.longest}")
        return super().take()


def set_timeouts(connected: socket.socket, seconds: float) -> None:
    """Have the system end a connection whose other machine acknowledges nothing for so long."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(1000 * seconds)))


class SecureSocket:
    """One accepted connection. `ended` is why it has ended, None while it has not."""

    def __init__(self, connected: socket.socket, context: ssl.SSLContext) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.frames = BoundedFrames()
        self.ended: str | None = None
        self.heard = False
        """Whether anything has come."""
        self.shaken = False
        """Whether the handshake is complete: the other end has the key."""
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._goes, server_side=True)
        self._unsent = bytearray()

    @property
    def unsent(self) -> int:
        """Bytes that the network has not taken."""
        return len(self._unsent)

    def read(self) -> bool:
        """Take what has come; whether anything did."""
        if self.ended is not None:
            return False
        try:
            data = self.socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.end(error.strerror or str(error))
            return False
        if not data:
            self.end("the other end closed the connection" + ("" if self.shaken else " in the handshake"))
            return False
        self.heard = True
        self._came.write(data)
        try:
            self._decrypt()
        except ssl.SSLZeroReturnError:
            self.end("the other end closed the link")
        except ssl.SSLError as error:
            self.flush(self._goes.read())  # The alert that tells the other end why.
            self.end(reason_of(error))
        return True

    def _decrypt(self) -> None:
        with suppress(ssl.SSLWantReadError):
            if not self.shaken:
                self._tls.do_handshake()
                self.shaken = True
            while data := self._tls.read(READ_BYTES):
                self.frames.feed(data)
        self.flush(self._goes.read())

    def take(self) -> bytes | None:
        """The next frame that has come whole, or None."""
        if not self.shaken:
            return None
        try:
            return self.frames.take()
        except FrameTooLong as error:
            self.end(str(error))
            return None

    def send(self, frame: bytes) -> None:
        """Send a frame after those before it."""
        if self.ended is None and self.shaken:
            self._tls.write(framed(frame))
            self.flush(self._goes.read())

    def flush(self, more: bytes = b"") -> bool:
        """Send what the network takes now; whether nothing is left."""
        if self.ended is not None:
            return True
        self._unsent += more
        try:
            with suppress(BlockingIOError, InterruptedError):
                while self._unsent:
                    del self._unsent[: self.socket.send(self._unsent)]
        except OSError as error:
            self.end(error.strerror or str(error))
        return not self._unsent

    def release(self, seconds: float) -> SecureBytes:
        """The rest of the connection as bytes, whose reader waits `seconds` for each piece; it ends here."""
        rest = SecureBytes(self.socket, self._tls, self._came, self.frames.rest(), seconds)
        self.end("it goes on without frames")
        return rest

    def end(self, why: str) -> None:
        """The connection is of no more use."""
        if self.ended is None:
            self.ended = why
            self._unsent.clear()

    def close(self, seconds: float = 0.0) -> None:
        """Close the connection; wait so long for the network to take what was sent."""
        deadline = time.monotonic() + seconds
        while not self.flush() and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.shaken and self.ended is None:
            with suppress(ssl.SSLError):
                self._tls.unwrap()
            self.flush(self._goes.read())
        self.end("closed")
        self.socket.close()


class SecureBytes:
    """The rest of a connection in plain bytes, for one thread that waits."""

    def __init__(
        self,
        connected: socket.socket,
        tls: ssl.SSLObject,
        came: ssl.MemoryBIO,
        begun: bytes,
        seconds: float,
    ) -> None:
        """`begun` are bytes that were read already."""
        connected.settimeout(seconds)
        self._socket = connected
        self._tls: Any = tls  # Its `read` is typed without a buffer.
        self._came = came
        self._begun = memoryview(begun)
        self._raw = memoryview(bytearray(READ_BYTES))

    def fill(self, place: memoryview) -> int:
        """Fill a buffer: with fewer bytes than it has at the end of the connection alone.

        Raises `OSError` if the connection fails, or is silent for too long.
        """
        done = len(self._begun[: len(place)])
        place[:done] = self._begun[:done]
        self._begun = self._begun[done:]
        while done < len(place):
            try:
                while done < len(place):
                    count = self._tls.read(len(place) - done, place[done:])
                    if not count:
                        return done
                    done += count
            except ssl.SSLZeroReturnError:
                return done
            except ssl.SSLWantReadError:
                count = self._socket.recv_into(self._raw)
                if not count:
                    return done
                self._came.write(self._raw[:count])
        return done

    def break_off(self) -> None:
        """Let the thread's wait end, from another thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, once the thread has ended."""
        self._socket.close()


def reason_of(error: ssl.SSLError) -> str:
    """Why a handshake failed, or what was received is not TLS of this key."""
    reason = (error.reason or str(error)).lower().replace("_", " ")
    known = {
        "wrong version number": "the other end does not speak TLS",
        "http request": "the other end speaks HTTP, not TLS",
        "unsupported protocol": "the other end speaks an old TLS",
        "peer did not return a certificate": "the other end has no key",
        "certificate verify failed": "the other end has another key",
        "unknown ca": "the other end has another key",
        "tlsv1 alert unknown ca": "the other end has another key",
        "tlsv13 alert certificate required": "this end has no key",
    }
    return known.get(reason, f"TLS: {reason}")
