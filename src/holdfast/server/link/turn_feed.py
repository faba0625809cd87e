"""One turn as the API process receives it: deltas as they come, joined for a slow reader, then the one end.

A slow reader causes no backpressure on the engine: deltas that it has not taken are joined into one, and a
turn's output is bounded by its limit. All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from typing import Protocol

from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.link.marks import clock, marks

__all__ = ["Pen", "TurnFeed", "join", "spoken", "traceparent"]

traceparent: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""The trace context of the current request, from its client; set by the gate."""

PIECES = frozenset({wire.Part.TEXT, wire.Part.REASONING, wire.Part.ARGUMENTS})
"""Parts of an answer that come in pieces."""


class Pen(Protocol):
    """Writes output of a turn at once, where it can."""

    def write(self, delta: wire.Delta) -> bool:
        """Write output; False if that cannot be done now. Never raises."""


class TurnFeed:
    """One turn as its reader receives it."""

    __slots__ = (
        "_deltas",
        "_news",
        "_on_end",
        "_pen",
        "accepted",
        "call",
        "end",
        "keeps",
        "lost",
        "marks",
        "name",
        "reads",
        "replayed",
        "session",
        "traceparent",
    )

    def __init__(self, command: wire.StartTurn, on_end: Callable[[TurnFeed], None]) -> None:
        self.call = command.call
        self.name = command.name
        self.session = command.session
        self.keeps = command.keeps
        self.reads = command.answer is not None
        """Whether its answer is read for reasoning and tool calls."""
        self.traceparent = traceparent.get()
        self.marks = marks.get()
        """When its request passed each point; turns of one request share them."""
        if self.marks is not None and self.marks.posted is None:
            self.marks.posted = clock()
        self.end: wire.End | None = None
        self.lost: Problem | None = None
        self.replayed = False
        """Whether the turn was carried out before, and its result is repeated."""
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_end = on_end
        self._deltas: list[wire.Delta] = []
        self._pen: Pen | None = None
        self._news = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether nothing more will come from the engine."""
        return self.end is not None or self.lost is not None

    def listen(self, news: asyncio.Event) -> None:
        """Set `news` whenever something has come."""
        self._news = news

    def write_with(self, pen: Pen) -> None:
        """Give output to `pen` as it comes; the reader gets what the pen does not take, and the end."""
        self._pen = pen

    def accept(self, replayed: bool) -> None:
        """The engine has accepted the turn."""
        self.replayed = replayed
        if not self.accepted.done():
            self.accepted.set_result(None)

    def take(self) -> wire.Delta | None:
        """All output that was not taken yet, as one delta; None if there is none."""
        if not self._deltas:
            return None
        waiting, self._deltas = self._deltas, []
        return join(waiting)

    def push(self, delta: wire.Delta) -> None:
        """More output."""
        # Only the first delta of a turn has its prompt.
        if delta.prompt is not None and self.marks is not None and self.marks.heard is None:
            self.marks.heard = clock()
        if self._pen is not None and not self._deltas and self._pen.write(delta):
            return
        self._deltas.append(delta)
        self._news.set()

    def finish(self, end: wire.End) -> None:
        """The one end."""
        assert not self.over, "a turn ends once"
        self.end = end
        self._news.set()
        self._on_end(self)

    def lose(self, problem: Problem) -> None:
        """The engine process is lost, and the turn with it."""
        if not self.over:
            self.lost = problem
            self._news.set()
            self._on_end(self)
            if not self.accepted.done():
                self.accepted.set_exception(problem)
                self.accepted.exception()

    async def deltas(self) -> AsyncIterator[wire.Delta]:
        """The turn's output, joined where the reader is slower than the engine; raises if it is lost."""
        async for _, delta in spoken([self]):
            if delta is not None:
                yield delta

    async def result(self) -> wire.End:
        """The end of the turn; raises if it is lost."""
        async for _ in self.deltas():
            pass
        assert self.end is not None
        return self.end


async def spoken(feeds: Sequence[TurnFeed]) -> AsyncIterator[tuple[int, wire.Delta | None]]:
    """The output of turns as it comes, with the index of the turn; None for its end. Raises if one is lost.

    Nothing is taken from a feed before the reader asks for more: output waits in the feed, and is joined. A
    feed has one reader at a time.
    """
    news = asyncio.Event()
    for feed in feeds:
        feed.listen(news)
    speaking = list(range(len(feeds)))
    while speaking:
        news.clear()
        silent = set()
        for place in speaking:
            feed = feeds[place]
            delta = feed.take()
            if delta is not None:
                yield place, delta
                news.set()  # More may have come, or its end, while this was read.
            elif feed.lost is not None:
                raise feed.lost
            elif feed.end is not None:
                silent.add(place)
                yield place, None
        if silent:
            speaking = [place for place in speaking if place not in silent]
        if speaking:
            await news.wait()


def join(deltas: list[wire.Delta]) -> wire.Delta:
    """Several deltas of one turn as one."""
    if len(deltas) == 1:
        return deltas[0]
    first = deltas[0]
    logprobs = None
    if first.logprobs is not None:
        logprobs = [entry for delta in deltas for entry in delta.logprobs or []]
    return wire.Delta(
        first.turn,
        first.index,
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.tokens],
        logprobs,
        first.prompt,
        joined_events(deltas),
        deltas[-1].settled,
    )


def joined_events(deltas: list[wire.Delta]) -> list[wire.AnswerEvent] | None:
    """The events of several deltas; adjacent pieces of the same part and call become one.

    None if none of the deltas was read for reasoning and calls.
    """
    if all(delta.events is None for delta in deltas):
        return None
    runs: list[list[wire.AnswerEvent]] = []
    for delta in deltas:
        for event in delta.events or ():
            if runs and event.part in PIECES and (event.part, event.index) == _place(runs[-1][0]):
                runs[-1].append(event)
            else:
                runs.append([event])
    return [
        run[0]
        if len(run) == 1
        else wire.AnswerEvent(run[0].part, "".join(event.text for event in run), run[0].index)
        for run in runs
    ]


def _place(event: wire.AnswerEvent) -> tuple[wire.Part, int]:
    return event.part, event.index
