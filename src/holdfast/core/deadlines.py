"""Deadlines: one entry for each session with a time to live, and for each turn with a deadline.

A heap with lazy deletion. Entries that were dropped stay in the heap until they come up, but are cleared away
as soon as they outnumber those that count: the heap is never much more than twice as long as what lives.

However many entries are due at once, few are taken out at any one time: thousands of sessions that expire
together hold up no step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

SLACK = 16

DUE_MAX = 32
"""Entries that are taken out of the heap at one time, those that were dropped included."""


class Deadlines:
    """Entries by key, one each at most. Of entries due at the same time the lowest key comes first."""

    __slots__ = ("_heap", "_left", "_live", "_now")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._live: dict[int, tuple[float, str]] = {}
        self._now = 0.0
        self._left = DUE_MAX
        """How many entries may still be taken out at that time."""

    def __len__(self) -> int:
        """How many entries there are in memory, those that were dropped included."""
        return len(self._heap)

    def entries(self) -> list[tuple[float, int, str]]:
        """Pending deadlines in the order of time: when, the key, and the name of the session."""
        return sorted((when, key, name) for key, (when, name) in self._live.items())

    def add(self, key: int, when: float, name: str) -> None:
        """Look at a session, or its turn, at `when`."""
        assert key not in self._live, "one entry each"
        self._live[key] = (when, name)
        heapq.heappush(self._heap, (when, key))

    def drop(self, key: int) -> None:
        """Remove an entry. No effect without one."""
        if self._live.pop(key, None) is not None and len(self._heap) > 2 * len(self._live) + SLACK:
            self._heap = [(when, each) for each, (when, _) in self._live.items()]
            heapq.heapify(self._heap)

    def is_due(self, now: float) -> bool:
        """Whether an entry is due, or one that was dropped is to be cleared away."""
        return bool(self._heap) and self._heap[0][0] <= now

    def due(self, now: float) -> Iterator[tuple[int, str]]:
        """Take out entries that are due, one by one. Entries dropped or added meanwhile are seen.

        Of more than `DUE_MAX` the others come up at a later time, not at this one: what a verb finds after a
        tick stays as it is until the verb is done.
        """
        if now > self._now:
            self._now, self._left = now, DUE_MAX
        while self._left and self.is_due(now):
            self._left -= 1
            when, key = heapq.heappop(self._heap)
            entry = self._live.get(key)
            if entry is not None and entry[0] == when:
                del self._live[key]
                yield key, entry[1]
