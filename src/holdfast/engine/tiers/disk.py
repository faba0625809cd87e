"""The disk tier: sessions' memory in snapshot files, which a separate thread writes and reads.

The core decides which sessions move; this tier moves them. A file holds the whole computed memory of a
session, including its leased part of the prefix tree, so it also serves a restart. The next spill appends
the new units to the file (`parts`):

    spill        copy of the units ──> file ──> fsync ──> row in the journal ──> the core frees the units
    restore      file ──> checked ──> copied into units that the core has allocated ──> reported to the core
    background   a session that has been idle for a while is written as well (`background`)

Steps of other sessions continue meanwhile: `launch` and `collect` are called between steps, and only copy
from and to memory, a portion at a time (`portions`). Called by the engine's loop alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from holdfast.core.layout import Tier
from holdfast.core.plan import TierMove
from holdfast.core.registry import Plan
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Session
from holdfast.engine.durable.records import StoredSession
from holdfast.engine.durable.session_log import SessionLog
from holdfast.engine.tiers.back_off import Cause
from holdfast.engine.tiers.background import BackgroundWriter
from holdfast.engine.tiers.files import encode
from holdfast.engine.tiers.parts import read_snapshot
from holdfast.engine.tiers.reading import SnapshotReader
from holdfast.engine.tiers.session_memory import SessionMemory
from holdfast.engine.tiers.snapshots import SnapshotStore
from holdfast.engine.tiers.staging import Staging
from holdfast.engine.tiers.thread import DiskThread, Job, JobKind
from holdfast.engine.tiers.writing import SnapshotWriter

log = logging.getLogger("holdfast.disk")

POLL_SECONDS = 0.1
"""How often a shutdown asks whether it has been cancelled."""


class Cancellation:
    """Whether a shutdown is to end at once; once cancelled, it stays so."""

    __slots__ = ("_asked", "_cancelled")

    def __init__(self, asked: Callable[[], bool] | None) -> None:
        self._asked = asked
        self._cancelled = False

    def __call__(self) -> bool:
        self._cancelled = self._cancelled or (self._asked is not None and self._asked())
        return self._cancelled


class DiskTier:
    """The moves to and from the disk, and the snapshots of idle sessions."""

    __slots__ = (
        "_outcomes",
        "_reader",
        "_scheduler",
        "_session_log",
        "_thread",
        "background",
        "staging",
        "store",
        "writer",
    )

    def __init__(
        self,
        store: SnapshotStore,
        idle_seconds: float,
        scheduler: Scheduler,
        memory: SessionMemory,
        session_log: SessionLog,
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self._scheduler = scheduler
        self._session_log = session_log
        self._thread = DiskThread(self._carry_out)
        self.writer = SnapshotWriter(scheduler, session_log, store, memory, self._thread, clock)
        self.staging = Staging(store, scheduler.registry.sessions, clock)
        """Files that come from other engines."""
        self.background = BackgroundWriter(scheduler, store, self.writer, idle_seconds, clock)
        self._reader = SnapshotReader(scheduler, store, memory, self._thread, clock)
        self._outcomes: dict[int, dict[int, bool | None]] = {}
        """For each plan that has not settled, what came of its moves; None for those under way."""

    def _carry_out(self, job: Job) -> None:
        """Write or read a file, in the thread."""
        files, snapshot = self.store.files, job.snapshot
        if job.kind is JobKind.READ:
            assert snapshot is not None, "a job that reads names the file"
            page_size = self._scheduler.registry.ledger.layout.page_size
            job.rows = read_snapshot(files, snapshot, self.store.header_of, page_size)
            return
        content = encode(job.header, job.tensors, 0 if snapshot is None else snapshot.length)
        job.tensors = {}
        if snapshot is None:
            files.write(job.file, content)
        else:
            files.append(job.file, snapshot.bytes, content)
        job.bytes = len(content)

    # --- between steps ----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a file is being written or read, or a background snapshot is due."""
        return self._works or self.background.next_session() is not None

    @property
    def _works(self) -> bool:
        """Whether a file is on its way to the disk or from it."""
        return self._thread.pending > 0 or self._copies

    @property
    def _copies(self) -> bool:
        """Whether memory is being copied, a portion a step."""
        return self.writer.gathering or self._reader.scattering

    def launch(self, plan: Plan) -> None:
        """Begin the moves of a plan to and from the disk, after copies of moves that are cancelled."""
        self._reader.abandon_cancelled(self._scheduler.registry.transits)
        moves: dict[int, TierMove] = {}
        for move in plan.moves:
            if Tier.DISK in (move.source_tier, move.destination_tier):
                moves.setdefault(move.number, move)
        if moves:
            self._outcomes[plan.step] = {number: self._begin(move) for number, move in moves.items()}

    def _begin(self, move: TierMove) -> bool | None:
        session = self._scheduler.registry.transits[move.number]
        if move.source_tier is Tier.DISK:
            return None if self._reader.read(session, move.number) else False
        if self.store.covers(session):
            return True
        job = self.writer.write(session, Cause.SPILL)
        if job is None:
            return False
        job.moves.append(move.number)
        return None

    def settle(self, plan: Plan, others: Sequence[bool | None]) -> list[bool | None]:
        """What came of a plan's moves so far; `others` has the outcomes of moves between other tiers."""
        outcomes = self._outcomes.pop(plan.step, {})
        return [outcomes.get(move.number, other) for move, other in zip(plan.moves, others, strict=False)]

    def collect(self) -> None:
        """Copy the next portions, and finish the jobs that the thread has done."""
        self.writer.gather_more()
        self._reader.scatter_more()
        if self._session_log.fault is not None:
            self.writer.fail_undurable()
        for job in self._thread.take_finished():
            if job.kind is JobKind.WRITE:
                self.writer.finish(job)
            else:
                self._reader.finish(job)

    def wait(self, seconds: float) -> None:
        """Wait until the thread has finished a job, or time is up; while there is more to copy, for that."""
        if self._copies:
            (self.writer if self.writer.gathering else self._reader).wait(seconds)
        else:
            self._thread.wait(seconds)

    def write_idle(self) -> None:
        """Write one session in the background, if one is due."""
        self.background.write_next()

    def truncated(self, session: Session, length: int) -> None:
        """A session's history was cut at `length`: drop the part of its file past the cut."""
        self.store.truncated(session, length)

    def forget(self, session_id: str) -> None:
        """A session is closed: remove its file."""
        self.store.forget(session_id)

    # --- start and end ----------------------------------------------------------------------------

    def recover(self, stored: StoredSession) -> None:
        """A session was recovered from the journal: use its file if that is valid and has room.

        A file that came from the engine that had it before is used instead of the one that the journal names.
        """
        session = self._scheduler.registry.sessions[stored.id]
        staged = self.staging.take(stored)
        if staged is not None:
            stored.snapshot = staged
        snapshot = self.store.check(stored, session.sequence.tokens)
        adopted = snapshot is not None and self._scheduler.adopt(stored.id, snapshot.length)
        if adopted and snapshot is not None:
            self.store.replace(stored.id, snapshot)
        if staged is not None and adopted:
            self.store.log_row(stored.id)  # Of the parts that match the history.
        elif staged is not None:
            self.store.files.remove(staged.file)

    def write_all(self, progress: Callable[[int, int], None], cancelled: Cancellation) -> None:
        """Write every session whose file is missing or old; return when that is done, or cancelled."""
        sessions = [
            session
            for name in self._session_log.sessions
            if (session := self._scheduler.registry.sessions.get(name)) is not None
            and self.writer.can_write(session)
            and not self.store.covers(session)
        ]
        left = len(sessions)
        for session in sessions:
            if cancelled():
                break
            self.writer.write(session, Cause.SHUTDOWN)
            while self._works and not cancelled():
                self.wait(POLL_SECONDS)
                self.collect()
            self._session_log.sync()
            if not self._works:
                left -= 1
                progress(len(sessions) - left, len(sessions))
        if left:
            log.warning(
                "%d of %d sessions were not written before the engine ended; they will be recomputed",
                left,
                len(sessions),
            )

    def close(self, cancelled: Cancellation) -> None:
        """Let the thread end and release the directory.

        Once cancelled, the file in progress is aborted and a disk that hangs is left alone. Such a file has
        no row in the journal, and the next engine removes it.
        """
        self._thread.stop(cancelled, self.store.files.abort)
        self.staging.close()
        self.store.close()
