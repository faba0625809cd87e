"""Holds: linear values that own units, and the books that they are entered in.

    take ──> live ──grow / shrink / split / join──> live
               │
               ├── move_to(holder) ──> a fresh live Hold; this one is dead
               ├── release() ────────> dead; the units are free, or RETIRING while a plan names them
               └── dropped ──────────> reported as a leak; the units are reclaimed

A dead Hold raises on every use. Ownership is recorded per Hold (a list of units and one holder), never per
unit: moving a session's whole memory costs the same at 1k and at 100k tokens.

Fences. A plan in flight may still read or write units that the core gives up. A release names the last step
that reads or writes them (`fence`); while that step has not settled they are RETIRING, not free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import CodeType
from typing import Literal, NoReturn

from holdfast.core.holders import Account, Holder
from holdfast.core.pool import LedgerError, Pool

RECORDER_LENGTH = 512

Transition = Literal["take", "grow", "shrink", "pass", "split", "join", "move", "release", "reclaim"]
"""What may happen to a Hold. Not an enum: looking up a member would cost as much as the rest of a `grow`."""

Site = tuple[CodeType, int]


class DeadHold(LedgerError):
    """A Hold was used after it was moved, joined or released."""


class WrongCount(LedgerError, ValueError):
    """More units were asked of a Hold than it has, or fewer than none. Nothing was changed."""


class Grant:
    """The record of a Hold in the books; it outlives a Hold that was dropped."""

    __slots__ = ("books", "fence", "holder", "pool", "serial", "site", "units")

    def __init__(
        self, books: Books, pool: Pool, units: list[int], holder: Holder, serial: int, site: Site
    ) -> None:
        self.books = books
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
            books = grant.books
            books.dropped.append(grant)
            books.drops += 1

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
        books = grant.books
        holder = grant.holder
        account = holder.account
        index = pool.index
        room = account.limits[index] - account.held[index]
        if count > len(free) or count > room or pool.gate is not None or books.dropped:
            books.require(pool, count, account)
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
        books.recorder.append((books.step, "grow", grant.serial, index, count, holder))

    def ungrow(self, count: int) -> None:
        """Take a `grow` back at once: no plan names those units yet, so the fence does not apply."""
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
        books = grant.books
        grant.pool.count(grant.holder, -count)
        books.let_go(grant.pool, units, max(fence, grant.fence))
        books.recorder.append((books.step, "shrink", grant.serial, grant.pool.index, count, grant.holder))

    def pass_front(self, count: int, other: Hold) -> None:
        """Hand the first `count` units to the end of another Hold of the same pool, of any holder."""
        grant, target = self.grant, other.grant
        pool = grant.pool
        assert target.pool is pool and target is not grant and 0 <= count <= len(grant.units), (
            "not that many units"
        )
        target.units += grant.units[:count]
        del grant.units[:count]
        target.fence = max(target.fence, grant.fence)
        books = grant.books
        taker = target.holder
        pool.count(grant.holder, -count)
        pool.count(taker, count)
        books.recorder.append((books.step, "pass", target.serial, pool.index, count, taker))

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
        books = grant.books
        hold = books.enter(grant.pool, units, grant.holder, grant.site)
        hold.grant.fence = grant.fence
        books.recorder.append(
            (books.step, "split", hold.grant.serial, grant.pool.index, len(units), grant.holder)
        )
        return hold

    def join(self, other: Hold) -> None:
        """Append another Hold of the same pool and holder; it is dead afterwards."""
        grant, joined = self.grant, other.grant
        if self is other or grant.pool is not joined.pool or grant.holder is not joined.holder:
            raise LedgerError(f"cannot join {other!r} to {self!r}: another pool or holder")
        grant.units += joined.units
        grant.fence = max(grant.fence, joined.fence)
        books = grant.books
        books.leave(other)
        books.recorder.append(
            (books.step, "join", grant.serial, grant.pool.index, len(joined.units), grant.holder)
        )

    def move_to(self, holder: Holder) -> Hold:
        """Hand everything to another holder: a fresh Hold, this one dead. Constant time."""
        grant = self.grant
        pool = grant.pool
        books = grant.books
        live = books.live
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
        books.serial = grant.serial = books.serial + 1
        live[grant.serial] = grant
        self.grant = _DEAD  # type: ignore[assignment]
        books.recorder.append((books.step, "move", grant.serial, index, count, holder))
        return Hold(grant)

    def release(self, fence: int = 0) -> None:
        """Give everything up. Units that step `fence` or a later one names are RETIRING until it settles."""
        grant = self.grant
        pool = grant.pool
        books = grant.books
        books.leave(self)
        count = len(grant.units)
        if count:
            pool.count(grant.holder, -count)
            books.let_go(pool, grant.units, max(fence, grant.fence))
        books.recorder.append((books.step, "release", grant.serial, pool.index, count, grant.holder))

    def fence(self, step: int) -> None:
        """Note that the plan of `step` names these units: they stay until it has settled."""
        self.grant.fence = max(self.grant.fence, step)


class Leak:
    """A live Hold that was dropped, as the ledger saw it."""

    __slots__ = ("holder", "pool", "step", "taken_at", "units")

    def __init__(self, grant: Grant, step: int) -> None:
        self.holder = grant.holder
        self.pool = grant.pool
        self.step = step
        self.taken_at = grant.taken_at
        self.units = list(grant.units)


class Books:
    """Every live Hold, and what happened to Holds last.

    `step` is the newest plan made and `settled` the newest one settled. `drops` counts Holds and Leases that
    were ever dropped alive.
    """

    __slots__ = ("dropped", "drops", "leaks", "live", "recorder", "serial", "settled", "step")

    def __init__(self) -> None:
        self.serial = 0
        self.step = 0
        self.settled = 0
        self.live: dict[int, Grant] = {}
        self.dropped: list[Grant] = []
        self.drops = 0
        self.leaks: list[Leak] = []
        self.recorder: deque[tuple[int, Transition, int, int, int, Holder]] = deque(maxlen=RECORDER_LENGTH)

    def enter(self, pool: Pool, units: list[int], holder: Holder, site: Site) -> Hold:
        """Record a new live Hold."""
        self.serial += 1
        grant = Grant(self, pool, units, holder, self.serial, site)
        self.live[self.serial] = grant
        return Hold(grant)

    def leave(self, hold: Hold) -> None:
        """Strike a Hold off: it is dead from here on."""
        grant = hold.grant
        hold.grant = _DEAD  # type: ignore[assignment]
        if self.live.pop(grant.serial, None) is None:
            raise DeadHold(f"Hold #{grant.serial} of {grant.holder!r} was reclaimed by the audit")

    def require(self, pool: Pool, count: int, account: Account) -> None:
        """Raise unless an account may take `count` units; dropped Holds give theirs back first."""
        if self.dropped:
            self.reclaim_dropped()
        pool.require(count, account)

    def let_go(self, pool: Pool, units: list[int], fence: int) -> None:
        """Free units that no Hold names any more, or retire them behind a step in flight."""
        if pool.poisoned:
            units = pool.without_poisoned(units)
        if fence > self.settled:
            pool.retire(units, fence)
        else:
            pool.free += units

    def reclaim_dropped(self) -> None:
        """Report Holds that were dropped alive and take their units back, behind the newest step."""
        dropped, self.dropped = self.dropped, []
        for grant in dropped:
            if grant.serial in self.live:
                self.leaks.append(Leak(grant, self.step))
                self.reclaim(grant)

    def reclaim(self, grant: Grant) -> None:
        """Take back the units of a Hold without an owner."""
        del self.live[grant.serial]
        count = len(grant.units)
        grant.pool.count(grant.holder, -count)
        self.let_go(grant.pool, grant.units, self.step)
        self.recorder.append((self.step, "reclaim", grant.serial, grant.pool.index, count, grant.holder))
        grant.units = []

    def grants_of(self, holder: Holder) -> Iterator[Grant]:
        """The live grants of one holder. Walks all Holds: for reports only."""
        return (grant for grant in self.live.values() if grant.holder is holder)
