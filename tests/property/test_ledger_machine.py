"""The ledger under random use, against a map from every unit to its owner.

The model keeps for each unit who has it: a Hold, the free list, or a step that it waits for. After every
rule each Hold names exactly its units, the counters add up, and a dead Hold raises on any use.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from holdfast.core.layout import Component, Tier, named_layout
from holdfast.core.ledger import DeadHold, Hold, Kind, Ledger, LedgerError, OutOfUnits, Pool

KINDS = (Kind.TREE, Kind.TURN, Kind.SESSION, Kind.CHECKPOINT, Kind.TRANSIT)
FREE = "free"


class Modelled:
    """A Hold and what the model thinks it holds. A dead one has no units and no Hold of its own."""

    def __init__(self, hold: Hold, units: list[int], holder, fence: int = 0) -> None:
        self.hold = hold
        self.pool = hold.pool
        self.units = units
        self.holder = holder
        self.fence = fence


class LedgerMachine(RuleBasedStateMachine):
    """Two pools, four holders, Holds that are taken, changed, moved and given up."""

    holds = Bundle("holds")
    dead = Bundle("dead")

    @initialize(pages=st.integers(0, 40), slots=st.integers(0, 9))
    def build(self, pages: int, slots: int) -> None:
        layout = named_layout("hybrid", 16)
        sizes = {(Component.FULL, Tier.DEVICE): pages, (Component.STATE, Tier.DEVICE): slots}
        self.ledger = Ledger(layout, sizes)
        self.pools = list(self.ledger.pools.values())
        self.holders = [self.ledger.holder(kind, kind.name) for kind in KINDS]
        self.owner: dict[Pool, dict[int, object]] = {
            pool: dict.fromkeys(range(pool.size), FREE) for pool in self.pools
        }
        self.alive: list[Modelled] = []
        self.dropped = 0

    def free(self, pool: Pool) -> int:
        return sum(owner == FREE for owner in self.owner[pool].values())

    def give_up(self, pool: Pool, units: list[int], fence: int) -> None:
        where = fence if fence > self.ledger.settled else FREE
        for unit in units:
            self.owner[pool][unit] = where

    def note_taken(self, entry: Modelled, units: list[int]) -> None:
        for unit in units:
            assert self.owner[entry.pool][unit] == FREE, "a unit was handed out that is not free"
            self.owner[entry.pool][unit] = entry

    @rule(target=holds, at=st.integers(0, 1), count=st.integers(0, 12), who=st.integers(0, 4))
    def take(self, at: int, count: int, who: int):
        pool, holder = self.pools[at], self.holders[who]
        free = self.free(pool)
        if count > free:
            with pytest.raises(OutOfUnits) as caught:
                self.ledger.take(pool, count, holder)
            assert (caught.value.asked, caught.value.free) == (count, free)
            return multiple()
        hold = self.ledger.take(pool, count, holder)
        entry = Modelled(hold, list(hold.units), holder)
        assert len(set(entry.units)) == count
        self.note_taken(entry, entry.units)
        self.alive.append(entry)
        return entry

    @rule(entry=holds, count=st.integers(0, 9))
    def grow(self, entry: Modelled, count: int) -> None:
        if count > self.free(entry.pool):
            with pytest.raises(OutOfUnits):
                entry.hold.grow(count)
            return
        entry.hold.grow(count)
        fresh = entry.hold.units[len(entry.units) :]
        assert len(fresh) == count
        self.note_taken(entry, fresh)
        entry.units = entry.units + fresh

    @rule(entry=holds, count=st.integers(0, 9), front=st.booleans(), ahead=st.integers(0, 2))
    def shrink(self, entry: Modelled, count: int, front: bool, ahead: int) -> None:
        act = entry.hold.shrink_front if front else entry.hold.shrink
        fence = min(self.ledger.step, self.ledger.settled + ahead)
        if count > len(entry.units):
            with pytest.raises(ValueError, match="cannot give up"):
                act(count, fence)
            return
        act(count, fence)
        keep = len(entry.units) - count
        gone = entry.units[:count] if front else entry.units[keep:]
        entry.units = entry.units[count:] if front else entry.units[:keep]
        self.give_up(entry.pool, gone, max(fence, entry.fence))

    @rule(target=holds, entry=holds, at=st.integers(0, 9), front=st.booleans())
    def split(self, entry: Modelled, at: int, front: bool):
        if at > len(entry.units):
            with pytest.raises(ValueError, match="cannot split"):
                entry.hold.split(at)
            return multiple()
        hold = entry.hold.split_front(at) if front else entry.hold.split(at)
        low, high = entry.units[:at], entry.units[at:]
        entry.units, gone = (high, low) if front else (low, high)
        part = Modelled(hold, gone, entry.holder, entry.fence)
        for unit in gone:
            self.owner[part.pool][unit] = part
        self.alive.append(part)
        return part

    @rule(target=dead, entry=holds, other=consumes(holds))
    def join(self, entry: Modelled, other: Modelled):
        if entry is other or entry.pool is not other.pool or entry.holder is not other.holder:
            with pytest.raises(LedgerError):
                entry.hold.join(other.hold)
            self.bury(other, release=entry is not other)
            return other if entry is not other else multiple()
        entry.hold.join(other.hold)
        for unit in other.units:
            self.owner[entry.pool][unit] = entry
        entry.units = entry.units + other.units
        entry.fence = max(entry.fence, other.fence)
        self.alive.remove(other)
        return other

    @rule(giver=holds, taker=holds, count=st.integers(0, 9))
    def pass_front(self, giver: Modelled, taker: Modelled, count: int) -> None:
        count = min(count, len(giver.units))
        if giver.pool is not taker.pool or giver is taker:
            if __debug__:
                with pytest.raises(AssertionError):
                    giver.hold.pass_front(count, taker.hold)
            return
        giver.hold.pass_front(count, taker.hold)
        for unit in giver.units[:count]:
            self.owner[taker.pool][unit] = taker
        taker.units = taker.units + giver.units[:count]
        giver.units = giver.units[count:]
        taker.fence = max(taker.fence, giver.fence)

    @rule(target=dead, entry=holds, who=st.integers(0, 4))
    def move(self, entry: Modelled, who: int):
        """The old handle is dead, the fresh one holds all."""
        old = Modelled(entry.hold, [], entry.holder)
        entry.hold = entry.hold.move_to(self.holders[who])
        entry.holder = self.holders[who]
        return old

    @rule(target=dead, entry=consumes(holds), ahead=st.integers(0, 2))
    def release(self, entry: Modelled, ahead: int):
        self.bury(entry, release=True, fence=min(self.ledger.step, self.ledger.settled + ahead))
        return entry

    def bury(self, entry: Modelled, release: bool, fence: int = 0) -> None:
        if entry in self.alive and release:
            entry.hold.release(fence)
            self.give_up(entry.pool, entry.units, max(fence, entry.fence))
            self.alive.remove(entry)

    @rule(entry=holds, ahead=st.integers(0, 2))
    def fence(self, entry: Modelled, ahead: int) -> None:
        step = min(self.ledger.step, self.ledger.settled + ahead)
        entry.hold.fence(step)
        entry.fence = max(entry.fence, step)

    @rule(entry=consumes(holds))
    def drop(self, entry: Modelled) -> None:
        """A live Hold goes out of scope: reported with its holder, and reclaimed behind the newest step."""
        if entry not in self.alive:
            return
        self.alive.remove(entry)
        before = len(self.ledger.leaks)
        del entry.hold
        self.ledger.settle(self.ledger.settled)
        leak = self.ledger.leaks[before]
        assert len(self.ledger.leaks) == before + 1
        assert (leak.holder, leak.units, leak.pool) == (entry.holder, entry.units, entry.pool)
        assert leak.taken_at.startswith("test_ledger_machine.py:")
        self.give_up(entry.pool, entry.units, self.ledger.step)
        entry.units = []

    @rule()
    def plan(self) -> None:
        self.ledger.step += 1

    @rule(lag=st.integers(0, 2))
    def settle(self, lag: int) -> None:
        step = max(self.ledger.settled, self.ledger.step - lag)
        self.ledger.settle(step)
        for owners in self.owner.values():
            for unit, owner in owners.items():
                if isinstance(owner, int) and owner <= step:
                    owners[unit] = FREE

    @rule(entry=dead)
    def use_the_dead(self, entry: Modelled) -> None:
        assert not entry.hold.alive
        for use in (
            lambda: entry.hold.grow(0),
            entry.hold.release,
            lambda: entry.hold.units,
            lambda: entry.hold.split(0),
        ):
            with pytest.raises(DeadHold):
                use()

    @invariant()
    def agrees(self) -> None:
        for pool in self.pools:
            owners = self.owner[pool]
            assert sorted(pool.free) == [unit for unit, owner in owners.items() if owner == FREE]
            retiring = sorted(unit for _, units in pool.retiring for unit in units)
            assert retiring == [unit for unit, owner in owners.items() if isinstance(owner, int)]
            assert sum(pool.counts().values()) == pool.size
            for kind, holder in zip(KINDS, self.holders, strict=True):
                count = sum(len(e.units) for e in self.alive if e.pool is pool and e.holder is holder)
                assert holder.held[pool.index] == count == pool.by_kind[kind]
        for entry in self.alive:
            assert entry.hold.units == entry.units
            assert entry.hold.holder is entry.holder
        assert len(self.ledger.live) == len(self.alive)

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for entry in list(self.alive):
            self.bury(entry, release=True)
        self.ledger.settle(self.ledger.step)
        for pool in self.pools:
            assert sorted(pool.free) == list(range(pool.size))


def test_the_ledger_agrees_with_a_map_of_every_unit() -> None:
    case = LedgerMachine.TestCase
    case.settings = settings(max_examples=150, stateful_step_count=50)
    case().runTest()
