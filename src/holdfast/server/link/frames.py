"""Frames on the stream socket between the API process and an engine process.

A frame is a length in four bytes, then so many bytes. `Frames` finds them in what has come. `FrameSocket` is
the engine process's end of the socket: it has no event loop, and neither sending nor receiving waits. The
other end is `channel.py`. There is no thread between the two: a message wakes one process once.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress

__all__ = ["FrameSocket", "Frames", "framed", "watch"]

READ_BYTES = 1 << 18
"""What is read from a socket at a time."""

_LENGTH = struct.Struct("<I")


def framed(content: bytes) -> bytes:
    """Bytes as a frame."""
    return _LENGTH.pack(len(content)) + content


def watch(poll: select.poll, watched: tuple[int, ...], others: Iterable[int]) -> tuple[int, ...]:
    """Have `poll` watch some descriptors in place of those that it watched; returns what it watches."""
    wanted = tuple(others)
    if wanted != watched:
        for descriptor in watched:
            poll.unregister(descriptor)
        for descriptor in wanted:
            poll.register(descriptor, select.POLLIN)
    return wanted


class Frames:
    """Bytes that have come, in frames."""

    __slots__ = ("_held", "_start")

    def __init__(self) -> None:
        self._held = bytearray()
        self._start = 0
        """Where the first frame begins that was not taken."""

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """More bytes have come."""
        if self._start:
            del self._held[: self._start]
            self._start = 0
        self._held += data

    def take(self) -> bytes | None:
        """The next frame; None if it has not come whole."""
        begin = self._start + _LENGTH.size
        if len(self._held) < begin:
            return None
        end = begin + _LENGTH.unpack_from(self._held, self._start)[0]
        if len(self._held) < end:
            return None
        self._start = end
        return bytes(memoryview(self._held)[begin:end])

    def rest(self) -> bytes:
        """All that was not taken, which is no frame."""
        rest = bytes(memoryview(self._held)[self._start :])
        self._held, self._start = bytearray(), 0
        return rest


class FrameSocket:
    """A connected stream socket, in frames. What the other process does not take yet is kept for it.

    Once the other process has ended nothing comes any more, and what is sent is dropped.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._frames = Frames()
        self._next: bytes | None = None
        """A frame that `wait` has found."""
        self._unsent = bytearray()
        self._ended = False
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._watched: tuple[int, ...] = ()
        self._asks_room = False

    @classmethod
    def connect(cls, path: str) -> FrameSocket:
        """Connect to the socket that another process listens on."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.connect(path)
        return cls(made)

    def send(self, frame: bytes) -> None:
        """Send a frame after those before it."""
        if not self._ended:
            self._unsent += framed(frame)
            self.flush()

    def flush(self) -> bool:
        """Send what the other process takes now; whether nothing is left."""
        try:
            with suppress(BlockingIOError, InterruptedError):
                while self._unsent:
                    del self._unsent[: self._socket.send(self._unsent)]
        except OSError:
            self._end()
        if bool(self._unsent) is not self._asks_room and not self._ended:
            self._asks_room = bool(self._unsent)
            room = select.POLLOUT if self._asks_room else 0
            self._poll.modify(self._socket, select.POLLIN | room)
        return not self._unsent

    def receive(self) -> bytes | None:
        """The next frame that has come whole, or None."""
        frame, self._next = self._next, None
        while frame is None:
            frame = self._frames.take()
            if frame is None and not self._read():
                return None
        return frame

    def wait(self, seconds: float, others: Iterable[int] = ()) -> bool:
        """Wait for a frame, or for news on other descriptors, in whole milliseconds; whether any came."""
        if self._next is None:
            self._next = self.receive()
        if self._next is not None:
            return True
        self._watched = watch(self._poll, self._watched, others)
        found = self._poll.poll(int(1000 * seconds))
        if self._asks_room:
            self.flush()
        return any(events & ~select.POLLOUT for _, events in found)

    def close(self, seconds: float = 0.0) -> None:
        """Close the socket; wait so long for the other process to take what was sent."""
        deadline = time.monotonic() + seconds
        while not self.flush() and time.monotonic() < deadline:
            self._poll.poll(10)
        self._socket.close()

    def _read(self) -> bool:
        """Read what has come; False if that is nothing."""
        if self._ended:
            return False
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self._end()
            return False
        self._frames.feed(data)
        return True

    def _end(self) -> None:
        """The other process has ended: its socket has no more news."""
        if not self._ended:
            self._ended = True
            self._poll.unregister(self._socket)
        self._unsent.clear()
