"""The journal's records, and the sessions that are read back from it. Values only.

The session log makes records, the journal writes them, and `journal_reading` makes sessions of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, NamedTuple, TypeGuard

from holdfast.engine.durable.answers import StoredAnswer

SCHEMA = 5
"""The version of a journal's tables."""

TURNS_KEPT = 8
"""Finished turns of a session whose result is kept, and as many answered requests."""


NO_METADATA = "{}"
"""The metadata of a session without any, as JSON."""

NO_TOOLS = "[]"
"""The tools of a session without any, as JSON."""

NO_SETTINGS = "{}"
"""The settings of a session with default settings, as JSON."""


class JournalError(RuntimeError):
    """A journal cannot be used: it is locked, damaged, of another version, or of another model."""


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """The result of a turn, for a client that submits it again. `answer` if its answer was read for parts."""

    turn_id: str
    fingerprint: str
    outcome: str
    reason: str
    text: str
    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    answer: StoredAnswer | None = None


# --- records --------------------------------------------------------------------------------------


class RecordKind(StrEnum):
    """The kind of a record, as the log table and the list of batches store it."""

    OPENED = "opened"
    ENDED = "ended"
    TRUNCATED = "cutback"
    COMPACTED = "compacted"
    FORKED = "forked"
    CLOSED = "closed"
    REQUESTED = "requested"
    RETOOLED = "retooled"
    UPDATED = "updated"
    RETAINED = "retained"
    SNAPSHOT_WRITTEN = "snapped"
    SNAPSHOT_DROPPED = "unsnapped"


@dataclass(frozen=True, slots=True)
class Opened:
    """A session was opened; `metadata`, `tools` and `settings` are JSON, `created` is the time of day."""

    kind: ClassVar[RecordKind] = RecordKind.OPENED
    session: str
    tenant: str
    ttl: float | None
    metadata: str
    system: str | None
    created: float
    tools: str = NO_TOOLS
    settings: str = NO_SETTINGS


@dataclass(frozen=True, slots=True)
class Ended:
    """A turn was committed: its input, and its result; `details` is JSON (`answers.details_of`).

    `output` are the generated tokens that stay, where these are not all of the result.
    """

    kind: ClassVar[RecordKind] = RecordKind.ENDED
    session: str
    input: tuple[int, ...]
    turn: FinishedTurn
    details: str = ""
    output: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Truncated:
    """Only `turns` turns remain; if `kept` is a number, the last keeps so many generated tokens."""

    kind: ClassVar[RecordKind] = RecordKind.TRUNCATED
    session: str
    turns: int
    kept: int | None


@dataclass(frozen=True, slots=True)
class Compacted:
    """Turns `first` to `last`, counted from 1, gave way to one with this input and no output."""

    kind: ClassVar[RecordKind] = RecordKind.COMPACTED
    session: str
    first: int
    last: int
    turn_id: str
    input: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Forked:
    """A session was forked from the first `turns` turns of another."""

    kind: ClassVar[RecordKind] = RecordKind.FORKED
    session: str
    parent: str
    turns: int
    created: float


@dataclass(frozen=True, slots=True)
class Closed:
    """A session was closed."""

    kind: ClassVar[RecordKind] = RecordKind.CLOSED
    session: str
    reason: str


@dataclass(frozen=True, slots=True)
class Requested:
    """A verb with a request id was carried out."""

    kind: ClassVar[RecordKind] = RecordKind.REQUESTED
    session: str
    request_id: str
    asked: str
    answer: str


@dataclass(frozen=True, slots=True)
class Retooled:
    """A session has other tools from now on; `tools` is JSON."""

    kind: ClassVar[RecordKind] = RecordKind.RETOOLED
    session: str
    tools: str


@dataclass(frozen=True, slots=True)
class Updated:
    """A session has other metadata from now on; `metadata` is JSON."""

    kind: ClassVar[RecordKind] = RecordKind.UPDATED
    session: str
    metadata: str


@dataclass(frozen=True, slots=True)
class Retained:
    """A session has another time to live, or other settings, from now on; `settings` is JSON."""

    kind: ClassVar[RecordKind] = RecordKind.RETAINED
    session: str
    ttl: float | None
    settings: str


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """A snapshot file holds the memory of a session's first `length` tokens."""

    kind: ClassVar[RecordKind] = RecordKind.SNAPSHOT_WRITTEN
    session: str
    file: str
    length: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotDropped:
    """A session has no snapshot file any more."""

    kind: ClassVar[RecordKind] = RecordKind.SNAPSHOT_DROPPED
    session: str


Record = (
    Opened
    | Ended
    | Truncated
    | Compacted
    | Forked
    | Closed
    | Requested
    | Retooled
    | Updated
    | Retained
    | SnapshotWritten
    | SnapshotDropped
)


# --- stored sessions ------------------------------------------------------------------------------


class AnsweredRequest(NamedTuple):
    """A verb that carried a request id, and its answer."""

    asked: str
    answer: str


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """One turn of a session's history."""

    turn_id: str
    input: list[int]
    output: list[int]
    finish: str
    details: str = ""


class About(NamedTuple):
    """A session's description, in the order of its checksum: `metadata`, `tools` and `settings` are JSON."""

    ttl: float | None = None
    metadata: str = NO_METADATA
    system: str | None = None
    created: float = 0.0
    parent: str | None = None
    tools: str = NO_TOOLS
    settings: str = NO_SETTINGS


@dataclass(slots=True)
class StoredSession:
    """A session as the journal has it."""

    id: str
    about: About
    tenant: str = ""
    turns: list[StoredTurn] = field(default_factory=list)
    finished: list[FinishedTurn] = field(default_factory=list)
    requests: dict[str, AnsweredRequest] = field(default_factory=dict)
    snapshot: SnapshotWritten | None = None
    damaged: bool = False
    unusable: str = ""
    """Why it cannot be recovered; empty if it can."""

    @property
    def tokens(self) -> int:
        """The length of the history in tokens."""
        return sum(len(turn.input) + len(turn.output) for turn in self.turns)


def detail(record: Record) -> str:
    """A record in words, for `holdfast sessions show`."""
    match record:
        case Ended():
            return f"turn {record.turn.turn_id}: {len(record.input)} tokens in, {len(record.turn.tokens)} out"
        case Truncated():
            kept = "" if record.kept is None else f", {record.kept} tokens of the last kept"
            return f"{_turns(record.turns)} left{kept}"
        case Compacted():
            return f"turns {record.first} to {record.last}: {len(record.input)} tokens instead"
        case Forked():
            return f"from {_turns(record.turns)} of {record.parent}"
        case Closed():
            return record.reason
        case Requested():
            return f"{record.asked} ({record.request_id})"
        case SnapshotWritten():
            return f"{record.length} tokens, {record.bytes} bytes in {record.file}"
        case Retained():
            return f"ttl {record.ttl}, {record.settings}"
        case Opened() | Retooled() | Updated() | SnapshotDropped():
            return ""


def _turns(count: int) -> str:
    return "1 turn" if count == 1 else f"{count} turns"


def is_text(value: object) -> TypeGuard[str]:
    """Whether a value is text that UTF-8 can encode: no lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
