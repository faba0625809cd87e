"""Eviction order: lazy heaps over the parts of the prefix tree that may be evicted.

A node or tail enters the heap when it becomes a candidate and keeps at most one entry. Using it again
only changes its `used` tick; the heap notices when the entry comes up, and puts it back. So a look-up costs
nothing here, and eviction is still least recently used. Lower ranks go first: prefixes used by sessions are
kept longest.

A member may leave the tree because another component is short. If this component is never short, its
entry would stay for ever; so a heap that has doubled drops the entries that cannot be evicted any more.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from holdfast.core.layout import Component
from holdfast.core.node import Node, Tail, leaf_may_go, state_may_go, window_may_go


class Evictable(Protocol):
    """The queue's view of its members."""

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
        """Drop the entries of members that cannot go; one that can again later is offered again."""
        for _, _, _, member in self._entries:
            if not self._evictable(member):
                member.queued &= ~self._bit
        self._entries[:] = [entry for entry in self._entries if entry[3].queued & self._bit]
        heapq.heapify(self._entries)
        self._entries_max = max(ENTRIES_MIN, 2 * len(self._entries))


class Candidates:
    """Parts of the tree that may be evicted, by tenant and component."""

    __slots__ = ("components", "queues")

    def __init__(self, components: tuple[Component, ...]) -> None:
        self.components = components
        self.queues: dict[str, dict[Component, EvictionQueue[Node | Tail]]] = {}

    def open(self, root_key: str) -> None:
        """Keep queues for a tenant from now on."""
        self.queues[root_key] = {
            Component.FULL: EvictionQueue(1, leaf_may_go),
            Component.WINDOW: EvictionQueue(2, window_may_go),
            Component.STATE: EvictionQueue(4, state_may_go),
        }

    def close(self, root_key: str) -> None:
        """Drop the queues of a tenant whose tree is gone."""
        del self.queues[root_key]

    def pop(self, root_key: str, component: Component) -> Node | Tail | None:
        """The member that should go first, taken off its queue, or None."""
        queues = self.queues.get(root_key)
        return None if queues is None else queues[component].pop()

    def offer(self, component: Component, member: Node | Tail) -> None:
        """Queue a member that may have become a candidate, among those of its tenant."""
        queues = self.queues.get(member.root_key)
        if queues is not None:  # What the audit healed may be a lease of a tree that is gone.
            queues[component].offer(member)

    def offer_all(self, member: Node | Tail) -> None:
        """Queue a member for each component that it may be evicted for."""
        for component in self.components:
            self.offer(component, member)

    def lacks(self, member: Node | Tail) -> bool:
        """Whether a member could be evicted, but is in no queue: for the census."""
        queues = self.queues.get(member.root_key, {})
        return any(queue.lacks(member) for queue in queues.values())
