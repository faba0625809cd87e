"""The journal's thread: it writes batches of records in the order of submission (group commit).

The engine submits the records of a step and goes on; `durable` is the number of the last batch in the store,
and `descriptor` becomes readable when that number or the fault has changed, which wakes a poll. Batches that
arrive while another is being written are written together, in one transaction. A batch that cannot be written
is kept, in order, and retried. While there is nothing to write the store is compacted, a portion at a time.

A store is anything that keeps records: the journal in SQLite is one. Called by the session log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from typing import Protocol

from holdfast.engine.durable.records import Record

log = logging.getLogger("holdfast.journal")

RETRY_SECONDS = 0.02
"""How long the thread waits before it retries a failed write."""


class Store(Protocol):
    """Where records are kept. Once it has a writer, only the writer's thread calls it."""

    fault: str | None
    """Why it cannot be written, if it cannot."""

    @property
    def pending(self) -> bool:
        """Whether a record has been appended and is not stored yet."""
        ...

    def append(self, record: Record) -> None:
        """Add a record to the next flush."""
        ...

    def flush(self) -> bool:
        """Store everything that was appended, durably; False if that fails."""
        ...

    def compact(self) -> bool:
        """Do a bounded part of a compaction; whether there is more to do."""
        ...


class JournalWriter:
    """The batches to be written, and the number of the last durable one."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.submitted = 0
        """The number of the last submitted batch."""
        self.durable = 0
        """The number of the last batch that is in the store, as are all before it."""
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)
        self._changed = threading.Condition()
        self._batches: list[list[Record]] = []
        self._ending = False
        self._thread = threading.Thread(target=self._work, name="holdfast-journal", daemon=True)
        self._thread.start()

    # --- called by the engine ---------------------------------------------------------------------

    @property
    def writing(self) -> bool:
        """Whether a batch was submitted and is not durable yet."""
        return self.durable < self.submitted

    def submit(self, records: list[Record]) -> int:
        """Queue a batch; returns its number."""
        with self._changed:
            self.submitted += 1
            self._batches.append(records)
            self._changed.notify()
        return self.submitted

    def take_durable(self) -> int:
        """The number of the last durable batch; clears the descriptor until there is a change."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        return self.durable

    def wait(self, seconds: float) -> None:
        """Wait until there is a change, or time is up; returns at once if all batches are durable."""
        if self.writing:
            self._poll.poll(1000 * seconds)

    def close(self) -> None:
        """Let the thread end after one more attempt to write everything."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()
        os.close(self.descriptor)

    # --- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        uncompacted = False
        ending = False
        while not ending:
            batches, number, ending = self._next(uncompacted)
            for batch in batches:
                for record in batch:
                    self.store.append(record)
            if self.store.pending or number > self.durable:
                if not self._flush():
                    continue
                self.durable = number
                os.eventfd_write(self.descriptor, 1)
                uncompacted = True
            elif uncompacted and not ending:
                uncompacted = self._compact()

    def _next(self, uncompacted: bool) -> tuple[list[list[Record]], int, bool]:
        """The submitted batches, the number of the last, and whether the thread is to end.

        Waits for a batch, unless there is something to compact; only briefly if a write has failed.
        """
        with self._changed:
            failed = self.store.pending or (not self._batches and self.writing)
            if not self._batches and not self._ending and (failed or not uncompacted):
                self._changed.wait(RETRY_SECONDS if failed else None)
            batches, self._batches = self._batches, []
            return batches, self.submitted, self._ending

    def _flush(self) -> bool:
        """Write what was appended. An error becomes the store's fault and never ends the thread."""
        faultless = self.store.fault is None
        try:
            written = self.store.flush()
        except Exception as error:
            log.exception("the journal cannot be written; turns wait until it can")
            self.store.fault = str(error) or type(error).__name__
            written = False
        if not written and faultless:
            os.eventfd_write(self.descriptor, 1)
        return written

    def _compact(self) -> bool:
        try:
            return self.store.compact()
        except Exception:
            log.exception("the journal could not be compacted")
            return False
