"""The journal's thread: it writes batches of records in the order of submission (group commit).

The engine submits the records of a step, gets a ticket (the number of the batch) and goes on; `take_settled`
returns the tickets that are durable since, and `descriptor` becomes readable when there is one or the fault
has changed, which wakes a poll. Batches that arrive while another is being written are written together, in
one transaction. A batch that cannot be written is kept, in order, and retried. While there is nothing to
write the store is compacted, a portion at a time, and its lease renewed, if it has one. Other calls of the
store, such as claims of sessions, are made by the thread too (`ask`). Called by the session log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from holdfast.engine.durable.records import JournalError, Record
from holdfast.engine.durable.store import Store

log = logging.getLogger("holdfast.journal")

RETRY_SECONDS = 0.02
"""How long the thread waits before it retries a failed write."""


Answer = TypeVar("Answer")


class Settled(NamedTuple):
    """Every batch up to this ticket is in the store, but for the records of refused sessions."""

    ticket: int
    refused: frozenset[str]


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
        self._questions: deque[Callable[[], None]] = deque()
        self._settled: deque[Settled] = deque()
        self._ending = False
        self._rest: float | None = None
        """How long the thread may sleep before the store is to be called again."""
        self._thread = threading.Thread(target=self._work, name="holdfast-journal", daemon=True)
        self._thread.start()

    # --- called by the engine ---------------------------------------------------------------------

    @property
    def writing(self) -> bool:
        """Whether a batch was submitted and is not durable yet."""
        return self.durable < self.submitted

    def submit(self, records: list[Record]) -> int:
        """Queue a batch; returns its ticket."""
        with self._changed:
            self.submitted += 1
            self._batches.append(records)
            self._changed.notify()
        return self.submitted

    def ask(self, act: Callable[[], Answer]) -> Future[Answer]:
        """Let the thread call the store, once every batch so far is stored; the descriptor shows the end.

        The future has the answer or the error of `act`; `JournalError` if the writer is closed before.
        """
        future: Future[Answer] = Future()

        def answer() -> None:
            try:
                if self._ending and self.store.pending:
                    raise JournalError("the journal was closed")
                future.set_result(act())
            except JournalError as error:
                future.set_exception(error)
            except Exception as error:
                log.exception("a call of the journal failed")
                future.set_exception(error)

        with self._changed:
            self._questions.append(answer)
            self._changed.notify()
        return future

    def take_settled(self) -> list[Settled]:
        """The batches that were stored since the last call; clears the descriptor until there is a change."""
        if not self._ending:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.descriptor)
        taken: list[Settled] = []
        while self._settled:
            taken.append(self._settled.popleft())
        return taken

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
            self._keep_alive()
            batches, number, ending = self._next(uncompacted)
            for batch in batches:
                for record in batch:
                    self.store.append(record)
            if self.store.pending or number > self.durable:
                if not self._flush():
                    continue
                self._settle(number)
                uncompacted = True
            elif uncompacted and not ending and not self._questions:
                uncompacted = self._compact()
            self._answer()
        self._answer()

    def _answer(self) -> None:
        """Make the calls that were asked for."""
        while self._questions:
            self._questions.popleft()()
            self._give_up(self.store.take_refused())
            os.eventfd_write(self.descriptor, 1)

    def _next(self, uncompacted: bool) -> tuple[list[list[Record]], int, bool]:
        """The submitted batches, the number of the last, and whether the thread is to end.

        Waits for a batch, unless there is something to compact; only briefly if a write has failed.
        """
        with self._changed:
            failed = self.store.pending or (not self._batches and self.writing)
            asked = bool(self._questions) and not failed
            if not self._batches and not asked and not self._ending and (failed or not uncompacted):
                self._changed.wait(RETRY_SECONDS if failed else self._rest)
            batches, self._batches = self._batches, []
            return batches, self.submitted, self._ending

    def _flush(self) -> bool:
        """Write the appended records. An error becomes the store's fault and never ends the thread."""
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

    def _settle(self, ticket: int) -> None:
        """Tell the engine that every batch up to a ticket is stored, and which sessions were refused."""
        self._settled.append(Settled(ticket, self.store.take_refused()))
        self.durable = ticket
        os.eventfd_write(self.descriptor, 1)

    def _keep_alive(self) -> None:
        """Renew the store's lease; sessions that turn out to be another's are given up."""
        try:
            self._rest = self.store.keep_alive()
        except Exception:
            log.exception("the lease of the journal could not be renewed")
            self._rest = RETRY_SECONDS
        self._give_up(self.store.take_refused())

    def _give_up(self, refused: frozenset[str]) -> None:
        """Tell the engine of sessions that are another's, beside any batch."""
        if refused:
            self._settled.append(Settled(self.durable, refused))
            os.eventfd_write(self.descriptor, 1)

    def _compact(self) -> bool:
        try:
            return self.store.compact()
        except Exception:
            log.exception("the journal could not be compacted")
            return False
