"""Responses in flight: the events of each turn are kept, also without a reader, for readers that resume.

Output is encoded once, in the loop's callback that receives it, and written there to every reader that has
all the events before it and keeps up (`Sink`). `Running.read` gives the others to the reader's task, from any
sequence number on; `ended` is set after the last. The events of background responses are kept for a while
after the end (`Recent`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

from holdfast.server.http.problems import Problem, turn_failed
from holdfast.server.link import wire
from holdfast.server.link.engine_client import TurnFeed
from holdfast.server.responses.events import Event, ResponseEvents, Spell, Written, written
from holdfast.server.responses.form import Shown, output_of, response_object, result_of, status_of
from holdfast.server.responses.ids import Place

__all__ = ["Recent", "Running", "Sink"]

log = logging.getLogger("holdfast.server")

EVENTS_MAX = 1 << 16
"""Events that are kept of responses after their end; one that has none counts as one."""

EVENT_BYTES = 4096
"""Events with the whole response have as many bytes as its instructions, tools and output."""

BATCH_BYTES = 64 << 10
"""Events that a reader is given at a time."""

Finish = Callable[["Running", "wire.NotedTurn | None"], Awaitable[None]]


class Sink(Protocol):
    """Where the events of a response are written for one reader."""

    @property
    def ready(self) -> bool:
        """Whether the reader keeps up."""

    def write(self, events: Sequence[Written]) -> None:
        """Write events; the sink must be ready."""


class _Reader:
    """One reader of a response: how far it has come, and whether its task waits for more."""

    __slots__ = ("news", "place", "sink", "waits")

    def __init__(self, place: int, sink: Sink | None) -> None:
        self.place = place
        self.sink = sink
        self.waits = False
        """Whether everything before `place` was written, so that more may be."""
        self.news = asyncio.Event()

    def take(self, events: Sequence[Written]) -> list[Written]:
        """The next events, of a bounded size."""
        taken: list[Written] = []
        size = 0
        while self.place < len(events) and size < BATCH_BYTES:
            taken.append(events[self.place])
            size += len(events[self.place].body)
            self.place += 1
        return taken


class Running:
    """One response whose turn was started."""

    def __init__(self, tenant: str, place: Place, about: Shown, feed: TurnFeed, spell: Spell) -> None:
        self.tenant = tenant
        self.place = place
        self.about = about
        self.feed = feed
        self.background = False
        self.stays = False
        """Whether its turn is in the history of its session, once it has ended."""
        self.problem: Problem | None = None
        """Why the turn failed, or was lost."""
        self.shown: dict[str, Any] | None = None
        """The response as it ended."""
        self.ended = asyncio.Event()
        self._events = ResponseEvents(about, spell)
        self._spell = spell
        self._log: list[Written] = []
        self._readers: set[_Reader] = set()
        self._speaks = False
        self._streams = False

    @property
    def key(self) -> tuple[str, str]:
        """The tenant, and the key of the response."""
        return self.tenant, self.place.key

    def current(self) -> dict[str, Any]:
        """The response as it is now."""
        if self.shown is not None:
            return self.shown
        status = "queued" if self.background and not self._speaks else "in_progress"
        return response_object(self.about, status, [])

    async def run(self, streams: bool, finish: Finish) -> None:
        """Read the turn to its end. `finish` is awaited before the end is told."""
        self._streams = streams
        try:
            if streams:
                self._publish(self._events.opening(self.background))
            self.feed.write_with(self)
            async for delta in self.feed.deltas():
                self._hear(delta)
            end = self.feed.end
            assert end is not None, "a turn has an end"
            result = result_of(end, self.about.note)
            if end.outcome == "failed":
                self.problem = turn_failed(end.reason)
            await finish(self, result)
            self._end(result, streams, end.logprobs)
        except Problem as problem:
            self.problem = problem
            await finish(self, None)
            events, self.shown = self._events.failed(self._error())
            self._publish(events if streams else [])
        finally:
            self.ended.set()
            self._tell()

    def write(self, delta: wire.Delta) -> bool:
        """Output of the turn, as it comes."""
        try:
            self._hear(delta)
        except Exception:
            log.exception("output of a response cannot be written")
            return False
        return True

    def _hear(self, delta: wire.Delta) -> None:
        self._speaks = True
        if self._streams:
            self._log += self._events.written(delta)
            self._tell()

    def _end(self, result: wire.NotedTurn, streams: bool, logprobs: list[wire.Logprob] | None) -> None:
        error = None if self.problem is None else self._error()
        if streams:
            events, self.shown = self._events.closing(result, error)
            self._publish(events)
            return
        status = status_of(result)
        output = output_of(self.place.key, result, self.about.note, self._spell(logprobs))
        output = [] if status == "failed" else output
        self.shown = response_object(self.about, status, output, result, error)

    def _error(self) -> dict[str, Any]:
        assert self.problem is not None, "a response fails for a reason"
        return {"code": "server_error", "message": self.problem.message}

    def _publish(self, events: list[Event]) -> None:
        self._log += map(written, events)
        self._tell()

    def _tell(self) -> None:
        """Write new events to the readers that keep up; wake the tasks of others."""
        for reader in self._readers:
            sink = reader.sink
            if reader.place < len(self._log) and reader.waits and sink is not None and sink.ready:
                sink.write(reader.take(self._log))
            if reader.place < len(self._log) or self.ended.is_set():
                reader.news.set()

    async def read(self, after: int | None = None, sink: Sink | None = None) -> AsyncIterator[list[Written]]:
        """The events that follow sequence number `after`, but for those that `sink` gets."""
        reader = _Reader(0 if after is None else after + 1, sink)
        self._readers.add(reader)
        try:
            while True:
                reader.news.clear()
                if reader.place < len(self._log):
                    yield reader.take(self._log)
                    continue
                if self.ended.is_set():
                    return
                reader.waits = True
                await reader.news.wait()
                reader.waits = False
        finally:
            self._readers.discard(reader)

    @property
    def events(self) -> int:
        """How many of its events are kept; a long one counts once more for each `EVENT_BYTES`."""
        return sum(1 + len(event.body) // EVENT_BYTES for event in self._log)

    async def result(self) -> dict[str, Any]:
        """The response as it ended; raises the problem if it failed."""
        await self.ended.wait()
        if self.problem is not None:
            raise self.problem
        assert self.shown is not None, "a response that has ended is known"
        return self.shown


class Recent:
    """The last background responses, and those that left no turn behind, after their end.

    Their number and their events are bounded; the oldest of the tenant that has most events makes room.
    """

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Running]] = {}
        self._events: Counter[str] = Counter()
        self._counted: dict[tuple[str, str], int] = {}
        """What each counts for in `_events`."""
        self._ending: list[Running] = []
        """Those that may have had further events since they were counted."""

    def add(self, running: Running) -> None:
        """Keep one; others are forgotten for it."""
        tenant, key = running.key
        self._kept.setdefault(tenant, {})[key] = running
        self._ending.append(running)
        for each in self._ending:
            if self.get(each.key) is each:
                self._events[each.key[0]] += 1 + each.events - self._counted.get(each.key, 0)
                self._counted[each.key] = 1 + each.events
        self._ending = [each for each in self._ending if not each.ended.is_set()]
        while self._events.total() > EVENTS_MAX and sum(map(len, self._kept.values())) > 1:
            largest = max(self._events, key=self._events.__getitem__)
            self.drop((largest, next(iter(self._kept[largest]))))

    def get(self, key: tuple[str, str]) -> Running | None:
        """A response that is still stored."""
        return self._kept.get(key[0], {}).get(key[1])

    def drop(self, key: tuple[str, str]) -> bool:
        """Forget one; whether it was known."""
        tenant, name = key
        mine = self._kept.get(tenant, {})
        running = mine.pop(name, None)
        if running is None:
            return False
        self._events[tenant] -= self._counted.pop(key)
        if not mine:
            del self._kept[tenant], self._events[tenant]
        return True
