"""The state of a realtime session that outlives its connection: a replay buffer and a queue of turns.

A session that is used over WebSockets has one `Channel`, which outlives each connection for a while. Every
message to the client gets the next sequence number and is kept, within bounds, for replay after a reconnect.
Commits, rewinds and forks run one after the other, in order of arrival; interrupts and closing overtake them.

When a connection is lost, the turn in flight ends within a step by its `on_abort`, and its end is kept for
replay. Queued commits are dropped: a commit counts once its `response.started` has been sent. A second
connection takes a session over; the turn in flight goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec

from holdfast.server.http.problems import Problem, internal_error, turn_failed
from holdfast.server.link import wire
from holdfast.server.link.engine_client import TurnFeed, join
from holdfast.server.routes.realtime_outbox import Outbox, TurnPen
from holdfast.server.routes.session_format import TurnEvents, shown_turn
from holdfast.server.service import Service
from holdfast.server.sessions import SessionRecord, engine_name
from holdfast.server.turn_request import TurnAsked

__all__ = ["RESUME_MAX", "Channel", "Job", "encoded"]

log = logging.getLogger("holdfast.server")

REPLAY_BYTES_MAX = 256 << 10
REPLAY_LAST_BYTES_MAX = 1 << 20
"""The same for the last message alone: the end of a turn has all of it, perhaps with log-probabilities."""
RESUME_MAX = 1 << 52
"""Highest number that a client may resume after where nothing was sent: numbers stay exact in JavaScript."""
WAITING_MAX = 64
TAKEN_OVER = (1008, "another connection has taken the session over")

_encoder = msgspec.json.Encoder()


def encoded(kind: str, seq: int | None, body: dict[str, Any]) -> str:
    """A message as it is sent."""
    return _encoder.encode({"type": kind, "seq": seq, **body}).decode()


class Job:
    """Something that waits for its place in the order: a turn where `asked` is given, or a call."""

    __slots__ = ("act", "asked", "labels", "started")

    def __init__(
        self,
        labels: dict[str, Any],
        asked: TurnAsked | None = None,
        act: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        assert (asked is None) != (act is None), "a job is one or the other"
        self.labels = labels
        """What names it in an answer: `turn_id` or `request_id`."""
        self.asked = asked
        self.act = act
        self.started: asyncio.Task[TurnFeed] | None = None
        """A turn that steers the running one is started before its place comes."""


class Running:
    """The running turn."""

    __slots__ = ("asked", "begun", "cut", "feed", "left", "sent", "told")

    def __init__(self, asked: TurnAsked) -> None:
        self.asked = asked
        self.feed: TurnFeed | None = None
        self.sent = 0
        """Tokens sent to the client, without those of a tool call that has not ended."""
        self.cut = False
        self.left = False
        self.begun = asyncio.Event()
        self.told = asyncio.Event()


class Channel:
    """One session as realtime clients see it."""

    def __init__(self, service: Service, tenant: str, name: str) -> None:
        self.service = service
        self.tenant = tenant
        self.name = name
        self.seq = 0
        self.outbox: Outbox | None = None
        self.ended = asyncio.Event()
        self.running: Running | None = None
        self.queue: deque[Job] = deque()
        self._kept: deque[tuple[int, str]] = deque()
        self._kept_bytes = 0
        self._worker: asyncio.Task[None] | None = None
        self._urgent: set[asyncio.Task[None]] = set()

    @property
    def key(self) -> str:
        """The engine's name of the session."""
        return engine_name(self.tenant, self.name)

    def record(self) -> SessionRecord:
        """The session; raises the reason if it has ended."""
        return self.service.table.find(self.tenant, self.name)

    # --- messages to the client -------------------------------------------------------------------

    def emit(self, kind: str, body: dict[str, Any]) -> None:
        """Number a message, keep it for replay, and send it if a connection is attached."""
        self.seq += 1
        text = encoded(kind, self.seq, body)
        self._kept.append((self.seq, text))
        self._kept_bytes += len(text)
        while self._kept_bytes > (REPLAY_BYTES_MAX if len(self._kept) > 1 else REPLAY_LAST_BYTES_MAX):
            self._kept_bytes -= len(self._kept.popleft()[1])
        if self.outbox is not None:
            self.outbox.put(text)

    def emit_problem(self, problem: Problem, labels: dict[str, Any]) -> None:
        """Send an error."""
        self.emit("error", {**labels, **problem.body()})

    def attach(self, outbox: Outbox, opened: dict[str, Any], resume_after: int | None) -> None:
        """Attach a connection, and replay the messages after `resume_after`."""
        if self.outbox is not None:
            self.outbox.close(*TAKEN_OVER)
        self.outbox = outbox
        after, resumed = self.seq, False
        if resume_after is not None:
            first = self._kept[0][0] if self._kept else self.seq + 1
            resumed = first - 1 <= resume_after <= self.seq
            if resumed:
                after = resume_after
            else:
                # The missed messages are no longer kept. Sequence numbers never go back.
                self.seq = after = max(self.seq, resume_after)
        outbox.put(encoded("session.opened", after, {**opened, "resumed": resumed}))
        for seq, text in self._kept:
            if seq > after:
                outbox.put(text)

    @property
    def kept(self) -> list[tuple[int, str]]:
        """The messages that are kept for replay, with their numbers."""
        return list(self._kept)

    def take_over(self, seq: int, kept: list[tuple[int, str]]) -> None:
        """Go on from what another API process has sent, if nothing was sent here."""
        if not self.seq:
            self.seq = seq
            self._kept.extend(kept)
            self._kept_bytes = sum(len(text) for _, text in kept)

    async def give_up(self) -> tuple[int, list[tuple[int, str]]]:
        """End the connection, for one of another API process, and the turn in flight by its `on_abort`.

        Answers the number of the last message and those that are kept; 0 if a connection came meanwhile.
        """
        if self.outbox is not None:
            self.outbox.close(*TAKEN_OVER)
            self.detach(self.outbox)
        while self.outbox is None and not self.quiet:
            tasks = self._urgent if self._worker is None else {*self._urgent, self._worker}
            await asyncio.wait(tasks)
        return (self.seq, self.kept) if self.outbox is None else (0, [])

    def detach(self, outbox: Outbox) -> bool:
        """Detach a connection and abort the running turn; False if another one has taken over."""
        if self.outbox is not outbox:
            return False
        outbox.close(1001, "the connection is closed")
        self.outbox = None
        self._clear()
        if self.running is not None:
            self._leave(self.running)
        return True

    def end(self, why: str) -> None:
        """The session has ended; the client is told after the end of the turn in flight."""
        self._clear()
        task = asyncio.create_task(self._end(why, self.running))
        self._urgent.add(task)
        task.add_done_callback(self._urgent.discard)

    async def _end(self, why: str, running: Running | None) -> None:
        if running is not None:
            await running.told.wait()
        self.emit("session.closed", {"id": self.name, "state": "CLOSED", "reason": why})
        self.outbox = None
        self.ended.set()

    def _leave(self, running: Running) -> None:
        running.left = True
        if running.feed is not None:
            self.service.leave(running.feed, running.asked.options.keeps)

    # --- messages from the client -----------------------------------------------------------------

    @property
    def quiet(self) -> bool:
        """Whether no connection is attached and nothing runs."""
        return self.outbox is None and self._worker is None and not self._urgent

    def submit(self, job: Job, *, cuts: bool = False) -> None:
        """Queue a job; a turn that `cuts` overtakes other turns.

        A job that is rejected has changed nothing. A turn that is already queued or running is not repeated.
        """
        before = [other for other in self.queue if other.asked is None] if cuts else list(self.queue)
        if len(before) >= WAITING_MAX:
            raise Problem(429, "too_many_messages", f"{WAITING_MAX} messages are already queued")
        if job.asked is not None and self._known_turn(job.asked, before):
            return
        if cuts:
            self.cut()
        self._append(job)

    def _append(self, job: Job) -> None:
        self.queue.append(job)
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())

    def steer(self, job: Job, keep: int | None) -> None:
        """Start a turn that cuts the one before it after `keep` tokens, or those sent; queued turns go."""
        asked, running = job.asked, self.running
        assert asked is not None, "only a turn steers"
        waiting = [other for other in self.queue if other.asked is not None]
        if self._known_turn(asked, waiting):
            return
        if running is None or running.feed is None:
            if running is None and keep is not None:
                job.asked = replace(asked, steers=keep)
            self.submit(job, cuts=True)
            return
        for other in waiting:
            self._cancel(other)
        job.asked = replace(asked, steers=running.sent if keep is None else keep)
        job.started = asyncio.create_task(self._start_steering(job.asked, running))
        self._append(job)

    async def _start_steering(self, asked: TurnAsked, running: Running) -> TurnFeed:
        feed = await self.service.start_turn(self.record(), asked)
        running.cut = True
        return feed

    def _cancel(self, job: Job) -> None:
        """Drop a queued turn, and tell its client."""
        self.queue.remove(job)
        self._take_back(job)
        self.emit_problem(_cancelled(), job.labels)

    def _clear(self) -> None:
        """Drop everything that is queued."""
        for job in self.queue:
            self._take_back(job)
        self.queue.clear()

    def _take_back(self, job: Job) -> None:
        """End the turn of a job that is dropped, if it was started already."""

        def leave(started: asyncio.Task[TurnFeed]) -> None:
            if not started.cancelled() and started.exception() is None:
                self.service.leave(started.result(), keeps=False)

        if job.started is not None:
            job.started.add_done_callback(leave)

    def _known_turn(self, asked: TurnAsked, before: list[Job]) -> bool:
        """Whether this turn is already queued or running: a client may repeat it after a reconnect."""
        turns = [job.asked for job in before if job.asked is not None]
        if self.running is not None and not self.running.left:
            turns.append(self.running.asked)
        for turn in turns:
            if turn.name == asked.name:
                if turn.fingerprint != asked.fingerprint:
                    raise Problem(
                        409, "turn_conflict", "another turn with this id is queued or running", "turn_id"
                    )
                return True
        return False

    def hurry(self, act: Callable[[], Awaitable[None]], labels: dict[str, Any]) -> asyncio.Task[None]:
        """Run something now, concurrently with the running turn."""
        if len(self._urgent) >= WAITING_MAX:
            raise Problem(429, "too_many_messages", f"{WAITING_MAX} messages are already queued")
        task = asyncio.create_task(self._guarded(act(), labels))
        self._urgent.add(task)
        task.add_done_callback(self._urgent.discard)
        return task

    async def _work(self) -> None:
        try:
            while self.queue:
                job = self.queue.popleft()
                if job.asked is not None:
                    await self._guarded(self._turn(job.asked, job.started), job.labels)
                elif job.act is not None:
                    await self._guarded(job.act(), job.labels)
        finally:
            self._worker = None

    async def _guarded(self, act: Awaitable[None], labels: dict[str, Any]) -> None:
        """Turn problems into error messages; an unexpected exception is logged."""
        try:
            await act
        except Problem as problem:
            self.emit_problem(problem, labels)
        except Exception as error:
            log.error("a realtime message failed", exc_info=error)
            self.emit_problem(internal_error(), labels)

    # --- turns ------------------------------------------------------------------------------------

    async def _turn(self, asked: TurnAsked, started: asyncio.Task[TurnFeed] | None) -> None:
        """Run one turn; it may have been `started`."""
        running = self.running = Running(asked)
        try:
            starting = self.service.start_turn(self.record(), asked) if started is None else started
            feed = running.feed = await starting
            self.emit("response.started", {"turn_id": asked.name})
            running.begun.set()
            if running.left:
                self._leave(running)
            elif running.cut:
                self.cut()
            await self._speak(running, feed)
            assert feed.end is not None
            if feed.end.outcome == "failed":
                raise turn_failed(feed.end.reason)
            turns = {} if feed.end.view is None else {"turns": feed.end.view.turns}
            self.emit("response.done", {**shown_turn(asked.name, feed), **turns})
        finally:
            self.running = None
            running.begun.set()
            running.told.set()

    async def _speak(self, running: Running, feed: TurnFeed) -> None:
        """Send the turn's events. Those after a cut are held back, and sent if the turn finished anyway."""
        late: list[wire.Delta] = []
        events = TurnEvents(running.asked.name)

        def hear(delta: wire.Delta) -> bool:
            if running.cut or (self.outbox is not None and not self.outbox.has_room):
                return False
            self._tell(running, events, delta)
            return True

        feed.write_with(TurnPen(hear))
        async for delta in feed.deltas():
            if running.cut:
                late.append(delta)
                continue
            self._tell(running, events, delta)
            if self.outbox is not None:
                await self.outbox.room()
        if late and feed.end is not None and feed.end.outcome == "finished":
            self._emit_events(events, join(late))

    def _tell(self, running: Running, events: TurnEvents, delta: wire.Delta) -> None:
        running.sent = delta.index + len(delta.tokens) if delta.settled is None else delta.settled
        self._emit_events(events, delta)

    def _emit_events(self, events: TurnEvents, delta: wire.Delta) -> None:
        for kind, shown in events.of(delta):
            self.emit(f"response.{kind}", shown)

    def cut(self) -> None:
        """End the running turn for another one, keep the sent tokens, and cancel queued turns."""
        for job in [job for job in self.queue if job.asked is not None]:
            self._cancel(job)
        running = self.running
        if running is not None:
            running.cut = True
            if running.feed is not None:
                self.service.link.end(running.feed, running.sent, "interrupt")

    async def interrupt(self, turn_id: str, keep: int | None) -> None:
        """Interrupt a turn by its id; answered by its end, or by the session's state if it had ended."""
        for job in self.queue:
            if job.asked is not None and job.asked.name == turn_id:
                self._cancel(job)
                return
        running = self.running
        if running is not None and running.asked.name == turn_id:
            await running.begun.wait()
        record = self.record()
        await self.service.sessions.interrupt(record, turn_id, keep)
        if running is not None and running.asked.name == turn_id:
            await running.told.wait()
            end = None if running.feed is None else running.feed.end
            if end is None or end.outcome != "finished":
                return
        self.emit("session.rewound", {**await self.service.sessions.describe(record), "turn_id": turn_id})


def _cancelled() -> Problem:
    return Problem(409, "turn_cancelled", "the turn was cancelled before it began", "turn_id")
