"""Reading a journal: the sessions that it holds, as of the last record that was written whole.

Changes nothing, so it may be done beside a server that writes. Used by the journal itself at a restart, and
by the command that looks into one.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from holdfast.engine.records import FinishedTurn, Snapped, StoredSession, StoredTurn, checksum, unpack

log = logging.getLogger("holdfast.journal")

_CHAIN = (
    "WITH RECURSIVE chain (number, before, depth) AS ("
    "SELECT number, before, depth FROM turns WHERE number = ? UNION ALL "
    "SELECT t.number, t.before, t.depth FROM turns t JOIN chain c ON t.number = c.before) "
    "SELECT turn_id, input, output, finish, checksum FROM chain JOIN turns USING (number) "
    "ORDER BY chain.depth"
)


def load(connection: sqlite3.Connection) -> Iterator[StoredSession]:
    """Every session that is open, one after the other."""
    rows = connection.execute(
        "SELECT id, tenant, ttl, metadata, system, created, parent, head FROM sessions ORDER BY created, id"
    ).fetchall()
    for *described, head in rows:
        session = StoredSession(*described)
        _load_turns(connection, session, head)
        for (result,) in connection.execute(
            "SELECT result FROM finished WHERE session = ? ORDER BY number", (session.id,)
        ):
            session.finished.append(FinishedTurn(**json.loads(result)))
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
    for turn_id, said_in, said_out, finish, expected in connection.execute(_CHAIN, (head,)):
        if checksum(turn_id, said_in, said_out, finish) != expected:
            log.error("session %s: turn %s is damaged; the session ends before it", session.id, turn_id)
            session.damaged = True
            return
        session.turns.append(StoredTurn(turn_id, unpack(said_in), unpack(said_out), finish))


def read_sessions(path: Path) -> list[StoredSession]:
    """Every session of a journal, without changing it; a server may be writing it meanwhile."""
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        return list(load(connection))
    finally:
        connection.close()


def read_log(path: Path, session: str) -> list[tuple[str, str]]:
    """What happened to a session lately, oldest first: kinds and details."""
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        rows = connection.execute(
            "SELECT kind, detail FROM log WHERE session = ? ORDER BY number", (session,)
        )
        return [(kind, detail) for kind, detail in rows]
    finally:
        connection.close()
