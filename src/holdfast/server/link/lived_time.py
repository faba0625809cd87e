"""Time during which this process was running: pauses of the process do not count towards a timeout.

When a process that was stopped (SIGSTOP, a paused container, a suspended machine) continues, its clock has
gone on. The process that it waits for may have been stopped as well, or its answer is unread. So a timeout is
counted in ticks of the waiting process: a gap between two ticks that is too long counts as two ticks. Used by
the supervisor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["LivedTime", "wait_lived"]

LATE = 2.0
"""How many ticks a gap between two ticks may count for."""


class LivedTime:
    """Seconds since `reset`, without pauses of the process."""

    __slots__ = ("_clock", "_last", "_tick", "seconds")

    def __init__(self, tick: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._tick = tick
        self._clock = clock
        self._last = clock()
        self.seconds = 0.0

    def tick(self) -> float:
        """Count the time since the last tick; returns the seconds so far."""
        now = self._clock()
        self.seconds += min(now - self._last, LATE * self._tick)
        self._last = now
        return self.seconds

    def reset(self) -> None:
        """Start again from zero."""
        self._last = self._clock()
        self.seconds = 0.0


async def wait_lived(ending: asyncio.Future[int], seconds: float, tick: float) -> bool:
    """Wait for a future for so many seconds of running time; whether it is done."""
    lived = LivedTime(tick)
    while not ending.done() and lived.tick() < seconds:
        await asyncio.wait({ending}, timeout=min(tick, seconds))
    return ending.done()
