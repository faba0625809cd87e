"""The journal's thread: it writes batches of records in the order in which they were submitted.

Whoever makes steps submits what a step brought and goes on; `durable` says up to which batch everything is in
the store, and `descriptor` becomes readable when that, or a fault, is new, so that one who sleeps in a poll
wakes up. Batches that came while another was being written are written together, in one transaction. One that
cannot be written stays, in order, and is tried again until it can be. While nothing is to be written the
store is tidied, a portion at a time.

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
"""How long the thread waits before it tries again to write what could not be written."""


class Store(Protocol):
    """Where records are kept. Once it has a writer, only the writer's thread calls it."""

    fault: str | None
    """Why it cannot be written, if it cannot."""

    @property
    def waits(self) -> bool:
        """Whether something has been appended and is not kept yet."""
        ...

    def append(self, record: Record) -> None:
        """Note a record for the next flush."""
        ...

    def flush(self) -> bool:
        """Keep everything that was appended, durably; False if that is not possible now."""
        ...

    def tidy(self) -> bool:
        """Do a bounded part of what the store has to tidy up; whether there is more."""
        ...


class JournalWriter:
    """Batches that are to be written, and how far that has come."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.submitted = 0
        """The number of the last batch that was submitted."""
        self.durable = 0
        """The number of the last batch that is in the store, with all before it."""
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)
        self._changed = threading.Condition()
        self._batches: list[list[Record]] = []
        self._ending = False
        self._thread = threading.Thread(target=self._work, name="holdfast-journal", daemon=True)
        self._thread.start()

    # --- whoever submits --------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether a batch was submitted and is not durable yet."""
        return self.durable < self.submitted

    def submit(self, records: list[Record]) -> int:
        """Have a batch written after all before it; returns its number."""
        with self._changed:
            self.submitted += 1
            self._batches.append(records)
            self._changed.notify()
        return self.submitted

    def take_news(self) -> int:
        """The number of the last batch that is durable; the descriptor is quiet until there is more news."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        return self.durable

    def wait(self, seconds: float) -> None:
        """Let the thread get on, until there is news or time is up; returns at once if nothing is due."""
        if self.behind:
            self._poll.poll(1000 * seconds)

    def close(self) -> None:
        """Try once more to write everything, and let the thread end."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()
        os.close(self.descriptor)

    # --- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        untidy = False
        ending = False
        while not ending:
            batches, number, ending = self._next(untidy)
            for batch in batches:
                for record in batch:
                    self.store.append(record)
            if self.store.waits or number > self.durable:
                if not self._flush():
                    continue
                self.durable = number
                os.eventfd_write(self.descriptor, 1)
                untidy = True
            elif untidy and not ending:
                untidy = self._tidy()

    def _next(self, untidy: bool) -> tuple[list[list[Record]], int, bool]:
        """The batches that have come, the number of the last, and whether the thread is to end.

        Waits for one, unless there is something to tidy; with something that could not be written, not long.
        """
        with self._changed:
            failed = self.store.waits or (not self._batches and self.behind)
            if not self._batches and not self._ending and (failed or not untidy):
                self._changed.wait(RETRY_SECONDS if failed else None)
            batches, self._batches = self._batches, []
            return batches, self.submitted, self._ending

    def _flush(self) -> bool:
        """Write what was appended. Whatever goes wrong is a fault of the store, never the thread's end."""
        faultless = self.store.fault is None
        try:
            written = self.store.flush()
        except Exception as error:
            log.exception("the journal cannot be written, turns wait for it")
            self.store.fault = str(error) or type(error).__name__
            written = False
        if not written and faultless:
            os.eventfd_write(self.descriptor, 1)
        return written

    def _tidy(self) -> bool:
        try:
            return self.store.tidy()
        except Exception:
            log.exception("the journal could not be tidied up")
            return False
