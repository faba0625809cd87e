"""Reading the sessions of a journal in PostgreSQL, as of one moment, a bounded number of turns at a time.

Rows are checked as those of a SQLite journal are (`journal_reading`): a history ends before its first turn
whose checksum fails, and any other damaged value is dropped with a line in the log. Reading changes nothing.
Used by the store at a start, and by `holdfast sessions`.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from holdfast.engine.durable.journal_reading import describe, read_result, valid_turn
from holdfast.engine.durable.journal_tables import row_checksum
from holdfast.engine.durable.places import shown
from holdfast.engine.durable.postgres.changes import About, Known
from holdfast.engine.durable.postgres.link import Connection, connect, in_words
from holdfast.engine.durable.postgres.tables import VERSION, escape, newer, read_facts, unescape, version_of
from holdfast.engine.durable.records import (
    AnsweredRequest,
    JournalError,
    SnapshotWritten,
    StoredSession,
)

__all__ = ["read_log", "read_sessions", "read_snapshots", "read_vocabulary", "revive"]

log = logging.getLogger("holdfast.journal")

SESSIONS_AT_ONCE = 64
TURNS_AT_ONCE = 2048
"""Turns that are read in one round, or those of one session."""

SESSIONS = (
    "SELECT id, tenant, ttl, metadata, system, created, parent, tools, settings, origin, tenant_sum, "
    "about_sum, head, head_sum, turns, epoch, commits FROM holdfast.sessions"
)

# UNION drops what is there already: damaged links in a ring end the walk.
CHAINS = """
WITH RECURSIVE chain (number, before) AS (
    SELECT number, before FROM holdfast.turns WHERE number = ANY(%s)
    UNION SELECT t.number, t.before FROM holdfast.turns t JOIN chain c ON t.number = c.before)
SELECT number, t.before, depth, checksum, turn_id, input, output, finish, details
FROM chain JOIN holdfast.turns t USING (number)
"""


class _SessionRow(NamedTuple):
    """A row of `SESSIONS`."""

    id: str
    tenant: str
    ttl: float | None
    metadata: str
    system: str | None
    created: float
    parent: str | None
    tools: str
    settings: str
    origin: int
    tenant_sum: int
    about_sum: int
    head: int | None
    head_sum: int
    turns: int
    epoch: int
    commits: int


class Revived(NamedTuple):
    """A session as read, and the cached facts of its rows."""

    stored: StoredSession
    known: Known


def revive(
    connection: Connection, owner: int | None = None, only: Sequence[str] | None = None
) -> Iterator[Revived]:
    """Every session, or those of one life, or `only` some of them, a few at a time.

    Nobody may change them meanwhile.
    """
    names = connection.execute(
        "SELECT id FROM holdfast.sessions WHERE (%(owner)s::bigint IS NULL OR owner = %(owner)s) "
        "AND (%(only)s::text[] IS NULL OR id = ANY(%(only)s)) ORDER BY created, id",
        {"owner": owner, "only": None if only is None else [escape(name) for name in only]},
    ).fetchall()
    for first in range(0, len(names), SESSIONS_AT_ONCE):
        some = [name for (name,) in names[first : first + SESSIONS_AT_ONCE]]
        rows = connection.execute(f"{SESSIONS} WHERE id = ANY(%s) ORDER BY created, id", (some,))
        for few in _in_rounds([_unescaped(_SessionRow(*row)) for row in rows]):
            yield from _revive(connection, few)


def _in_rounds(rows: Sequence[_SessionRow]) -> Iterator[list[_SessionRow]]:
    """Sessions whose turns are read together."""
    few: list[_SessionRow] = []
    turns = 0
    for row in rows:
        if few and turns + row.turns > TURNS_AT_ONCE:
            yield few
            few, turns = [], 0
        few.append(row)
        turns += row.turns
    if few:
        yield few


def _unescaped(row: _SessionRow) -> _SessionRow:
    return row._replace(
        id=unescape(row.id),
        tenant=unescape(row.tenant),
        system=None if row.system is None else unescape(row.system),
        parent=None if row.parent is None else unescape(row.parent),
    )


def _revive(connection: Connection, rows: Sequence[_SessionRow]) -> Iterator[Revived]:
    heads = [row.head for row in rows if row.head is not None]
    turns = {row[0]: row for row in connection.execute(CHAINS, (heads,), binary=True)} if heads else {}
    names = [escape(row.id) for row in rows]
    finished = _by_session(
        connection, "SELECT session, turn_id, result, checksum, number FROM holdfast.finished", names
    )
    requests = _by_session(
        connection,
        "SELECT session, request_id, asked, answer, checksum, number FROM holdfast.requests",
        names,
    )
    snapshots = {
        unescape(row[0]): row[1:]
        for row in connection.execute(
            "SELECT session, file, length, bytes FROM holdfast.snapshots WHERE session = ANY(%s)", (names,)
        )
    }
    for row in rows:
        about = About(*row[2:9])
        stored = describe(row.id, about, row.about_sum)
        known = Known(row.tenant, row.origin, about, row.epoch, row.commits)
        if row_checksum(row.id, row.tenant, row.origin) == row.tenant_sum:
            stored.tenant = row.tenant
        else:
            stored.unusable = "its tenant is damaged"
        _read_turns(stored, known, row, turns)
        for each in finished.get(row.id, ()):
            _read_finished(stored, known, *each)
        for each in requests.get(row.id, ()):
            _read_request(stored, known, *each)
        if row.id in snapshots:
            _read_snapshot(stored, *snapshots[row.id])
        known.opaque = bool(stored.unusable)
        yield Revived(stored, known)


def _by_session(connection: Connection, statement: str, names: list[str]) -> dict[str, list[tuple[Any, ...]]]:
    found: dict[str, list[tuple[Any, ...]]] = {}
    rows = connection.execute(f"{statement} WHERE session = ANY(%s) ORDER BY number", (names,))
    for name, *values in rows:
        found.setdefault(unescape(name), []).append(tuple(values))
    return found


def _read_turns(
    stored: StoredSession, known: Known, row: _SessionRow, turns: dict[int, tuple[Any, ...]]
) -> None:
    """Read a history up to its first turn whose checksum fails.

    If it is uncertain which turn is the last, the session is unusable and its rows stay as they are.
    """
    chain: list[tuple[Any, ...]] = []
    number = row.head
    while number in turns and len(chain) <= len(turns):
        chain.append(turns[number])
        number = turns[number][1]
    missing = row.head is not None and not chain
    last = chain[0][3] if chain else row.origin
    if missing or row_checksum(row.id, last) != row.head_sum:
        stored.damaged = True
        stored.unusable = stored.unusable or "the link to its last turn is damaged"
        return
    reached, chained = None, row.origin
    numbers, sums = array("q"), array("q")
    for number, before, depth, checksum, turn_id, tokens_in, tokens_out, finish, details in reversed(chain):
        place = len(numbers) + 1
        values = (unescape(turn_id), bytes(tokens_in), bytes(tokens_out), unescape(finish), details)
        in_place = (before, depth) == (reached, place)
        turn = valid_turn(checksum, chained, *values) if in_place else None
        if turn is None:
            log.error("session %s: turn %d is damaged; the session is cut before it", stored.id, place)
            stored.damaged = True
            break
        stored.turns.append(turn)
        numbers.append(number)
        sums.append(checksum)
        reached, chained = number, checksum
    known.numbers, known.sums = numbers, sums


def _read_finished(
    stored: StoredSession, known: Known, turn_id: str, result: str, checksum: int, number: int
) -> None:
    turn_id = unescape(turn_id)
    valid = row_checksum(stored.id, turn_id, result) == checksum
    answer = read_result(turn_id, result) if valid else None
    if answer is not None:
        stored.finished.append(answer)
    else:
        log.error("session %s: the result of turn %a is damaged and was dropped", stored.id, turn_id)
    known.finished.append(turn_id)
    known.serial = max(known.serial, number)


def _read_request(
    stored: StoredSession, known: Known, request_id: str, asked: str, answer: str, checksum: int, number: int
) -> None:
    request_id, asked, answer = unescape(request_id), unescape(asked), unescape(answer)
    if row_checksum(stored.id, request_id, asked, answer) == checksum:
        stored.requests[request_id] = AnsweredRequest(asked, answer)
    else:
        log.error("session %s: request %a is damaged and was dropped", stored.id, request_id)
    known.requests.append(request_id)
    known.serial = max(known.serial, number)


def _read_snapshot(stored: StoredSession, file: str, length: int, size: int) -> None:
    file = unescape(file)
    if Path(file).name == file and size >= 0:  # A path could leave the snapshot directory.
        stored.snapshot = SnapshotWritten(stored.id, file, length, size)
    else:
        log.error("session %s: the name of its snapshot is damaged and was dropped", stored.id)


def read_snapshots(connection: Connection) -> Iterator[SnapshotWritten]:
    """The rows of all snapshot files whose names are valid."""
    for session, file, length, size in connection.execute(
        "SELECT session, file, length, bytes FROM holdfast.snapshots"
    ):
        name = unescape(file)
        if Path(name).name == name and size >= 0:
            yield SnapshotWritten(unescape(session), name, length, size)


# --- readers beside a server ----------------------------------------------------------------------


def open_for_reading(url: str) -> Connection:
    """A connection to a journal of this version; `JournalError` if there is none."""
    try:
        connection = connect(url)
    except psycopg.Error as error:
        raise JournalError(f"{shown(url)} cannot be reached: {in_words(error)}") from error
    try:
        version = version_of(read_facts(connection))
        if version > VERSION:
            raise JournalError(newer(version))
        if version < VERSION:
            raise JournalError(
                f"{shown(url)} has version {version}; start a server on it once to upgrade it to {VERSION}"
            )
    except psycopg.errors.UndefinedTable as error:
        connection.close()
        raise JournalError(f"{shown(url)} has no journal; `holdfast serve --journal` creates it") from error
    except BaseException:
        connection.close()
        raise
    return connection


def read_sessions(url: str) -> list[StoredSession]:
    """Every session of a journal, without changing it; servers may write it meanwhile."""
    with closing(open_for_reading(url)) as connection, connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        return [revived.stored for revived in revive(connection)]


def read_log(url: str, session: str) -> list[tuple[str, str]]:
    """The latest changes of a session, oldest first: kinds and details."""
    with closing(open_for_reading(url)) as connection:
        rows = connection.execute(
            "SELECT kind, detail FROM holdfast.log WHERE session = %s ORDER BY number", (escape(session),)
        )
        return [(kind, unescape(detail)) for kind, detail in rows]


def read_vocabulary(url: str) -> str:
    """The identity of a journal's vocabulary."""
    with closing(open_for_reading(url)) as connection:
        return read_facts(connection).get("vocabulary", "")
