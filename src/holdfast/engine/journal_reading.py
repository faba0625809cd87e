"""Reading a journal: the sessions that it holds, as of the last record that was written whole.

Changes nothing, so it may be done beside a server that writes. Used by the journal itself at a restart, and
by the command that looks into one.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from holdfast.engine.records import (
    SCHEMA,
    FinishedTurn,
    JournalError,
    Snapped,
    StoredSession,
    StoredTurn,
    checksum,
    unpack,
)

log = logging.getLogger("holdfast.journal")

_CHAIN = (
    "WITH RECURSIVE chain (number, before, depth) AS ("
    "SELECT number, before, depth FROM turns WHERE number = ? UNION ALL "
    "SELECT t.number, t.before, t.depth FROM turns t JOIN chain c ON t.number = c.before) "
    "SELECT number, turns.before, turns.depth, turn_id, input, output, finish, checksum "
    "FROM chain JOIN turns USING (number) ORDER BY chain.depth"
)


def load(connection: sqlite3.Connection) -> Iterator[StoredSession]:
    """Every session that is open, one after the other."""
    rows = connection.execute(
        "SELECT id, tenant, ttl, metadata, system, created, parent, head FROM sessions ORDER BY created, id"
    ).fetchall()
    for *described, head in rows:
        session = StoredSession(*described)
        _check_metadata(session)
        _load_turns(connection, session, head)
        _load_finished(connection, session)
        for request_id, asked, answer in connection.execute(
            "SELECT request_id, asked, answer FROM requests WHERE session = ? ORDER BY number", (session.id,)
        ):
            session.requests[request_id] = (asked, answer)
        found = connection.execute(
            "SELECT file, length, bytes FROM snapshots WHERE session = ?", (session.id,)
        ).fetchone()
        if found is not None:
            session.snapshot = Snapped(session.id, *found)
        yield session


def _load_turns(connection: sqlite3.Connection, session: StoredSession, head: int | None) -> None:
    """A history up to its first row that does not add up: what follows it would be out of place."""
    reached = None
    for number, before, depth, turn_id, *said, finish, expected in connection.execute(_CHAIN, (head,)):
        said_in, said_out = said
        in_place = (before, depth) == (reached, len(session.turns) + 1)
        if not in_place or checksum(turn_id, said_in, said_out, finish) != expected:
            log.error("session %s: turn %s is damaged; the session ends before it", session.id, turn_id)
            session.damaged = True
            return
        session.turns.append(StoredTurn(turn_id, unpack(said_in), unpack(said_out), finish))
        reached = number
    if reached != head:
        log.error("session %s: its last turn is missing; the session starts anew", session.id)
        session.damaged = True


def _load_finished(connection: sqlite3.Connection, session: StoredSession) -> None:
    """The answers that may be asked for again; one that cannot be read is forgotten."""
    for turn_id, result in connection.execute(
        "SELECT turn_id, result FROM finished WHERE session = ? ORDER BY number", (session.id,)
    ):
        try:
            session.finished.append(FinishedTurn(**json.loads(result)))
        except (ValueError, TypeError):
            log.error("session %s: the answer of turn %s is damaged, and forgotten", session.id, turn_id)


def _check_metadata(session: StoredSession) -> None:
    try:
        json.loads(session.metadata)
    except ValueError:
        log.error("session %s: its metadata is damaged, and forgotten", session.id)
        session.metadata = "{}"


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A journal that this program can read; `JournalError` says what is wrong with another one."""
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            raise JournalError(f"{path} is no journal")
        if version > SCHEMA:
            raise JournalError(f"{path} has version {version}; this program knows {SCHEMA} at most")
        if version < SCHEMA:
            raise JournalError(
                f"{path} has version {version}; a server that is started on it brings it to {SCHEMA}"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def read_sessions(path: Path) -> list[StoredSession]:
    """Every session of a journal, without changing it; a server may be writing it meanwhile."""
    with closing(open_for_reading(path)) as connection:
        return list(load(connection))


def read_log(path: Path, session: str) -> list[tuple[str, str]]:
    """What happened to a session lately, oldest first: kinds and details."""
    with closing(open_for_reading(path)) as connection:
        rows = connection.execute(
            "SELECT kind, detail FROM log WHERE session = ? ORDER BY number", (session,)
        )
        return [(kind, detail) for kind, detail in rows]


def read_vocabulary(path: Path) -> str:
    """What the tokens of a journal mean, as its writer has noted it."""
    with closing(open_for_reading(path)) as connection:
        found = connection.execute("SELECT value FROM facts WHERE name = 'vocabulary'").fetchone()
    if found is None:
        raise JournalError(f"{path} is no journal")
    return str(found[0])
