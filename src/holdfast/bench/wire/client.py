"""A client of bare sockets: it reads no JSON, so that it takes little of the time that is measured.

One connection holds one stream. Output is recognised by the names of its events; a turn's tokens are counted
in the usage of its last event.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from typing import Any

from holdfast.bench.wire.load import TurnSample

__all__ = ["Stream", "StreamError"]

DELTA = b"event: delta"
END_OF_BODY = b"\r\n0\r\n\r\n"
_COMPLETION = re.compile(rb'"completion_tokens":(\d+)')
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
HEAD_END = b"\r\n\r\n"
ACCEPTED, BUSY = b"HTTP/1.1 20", b"HTTP/1.1 409"
RETRY_SECONDS = 0.0005


class StreamError(RuntimeError):
    """The server answered with something else than a stream."""


class Stream(asyncio.Protocol):
    """One connection to the server; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._host = ""
        self._received = bytearray()
        self._streams = False
        self._deltas_wanted = 0
        self._deltas = 0
        self._first = self._last = self._pause = 0.0
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, address: tuple[str, int]) -> Stream:
        """A new connection."""
        _, made = await asyncio.get_running_loop().create_connection(cls, *address)
        made._host = f"{address[0]}:{address[1]}"
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(exc or StreamError("the server closed the connection"))
            self._done.exception()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._streams or not self._received.startswith(ACCEPTED):
            head = self._received.find(HEAD_END)
            length = _LENGTH.search(self._received, 0, head) if head >= 0 else None
            if length is not None and len(self._received) >= head + 4 + int(length[1]):
                self._finish()
            return
        found = data.count(DELTA)
        if found:
            now = time.perf_counter()
            if self._first:
                self._pause = max(self._pause, now - self._last)
            else:
                self._first = now
            self._last = now
            self._deltas += found
        if self._received.endswith(END_OF_BODY) or 0 < self._deltas_wanted <= self._deltas:
            self._finish()

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def _send(self, path: str, body: Any, streams: bool, method: str = "POST") -> None:
        assert self._transport is not None, "the stream is connected"
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        self._received.clear()
        self._streams, self._deltas, self._first, self._pause = streams, 0, 0.0, 0.0
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)

    async def ask(self, path: str, body: Any = None, method: str = "POST") -> None:
        """A request that is answered with one object."""
        self._deltas_wanted = 0
        self._send(path, body, streams=False, method=method)
        await self._done
        self._require_status()

    async def turn(self, session: str, tokens: Sequence[int], wanted: int, cut: int = 0) -> TurnSample:
        """A streamed turn: to its end, or until `cut` pieces of output have come.

        The time includes attempts that were refused because the turn before is still in flight.
        """
        body = {
            "input": list(tokens),
            "stream": True,
            "sampling": {"max_tokens": wanted, "ignore_eos": True, "temperature": 0.0},
        }
        self._deltas_wanted = cut
        began = time.perf_counter()
        while True:
            self._send(f"/v1/sessions/{session}/turns", body, streams=True)
            await self._done
            if not self._received.startswith(BUSY):
                break
            await asyncio.sleep(RETRY_SECONDS)  # The server has not heard of the disconnect yet.
        total = time.perf_counter() - began
        self._require_status()
        counted = _COMPLETION.findall(self._received)
        if not cut and not counted:
            raise StreamError(f"a turn did not finish: {bytes(self._received[-300:])!r}")
        return TurnSample(self._first - began, total, int(counted[-1]) if counted else 0, self._pause)

    def _require_status(self) -> None:
        if not self._received.startswith(ACCEPTED):
            raise StreamError(bytes(self._received[:500]).decode(errors="replace"))

    def close(self) -> None:
        """Disconnect; a turn in flight is aborted by the server."""
        if self._transport is not None:
            self._transport.close()
