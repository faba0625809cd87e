"""The journal: acknowledged changes of sessions, in a SQLite file that outlives the process.

Records are appended in memory and written together, one transaction for all records of a step; `flush` says
whether everything appended so far is in the file. Records that cannot be written stay here, in order, and are
written when writing works again: none is lost, and none is written twice.

Turns that no session reaches any more are removed by compactions, so the file grows with the open sessions.
The list of batches (`journal_batches`) finds damage that SQLite does not report.

Durability: with `fsync` a flushed record survives a power failure, with `commit` the death of the process;
with `off` records are written too, but no answer waits for them. One process may have a journal open for
writing; readers (`journal_reading`) need no lock. A `Store`: the writer's thread does all writing.
"""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from holdfast.engine.durable.journal_batches import BatchList, require_no_lost_batches
from holdfast.engine.durable.journal_compaction import Compaction
from holdfast.engine.durable.journal_reading import as_stored, find_damage, load
from holdfast.engine.durable.journal_rows import JournalRows
from holdfast.engine.durable.journal_tables import MEND, is_foreign, require_tables, upgrade
from holdfast.engine.durable.records import Closed, JournalError, Record, StoredSession, Truncated
from holdfast.engine.durable.store import (
    Durability,
    JournalInUse,
    OwningStore,
    Probe,
    WritePoint,
    no_probe,
)
from holdfast.engine.start.lock import InUse, lock

__all__ = ["Durability", "Journal", "JournalError", "JournalInUse", "WritePoint"]

log = logging.getLogger("holdfast.journal")

SYNCHRONOUS = {"off": "OFF", "commit": "NORMAL", "fsync": "FULL"}

UNLINKED_MAX = 512
"""Truncations and closed sessions after which a compaction begins."""


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
        """Open or create; `vocabulary` identifies what the tokens mean, and must match the file's.

        `sample` is what journals before version 3 know instead (see `adopt_vocabulary`). `lock_timeout` is
        how many seconds to wait for another process that has the journal open.
        """
        self.path = path
        self.durability = durability
        self.fault: str | None = None
        self._probe = probe if probe is not None else no_probe
        self._pending: list[Record] = []
        self._compaction: Compaction | None = None
        self._vocabulary = vocabulary
        self._sampled = False
        self._lock = _lock(path, lock_timeout)
        try:
            require_no_lost_batches(path)
            self._connection = _connect(path)
            self._prepare(vocabulary, vocabulary if sample is None else sample)
            self._rows = JournalRows(self._connection)
            self._batch, self._batches = self._begin_run()
        except BaseException:
            os.close(self._lock)
            raise

    def _prepare(self, vocabulary: str, sample: str) -> None:
        connection = self._connection
        connection.text_factory = as_stored
        if is_foreign(connection):
            raise JournalError(f"{self.path} is a database of another program; name another file")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {SYNCHRONOUS[self.durability]}")
        damage = find_damage(connection)
        if damage is not None:
            raise JournalError(f"{self.path} is damaged ({damage}); {MEND}")
        upgrade(connection)
        require_tables(connection)
        facts = dict(connection.execute("SELECT name, value FROM facts").fetchall())
        self._sampled = "sample" in facts
        if not facts.keys() & {"vocabulary", "sample"}:
            connection.execute("INSERT INTO facts (name, value) VALUES ('vocabulary', ?)", (vocabulary,))
        elif facts.get("vocabulary", vocabulary) != vocabulary or facts.get("sample", sample) != sample:
            raise JournalError(
                f"{self.path} was written with another vocabulary; start with the model that it was written "
                "with, or name another file"
            )

    def adopt_vocabulary(self) -> None:
        """Store the vocabulary in a journal of before version 3, which only has an encoded sample.

        To be called when no session has tokens outside the vocabulary.
        """
        if not self._sampled:
            return
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(
            "INSERT OR REPLACE INTO facts (name, value) VALUES ('vocabulary', ?)", (self._vocabulary,)
        )
        connection.execute("DELETE FROM facts WHERE name = 'sample'")
        connection.execute("COMMIT")
        self._sampled = False

    def _begin_run(self) -> tuple[int, BatchList]:
        """Name this run in the database itself, not only in its write-ahead log, and begin its list."""
        connection, run = self._connection, secrets.token_hex(8)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT OR IGNORE INTO facts (name, value) VALUES ('batch', '0')")
        connection.execute("INSERT OR REPLACE INTO facts (name, value) VALUES ('run', ?)", (run,))
        number = connection.execute("SELECT value FROM facts WHERE name = 'batch'").fetchone()[0]
        connection.execute("COMMIT")
        if not number.isdecimal():
            raise JournalError(f"{self.path} is damaged (the number of its last batch is invalid); {MEND}")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return int(number), BatchList(self.path, run, self.durability)

    @property
    def place(self) -> str:
        """The path of the file."""
        return str(self.path)

    @property
    def owning(self) -> OwningStore | None:
        """None: one process writes the file."""
        return None

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write the remaining records and close the file."""
        if not self.flush():
            log.error("%d records were not written to the journal: %s", len(self._pending), self.fault)
        self._connection.close()
        self._batches.close()
        os.close(self._lock)

    # --- writing ----------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether a record has been appended and is not in the file."""
        return bool(self._pending)

    def append(self, record: Record) -> None:
        """Add a record to the next flush."""
        self._pending.append(record)

    def flush(self) -> bool:
        """Write everything that was appended; False if that fails, and the records are kept."""
        if not self._pending:
            return True
        try:
            self._write_pending()
        except (sqlite3.Error, OSError) as error:
            if self.fault is None:
                log.error("the journal cannot be written; turns wait until it can: %s", error)
            self.fault = str(error)
            return False
        self._probe(WritePoint.AFTER_FSYNC)
        if self.fault is not None:
            log.warning("the journal can be written again")
        self._batch += 1
        self._batches.add(self._batch, self._pending)
        self.fault = None
        self._pending = []
        return True

    def _write_pending(self) -> None:
        """Write all pending records in one transaction, which is rolled back on any error."""
        connection = self._connection
        self._probe(WritePoint.BEFORE_APPEND)
        connection.execute("BEGIN IMMEDIATE")
        try:
            for index, record in enumerate(self._pending):
                if index == len(self._pending) // 2:
                    self._probe(WritePoint.MID_RECORD)
                self._rows.apply(record)
            connection.execute("UPDATE facts SET value = ? WHERE name = 'batch'", (str(self._batch + 1),))
            self._probe(WritePoint.AFTER_WRITE)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def remove(self, session_id: str) -> bool:
        """Close a session for good; False if that fails."""
        self.append(Closed(session_id, "removed"))
        return self.flush()

    def take_refused(self) -> frozenset[str]:
        """None: the lock makes this process the owner of every session."""
        return frozenset()

    def keep_alive(self) -> float | None:
        """Nothing to renew: the kernel holds the lock as long as the process lives."""
        return None

    def compact(self) -> bool:
        """Remove a portion of the turns that no session reaches; whether there is more to do."""
        if self._compaction is None:
            if self._rows.unlinked < UNLINKED_MAX or self._rows.damaged:
                return False
            self._rows.unlinked = 0
            self._compaction = Compaction(self._connection)
        try:
            more = self._compaction.step()
        except sqlite3.Error as error:
            log.warning("the journal could not be compacted: %s", error)
            more = False
        if not more:
            self._compaction = None
        return more

    # --- recovery ---------------------------------------------------------------------------------

    def sessions(self) -> Iterator[StoredSession]:
        """Every open session, as of the last complete transaction.

        A damaged session is truncated to its valid turns, in the file as well. There is no compaction then
        while the journal is open: unreachable turns may be all that is left of a session.
        """
        damaged: list[str] = []
        for session in load(self._connection):
            if session.damaged:
                damaged.append(session.id)
                if not session.unusable:
                    self.append(Truncated(session.id, len(session.turns), None))
            yield session
        self._rows.mark_damaged(damaged)
        if not damaged:
            self._compaction = Compaction(self._connection)
            while self.compact():
                log.debug("compacting the journal")

    def load(self) -> list[StoredSession]:
        """All sessions at once."""
        return list(self.sessions())


def _lock(path: Path, timeout: float) -> int:
    """Lock the journal under its real name for this process, or raise if another process has it."""
    real = Path(os.path.realpath(path))
    real.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(real.with_name(real.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        lock(descriptor, path, timeout)
    except InUse as error:
        raise JournalInUse(str(error)) from error
    return descriptor


def _connect(path: Path) -> sqlite3.Connection:
    """Conversations are private: the file is created with access for its owner alone."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    return sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
