"""Pools: the units of one component on one tier, which of them are free, and how many each kind holds.

A unit that is not in a Hold is free, retiring (a plan in flight still names it) or in quarantine (the audit
found it in two places). Changed by Holds and the ledger, and by the audit when it heals.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.holders import Account, Holder, Kind
from holdfast.core.layout import Component, Tier


class LedgerError(Exception):
    """Something was asked of the ledger that would break ownership."""


class OutOfUnits(LedgerError):
    """A pool has fewer free units than were asked for. Nothing was taken."""

    def __init__(self, pool: Pool, asked: int, free: int) -> None:
        super().__init__(f"{pool.name}: {asked} units asked for, {free} free")
        self.pool = pool
        self.asked = asked
        self.free = free

    def give_back(self, room: int) -> None:
        """Ask also for what the attempt had taken before and has given back since: now there is `room`."""
        self.asked += max(0, room - self.free)
        self.free = room


class OverQuota(OutOfUnits):
    """A tenant is at its quota of a pool, or the allocation would exceed it. Nothing was allocated."""

    def __init__(self, pool: Pool, asked: int, account: Account) -> None:
        super().__init__(pool, asked, pool.room(account))
        self.account = account


class Pool:
    """All units of one component on one tier.

    `retiring` units are listed with the step after which they are free. `poisoned` ones go to quarantine when
    the last Hold that names them gives them up; the number says how many Holds do.
    """

    __slots__ = (
        "by_kind",
        "component",
        "free",
        "gate",
        "index",
        "poisoned",
        "quarantine",
        "retiring",
        "size",
        "tier",
    )

    def __init__(self, index: int, component: Component, tier: Tier, size: int) -> None:
        if size < 0:
            raise ValueError(f"a pool cannot have {size} units")
        self.index = index
        self.component = component
        self.tier = tier
        self.size = size
        self.free = list(range(size - 1, -1, -1))
        self.by_kind = [0] * len(Kind)
        self.retiring: list[tuple[int, list[int]]] = []
        self.quarantine: list[int] = []
        self.poisoned: dict[int, int] = {}
        self.gate: Gate | None = None

    def guard(self, gate: Gate | None) -> None:
        """Ask `gate` before units are taken: while it answers False the pool is empty. None: no gate."""
        self.gate = gate

    @property
    def name(self) -> str:
        """Component and tier, as reports print it."""
        return f"{self.component.name.lower()} on {self.tier.name.lower()}"

    def counts(self) -> dict[str, int]:
        """Units by holder kind; they add up to the size of the pool."""
        counted = {kind.name: self.by_kind[kind] for kind in Kind}
        counted[Kind.FREE.name] = len(self.free)
        return counted

    def room(self, account: Account) -> int:
        """How many more units the holders of an account may hold, whether or not they are free."""
        return account.limits[self.index] - account.held[self.index]

    def available(self, account: Account) -> int:
        """How many units the holders of an account could take now."""
        return min(len(self.free), self.room(account))

    def require(self, count: int, account: Account) -> None:
        """Raise unless the holders of an account may take `count` units, without taking them."""
        if count > self.room(account) and account.limits[self.index] < self.size:
            raise OverQuota(self, count, account)
        gate = self.gate
        if count > len(self.free) or (count and gate is not None and not gate(self, count)):
            raise OutOfUnits(self, count, len(self.free))

    # --- for Holds, the ledger and the audit -------------------------------------------------------

    def count(self, holder: Holder, count: int) -> None:
        """Add `count` units to the counters of a holder; a negative number takes them out."""
        self.by_kind[holder.kind] += count
        holder.held[self.index] += count
        holder.account.held[self.index] += count

    def retire(self, units: list[int], step: int) -> None:
        """Keep units until `step` has settled."""
        self.retiring.append((step, units))
        self.by_kind[Kind.RETIRING] += len(units)

    def settle(self, step: int) -> None:
        """Free what only steps up to `step` named."""
        still: list[tuple[int, list[int]]] = []
        for fence, units in self.retiring:
            if fence > step:
                still.append((fence, units))
            else:
                self.by_kind[Kind.RETIRING] -= len(units)
                self.free += units
        self.retiring = still

    def poison(self, unit: int, references: int) -> None:
        """Bar a unit from being handed out again; `references` is how many Holds name it now."""
        if references:
            self.poisoned[unit] = references
        else:
            self.quarantine.append(unit)
            self.by_kind[Kind.QUARANTINE] += 1

    def without_poisoned(self, units: list[int]) -> list[int]:
        """Divert units that the audit poisoned: the last reference goes to quarantine, others vanish."""
        clean: list[int] = []
        for unit in units:
            references = self.poisoned.get(unit)
            if references is None:
                clean.append(unit)
            elif references > 1:
                self.poisoned[unit] = references - 1
            else:
                del self.poisoned[unit]
                self.quarantine.append(unit)
                self.by_kind[Kind.QUARANTINE] += 1
        return clean


Gate = Callable[[Pool, int], bool]
