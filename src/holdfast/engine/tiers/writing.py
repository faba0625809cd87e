"""Writing snapshots: a session's memory is copied beside steps, and the disk's thread writes the file.

Disk space is checked first. The copy takes a portion a step, one session after another; if the session
continues meanwhile, nothing is written. The order is: file, fsync, journal row, and then the core frees the
units. A file that is useless by then, because its session was cut, closed or written again, is removed.

If a session has a file of an earlier length, only the new units are copied and appended to it (`parts`). The
file is rewritten instead if more than a third of it would be useless. One job at a time appends to a
file: during another job of the session, a whole file is written. Called by the disk tier.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from holdfast.core.layout import Tier
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Life, Place, Session
from holdfast.engine.durable.records import SnapshotWritten
from holdfast.engine.durable.session_log import SessionLog
from holdfast.engine.step.runner import DeviceLost
from holdfast.engine.tiers.back_off import Cause
from holdfast.engine.tiers.files import Snapshot
from holdfast.engine.tiers.session_memory import Gathering, SessionMemory
from holdfast.engine.tiers.snapshots import SnapshotStore, only_on_disk
from holdfast.engine.tiers.thread import DiskThread, Job, JobKind

log = logging.getLogger("holdfast.disk")


WASTE_MAX = 0.5
"""Bytes of no use that a file may have, as a part of the rest: what later parts have again."""


class Gathered(NamedTuple):
    """A job whose tensors are being copied, of which session, and why."""

    job: Job
    session: Session
    gathering: Gathering
    cause: Cause


class SnapshotWriter:
    """The files that are being written, and those whose row is not durable yet."""

    __slots__ = (
        "_clock",
        "_gathered",
        "_jobs",
        "_memory",
        "_scheduler",
        "_session_log",
        "_store",
        "_thread",
        "_undurable",
        "writing",
    )

    def __init__(
        self,
        scheduler: Scheduler,
        session_log: SessionLog,
        store: SnapshotStore,
        memory: SessionMemory,
        thread: DiskThread,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._session_log = session_log
        self._store = store
        self._memory = memory
        self._thread = thread
        self._clock = clock
        self.writing: dict[str, Job] = {}
        """The newest job of each session, until its row is durable."""
        self._undurable: list[Job] = []
        self._jobs: dict[str, list[Job]] = {}
        """The jobs of each session that may still change its file or its row, superseded ones too."""
        self._gathered: deque[Gathered] = deque()
        """Jobs whose copy is not complete, in the order of their begin."""

    def can_write(self, session: Session) -> bool:
        """Whether a session is idle and its memory is complete, on the device or on the host."""
        parcel = session.parcel
        on_host = session.place is Place.AWAY and parcel is not None and parcel.tier is Tier.HOST
        return (
            session.sequence.computed > 0
            and session.life is Life.IDLE
            and session.at_rest
            and (session.place is Place.HOME or on_host)
            and session.id in self._session_log.sessions
            and not self._scheduler.registry.copying(session)
        )

    def write(self, session: Session, cause: Cause) -> Job | None:
        """Begin to copy a session's memory for its file; None if there is no room for the file or the copy.

        Older snapshots are evicted to make room, except for a background snapshot.
        """
        sequence, store = session.sequence, self._store
        header = store.header(sequence.computed, sequence.tokens.digest(sequence.computed))
        before = self.writing.get(session.id)
        if before is not None and before.header == header:
            return before
        base = self._base(session)
        page = 0 if base is None else base.length // sequence.ledger.layout.page_size
        size = self._memory.size(session, page)
        if not store.fits(size) and (
            cause is Cause.BACKGROUND
            or not store.make_room(size, session.id, self._scheduler.registry.sessions)
        ):
            log.warning("no room on disk for %d bytes of session %s", size, session.id)
            store.back_off.out_of_room(cause)
            return None
        try:
            gathering = self._memory.gather(session, page)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001
            # The device has no room for the copy: the session stays where it is, and the loop goes on.
            log.warning("session %s could not be copied for the disk: %s", session.id, error)
            store.back_off.out_of_room(cause)
            return None
        file = store.new_name(session.id) if base is None else base.file
        job = Job(JobKind.WRITE, session.id, file, header, gathering.tensors, bytes=size, snapshot=base)
        self._begin(job)
        self._gathered.append(Gathered(job, session, gathering, cause))
        if len(self._gathered) == 1 and not self._advance():
            self._forget(job)
            self._over(job)
            return None
        return job

    def _base(self, session: Session) -> Snapshot | None:
        """The file to append the new units to; None if the whole session is written."""
        base = self._store.base(session) if session.id not in self._jobs else None
        if base is None:
            return None
        whole = self._memory.size(session)
        new = self._memory.size(session, base.length // session.sequence.ledger.layout.page_size)
        wasteful = base.bytes + new > (1 + WASTE_MAX) * whole
        return None if wasteful and self._store.fits(whole) else base

    def _begin(self, job: Job) -> None:
        """Count a job from now on: it is the newest of its session."""
        self.writing[job.session] = job
        self._jobs.setdefault(job.session, []).append(job)
        self._store.reserve(job.session, job.bytes)
        if job.snapshot is not None:
            self._store.extended[job.session] = job.snapshot

    @property
    def gathering(self) -> bool:
        """Whether a session's memory is being copied."""
        return bool(self._gathered)

    def wait(self, seconds: float) -> None:
        """Wait until the portion under way is copied, or time is up."""
        if self._gathered:
            self._gathered[0].gathering.transfer.wait(seconds)

    def gather_more(self) -> None:
        """Copy the next portion of the session that was begun first."""
        if self._gathered:
            job = self._gathered[0].job
            if not self._advance():
                self._fail(job)

    def _advance(self) -> bool:
        """Copy a portion for the first job, and submit it once all is copied; False if it is given up."""
        job, session, gathering, cause = self._gathered[0]
        try:
            current = self.writing.get(job.session) is job and gathering.is_current(session)
            if current and not gathering.transfer.advance():
                return True
        except Exception as error:  # noqa: BLE001
            # The device has no room for the copy: the session stays where it is, and the loop goes on.
            log.warning("session %s could not be copied for the disk: %s", session.id, error)
            self._store.back_off.out_of_room(cause)
            current = False
        self._gathered.popleft()
        if current:
            self._thread.submit(job)
        else:
            gathering.transfer.abandon()
            job.tensors = {}
        return current

    def finish(self, job: Job) -> None:
        """A file has been written and synced, or has failed: its journal row comes next."""
        superseded = self.writing.get(job.session) is not job
        if job.error is not None:
            log.warning("session %s could not be written to disk: %s", job.session, job.error)
            if job.snapshot is None or not job.damaged:
                self._store.back_off.write_failed(job.disk_full)
            elif self._extends(job):
                self._store.drop(job.session)
            self._fail(job)
            return
        self._store.back_off.write_succeeded()
        if superseded or not self._is_useful(job):
            self._remove(job)
            self._fail(job)
            return
        self._store.reserve(job.session, job.bytes)
        self._session_log.append(
            SnapshotWritten(job.session, job.file, job.header.length, _written(job).bytes)
        )
        self._undurable.append(job)
        # The session of a refused row is not in the log any more: its file is useless.
        self._session_log.when_durable(
            job.session, lambda: self._row_durable(job), lambda: self._row_durable(job)
        )

    def _row_durable(self, job: Job) -> None:
        """A file's row is in the journal: the session has the file, and its units may be given up."""
        useful = self._is_useful(job)
        if useful:
            self._store.replace(job.session, _written(job))
        else:
            self._remove(job)
            self._store.log_row(job.session)
        self._over(job)
        self._arrive(job, useful)
        self._undurable = [other for other in self._undurable if other is not job]

    def fail_undurable(self) -> None:
        """The journal cannot be written: memory that waits for a row stays where it is."""
        for job in self._undurable:
            self._arrive(job, False)
        self._undurable = []

    def _is_useful(self, job: Job) -> bool:
        """Whether a file still belongs to its session's history.

        The file of a session that is only on disk may only be replaced by one of all that it has computed.
        """
        session = self._scheduler.registry.sessions.get(job.session)
        if session is None or job.session not in self._session_log.sessions:
            return False
        if job.snapshot is not None and not self._extends(job):
            return False
        length, sequence = job.header.length, session.sequence
        if only_on_disk(session) and length != sequence.computed:
            return False
        return length <= sequence.known and sequence.tokens.digest(length) == job.header.tokens

    def _extends(self, job: Job) -> bool:
        """Whether the file that a job appends to is still its session's, as it was."""
        return job.snapshot is not None and self._store.snapshots.get(job.session) is job.snapshot

    def _remove(self, job: Job) -> None:
        """Remove what a job has written: its file, or the part that it has appended.

        The file that it was appended to may have been cut or removed meanwhile.
        """
        if job.snapshot is None:
            self._store.files.remove(job.file)
            return
        current = self._store.snapshots.get(job.session)
        if current is not None and current.file == job.file:
            self._store.files.cut(job.file, max(current.bytes, job.snapshot.bytes))

    def _fail(self, job: Job) -> None:
        """A job has come to nothing."""
        self._over(job)
        self._arrive(job, False)

    def _arrive(self, job: Job, arrived: bool) -> None:
        """Tell the core how the moves that waited for a job ended; later moves need another job."""
        self._forget(job)
        moves, job.moves = job.moves, []
        for number in moves:
            self._scheduler.arrive(number, arrived, self._clock())

    def _forget(self, job: Job) -> None:
        """Let a job be the newest of its session no longer."""
        if self.writing.get(job.session) is job:
            del self.writing[job.session]
            self._store.release(job.session)

    def _over(self, job: Job) -> None:
        """A job changes the file or the row of its session no more."""
        left = [other for other in self._jobs[job.session] if other is not job]
        if left:
            self._jobs[job.session] = left
        else:
            del self._jobs[job.session]
        if job.snapshot is not None:
            del self._store.extended[job.session]


def _written(job: Job) -> Snapshot:
    """The file of a session, including a job's part."""
    before = 0 if job.snapshot is None else job.snapshot.bytes
    return Snapshot(job.file, job.header.length, job.header.tokens, before + job.bytes, job.snapshot)
