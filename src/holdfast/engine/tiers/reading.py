"""Reading snapshots: the disk's thread reads and checks a file, and its tensors are copied beside steps.

The copy takes a portion a step, one session after another. A move that is cancelled meanwhile copies no more;
its portion under way is waited for, since its units may be used by the next step.

A file that fails a check is dropped with a warning, and the session is computed again from its tokens. Called
by the disk tier.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container
from typing import NamedTuple

from torch import Tensor

from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Session
from holdfast.engine.tiers.files import BadFile
from holdfast.engine.tiers.portions import Transfer
from holdfast.engine.tiers.releasing import release_tensors
from holdfast.engine.tiers.session_memory import SessionMemory
from holdfast.engine.tiers.snapshots import SnapshotStore
from holdfast.engine.tiers.thread import DiskThread, Job, JobKind

log = logging.getLogger("holdfast.disk")


class Returning(NamedTuple):
    """A move whose file has been read and is being copied."""

    number: int
    session: str
    transfer: Transfer
    rows: dict[str, list[Tensor]]


class SnapshotReader:
    """Restores sessions from their files."""

    __slots__ = ("_clock", "_memory", "_returning", "_scheduler", "_store", "_thread")

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
        self._returning: deque[Returning] = deque()
        """Moves in the order in which their files were read."""

    def read(self, session: Session, number: int) -> bool:
        """Submit a session's file for a move of the core; False if the file is not current."""
        if not self._store.covers(session):
            self._reject(session.id, "it does not match the session's tokens")
            return False
        snapshot = self._store.snapshots[session.id]
        header = self._store.header_of(snapshot)
        self._thread.submit(
            Job(JobKind.READ, session.id, snapshot.file, header, moves=[number], snapshot=snapshot)
        )
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
            transfer = self._memory.scatter(session, job.rows)
        except BadFile as error:
            self._reject(job.session, str(error))
            self._scheduler.arrive(number, False, self._clock())
            return
        self._returning.append(Returning(number, job.session, transfer, job.rows))
        if len(self._returning) == 1:
            self.scatter_more()

    @property
    def scattering(self) -> bool:
        """Whether a file's tensors are being copied."""
        return bool(self._returning)

    def wait(self, seconds: float) -> None:
        """Wait until the portion under way is copied, or time is up."""
        if self._returning:
            self._returning[0].transfer.wait(seconds)

    def scatter_more(self) -> None:
        """Copy the next portion of the move whose file was read first."""
        self.abandon_cancelled(self._scheduler.registry.transits)
        if not self._returning:
            return
        number, session_id, transfer, rows = self._returning[0]
        arrived = True
        try:
            if not transfer.advance():
                return
        except Exception as error:  # noqa: BLE001
            # The units are incomplete and are released. The file is good, and stays for a restart.
            log.warning("session %s is recomputed: it could not be restored: %s", session_id, error)
            transfer.abandon()
            arrived = False
        self._returning.popleft()
        release_tensors(rows)
        self._scheduler.arrive(number, arrived, self._clock())

    def abandon_cancelled(self, wanted: Container[int]) -> None:
        """Copy no more for moves that are not wanted, and wait for what is under way."""
        if all(each.number in wanted for each in self._returning):
            return
        for each in self._returning:
            if each.number not in wanted:
                each.transfer.abandon()
                release_tensors(each.rows)
        self._returning = deque(each for each in self._returning if each.number in wanted)

    def _reject(self, session_id: str, reason: str) -> None:
        log.warning("session %s is recomputed: its snapshot cannot be used: %s", session_id, reason)
        self._store.drop(session_id)
