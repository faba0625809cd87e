"""Back-off: how long the disk is left alone after it could not be written, or had no room.

Failed writes are retried after 5 s, and after twice as long each further time. A disk without room is retried
after 5 s, or as soon as a file is removed: background snapshots pause after any write that found no room,
spills only after a spill did. Called by the disk tier.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from holdfast.core.ledger import Pool
from holdfast.engine.durable.session_log import SessionLog

FAULT_SECONDS = 5.0
"""The first pause after a failed write."""
FULL_SECONDS = 5.0
"""The pause after the disk had no room, unless a file is removed before that."""
BACK_OFF_MAX = 64
"""The longest pause, as a multiple of the first."""


class Cause(Enum):
    """Why a session is written."""

    SPILL = auto()
    """Its memory leaves the device or the host."""
    BACKGROUND = auto()
    """It has been idle for a while; its memory stays where it is."""
    SHUTDOWN = auto()
    """The engine ends."""


class BackOff:
    """Whether the disk may be written now."""

    __slots__ = ("_background_until", "_failed_until", "_failures", "_full_until", "_session_log", "clock")

    def __init__(self, clock: Callable[[], float], session_log: SessionLog) -> None:
        self.clock = clock
        self._session_log = session_log
        self._failures = 0
        self._failed_until = 0.0
        self._full_until = 0.0
        self._background_until = 0.0

    def admits(self, pool: Pool, count: int) -> bool:
        """Gate of the disk's pools: whether units may be taken for a spill.

        The disk may be full while its pool has free units, because a file also holds what its session leases.
        With the gate shut, the core frees memory in another way.
        """
        return len(pool.free) >= count and self._healthy and self.clock() >= self._full_until

    @property
    def admits_background(self) -> bool:
        """Whether a background snapshot may be written."""
        return self._healthy and self.clock() >= max(self._full_until, self._background_until)

    @property
    def _healthy(self) -> bool:
        return self.clock() >= self._failed_until and self._session_log.fault is None

    def out_of_room(self, cause: Cause) -> None:
        """There was no room for a file, or for the copy to be written."""
        self._background_until = self.clock() + FULL_SECONDS
        if cause is not Cause.BACKGROUND:
            self._full_until = self._background_until

    def write_failed(self, full: bool) -> None:
        """A file could not be written; `full` says that the disk reported no room."""
        times = min(BACK_OFF_MAX, 1 << self._failures)
        self._failures = min(self._failures + 1, BACK_OFF_MAX)
        if full:
            self._full_until = self.clock() + times * FULL_SECONDS
        else:
            self._failed_until = self.clock() + times * FAULT_SECONDS

    def write_succeeded(self) -> None:
        """A file was written."""
        self._failures = 0

    def room_freed(self) -> None:
        """A file was removed."""
        self._full_until = self._background_until = 0.0
