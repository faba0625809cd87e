"""WebSocket connections with a rate limit on frames, so that one client cannot starve the event loop.

Uvicorn's WebSocket protocol parses everything that has arrived at once, and a frame can be six bytes long:
one connection could block the loop with tens of thousands of frames. Here frames are counted by their headers
before they are parsed; a few are parsed in each pass of the loop, the next when the application has taken the
messages. Pings, pongs and short fragments are paid from a token bucket; a connection that has emptied it is
closed with 1008. Messages cost nothing, since backpressure bounds them. A client that does not read gets no
pongs. `serve` gives this class to uvicorn.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.http11 import Request

from holdfast.server.http.body_writer import offer_frames
from holdfast.server.http.problems import Problem

__all__ = ["Budget", "FrameScanner", "SocketConnection"]

FRAMES_A_PASS = 32
FRAMES_SAVED_MAX = 4096
FRAMES_A_SECOND = 256
FRAGMENT_BYTES = 1024
"""A fragment of this length or more costs nothing: the message limit bounds their number."""
LINGER_SECONDS = 2.0

TOO_MANY_FRAMES = (1008, "too many pings or small fragments")

FINAL, OPCODE, CONTROL, LENGTH, MASKED = 0x80, 0x0F, 0x08, 0x7F, 0x80
LENGTH_BYTES = {126: 2, 127: 8}


class FrameScanner:
    """Finds frame boundaries in a byte stream from the headers alone (RFC 6455, 5.2)."""

    def __init__(self) -> None:
        self._left = 0
        """Bytes of the last frame still to come."""

    def ahead(self, data: bytes | bytearray, frames_max: int) -> tuple[int, int]:
        """How many bytes of `data` hold at most `frames_max` frame starts, and how many of those frames cost.

        The bytes count as consumed: the next call gets what follows them.
        """
        at = min(self._left, len(data))
        self._left -= at
        frames = cost = 0
        while not self._left and frames < frames_max and len(data) - at >= 2:
            first, length = data[at], data[at + 1] & LENGTH
            more = LENGTH_BYTES.get(length, 0)
            header = 2 + more + (4 if data[at + 1] & MASKED else 0)
            if len(data) - at < header:
                break
            if more:
                length = int.from_bytes(data[at + 2 : at + 2 + more])
            whole = first & FINAL and first & OPCODE
            if first & CONTROL or (not whole and length < FRAGMENT_BYTES):
                cost += 1
            frames += 1
            at += header
            here = min(length, len(data) - at)
            at, self._left = at + here, length - here
        return at, cost


class Budget:
    """A token bucket: a burst of `saved_max`, refilled at a constant rate."""

    def __init__(self, saved_max: int, a_second: float, now: float) -> None:
        self._saved_max = saved_max
        self._a_second = a_second
        self._saved = float(saved_max)
        self._at = now

    def spend(self, count: int, now: float) -> bool:
        """Take `count` tokens; False if there are fewer."""
        self._saved = min(self._saved_max, self._saved + (now - self._at) * self._a_second)
        self._at = now
        if count > self._saved:
            return False
        self._saved -= count
        return True


class SocketConnection(WebSocketsSansIOProtocol):
    """One WebSocket, from its upgrade request to its end."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._scanner = FrameScanner()
        self._budget = Budget(FRAMES_SAVED_MAX, FRAMES_A_SECOND, self.loop.time())
        self._unread = bytearray()
        self._next_pass: asyncio.Handle | None = None
        self._flooded = False

    def data_received(self, data: bytes) -> None:
        if not self.handshake_initiated:
            self._shake_hands(data)
        elif not self._flooded:
            self._unread += data
            self._read_some()

    def _shake_hands(self, request: bytes) -> None:
        """Read the upgrade request; one that the library rejects is answered too."""
        super().data_received(request)
        if not self.handshake_initiated:
            output = b"".join(self.conn.data_to_send())
            self.transport.write(output or _refusal())
            self.transport.close()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            offer_frames(self)

    def _read_some(self) -> None:
        """Parse a few frames, and schedule the rest."""
        self._next_pass = None
        if self.transport.is_closing() or self._flooded:
            self._unread.clear()
            return
        if self.read_paused:
            self.transport.pause_reading()
            return  # `receive` goes on when the application has taken what there is.
        end, cost = self._scanner.ahead(self._unread, FRAMES_A_PASS)
        if not self._budget.spend(cost, self.loop.time()):
            self._close_flooded()
            return
        if end:
            frames = bytes(self._unread[:end])
            del self._unread[:end]
            super().data_received(frames)
        self._go_on(waits=not end)

    def _go_on(self, *, waits: bool = False) -> None:
        """Continue with buffered bytes in the next pass of the loop, or with bytes from the client.

        `waits`: the buffer holds only an incomplete header.
        """
        if self.read_paused or self.transport.is_closing():
            return
        if self._unread and not waits:
            self.transport.pause_reading()
            if self._next_pass is None:
                self._next_pass = self.loop.call_soon(self._read_some)
        else:
            self.transport.resume_reading()

    async def receive(self) -> Any:
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._go_on()
        return message

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.close":
            self._go_on()
            self.loop.call_later(self.close_timeout + LINGER_SECONDS, self.transport.abort)

    def handle_ping(self) -> None:
        """Answer a ping, unless the client does not read (a later pong may answer it, 5.5.3)."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next_pass is not None:
            self._next_pass.cancel()
        super().connection_lost(exc)

    def _close_flooded(self) -> None:
        """Close with the reason and discard further input until the client has closed too: a socket closed
        with unread bytes is reset, and the client would not get the reason."""
        self._flooded = True
        self._unread.clear()
        code, reason = TOO_MANY_FRAMES
        if not self.close_sent:
            self.stop_keepalive()
            self.conn.fail(code, reason)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.write_eof()
            self.close_sent = True
            self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.resume_reading()
        self.close_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)


def _refusal() -> bytes:
    problem = Problem(400, "bad_upgrade", "the request does not open a WebSocket")
    body = msgspec.json.encode(problem.body())
    head = f"HTTP/1.1 400 {HTTPStatus.BAD_REQUEST.phrase}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
