"""Responses that watch for a disconnect: when the client disconnects, its turns end within a step.

`json_answer` encodes a value. `TurnAnswer` waits for turns and answers once; `StreamAnswer` sends an
iterator's output as server-sent events. Both call `leave` when the client disconnects, or when a problem ends
the answer before its turns. Backpressure of a slow reader slows its own answer, never the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.server.http.problems import Problem
from holdfast.server.link.marks import clock, marks

__all__ = ["StreamAnswer", "TurnAnswer", "event", "json_answer"]

_encoder = msgspec.json.Encoder()

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value as JSON."""
    return Response(_encoder.encode(value), status, headers, media_type="application/json")


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _encoder.encode(value) + b"\n\n"


Work = Callable[[Scope, Receive, Send], Awaitable[None]]


class _Watched(Response):
    """Runs an answer while watching for a disconnect."""

    def __init__(self, work: Work, leave: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(scope, receive, send))
        watch = asyncio.ensure_future(self._watch(receive))
        try:
            done, _ = await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except BaseException:
            self._leave()
            raise
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    async def _watch(self, receive: Receive) -> None:
        """Leave as soon as the client disconnects."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._leave()


class TurnAnswer(_Watched):
    """Waits for a result, then answers with it."""

    def __init__(self, result: Awaitable[Response], leave: Callable[[], None]) -> None:
        async def work(scope: Scope, receive: Receive, send: Send) -> None:
            response = await result
            await response(scope, receive, send)

        super().__init__(work, leave)


class StreamAnswer(_Watched):
    """Sends chunks as they come. A problem on the way becomes a last event."""

    def __init__(
        self, chunks: AsyncIterator[bytes], leave: Callable[[], None], failure: Callable[[Problem], bytes]
    ) -> None:
        async def work(_scope: Scope, _receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
            noted = marks.get()
            try:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    if noted is not None and noted.heard is not None:
                        noted.written, noted = clock(), None
            except Problem as problem:
                leave()
                await send({"type": "http.response.body", "body": failure(problem), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        super().__init__(work, leave)
