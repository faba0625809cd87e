"""The journal's rows: how each record changes the tables, inside the caller's transaction.

Turns form a tree: each row names the one before it, and a session names its last. So a fork is one row, a
rewind moves one number, and a row that another session depends on never changes. Used by the journal.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from holdfast.core.tokens import TOKEN_BYTES, pack
from holdfast.engine.durable.journal_reading import FIRST_TURNS
from holdfast.engine.durable.journal_tables import (
    DAMAGED,
    description_checksum,
    row_checksum,
    turn_checksum,
)
from holdfast.engine.durable.records import (
    NO_METADATA,
    NO_SETTINGS,
    NO_TOOLS,
    TURNS_KEPT,
    About,
    Closed,
    Compacted,
    Ended,
    Forked,
    Opened,
    Record,
    Requested,
    Retained,
    Retooled,
    SnapshotDropped,
    SnapshotWritten,
    Truncated,
    Updated,
    detail,
)

LOG_KEPT = 10_000
"""Rows of the log table that are kept."""

ABOUT = About._fields
"""The columns of a session's description."""


class JournalRows:
    """The tables of a journal that is open for writing."""

    __slots__ = ("_connection", "_damaged", "unlinked")

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._damaged: frozenset[str] = frozenset()
        self.unlinked = 0
        """How often turns were unlinked from a session since the last compaction."""

    @property
    def damaged(self) -> bool:
        """Whether a session was found damaged when the journal was opened."""
        return bool(self._damaged)

    def mark_damaged(self, sessions: Iterable[str]) -> None:
        """Sessions that were found damaged: the depths in their rows are not trusted."""
        self._damaged = frozenset(sessions)

    def apply(self, record: Record) -> None:
        """Change the tables as a record says."""
        match record:
            case Opened():
                self._open(record)
            case Ended():
                self._end(record)
            case Truncated():
                self._truncate(record)
            case Compacted():
                self._compact(record)
            case Forked():
                self._fork(record)
            case Closed():
                self._close(record.session)
            case Requested():
                row = (record.session, record.request_id, record.asked, record.answer)
                self._run(
                    "INSERT OR REPLACE INTO requests (session, request_id, asked, answer, checksum) "
                    "VALUES (?, ?, ?, ?, ?)",
                    (*row, row_checksum(*row)),
                )
                self._keep_last("requests", record.session)
            case Retooled():
                self._redescribe(record.session, {"tools": record.tools})
            case Updated():
                self._redescribe(record.session, {"metadata": record.metadata})
            case Retained():
                self._redescribe(record.session, {"ttl": record.ttl, "settings": record.settings})
            case SnapshotWritten():
                self._run(
                    "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)",
                    (record.session, record.file, record.length, record.bytes),
                )
            case SnapshotDropped():
                self._run("DELETE FROM snapshots WHERE session = ?", (record.session,))
        self._log(record)

    def _run(self, statement: str, values: tuple[object, ...]) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    # --- sessions ---------------------------------------------------------------------------------

    def _open(self, record: Opened) -> None:
        name, about = record.session, (record.ttl, record.metadata, record.system, record.created)
        tools, settings = record.tools, record.settings
        origin = row_checksum(name, record.tenant, record.created)
        sums = (
            row_checksum(name, record.tenant, origin),
            description_checksum(name, *about, None, tools, settings),
            row_checksum(name, origin),
        )
        self._run(
            "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?, NULL, NULL, ?, ?, ?, ?, ?, ?)",
            (name, record.tenant, *about, origin, *sums, tools, settings),
        )
        self._delete_answers(name)

    def _fork(self, record: Forked) -> None:
        """Copy the parent's row inside the file, so that no value of it has to be decoded.

        A damaged description is not copied: the new checksum would make it valid.
        """
        found = self._run(
            f"SELECT tenant, origin, about_sum, {', '.join(ABOUT)} FROM sessions WHERE id = ?",
            (record.parent,),
        ).fetchone()
        if found is None:
            self._require_absent(record.parent)
            return
        tenant, origin, expected, *about = found
        valid = description_checksum(record.parent, *about) == expected
        damaged = (None, NO_METADATA, None, NO_TOOLS, NO_SETTINGS)
        ttl, metadata, system, tools, settings = (*about[:3], *about[-2:]) if valid else damaged
        name, head = record.session, self._turn_at(record.parent, record.turns)
        sums = (
            row_checksum(name, tenant, origin),
            description_checksum(name, ttl, metadata, system, record.created, record.parent, tools, settings),
            row_checksum(name, self._checksum_of(record.parent, head)),
        )
        self._run(
            "INSERT OR REPLACE INTO sessions "
            "SELECT ?, tenant, iif(?, ttl, NULL), iif(?, metadata, '{}'), iif(?, system, NULL), "
            "?, ?, id, origin, ?, ?, ?, iif(?, tools, ?), iif(?, settings, ?) FROM sessions WHERE id = ?",
            (
                *(name, valid, valid, valid, record.created, head, *sums),
                *(valid, NO_TOOLS, valid, NO_SETTINGS, record.parent),
            ),
        )
        self._delete_answers(name)

    def _redescribe(self, session: str, values: Mapping[str, object]) -> None:
        """Change columns of a session's description. A damaged description stays damaged."""
        found = self._run(f"SELECT about_sum, {', '.join(ABOUT)} FROM sessions WHERE id = ?", (session,))
        row = found.fetchone()
        if row is None:
            self._require_absent(session)
            return
        expected, *about = row
        if description_checksum(session, *about) == expected:
            changed = {**dict(zip(ABOUT, about, strict=True)), **values}
            checksum = description_checksum(session, *changed.values())
            columns = ", ".join(f"{column} = ?" for column in values)
            statement = f"UPDATE sessions SET {columns}, about_sum = ? WHERE id = ?"
            self._run(statement, (*values.values(), checksum, session))

    def _close(self, session: str) -> None:
        if self._run("DELETE FROM sessions WHERE id = ?", (session,)).rowcount != 1:
            self._require_absent(session)
        self._delete_answers(session)
        self.unlinked += 1

    def _require_absent(self, session: str) -> None:
        """Raise if a session that its key does not find has a row: damage has misplaced it."""
        if self._run("SELECT 1 FROM sessions WHERE +id = ?", (session,)).fetchone() is not None:
            raise sqlite3.DatabaseError(f"the journal's index does not find session {session}")

    def _delete_answers(self, session: str) -> None:
        """Delete rows that a later session with the same name must not inherit."""
        for table in ("finished", "requests", "snapshots"):
            self._run(f"DELETE FROM {table} WHERE session = ?", (session,))

    # --- turns ------------------------------------------------------------------------------------

    def _end(self, record: Ended) -> None:
        turn = record.turn
        before = self._head(record.session)
        depth = 1 + (self._run("SELECT depth FROM turns WHERE number = ?", (before,)).fetchone() or (0,))[0]
        output = turn.tokens if record.output is None else record.output
        values = (turn.turn_id, pack(record.input), pack(output), turn.reason, record.details)
        self._add_turn(record.session, before, depth, *values)
        row = (record.session, turn.turn_id, json.dumps(asdict(turn)))
        self._run(
            "INSERT OR REPLACE INTO finished (session, turn_id, result, checksum) VALUES (?, ?, ?, ?)",
            (*row, row_checksum(*row)),
        )
        self._keep_last("finished", record.session)

    def _truncate(self, record: Truncated) -> None:
        number = self._turn_at(record.session, record.turns)
        self._set_head(record.session, number, self._checksum_of(record.session, number))
        if record.kept is not None and number is not None:
            before, depth, turn_id, tokens_in, tokens_out, finish, details = self._run(
                "SELECT before, depth, turn_id, input, output, finish, details FROM turns WHERE number = ?",
                (number,),
            ).fetchone()
            kept = tokens_out[: TOKEN_BYTES * record.kept]
            self._add_turn(record.session, before, depth, turn_id, tokens_in, kept, finish, details)
        self.unlinked += 1

    def _compact(self, record: Compacted) -> None:
        """Add a turn for those that gave way, and the turns after them once more: rows never change."""
        session, end = record.session, self._turn_at(record.session, record.last)
        later: list[tuple[str, bytes, bytes, str, str]] = []
        number = self._head(session)
        while number is not None and number != end:
            number, *values = self._run(
                "SELECT CASE WHEN before < number THEN before END, turn_id, input, output, finish, details "
                "FROM turns WHERE number = ?",
                (number,),
            ).fetchone()
            later.append((values[0], values[1], values[2], values[3], values[4]))
        before = self._turn_at(session, record.first - 1)
        self._set_head(session, before, self._checksum_of(session, before))
        replaced = (record.turn_id, pack(record.input), b"", "length", "")
        for depth, turn in enumerate((replaced, *reversed(later)), start=record.first):
            self._add_turn(session, self._head(session), depth, *turn)
        self.unlinked += 1

    def _add_turn(
        self,
        session: str,
        before: int | None,
        depth: int,
        turn_id: str,
        tokens_in: bytes,
        tokens_out: bytes,
        finish: str,
        details: str,
    ) -> None:
        continued = self._checksum_of(session, before)
        checksum = turn_checksum(continued, turn_id, tokens_in, tokens_out, finish, details)
        added = self._run(
            "INSERT INTO turns (before, depth, turn_id, input, output, finish, checksum, details) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (before, depth, turn_id, tokens_in, tokens_out, finish, checksum, details),
        )
        self._set_head(session, added.lastrowid, checksum)

    def _set_head(self, session: str, number: int | None, checksum: int) -> None:
        """Make a turn the last of a session."""
        changed = self._run(
            "UPDATE sessions SET head = ?, head_sum = ? WHERE id = ?",
            (number, row_checksum(session, checksum), session),
        )
        if changed.rowcount != 1:
            self._require_absent(session)

    def _checksum_of(self, session: str, number: int | None) -> int:
        """The checksum that the next turn continues: the turn's, or the session's origin for the first."""
        if number is None:
            found = self._run("SELECT origin FROM sessions WHERE id = ?", (session,)).fetchone()
        else:
            found = self._run("SELECT checksum FROM turns WHERE number = ?", (number,)).fetchone()
        return found[0] if found is not None and isinstance(found[0], int) else DAMAGED

    def _head(self, session: str) -> int | None:
        found = self._run("SELECT head FROM sessions WHERE id = ?", (session,)).fetchone()
        return found[0] if found is not None and isinstance(found[0], int) else None

    def _turn_at(self, session: str, turns: int) -> int | None:
        """The number of a session's turn `turns`, counted from 1, or of its last; None for no turns."""
        head = self._head(session)
        if turns <= 0 or head is None:
            return None
        by_links = session in self._damaged
        number = self._find_by_links(head, turns) if by_links else self._find_by_depth(head, turns)
        if number is None:
            raise sqlite3.DatabaseError(f"turn {turns} of session {session} is missing from the journal")
        return number

    def _find_by_links(self, head: int, turns: int) -> int | None:
        """A turn counted along the links, as a reader does: the depths of damaged rows may be wrong."""
        found = self._run(FIRST_TURNS, (head, turns)).fetchall()
        return int(found[-1][0]) if found and found[0][1] is None else None

    def _find_by_depth(self, number: int | None, turns: int) -> int | None:
        """A turn by its depth. Links only lead to lower numbers, so the walk ends even on damaged rows."""
        while number is not None:
            found = self._run(
                "SELECT CASE WHEN before < number THEN before END, depth <= ? FROM turns WHERE number = ?",
                (turns, number),
            ).fetchone()
            if found is None or found[1]:
                return None if found is None else number
            number = found[0]
        return None

    # --- bounds -----------------------------------------------------------------------------------

    def _keep_last(self, table: str, session: str) -> None:
        self._run(
            f"DELETE FROM {table} WHERE session = ?1 AND number <= (SELECT number FROM {table} "
            f"WHERE session = ?1 ORDER BY number DESC LIMIT 1 OFFSET {TURNS_KEPT})",
            (session,),
        )

    def _log(self, record: Record) -> None:
        """Append a line to the log table, which `holdfast sessions show` prints."""
        added = self._run(
            "INSERT INTO log (session, kind, detail) VALUES (?, ?, ?)",
            (record.session, record.kind.value, detail(record)),
        )
        assert added.lastrowid is not None
        self._run("DELETE FROM log WHERE number <= ?", (added.lastrowid - LOG_KEPT,))
