"""The tables of a journal, the checksums of their rows, and upgrades from older versions.

A file can be damaged after it was written: a bit of a disk, a byte of a copy. Checksums make sure that no
session continues with the tokens of another. A session has an `origin`, which only its forks share. The
checksum of its first turn continues the origin, that of each other turn the checksum of the turn before it,
and `head_sum` that of the last: a wrong link fails its checksum. Used by the journal and its readers.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing
from hashlib import blake2b

from holdfast.engine.durable.records import NO_SETTINGS, NO_TOOLS, SCHEMA, JournalError, is_text

DAMAGED = -1
"""A checksum that no row has."""

MEND = "restore a copy of it, or move it away to start without its sessions"

CREATE = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE turns (
    number INTEGER PRIMARY KEY, before INTEGER, depth INTEGER NOT NULL, turn_id TEXT NOT NULL,
    input BLOB NOT NULL, output BLOB NOT NULL, finish TEXT NOT NULL, checksum INTEGER NOT NULL,
    details TEXT NOT NULL DEFAULT '');
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, ttl REAL, metadata TEXT NOT NULL, system TEXT,
    created REAL NOT NULL, head INTEGER, parent TEXT, origin INTEGER NOT NULL DEFAULT 0,
    tenant_sum INTEGER NOT NULL DEFAULT 0, about_sum INTEGER NOT NULL DEFAULT 0,
    head_sum INTEGER NOT NULL DEFAULT 0, tools TEXT NOT NULL DEFAULT '[]',
    settings TEXT NOT NULL DEFAULT '{}') WITHOUT ROWID;
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


def row_checksum(*values: object) -> int:
    """The checksum of a row of these values: 63 bits, which SQLite can hold."""
    found = blake2b(digest_size=8)
    for value in values:
        content = value if isinstance(value, bytes) else repr(value).encode("ascii", "backslashreplace")
        found.update(b"%d %d " % (isinstance(value, bytes), len(content)))
        found.update(content)
    return int.from_bytes(found.digest()) >> 1


def turn_checksum(
    before: int, turn_id: str, tokens_in: bytes, tokens_out: bytes, finish: str, details: str = ""
) -> int:
    """The checksum of a turn, which continues that of the turn before it, or an origin.

    Without details it is that of version 3, which had none.
    """
    values = (before, turn_id, tokens_in, tokens_out, finish)
    return row_checksum(*values, details) if details else row_checksum(*values)


def description_checksum(
    name: object,
    ttl: object,
    metadata: object,
    system: object,
    created: object,
    parent: object,
    tools: object = NO_TOOLS,
    settings: object = NO_SETTINGS,
) -> int:
    """The checksum of a session's row, without its tenant and its last turn.

    Without settings it is that of version 4, and without tools that of version 3, which had none.
    """
    values = (name, _real(ttl), metadata, system, _real(created), parent)
    if settings != NO_SETTINGS:
        return row_checksum(*values, tools, settings)
    return row_checksum(*values) if tools == NO_TOOLS else row_checksum(*values, tools)


def _real(value: object) -> object:
    """A number as a REAL column returns it."""
    return float(value) if isinstance(value, int | float) else value


def upgrade(connection: sqlite3.Connection) -> None:
    """Create the tables, or upgrade them from an older version, one version at a time."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA:
        raise JournalError(f"the journal has version {version}; this program reads versions up to {SCHEMA}")
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
        if connection.in_transaction:  # On a full disk SQLite has rolled back by itself.
            connection.execute("ROLLBACK")
        raise
    upgrade(connection)


def is_foreign(connection: sqlite3.Connection) -> bool:
    """Whether a database belongs to another program: it has tables, and none of a journal."""
    found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return bool(found) and not {"facts", "sessions", "turns"} & {name for (name,) in found}


def require_tables(connection: sqlite3.Connection) -> None:
    """Refuse a file whose tables have other columns: every row would seem damaged."""
    with closing(sqlite3.connect(":memory:")) as model:
        _create(model)
        tables = [name for (name,) in model.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            if _columns(connection, table) != _columns(model, table):
                raise JournalError(
                    f"the journal is damaged (the columns of table {table} do not match); {MEND}"
                )


def _columns(connection: sqlite3.Connection, table: str) -> list[object]:
    return connection.execute(
        'SELECT name, type, "notnull", pk FROM pragma_table_info(?)', (table,)
    ).fetchall()


def _create(connection: sqlite3.Connection) -> None:
    for statement in CREATE.split(";"):
        connection.execute(statement)


def _add_checksums(connection: sqlite3.Connection) -> None:
    """From version 1, which had a checksum of each turn by itself, and no others."""
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
            origin = origins.get(head, row_checksum(name, *about))
            reached = origin if head_sum is None else head_sum
            connection.execute(
                "UPDATE sessions SET origin = ?, tenant_sum = ?, about_sum = ?, head_sum = ? WHERE id = ?",
                (
                    *(origin, row_checksum(name, tenant, origin), description_checksum(name, *about)),
                    *(row_checksum(name, reached), name),
                ),
            )
    for table, columns in (
        ("finished", "session, turn_id, result"),
        ("requests", "session, request_id, asked, answer"),
    ):
        for number, *values in connection.execute(f"SELECT number, {columns} FROM {table}").fetchall():
            found = (row_checksum(*values), number)
            connection.execute(f"UPDATE {table} SET checksum = ? WHERE number = ?", found)


def _link_turns(connection: sqlite3.Connection) -> dict[object, int]:
    """Chain the checksums of all turns; a turn whose old checksum fails gets one that never matches.

    Returns the origin of every turn, which is derived from the first turn of its chain.
    """
    origins: dict[object, int] = {}
    sums: dict[object, int] = {}
    last = -1
    while rows := connection.execute(
        "SELECT number, before, checksum, turn_id, input, output, finish FROM turns "
        "WHERE number > ? ORDER BY number LIMIT 256",
        (last,),
    ).fetchall():
        for number, before, checksum, *values in rows:
            origins[number] = (
                row_checksum("origin", number) if before is None else origins.get(before, DAMAGED)
            )
            valid = checksum != DAMAGED and _checksum_of_version_1(*values) == checksum
            continued = origins[number] if before is None else sums.get(before, DAMAGED)
            sums[number] = turn_checksum(continued, *values) if valid else DAMAGED
            connection.execute("UPDATE turns SET checksum = ? WHERE number = ?", (sums[number], number))
        last = rows[-1][0]
    return origins


def _checksum_of_version_1(turn_id: object, tokens_in: object, tokens_out: object, finish: object) -> int:
    """The checksum of a turn in version 1; `DAMAGED` if a value has the wrong type."""
    if not (is_text(turn_id) and is_text(finish)):
        return DAMAGED
    if not (isinstance(tokens_in, bytes) and isinstance(tokens_out, bytes)):
        return DAMAGED
    return zlib.crc32(tokens_out, zlib.crc32(tokens_in, zlib.crc32(f"{turn_id} {finish}".encode())))


def _name_sample(connection: sqlite3.Connection) -> None:
    """From version 2, which identified the vocabulary by one encoded sentence."""
    connection.execute("UPDATE facts SET name = 'sample' WHERE name = 'vocabulary'")


def _add_answers(connection: sqlite3.Connection) -> None:
    """From version 3, which had no tools and kept nothing of an answer but its tokens."""
    connection.execute("ALTER TABLE turns ADD COLUMN details TEXT NOT NULL DEFAULT ''")
    connection.execute(f"ALTER TABLE sessions ADD COLUMN tools TEXT NOT NULL DEFAULT '{NO_TOOLS}'")


def _add_settings(connection: sqlite3.Connection) -> None:
    """From version 4, which kept of how a session is kept its time to live alone."""
    connection.execute(f"ALTER TABLE sessions ADD COLUMN settings TEXT NOT NULL DEFAULT '{NO_SETTINGS}'")


UPGRADES: dict[int, Callable[[sqlite3.Connection], None]] = {
    1: _add_checksums,
    2: _name_sample,
    3: _add_answers,
    4: _add_settings,
}
"""For each older version of the tables, the step to the next one."""
