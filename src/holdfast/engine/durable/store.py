"""The interface of a journal's store, for SQLite and PostgreSQL.

A store is opened (and its tables upgraded) by its constructor, then read once with `sessions`, then handed to
the writer's thread (`journal_writer`), which alone calls it until `close`. The engine itself never executes
SQL: a step submits a batch to the writer and goes on. Implemented by `journal.Journal` (a SQLite file) and
`postgres.store.PostgresJournal`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from holdfast.engine.durable.records import JournalError, Record, SnapshotWritten, StoredSession

__all__ = [
    "Claims",
    "Durability",
    "Home",
    "JournalInUse",
    "LifeRow",
    "OwningStore",
    "Probe",
    "Refusal",
    "Store",
    "Taken",
    "WritePoint",
    "no_probe",
]

Durability = Literal["off", "commit", "fsync"]


class JournalInUse(JournalError):
    """Another process has the journal open for writing."""


class WritePoint(StrEnum):
    """Points of a flush at which a test can stop the process."""

    BEFORE_APPEND = "before append"
    MID_RECORD = "mid-record"
    AFTER_WRITE = "after write"
    AFTER_FSYNC = "after fsync"


Probe = Callable[[WritePoint], None]


def no_probe(point: WritePoint) -> None:
    """No test stops the process."""


class Store(Protocol):
    """Where records are kept. Once it has a writer, only the writer's thread calls it."""

    durability: Durability

    fault: str | None
    """Why it cannot be written, if it cannot; any thread may read it."""

    @property
    def place(self) -> str:
        """Where it is, for messages: a path, or a URL without credentials."""
        ...

    @property
    def owning(self) -> OwningStore | None:
        """The same store, where servers take each other's sessions over; None for a server that is alone."""
        ...

    def sessions(self) -> Iterator[StoredSession]:
        """Every open session, one at a time; damage is found here, and marked in the session.

        To be read to its end, before the first record is appended.
        """
        ...

    def adopt_vocabulary(self) -> None:
        """Store the vocabulary where an older version only has a sample of it."""
        ...

    @property
    def pending(self) -> bool:
        """Whether a record has been appended and is not stored yet."""
        ...

    def append(self, record: Record) -> None:
        """Add a record to the next flush."""
        ...

    def flush(self) -> bool:
        """Store everything that was appended, durably; False if that fails, and the records are kept."""
        ...

    def take_refused(self) -> frozenset[str]:
        """Sessions whose records the last flushes dropped: they have another owner now."""
        ...

    def compact(self) -> bool:
        """Do a bounded part of a compaction; whether there is more to do."""
        ...

    def keep_alive(self) -> float | None:
        """Renew the store's lease; returns the seconds until the next call, None if none is needed."""
        ...

    def remove(self, session_id: str) -> bool:
        """Close a session for good, where no engine has the store open; False if that fails."""
        ...

    def close(self) -> None:
        """Store the remaining records and release the store."""
        ...


class Claims(NamedTuple):
    """The answer to a claim: sessions that are this server's now, and the lives that own the others."""

    sessions: list[StoredSession]
    elsewhere: dict[str, int]


class Home(NamedTuple):
    """The server that owns a session: its life, its name and address, and whether it is alive."""

    life: int
    name: str
    address: str
    alive: bool


class LifeRow(NamedTuple):
    """A life as operators see it: its sessions, and the highest epoch among them."""

    life: int
    name: str
    address: str
    life_state: str
    lease_seconds: float
    owned: int
    epoch: int


class Taken(NamedTuple):
    """What came of taking sessions over: those that are this server's now, and the owners of the others.

    A session that is in neither is not in the journal.
    """

    sessions: list[StoredSession]
    elsewhere: dict[str, Home]


class Refusal(StrEnum):
    """Why the store refused a new session."""

    EXISTS = "exists"
    LIMIT = "limit"
    MOVED = "moved"


class OwningStore(Store, Protocol):
    """A store that several servers write: sessions have owners, which may change.

    These calls come after everything that was appended. `JournalError` if the store cannot be reached; then
    they may be made again.
    """

    @property
    def life(self) -> int:
        """The number of this run of the server among all."""
        ...

    @property
    def identity(self) -> str:
        """What tells this journal from others: the same for all servers that write it."""
        ...

    @property
    def confirmed(self) -> float:
        """When a statement was sent that has shown this life to be alive, by this process's clock."""
        ...

    def confirm(self, asked: float) -> bool:
        """Whether this life is alive, by an answer of the store to a question not older than `asked`."""
        ...

    def take_over(self, names: Sequence[str], unheard: Collection[str]) -> Taken:
        """Claim sessions, and declare their owners dead first where the leases allow that.

        `unheard` are names of servers whose connection to an API process has ended.
        """
        ...

    def locate(self, names: Sequence[str]) -> dict[str, Home]:
        """The owners of sessions, but for unknown ones."""
        ...

    def why_refused(self, name: str, tenant: str) -> Refusal:
        """Why a new session was refused."""
        ...

    def others(self) -> list[Home]:
        """The servers besides this one that take sessions."""
        ...

    def lives(self) -> list[LifeRow]:
        """The lives that are alive or own sessions, the newest of a name last."""
        ...

    def snapshots(self) -> list[SnapshotWritten]:
        """The rows of all snapshot files, of this engine and of others."""
        ...

    def unclaimed(self, after: str, seconds: float, most: int) -> list[str]:
        """Sessions after `after` whose owner was last alive so long ago."""
        ...

    def claim(self, names: Sequence[str]) -> Claims:
        """Take over sessions whose owner is over, and read them; this server's own are read again."""
        ...

    def hand_over(self, names: Sequence[str], life: int) -> frozenset[str]:
        """Hand sessions at rest over to a life: those that are its own now."""
        ...

    def drain(self) -> bool:
        """Take no more sessions over; False if this life is over."""
        ...
