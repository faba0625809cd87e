"""Brings the core's events to listeners, after they were written down.

With a journal the end of a turn, and of a session, is written first and told when it is durable; everything
else is told at once. The turns in flight, with their streams and listeners, are kept here (`LiveTurns`), and
so are acknowledgements that wait for an end. Called by the loop after each step, and by verbs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import NamedTuple

from holdfast.core.errors import SessionMoved
from holdfast.core.events import Event, EventKind
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Session
from holdfast.core.turn import Turn
from holdfast.engine.durable.answers import details_of, without_tokens
from holdfast.engine.durable.recovery import finished_turn, noted_turn
from holdfast.engine.durable.session_log import SessionLog, Waiter
from holdfast.engine.listeners import SessionObserver, TurnListener
from holdfast.engine.session_settings import SessionSettings
from holdfast.engine.text.stream import Remainder, TurnStream
from holdfast.engine.tiers.disk import DiskTier

__all__ = ["ENDS", "Dispatcher", "LiveTurn", "LiveTurns"]

log = logging.getLogger("holdfast.engine")

ENDS = frozenset({EventKind.FINISHED, EventKind.ABORTED, EventKind.FAILED})
"""The events that end a turn."""

MOVED = SessionMoved.code
"""Why a turn failed whose end the journal refused."""


class LiveTurn:
    """A turn in flight: its output, its listener, and acknowledgements that wait for its end."""

    __slots__ = ("acknowledgements", "listener", "stream")

    def __init__(self, stream: TurnStream, listener: TurnListener) -> None:
        self.stream = stream
        self.listener = listener
        self.acknowledgements: list[Waiter] = []


class Shedding(NamedTuple):
    """A finished turn that drops its reasoning."""

    session: Session
    number: int
    remainder: Remainder
    stream: TurnStream
    end: Waiter


class LiveTurns:
    """The turns in flight, by their numbers."""

    __slots__ = ("turns",)

    def __init__(self) -> None:
        self.turns: dict[int, LiveTurn] = {}

    def stream_of(self, turn: Turn) -> TurnStream:
        """The output of a turn in flight."""
        return self.turns[turn.number].stream


class Dispatcher:
    """Journals the core's events, and notifies the listeners."""

    __slots__ = (
        "_closed",
        "_closing",
        "_disk",
        "_given_up",
        "_observer",
        "_release",
        "_scheduler",
        "_session_log",
        "_shedding",
        "_writing_close",
        "live",
    )

    def __init__(
        self,
        live: LiveTurns,
        scheduler: Scheduler,
        session_log: SessionLog,
        disk: DiskTier | None,
        release: Callable[[Turn], None],
        observer: SessionObserver,
        closed: Callable[[str], None] | None = None,
    ) -> None:
        """`release` frees what is kept for a turn that is over, `closed` what is for a closed session."""
        self._closed = closed
        self.live = live
        self._scheduler = scheduler
        self._session_log = session_log
        self._disk = disk
        self._release = release
        self._observer = observer
        self._given_up: set[str] = set()
        """Sessions that belong to another server, until they are closed here."""
        self._closing: dict[str, list[Waiter]] = {}
        """Acknowledgements of closes, by session, until the session is closed."""
        self._writing_close: dict[str, list[Waiter]] = {}
        """The same, from when the session is closed until that is durable."""
        self._shedding: dict[str, Shedding] = {}
        """Sessions whose last turn drops its reasoning as soon as its rows have settled, by their names."""

    def tell(self) -> None:
        """Dispatch the core's events since the last call."""
        self.dispatch(self._scheduler.take_events())

    def dispatch(self, events: list[Event]) -> None:
        """Tell listeners of events; those that must be durable are told when they are."""
        turns = self.live.turns
        for event in events:
            turn = event.turn
            if turn is None:
                self._session_event(event)
            elif event.kind in ENDS:
                self._turn_ended(event, turn)
            else:
                live = turns.get(turn.number)
                if live is not None:
                    if live.stream.reader is not None and live.stream.reader.reads_calls:
                        turn.settled = live.stream.settled_tokens
                    live.listener.hear(event)
        if self._shedding:
            self._shed()

    def keep_files(self) -> None:
        """The engine ends: files of sessions that are closed from now on stay, for the next engine."""
        self._disk = None

    # --- sessions ---------------------------------------------------------------------------------

    def note_opened(self, session: Session) -> None:
        """Write down a session that was opened on the core itself, before its first change."""
        if session.id not in self._session_log.sessions and not _is_unlogged(session):
            kept = session.retention
            settings = SessionSettings(kept.pinned, kept.priority)
            self._session_log.opened(session.id, session.tenant, kept.ttl, settings=settings)

    def give_up(self, now: float) -> None:
        """Close the sessions that the journal has for another server; nothing of that is written down."""
        given_up = self._session_log.take_given_up()
        for session_id in given_up:
            log.error("session %s belongs to another server now; it is closed here", session_id)
        self.part_with(given_up, now)

    def part_with(self, names: Collection[str], now: float) -> None:
        """Close sessions that are another server's, without a record of it."""
        for session_id in names:
            self._session_log.sessions.pop(session_id, None)
            if session_id in self._scheduler.registry.sessions:
                self._given_up.add(session_id)
                self._scheduler.close(session_id, now)
        if names:
            self.tell()

    def is_anothers(self, session_id: str) -> bool:
        """Whether the journal has a session for another server: it is closed here, or about to be."""
        return session_id in self._given_up or self._session_log.is_given_up(session_id)

    def join_close(self, session_id: str, waiter: Waiter) -> bool:
        """Call a waiter when a close that is being written is durable; False if there is none."""
        pending = self._writing_close.get(session_id)
        if pending is None or session_id in self._scheduler.registry.sessions:
            return False
        pending.append(waiter)
        return True

    def when_closed(self, session_id: str, waiter: Waiter) -> None:
        """Call a waiter when the session that is being closed is closed, durably."""
        self._closing.setdefault(session_id, []).append(waiter)

    def _session_event(self, event: Event) -> None:
        if event.kind is EventKind.FINDING:
            log.error("audit: %s", event.reason)
            self._observer.finding()
        elif event.kind is EventKind.CLOSED:
            self._session_closed(event)

    def _session_closed(self, event: Event) -> None:
        session_id = event.session_id
        if self._closed is not None:
            self._closed(session_id)
        if session_id in self._session_log.sessions:
            self._session_log.closed(session_id, event.reason)
        # Another session of this name may be opened and closed before this close is durable.
        acknowledgements = self._writing_close[session_id] = self._closing.pop(session_id, [])
        moved = session_id in self._given_up
        self._given_up.discard(session_id)
        shedding = self._shedding.pop(session_id, None) if moved else None

        def gone() -> None:
            if self._writing_close.get(session_id) is acknowledgements:
                del self._writing_close[session_id]
            if self._disk is not None:
                self._disk.forget(session_id)
            expired = session_id in self._scheduler.registry.expired
            self._observer.session_closed(session_id, event.reason, expired, moved)

        def durable() -> None:
            gone()
            for waiter in acknowledgements:
                waiter.done()

        def refused() -> None:
            gone()
            if shedding is not None:
                shedding.end.refused()
            for waiter in acknowledgements:
                waiter.refused()

        self._session_log.when_durable(session_id, refused if moved else durable, refused)

    # --- turns ------------------------------------------------------------------------------------

    def listen(self, turn: Turn, stream: TurnStream, listener: TurnListener) -> None:
        """Tell a listener of everything that happens to a turn that was queued."""
        self.live.turns[turn.number] = LiveTurn(stream, listener)

    def when_ended(self, turn: Turn, waiter: Waiter) -> None:
        """Call a waiter when the end of a turn in flight was told."""
        self.live.turns[turn.number].acknowledgements.append(waiter)

    def _turn_ended(self, event: Event, turn: Turn) -> None:
        """Tell the end of a turn; one that stays in the history is written down first."""
        self._release(turn)
        live = self.live.turns.pop(turn.number, None)
        session = self._scheduler.registry.sessions.get(event.session_id)
        stands = session is not None and session.last is turn and not _is_unlogged(session)

        def told() -> None:
            if live is not None:
                live.listener.hear(event)
                for waiter in live.acknowledgements:
                    waiter.done()
            if session is not None and stands and session.last in (turn, None):
                self._scheduler.durable(event.session_id)

        def refused() -> None:
            if live is not None:
                live.listener.hear(Event(EventKind.FAILED, event.session_id, turn, [], MOVED))
                for waiter in live.acknowledgements:
                    waiter.refused()

        if self.is_anothers(event.session_id):
            refused()  # Whatever became of it here: its client is to ask the other server.
            return
        if session is None or not stands:
            told()
            return
        self.note_opened(session)
        stream = None if live is None else live.stream
        if stream is not None:
            stream.end(cut=event.kind is EventKind.ABORTED)
        finished = finished_turn(event, session, turn, stream)
        noted = None if stream is None or stream.note is None else noted_turn(stream.note, finished)
        number = len(session.boundaries)
        given, output, answer = turn.request.tokens, None, finished.answer
        remainder = None
        if stream is not None and event.kind is EventKind.FINISHED:
            remainder = stream.without_reasoning(turn.request.tokens)
        if remainder is not None:
            given, output = remainder.input, remainder.output
            answer = without_tokens(answer, remainder.dropped)
        details = "" if stream is None else details_of(stream.grammar, stream.spec, answer, noted)
        self._session_log.ended(session.id, given, finished, number, details, noted, output)
        if remainder is None or stream is None:
            self._session_log.when_durable(session.id, told, refused)
        else:
            end = Waiter(told, refused)
            self._shedding[session.id] = Shedding(session, number, remainder, stream, end)

    # --- reasoning --------------------------------------------------------------------------------

    def is_shedding(self, session_id: str | None) -> bool:
        """Whether a session's last turn is about to drop its reasoning: verbs and turns wait for that."""
        return session_id in self._shedding

    def _shed(self) -> None:
        """Drop the reasoning of turns whose rows have settled: the journal has them without it already.

        The end of such a turn is told afterwards, so that nobody sees the session with it.
        """
        registry = self._scheduler.registry
        for name, each in list(self._shedding.items()):
            session = each.session
            if registry.sessions.get(name) is session:
                if session.unsettled or self.is_anothers(name):
                    continue
                known = session.boundaries[-2] if len(session.boundaries) > 1 else 0
                moved, kept = each.remainder.moved, each.remainder.kept
                each.stream.recomputed = self._scheduler.compact(
                    name, each.number, each.number, moved, registry.now, kept
                )
                if self._disk is not None:
                    self._disk.truncated(session, known + kept)
            del self._shedding[name]
            self._session_log.when_durable(name, each.end.done, each.end.refused)


def _is_unlogged(session: Session) -> bool:
    """Whether nothing of a session is written down."""
    return session.one_shot or session.volatile
