"""The tables of a journal, what their rows must add up to, and how older journals are brought up to them.

A file that was written whole can still be changed afterwards: a bit of a disk, a byte of a copy. So that no
session ever goes on with the words of another, rows carry sums. A session has an `origin`, which only its
forks share; the sum of its first turn goes on from that, the sum of each other turn from the turn before it,
and `head_sum` from the last: a link that leads elsewhere adds up nowhere. Used by the journal, and by whoever
reads one.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing
from hashlib import blake2b

from holdfast.engine.durable.records import SCHEMA, JournalError, is_text

DAMAGED = -1
"""A sum that no row has."""

MEND = "restore a copy of it, or move it away to start without its sessions"

CREATE = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE turns (
    number INTEGER PRIMARY KEY, before INTEGER, depth INTEGER NOT NULL, turn_id TEXT NOT NULL,
    input BLOB NOT NULL, output BLOB NOT NULL, finish TEXT NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, ttl REAL, metadata TEXT NOT NULL, system TEXT,
    created REAL NOT NULL, head INTEGER, parent TEXT, origin INTEGER NOT NULL DEFAULT 0,
    tenant_sum INTEGER NOT NULL DEFAULT 0, about_sum INTEGER NOT NULL DEFAULT 0,
    head_sum INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE TABLE finished (
    number INTEGER PRIMARY KEY, session TEXT NOT NULL, turn_id TEXT NOT NULL, result TEXT NOT NULL,
    checksum INTEGER NOT NULL DEFAULT 0, UNIQUE (session, turn_id));
CREATE TABLE requests (
    number INTEGER PRIMARY KEY, session TEXT NOT NULL, request_id TEXT NOT NULL, asked TEXT NOT NULL,
    answer TEXT NOT NULL, checksum INTEGER NOT NULL DEFAULT 0, UNIQUE (session, request_id));
CREATE TABLE snapshots (
    session TEXT PRIMARY KEY, file TEXT NOT NULL, length INTEGER NOT NULL, bytes INTEGER NOT NULL
    ) WITHOUT ROWID;
CREATE TABLE log (
    number INTEGER PRIMARY KEY, session TEXT NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL);
"""


def row_sum(*values: object) -> int:
    """What a row of these values must add up to: a number that SQLite can hold, and no other row has."""
    found = blake2b(digest_size=8)
    for value in values:
        said = value if isinstance(value, bytes) else repr(value).encode("ascii", "backslashreplace")
        found.update(b"%d %d " % (isinstance(value, bytes), len(said)))
        found.update(said)
    return int.from_bytes(found.digest()) >> 1


def turn_sum(before: int, turn_id: str, said_in: bytes, said_out: bytes, finish: str) -> int:
    """The sum of a turn that goes on from another one's, or from an origin."""
    return row_sum(before, turn_id, said_in, said_out, finish)


def about_sum(
    name: object, ttl: object, metadata: object, system: object, created: object, parent: object
) -> int:
    """The sum of what a session's row says, apart from whose it is and how far it has come."""
    return row_sum(name, _real(ttl), metadata, system, _real(created), parent)


def _real(value: object) -> object:
    """A number as it comes back from a column of such."""
    return float(value) if isinstance(value, int | float) else value


def upgrade(connection: sqlite3.Connection) -> None:
    """Bring the tables of an older version up to this one, step by step, or make them."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA:
        raise JournalError(f"the journal has version {version}; this program knows {SCHEMA} at most")
    if version < 0:
        raise JournalError(f"the journal is damaged (its version is {version}); {MEND}")
    if version == SCHEMA:
        return
    step = _create if version == 0 else UPGRADES[version]
    reached = SCHEMA if version == 0 else version + 1
    connection.execute("BEGIN IMMEDIATE")
    try:
        step(connection)
        connection.execute(f"PRAGMA user_version = {reached}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # Where there is no room SQLite has rolled back itself.
            connection.execute("ROLLBACK")
        raise
    upgrade(connection)


def has_others(connection: sqlite3.Connection) -> bool:
    """Whether a database has tables and none of a journal: it is another program's."""
    found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return bool(found) and not {"facts", "sessions", "turns"} & {name for (name,) in found}


def require_tables(connection: sqlite3.Connection) -> None:
    """Refuse a file whose tables are not those of a journal: in such ones whole rows would seem damaged."""
    with closing(sqlite3.connect(":memory:")) as model:
        _create(model)
        tables = [name for (name,) in model.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            if _columns(connection, table) != _columns(model, table):
                raise JournalError(f"the journal is damaged (its table {table} has other columns); {MEND}")


def _columns(connection: sqlite3.Connection, table: str) -> list[object]:
    return connection.execute(
        'SELECT name, type, "notnull", pk FROM pragma_table_info(?)', (table,)
    ).fetchall()


def _create(connection: sqlite3.Connection) -> None:
    for statement in CREATE.split(";"):
        connection.execute(statement)


def _add_sums(connection: sqlite3.Connection) -> None:
    """From version 1, whose turns had sums of their own alone, and nothing else had any."""
    for table, column in (
        ("sessions", "origin"),
        ("sessions", "tenant_sum"),
        ("sessions", "about_sum"),
        ("sessions", "head_sum"),
        ("finished", "checksum"),
        ("requests", "checksum"),
    ):
        connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} INTEGER NOT NULL DEFAULT 0")
    origins = _link_turns(connection)
    rows = connection.execute(
        "SELECT id, tenant, ttl, metadata, system, created, parent, head, "
        "(SELECT checksum FROM turns WHERE number = head) FROM sessions"
    ).fetchall()
    for name, tenant, *about, head, head_sum in rows:
        if is_text(name):
            origin = origins.get(head, row_sum(name, *about))
            reached = origin if head_sum is None else head_sum
            connection.execute(
                "UPDATE sessions SET origin = ?, tenant_sum = ?, about_sum = ?, head_sum = ? WHERE id = ?",
                (
                    *(origin, row_sum(name, tenant, origin), about_sum(name, *about)),
                    *(row_sum(name, reached), name),
                ),
            )
    for table, columns in (
        ("finished", "session, turn_id, result"),
        ("requests", "session, request_id, asked, answer"),
    ):
        for number, *values in connection.execute(f"SELECT number, {columns} FROM {table}").fetchall():
            found = (row_sum(*values), number)
            connection.execute(f"UPDATE {table} SET checksum = ? WHERE number = ?", found)


def _link_turns(connection: sqlite3.Connection) -> dict[object, int]:
    """Sums that go on from those before them; a turn that did not add up adds up to nothing any more.

    Returns the origin of every turn: a number of the first one that it leads back to.
    """
    origins: dict[object, int] = {}
    sums: dict[object, int] = {}
    last = -1
    while rows := connection.execute(
        "SELECT number, before, checksum, turn_id, input, output, finish FROM turns "
        "WHERE number > ? ORDER BY number LIMIT 256",
        (last,),
    ).fetchall():
        for number, before, checksum, *said in rows:
            origins[number] = row_sum("origin", number) if before is None else origins.get(before, DAMAGED)
            whole = checksum != DAMAGED and _sum_of_version_1(*said) == checksum
            goes_on_from = origins[number] if before is None else sums.get(before, DAMAGED)
            sums[number] = turn_sum(goes_on_from, *said) if whole else DAMAGED
            connection.execute("UPDATE turns SET checksum = ? WHERE number = ?", (sums[number], number))
        last = rows[-1][0]
    return origins


def _sum_of_version_1(turn_id: object, said_in: object, said_out: object, finish: object) -> int:
    """What a turn's row had to add up to; `DAMAGED` for what is none."""
    if not (is_text(turn_id) and is_text(finish)):
        return DAMAGED
    if not (isinstance(said_in, bytes) and isinstance(said_out, bytes)):
        return DAMAGED
    return zlib.crc32(said_out, zlib.crc32(said_in, zlib.crc32(f"{turn_id} {finish}".encode())))


def _name_sample(connection: sqlite3.Connection) -> None:
    """From version 2, whose vocabulary was known by how one sentence is encoded."""
    connection.execute("UPDATE facts SET name = 'sample' WHERE name = 'vocabulary'")


UPGRADES: dict[int, Callable[[sqlite3.Connection], None]] = {1: _add_sums, 2: _name_sample}
"""For each older version of the tables, what leads to the next one."""
