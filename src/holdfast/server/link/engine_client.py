"""The API process's client of the engine process: calls that are answered, and turns that are streamed.

    client.call(command)   -> the engine's `Done`, or the `Problem` that it declined with
    client.start(commands) -> a `TurnFeed` for each: deltas as they come, then the one end

State of the API process that depends on a call is changed by its `heard` and `over` callbacks, in the order
of the engine's reports: the coroutine that awaits the call runs later, or was cancelled.

When the engine process is lost, every call and every turn in flight fails. All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from holdfast.core.turn import KEEP_ALL
from holdfast.server.http.problems import Problem, engine_lost, engine_unavailable, from_refusal
from holdfast.server.link import wire
from holdfast.server.link.turn_feed import TurnFeed, join, spoken, traceparent

__all__ = [
    "EngineClient",
    "EngineObserver",
    "GiveUp",
    "Link",
    "LoopTime",
    "TurnFeed",
    "join",
    "joined_times",
    "spoken",
    "traceparent",
]

log = logging.getLogger("holdfast.server")


class LoopTime(NamedTuple):
    """How often the loop did one kind of work between steps, in buckets of time, and the total time."""

    counts: list[int]
    seconds: float


class Pending(NamedTuple):
    """A call that the engine has not answered."""

    future: asyncio.Future[wire.Done]
    heard: Callable[[wire.Done], None]
    over: Callable[[], None]


GiveUp = Callable[[int, list[tuple[int, str]]], None]
"""Takes the number of a session's last realtime message, 0 if there is none, and those that were kept."""


class EngineObserver(Protocol):
    """Hears of sessions, turns and engine processes, in the order of the engine's reports."""

    def session_seen(self, view: wire.SessionView) -> None:
        """A report carried the view of a session."""

    def session_gone(self, session: str, reason: str) -> None:
        """A session was closed, or has expired."""

    def session_stored(self, stored: wire.StoredSession) -> None:
        """Another API process has opened or changed a session."""

    def session_taken_up(self, session: str, give: GiveUp, /) -> None:
        """Another API process has the realtime client of a session now: `give` it what is kept here."""

    def turn_ended(self, feed: TurnFeed) -> None:
        """A turn has had its end, or was lost."""

    def engine_ready(self, ready: wire.Ready) -> None:
        """An engine process serves."""

    def engine_lost(self) -> None:
        """An engine process that served has ended."""


class Link(Protocol):
    """Commands to an engine, or to those of several engines that they concern."""

    @property
    def pulse(self) -> wire.Pulse | None:
        """The last heartbeat."""

    @property
    def turns(self) -> int:
        """Turns in flight."""

    @property
    def complete(self) -> bool:
        """Whether all engines can be asked for a session now."""

    @property
    def acquainted(self) -> bool:
        """Whether all engines have said which sessions they have, at some time."""

    @property
    def shared(self) -> bool:
        """Whether engines share a journal, and take each other's sessions over."""

    def totals(self) -> Counter[str]:
        """Counters that never go down."""

    def loop_times(self) -> dict[str, LoopTime]:
        """How long work between steps took, by kind of work."""

    def number(self) -> int:
        """The number of the next call."""

    def send(self, command: wire.Command) -> bool:
        """Send a command; False if no engine serves that it could go to."""

    async def call(
        self,
        command: wire.Command,
        number: int,
        heard: Callable[[wire.Done], None] | None = None,
        over: Callable[[], None] | None = None,
    ) -> wire.Done:
        """Send a command and wait for its answer; a refusal is raised as a `Problem`."""

    async def start(self, commands: Sequence[wire.StartTurn]) -> list[TurnFeed]:
        """Start all turns of a request, or none."""

    def end(self, feed: TurnFeed, keep: int | None, reason: str) -> None:
        """Abort a turn."""

    def end_all(self, reason: str) -> None:
        """Abort every turn in flight, each by its own policy."""

    async def finds(self, session: str, /) -> bool:
        """Whether an engine has a session that this process did not know of; the observer has heard of it."""


class EngineClient:
    """Numbers calls, and brings each answer to the coroutine that awaits it.

    The supervisor connects it to each engine process, and disconnects it with `lose`.
    """

    def __init__(
        self,
        observer: EngineObserver,
        numbers: Iterator[int] | None = None,
        lost: Callable[[TurnFeed], Problem] | None = None,
    ) -> None:
        """`numbers` are those of calls; `lost` is the error of a turn whose engine is lost."""
        self._observer = observer
        self.complete = self.acquainted = True
        self.shared = False
        self._lost = lost or _lost
        self._post: Callable[[wire.Command], None] | None = None
        self.pulse: wire.Pulse | None = None
        self._counted_before: Counter[str] = Counter()
        """The counters of engine processes that have ended."""
        self._held_before: dict[str, LoopTime] = {}
        """The times of their loops."""
        self._numbers = itertools.count(1) if numbers is None else numbers
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
        return joined_times(self._held_before, _held(self.pulse))

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

    async def finds(self, _session: str) -> bool:
        """This process knows all sessions of its one engine."""
        return False

    def runs(self, feed: TurnFeed) -> bool:
        """Whether a turn is in flight here."""
        return feed.call in self._feeds

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
            case wire.Elsewhere():
                for view in report.views:
                    self._observer.session_seen(view)
                for stored in report.stored:
                    self._observer.session_stored(stored)
            case wire.GiveMissed(asked=asked):
                self._observer.session_taken_up(report.session, partial(self._give, asked))
            case wire.Progress() | wire.Unable() | wire.Welcome():
                raise AssertionError("the supervisor or the link handles these itself")

    def _give(self, asked: int, seq: int, messages: list[tuple[int, str]]) -> None:
        """Hand realtime messages on to the API process that asked; without a link it asks no more."""
        self.send(wire.Missed(asked, seq, messages))

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
            feed.lose(self._lost(feed))
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


def joined_times(before: dict[str, LoopTime], now: dict[str, LoopTime]) -> dict[str, LoopTime]:
    """The times of two processes together."""
    joined = dict(before)
    for work, time in now.items():
        known = joined.get(work)
        if known is not None:
            counts = [one + other for one, other in zip(known.counts, time.counts, strict=True)]
            time = LoopTime(counts, known.seconds + time.seconds)
        joined[work] = time
    return joined


def _lost(_: TurnFeed) -> Problem:
    return engine_lost()


def _ignore(*_: object) -> None:
    """A callback that does nothing."""
