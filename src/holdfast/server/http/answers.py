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
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from holdfast.server.http.body_writer import BodyWriter, writer_of
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.link.marks import clock, marks
from holdfast.server.link.turn_feed import TurnFeed, spoken

__all__ = [
    "FeedAnswer",
    "KeepAlive",
    "Pieces",
    "StreamAnswer",
    "TurnAnswer",
    "TurnForm",
    "event",
    "json_answer",
    "turn_pieces",
]

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
        """The beginning, before all output."""

    def delta(self, place: int, delta: wire.Delta) -> bytes:
        """Output of the turn at `place`; empty if it shows nothing."""

    def end(self, place: int, end: wire.End) -> bytes | Awaitable[bytes]:
        """The end of a turn, awaited if it takes long to write; raises if it fails the whole answer."""

    def closing(self) -> bytes:
        """The end, after all turns."""


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
    """State shared by the pens of one answer. While `held`, the reader writes and no pen overtakes it."""

    __slots__ = ("_marks", "held", "writer")

    def __init__(self, writer: BodyWriter) -> None:
        self.writer = writer
        self.held = False
        self._marks = marks.get()

    def note_written(self) -> None:
        """Output was handed to the connection."""
        if self._marks is not None and self._marks.heard is not None:
            self._marks.written, self._marks = clock(), None


class KeepAlive(NamedTuple):
    """The keep-alive of an answer, sent after some silent seconds: proxies close silent connections."""

    piece: bytes
    seconds: float


class _Pulse:
    """Writes the keep-alive of one answer, if nothing was written since the timer last ran."""

    def __init__(self, keep_alive: KeepAlive, writer: BodyWriter | None, send: Send) -> None:
        self._piece = keep_alive.piece
        self._seconds = keep_alive.seconds
        self._writer = writer
        self._send = send
        self._seen = 0
        self._sending: asyncio.Future[None] | None = None
        self.sent = 0
        """Pieces that were sent to the server instead of the writer."""
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._look)

    def _look(self) -> None:
        writer = self._writer
        written = self.sent + (0 if writer is None else writer.written)
        if written == self._seen and writer is None:
            if self._sending is None or self._sending.done():
                self._sending = asyncio.ensure_future(self._send(_more(self._piece)))
        elif written == self._seen and writer is not None and writer.ready:
            writer.write(self._piece)
            written += 1
        self._seen = written
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._look)

    def stop(self) -> None:
        """Write no more."""
        self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()


Pieces = Callable[[BodyWriter | None], AsyncIterator[bytes]]
"""Makes what is sent of an answer; it may write by itself while its reader waits for the next piece."""


class StreamAnswer(_Watched):
    """Sends pieces as they come, then the closing. A problem on the way becomes a last event."""

    def __init__(
        self,
        pieces: Pieces,
        leave: Callable[[], None],
        failure: Callable[[Problem], bytes],
        closing: Callable[[], bytes] = bytes,
        keep_alive: KeepAlive | None = None,
    ) -> None:
        async def work(scope: Scope, _receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
            writer = writer_of(scope)
            pulse = None if keep_alive is None else _Pulse(keep_alive, writer, send)
            try:
                async for piece in pieces(writer):
                    await send(_more(piece))
                    if pulse is not None:
                        pulse.sent += 1
                last = closing()
            except Problem as problem:
                leave()
                last = failure(problem)
            finally:
                if pulse is not None:
                    pulse.stop()
            await send({"type": "http.response.body", "body": last, "more_body": False})

        super().__init__(work, leave)


class FeedAnswer(StreamAnswer):
    """Turns as server-sent events, each piece written as it comes. A problem becomes a last event."""

    def __init__(
        self,
        feeds: Sequence[TurnFeed],
        form: TurnForm,
        leave: Callable[[], None],
        failure: Callable[[Problem], bytes],
        keep_alive: KeepAlive | None = None,
    ) -> None:
        def pieces(writer: BodyWriter | None) -> AsyncIterator[bytes]:
            return turn_pieces(writer, feeds, form)

        super().__init__(pieces, leave, failure, form.closing, keep_alive)


async def turn_pieces(
    writer: BodyWriter | None, feeds: Sequence[TurnFeed], form: TurnForm
) -> AsyncIterator[bytes]:
    """Output that the pens leave to the reader: for slow clients, and ends."""
    opening = form.opening()
    if opening:
        yield opening
    page = None if writer is None else Page(writer)
    if page is not None:
        for place, feed in enumerate(feeds):
            feed.write_with(FormPen(page, form, place))
    try:
        async for place, delta in spoken(feeds):
            if page is not None:
                page.held = True
            piece = form.delta(place, delta) if delta is not None else await _ended(form, place, feeds[place])
            if piece:
                yield piece
            if page is not None:
                if delta is not None:
                    page.note_written()
                page.held = False
    finally:
        if page is not None:
            page.held = True


async def _ended(form: TurnForm, place: int, feed: TurnFeed) -> bytes:
    """The end of a turn."""
    assert feed.end is not None, "a turn that says no more has ended"
    written = form.end(place, feed.end)
    return written if isinstance(written, bytes) else await written


def _more(piece: bytes) -> Message:
    return {"type": "http.response.body", "body": piece, "more_body": True}
