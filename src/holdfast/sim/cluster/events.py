"""The clock and the queue of events: what happens next, in the order of time, then of scheduling.

One random source for the whole world, so a seed is a run. Used by everything in the simulation of a cluster.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

__all__ = ["Events"]

Action = Callable[..., None]


class Events:
    """Events to come."""

    __slots__ = ("_queue", "_serial", "chance", "count", "dice", "now")

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.count = 0
        """How many events have happened."""
        self.dice = random.Random(seed)
        self.chance = self.dice.random
        self._queue: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._serial = 0

    def after(self, seconds: float, action: Action, *values: Any) -> None:
        """Let something happen later."""
        self._serial = serial = self._serial + 1
        heappush(self._queue, (self.now + seconds, serial, action, values))

    def between(self, least: float, most: float) -> float:
        """A random number of seconds."""
        return least + (most - least) * self.chance()

    def run(self, most: int, until: float = float("inf")) -> bool:
        """Let up to `most` events happen, those until a time; whether the time was reached."""
        queue, last = self._queue, self.count + most
        while queue and self.count < last:
            if queue[0][0] > until:
                self.now = until
                break
            self.now, _, action, values = heappop(queue)
            self.count += 1
            action(*values)
        return not queue or queue[0][0] > until
