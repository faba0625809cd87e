"""The journal: what was acknowledged, in a SQLite file that outlives the process.

Records are appended in memory and written together, one transaction for all that a step brought; `flush`
says whether everything appended so far is in the file. A record that cannot be written stays here, in order,
and is written when writing works again: nothing is lost and nothing is written twice.

Turns form a tree: each row names the one before it, and a session names its last. So a fork is one row, a
rewind moves one number, and nothing that another session leans on is ever changed. Turns that no session
reaches any more are swept away in compactions, so the file grows with what is alive. Damage that SQLite does
not tell of is found with the list of batches (`journal_batches`).

What each setting promises: with `fsync` a flushed record survives a loss of power, with `commit` the death
of the process; with `off` records are written all the same, but nobody waits for them. One process may have
a journal open for writing; readers (`journal_reading`) are free to look. A `Store` of the journal's writer,
in whose thread everything is written.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sqlite3
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Literal

from holdfast.core.tokens import TOKEN_BYTES, pack
from holdfast.engine.durable.journal_batches import BatchList, require_all
from holdfast.engine.durable.journal_compaction import Sweep
from holdfast.engine.durable.journal_reading import FIRST_TURNS, as_stored, damage, load
from holdfast.engine.durable.journal_tables import (
    DAMAGED,
    MEND,
    about_sum,
    has_others,
    require_tables,
    row_sum,
    turn_sum,
    upgrade,
)
from holdfast.engine.durable.records import (
    TURNS_KEPT,
    Closed,
    Ended,
    Forked,
    JournalError,
    Opened,
    Record,
    Requested,
    SnapshotDropped,
    SnapshotWritten,
    StoredSession,
    Truncated,
    detail,
)
from holdfast.engine.lock import InUse, lock

__all__ = ["Durability", "Journal", "JournalError", "JournalInUse"]

log = logging.getLogger("holdfast.journal")

Durability = Literal["off", "commit", "fsync"]
SYNCHRONOUS = {"off": "OFF", "commit": "NORMAL", "fsync": "FULL"}

LOG_KEPT = 10_000
ORPHANS_MAX = 512  # Cuts and closes after which turns that nobody reaches are swept away.

Probe = Callable[[str], None]


class JournalInUse(JournalError):
    """Another process has the journal open for writing."""


class Journal:
    """A journal that is open for writing."""

    def __init__(
        self,
        path: Path,
        durability: Durability,
        vocabulary: str,
        probe: Probe | None = None,
        lock_timeout: float = 0.0,
        sample: str | None = None,
    ) -> None:
        """Open or create; `vocabulary` names what the tokens mean, and must be that of the file.

        `sample` is what journals before version 3 know instead (see `adopt_vocabulary`). `lock_timeout` is
        how many seconds to wait for another process that has the journal open.
        """
        self.path = path
        self.durability = durability
        self.fault: str | None = None
        self._probe = probe if probe is not None else _unprobed
        self._pending: list[Record] = []
        self._orphans = 0
        self._sweep: Sweep | None = None
        self._damaged: set[str] = set()
        self._vocabulary = vocabulary
        self._sampled = False
        self._lock = _lock(path, lock_timeout)
        try:
            require_all(path)
            self._connection = _connect(path)
            self._prepare(vocabulary, vocabulary if sample is None else sample)
            self._batch, self._batches = self._begin_run()
        except BaseException:
            os.close(self._lock)
            raise

    def _prepare(self, vocabulary: str, sample: str) -> None:
        connection = self._connection
        connection.text_factory = as_stored
        if has_others(connection):
            raise JournalError(f"{self.path} is a database of another program; name another file")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {SYNCHRONOUS[self.durability]}")
        damaged = damage(connection)
        if damaged is not None:
            raise JournalError(f"{self.path} is damaged ({damaged}); {MEND}")
        upgrade(connection)
        require_tables(connection)
        facts = dict(connection.execute("SELECT name, value FROM facts").fetchall())
        self._sampled = "sample" in facts
        if not facts.keys() & {"vocabulary", "sample"}:
            connection.execute("INSERT INTO facts (name, value) VALUES ('vocabulary', ?)", (vocabulary,))
        elif facts.get("vocabulary", vocabulary) != vocabulary or facts.get("sample", sample) != sample:
            raise JournalError(
                f"{self.path} was written with another vocabulary: its tokens mean other words; start with "
                "the model that it was written with, or name another file"
            )

    def adopt_vocabulary(self) -> None:
        """Let a journal of before version 3, which knows only how a sample was encoded, know the vocabulary.

        To be called when no session was found that has tokens of another one.
        """
        if not self._sampled:
            return
        self._connection.execute("BEGIN IMMEDIATE")
        self._run("INSERT OR REPLACE INTO facts (name, value) VALUES ('vocabulary', ?)", (self._vocabulary,))
        self._connection.execute("DELETE FROM facts WHERE name = 'sample'")
        self._connection.execute("COMMIT")
        self._sampled = False

    def _begin_run(self) -> tuple[int, BatchList]:
        """Give this opening a name, in the database itself rather than in its write-ahead log, and a list."""
        connection, run = self._connection, secrets.token_hex(8)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT OR IGNORE INTO facts (name, value) VALUES ('batch', '0')")
        connection.execute("INSERT OR REPLACE INTO facts (name, value) VALUES ('run', ?)", (run,))
        number = connection.execute("SELECT value FROM facts WHERE name = 'batch'").fetchone()[0]
        connection.execute("COMMIT")
        if not number.isdecimal():
            raise JournalError(f"{self.path} is damaged (it does not know its last transaction); {MEND}")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return int(number), BatchList(self.path, run, self.durability)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def waits(self) -> bool:
        """Whether something has been appended and is not in the file."""
        return bool(self._pending)

    def append(self, record: Record) -> None:
        """Note a record for the next flush."""
        self._pending.append(record)

    def flush(self) -> bool:
        """Write everything that was appended; False if that is not possible now, and it is kept."""
        if not self._pending:
            return True
        try:
            self._write_pending()
        except (sqlite3.Error, OSError) as error:
            if self.fault is None:
                log.error("the journal cannot be written, turns wait for it: %s", error)
            self.fault = str(error)
            return False
        self._probe("after fsync")
        if self.fault is not None:
            log.warning("the journal is written again")
        self._batch += 1
        self._batches.add(self._batch, self._pending)
        self.fault = None
        self._pending = []
        return True

    def _write_pending(self) -> None:
        """One transaction for all of it; whatever goes wrong leaves none open."""
        connection = self._connection
        self._probe("before append")
        connection.execute("BEGIN IMMEDIATE")
        try:
            for index, record in enumerate(self._pending):
                if index == len(self._pending) // 2:
                    self._probe("mid-record")
                self._apply(record)
            self._run("UPDATE facts SET value = ? WHERE name = 'batch'", (str(self._batch + 1),))
            self._probe("after write")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Write what is left and let go of the file."""
        if not self.flush():
            log.error("%d records were never written: %s", len(self._pending), self.fault)
        self._connection.close()
        self._batches.close()
        os.close(self._lock)

    # --- writing ----------------------------------------------------------------------------------

    def _apply(self, record: Record) -> None:
        match record:
            case Opened():
                self._open(record)
            case Ended():
                self._end(record)
            case Truncated():
                self._cut(record)
            case Forked():
                self._fork(record)
            case Closed():
                self._forget(record.session)
            case Requested():
                row = (record.session, record.request_id, record.asked, record.answer)
                self._run(
                    "INSERT OR REPLACE INTO requests (session, request_id, asked, answer, checksum) "
                    "VALUES (?, ?, ?, ?, ?)",
                    (*row, row_sum(*row)),
                )
                self._keep_last("requests", record.session)
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

    def _open(self, record: Opened) -> None:
        name, about = record.session, (record.ttl, record.metadata, record.system, record.created)
        origin = row_sum(name, record.tenant, record.created)
        sums = (row_sum(name, record.tenant, origin), about_sum(name, *about, None), row_sum(name, origin))
        self._run(
            "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?, NULL, NULL, ?, ?, ?, ?)",
            (name, record.tenant, *about, origin, *sums),
        )
        self._forget_answers(name)

    def _fork(self, record: Forked) -> None:
        """A row like the parent's, which it is copied from in the file: nothing of it has to be readable.

        A description that is damaged is not copied: it would seem whole.
        """
        found = self._run(
            "SELECT tenant, origin, about_sum, ttl, metadata, system, created, parent FROM sessions "
            "WHERE id = ?",
            (record.parent,),
        ).fetchone()
        if found is None:
            self._require_absent(record.parent)
            return
        tenant, origin, expected, *about = found
        whole = about_sum(record.parent, *about) == expected
        ttl, metadata, system = about[:3] if whole else (None, "{}", None)
        name, head = record.session, self._turn_at(record.parent, record.turns)
        sums = (
            row_sum(name, tenant, origin),
            about_sum(name, ttl, metadata, system, record.created, record.parent),
            row_sum(name, self._sum_of(record.parent, head)),
        )
        self._run(
            "INSERT OR REPLACE INTO sessions "
            "SELECT ?, tenant, iif(?, ttl, NULL), iif(?, metadata, '{}'), iif(?, system, NULL), "
            "?, ?, id, origin, ?, ?, ? FROM sessions WHERE id = ?",
            (name, whole, whole, whole, record.created, head, *sums, record.parent),
        )
        self._forget_answers(name)

    def _end(self, record: Ended) -> None:
        turn = record.turn
        before = self._head(record.session)
        depth = 1 + (self._run("SELECT depth FROM turns WHERE number = ?", (before,)).fetchone() or (0,))[0]
        self._add_turn(
            record.session, before, depth, turn.turn_id, pack(record.input), pack(turn.tokens), turn.reason
        )
        row = (record.session, turn.turn_id, json.dumps(asdict(turn)))
        self._run(
            "INSERT OR REPLACE INTO finished (session, turn_id, result, checksum) VALUES (?, ?, ?, ?)",
            (*row, row_sum(*row)),
        )
        self._keep_last("finished", record.session)

    def _add_turn(
        self,
        session: str,
        before: int | None,
        depth: int,
        turn_id: str,
        said_in: bytes,
        said_out: bytes,
        finish: str,
    ) -> None:
        checksum = turn_sum(self._sum_of(session, before), turn_id, said_in, said_out, finish)
        added = self._run(
            "INSERT INTO turns (before, depth, turn_id, input, output, finish, checksum) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (before, depth, turn_id, said_in, said_out, finish, checksum),
        )
        self._end_at(session, added.lastrowid, checksum)

    def _end_at(self, session: str, number: int | None, checksum: int) -> None:
        """Let a session's history end with that turn."""
        changed = self._run(
            "UPDATE sessions SET head = ?, head_sum = ? WHERE id = ?",
            (number, row_sum(session, checksum), session),
        )
        if changed.rowcount != 1:
            self._require_absent(session)

    def _sum_of(self, session: str, number: int | None) -> int:
        """What goes on from a turn adds to this: its sum, or the session's origin for the very start."""
        if number is None:
            found = self._run("SELECT origin FROM sessions WHERE id = ?", (session,)).fetchone()
        else:
            found = self._run("SELECT checksum FROM turns WHERE number = ?", (number,)).fetchone()
        return found[0] if found is not None and isinstance(found[0], int) else DAMAGED

    def _head(self, session: str) -> int | None:
        found = self._run("SELECT head FROM sessions WHERE id = ?", (session,)).fetchone()
        return found[0] if found is not None and isinstance(found[0], int) else None

    def _turn_at(self, session: str, turns: int) -> int | None:
        """The number of a session's turn `turns`, counted from 1, or of its last; None for the very start."""
        head = self._head(session)
        if turns <= 0 or head is None:
            return None
        number = self._counted(head, turns) if session in self._damaged else self._placed(head, turns)
        if number is None:
            raise sqlite3.DatabaseError(f"turn {turns} of session {session} cannot be found in the journal")
        return number

    def _counted(self, head: int, turns: int) -> int | None:
        """A turn counted along the links, as whoever reads does: the places that rows name may be damaged."""
        found = self._run(FIRST_TURNS, (head, turns)).fetchall()
        return int(found[-1][0]) if found and found[0][1] is None else None

    def _placed(self, number: int | None, turns: int) -> int | None:
        """A turn by its place. Each is older than the next: the walk ends, whatever a damaged row says."""
        while number is not None:
            found = self._run(
                "SELECT CASE WHEN before < number THEN before END, depth <= ? FROM turns WHERE number = ?",
                (turns, number),
            ).fetchone()
            if found is None or found[1]:
                return None if found is None else number
            number = found[0]
        return None

    def _cut(self, record: Truncated) -> None:
        number = self._turn_at(record.session, record.turns)
        self._end_at(record.session, number, self._sum_of(record.session, number))
        if record.kept is not None and number is not None:
            before, depth, turn_id, said_in, said_out, finish = self._run(
                "SELECT before, depth, turn_id, input, output, finish FROM turns WHERE number = ?", (number,)
            ).fetchone()
            kept = said_out[: TOKEN_BYTES * record.kept]
            self._add_turn(record.session, before, depth, turn_id, said_in, kept, finish)
        self._orphans += 1

    def _forget(self, session: str) -> None:
        if self._run("DELETE FROM sessions WHERE id = ?", (session,)).rowcount != 1:
            self._require_absent(session)
        self._forget_answers(session)
        self._orphans += 1

    def _require_absent(self, session: str) -> None:
        """Of a session that is gone nothing has to be written. One whose row is misplaced is not gone."""
        if self._run("SELECT 1 FROM sessions WHERE +id = ?", (session,)).fetchone() is not None:
            raise sqlite3.DatabaseError(f"session {session} cannot be found by its name in the journal")

    def _forget_answers(self, session: str) -> None:
        """Nothing of a session that had a name is left to the next one of that name."""
        for table in ("finished", "requests", "snapshots"):
            self._run(f"DELETE FROM {table} WHERE session = ?", (session,))

    def _keep_last(self, table: str, session: str) -> None:
        self._run(
            f"DELETE FROM {table} WHERE session = ?1 AND number <= (SELECT number FROM {table} "
            f"WHERE session = ?1 ORDER BY number DESC LIMIT 1 OFFSET {TURNS_KEPT})",
            (session,),
        )

    def _log(self, record: Record) -> None:
        """What happened to a session, for whoever looks into the journal: the last of it."""
        added = self._run(
            "INSERT INTO log (session, kind, detail) VALUES (?, ?, ?)",
            (record.session, record.kind.value, detail(record)),
        )
        assert added.lastrowid is not None
        self._run("DELETE FROM log WHERE number <= ?", (added.lastrowid - LOG_KEPT,))

    def tidy(self) -> bool:
        """Sweep away a portion of the turns that no session reaches; whether there is more to do."""
        if self._sweep is None:
            if self._orphans < ORPHANS_MAX or self._damaged:
                return False
            self._orphans = 0
            self._sweep = Sweep(self._connection)
        try:
            goes_on = self._sweep.go_on()
        except sqlite3.Error as error:
            log.warning("the journal could not be compacted: %s", error)
            goes_on = False
        if not goes_on:
            self._sweep = None
        return goes_on

    def load(self) -> list[StoredSession]:
        """Every session that is open, as of the last record that was written whole.

        One that is damaged goes on from where it is whole, in the file as well. Nothing is swept away then,
        as long as the journal is open: what no session reaches may be all that is left of one.
        """
        sessions = list(load(self._connection))
        self._damaged = {session.id for session in sessions if session.damaged}
        for session in sessions:
            if session.damaged and not session.unusable:
                self.append(Truncated(session.id, len(session.turns), None))
        if not self._damaged:
            self._sweep = Sweep(self._connection)
            while self.tidy():
                log.debug("turns that no session reaches are swept away")
        return sessions


def _unprobed(point: str) -> None:
    """Nobody looks on."""


def _lock(path: Path, lock_timeout: float) -> int:
    """Hold the journal for this process, or raise if another keeps it, under whichever name."""
    real = Path(os.path.realpath(path))
    real.parent.mkdir(parents=True, exist_ok=True)
    held = os.open(real.with_name(real.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        lock(held, path, lock_timeout)
    except InUse as error:
        raise JournalInUse(str(error)) from error
    return held


def _connect(path: Path) -> sqlite3.Connection:
    """Conversations are private: the file is its owner's alone from its first moment."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    return sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
