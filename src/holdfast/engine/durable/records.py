"""What a journal holds: the records that are appended to it, and the sessions that come back from it.

Values only. The session log makes records, the journal writes them, and `journal_reading` makes sessions of
what was written.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, TypeGuard

SCHEMA = 3
"""The version of a journal's tables."""

TURNS_KEPT = 8
"""Finished turns of a session that can be asked for again, and as many of its requests."""


class JournalError(RuntimeError):
    """A journal cannot be used: it is in use, of another version, or of another model."""


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """How a turn ended, as far as a client who asks again should hear."""

    turn_id: str
    fingerprint: str
    outcome: str
    reason: str
    text: str
    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int


# --- records --------------------------------------------------------------------------------------


class RecordKind(StrEnum):
    """What a record is about, as the journal's log table and the list of batches write it."""

    OPENED = "opened"
    ENDED = "ended"
    TRUNCATED = "cutback"
    FORKED = "forked"
    CLOSED = "closed"
    REQUESTED = "requested"
    SNAPSHOT_WRITTEN = "snapped"
    SNAPSHOT_DROPPED = "unsnapped"


@dataclass(frozen=True, slots=True)
class Opened:
    """A session was opened; `metadata` is JSON, `created` is the time of day."""

    kind: ClassVar[RecordKind] = RecordKind.OPENED
    session: str
    tenant: str
    ttl: float | None
    metadata: str
    system: str | None
    created: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A turn ended and stands: what it brought, and what it said."""

    kind: ClassVar[RecordKind] = RecordKind.ENDED
    session: str
    input: tuple[int, ...]
    turn: FinishedTurn


@dataclass(frozen=True, slots=True)
class Truncated:
    """Only `turns` turns remain; of the last one, only `kept` generated tokens, where that is a number."""

    kind: ClassVar[RecordKind] = RecordKind.TRUNCATED
    session: str
    turns: int
    kept: int | None


@dataclass(frozen=True, slots=True)
class Forked:
    """A session goes on from the first `turns` turns of another."""

    kind: ClassVar[RecordKind] = RecordKind.FORKED
    session: str
    parent: str
    turns: int
    created: float


@dataclass(frozen=True, slots=True)
class Closed:
    """A session is gone."""

    kind: ClassVar[RecordKind] = RecordKind.CLOSED
    session: str
    reason: str


@dataclass(frozen=True, slots=True)
class Requested:
    """A verb that carries an id was carried out."""

    kind: ClassVar[RecordKind] = RecordKind.REQUESTED
    session: str
    request_id: str
    asked: str
    answer: str


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """A file holds the memory of a session's first `length` tokens."""

    kind: ClassVar[RecordKind] = RecordKind.SNAPSHOT_WRITTEN
    session: str
    file: str
    length: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotDropped:
    """A session's file is of no use any more."""

    kind: ClassVar[RecordKind] = RecordKind.SNAPSHOT_DROPPED
    session: str


Record = Opened | Ended | Truncated | Forked | Closed | Requested | SnapshotWritten | SnapshotDropped


# --- what comes back ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """One turn of a session's history."""

    turn_id: str
    input: list[int]
    output: list[int]
    finish: str


@dataclass(slots=True)
class StoredSession:
    """A session as the journal has it."""

    id: str
    tenant: str
    ttl: float | None
    metadata: str
    system: str | None
    created: float
    parent: str | None
    turns: list[StoredTurn] = field(default_factory=list)
    finished: list[FinishedTurn] = field(default_factory=list)
    requests: dict[str, tuple[str, str]] = field(default_factory=dict)
    snapshot: SnapshotWritten | None = None
    damaged: bool = False
    unusable: str = ""
    """Why it cannot come back; empty where it can."""

    @property
    def tokens(self) -> int:
        """The length of its history."""
        return sum(len(turn.input) + len(turn.output) for turn in self.turns)


def detail(record: Record) -> str:
    """A record in words."""
    match record:
        case Ended():
            return f"turn {record.turn.turn_id}: {len(record.input)} tokens in, {len(record.turn.tokens)} out"
        case Truncated():
            kept = "" if record.kept is None else f", {record.kept} tokens of the last kept"
            return f"{_turns(record.turns)} left{kept}"
        case Forked():
            return f"from {_turns(record.turns)} of {record.parent}"
        case Closed():
            return record.reason
        case Requested():
            return f"{record.asked} ({record.request_id})"
        case SnapshotWritten():
            return f"{record.length} tokens, {record.bytes} bytes in {record.file}"
        case Opened() | SnapshotDropped():
            return ""


def _turns(count: int) -> str:
    return "1 turn" if count == 1 else f"{count} turns"


def is_text(value: object) -> TypeGuard[str]:
    """Whether a value is text that a journal can hold: no lone surrogates, which have no bytes."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def unpack(packed: bytes) -> list[int]:
    """The tokens of four bytes each."""
    return array("I", packed).tolist()
