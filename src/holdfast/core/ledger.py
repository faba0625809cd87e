"""The ledger: who holds which unit of memory.

This file owns the pools and their free lists, and it is the only code that changes ownership. A unit
is handed out through a `Hold`, a linear value with exactly one holder:

    take ──> live ──grow / shrink / split / join──> live
               │
               ├── move_to(holder) ──> a fresh live Hold; this one is dead
               ├── release() ────────> dead; the units are free, or RETIRING while a plan names them
               └── dropped ──────────> reported as a leak; the units are reclaimed

A dead Hold raises on every use. Ownership is recorded per Hold (a list of units and one holder),
never per unit: moving a session's whole memory costs the same at 1k and at 100k tokens. Counters by
kind and by holder are kept beside it, so that a gauge never walks anything.

Prior art: reservations with a written life (TigerBeetle's free set), linear types. The price is that
asking who holds one unit walks the Holds; only reports ask that.

Accounts. Every holder belongs to the account of a tenant, which counts what all of them hold together in
each pool and may be limited there. Units that retire are on nobody's account.

Fences. A plan in flight may still read or write units that the core gives up. Whoever releases says
which step named them last (`fence`); while that step has not settled they are RETIRING, not free.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from types import CodeType
from typing import NoReturn

from holdfast.core.layout import Component, MemoryLayout, Tier

RECORDER_LENGTH = 512


class Kind(IntEnum):
    """What sort of holder has a unit."""

    FREE = 0
    TREE = 1
    TURN = 2
    SESSION = 3
    CHECKPOINT = 4
    RETIRING = 5
    TRANSIT = 6
    QUARANTINE = 7


class LedgerError(Exception):
    """Something was asked of the ledger that would break ownership."""


class DeadHold(LedgerError):
    """A Hold was used after it was moved, joined or released."""


class WrongCount(LedgerError, ValueError):
    """More units were asked of a Hold than it has, or fewer than none. Nothing was changed."""


class OutOfUnits(LedgerError):
    """A pool has fewer free units than were asked for. Nothing was taken."""

    def __init__(self, pool: Pool, asked: int, free: int) -> None:
        super().__init__(f"{pool.name}: {asked} units asked for, {free} free")
        self.pool = pool
        self.asked = asked
        self.free = free


class OverQuota(OutOfUnits):
    """A tenant holds as much of a pool as it may, or would with what was asked for. Nothing was taken."""

    def __init__(self, pool: Pool, asked: int, account: Account) -> None:
        super().__init__(pool, asked, account.room(pool))
        self.account = account


class Account:
    """What one tenant holds in each pool, and how much that may be."""

    __slots__ = ("held", "limits", "name")

    def __init__(self, name: str, limits: list[int]) -> None:
        self.name = name
        self.limits = limits
        self.held = [0] * len(limits)

    def room(self, pool: Pool) -> int:
        """How many more units of a pool may be held, whether or not they are free."""
        return self.limits[pool.index] - self.held[pool.index]


class Holder:
    """Somebody who can hold units, with a count of what it holds in each pool."""

    __slots__ = ("account", "held", "kind", "name")

    def __init__(self, kind: Kind, name: str, account: Account) -> None:
        self.kind = kind
        self.name = name
        self.account = account
        self.held = [0] * len(account.held)

    def __repr__(self) -> str:
        return f"{self.kind.name} {self.name}"


class Pool:
    """All units of one component on one tier."""

    __slots__ = (
        "by_kind",
        "component",
        "free",
        "gate",
        "index",
        "ledger",
        "poisoned",
        "quarantine",
        "retiring",
        "size",
        "tier",
    )

    def __init__(self, ledger: Ledger, index: int, component: Component, tier: Tier, size: int) -> None:
        if size < 0:
            raise ValueError(f"a pool cannot have {size} units")
        self.ledger = ledger
        self.index = index
        self.component = component
        self.tier = tier
        self.size = size
        self.free = list(range(size - 1, -1, -1))
        self.by_kind = [0] * len(Kind)
        self.retiring: list[tuple[int, list[int]]] = []
        self.quarantine: list[int] = []
        self.poisoned: dict[int, int] = {}
        self.gate: Callable[[Pool, int], bool] | None = None

    @property
    def name(self) -> str:
        """Component and tier, as reports print it."""
        return f"{self.component.name.lower()} on {self.tier.name.lower()}"

    def counts(self) -> dict[str, int]:
        """Units by holder kind; they add up to the size of the pool."""
        counted = {kind.name: self.by_kind[kind] for kind in Kind}
        counted[Kind.FREE.name] = len(self.free)
        return counted

    def available(self, account: Account) -> int:
        """How many units the holders of an account could take now."""
        return min(len(self.free), account.room(self))

    def require(self, count: int, account: Account) -> None:
        """Raise unless the holders of an account may take `count` units, without taking them."""
        if self.ledger.dropped:
            self.ledger.reclaim_dropped()
        if count > account.room(self) and account.limits[self.index] < self.size:
            raise OverQuota(self, count, account)
        gate = self.gate
        if count > len(self.free) or (count and gate is not None and not gate(self, count)):
            raise OutOfUnits(self, count, len(self.free))


class Grant:
    """The ledger's record of a Hold: what outlives a Hold that somebody dropped."""

    __slots__ = ("fence", "holder", "pool", "serial", "site", "units")

    def __init__(self, pool: Pool, units: list[int], holder: Holder, serial: int, site: Site) -> None:
        self.pool = pool
        self.units = units
        self.holder = holder
        self.serial = serial
        self.site = site
        self.fence = 0

    @property
    def taken_at(self) -> str:
        """File and line where the units were first taken."""
        code, line = self.site
        return f"{code.co_filename.rpartition('/')[2]}:{line} ({code.co_name})"


Site = tuple[CodeType, int]


class _Dead:
    """Stands where a dead Hold's grant was: every look at it raises."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        raise DeadHold(f"{name!r} was asked of a Hold that is dead: it was moved, joined or released")


_DEAD = _Dead()


class Hold:
    """Units with exactly one holder. See the head of this file for its life."""

    __slots__ = ("grant",)

    grant: Grant

    def __init__(self, grant: Grant) -> None:
        self.grant = grant

    def __del__(self) -> None:
        grant = self.grant
        if grant.__class__ is Grant:
            ledger = grant.pool.ledger
            ledger.dropped.append(grant)
            ledger.drops += 1

    def __len__(self) -> int:
        return len(self.grant.units)

    def __repr__(self) -> str:
        if self.grant.__class__ is not Grant:
            return "<dead Hold>"
        grant = self.grant
        return f"<Hold #{grant.serial} of {len(grant.units)} {grant.pool.name}, {grant.holder!r}>"

    @property
    def alive(self) -> bool:
        """Whether this Hold still holds."""
        return self.grant.__class__ is Grant

    @property
    def units(self) -> list[int]:
        """The units, in order. Read only: the list belongs to the ledger."""
        return self.grant.units

    @property
    def holder(self) -> Holder:
        """Who holds them."""
        return self.grant.holder

    @property
    def pool(self) -> Pool:
        """Where they come from."""
        return self.grant.pool

    def grow(self, count: int) -> None:
        """Take `count` more units at the end, or raise `OutOfUnits` and change nothing."""
        grant = self.grant
        pool = grant.pool
        free = pool.free
        ledger = pool.ledger
        holder = grant.holder
        account = holder.account
        index = pool.index
        room = account.limits[index] - account.held[index]
        if count > len(free) or count > room or pool.gate is not None or ledger.dropped:
            pool.require(count, account)
        if count == 1:
            grant.units.append(free.pop())
        elif count > 0:
            at = len(free) - count
            grant.units += free[at:]
            del free[at:]
        elif count < 0:
            raise WrongCount(f"cannot grow by {count}")
        else:
            return
        pool.by_kind[holder.kind] += count
        holder.held[index] += count
        account.held[index] += count
        ledger.recorder.append((ledger.step, "grow", grant.serial, index, count, holder))

    def ungrow(self, count: int) -> None:
        """Take a `grow` back at once: no plan names those units yet, whatever fence the others are behind."""
        grant = self.grant
        fence, grant.fence = grant.fence, 0
        self.shrink(count)
        grant.fence = fence

    def shrink(self, count: int, fence: int = 0) -> None:
        """Give up the last `count` units."""
        self._give_up(slice(len(self.grant.units) - count, None), count, fence)

    def shrink_front(self, count: int, fence: int = 0) -> None:
        """Give up the first `count` units."""
        self._give_up(slice(0, count), count, fence)

    def _give_up(self, part: slice, count: int, fence: int) -> None:
        grant = self.grant
        if not 0 <= count <= len(grant.units):
            raise WrongCount(f"cannot give up {count} of {len(grant.units)} units")
        if not count:
            return
        units = grant.units[part]
        del grant.units[part]
        ledger = grant.pool.ledger
        ledger.uncount(grant.pool, grant.holder, count)
        ledger.let_go(grant.pool, units, max(fence, grant.fence))
        ledger.recorder.append((ledger.step, "shrink", grant.serial, grant.pool.index, count, grant.holder))

    def pass_front(self, count: int, other: Hold) -> None:
        """Hand the first `count` units to the end of another Hold of the same pool, whoever holds it."""
        grant, target = self.grant, other.grant
        pool = grant.pool
        assert target.pool is pool and target is not grant and 0 <= count <= len(grant.units), (
            "not that many units"
        )
        target.units += grant.units[:count]
        del grant.units[:count]
        target.fence = max(target.fence, grant.fence)
        ledger = pool.ledger
        taker = target.holder
        ledger.uncount(pool, grant.holder, count)
        ledger.count(pool, taker, count)
        ledger.recorder.append((ledger.step, "pass", target.serial, pool.index, count, taker))

    def split(self, at: int) -> Hold:
        """Keep the first `at` units and return a Hold of the rest, same holder."""
        return self._split(slice(at, None), at)

    def split_front(self, count: int) -> Hold:
        """Return a Hold of the first `count` units, same holder, and keep the rest."""
        return self._split(slice(0, count), count)

    def _split(self, part: slice, at: int) -> Hold:
        grant = self.grant
        if not 0 <= at <= len(grant.units):
            raise WrongCount(f"cannot split {len(grant.units)} units at {at}")
        units = grant.units[part]
        del grant.units[part]
        ledger = grant.pool.ledger
        hold = ledger.enter(grant.pool, units, grant.holder, grant.site)
        hold.grant.fence = grant.fence
        ledger.recorder.append(
            (ledger.step, "split", hold.grant.serial, grant.pool.index, len(units), grant.holder)
        )
        return hold

    def join(self, other: Hold) -> None:
        """Append another Hold of the same pool and holder; it is dead afterwards."""
        grant, joined = self.grant, other.grant
        if self is other or grant.pool is not joined.pool or grant.holder is not joined.holder:
            raise LedgerError(f"cannot join {other!r} to {self!r}: another pool or holder")
        grant.units += joined.units
        grant.fence = max(grant.fence, joined.fence)
        ledger = grant.pool.ledger
        ledger.leave(other)
        ledger.recorder.append(
            (ledger.step, "join", grant.serial, grant.pool.index, len(joined.units), grant.holder)
        )

    def move_to(self, holder: Holder) -> Hold:
        """Hand everything to another holder: a fresh Hold, this one dead. Constant time."""
        grant = self.grant
        pool = grant.pool
        ledger = pool.ledger
        live = ledger.live
        try:
            del live[grant.serial]
        except KeyError:
            raise DeadHold(f"Hold #{grant.serial} of {grant.holder!r} was reclaimed by the audit") from None
        count = len(grant.units)
        index = pool.index
        before = grant.holder
        if count:
            by_kind = pool.by_kind
            by_kind[before.kind] -= count
            by_kind[holder.kind] += count
            before.held[index] -= count
            holder.held[index] += count
            if before.account is not holder.account:
                before.account.held[index] -= count
                holder.account.held[index] += count
        grant.holder = holder
        ledger.serial = grant.serial = ledger.serial + 1
        live[grant.serial] = grant
        self.grant = _DEAD  # type: ignore[assignment]
        ledger.recorder.append((ledger.step, "move", grant.serial, index, count, holder))
        return Hold(grant)

    def release(self, fence: int = 0) -> None:
        """Give everything up. Units that step `fence` or a later one names are RETIRING until it settles."""
        grant = self.grant
        pool = grant.pool
        ledger = pool.ledger
        ledger.leave(self)
        count = len(grant.units)
        if count:
            ledger.uncount(pool, grant.holder, count)
            ledger.let_go(pool, grant.units, max(fence, grant.fence))
            grant.units = []
        ledger.recorder.append((ledger.step, "release", grant.serial, pool.index, count, grant.holder))

    def fence(self, step: int) -> None:
        """Note that the plan of `step` names these units, for whoever releases them."""
        self.grant.fence = max(self.grant.fence, step)


class Leak:
    """A live Hold that was dropped, as the ledger saw it."""

    __slots__ = ("holder", "pool", "serial", "step", "taken_at", "units")

    def __init__(self, grant: Grant, step: int) -> None:
        self.holder = grant.holder
        self.pool = grant.pool
        self.serial = grant.serial
        self.step = step
        self.taken_at = grant.taken_at
        self.units = list(grant.units)


class Ledger:
    """All live Holds and all that is free.

    `step` is the newest plan made and `settled` the newest one settled; the scheduler moves both, and says in
    `purpose` what it is about to take units for, so that a fault can be told by where it struck. `drops`
    counts what was ever dropped alive, Holds and Leases. `limit` says how much of a pool a tenant may hold.
    """

    __slots__ = (
        "accounts",
        "dropped",
        "drops",
        "layout",
        "leaks",
        "limit",
        "live",
        "pools",
        "purpose",
        "recorder",
        "serial",
        "settled",
        "step",
    )

    def __init__(self, layout: MemoryLayout, sizes: dict[tuple[Component, Tier], int]) -> None:
        self.layout = layout
        self.serial = 0
        self.step = 0
        self.settled = 0
        self.purpose = ""
        self.live: dict[int, Grant] = {}
        self.dropped: list[Grant] = []
        self.drops = 0
        self.leaks: list[Leak] = []
        self.recorder: deque[tuple[int, str, int, int, int, Holder]] = deque(maxlen=RECORDER_LENGTH)
        self.pools: dict[tuple[Component, Tier], Pool] = {}
        for index, ((component, tier), size) in enumerate(sorted(sizes.items())):
            if component not in layout.components:
                raise ValueError(f"the layout has no {component.name.lower()} component")
            self.pools[component, tier] = Pool(self, index, component, tier, size)
        for component in layout.components:
            if (component, Tier.DEVICE) not in self.pools:
                raise ValueError(f"no device pool was given for {component.name.lower()}")
        self.accounts: dict[str, Account] = {}
        self.limit: Callable[[str, Pool], int] = lambda _, pool: pool.size

    def account(self, tenant: str) -> Account:
        """The account of a tenant: one each, for as long as the ledger lives."""
        account = self.accounts.get(tenant)
        if account is None:
            limits = [self.limit(tenant, pool) for pool in self.pools.values()]
            account = self.accounts[tenant] = Account(tenant, limits)
        return account

    def holder(self, kind: Kind, name: str, tenant: str = "") -> Holder:
        """A new holder; it is known only to whoever asked for it and to the Holds that name it."""
        return Holder(kind, name, self.account(tenant))

    def pool(self, component: Component, tier: Tier = Tier.DEVICE) -> Pool:
        """The pool of one component on one tier."""
        return self.pools[component, tier]

    def has(self, tier: Tier) -> bool:
        """Whether there is such a tier at all."""
        return all((component, tier) in self.pools for component in self.layout.components)

    def take(self, pool: Pool, count: int, holder: Holder) -> Hold:
        """A Hold of `count` units, or `OutOfUnits` and nothing changed."""
        if count < 0:
            raise WrongCount(f"cannot take {count} units")
        free = pool.free
        if count > pool.available(holder.account) or pool.gate is not None or self.dropped:
            pool.require(count, holder.account)
        at = len(free) - count
        units = free[at:]
        del free[at:]
        self.count(pool, holder, count)
        frame = sys._getframe(1)
        hold = self.enter(pool, units, holder, (frame.f_code, frame.f_lineno))
        self.recorder.append((self.step, "take", self.serial, pool.index, count, holder))
        return hold

    def settle(self, step: int) -> None:
        """Step `step` and all before it have run: what only they named is free now."""
        if step < self.settled or step > self.step:
            raise LedgerError(f"step {step} cannot settle: settled {self.settled}, planned {self.step}")
        self.settled = step
        if self.dropped:
            self.reclaim_dropped()
        for pool in self.pools.values():
            if pool.retiring:
                still: list[tuple[int, list[int]]] = []
                for fence, units in pool.retiring:
                    if fence > step:
                        still.append((fence, units))
                    else:
                        pool.by_kind[Kind.RETIRING] -= len(units)
                        pool.free += units
                pool.retiring = still

    # What follows is for Hold and for the audit.

    def enter(self, pool: Pool, units: list[int], holder: Holder, site: Site) -> Hold:
        """Record a new live Hold."""
        self.serial += 1
        grant = Grant(pool, units, holder, self.serial, site)
        self.live[self.serial] = grant
        return Hold(grant)

    def leave(self, hold: Hold) -> None:
        """Strike a Hold off: it is dead from here on."""
        grant = hold.grant
        hold.grant = _DEAD  # type: ignore[assignment]
        if self.live.pop(grant.serial, None) is None:
            raise DeadHold(f"Hold #{grant.serial} of {grant.holder!r} was reclaimed by the audit")

    def count(self, pool: Pool, holder: Holder, count: int) -> None:
        """Add `count` units to the counters of a holder."""
        pool.by_kind[holder.kind] += count
        holder.held[pool.index] += count
        holder.account.held[pool.index] += count

    def uncount(self, pool: Pool, holder: Holder, count: int) -> None:
        """Take `count` units out of the counters of a holder."""
        pool.by_kind[holder.kind] -= count
        holder.held[pool.index] -= count
        holder.account.held[pool.index] -= count

    def let_go(self, pool: Pool, units: list[int], fence: int) -> None:
        """Free units that no Hold names any more, or retire them behind a step in flight."""
        if pool.poisoned:
            units = self._without_poisoned(pool, units)
        if fence > self.settled:
            pool.retiring.append((fence, units))
            pool.by_kind[Kind.RETIRING] += len(units)
        else:
            pool.free += units

    def _without_poisoned(self, pool: Pool, units: list[int]) -> list[int]:
        """Divert units that the audit poisoned: the last reference goes to quarantine, others vanish."""
        clean: list[int] = []
        for unit in units:
            references = pool.poisoned.get(unit)
            if references is None:
                clean.append(unit)
            elif references > 1:
                pool.poisoned[unit] = references - 1
            else:
                del pool.poisoned[unit]
                pool.quarantine.append(unit)
                pool.by_kind[Kind.QUARANTINE] += 1
        return clean

    def poison(self, pool: Pool, unit: int, references: int) -> None:
        """Bar a unit from being handed out again; `references` is how often Holds name it now."""
        if references:
            pool.poisoned[unit] = references
        else:
            pool.quarantine.append(unit)
            pool.by_kind[Kind.QUARANTINE] += 1

    def reclaim_dropped(self) -> None:
        """Report Holds that were dropped alive and take their units back, behind the newest step."""
        dropped, self.dropped = self.dropped, []
        for grant in dropped:
            if grant.serial in self.live:
                self.leaks.append(Leak(grant, self.step))
                self.reclaim(grant)

    def reclaim(self, grant: Grant) -> None:
        """Take back the units of a Hold that nobody answers for."""
        del self.live[grant.serial]
        count = len(grant.units)
        self.uncount(grant.pool, grant.holder, count)
        self.let_go(grant.pool, grant.units, self.step)
        self.recorder.append((self.step, "reclaim", grant.serial, grant.pool.index, count, grant.holder))
        grant.units = []

    def grants_of(self, holder: Holder) -> Iterator[Grant]:
        """The live grants of one holder. Walks all Holds: for reports only."""
        return (grant for grant in self.live.values() if grant.holder is holder)
