"""The audit: ownership recounted from the owners, always on, able to fail, and never fatal.

Three ways to find what is wrong. A Hold or Lease that is dropped alive reports itself. The census asks
every owner what it holds and compares that with the ledger: a Hold that nobody claims or two owners
claim, a unit in two places or in none, a lock without a lessee, a counter that drifted, a sequence
whose books do not add up. The flight recorder says what happened to it last.

A finding is healed on the spot: parked units are reclaimed, doubtful ones barred from use, locks and
counters set right. It names who is touched, so that the scheduler can fail those sequences and go on.

The whole census is for idle moments and for strict mode. In between, `slice` does a bounded part of one
at a time. Units may change hands between slices, so a suspicion is checked against the present before it
counts: that a unit is in two places is believed only if both still have it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Protocol

from holdfast.core.lease import Lease, LeaseRecord
from holdfast.core.ledger import Grant, Holder, Kind, Ledger, Pool
from holdfast.core.node import Node, Tail
from holdfast.core.prefix import PrefixTree

TRAIL_LENGTH = 8
FINDINGS_KEPT = 256

# What a look costs, counted in units of memory looked at (some 50 ns each).
OWNER_COST = 48
NODE_COST = 16
HOLD_COST = 24

# How much of a census a running step pays for, and how many rows save up for a slice that is worth its call.
BUDGET_PER_ROW = 2
ROWS_PER_SLICE = 64


class Owner(Protocol):
    """Somebody who keeps Holds: a sequence, or a copy between tiers."""

    holder: Holder
    lease: Lease | None

    def claim(self, into: list[Grant]) -> None:
        """Name every Hold that is kept."""

    def faults(self) -> list[str]:
        """What does not add up in the owner's own books."""


class Finding:
    """Something that must not be, what was done about it, and who is touched."""

    __slots__ = ("detail", "healed", "holder", "kind", "owners", "pool", "step", "trail", "units")

    def __init__(self, kind: str, detail: str, pool: str, units: list[int], holder: str, step: int) -> None:
        self.kind = kind
        self.detail = detail
        self.pool = pool
        self.units = units
        self.holder = holder
        self.step = step
        self.healed = ""
        self.trail: list[str] = []
        self.owners: list[Owner] = []

    def __str__(self) -> str:
        where = f" ({self.pool} {self.units[:8]})" if self.units else ""
        return f"step {self.step}: {self.kind}: {self.holder}: {self.detail}{where}; {self.healed}"


class Audit:
    """The census over one ledger, its tree, and everybody who keeps Holds."""

    __slots__ = ("_owed", "_round", "_sightings", "findings", "last_full_step", "ledger", "owners", "tree")

    def __init__(self, ledger: Ledger, tree: PrefixTree, owners: Callable[[], Iterable[Owner]]) -> None:
        self.ledger = ledger
        self.tree = tree
        self.owners = owners
        self.findings: list[Finding] = []
        self.last_full_step = 0
        self._round: Round | None = None
        self._sightings = Sightings(ledger)
        self._owed = 0

    # --- the whole census -------------------------------------------------------------------------

    def census(self) -> list[Finding]:
        """Recount everything now; returns the new findings, healed."""
        found = self._dropped()
        owners = list(self.owners())
        claimed: list[Grant] = []
        self.tree.claim(claimed)
        leases: list[LeaseRecord] = []
        for owner in owners:
            owner.claim(claimed)
            if owner.lease is not None:
                leases.append(owner.lease.record)
            faults = owner.faults()
            if faults:
                found.append(self._books(owner, faults))
        live = self.ledger.live
        distinct = set(claimed)
        if not len(claimed) == len(distinct) == len(live) or not distinct.issuperset(live.values()):
            self._hold_findings(claimed, set(live.values()), owners, found)
        self._unit_findings(owners, found)
        self._lock_findings(leases, owners, found)
        self.last_full_step = self.ledger.step
        self._keep(found)
        return found

    def _dropped(self) -> list[Finding]:
        """What Holds and Leases that were dropped alive have reported since the last look."""
        ledger, tree = self.ledger, self.tree
        if ledger.dropped:
            ledger.reclaim_dropped()
        if tree.dropped:
            tree.reclaim_dropped()
        found: list[Finding] = []
        leaks, ledger.leaks = ledger.leaks, []
        for leak in leaks:
            detail = f"a Hold taken at {leak.taken_at} was dropped alive"
            finding = Finding(
                "dropped hold", detail, leak.pool.name, leak.units, repr(leak.holder), leak.step
            )
            finding.healed = "reclaimed"
            finding.trail = self._trail(leak.holder)
            found.append(finding)
        lock_leaks, tree.leaks = tree.leaks, []
        for lock in lock_leaks:
            detail = f"a Lease of {lock.length} tokens taken at {lock.taken_at} was dropped alive"
            finding = Finding("dropped lease", detail, "tree", [], lock.name, lock.step)
            finding.healed = "unlocked"
            found.append(finding)
        return found

    def _books(self, owner: Owner, faults: list[str]) -> Finding:
        finding = Finding("books", "; ".join(faults), "sequence", [], repr(owner.holder), self.ledger.step)
        finding.healed = "its memory is to be dropped"
        finding.owners = [owner]
        finding.trail = self._trail(owner.holder)
        return finding

    def _hold_findings(
        self, claimed: list[Grant], live: set[Grant], owners: list[Owner], found: list[Finding]
    ) -> None:
        """Holds that nobody claims, that two claim, or that are claimed but were taken back."""
        ledger = self.ledger
        seen: set[Grant] = set()
        for grant in claimed:
            if grant in seen:
                finding = self._of_grant("claimed twice", f"two owners keep Hold #{grant.serial}", grant)
                finding.owners = [owner for owner in owners if grant in _claims(owner)]
                finding.healed = "its owners are to be dropped"
                found.append(finding)
            seen.add(grant)
            if grant not in live:
                finding = self._of_grant("claimed while free", f"Hold #{grant.serial} was taken back", grant)
                finding.owners = [owner for owner in owners if grant in _claims(owner)]
                finding.healed = "its owners are to be dropped"
                found.append(finding)
        for grant in sorted(live - seen, key=lambda grant: grant.serial):
            detail = f"no owner keeps Hold #{grant.serial}, taken at {grant.taken_at}"
            finding = self._of_grant("unclaimed", detail, grant)
            finding.healed = "reclaimed"
            found.append(finding)
            ledger.reclaim(grant)

    def _of_grant(self, kind: str, detail: str, grant: Grant) -> Finding:
        finding = Finding(
            kind, detail, grant.pool.name, list(grant.units), repr(grant.holder), self.ledger.step
        )
        finding.trail = self._trail(grant.holder)
        return finding

    def _unit_findings(self, owners: list[Owner], found: list[Finding]) -> None:
        """Units in two places or in none, and counters that drifted."""
        ledger = self.ledger
        pools = list(ledger.pools.values())
        lists: list[list[list[int]]] = [[] for _ in pools]
        kinds = [[0] * len(Kind) for _ in pools]
        for grant in ledger.live.values():
            units = grant.units
            index = grant.pool.index
            lists[index].append(units)
            kinds[index][grant.holder.kind] += len(units)
        for pool in pools:
            parts = lists[pool.index]
            count = kinds[pool.index]
            count[Kind.RETIRING] = sum(len(units) for _, units in pool.retiring)
            count[Kind.QUARANTINE] = len(pool.quarantine)
            if count != pool.by_kind:
                found.append(self._drifted(pool, count))
            parts.append(pool.free)
            parts.append(pool.quarantine)
            parts.extend(units for _, units in pool.retiring)
            doubles = sum(count - 1 for unit, count in pool.poisoned.items() if 0 <= unit < pool.size)
            total = sum(map(len, parts)) - doubles
            everywhere = set().union(*parts)
            sound = total == len(everywhere) == pool.size
            if not sound or (pool.size and (min(everywhere) < 0 or max(everywhere) >= pool.size)):
                self._misplaced(pool, owners, found)

    def _drifted(self, pool: Pool, count: list[int]) -> Finding:
        kinds = [kind.name for kind in Kind if count[kind] != pool.by_kind[kind]]
        finding = Finding(
            "counter", f"{', '.join(kinds)} miscounted", pool.name, [], "ledger", self.ledger.step
        )
        finding.healed = "recounted"
        pool.by_kind[:] = count
        return finding

    def _misplaced(self, pool: Pool, owners: list[Owner], found: list[Finding]) -> None:
        """Find and heal every unit of a pool that is in two places, in none, or was never in the pool."""
        places: dict[int, list[Grant | None]] = {}
        for grant in self.ledger.live.values():
            if grant.pool is pool:
                for unit in grant.units:
                    places.setdefault(unit, []).append(grant)
        for units in (pool.free, pool.quarantine, *(units for _, units in pool.retiring)):
            for unit in units:
                places.setdefault(unit, []).append(None)
        for unit in sorted(places):
            if unit in pool.poisoned:
                continue
            grants = [grant for grant in places[unit] if grant is not None]
            if len(places[unit]) > 1 or not 0 <= unit < pool.size:
                found.append(self._doubled(pool, unit, grants, len(places[unit]) > len(grants), owners))
        for unit in range(pool.size):
            if unit not in places:
                finding = Finding(
                    "lost", "no Hold and no list has it", pool.name, [unit], "nobody", self.ledger.step
                )
                finding.healed = "reclaimed"
                found.append(finding)
                self.ledger.let_go(pool, [unit], self.ledger.step)

    def _doubled(
        self, pool: Pool, unit: int, grants: list[Grant], free: bool, owners: list[Owner]
    ) -> Finding:
        """Bar a unit that several name, or that the pool never had, from being used again."""
        foreign = not 0 <= unit < pool.size
        kind = "foreign unit" if foreign else "claimed while free" if free else "claimed twice"
        holders = ", ".join(sorted({repr(grant.holder) for grant in grants})) or "the free list"
        finding = Finding(kind, f"unit {unit} is in {holders}", pool.name, [unit], holders, self.ledger.step)
        finding.healed = "removed" if foreign else "quarantined"
        finding.owners = [owner for owner in owners if any(grant in grants for grant in _claims(owner))]
        for grant in grants:
            finding.trail += self._trail(grant.holder)
        for units in (pool.free, *(units for _, units in pool.retiring)):
            while unit in units:
                units.remove(unit)
        pool.by_kind[Kind.RETIRING] = sum(len(units) for _, units in pool.retiring)
        if foreign:
            pool.poisoned[unit] = 1 << 30
        else:
            self.ledger.poison(pool, unit, len(grants))
        return finding

    def _lock_findings(self, claimed: list[LeaseRecord], owners: list[Owner], found: list[Finding]) -> None:
        """Leases that nobody keeps, locks that no lease accounts for, and leases of what is gone."""
        tree = self.tree
        kept = set(claimed)
        for record in [record for record in tree.leases.values() if record not in kept]:
            detail = f"no owner keeps the lease of {record.length} tokens, taken at {record.taken_at}"
            finding = Finding("lock without a lessee", detail, "tree", [], record.name, self.ledger.step)
            finding.healed = "unlocked"
            found.append(finding)
            tree.release(record, self.ledger.step)
        locks = Locks(tree.leases.values())
        live = set(tree.leases.values())
        there: set[Node | Tail] = set()
        for node in tree.nodes():
            there.add(node)
            if node.tails:
                there.update(node.tails.values())
            if not locks.agree(node) or not node.window_leases <= live:
                found.append(self._lock_drift(node, locks))
                node.window_leases &= live
        if not there.issuperset(locks.paths) or not there.issuperset(locks.tails):
            found += [
                self._leased_but_gone(record, owners)
                for record in tree.leases.values()
                if record.node not in there or (record.tail is not None and record.tail not in there)
            ]

    def _lock_drift(self, node: Node, locks: Locks) -> Finding:
        """Set a node's locks to what its leases account for."""
        paths, states = locks.paths.get(node, 0), locks.states.get(node, 0)
        detail = f"{node.leases} and {node.state_leases} locks at {node.end} for {paths} and {states} leases"
        lessees = sorted(record.name for record in self.tree.leases.values() if record.node is node)
        holder = ", ".join(lessees) or repr(node.holder)
        finding = Finding("lock without a lessee", detail, "tree", [], holder, self.ledger.step)
        finding.healed = "recounted"
        node.leases, node.state_leases = paths, states
        for tail in node.tails.values():
            tail.leases = locks.tails.get(tail, 0)
        return finding

    def _leased_but_gone(self, record: LeaseRecord, owners: list[Owner]) -> Finding:
        """A lease of a node or tail that is not in the tree any more: what it reads may be anybody's."""
        detail = f"the lease of {record.length} tokens, taken at {record.taken_at}, is of what was evicted"
        finding = Finding("claimed while free", detail, "tree", [], record.name, self.ledger.step)
        finding.healed = "its owners are to be dropped"
        finding.owners = [
            owner for owner in owners if owner.lease is not None and owner.lease.record is record
        ]
        return finding

    # --- a part at a time -------------------------------------------------------------------------

    def tick(self, rows: int) -> list[Finding]:
        """A step of `rows` rows was planned: do as much of a census as they pay for, once it is worth it."""
        self._owed = owed = self._owed + rows
        if owed < ROWS_PER_SLICE:
            return []
        self._owed = 0
        return self.slice(owed * BUDGET_PER_ROW)

    def slice(self, budget: int) -> list[Finding]:
        """Do a part of a census: about `budget` Holds or units. Returns the new findings, healed."""
        found = self._dropped()
        if self._round is None:
            self._round = Round(self.ledger, list(self.owners()), self.tree, self._sightings)
        suspicious = self._round.work(budget)
        if self._round.done or suspicious:
            self._round = None
        self._keep(found)
        if suspicious:
            found += self.census()
        return found

    @property
    def between_rounds(self) -> bool:
        """Whether the last slice ended a census: the next one begins another."""
        return self._round is None

    def _trail(self, holder: Holder) -> list[str]:
        """The last transitions of a holder's Holds, oldest first."""
        pools = list(self.ledger.pools.values())
        lines = [
            f"step {step}: {what} #{serial}, {count} of {pools[index].name}, {who!r}"
            for step, what, serial, index, count, who in self.ledger.recorder
            if who is holder
        ]
        return lines[-TRAIL_LENGTH:]

    def _keep(self, found: list[Finding]) -> None:
        self.findings += found
        del self.findings[:-FINDINGS_KEPT]


class Locks:
    """How often each node, state and tail is locked by the leases that there are; window pages aside."""

    __slots__ = ("paths", "states", "tails")

    def __init__(self, records: Iterable[LeaseRecord]) -> None:
        self.paths: dict[Node, int] = {}
        self.states: dict[Node, int] = {}
        self.tails: dict[Tail, int] = {}
        for record in records:
            node, state_node, tail = record.node, record.state_node, record.tail
            self.paths[node] = self.paths.get(node, 0) + 1
            if state_node is not None:
                self.states[state_node] = self.states.get(state_node, 0) + 1
            if tail is not None:
                self.tails[tail] = self.tails.get(tail, 0) + 1

    def agree(self, node: Node) -> bool:
        """Whether a node and its tails count the same locks."""
        if node.leases != self.paths.get(node, 0) or node.state_leases != self.states.get(node, 0):
            return False
        return all(tail.leases == self.tails.get(tail, 0) for tail in node.tails.values())


class Sightings:
    """In which Hold each unit was last seen: a number a unit, counted on from round to round.

    Numbers below a round's first one are of earlier rounds. So nothing is cleared between rounds, and no
    slice pays for growing or freeing a table as large as the memory.
    """

    __slots__ = ("first", "numbers")

    def __init__(self, ledger: Ledger) -> None:
        self.first = 1
        self.numbers = [array("Q", bytes(8 * pool.size)) for pool in ledger.pools.values()]


class Round:
    """One sliced census: nodes, owners, leases, Holds, free lists, in turn. Only ever raises suspicions.

    It works on snapshots of lists, never of units. A Hold that is moved gets a fresh serial, so what
    changed hands since the round began is told apart from what nobody claims. Nodes are found as the walk
    goes: what joins the tree meanwhile comes with fresh serials, and a split keeps the lower part in place.
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
        self._leases = set(tree.leases.values())
        self._locks = Locks(self._leases)
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
        sightings.first += len(self._grants)

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
            if self._doubt_locks(node):
                return True
            budget -= self._hear_node(node)
        while budget > 0 and self._owners:
            if self._doubt_owner(self._owners.pop()):
                return True
            budget -= OWNER_COST
        if budget > 0 and self._leases:
            if any(self._tree.leases.get(record.serial) is record for record in self._leases):
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
                if not pool.poisoned and sum(pool.by_kind) + len(pool.free) != pool.size:
                    return True
        return False

    def _doubt_owner(self, owner: Owner) -> bool:
        """Whether an owner's books are wrong, or it keeps a Hold that another owner keeps as well."""
        if owner.faults():
            return True
        claims = _claims(owner)
        if not self._claimed.isdisjoint(claims):
            return True
        self._claimed.update(claims)
        if owner.lease is not None:
            self._leases.discard(owner.lease.record)
        return False

    def _doubt_locks(self, node: Node) -> bool:
        """Whether a node's locks are not what the leases of now account for."""
        if self._locks.agree(node):
            return False
        # Leases have come and gone since they were counted: count those that are there now.
        self._locks = Locks(self._tree.leases.values())
        return not self._locks.agree(node)

    def _hear_node(self, node: Node) -> int:
        """Note what a node of the tree keeps, and what hangs below it; returns what the look cost."""
        claimed = self._claimed
        for hold in (node.full, node.window, node.state):
            if hold is not None:
                claimed.add(hold.grant)
        if node.tails:
            claimed.update(hold.grant for tail in node.tails.values() for hold in tail.holds())
        self._nodes += node.children.values()
        return NODE_COST * (1 + len(node.tails)) + len(node.children)

    def _doubt_grant(self, grant: Grant, part: list[int]) -> bool:
        """Whether nobody claims a Hold, or one of its units is no unit, or in another Hold as well."""
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
        """Whether a free unit is out of range, or in a Hold as well."""
        if part and _out_of_range(pool, part):
            return True
        numbers, first = self._sightings[pool.index], self._first
        return any(self._elsewhere(unit, numbers[unit], None) for unit in part if numbers[unit] >= first)

    def _elsewhere(self, unit: int, number: int, here: Grant | None) -> bool:
        """Whether the Hold in which a unit was seen in this round still has it."""
        other = self._grants[number - self._first]
        if self._ledger.live.get(other.serial) is not other:
            return False
        return other.units.count(unit) > (1 if other is here else 0)


def _out_of_range(pool: Pool, units: list[int]) -> bool:
    return min(units) < 0 or max(units) >= pool.size


def _claims(owner: Owner) -> list[Grant]:
    claims: list[Grant] = []
    owner.claim(claims)
    return claims
