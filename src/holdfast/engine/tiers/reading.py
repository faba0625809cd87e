"""Reading snapshots: the disk's thread reads and checks a file, and its tensors are copied between steps.

A file that fails a check is dropped with a warning, and the session is computed again from its tokens. Called
by the disk tier.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Session
from holdfast.engine.tiers.session_memory import SessionMemory
from holdfast.engine.tiers.snapshots import SnapshotStore
from holdfast.engine.tiers.thread import DiskThread, Job, JobKind

log = logging.getLogger("holdfast.disk")


class SnapshotReader:
    """Restores sessions from their files."""

    __slots__ = ("_clock", "_memory", "_scheduler", "_store", "_thread")

    def __init__(
        self,
        scheduler: Scheduler,
        store: SnapshotStore,
        memory: SessionMemory,
        thread: DiskThread,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._store = store
        self._memory = memory
        self._thread = thread
        self._clock = clock

    def read(self, session: Session, number: int) -> bool:
        """Submit a session's file for a move of the core; False if the file is not current."""
        if not self._store.covers(session):
            self._reject(session.id, "it does not match what the session has computed")
            return False
        snapshot = self._store.snapshots[session.id]
        header = self._store.header(snapshot.length, snapshot.tokens)
        self._thread.submit(Job(JobKind.READ, session.id, snapshot.file, header, moves=[number]))
        return True

    def finish(self, job: Job) -> None:
        """A file has been read: copy it into the session's units, unless the move was cancelled."""
        (number,) = job.moves
        session = self._scheduler.registry.transits.get(number)
        if session is None:
            return
        if job.error is not None:
            self._reject(job.session, job.error)
            self._scheduler.arrive(number, False, self._clock())
            return
        try:
            self._memory.scatter(session, job.tensors)
        except Exception as error:  # noqa: BLE001
            # The units are incomplete and are released. The file is good, and stays for a restart.
            log.warning("session %s is computed again: it could not be restored: %s", job.session, error)
            self._scheduler.arrive(number, False, self._clock())
            return
        self._scheduler.arrive(number, True, self._clock())

    def _reject(self, session_id: str, reason: str) -> None:
        log.warning("session %s is computed again: its snapshot cannot be used: %s", session_id, reason)
        self._store.drop(session_id)
