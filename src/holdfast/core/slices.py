"""The sliced census: a bounded part of a recount at a time, over a world that changes in between.

`Round` walks nodes, owners, leases, Holds and free lists, and only ever raises suspicions: what looks wrong
is checked against the present before it counts, and then the whole census (audit.py) decides. `Locks` and
`Owner` are what both kinds of census have in common. Called by the audit alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Protocol

from holdfast.core.layout import MemoryLayout
from holdfast.core.lease import Lease, LeaseRecord
from holdfast.core.ledger import Grant, Holder, Ledger, Pool
from holdfast.core.node import Node, Tail, WindowLock
from holdfast.core.prefix import PrefixTree

# What a look costs in the midst of other work, counted in units of memory looked at (some 80 ns each).
OWNER_COST = 96
NODE_COST = 48
HOLD_COST = 24
LEASE_COST = 4

NO_LOCKS: frozenset[WindowLock] = frozenset()


class Owner(Protocol):
    """An owner of Holds: a sequence, or a copy between tiers."""

    holder: Holder
    lease: Lease | None

    def claim(self, into: list[Grant]) -> None:
        """Name every Hold that is kept."""

    def faults(self) -> list[str]:
        """Inconsistencies of the owner's own records."""


class Locks:
    """The locks of some leases: how many on each node, state and tail, and which on a node's window pages."""

    __slots__ = ("paths", "states", "tails", "windows")

    def __init__(self, records: Collection[LeaseRecord], layout: MemoryLayout) -> None:
        self.paths: dict[Node, int] = {}
        self.states: dict[Node, int] = {}
        self.tails: dict[Tail, int] = {}
        self.windows: dict[Node, set[WindowLock]] = {}
        for record in records:
            node, state_node, tail = record.node, record.state_node, record.tail
            self.paths[node] = self.paths.get(node, 0) + 1
            if state_node is not None:
                self.states[state_node] = self.states.get(state_node, 0) + 1
            if tail is not None:
                self.tails[tail] = self.tails.get(tail, 0) + 1
            if layout.window:
                self._add_windows(record, layout.page_size)

    def _add_windows(self, record: LeaseRecord, page_size: int) -> None:
        node, first = record.node, record.window_first * page_size
        while node.parent is not None and node.end > first:
            self.windows.setdefault(node, set()).add(record)
            node = node.parent

    def agree(self, node: Node) -> bool:
        """Whether a node and its tails have just these locks."""
        if node.leases != self.paths.get(node, 0) or node.state_leases != self.states.get(node, 0):
            return False
        if node.window_leases != self.windows.get(node, NO_LOCKS):
            return False
        return not node.tails or all(tail.leases == self.tails.get(tail, 0) for tail in node.tails.values())


class Sightings:
    """Where each unit was last seen: a number a unit, counted on from round to round.

    A round numbers its Holds, and after them the places of a free list. Numbers below a round's first one are
    of earlier rounds. So nothing is cleared between rounds, and no slice pays for growing or freeing a table
    as large as the memory.
    """

    __slots__ = ("first", "numbers")

    def __init__(self, ledger: Ledger) -> None:
        self.first = 1
        self.numbers = [array("Q", bytes(8 * pool.size)) for pool in ledger.pools.values()]


class Round:
    """One sliced census: nodes, owners, leases, Holds, free lists, in turn. Only ever raises suspicions.

    It works on snapshots of lists, never of units. A Hold that is moved gets a fresh serial, so a
    Hold that changed hands since the round began is told apart from one without an owner. Nodes are found as
    the walk goes: those that join the tree meanwhile have fresh serials, and a split keeps the lower part.
    """

    __slots__ = (
        "_at",
        "_claimed",
        "_first",
        "_grants",
        "_last_serial",
        "_leases",
        "_ledger",
        "_locks",
        "_next",
        "_nodes",
        "_owners",
        "_pools",
        "_sightings",
        "_tree",
    )

    def __init__(self, ledger: Ledger, owners: list[Owner], tree: PrefixTree, sightings: Sightings) -> None:
        self._ledger = ledger
        self._tree = tree
        self._leases = set(tree.leases.records.values())
        self._locks = Locks(self._leases, ledger.layout)
        self._nodes = list(tree.roots.values())
        self._owners = owners
        self._grants = list(ledger.live.values())
        self._next = 0
        self._pools = list(ledger.pools.values())
        self._at = 0
        self._last_serial = ledger.serial
        self._claimed: set[Grant] = set()
        self._sightings = sightings.numbers
        self._first = sightings.first
        sightings.first += len(self._grants) + max(pool.size for pool in self._pools)

    @property
    def opening_cost(self) -> int:
        """The cost of the snapshots at the start of a round."""
        return LEASE_COST * len(self._leases) + len(self._grants) // 4

    @property
    def done(self) -> bool:
        """Whether the round has looked at everything."""
        return not (self._nodes or self._owners or self._leases or self._pools) and self._next >= len(
            self._grants
        )

    def work(self, budget: int) -> bool:
        """Look at about `budget` units' worth more; True if something looks wrong."""
        while budget > 0 and self._nodes:
            node = self._nodes.pop()
            if self._doubt_node(node):
                return True
            self._nodes += node.children.values()
            budget -= NODE_COST * (1 + len(node.tails)) + len(node.children)
        while budget > 0 and self._owners:
            if self._doubt_owner(self._owners.pop()):
                return True
            budget -= OWNER_COST
        if budget > 0 and self._leases:
            if any(self._tree.leases.records.get(record.serial) is record for record in self._leases):
                return True
            self._leases = set()
        while budget > 0 and self._next < len(self._grants):
            grant = self._grants[self._next]
            part = grant.units[self._at : self._at + budget]
            if self._doubt_grant(grant, part):
                return True
            budget -= HOLD_COST + len(part)
            self._at += len(part)
            if self._at >= len(grant.units):
                self._at = 0
                self._next += 1
        while budget > 0 and self._pools:
            pool = self._pools[-1]
            part = pool.free[self._at : self._at + budget]
            if self._doubt_free(pool, part):
                return True
            budget -= HOLD_COST + len(part)
            self._at += len(part)
            if self._at >= len(pool.free):
                self._at = 0
                self._pools.pop()
                if self._doubt_rest(pool):
                    return True
        return False

    def _doubt_node(self, node: Node) -> bool:
        """Whether a node's locks are not those of leases, its Holds not its own, or it is never evicted."""
        if not self._locks.agree(node):
            # Leases have come and gone since they were counted: count those that are there now.
            self._locks = Locks(self._tree.leases.records.values(), self._ledger.layout)
            if not self._locks.agree(node):
                return True
        if self._tree.forest.candidates.lacks(node):
            return True
        claims = [hold.grant for hold in (node.full, node.window, node.state) if hold is not None]
        for tail in node.tails.values():
            if self._tree.forest.candidates.lacks(tail):
                return True
            claims += [hold.grant for hold in tail.holds()]
        return self._doubt_claims(claims)

    def _doubt_owner(self, owner: Owner) -> bool:
        """Whether an owner's books or its lease are wrong, or its Holds are not its own."""
        if owner.faults():
            return True
        if owner.lease is not None:
            if owner.lease.record.astray:
                return True
            self._leases.discard(owner.lease.record)
        return self._doubt_claims(claims_of(owner))

    def _doubt_claims(self, claims: list[Grant]) -> bool:
        """Whether one of these Holds was taken back, or has another owner as well."""
        live, claimed = self._ledger.live, self._claimed
        for grant in claims:
            if grant in claimed or live.get(grant.serial) is not grant:
                return True
            claimed.add(grant)
        return False

    def _doubt_grant(self, grant: Grant, part: list[int]) -> bool:
        """Whether a Hold has no owner, or one of its units is out of range, or in another Hold as well."""
        if self._ledger.live.get(grant.serial) is not grant:
            return False
        if grant.serial <= self._last_serial and grant not in self._claimed:
            return True
        if part and _out_of_range(grant.pool, part):
            return True
        numbers = self._sightings[grant.pool.index]
        first, number = self._first, self._first + self._next
        for unit in part:
            if numbers[unit] >= first and self._elsewhere(unit, numbers[unit], grant):
                return True
            numbers[unit] = number
        return False

    def _doubt_free(self, pool: Pool, part: list[int]) -> bool:
        """Whether a free unit is out of range, or free twice, or in a Hold as well."""
        if part and (_out_of_range(pool, part) or self._at + len(part) > pool.size):
            return True
        numbers, first = self._sightings[pool.index], self._first
        number = first + len(self._grants) + self._at
        for unit in part:
            if numbers[unit] >= first and self._seen_before(pool, unit, numbers[unit]):
                return True
            numbers[unit] = number
            number += 1
        return False

    def _doubt_rest(self, pool: Pool) -> bool:
        """Whether a unit that retires or is barred is elsewhere as well, or the counters do not add up."""
        numbers, first = self._sightings[pool.index], self._first
        for units in (pool.quarantine, *(units for _, units in pool.retiring)):
            for unit in units:
                if numbers[unit] >= first and self._seen_before(pool, unit, numbers[unit]):
                    return True
        return not pool.poisoned and sum(pool.by_kind) + len(pool.free) != pool.size

    def _seen_before(self, pool: Pool, unit: int, number: int) -> bool:
        """Whether the Hold or the place in the free list where a unit was seen in this round still has it."""
        place = number - self._first - len(self._grants)
        if place < 0:
            return self._elsewhere(unit, number, None)
        return place < len(pool.free) and pool.free[place] == unit

    def _elsewhere(self, unit: int, number: int, here: Grant | None) -> bool:
        """Whether the Hold in which a unit was seen in this round still has it."""
        other = self._grants[number - self._first]
        if self._ledger.live.get(other.serial) is not other:
            return False
        return other.units.count(unit) > (1 if other is here else 0)


def _out_of_range(pool: Pool, units: list[int]) -> bool:
    return min(units) < 0 or max(units) >= pool.size


def claims_of(owner: Owner) -> list[Grant]:
    claims: list[Grant] = []
    owner.claim(claims)
    return claims
