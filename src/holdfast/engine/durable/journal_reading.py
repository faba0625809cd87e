"""Reading a journal: its sessions, as of the last complete transaction.

Every row is checked: a history ends before its first turn whose checksum fails, and any other damaged value
is dropped with a line in the log. Reading changes nothing, so a server may write the journal meanwhile. Used
by the journal at a restart, and by `holdfast sessions`.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from holdfast.core.tokens import unpack
from holdfast.engine.durable.answers import read_answer
from holdfast.engine.durable.journal_tables import (
    description_checksum,
    require_tables,
    row_checksum,
    turn_checksum,
)
from holdfast.engine.durable.records import (
    SCHEMA,
    About,
    AnsweredRequest,
    FinishedTurn,
    JournalError,
    SnapshotWritten,
    StoredSession,
    StoredTurn,
    is_text,
)

log = logging.getLogger("holdfast.journal")

CHAIN = (
    "WITH RECURSIVE chain (number, before) AS ("
    "SELECT number, before FROM turns WHERE number = ? UNION ALL "
    "SELECT t.number, t.before FROM turns t JOIN chain c ON t.number = c.before WHERE t.number < c.number)"
)
"""A turn and those before it. Numbers fall along the chain: a row that breaks this rule ends it."""

_HISTORY = (
    f"{CHAIN} SELECT number, turns.before, depth, checksum, turn_id, input, output, finish, "
    "details FROM chain JOIN turns USING (number) ORDER BY number"
)

FIRST_TURNS = f"{CHAIN} SELECT number, before FROM chain ORDER BY number LIMIT ?"
"""The first turns of the history that ends with a turn, oldest first."""

_SESSION = (
    "SELECT id, tenant, ttl, metadata, system, created, parent, tools, settings, "
    "origin, tenant_sum, about_sum, head, head_sum FROM sessions"
)


def as_stored(raw: bytes) -> str:
    """A text of the file. Invalid UTF-8 becomes lone surrogates, which `is_text` rejects."""
    return raw.decode("utf-8", "surrogateescape")


def load(connection: sqlite3.Connection) -> Iterator[StoredSession]:
    """Every open session. Damage to one session does not affect another.

    Rows are stored in the order of their names. A damaged name can hide other rows from a lookup, or equal
    another name: such a session could not be written, and is marked unusable.
    """
    connection.text_factory = as_stored
    rows = connection.execute(f"{_SESSION} ORDER BY created, id").fetchall()
    named = Counter(row[0] for row in rows)
    for row in rows:
        name, tenant, *about, origin, tenant_sum, about_expected, head, head_sum = row
        if not is_text(name):
            log.error("a session with a damaged name stays in the journal: %a", name)
            continue
        session = describe(name, about, about_expected)
        if is_text(tenant) and row_checksum(name, tenant, origin) == tenant_sum:
            session.tenant = tenant
        else:
            session.unusable = "its tenant is damaged"
        if named[name] > 1 or connection.execute(f"{_SESSION} WHERE id = ?", (name,)).fetchone() != row:
            session.damaged = True
            session.unusable = session.unusable or "the journal's index does not find it"
        _load_turns(connection, session, origin, head, head_sum)
        _load_finished(connection, session)
        _load_requests(connection, session)
        _load_snapshot(connection, session)
        yield session


def describe(name: str, values: Sequence[object], expected: object) -> StoredSession:
    """A session without its tenant and turns, of the values of its row in the order of `About`.

    Damaged values are dropped. If the checksum fails although each value could be one, all are dropped but
    the time of opening.
    """
    kept: dict[str, Any] = {}
    damaged: list[str] = []
    for column, value in zip(About._fields, values, strict=True):
        words, is_valid = DESCRIPTION[column]
        if is_valid(value):
            kept[column] = value
        else:
            damaged.append(words)
    about = About(**kept)
    if not damaged and description_checksum(name, *values) != expected:
        about = About(created=about.created)
        damaged.append("time to live, metadata, system text, parent, tools or settings")
    for what in damaged:
        log.error("session %s: the %s is damaged and was dropped", name, what)
    return StoredSession(name, about)


def _is_ttl(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and value >= 0)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float)


def _is_text_or_none(value: object) -> bool:
    return value is None or is_text(value)


def _is_json(kind: type) -> Callable[[object], bool]:
    """Whether a value is the JSON text of an object (`dict`) or an array (`list`)."""

    def check(value: object) -> bool:
        try:
            return is_text(value) and isinstance(json.loads(value), kind)
        except ValueError:
            return False

    return check


DESCRIPTION: dict[str, tuple[str, Callable[[object], bool]]] = {
    "ttl": ("time to live", _is_ttl),
    "metadata": ("metadata", _is_json(dict)),
    "system": ("system text", _is_text_or_none),
    "created": ("time of opening", _is_time),
    "parent": ("parent", _is_text_or_none),
    "tools": ("tools", _is_json(list)),
    "settings": ("settings", _is_json(dict)),
}
"""The words of each column of a description, and which values it may have."""


def _load_turns(
    connection: sqlite3.Connection, session: StoredSession, origin: int, head: object, head_sum: object
) -> None:
    """Read a history up to its first turn whose checksum fails.

    If it is uncertain which turn is the last, the session is unusable and its rows stay as they are.
    """
    reached, chained = None, origin
    last = head if isinstance(head, int) else None
    found = connection.execute("SELECT checksum FROM turns WHERE number = ?", (last,)).fetchone()
    missing = head is not None and found is None
    if missing or row_checksum(session.id, found[0] if found else origin) != head_sum:
        session.damaged = True
        session.unusable = session.unusable or "the link to its last turn is damaged"
        return
    for number, before, depth, checksum, *values in connection.execute(_HISTORY, (last,)):
        next_turn = len(session.turns) + 1
        in_place = (before, depth) == (reached, next_turn)
        turn = valid_turn(checksum, chained, *values) if in_place else None
        if turn is None:
            log.error("session %s: turn %d is damaged; the session is cut before it", session.id, next_turn)
            session.damaged = True
            return
        session.turns.append(turn)
        reached, chained = number, checksum


def valid_turn(
    expected: object,
    before: int,
    turn_id: object,
    tokens_in: object,
    tokens_out: object,
    finish: object,
    details: object,
) -> StoredTurn | None:
    """The turn of a row; None if its checksum fails."""
    if not (is_text(turn_id) and is_text(finish) and is_text(details)):
        return None
    if not (isinstance(tokens_in, bytes) and isinstance(tokens_out, bytes)):
        return None
    if turn_checksum(before, turn_id, tokens_in, tokens_out, finish, details) != expected:
        return None
    return StoredTurn(turn_id, unpack(tokens_in), unpack(tokens_out), finish, details)


def _load_finished(connection: sqlite3.Connection, session: StoredSession) -> None:
    """Read the results of finished turns that a client may submit again; damaged ones are dropped."""
    for turn_id, result, checksum in connection.execute(
        "SELECT turn_id, result, checksum FROM finished WHERE session = ? ORDER BY number", (session.id,)
    ):
        valid = row_checksum(session.id, turn_id, result) == checksum
        answer = read_result(turn_id, result) if valid else None
        if answer is not None:
            session.finished.append(answer)
        else:
            log.error("session %s: the result of turn %a is damaged and was dropped", session.id, turn_id)


def read_result(turn_id: object, result: object) -> FinishedTurn | None:
    """The result of a turn; None if a value has the wrong type."""
    if not is_text(result):
        return None
    try:
        values = json.loads(result)
        if values.get("answer") is not None:
            values["answer"] = read_answer(values["answer"])
        answer = FinishedTurn(**values)
    except (ValueError, TypeError, AttributeError):
        return None
    texts = (answer.turn_id, answer.fingerprint, answer.outcome, answer.reason, answer.text)
    counts = (answer.prompt_tokens, answer.cached_tokens, answer.computed_tokens)
    if not all(map(is_text, texts)) or not isinstance(answer.tokens, list):
        return None
    valid = all(isinstance(number, int) for number in (*counts, *answer.tokens))
    return answer if valid and answer.turn_id == turn_id else None


def _load_requests(connection: sqlite3.Connection, session: StoredSession) -> None:
    """Read the answered verbs that a client may send again; damaged ones are dropped."""
    for request_id, asked, answer, checksum in connection.execute(
        "SELECT request_id, asked, answer, checksum FROM requests WHERE session = ? ORDER BY number",
        (session.id,),
    ):
        valid = row_checksum(session.id, request_id, asked, answer) == checksum
        if valid and is_text(request_id) and is_text(asked) and is_text(answer):
            session.requests[request_id] = AnsweredRequest(asked, answer)
        else:
            log.error("session %s: request %a is damaged and was dropped", session.id, request_id)


def _load_snapshot(connection: sqlite3.Connection, session: StoredSession) -> None:
    """Read the name and size of a session's snapshot file, if it has one."""
    found = connection.execute(
        "SELECT file, length, bytes FROM snapshots WHERE session = ?", (session.id,)
    ).fetchone()
    if found is None:
        return
    file, length, size = found
    named = is_text(file) and Path(file).name == file  # A path could leave the snapshot directory.
    if named and isinstance(length, int) and isinstance(size, int) and size >= 0:
        session.snapshot = SnapshotWritten(session.id, file, length, size)
    else:
        log.error("session %s: the name of its snapshot is damaged and was dropped", session.id)


def find_damage(connection: sqlite3.Connection) -> str | None:
    """What SQLite finds wrong with the file's structure, if anything. Values are checked row by row."""
    for (found,) in connection.execute("PRAGMA quick_check"):
        if found != "ok" and " value in " not in found:
            return " ".join(str(found).split())
    return None


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A consistent view of a journal, which a server may write meanwhile.

    Raises `JournalError` for a file that this program cannot read.
    """
    connection = _connect(path)
    connection.text_factory = as_stored
    try:
        connection.execute("BEGIN")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            raise JournalError(f"{path} is not a journal")
        if version > SCHEMA:
            raise JournalError(f"{path} has version {version}; this program reads versions up to {SCHEMA}")
        if version < SCHEMA:
            raise JournalError(
                f"{path} has version {version}; start a server on it once to upgrade it to version {SCHEMA}"
            )
        require_tables(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(path: Path) -> sqlite3.Connection:
    """A read-only connection, also on a read-only file system."""
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
                f"{path} is in a read-only directory, and its last changes are in {changes.name}: copy both "
                "files to a writable directory, and read them there"
            ) from None
        return sqlite3.connect(f"{place}&immutable=1", uri=True)
    except BaseException:
        connection.close()
        raise
    return connection


def read_sessions(path: Path) -> list[StoredSession]:
    """Every session of a journal, without changing it; a server may write it meanwhile."""
    with closing(open_for_reading(path)) as connection:
        return list(load(connection))


def read_log(path: Path, session: str) -> list[tuple[str, str]]:
    """The latest changes of a session, oldest first: kinds and details."""
    with closing(open_for_reading(path)) as connection:
        rows = connection.execute(
            "SELECT kind, detail FROM log WHERE session = ? ORDER BY number", (session,)
        )
        return [(kind, detail) for kind, detail in rows]


def read_vocabulary(path: Path) -> str:
    """The identity of a journal's vocabulary."""
    with closing(open_for_reading(path)) as connection:
        found = connection.execute(
            "SELECT value FROM facts WHERE name IN ('vocabulary', 'sample') ORDER BY name DESC"
        ).fetchone()
    if found is None:
        raise JournalError(f"{path} is not a journal")
    return str(found[0])
