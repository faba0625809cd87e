"""How long the loop's work between two steps takes: a histogram for each kind of work.

The kinds are the tags of commands, and `waiting`, `report`, `tick`, `audit`, `send`, `plan`, `journal`,
`disk`, `capture` and `draft`. `all` is the work of one round together. The server shows the counts in
`/metrics`. Used by the loop, and by the engine process around it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["BOUNDS", "LoopTimes"]

BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Upper bounds of the buckets, in seconds; the last bucket has no bound."""

ALL = "all"


class LoopTimes:
    """The histograms of one loop: bucket counts and total seconds by kind of work."""

    __slots__ = ("_clock", "_round", "counts", "seconds")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._round = 0.0
        self.counts: dict[str, list[int]] = {}
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measured(self, work: str) -> Iterator[None]:
        """Measure the body as `work`."""
        begun = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - begun
            self._round += seconds
            self._count(work, seconds)

    def end_round(self) -> None:
        """A round of the loop is over: count its total time, if it did anything."""
        if self._round:
            self._count(ALL, self._round)
            self._round = 0.0

    def _count(self, work: str, seconds: float) -> None:
        counts = self.counts.get(work)
        if counts is None:
            counts = self.counts[work] = [0] * (len(BOUNDS) + 1)
            self.seconds[work] = 0.0
        counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds[work] += seconds
