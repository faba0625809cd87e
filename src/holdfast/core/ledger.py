"""The ledger: the holder of every unit of memory.

It owns the pools (pool.py), the accounts of tenants (holders.py) and the records of Holds (hold.py), and
allocates units. Ownership is recorded per Hold, never per unit; counters by kind and by holder are kept
beside it, so that a gauge never walks the units.

Prior art: reservations with a written life (TigerBeetle's free set), linear types. The price is that asking
who holds one unit walks the Holds; only reports ask that.

Every holder belongs to the account of a tenant, which counts the units of all its holders per pool and
may have a limit there. RETIRING units are on no account.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal

from holdfast.core.hold import Books, DeadHold, Grant, Hold, Leak, Site, WrongCount
from holdfast.core.holders import Account, Holder, Kind
from holdfast.core.layout import Component, MemoryLayout, Tier
from holdfast.core.pool import Gate, LedgerError, OutOfUnits, OverQuota, Pool

__all__ = [
    "Account",
    "DeadHold",
    "Gate",
    "Grant",
    "Hold",
    "Holder",
    "Kind",
    "Leak",
    "Ledger",
    "LedgerError",
    "OutOfUnits",
    "OverQuota",
    "Pool",
    "Purpose",
    "Site",
    "WrongCount",
]

Purpose = Literal[
    "",
    "first chunk",
    "chunk",
    "decode page",
    "draft reserve",
    "seal",
    "resume point",
    "tail copy",
    "fork copy",
    "cut copy",
    "spill",
    "restore",
    "sink",
    "adopt",
]
"""What units are taken for. Not an enum: it is set for every row, and looking up a member is slow."""


class Ledger(Books):
    """All pools, all accounts, all live Holds.

    The scheduler moves `step` and `settled`, and sets `purpose` before it takes units, so that an injected
    fault can be told by where it struck.
    """

    __slots__ = ("_limit", "accounts", "layout", "pools", "purpose")

    def __init__(self, layout: MemoryLayout, sizes: dict[tuple[Component, Tier], int]) -> None:
        super().__init__()
        self.layout = layout
        self.purpose: Purpose = ""
        self.pools: dict[tuple[Component, Tier], Pool] = {}
        for index, ((component, tier), size) in enumerate(sorted(sizes.items())):
            if component not in layout.components:
                raise ValueError(f"the layout has no {component.name.lower()} component")
            self.pools[component, tier] = Pool(index, component, tier, size)
        for component in layout.components:
            if (component, Tier.DEVICE) not in self.pools:
                raise ValueError(f"the {component.name.lower()} component has no device pool")
        self.accounts: dict[str, Account] = {}
        self._limit: Callable[[str, Pool], int] = lambda _, pool: pool.size

    def limit_tenants(self, limit: Callable[[str, Pool], int]) -> None:
        """Let `limit` say how many units of a pool a tenant may hold, before any account is opened."""
        assert not self.accounts, "accounts keep the limits that they were opened with"
        self._limit = limit

    def account(self, tenant: str) -> Account:
        """The account of a tenant: one each, for as long as the ledger lives."""
        account = self.accounts.get(tenant)
        if account is None:
            limits = [self._limit(tenant, pool) for pool in self.pools.values()]
            account = self.accounts[tenant] = Account(tenant, limits)
        return account

    def holder(self, kind: Kind, name: str, tenant: str = "") -> Holder:
        """A new holder; the ledger keeps no list of them."""
        return Holder(kind, name, self.account(tenant))

    def pool(self, component: Component, tier: Tier = Tier.DEVICE) -> Pool:
        """The pool of one component on one tier."""
        return self.pools[component, tier]

    def has(self, tier: Tier) -> bool:
        """Whether every component has a pool on this tier."""
        return all((component, tier) in self.pools for component in self.layout.components)

    def take(self, pool: Pool, count: int, holder: Holder) -> Hold:
        """A Hold of `count` units, or `OutOfUnits` and nothing changed."""
        if count < 0:
            raise WrongCount(f"cannot take {count} units")
        free = pool.free
        if count > pool.available(holder.account) or pool.gate is not None or self.dropped:
            self.require(pool, count, holder.account)
        at = len(free) - count
        units = free[at:]
        del free[at:]
        pool.count(holder, count)
        frame = sys._getframe(1)
        hold = self.enter(pool, units, holder, (frame.f_code, frame.f_lineno))
        self.recorder.append((self.step, "take", self.serial, pool.index, count, holder))
        return hold

    def settle(self, step: int) -> None:
        """Step `step` and all before it have run: free the units that no later step names."""
        if step < self.settled or step > self.step:
            raise LedgerError(f"step {step} cannot settle: settled {self.settled}, planned {self.step}")
        self.settled = step
        if self.dropped:
            self.reclaim_dropped()
        for pool in self.pools.values():
            if pool.retiring:
                pool.settle(step)
