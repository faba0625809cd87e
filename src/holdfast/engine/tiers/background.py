"""Background snapshots: sessions that have been idle for a while are written, one at a time.

So a restart after a crash computes only what came after. The idle sessions are scanned in turn, a few between
two steps. Called by the disk tier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Session
from holdfast.engine.tiers.back_off import Cause
from holdfast.engine.tiers.snapshots import SnapshotStore
from holdfast.engine.tiers.writing import SnapshotWriter

SCAN_SECONDS = 0.5
"""How often a scan of the idle sessions begins."""
SCANNED_MAX = 32
"""Idle sessions that are examined between two steps."""
NEW_TOKENS_MIN = 128
"""A session is written again when so many tokens, and a sixteenth of its file, are new."""


class BackgroundWriter:
    """The scan of idle sessions."""

    __slots__ = ("_candidates", "_clock", "_scan_at", "_scheduler", "_store", "_writer", "idle_seconds")

    def __init__(
        self,
        scheduler: Scheduler,
        store: SnapshotStore,
        writer: SnapshotWriter,
        idle_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.idle_seconds = idle_seconds
        self._scheduler = scheduler
        self._store = store
        self._writer = writer
        self._clock = clock
        self._scan_at = 0.0
        self._candidates: deque[Session] = deque()

    def next_session(self) -> Session | None:
        """The next session to write: idle for long enough, and without a file or with an old one."""
        if self._writer.writing or not self._store.back_off.admits_background:
            return None
        now, resting = self._clock(), self._scheduler.registry.resting
        if not self._candidates:
            if now < self._scan_at:
                return None
            self._scan_at = now + SCAN_SECONDS
            self._candidates.extend(resting)
        for _ in range(min(SCANNED_MAX, len(self._candidates))):
            session = self._candidates[0]
            idle = session in resting and now - session.idle_since >= self.idle_seconds
            if idle and self._is_worth_writing(session):
                return session
            self._candidates.popleft()
        return None

    def _is_worth_writing(self, session: Session) -> bool:
        """Whether a session can be written now, and enough of it is not in its file."""
        computed, snapshot = session.sequence.computed, self._store.snapshots.get(session.id)
        covered = snapshot.length if snapshot is not None and snapshot.length <= computed else 0
        new_min = min(computed, max(NEW_TOKENS_MIN, covered // 16))
        return computed - covered >= new_min and self._writer.can_write(session)

    def write_next(self) -> None:
        """Write one idle session, if there is one to write."""
        session = self.next_session()
        if session is not None:
            self._writer.write(session, Cause.BACKGROUND)
