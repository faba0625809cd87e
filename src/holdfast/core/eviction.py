"""What goes first when memory is short: a lazy heap over the prefix tree's evictable things.

A node or tail enters the heap when it becomes a candidate and keeps at most one entry. Using it again
only changes its `used` tick; the heap notices when the entry comes up, and puts it back. So touching
a path on every look-up costs nothing here, and eviction is least recently used all the same.
Lower ranks go first: what a session leans on is kept longest.

A member may leave the tree for want of another component. Where this one is never short, nothing would ever
come up here: so a heap that has doubled lets go of those that cannot go any more.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Evictable(Protocol):
    """What the queue needs to know of its members."""

    rank: int
    used: int
    queued: int


T = TypeVar("T", bound=Evictable)

ENTRIES_MIN = 256
"""Entries that are never swept: so few are cheaper to keep than to look through."""


class EvictionQueue(Generic[T]):
    """Candidates of one component, least recently used first.

    `evictable` says whether a member may go right now; `bit` marks membership on the member itself.
    """

    __slots__ = ("_bit", "_entries", "_entries_max", "_evictable", "_serial")

    def __init__(self, bit: int, evictable: Callable[[T], bool]) -> None:
        self._bit = bit
        self._evictable = evictable
        self._entries: list[tuple[int, int, int, T]] = []
        self._entries_max = ENTRIES_MIN
        self._serial = 0

    def lacks(self, member: T) -> bool:
        """Whether a member may go right now, but is not queued."""
        return not member.queued & self._bit and self._evictable(member)

    def offer(self, member: T) -> None:
        """Queue a member that has become a candidate; no effect on one that is queued or cannot go."""
        if self.lacks(member):
            self._push(member)

    def pop(self) -> T | None:
        """The candidate that should go first, taken off the queue, or None."""
        entries = self._entries
        while entries:
            rank, used, _, member = heapq.heappop(entries)
            member.queued &= ~self._bit
            if not self._evictable(member):
                continue
            if member.used == used and member.rank == rank:
                return member
            self._push(member)
        return None

    def _push(self, member: T) -> None:
        if len(self._entries) >= self._entries_max:
            self._sweep()
        member.queued |= self._bit
        self._serial += 1
        heapq.heappush(self._entries, (member.rank, member.used, self._serial, member))

    def _sweep(self) -> None:
        """Take off the queue who cannot go: one that can again later is offered again."""
        for _, _, _, member in self._entries:
            if not self._evictable(member):
                member.queued &= ~self._bit
        self._entries[:] = [entry for entry in self._entries if entry[3].queued & self._bit]
        heapq.heapify(self._entries)
        self._entries_max = max(ENTRIES_MIN, 2 * len(self._entries))
