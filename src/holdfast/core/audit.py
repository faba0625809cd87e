"""The audit: ownership recounted from the owners, always on, able to fail, and never fatal.

Three ways to find faults. A Hold or Lease that is dropped alive reports itself. The census compares the
units of every owner with the ledger: a Hold without an owner or with two, a unit
in two places or in none, a lock without a lessee, a counter that drifted, a node that could be evicted but
is in no queue, a sequence whose lengths are inconsistent. The flight recorder has the last transitions of a
Hold.

A finding is healed at once: leaked units are reclaimed, doubtful ones quarantined, locks and counters
corrected. It names the owners at fault, so that the scheduler fails their turns and continues.

The full census is for idle moments and for strict mode. In between, `slice` does a bounded part of one
at a time (slices.py); the full census confirms or clears the suspicions of a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from holdfast.core.findings import Finding, FindingKind
from holdfast.core.lease import LeaseRecord
from holdfast.core.ledger import Account, Grant, Holder, Kind, Ledger, Pool
from holdfast.core.lock_census import LockCensus
from holdfast.core.prefix import PrefixTree
from holdfast.core.slices import Owner, Round, Sightings, claims_of

__all__ = [
    "FINDINGS_KEPT",
    "ROWS_PER_SLICE",
    "ROWS_PER_UNIT",
    "TRAIL_LENGTH",
    "Audit",
    "Finding",
    "FindingKind",
    "Owner",
]

TRAIL_LENGTH = 8
FINDINGS_KEPT = 256

# How much of a census a running step pays for, and how many rows save up for a slice that is worth its call.
ROWS_PER_UNIT = 8
ROWS_PER_SLICE = 1024


class Audit:
    """The census over one ledger, its tree, and all owners of Holds."""

    __slots__ = (
        "_due",
        "_heard",
        "_locks",
        "_round",
        "_sightings",
        "findings",
        "last_full_step",
        "ledger",
        "owners",
        "tree",
    )

    def __init__(self, ledger: Ledger, tree: PrefixTree, owners: Callable[[], Iterable[Owner]]) -> None:
        self.ledger = ledger
        self.tree = tree
        self.owners = owners
        self.findings: list[Finding] = []
        self.last_full_step = 0
        self._locks = LockCensus(ledger, tree)
        self._round: Round | None = None
        self._sightings = Sightings(ledger)
        self._due = ROWS_PER_SLICE
        self._heard = 0

    # --- the whole census -------------------------------------------------------------------------

    def census(self) -> list[Finding]:
        """Recount everything now; returns the new findings, healed."""
        found = self._dropped()
        owners = list(self.owners())
        claimed: list[Grant] = []
        self.tree.forest.claim(claimed)
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
        found += self._locks.findings(leases, owners)
        self.last_full_step = self.ledger.step
        self._keep(found)
        return found

    def _dropped(self) -> list[Finding]:
        """What Holds and Leases that were dropped alive have reported since the last look."""
        ledger, tree = self.ledger, self.tree
        self._heard = ledger.drops
        if ledger.dropped:
            ledger.reclaim_dropped()
        if tree.leases.dropped:
            tree.leases.reclaim_dropped()
        found: list[Finding] = []
        leaks, ledger.leaks = ledger.leaks, []
        for leak in leaks:
            detail, holder = f"a Hold taken at {leak.taken_at} was dropped alive", repr(leak.holder)
            kind, pool = FindingKind.DROPPED_HOLD, leak.pool.name
            finding = Finding(kind, detail, holder, "reclaimed", leak.step, pool, leak.units)
            finding.trail = self._trail(leak.holder)
            found.append(finding)
        lock_leaks, tree.leases.leaks = tree.leases.leaks, []
        for lock in lock_leaks:
            detail = f"a Lease of {lock.length} tokens taken at {lock.taken_at} was dropped alive"
            finding = Finding(FindingKind.DROPPED_LEASE, detail, lock.name, "unlocked", lock.step)
            found.append(finding)
        return found

    def _books(self, owner: Owner, faults: list[str]) -> Finding:
        detail, healed = "; ".join(faults), "its memory is to be dropped"
        holder, step = repr(owner.holder), self.ledger.step
        finding = Finding(FindingKind.BOOKS, detail, holder, healed, step, "sequence")
        finding.owners = [owner]
        finding.trail = self._trail(owner.holder)
        return finding

    def _hold_findings(
        self, claimed: list[Grant], live: set[Grant], owners: list[Owner], found: list[Finding]
    ) -> None:
        """Holds without an owner, with two owners, or with an owner although they were taken back."""
        seen: set[Grant] = set()
        for grant in claimed:
            if grant in seen:
                detail = f"two owners keep Hold #{grant.serial}"
                found.append(self._of_owned(FindingKind.CLAIMED_TWICE, detail, grant, owners))
            seen.add(grant)
            if grant not in live:
                detail = f"Hold #{grant.serial} was taken back"
                found.append(self._of_owned(FindingKind.CLAIMED_WHILE_FREE, detail, grant, owners))
        for grant in sorted(live - seen, key=lambda grant: grant.serial):
            detail = f"no owner keeps Hold #{grant.serial}, taken at {grant.taken_at}"
            found.append(self._of_grant(FindingKind.UNCLAIMED, detail, grant, "reclaimed"))
            self.ledger.reclaim(grant)

    def _of_owned(self, kind: FindingKind, detail: str, grant: Grant, owners: list[Owner]) -> Finding:
        finding = self._of_grant(kind, detail, grant, "its owners are to be dropped")
        finding.owners = [owner for owner in owners if grant in claims_of(owner)]
        return finding

    def _of_grant(self, kind: FindingKind, detail: str, grant: Grant, healed: str) -> Finding:
        units, holder = list(grant.units), repr(grant.holder)
        found = Finding(kind, detail, holder, healed, self.ledger.step, grant.pool.name, units)
        found.trail = self._trail(grant.holder)
        return found

    def _unit_findings(self, owners: list[Owner], found: list[Finding]) -> None:
        """Units in two places or in none, and counters that drifted."""
        ledger = self.ledger
        pools = list(ledger.pools.values())
        lists: list[list[list[list[int]]]] = [[[] for _ in Kind] for _ in pools]
        held = {account: [0] * len(pools) for account in ledger.accounts.values()}
        for grant in ledger.live.values():
            index, holder = grant.pool.index, grant.holder
            lists[index][holder.kind].append(grant.units)
            held[holder.account][index] += len(grant.units)
        found += [
            self._misaccounted(account, held[account]) for account in held if account.held != held[account]
        ]
        for pool in pools:
            by_kind = lists[pool.index]
            by_kind[Kind.RETIRING] = [units for _, units in pool.retiring]
            by_kind[Kind.QUARANTINE] = [pool.quarantine]
            count = [sum(map(len, parts)) for parts in by_kind]
            if count != pool.by_kind:
                found.append(self._drifted(pool, count))
            by_kind[Kind.FREE] = [pool.free]
            doubles = sum(count - 1 for unit, count in pool.poisoned.items() if 0 <= unit < pool.size)
            total = sum(count) + len(pool.free) - doubles
            everywhere = set().union(*chain.from_iterable(by_kind))
            if not total == len(everywhere) == pool.size or not _are_the_first(everywhere):
                self._misplaced(pool, owners, found)

    def _drifted(self, pool: Pool, count: list[int]) -> Finding:
        """Set right how many units of a pool each kind of holder has."""
        kinds = [kind.name for kind in Kind if count[kind] != pool.by_kind[kind]]
        detail = f"{', '.join(kinds)} miscounted"
        pool.by_kind[:] = count
        return Finding(FindingKind.COUNTER, detail, "ledger", "recounted", self.ledger.step, pool.name)

    def _misaccounted(self, account: Account, held: list[int]) -> Finding:
        """Correct the recorded units of a tenant, and so its remaining quota."""
        detail, holder = f"{account.held} units on the account, {held} held", f"tenant {account.name}"
        account.held[:] = held
        return Finding(FindingKind.COUNTER, detail, holder, "recounted", self.ledger.step, "ledger")

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
                step, detail = self.ledger.step, "no Hold and no list has it"
                found.append(
                    Finding(FindingKind.LOST, detail, "nobody", "reclaimed", step, pool.name, [unit])
                )
                self.ledger.let_go(pool, [unit], step)

    def _doubled(
        self, pool: Pool, unit: int, grants: list[Grant], free: bool, owners: list[Owner]
    ) -> Finding:
        """Quarantine a unit that is in several places, or remove one that the pool never had."""
        foreign = not 0 <= unit < pool.size
        kind = FindingKind.CLAIMED_WHILE_FREE if free else FindingKind.CLAIMED_TWICE
        if foreign:
            kind = FindingKind.FOREIGN_UNIT
        holders = ", ".join(sorted({repr(grant.holder) for grant in grants})) or "the free list"
        detail, healed = f"unit {unit} is in {holders}", "removed" if foreign else "quarantined"
        finding = Finding(kind, detail, holders, healed, self.ledger.step, pool.name, [unit])
        finding.owners = [owner for owner in owners if any(grant in grants for grant in claims_of(owner))]
        for grant in grants:
            finding.trail += self._trail(grant.holder)
        for units in (pool.free, *(units for _, units in pool.retiring)):
            while unit in units:
                units.remove(unit)
        pool.by_kind[Kind.RETIRING] = sum(len(units) for _, units in pool.retiring)
        if foreign:
            pool.poisoned[unit] = 1 << 30
        else:
            pool.poison(unit, len(grants))
        return finding

    # --- a part at a time -------------------------------------------------------------------------

    def tick(self, rows: int) -> list[Finding]:
        """A step of `rows` rows was planned: do as much of a census as they pay for, once it is worth it."""
        due = self._due = self._due - rows
        if due > 0:
            if self.ledger.drops == self._heard:
                return []
            found = self._dropped()
            self._keep(found)
            return found
        paid, self._due = ROWS_PER_SLICE - self._due, ROWS_PER_SLICE
        return self.slice(paid // ROWS_PER_UNIT)

    def slice(self, budget: int) -> list[Finding]:
        """Do a part of a census: about `budget` Holds or units. Returns the new findings, healed."""
        found = self._dropped()
        if self._round is None:
            self._round = Round(self.ledger, list(self.owners()), self.tree, self._sightings)
            budget -= self._round.opening_cost
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


def _are_the_first(units: set[int]) -> bool:
    """Whether these are the numbers from 0 on: no other set as large, with none larger, has their sum."""
    count = len(units)
    return sum(units) == count * (count - 1) // 2 and max(units, default=0) < max(count, 1)
