"""The API process's client of the engine process: calls that are answered, and turns that are streamed.

    client.call(command)   -> the engine's `Done`, or the `Problem` that it declined with
    client.start(commands) -> a `TurnFeed` for each: deltas as they come, then the one end

State of the API process that depends on a call is changed by its `heard` and `over` callbacks, in the order
of the engine's reports: the coroutine that awaits the call runs later, or was cancelled.

A slow reader causes no backpressure on the engine: deltas that it has not taken are joined into one, and a
turn's output is bounded by its limit. When the engine process is lost, every call and every turn in flight
fails. All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from holdfast.core.turn import KEEP_ALL
from holdfast.server.http.problems import Problem, engine_lost, engine_unavailable, from_refusal
from holdfast.server.link import wire

__all__ = ["EngineClient", "EngineObserver", "LoopTime", "TurnFeed", "spoken", "traceparent"]

log = logging.getLogger("holdfast.server")

traceparent: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""The trace context of the current request, from its client; set by the gate."""


class TurnFeed:
    """One turn as its reader receives it."""

    __slots__ = (
        "_deltas",
        "_news",
        "_on_end",
        "accepted",
        "call",
        "end",
        "keeps",
        "lost",
        "name",
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
        """Whether the turn was carried out before, and its result is repeated."""
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_end = on_end
        self._deltas: list[wire.Delta] = []
        self._news = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether nothing more will come from the engine."""
        return self.end is not None or self.lost is not None

    def listen(self, news: asyncio.Event) -> None:
        """Set `news` whenever something has come."""
        self._news = news

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
    )


class LoopTime(NamedTuple):
    """How often the loop did one kind of work between steps, in buckets of time, and the total time."""

    counts: list[int]
    seconds: float


class Pending(NamedTuple):
    """A call that the engine has not answered."""

    future: asyncio.Future[wire.Done]
    heard: Callable[[wire.Done], None]
    over: Callable[[], None]


class EngineObserver(Protocol):
    """Hears of sessions, turns and engine processes, in the order of the engine's reports."""

    def session_seen(self, view: wire.SessionView) -> None:
        """A report carried the view of a session."""

    def session_gone(self, session: str, reason: str) -> None:
        """A session was closed, or has expired."""

    def turn_ended(self, feed: TurnFeed) -> None:
        """A turn has had its end, or was lost."""

    def engine_ready(self, ready: wire.Ready) -> None:
        """An engine process serves."""

    def engine_lost(self) -> None:
        """An engine process that served has ended."""


class EngineClient:
    """Numbers calls, and brings each answer to the coroutine that awaits it.

    The supervisor connects it to each engine process, and disconnects it with `lose`.
    """

    def __init__(self, observer: EngineObserver) -> None:
        self._observer = observer
        self._post: Callable[[wire.Command], None] | None = None
        self.pulse: wire.Pulse | None = None
        self._counted_before: Counter[str] = Counter()
        """The counters of engine processes that have ended."""
        self._held_before: dict[str, LoopTime] = {}
        """The times of their loops."""
        self._numbers = itertools.count(1)
        self._calls: dict[int, Pending] = {}
        self._feeds: dict[int, TurnFeed] = {}

    def connect(self, post: Callable[[wire.Command], None]) -> None:
        """An engine process serves; `post` sends it a command."""
        self._post = post

    @property
    def connected(self) -> bool:
        """Whether an engine process serves."""
        return self._post is not None

    def send(self, command: wire.Command) -> bool:
        """Send a command; False if no engine process serves."""
        if self._post is None:
            return False
        self._post(command)
        return True

    @property
    def turns(self) -> int:
        """Turns in flight."""
        return len(self._feeds)

    def totals(self) -> Counter[str]:
        """The counters of this engine process and of those before it: they never go down."""
        return self._counted_before + _counted(self.pulse)

    def loop_times(self) -> dict[str, LoopTime]:
        """How long work between steps took, of this engine process and those before it, by kind of work."""
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

        `heard` is called when the engine's `Done` arrives, even if the coroutine was cancelled. `over` is
        called after it; also when the call is declined or lost, or cannot be sent.
        """
        future: asyncio.Future[wire.Done] = asyncio.get_running_loop().create_future()
        pending = Pending(future, heard or _ignore, over or _ignore)
        try:
            if not self.send(command):
                raise engine_unavailable()
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
                feed = self._feeds[command.call] = TurnFeed(command, self._observer.turn_ended)
                feeds.append(feed)
                if not self.send(command):
                    raise engine_unavailable()
            await asyncio.gather(*(feed.accepted for feed in feeds), return_exceptions=True)
            for feed in feeds:
                feed.accepted.result()
        except BaseException as error:
            refused = isinstance(error, Problem)
            self._take_back(feeds, "another choice was refused" if refused else "the client went away")
            raise
        return feeds

    def _take_back(self, feeds: list[TurnFeed], reason: str) -> None:
        """Abort turns of a request that failed, those included that the engine has not accepted yet."""
        for feed in feeds:
            if feed.accepted.done() and not feed.accepted.cancelled() and feed.accepted.exception() is None:
                self.end(feed, None, reason)
            elif self._feeds.pop(feed.call, None) is not None:
                self.send(wire.EndTurn(feed.call, None, reason))

    def end(self, feed: TurnFeed, keep: int | None, reason: str) -> None:
        """Abort a turn; its end comes as for any other."""
        if not feed.over:
            self.send(wire.EndTurn(feed.call, keep, reason))

    def end_all(self, reason: str) -> None:
        """Abort every turn in flight, each by its own policy."""
        for feed in list(self._feeds.values()):
            self.end(feed, KEEP_ALL if feed.keeps else None, reason)

    # --- what the engine reports ---------------------------------------------------------------------

    def hear(self, report: wire.Report) -> None:
        """One message from the engine process."""
        match report:
            case wire.Step():
                self._step(report)
            case wire.Done():
                if report.view is not None:
                    self._observer.session_seen(report.view)
                self._done(report)
            case wire.Declined():
                if report.view is not None:
                    self._observer.session_seen(report.view)
                self._declined(report)
            case wire.Pulse():
                self.pulse = report
            case wire.Ready():
                self._observer.engine_ready(report)
            case wire.Progress() | wire.Unable():
                raise AssertionError("the supervisor handles these itself")

    def _step(self, step: wire.Step) -> None:
        for delta in step.deltas:
            feed = self._feeds.get(delta.turn)
            if feed is not None:
                feed.push(delta)
        for end in step.ends:
            if end.view is not None:
                self._observer.session_seen(end.view)
            feed = self._feeds.pop(end.turn, None)
            if feed is not None:
                feed.finish(end)
        for session, reason in step.gone:
            self._observer.session_gone(session, reason)

    def _done(self, done: wire.Done) -> None:
        feed = self._feeds.get(done.call)
        if feed is not None:
            feed.accept(done.replayed)
            return
        if done.call not in self._calls:
            return  # A turn that was taken back.
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
            return  # A turn that was taken back.
        if not waiting.done():
            waiting.set_exception(problem)

    def lose(self) -> None:
        """The engine process has ended: fail every call and turn."""
        served, self._post = self.connected, None
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
        if served:
            self._observer.engine_lost()


def _counted(pulse: wire.Pulse | None) -> Counter[str]:
    """The counters of one engine process."""
    if pulse is None:
        return Counter()
    return Counter({**pulse.counters, "steps": pulse.step, "audit_findings": pulse.findings})


def _held(pulse: wire.Pulse | None) -> dict[str, LoopTime]:
    """The loop times of one engine process."""
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


def _ignore(*_: object) -> None:
    """A callback that does nothing."""
