"""The tables of a journal in PostgreSQL, and upgrades from older versions.

They are those of the SQLite journal, in a schema of their own, with lives and owners. A *life* is one run of
a server: a row that its server renews. Every session has an owner (a life), an *epoch*, which rises whenever
it changes owners, and a number of `commits`, which rises with each transaction on it: the fence of every
write. `tenants` counts the sessions that were opened under a limit. Text cannot hold NUL in PostgreSQL, so
texts of clients are escaped. Used by the store and its readers.
"""

from __future__ import annotations

from collections.abc import Mapping

from psycopg import Connection

from holdfast.engine.durable.records import JournalError

__all__ = ["escape", "read_facts", "unescape", "upgrade"]

VERSION = 2

LOCK_KEY = 0x686F6C6466617374
"""The advisory lock under which tables are made and upgraded."""


CREATE = """
CREATE TABLE holdfast.lives (
    life bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL, state text NOT NULL,
    host text NOT NULL, process bigint NOT NULL, began timestamptz NOT NULL DEFAULT now(),
    lease timestamptz NOT NULL, batch bigint NOT NULL DEFAULT 0, address text NOT NULL DEFAULT '',
    CHECK (state IN ('live', 'draining', 'ended', 'dead')));
CREATE UNIQUE INDEX lives_name ON holdfast.lives (name) WHERE state IN ('live', 'draining');
CREATE TABLE holdfast.turns (
    number bigint PRIMARY KEY, before bigint, depth integer NOT NULL, turn_id text NOT NULL,
    input bytea NOT NULL, output bytea NOT NULL, finish text NOT NULL, checksum bigint NOT NULL,
    details text NOT NULL);
CREATE INDEX turns_before ON holdfast.turns (before);
CREATE TABLE holdfast.sessions (
    id text COLLATE "C" PRIMARY KEY, tenant text NOT NULL, ttl double precision, metadata text NOT NULL,
    system text, created double precision NOT NULL, parent text, tools text NOT NULL, settings text NOT NULL,
    origin bigint NOT NULL, tenant_sum bigint NOT NULL, about_sum bigint NOT NULL,
    head bigint, head_sum bigint NOT NULL, turns integer NOT NULL,
    owner bigint NOT NULL REFERENCES holdfast.lives, epoch bigint NOT NULL, commits bigint NOT NULL,
    counted boolean NOT NULL DEFAULT false);
CREATE TABLE holdfast.tenants (
    tenant text COLLATE "C" PRIMARY KEY, sessions bigint NOT NULL, granted bigint NOT NULL);
CREATE INDEX sessions_head ON holdfast.sessions (head);
CREATE INDEX sessions_owner ON holdfast.sessions (owner);
CREATE TABLE holdfast.finished (
    session text COLLATE "C" NOT NULL REFERENCES holdfast.sessions ON DELETE CASCADE, turn_id text NOT NULL,
    number bigint NOT NULL, result text NOT NULL, checksum bigint NOT NULL, PRIMARY KEY (session, turn_id));
CREATE TABLE holdfast.requests (
    session text COLLATE "C" NOT NULL REFERENCES holdfast.sessions ON DELETE CASCADE,
    request_id text NOT NULL, number bigint NOT NULL, asked text NOT NULL, answer text NOT NULL,
    checksum bigint NOT NULL, PRIMARY KEY (session, request_id));
CREATE TABLE holdfast.snapshots (
    session text COLLATE "C" PRIMARY KEY REFERENCES holdfast.sessions ON DELETE CASCADE, file text NOT NULL,
    length bigint NOT NULL, bytes bigint NOT NULL);
CREATE TABLE holdfast.log (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, session text NOT NULL, kind text NOT NULL,
    detail text NOT NULL);
CREATE INDEX log_session ON holdfast.log (session);
"""

UPGRADES: dict[int, str] = {
    1: """
ALTER TABLE holdfast.lives ADD COLUMN address text NOT NULL DEFAULT '';
ALTER TABLE holdfast.sessions ADD COLUMN counted boolean NOT NULL DEFAULT false;
CREATE TABLE holdfast.tenants (
    tenant text COLLATE "C" PRIMARY KEY, sessions bigint NOT NULL, granted bigint NOT NULL);
"""
}
"""For each older version of the tables, the statements that lead to the next one."""


def upgrade(connection: Connection[tuple[object, ...]]) -> None:
    """Create the tables, or upgrade them, in one transaction; one server at a time."""
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK_KEY,))
        connection.execute("CREATE SCHEMA IF NOT EXISTS holdfast")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS holdfast.facts (name text PRIMARY KEY, value text NOT NULL)"
        )
        version = version_of(read_facts(connection))
        if version > VERSION:
            raise JournalError(newer(version))
        if version == 0:
            connection.execute(CREATE)
        for reached in range(version, VERSION) if version else ():
            connection.execute(UPGRADES[reached])
        if version < VERSION:
            connection.execute(
                "INSERT INTO holdfast.facts VALUES ('version', %s) "
                "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                (str(VERSION),),
            )


def newer(version: int) -> str:
    """The error for a journal of a later version."""
    return f"the journal has version {version}; this program reads versions up to {VERSION}"


def read_facts(connection: Connection[tuple[object, ...]]) -> dict[str, str]:
    """The facts of a journal: its version and vocabulary."""
    rows = connection.execute("SELECT name, value FROM holdfast.facts").fetchall()
    return {str(name): str(value) for name, value in rows}


def version_of(facts: Mapping[str, str]) -> int:
    """The version of the tables; 0 before they are made."""
    version = facts.get("version", "0")
    if not version.isdecimal():
        raise JournalError(
            "the journal is damaged (its version is invalid); restore a backup of the database"
        )
    return int(version)


def escape(text: str) -> str:
    """A client's text without NUL, which PostgreSQL cannot store."""
    return text.replace("\\", "\\\\").replace("\0", "\\0") if "\\" in text or "\0" in text else text


def unescape(text: str) -> str:
    """The text of `escape`."""
    if "\\" not in text:
        return text
    return "\\".join(part.replace("\\0", "\0") for part in text.split("\\\\"))
