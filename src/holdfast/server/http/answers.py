"""Responses that watch for a disconnect: when the client disconnects, its turns end within a step.

`json_answer` encodes a value. `TurnAnswer` waits for turns and answers once; `StreamAnswer` sends an
iterator's output as server-sent events. `FeedAnswer` writes the output of turns in the form of a
dialect, without a task for each piece. All call `leave` when the client disconnects, or when a problem ends
the answer before its turns. Backpressure of a slow reader slows its own answer, never the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.server.http.body_writer import BodyWriter, writer_of
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.link.marks import clock, marks
from holdfast.server.link.turn_feed import TurnFeed, spoken

__all__ = ["FeedAnswer", "StreamAnswer", "TurnAnswer", "TurnForm", "event", "json_answer", "turn_pieces"]

log = logging.getLogger("holdfast.server")

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


class TurnForm(Protocol):
    """How a dialect writes the turns of one request as server-sent events."""

    def opening(self) -> bytes:
        """What comes before all output."""

    def delta(self, place: int, delta: wire.Delta) -> bytes:
        """Output of the turn at `place`; empty if it shows nothing."""

    def end(self, place: int, end: wire.End) -> bytes:
        """The end of a turn; raises if it fails the whole answer."""

    def closing(self) -> bytes:
        """What comes after all turns."""


class FormPen:
    """Writes the output of one turn to the connection, in the loop's callback that received it."""

    __slots__ = ("_form", "_page", "_place")

    def __init__(self, page: Page, form: TurnForm, place: int) -> None:
        self._page = page
        self._form = form
        self._place = place

    def write(self, delta: wire.Delta) -> bool:
        """Write output; False if the reader must, because the client is slow or the form fails."""
        page = self._page
        if page.held or not page.writer.ready:
            return False
        try:
            piece = self._form.delta(self._place, delta)
        except Exception:
            log.exception("output of a turn cannot be written")
            return False
        if piece:
            page.writer.write(piece)
            page.note_written()
        return True


class Page:
    """What the pens of one answer share. While it is `held` the reader writes, and no pen overtakes it."""

    __slots__ = ("_marks", "held", "writer")

    def __init__(self, writer: BodyWriter) -> None:
        self.writer = writer
        self.held = False
        self._marks = marks.get()

    def note_written(self) -> None:
        """Output was handed to the connection."""
        if self._marks is not None and self._marks.heard is not None:
            self._marks.written, self._marks = clock(), None


class FeedAnswer(_Watched):
    """Turns as server-sent events, each piece written as it comes. A problem becomes a last event."""

    def __init__(
        self,
        feeds: Sequence[TurnFeed],
        form: TurnForm,
        leave: Callable[[], None],
        failure: Callable[[Problem], bytes],
    ) -> None:
        async def work(scope: Scope, _receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
            closing = b""
            try:
                async for piece in turn_pieces(scope, feeds, form):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                closing = form.closing()
            except Problem as problem:
                leave()
                closing = failure(problem)
            await send({"type": "http.response.body", "body": closing, "more_body": False})

        super().__init__(work, leave)


async def turn_pieces(scope: Scope, feeds: Sequence[TurnFeed], form: TurnForm) -> AsyncIterator[bytes]:
    """What the pens leave to the reader: output that a client was too slow for, and ends."""
    opening = form.opening()
    if opening:
        yield opening
    writer = writer_of(scope)
    page = None if writer is None else Page(writer)
    if page is not None:
        for place, feed in enumerate(feeds):
            feed.write_with(FormPen(page, form, place))
    try:
        async for place, delta in spoken(feeds):
            if page is not None:
                page.held = True
            end = feeds[place].end
            assert delta is not None or end is not None, "a turn that says no more has ended"
            piece = form.delta(place, delta) if delta is not None else form.end(place, end)  # type: ignore[arg-type]
            if piece:
                yield piece
            if page is not None:
                if delta is not None:
                    page.note_written()
                page.held = False
    finally:
        if page is not None:
            page.held = True


class StreamAnswer(_Watched):
    """Sends chunks as they come. A problem on the way becomes a last event."""

    def __init__(
        self, chunks: AsyncIterator[bytes], leave: Callable[[], None], failure: Callable[[Problem], bytes]
    ) -> None:
        async def work(_scope: Scope, _receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
            try:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Problem as problem:
                leave()
                await send({"type": "http.response.body", "body": failure(problem), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        super().__init__(work, leave)
