"""The API process's end of the wire: calls that are answered, and turns that speak.

    link.call(command)   -> the engine's `Done`, or the `Problem` that it declined with
    link.start(commands) -> a `TurnFeed` for each: deltas as they come, then the one end

What a call must change here is done by its `heard` and its `over`, in the order in which the engine tells
things: whoever waits for the call goes on later, when more may have been heard, or is gone itself.

A feed never holds the engine up: what its reader has not taken yet is joined into one delta, and no turn says
more than its limit. When the engine process is lost, every call and every turn in flight hears of it. All
methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from typing import NamedTuple

from holdfast.core.turn import KEEP_ALL
from holdfast.server.http.problems import Problem, engine_lost, engine_unavailable, from_refusal
from holdfast.server.link import wire

__all__ = ["EngineLink", "LoopTime", "TurnFeed", "spoken", "traceparent"]

log = logging.getLogger("holdfast.server")

traceparent: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""The trace that the request at hand belongs to, as its client named it; set by the gate."""


class TurnFeed:
    """One turn as its reader hears it."""

    __slots__ = (
        "_deltas",
        "_news",
        "accepted",
        "call",
        "end",
        "keeps",
        "lost",
        "name",
        "on_end",
        "replayed",
        "session",
        "traceparent",
    )

    def __init__(self, command: wire.StartTurn, on_end: Callable[[TurnFeed], None]) -> None:
        self.call = command.call
        self.name = command.name
        self.session = command.session
        self.keeps = command.keeps
        self.traceparent = traceparent.get()
        self.end: wire.End | None = None
        self.lost: Problem | None = None
        self.replayed = False
        """Whether it was carried out before, and is only told again."""
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_end = on_end
        self._deltas: list[wire.Delta] = []
        self._news = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether nothing more will come from the engine."""
        return self.end is not None or self.lost is not None

    def listen(self, news: asyncio.Event) -> None:
        """Set `news` whenever something has come."""
        self._news = news

    def take(self) -> wire.Delta | None:
        """All that was said and not taken yet, as one; None if nothing was."""
        if not self._deltas:
            return None
        waiting, self._deltas = self._deltas, []
        return join(waiting)

    def push(self, delta: wire.Delta) -> None:
        """More words."""
        self._deltas.append(delta)
        self._news.set()

    def finish(self, end: wire.End) -> None:
        """The one end."""
        assert not self.over, "a turn ends once"
        self.end = end
        self._news.set()
        self.on_end(self)

    def lose(self, problem: Problem) -> None:
        """The engine is gone, and the turn with it."""
        if not self.over:
            self.lost = problem
            self._news.set()
            self.on_end(self)
            if not self.accepted.done():
                self.accepted.set_exception(problem)
                self.accepted.exception()

    async def deltas(self) -> AsyncIterator[wire.Delta]:
        """What the turn says, joined where the reader is slower than the engine; raises if it is lost."""
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
    """What turns say, as it comes, each with its place; None for the end of one. Raises if one is lost.

    Nothing is taken from a feed before the reader asks for more: what comes meanwhile waits in the feed, and
    is joined. A feed has one reader at a time.
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
    )


class LoopTime(NamedTuple):
    """How often one kind of work held the engine's loop, in buckets of time, and for how long in all."""

    counts: list[int]
    seconds: float


class Pending(NamedTuple):
    """A call that the engine has not answered."""

    future: asyncio.Future[wire.Done]
    heard: Callable[[wire.Done], None]
    over: Callable[[], None]


class EngineLink:
    """Numbers calls, and brings each answer to who waits for it.

    `send` is given by the supervisor while an engine process is there, and is None otherwise.
    """

    def __init__(self) -> None:
        self.send: Callable[[wire.Command], None] | None = None
        self.pulse: wire.Pulse | None = None
        self._counted_before: Counter[str] = Counter()
        """What engine processes that are gone had counted."""
        self._held_before: dict[str, LoopTime] = {}
        """What held their loops."""
        self.on_view: Callable[[wire.SessionView], None] = _nobody
        self.on_gone: Callable[[str, str], None] = _nobody
        self.on_end: Callable[[TurnFeed], None] = _nobody
        self._numbers = itertools.count(1)
        self._calls: dict[int, Pending] = {}
        self._feeds: dict[int, TurnFeed] = {}

    @property
    def turns(self) -> int:
        """Turns in flight."""
        return len(self._feeds)

    def totals(self) -> Counter[str]:
        """What the engine has counted, and those before it: figures that never go down."""
        return self._counted_before + _counted(self.pulse)

    def loop_times(self) -> dict[str, LoopTime]:
        """What held the engine's loop between steps, and the loops of those before it, by kind of work."""
        return _joined(self._held_before, _held(self.pulse))

    def number(self) -> int:
        """The number of the next call."""
        return next(self._numbers)

    async def call(
        self,
        command: wire.Command,
        number: int,
        heard: Callable[[wire.Done], None] | None = None,
        over: Callable[[], None] | None = None,
    ) -> wire.Done:
        """Send a command and wait for its answer; a refusal is raised as a `Problem`.

        `heard` is called the moment that the engine says it is done, even if nobody waits for it any more. So
        is `over`, after it; also when the call is declined or lost, or cannot be sent.
        """
        future: asyncio.Future[wire.Done] = asyncio.get_running_loop().create_future()
        pending = Pending(future, heard or _nobody, over or _nobody)
        try:
            self._send(command)
        except BaseException:
            pending.over()
            raise
        self._calls[number] = pending
        return await future

    async def start(self, commands: Sequence[wire.StartTurn]) -> list[TurnFeed]:
        """Start all turns of a request, or none; returns when the engine has accepted them.

        All commands are sent before the first answer is awaited, so that the engine can begin the turns in
        one step. Where one is declined the others are ended, and the first refusal is raised.
        """
        feeds: list[TurnFeed] = []
        try:
            for command in commands:
                feed = self._feeds[command.call] = TurnFeed(command, self.on_end)
                feeds.append(feed)
                self._send(command)
            await asyncio.gather(*(feed.accepted for feed in feeds), return_exceptions=True)
            for feed in feeds:
                feed.accepted.result()
        except BaseException as error:
            refused = isinstance(error, Problem)
            self._take_back(feeds, "another choice was refused" if refused else "the client went away")
            raise
        return feeds

    def _take_back(self, feeds: list[TurnFeed], reason: str) -> None:
        """End turns that nobody will hear; what the engine accepts later must not go on either."""
        for feed in feeds:
            if feed.accepted.done() and not feed.accepted.cancelled() and feed.accepted.exception() is None:
                self.end(feed, None, reason)
            elif self._feeds.pop(feed.call, None) is not None and self.send is not None:
                self.send(wire.EndTurn(feed.call, None, reason))

    def end(self, feed: TurnFeed, keep: int | None, reason: str) -> None:
        """Stop a turn; its end comes as for any other."""
        if not feed.over and self.send is not None:
            self.send(wire.EndTurn(feed.call, keep, reason))

    def end_all(self, reason: str) -> None:
        """Stop every turn in flight, whoever waits for it, each by its own policy."""
        for feed in list(self._feeds.values()):
            self.end(feed, KEEP_ALL if feed.keeps else None, reason)

    def _send(self, command: wire.Command) -> None:
        if self.send is None:
            raise engine_unavailable()
        self.send(command)

    # --- what the engine says ---------------------------------------------------------------------

    def hear(self, report: wire.Report) -> None:
        """One message from the engine process."""
        match report:
            case wire.Step():
                self._step(report)
            case wire.Done():
                if report.view is not None:
                    self.on_view(report.view)
                self._done(report)
            case wire.Declined():
                if report.view is not None:
                    self.on_view(report.view)
                self._declined(report)
            case wire.Pulse():
                self.pulse = report
            case wire.Progress() | wire.Ready() | wire.Unable():
                raise AssertionError("these are the supervisor's own")

    def _step(self, step: wire.Step) -> None:
        for delta in step.deltas:
            feed = self._feeds.get(delta.turn)
            if feed is not None:
                feed.push(delta)
        for end in step.ends:
            if end.view is not None:
                self.on_view(end.view)
            feed = self._feeds.pop(end.turn, None)
            if feed is not None:
                feed.finish(end)
        for session, reason in step.gone:
            self.on_gone(session, reason)

    def _done(self, done: wire.Done) -> None:
        feed = self._feeds.get(done.call)
        if feed is not None:
            feed.replayed = done.replayed
            if not feed.accepted.done():
                feed.accepted.set_result(None)
            return
        if done.call not in self._calls:
            return  # A turn that nobody waits for any more.
        pending = self._calls.pop(done.call)
        pending.heard(done)
        pending.over()
        if not pending.future.done():
            pending.future.set_result(done)

    def _declined(self, declined: wire.Declined) -> None:
        problem = from_refusal(declined.code, declined.message, declined.param)
        waiting: asyncio.Future[None] | asyncio.Future[wire.Done]
        if declined.call in self._calls:
            pending = self._calls.pop(declined.call)
            pending.over()
            waiting = pending.future
        elif declined.call in self._feeds:
            waiting = self._feeds.pop(declined.call).accepted
        else:
            return  # A turn that nobody waits for any more.
        if not waiting.done():
            waiting.set_exception(problem)

    def lose(self) -> None:
        """The engine process is gone: everyone who waits hears of it."""
        self.send = None
        self._counted_before += _counted(self.pulse)
        self._held_before = self.loop_times()
        self.pulse = None
        feeds, self._feeds = self._feeds, {}
        for feed in feeds.values():
            feed.lose(engine_lost())
        calls, self._calls = self._calls, {}
        for pending in calls.values():
            pending.over()
            if not pending.future.done():
                pending.future.set_exception(engine_lost())


def _counted(pulse: wire.Pulse | None) -> Counter[str]:
    """What one engine process has counted so far."""
    if pulse is None:
        return Counter()
    return Counter({**pulse.counters, "steps": pulse.step, "audit_findings": pulse.findings})


def _held(pulse: wire.Pulse | None) -> dict[str, LoopTime]:
    """What held the loop of one engine process so far."""
    if pulse is None:
        return {}
    return {work: LoopTime(counts, pulse.loop_seconds[work]) for work, counts in pulse.loop_counts.items()}


def _joined(before: dict[str, LoopTime], now: dict[str, LoopTime]) -> dict[str, LoopTime]:
    """The times of two processes together."""
    joined = dict(before)
    for work, time in now.items():
        known = joined.get(work)
        if known is not None:
            counts = [one + other for one, other in zip(known.counts, time.counts, strict=True)]
            time = LoopTime(counts, known.seconds + time.seconds)
        joined[work] = time
    return joined


def _nobody(*_: object) -> None:
    """Nobody listens."""
