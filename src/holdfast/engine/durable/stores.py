"""Opens and reads journals by their place: SQLite files and PostgreSQL databases.

The modules of PostgreSQL are imported where a place names a database, and only there: psycopg is an extra.
Used by the recovery and by `holdfast sessions`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from holdfast.engine.durable import journal_reading
from holdfast.engine.durable.journal import Journal
from holdfast.engine.durable.membership import Membership
from holdfast.engine.durable.places import is_database
from holdfast.engine.durable.records import JournalError, StoredSession
from holdfast.engine.durable.store import Durability, Store

__all__ = ["open_store", "read_log", "read_sessions", "read_vocabulary"]

MISSING = "a journal in PostgreSQL needs psycopg: pip install 'holdfast[cluster]'"


def open_store(
    place: str,
    durability: Durability,
    vocabulary: str,
    lock_timeout: float = 0.0,
    sample: str | None = None,
    member: Membership | None = None,
) -> Store:
    """Open a journal for writing, or create it. A `member` of a cluster shares it with other servers."""
    if is_database(place):
        postgres = _import("store")
        opened: Store = postgres.PostgresJournal(
            place, durability, vocabulary, lock_timeout=lock_timeout, member=member
        )
        return opened
    return Journal(Path(place), durability, vocabulary, lock_timeout=lock_timeout, sample=sample)


def read_sessions(place: str | Path) -> list[StoredSession]:
    """Every session of a journal, without changing it; a server may write it meanwhile."""
    if is_database(place):
        sessions: list[StoredSession] = _import("reading").read_sessions(place)
        return sessions
    return journal_reading.read_sessions(Path(place))


def read_log(place: str | Path, session: str) -> list[tuple[str, str]]:
    """The latest changes of a session, oldest first: kinds and details."""
    if is_database(place):
        changes: list[tuple[str, str]] = _import("reading").read_log(place, session)
        return changes
    return journal_reading.read_log(Path(place), session)


def read_vocabulary(place: str | Path) -> str:
    """The identity of a journal's vocabulary."""
    if is_database(place):
        return str(_import("reading").read_vocabulary(place))
    return journal_reading.read_vocabulary(Path(place))


def _import(name: str) -> ModuleType:
    """A module of the PostgreSQL journal; the error without psycopg names the extra."""
    try:
        import_module("psycopg")
    except ImportError as error:
        raise JournalError(MISSING) from error
    return import_module(f"holdfast.engine.durable.postgres.{name}")
