"""Time that this process was awake for: what it did not live through counts against nobody.

A process that is stopped (SIGSTOP, a paused container, a machine that sleeps) finds on waking that its clock
has gone on. What it waited for may have been stopped as well, or has answered long ago and could not be
heard. So a wait is counted in ticks of the waiter's own: a gap between two of them that is longer than it
should be counts as one that is not. Used by the supervisor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["LivedTime", "wait_lived"]

LATE = 2.0
"""How many times the length of a tick may pass between two, before the rest counts as not lived."""


class LivedTime:
    """Seconds since `reset`, without those between two ticks that were too far apart."""

    __slots__ = ("_clock", "_last", "_tick", "seconds")

    def __init__(self, tick: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._tick = tick
        self._clock = clock
        self._last = clock()
        self.seconds = 0.0

    def tick(self) -> float:
        """A tick of this process: returns the seconds so far."""
        now = self._clock()
        self.seconds += min(now - self._last, LATE * self._tick)
        self._last = now
        return self.seconds

    def reset(self) -> None:
        """Begin to count again."""
        self._last = self._clock()
        self.seconds = 0.0


async def wait_lived(ending: asyncio.Future[int], seconds: float, tick: float) -> bool:
    """Wait for something to end, for so many seconds that this process lives; whether it has ended."""
    lived = LivedTime(tick)
    while not ending.done() and lived.tick() < seconds:
        await asyncio.wait({ending}, timeout=min(tick, seconds))
    return ending.done()
