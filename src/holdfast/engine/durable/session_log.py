"""The session log: a write-ahead log of the sessions' facts other than memory.

For each session it keeps the description, the results of the last finished turns by id (for repeated
turns), and the verbs that carried a request id. With a journal every change
is appended as a record, and `when_durable` delays an acknowledgement until all records before it are in the
file; without one, or with durability `off`, it comes at once. A thread writes the file (`journal_writer`):
`flush` submits the appended records as a batch, and gives the acknowledgements of durable batches. While the
journal cannot be written, new turns and verbs are refused. If the store refuses a session's records, the
session belongs to another server: its acknowledgements become refusals, and the engine closes it. Called by
the engine and by the disk tier.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from holdfast.core.errors import JournalUnavailable, Refused, RequestConflict, SessionExists, TurnConflict
from holdfast.engine.durable.answers import COMPLETE, NotedTurn, StoredCall, calls_in, noted_in
from holdfast.engine.durable.journal_writer import JournalWriter, Settled
from holdfast.engine.durable.records import (
    TURNS_KEPT,
    AnsweredRequest,
    Closed,
    Compacted,
    Ended,
    FinishedTurn,
    Forked,
    Opened,
    Record,
    Requested,
    Retained,
    Retooled,
    StoredSession,
    Truncated,
    Updated,
    is_text,
)
from holdfast.engine.durable.store import Store
from holdfast.engine.session_settings import DEFAULT_SETTINGS, SessionSettings

Act = Callable[[], None]
Tools = list[dict[str, Any]]
"""Tools in OpenAI's form, as they were checked."""
Calls = Sequence[StoredCall]
Answer = TypeVar("Answer")
Key = TypeVar("Key")
Value = TypeVar("Value")

UNWRITTEN_MAX = 16_384
"""Records that may wait to be written; beyond that, new turns and verbs are refused (backpressure)."""

SYNC_SECONDS = 0.1
"""How often `sync` checks whether the journal can be written."""


class BadText(Refused):
    """A text with a lone surrogate, which UTF-8 cannot encode."""

    code = "bad_text"

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} contains a lone surrogate, which UTF-8 cannot encode")
        self.param = field


def require_text(**fields: str | None) -> None:
    """Refuse texts that the journal cannot store, before anything is changed: one would fail its batch."""
    for field_name, text in fields.items():
        if text is not None and not is_text(text):
            raise BadText(field_name)


@dataclass(slots=True)
class SessionEntry:
    """A session's description and its replayable results. `created` is the time of day.

    `calls` are the complete tool calls of its last turns that have some, by the number of the turn; `noted`
    are all its turns with notes, likewise.
    """

    tenant: str
    ttl: float | None
    metadata: dict[str, object]
    system: str | None
    created: float
    tools: Tools = field(default_factory=list)
    settings: SessionSettings = DEFAULT_SETTINGS
    calls: dict[int, Calls] = field(default_factory=dict)
    noted: dict[int, NotedTurn] = field(default_factory=dict)
    note_characters: int = 0
    finished: dict[str, FinishedTurn] = field(default_factory=dict)
    unwritten: set[str] = field(default_factory=set)
    """Turns that have ended and are not durable yet."""
    requests: dict[str, AnsweredRequest] = field(default_factory=dict)

    def keep_note(self, number: int, noted: NotedTurn | None) -> None:
        """Keep the note of one more turn, if it has one."""
        if noted is not None:
            self.noted[number] = noted
            self.note_characters += len(noted.note)

    def keep_notes(self, noted: dict[int, NotedTurn]) -> None:
        """Keep these notes and no others."""
        self.noted = noted
        self.note_characters = sum(len(each.note) for each in noted.values())


class Waiter(NamedTuple):
    """A caller that waits for a record: one of the two is called, once."""

    done: Act
    """The record is durable."""
    refused: Act
    """The record was dropped: the session belongs to another server."""


class Acknowledgement(NamedTuple):
    """A caller that waits for a batch, and for all before it, with records of one session."""

    batch: int
    session: str
    waiter: Waiter


class Batch(NamedTuple):
    """A batch that is not durable yet, and its number of records."""

    number: int
    records: int


class SessionLog:
    """All named sessions, and the records of them that are not durable yet."""

    def __init__(self, journal: Store | None) -> None:
        self.journal = journal
        self.sessions: dict[str, SessionEntry] = {}
        self.unrecovered: dict[str, str] = {}
        """Sessions of the journal that could not be recovered, and why."""
        self._writer: JournalWriter | None = None
        self._unsent: list[Record] = []
        self._waiting: deque[Acknowledgement] = deque()
        self._unwritten: deque[Batch] = deque()
        self._durable = 0
        """The last ticket whose acknowledgements were given."""
        self._given_up: list[str] = []

    def start(self) -> None:
        """Start the writer's thread, once the sessions of the journal have been read."""
        if self.journal is not None:
            self._writer = JournalWriter(self.journal)
            if self.journal.pending:
                self._writer.submit([])

    def close(self) -> None:
        """Write the remaining records, give their acknowledgements, and close the journal."""
        journal, writer = self.journal, self._writer
        if journal is None:
            return
        if writer is not None:
            self.sync()
            writer.close()
            self._acknowledge(writer)
        journal.close()
        self.journal = self._writer = None

    @property
    def _waits_for_journal(self) -> bool:
        return self.journal is not None and self.journal.durability != "off"

    @property
    def pending(self) -> bool:
        """Whether an acknowledgement waits, or a record is not durable yet."""
        return bool(self._waiting or self._unsent or self._given_up) or self.writing

    @property
    def writing(self) -> bool:
        """Whether a submitted batch is not durable yet."""
        return self._writer is not None and self._writer.writing

    @property
    def descriptor(self) -> int | None:
        """A descriptor for a poll, readable when acknowledgements may be due."""
        return None if self._writer is None else self._writer.descriptor

    @property
    def fault(self) -> str | None:
        """Why the journal cannot be written; None if it can."""
        return self.journal.fault if self.journal is not None else None

    def require_writable(self) -> None:
        """Refuse new turns and verbs while the journal cannot be written."""
        if not self._waits_for_journal:
            return
        if self.fault is not None:
            raise JournalUnavailable(f"the journal cannot be written ({self.fault}); try again later")
        if sum(batch.records for batch in self._unwritten) > UNWRITTEN_MAX:
            raise JournalUnavailable(
                f"more than {UNWRITTEN_MAX} journal records wait to be written; try again later"
            )

    def require_unused(self, session_id: str) -> None:
        """Refuse the id of an unrecovered session: a new session would overwrite it in the journal."""
        reason = self.unrecovered.get(session_id)
        if reason is not None:
            raise SessionExists(
                f"session {session_id} is in the journal and could not be recovered when the engine started "
                f"({reason}); fix the cause and restart, or remove it with `holdfast sessions rm`"
            )

    def append(self, record: Record) -> None:
        """Add a record to the next batch, if there is a journal."""
        if self.journal is not None:
            self._unsent.append(record)

    def when_durable(self, session_id: str, done: Act, refused: Act | None = None) -> None:
        """Call `done` once every record so far is durable; at once without a journal or with `off`.

        If the store refuses the records of the session, `refused` is called instead.
        """
        if self._waits_for_journal:
            number = 0 if self._writer is None else self._writer.submitted
            waiter = Waiter(done, refused if refused is not None else _nothing)
            self._waiting.append(Acknowledgement(number + bool(self._unsent), session_id, waiter))
        else:
            done()

    def flush(self) -> None:
        """Submit the appended records, and give the acknowledgements of durable batches."""
        writer = self._writer
        if writer is None:
            return
        if self._unsent:
            records, self._unsent = self._unsent, []
            self._unwritten.append(Batch(writer.submit(records), len(records)))
        self._acknowledge(writer)

    def take_given_up(self) -> list[str]:
        """Sessions that turned out to be another server's: the engine is to close them, unwritten."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def is_given_up(self, session_id: str) -> bool:
        """Whether a session is another server's, and the engine has not been told yet."""
        return session_id in self._given_up

    def _acknowledge(self, writer: JournalWriter) -> None:
        # Calls without a record of their own wait for batches that are durable already.
        self._call_waiters(Settled(self._durable, frozenset()))
        for settled in writer.take_settled():
            for session_id in settled.refused:
                if self.sessions.pop(session_id, None) is not None:
                    self._given_up.append(session_id)
            self._durable = settled.ticket
            self._call_waiters(settled)

    def _call_waiters(self, settled: Settled) -> None:
        while self._unwritten and self._unwritten[0].number <= settled.ticket:
            self._unwritten.popleft()
        while self._waiting and self._waiting[0].batch <= settled.ticket:
            _, session_id, waiter = self._waiting.popleft()
            if session_id in settled.refused:
                waiter.refused()
            else:
                waiter.done()

    def ask(self, act: Callable[[], Answer]) -> Future[Answer]:
        """Let the journal's thread call the store: claims, hand-overs, drains. After every record so far.

        The descriptor is readable when the future is done.
        """
        assert self._writer is not None, "there is no journal, or it is not started"
        self.flush()
        return self._writer.ask(act)

    def wait(self, seconds: float) -> None:
        """Wait until acknowledgements may be due, or time is up."""
        if self._writer is not None:
            self._writer.wait(seconds)

    def sync(self) -> None:
        """Flush, and return when everything is durable, or cannot be written."""
        self.flush()
        while self.writing and self.fault is None:
            self.wait(SYNC_SECONDS)
            self.flush()

    # --- sessions ---------------------------------------------------------------------------------

    def opened(
        self,
        session_id: str,
        tenant: str,
        ttl: float | None = None,
        metadata: dict[str, object] | None = None,
        system: str | None = None,
        tools: Tools | None = None,
        settings: SessionSettings = DEFAULT_SETTINGS,
    ) -> None:
        """A session was opened."""
        entry = SessionEntry(tenant, ttl, metadata if metadata is not None else {}, system, time.time())
        entry.tools = tools if tools is not None else []
        entry.settings = settings
        self.sessions[session_id] = entry
        about = (tenant, ttl, json.dumps(entry.metadata), system, entry.created, json.dumps(entry.tools))
        self.append(Opened(session_id, *about, settings.written()))

    def forked(self, session_id: str, parent_id: str, turns: int) -> None:
        """A session was forked from another."""
        parent = self.sessions[parent_id]
        entry = SessionEntry(parent.tenant, parent.ttl, dict(parent.metadata), parent.system, time.time())
        entry.tools = list(parent.tools)
        entry.settings = parent.settings
        entry.calls = _up_to(turns, parent.calls)
        entry.keep_notes(_up_to(turns, parent.noted))
        self.sessions[session_id] = entry
        self.append(Forked(session_id, parent_id, turns, entry.created))
        self.when_durable(session_id, _nothing, lambda: self._forget_fork(parent_id, session_id))

    def _forget_fork(self, parent_id: str, session_id: str) -> None:
        """The store refused a fork: its request has no answer, and may be made again."""
        parent = self.sessions.get(parent_id)
        if parent is not None:
            for request_id in [key for key, each in parent.requests.items() if each.answer == session_id]:
                del parent.requests[request_id]

    def retooled(self, session_id: str, tools: Tools) -> None:
        """A session has other tools from now on."""
        self.sessions[session_id].tools = tools
        self.append(Retooled(session_id, json.dumps(tools)))

    def updated(self, session_id: str, metadata: dict[str, object]) -> None:
        """A session has other metadata from now on."""
        self.sessions[session_id].metadata = metadata
        self.append(Updated(session_id, json.dumps(metadata)))

    def retained(self, session_id: str, ttl: float | None, settings: SessionSettings) -> None:
        """A session has another time to live, or other settings, from now on."""
        entry = self.sessions[session_id]
        entry.ttl, entry.settings = ttl, settings
        self.append(Retained(session_id, ttl, settings.written()))

    def truncated(self, session_id: str, turns: int, kept: int | None) -> None:
        """A session was cut to `turns` turns; a number `kept` is how many tokens the last one keeps."""
        entry = self.sessions[session_id]
        entry.calls = _up_to(turns, entry.calls)
        if kept is not None and turns in entry.calls:
            entry.calls[turns] = [call for call in entry.calls[turns] if call.end <= kept]
        entry.keep_notes(_up_to(turns, entry.noted))
        self.append(Truncated(session_id, turns, kept))

    def compacted(
        self, session_id: str, first: int, last: int, turn_id: str, tokens: tuple[int, ...]
    ) -> None:
        """Turns `first` to `last` of a session gave way to one with these tokens and no answer."""
        entry = self.sessions[session_id]
        entry.calls = _without(first, last, entry.calls)
        entry.keep_notes(_without(first, last, entry.noted))
        self.append(Compacted(session_id, first, last, turn_id, tokens))

    def closed(self, session_id: str, reason: str) -> None:
        """A session was closed."""
        del self.sessions[session_id]
        self.append(Closed(session_id, reason))

    def recovered(self, stored: StoredSession) -> None:
        """A session was recovered from the journal."""
        about = stored.about
        entry = SessionEntry(
            stored.tenant, about.ttl, json.loads(about.metadata), about.system, about.created
        )
        entry.tools = json.loads(about.tools)
        entry.settings = SessionSettings.read(about.settings)
        for number, turn in enumerate(stored.turns, start=1):
            _keep_calls(entry, number, calls_in(turn.details, len(turn.output)))
            entry.keep_note(number, noted_in(turn.details))
        entry.finished = {turn.turn_id: turn for turn in stored.finished}
        entry.requests = dict(stored.requests)
        self.sessions[stored.id] = entry

    # --- idempotency ------------------------------------------------------------------------------

    def ended(
        self,
        session_id: str,
        tokens: tuple[int, ...],
        turn: FinishedTurn,
        number: int = 0,
        details: str = "",
        noted: NotedTurn | None = None,
        output: tuple[int, ...] | None = None,
    ) -> None:
        """Turn `number` of a session was committed; its result can be replayed once it is durable.

        `output` is what stays of its output, where that is not all.
        """
        entry = self.sessions[session_id]
        self.append(Ended(session_id, tokens, turn, details, output))
        if turn.answer is not None:
            _keep_calls(entry, number, [call for call in turn.answer.calls if call.outcome == COMPLETE])
        entry.keep_note(number, noted)
        entry.unwritten.add(turn.turn_id)

        def written() -> None:
            entry.unwritten.discard(turn.turn_id)
            entry.finished[turn.turn_id] = turn
            _keep_last(entry.finished)

        def dropped() -> None:
            entry.unwritten.discard(turn.turn_id)

        self.when_durable(session_id, written, dropped)

    def calls_of(self, session_id: str, number: int) -> Calls:
        """The complete tool calls of a session's turn `number`, if they are still known."""
        entry = self.sessions.get(session_id)
        return () if entry is None else entry.calls.get(number, ())

    def is_being_written(self, session_id: str, turn_id: str) -> bool:
        """Whether a turn has ended and its record is on its way: a client that submits it again can wait."""
        entry = self.sessions.get(session_id)
        return self.fault is None and entry is not None and turn_id in entry.unwritten

    def knows_turn(self, session_id: str, turn_id: str) -> bool:
        """Whether a turn of that name has finished, written or not."""
        entry = self.sessions.get(session_id)
        return entry is not None and (turn_id in entry.finished or turn_id in entry.unwritten)

    def replay(self, session_id: str, turn_id: str, fingerprint: str) -> FinishedTurn | None:
        """The result of a finished turn, if there is one; a conflict if its request was another."""
        entry = self.sessions.get(session_id)
        if entry is None:
            return None
        if turn_id in entry.unwritten:
            raise JournalUnavailable(f"turn {turn_id} has ended and is not written yet; try again later")
        turn = entry.finished.get(turn_id)
        if turn is not None and turn.fingerprint != fingerprint:
            raise TurnConflict(
                f"turn {turn_id} of session {session_id} has finished with another request body"
            )
        return turn

    def earlier_answer(self, session_id: str, request_id: str | None, asked: str) -> str | None:
        """The answer of an earlier verb with this request id; a conflict if that verb was another."""
        entry = self.sessions.get(session_id)
        found = entry.requests.get(request_id) if entry is not None and request_id is not None else None
        if found is None:
            return None
        if found.asked != asked:
            raise RequestConflict(f"request {request_id} of session {session_id} was used for another call")
        return found.answer

    def requested(self, session_id: str, request_id: str | None, asked: str, answer: str = "") -> None:
        """A verb with a request id was carried out: sent again, it only gets its answer."""
        if request_id is not None:
            requests = self.sessions[session_id].requests
            requests[request_id] = AnsweredRequest(asked, answer)
            _keep_last(requests)
            self.append(Requested(session_id, request_id, asked, answer))


def _nothing() -> None:
    """Nobody waits."""


def _up_to(turns: int, found: dict[int, Value]) -> dict[int, Value]:
    """What belongs to the first turns, by the number of the turn."""
    return {number: value for number, value in found.items() if number <= turns}


def _without(first: int, last: int, found: dict[int, Value]) -> dict[int, Value]:
    """What belongs to other turns than `first` to `last`, which have become one."""
    return {
        number if number < first else number - (last - first): value
        for number, value in found.items()
        if not first <= number <= last
    }


def _keep_calls(entry: SessionEntry, number: int, calls: Calls) -> None:
    """Note the calls of a session's last turn."""
    if calls:
        entry.calls[number] = calls
        _keep_last(entry.calls)


def _keep_last(table: dict[Key, Value]) -> None:
    while len(table) > TURNS_KEPT:
        del table[next(iter(table))]
