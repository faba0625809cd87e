"""Reading a journal: the sessions that it holds, as of the last record that was written whole.

Nothing that is read is believed before it was looked at: a history ends before its first turn that does not
add up, and what cannot be read of anything else is forgotten, with a line in the log. Changes nothing, so it
may be done beside a server that writes. Used by the journal at a restart, and by the command that looks into
one.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeGuard

from holdfast.engine.durable.journal_tables import about_sum, require_tables, row_sum, turn_sum
from holdfast.engine.durable.records import (
    SCHEMA,
    FinishedTurn,
    JournalError,
    SnapshotWritten,
    StoredSession,
    StoredTurn,
    is_text,
    unpack,
)

log = logging.getLogger("holdfast.journal")

CHAIN = (
    "WITH RECURSIVE chain (number, before) AS ("
    "SELECT number, before FROM turns WHERE number = ? UNION ALL "
    "SELECT t.number, t.before FROM turns t JOIN chain c ON t.number = c.before WHERE t.number < c.number)"
)
"""A turn and those before it. Each is older than the next: a row that says otherwise ends the chain."""

_HISTORY = (
    f"{CHAIN} SELECT number, turns.before, depth, checksum, turn_id, input, output, finish "
    "FROM chain JOIN turns USING (number) ORDER BY number"
)

FIRST_TURNS = f"{CHAIN} SELECT number, before FROM chain ORDER BY number LIMIT ?"
"""The first turns of the history that ends with one, oldest first."""

_SESSION = (
    "SELECT id, tenant, ttl, metadata, system, created, parent, "
    "origin, tenant_sum, about_sum, head, head_sum FROM sessions"
)


def as_stored(raw: bytes) -> str:
    """A text of the file. Bytes that are none become lone surrogates, so that `is_text` finds them."""
    return raw.decode("utf-8", "surrogateescape")


def load(connection: sqlite3.Connection) -> Iterator[StoredSession]:
    """Every session that is open, one after the other. What is damaged of one is lost to no other.

    Rows lie in the order of their names, and are looked up by them. A name that was changed hides others from
    a look-up, or takes the place of one: such a session could not be written, and is not to be used.
    """
    connection.text_factory = as_stored
    rows = connection.execute(f"{_SESSION} ORDER BY created, id").fetchall()
    named = Counter(row[0] for row in rows)
    for row in rows:
        name, tenant, *about, origin, tenant_sum, whole, head, head_sum = row
        if not is_text(name):
            log.error("a session whose name is damaged stays in the journal: %a", name)
            continue
        session = _describe(name, *about, adds_up=about_sum(name, *about) == whole)
        if is_text(tenant) and row_sum(name, tenant, origin) == tenant_sum:
            session.tenant = tenant
        else:
            session.unusable = "whose it is cannot be read"
        if named[name] > 1 or connection.execute(f"{_SESSION} WHERE id = ?", (name,)).fetchone() != row:
            session.damaged = True
            session.unusable = session.unusable or "it cannot be found by its name"
        _load_turns(connection, session, origin, head, head_sum)
        _load_finished(connection, session)
        _load_requests(connection, session)
        _load_snapshot(connection, session)
        yield session


def _describe(
    name: str,
    ttl: object,
    metadata: object,
    system: object,
    created: object,
    parent: object,
    *,
    adds_up: bool,
) -> StoredSession:
    """A session without its owner and turns. What is damaged is forgotten: all, where it cannot be told."""
    session = StoredSession(name, "", None, "{}", None, 0.0, None)
    damaged: list[str] = []
    if isinstance(ttl, int | float) and ttl >= 0:
        session.ttl = ttl
    elif ttl is not None:
        damaged.append("time to live")
    if _is_described(metadata):
        session.metadata = metadata
    else:
        damaged.append("metadata")
    if is_text(system):
        session.system = system
    elif system is not None:
        damaged.append("system text")
    if isinstance(created, int | float):
        session.created = created
    else:
        damaged.append("time of opening")
    if is_text(parent):
        session.parent = parent
    elif parent is not None:
        damaged.append("parent")
    if not adds_up and not damaged:
        session = StoredSession(name, "", None, "{}", None, session.created, None)
        damaged.append("time to live, metadata, system text or parent")
    for what in damaged:
        log.error("session %s: its %s is damaged, and forgotten", name, what)
    return session


def _is_described(metadata: object) -> TypeGuard[str]:
    """Whether metadata can be read again."""
    try:
        return is_text(metadata) and isinstance(json.loads(metadata), dict)
    except ValueError:
        return False


def _load_turns(
    connection: sqlite3.Connection, session: StoredSession, origin: int, head: object, head_sum: object
) -> None:
    """A history up to its first row that does not add up: what follows it would be out of place.

    Where it ends must be certain. If it is not, the session is left as it is, for whoever can mend the file.
    """
    reached, added_up = None, origin
    last = head if isinstance(head, int) else None
    found = connection.execute("SELECT checksum FROM turns WHERE number = ?", (last,)).fetchone()
    missing = head is not None and found is None
    if missing or row_sum(session.id, found[0] if found else origin) != head_sum:
        session.damaged = True
        session.unusable = session.unusable or "which turn is its last cannot be told"
        return
    for number, before, depth, checksum, *said in connection.execute(_HISTORY, (last,)):
        in_place = (before, depth) == (reached, len(session.turns) + 1)
        turn = _turn(checksum, added_up, *said) if in_place else None
        if turn is None:
            log.error("session %s: turn %d is damaged; it ends before it", session.id, len(session.turns) + 1)
            session.damaged = True
            return
        session.turns.append(turn)
        reached, added_up = number, checksum


def _turn(
    expected: object, before: int, turn_id: object, said_in: object, said_out: object, finish: object
) -> StoredTurn | None:
    """A turn whose row adds up."""
    if not (is_text(turn_id) and is_text(finish)):
        return None
    if not (isinstance(said_in, bytes) and isinstance(said_out, bytes)):
        return None
    if turn_sum(before, turn_id, said_in, said_out, finish) != expected:
        return None
    return StoredTurn(turn_id, unpack(said_in), unpack(said_out), finish)


def _load_finished(connection: sqlite3.Connection, session: StoredSession) -> None:
    """The answers that may be asked for again; one that cannot be read is forgotten."""
    for turn_id, result, checksum in connection.execute(
        "SELECT turn_id, result, checksum FROM finished WHERE session = ? ORDER BY number", (session.id,)
    ):
        adds_up = row_sum(session.id, turn_id, result) == checksum
        answer = _answer(turn_id, result) if adds_up else None
        if answer is not None:
            session.finished.append(answer)
        else:
            log.error("session %s: the answer of turn %a is damaged, and forgotten", session.id, turn_id)


def _answer(turn_id: object, result: object) -> FinishedTurn | None:
    """What a turn answered, where all of it can be read."""
    if not is_text(result):
        return None
    try:
        answer = FinishedTurn(**json.loads(result))
    except (ValueError, TypeError):
        return None
    texts = (answer.turn_id, answer.fingerprint, answer.outcome, answer.reason, answer.text)
    counts = (answer.prompt_tokens, answer.cached_tokens, answer.computed_tokens)
    if not all(map(is_text, texts)) or not isinstance(answer.tokens, list):
        return None
    whole = all(isinstance(number, int) for number in (*counts, *answer.tokens))
    return answer if whole and answer.turn_id == turn_id else None


def _load_requests(connection: sqlite3.Connection, session: StoredSession) -> None:
    """The verbs that may come again; one that cannot be read is forgotten."""
    for request_id, asked, answer, checksum in connection.execute(
        "SELECT request_id, asked, answer, checksum FROM requests WHERE session = ? ORDER BY number",
        (session.id,),
    ):
        adds_up = row_sum(session.id, request_id, asked, answer) == checksum
        if adds_up and is_text(request_id) and is_text(asked) and is_text(answer):
            session.requests[request_id] = (asked, answer)
        else:
            log.error("session %s: its request %a is damaged, and forgotten", session.id, request_id)


def _load_snapshot(connection: sqlite3.Connection, session: StoredSession) -> None:
    """The file of a session's memory, where it has one."""
    found = connection.execute(
        "SELECT file, length, bytes FROM snapshots WHERE session = ?", (session.id,)
    ).fetchone()
    if found is None:
        return
    file, length, size = found
    named = is_text(file) and Path(file).name == file  # A path would lead out of the directory of the files.
    if named and isinstance(length, int) and isinstance(size, int) and size >= 0:
        session.snapshot = SnapshotWritten(session.id, file, length, size)
    else:
        log.error("session %s: the name of its file is damaged, and forgotten", session.id)


def damage(connection: sqlite3.Connection) -> str | None:
    """What is wrong with a file as a whole, if anything. A wrong value of a row is a matter of that row."""
    for (found,) in connection.execute("PRAGMA quick_check"):
        if found != "ok" and " value in " not in found:
            return " ".join(str(found).split())
    return None


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A journal that this program can read, as it is now, whatever a server writes meanwhile.

    `JournalError` says what is wrong with another one.
    """
    connection = _connect(path)
    connection.text_factory = as_stored
    try:
        connection.execute("BEGIN")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            raise JournalError(f"{path} is no journal")
        if version > SCHEMA:
            raise JournalError(f"{path} has version {version}; this program knows {SCHEMA} at most")
        if version < SCHEMA:
            raise JournalError(
                f"{path} has version {version}; a server that is started on it brings it to {SCHEMA}"
            )
        require_tables(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(path: Path) -> sqlite3.Connection:
    """A connection that only reads, also where nothing can be written: there nobody else writes either."""
    place = f"{path.absolute().as_uri()}?mode=ro"
    connection = sqlite3.connect(place, uri=True)
    try:
        connection.execute("PRAGMA user_version")
    except sqlite3.OperationalError:
        connection.close()
        if not path.exists() or os.access(path.parent, os.W_OK):
            raise
        changes = path.with_name(f"{path.name}-wal")
        if changes.exists() and changes.stat().st_size:
            raise JournalError(
                f"{path} lies where nothing can be written, and its last changes are in {changes.name}: "
                "copy both to a place that can be written, and look there"
            ) from None
        return sqlite3.connect(f"{place}&immutable=1", uri=True)
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
        found = connection.execute(
            "SELECT value FROM facts WHERE name IN ('vocabulary', 'sample') ORDER BY name DESC"
        ).fetchone()
    if found is None:
        raise JournalError(f"{path} is no journal")
    return str(found[0])
