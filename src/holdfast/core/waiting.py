"""Turns that wait, kept so that the next to be admitted are found without looking at the others.

    priority 0 ── tenant red:   3  7  8  12       a lane for each tenant that waits
                  tenant blue:  5  6
    priority 1 ── tenant blue:  9

Turns of one priority are always served in the order of their numbers: the first has waited longest. So only
priorities are compared when turns are admitted. A tenant at its quota is passed over with its whole lane.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator

from holdfast.core.turn import Turn

Entry = tuple[int, str, Turn]


class Lanes:
    """Turns of one priority: a list for each tenant, by number, and the first entries of all of them."""

    __slots__ = ("_heads", "_lanes")

    def __init__(self) -> None:
        self._heads: list[Entry] = []
        self._lanes: dict[str, list[Entry]] = {}

    def __bool__(self) -> bool:
        return bool(self._heads)

    def add(self, entry: Entry) -> None:
        """A turn waits from now on: behind those of its tenant that came before it."""
        lane = self._lanes.setdefault(entry[1], [])
        if not lane or entry < lane[0]:
            if lane:
                del self._heads[bisect_left(self._heads, lane[0])]
            insort(self._heads, entry)
        insort(lane, entry)

    def remove(self, entry: Entry) -> None:
        """A turn waits no more."""
        lane = self._lanes[entry[1]]
        place = bisect_left(lane, entry)
        del lane[place]
        if place == 0:
            del self._heads[bisect_left(self._heads, entry)]
            if lane:
                insort(self._heads, lane[0])
            else:
                del self._lanes[entry[1]]

    def in_order(self, passed: Collection[str]) -> Iterator[Turn]:
        """The turns by number, less those of tenants that are passed over. Looks at what it yields alone."""
        begun: list[tuple[Entry, int]] = []
        heads = (head for head in self._heads if head[1] not in passed)
        head = next(heads, None)
        while head is not None or begun:
            if head is not None and (not begun or head < begun[0][0]):
                entry, place = head, 0
                head = next(heads, None)
            else:
                entry, place = heapq.heappop(begun)
            yield entry[2]
            lane = self._lanes[entry[1]]
            if place + 1 < len(lane):
                heapq.heappush(begun, (lane[place + 1], place + 1))


class Waiting:
    """All turns that wait: `turns` by number, and lanes by priority."""

    __slots__ = ("_priorities", "turns")

    def __init__(self) -> None:
        self.turns: dict[int, Turn] = {}
        self._priorities: dict[int, Lanes] = {}

    def add(self, turn: Turn, tenant: str) -> None:
        """A turn waits from now on."""
        self.turns[turn.number] = turn
        self._priorities.setdefault(turn.request.priority, Lanes()).add((turn.number, tenant, turn))

    def remove(self, turn: Turn, tenant: str) -> None:
        """A turn waits no more."""
        del self.turns[turn.number]
        lanes = self._priorities[turn.request.priority]
        lanes.remove((turn.number, tenant, turn))
        if not lanes:
            del self._priorities[turn.request.priority]

    def by_priority(self, passed: Collection[str]) -> list[Iterator[Turn]]:
        """For each priority its turns in the order of their numbers, less those of tenants passed over."""
        return [lanes.in_order(passed) for lanes in self._priorities.values()]
