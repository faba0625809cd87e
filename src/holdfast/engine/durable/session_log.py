"""The book: what the engine knows of its sessions beyond memory, and what must be written before it is told.

For each session: who opened it and with what, its last finished turns by id (a turn that is asked for again
gets its answer again), and the verbs that carried an id. With a journal every change is a record there, and
`when_durable` holds an answer back until all records before it are in the file; without one, or with
durability `off`, it is given at once. The file is written in a thread of its own (`journal_writer`): `flush`
hands over what was noted, and gives the answers whose records are written by then. While the journal cannot
be written, nothing new may begin. Called by the engine loop, and by the disk tier, which notes the files that
it wrote.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.core.errors import JournalUnavailable, Refused, RequestConflict, SessionExists, TurnConflict
from holdfast.engine.durable.journal import Journal
from holdfast.engine.durable.journal_writer import JournalWriter
from holdfast.engine.durable.records import (
    TURNS_KEPT,
    Closed,
    Ended,
    FinishedTurn,
    Forked,
    Opened,
    Record,
    Requested,
    StoredSession,
    Truncated,
    is_text,
)

Act = Callable[[], None]

UNWRITTEN_MAX = 16_384
"""Records that may wait to be written: where the disk is slower than that, nothing new may begin."""

SETTLE_SECONDS = 0.1
"""How often one who waits for the file looks whether it can be written at all."""


class BadText(Refused):
    """A text that has no bytes, with half of a character in it: nobody could write it down."""

    code = "bad_text"

    def __init__(self, field: str) -> None:
        super().__init__(f"{field}: half of a character (a lone surrogate) is no text")
        self.param = field


def require_text(**fields: str | None) -> None:
    """Refuse texts that a journal cannot hold, before anything has happened; one would block all others."""
    for field_name, text in fields.items():
        if text is not None and not is_text(text):
            raise BadText(field_name)


@dataclass(slots=True)
class SessionEntry:
    """A session as its client described it, and what it may ask for again. `created` is the time of day."""

    tenant: str
    ttl: float | None
    metadata: dict[str, object]
    system: str | None
    created: float
    finished: dict[str, FinishedTurn] = field(default_factory=dict)
    unwritten: set[str] = field(default_factory=set)
    requests: dict[str, tuple[str, str]] = field(default_factory=dict)


class SessionLog:
    """All sessions that have a name."""

    def __init__(self, journal: Journal | None) -> None:
        self.journal = journal
        self.sessions: dict[str, SessionEntry] = {}
        self.unrecovered: dict[str, str] = {}
        """Sessions that are in the journal and could not come back, and why."""
        self._writer: JournalWriter | None = None
        self._unsent: list[Record] = []
        self._held: deque[tuple[int, Act]] = deque()
        """Answers, each with the number of the last batch that it waits for."""
        self._unwritten: deque[tuple[int, int]] = deque()
        """Batches that are not durable yet, and how many records each has."""

    def start(self) -> None:
        """Begin to write, once the sessions of the journal have been read."""
        if self.journal is not None:
            self._writer = JournalWriter(self.journal)
            if self.journal.waits:
                self._writer.submit([])

    def close(self) -> None:
        """Write what is left, give the answers that waited for it, and let go of the file."""
        journal, writer = self.journal, self._writer
        if journal is None:
            return
        if writer is not None:
            self.sync()
            writer.close()
            self._answer(writer.durable)
        journal.close()
        self.journal = self._writer = None

    @property
    def _waits_for_journal(self) -> bool:
        return self.journal is not None and self.journal.durability != "off"

    @property
    def pending(self) -> bool:
        """Whether an answer is held back, or a record is to be written."""
        return bool(self._held or self._unsent) or self.writing

    @property
    def writing(self) -> bool:
        """Whether something that was handed over is not in the file yet."""
        return self._writer is not None and self._writer.behind

    @property
    def descriptor(self) -> int | None:
        """What becomes readable when there are answers to give: a descriptor for a poll."""
        return None if self._writer is None else self._writer.descriptor

    @property
    def fault(self) -> str | None:
        """Why the journal cannot be written, if it cannot."""
        return self.journal.fault if self.journal is not None else None

    def require_writable(self) -> None:
        """Refuse what is new while the journal cannot be written."""
        if not self._waits_for_journal:
            return
        if self.fault is not None:
            raise JournalUnavailable("the journal cannot be written; try again later")
        if sum(records for _, records in self._unwritten) > UNWRITTEN_MAX:
            raise JournalUnavailable("the journal cannot be written fast enough; try again later")

    def require_unused(self, session_id: str) -> None:
        """Refuse the name of a session that only the journal has: a new one would take its place there."""
        reason = self.unrecovered.get(session_id)
        if reason is not None:
            raise SessionExists(
                f"session {session_id} is in the journal and could not come back when the engine started "
                f"({reason}); start it again with room for it, or remove it with `holdfast sessions rm`"
            )

    def append(self, record: Record) -> None:
        """Note a record, if there is a journal."""
        if self.journal is not None:
            self._unsent.append(record)

    def when_durable(self, act: Act) -> None:
        """Do something once every record so far is in the file; at once where nobody waits for that."""
        if self._waits_for_journal:
            number = 0 if self._writer is None else self._writer.submitted
            self._held.append((number + bool(self._unsent), act))
        else:
            act()

    def flush(self) -> None:
        """Hand over what was noted, and give the answers whose records are in the file by now."""
        writer = self._writer
        if writer is None:
            return
        if self._unsent:
            records, self._unsent = self._unsent, []
            self._unwritten.append((writer.submit(records), len(records)))
        self._answer(writer.take_news())

    def _answer(self, durable: int) -> None:
        while self._unwritten and self._unwritten[0][0] <= durable:
            self._unwritten.popleft()
        while self._held and self._held[0][0] <= durable:
            self._held.popleft()[1]()

    def wait(self, seconds: float) -> None:
        """Let the file be written, until there are answers to give or time is up."""
        if self._writer is not None:
            self._writer.wait(seconds)

    def sync(self) -> None:
        """As `flush`, and return when everything is in the file, or cannot be written."""
        self.flush()
        while self.writing and self.fault is None:
            self.wait(SETTLE_SECONDS)
            self.flush()

    # --- sessions ---------------------------------------------------------------------------------

    def opened(
        self,
        session_id: str,
        tenant: str,
        ttl: float | None = None,
        metadata: dict[str, object] | None = None,
        system: str | None = None,
    ) -> None:
        """A session was opened."""
        entry = SessionEntry(tenant, ttl, metadata if metadata is not None else {}, system, time.time())
        self.sessions[session_id] = entry
        self.append(Opened(session_id, tenant, ttl, json.dumps(entry.metadata), system, entry.created))

    def forked(self, session_id: str, parent_id: str, turns: int) -> None:
        """A session goes on from another."""
        parent = self.sessions[parent_id]
        entry = SessionEntry(parent.tenant, parent.ttl, dict(parent.metadata), parent.system, time.time())
        self.sessions[session_id] = entry
        self.append(Forked(session_id, parent_id, turns, entry.created))

    def truncated(self, session_id: str, turns: int, kept: int | None) -> None:
        """A session went back to `turns` turns; `kept` is what it keeps of the last, where that is less."""
        self.append(Truncated(session_id, turns, kept))

    def closed(self, session_id: str, reason: str) -> None:
        """A session is gone."""
        del self.sessions[session_id]
        self.append(Closed(session_id, reason))

    def recovered(self, stored: StoredSession) -> None:
        """A session is here again, as the journal has it."""
        entry = SessionEntry(
            stored.tenant, stored.ttl, json.loads(stored.metadata), stored.system, stored.created
        )
        entry.finished = {turn.turn_id: turn for turn in stored.finished}
        entry.requests = dict(stored.requests)
        self.sessions[stored.id] = entry

    # --- turns and requests that come again -------------------------------------------------------

    def ended(self, session_id: str, tokens: tuple[int, ...], turn: FinishedTurn) -> None:
        """A turn ended and stands; it can be asked for again from the moment it is durable."""
        entry = self.sessions[session_id]
        self.append(Ended(session_id, tokens, turn))
        entry.unwritten.add(turn.turn_id)

        def written() -> None:
            entry.unwritten.discard(turn.turn_id)
            entry.finished[turn.turn_id] = turn
            _keep_last(entry.finished)

        self.when_durable(written)

    def is_being_written(self, session_id: str, turn_id: str) -> bool:
        """Whether a turn has ended and its end is about to be durable: whoever asks again can wait for it."""
        entry = self.sessions.get(session_id)
        return self.fault is None and entry is not None and turn_id in entry.unwritten

    def replay(self, session_id: str, turn_id: str, fingerprint: str) -> FinishedTurn | None:
        """How a turn ended, if it did; a conflict if it was asked for something else."""
        entry = self.sessions.get(session_id)
        if entry is None:
            return None
        if turn_id in entry.unwritten:
            raise JournalUnavailable(f"turn {turn_id} has ended and is not written yet; try again later")
        turn = entry.finished.get(turn_id)
        if turn is not None and turn.fingerprint != fingerprint:
            raise TurnConflict(f"turn {turn_id} of session {session_id} has finished, and had another body")
        return turn

    def earlier_answer(self, session_id: str, request_id: str | None, asked: str) -> str | None:
        """What a verb with this id answered, if it was carried out before; a conflict if it was another."""
        entry = self.sessions.get(session_id)
        found = entry.requests.get(request_id) if entry is not None and request_id is not None else None
        if found is None:
            return None
        if found[0] != asked:
            raise RequestConflict(f"request {request_id} of session {session_id} asked for something else")
        return found[1]

    def requested(self, session_id: str, request_id: str | None, asked: str, answer: str = "") -> None:
        """A verb that carries an id was carried out: it will not be again."""
        if request_id is not None:
            requests = self.sessions[session_id].requests
            requests[request_id] = (asked, answer)
            _keep_last(requests)
            self.append(Requested(session_id, request_id, asked, answer))


def _keep_last(table: dict[str, FinishedTurn] | dict[str, tuple[str, str]]) -> None:
    while len(table) > TURNS_KEPT:
        del table[next(iter(table))]
