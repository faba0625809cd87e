"""The ledger: Holds are linear, taking is all or nothing, dropped Holds report themselves, fences hold."""

import gc

import pytest

from holdfast.core.hold import RECORDER_LENGTH
from holdfast.core.layout import Component, Tier, named_layout
from holdfast.core.ledger import (
    DeadHold,
    Hold,
    Kind,
    Ledger,
    LedgerError,
    OutOfUnits,
    Pool,
)
from tests.core.world import make_ledger


@pytest.fixture
def ledger() -> Ledger:
    return make_ledger(named_layout("hybrid", 16), pages=10, slots=3)


@pytest.fixture
def pool(ledger: Ledger) -> Pool:
    return ledger.pool(Component.FULL)


def kill_by_move(hold: Hold) -> Hold:
    return hold.move_to(hold.grant.books.holder(Kind.SESSION, "next"))


def kill_by_release(hold: Hold) -> None:
    hold.release()


def kill_by_join(hold: Hold) -> Hold:
    other = hold.grant.books.take(hold.pool, 1, hold.holder)
    other.join(hold)
    return other


USES = {
    "grow": lambda hold, other: hold.grow(1),
    "ungrow": lambda hold, other: hold.ungrow(1),
    "shrink": lambda hold, other: hold.shrink(1),
    "shrink_front": lambda hold, other: hold.shrink_front(1),
    "split": lambda hold, other: hold.split(1),
    "split_front": lambda hold, other: hold.split_front(1),
    "join": lambda hold, other: hold.join(other),
    "be joined": lambda hold, other: other.join(hold),
    "pass_front": lambda hold, other: hold.pass_front(1, other),
    "receive": lambda hold, other: other.pass_front(1, hold),
    "move_to": lambda hold, other: hold.move_to(other.holder),
    "release": lambda hold, other: hold.release(),
    "fence": lambda hold, other: hold.fence(1),
    "units": lambda hold, other: hold.units,
    "holder": lambda hold, other: hold.holder,
    "pool": lambda hold, other: hold.pool,
    "len": lambda hold, other: len(hold),
}


@pytest.mark.parametrize("kill", [kill_by_move, kill_by_release, kill_by_join])
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_dead_hold_raises_on_any_use_and_nothing_changes(ledger, pool, kill, use) -> None:
    holder = ledger.holder(Kind.TURN, "turn")
    hold, other = ledger.take(pool, 3, holder), ledger.take(pool, 2, holder)
    heir = kill(hold)
    before = pool.counts(), sorted(pool.free), len(ledger.live)
    assert not hold.alive
    assert repr(hold) == "<dead Hold>"
    with pytest.raises(DeadHold):
        use(hold, other)
    assert (pool.counts(), sorted(pool.free), len(ledger.live)) == before
    other.release()
    if heir is not None:
        heir.release()


def test_taking_more_than_is_free_takes_nothing_and_says_what_was_asked(ledger, pool) -> None:
    holder = ledger.holder(Kind.TURN, "turn")
    hold = ledger.take(pool, 8, holder)
    for ask in (lambda: ledger.take(pool, 3, holder), lambda: hold.grow(3)):
        with pytest.raises(OutOfUnits, match="3 units asked for, 2 free") as short:
            ask()
        assert (short.value.pool, short.value.asked, short.value.free) == (pool, 3, 2)
        assert len(hold) == 8
        assert len(pool.free) == 2
        assert holder.held == [8, 0]
    hold.release()


def test_a_gate_can_refuse_what_is_free_and_an_empty_taking_never_asks_it(ledger, pool) -> None:
    asked = []
    pool.guard(lambda pool, count: bool(asked.append(count)))
    holder = ledger.holder(Kind.TURN, "turn")
    with pytest.raises(OutOfUnits):
        ledger.take(pool, 2, holder)
    hold = ledger.take(pool, 0, holder)
    with pytest.raises(OutOfUnits):
        hold.grow(1)
    hold.grow(0)
    assert asked == [2, 1]
    pool.guard(lambda pool, count: True)
    hold.grow(2)
    assert len(hold) == 2
    hold.release()


@pytest.mark.parametrize(
    "ask",
    [
        lambda ledger, hold: ledger.take(hold.pool, -1, hold.holder),
        lambda ledger, hold: hold.grow(-1),
        lambda ledger, hold: hold.shrink(-1),
        lambda ledger, hold: hold.shrink(5),
        lambda ledger, hold: hold.shrink_front(5),
        lambda ledger, hold: hold.split(5),
        lambda ledger, hold: hold.split_front(-1),
    ],
)
def test_impossible_counts_are_refused_and_change_nothing(ledger, pool, ask) -> None:
    hold = ledger.take(pool, 4, ledger.holder(Kind.TURN, "turn"))
    units = list(hold.units)
    with pytest.raises(ValueError, match="cannot"):
        ask(ledger, hold)
    assert hold.units == units
    assert len(pool.free) == 6
    hold.release()


def test_units_keep_their_order_through_every_change(ledger, pool) -> None:
    holder = ledger.holder(Kind.TURN, "turn")
    hold = ledger.take(pool, 4, holder)
    hold.grow(1)
    hold.grow(2)
    a, b, c, d, e, f, g = hold.units
    tail = hold.split(5)
    head = hold.split_front(2)
    assert (head.units, hold.units, tail.units) == ([a, b], [c, d, e], [f, g])
    hold.pass_front(1, head)
    hold.shrink(1)
    tail.shrink_front(1)
    head.join(hold)
    head.join(tail)
    assert head.units == [a, b, c, d, g]
    head.release()
    assert len(pool.free) == 10


def test_moving_kills_the_old_hold_and_counts_for_the_new_holder(ledger, pool) -> None:
    turn, session = ledger.holder(Kind.TURN, "turn"), ledger.holder(Kind.SESSION, "session")
    hold = ledger.take(pool, 4, turn)
    moved = hold.move_to(session)
    assert (turn.held[pool.index], session.held[pool.index]) == (0, 4)
    assert pool.counts() == {**dict.fromkeys(pool.counts(), 0), "FREE": 6, "SESSION": 4}
    assert list(ledger.grants_of(session)) == [moved.grant]
    assert list(ledger.grants_of(turn)) == []
    assert "SESSION session" in repr(moved)
    moved.release()


def test_a_move_touches_no_unit_however_many_there_are(ledger) -> None:
    big = make_ledger(named_layout("dense", 1), pages=100_000)
    hold = big.take(big.pool(Component.FULL), 100_000, big.holder(Kind.SESSION, "session"))
    units = hold.units
    moved = hold.move_to(big.holder(Kind.TURN, "turn"))
    assert moved.units is units, "the list itself changed hands"
    moved.release()


def test_holds_of_other_holders_pools_or_itself_cannot_be_joined(ledger, pool) -> None:
    turn = ledger.holder(Kind.TURN, "turn")
    hold = ledger.take(pool, 1, turn)
    others = [
        hold,
        ledger.take(pool, 1, ledger.holder(Kind.TURN, "another")),
        ledger.take(ledger.pool(Component.STATE), 1, turn),
    ]
    for other in others:
        with pytest.raises(LedgerError, match="cannot join"):
            hold.join(other)
        assert other.alive
    for other in others:
        other.release()


def test_a_dropped_hold_is_reported_with_its_holder_and_where_it_was_taken(ledger, pool) -> None:
    holder = ledger.holder(Kind.SESSION, "forgetful")
    hold = ledger.take(pool, 3, holder)
    units, line = list(hold.units), test_a_dropped_hold_is_reported_with_its_holder_and_where_it_was_taken
    del hold
    assert len(pool.free) == 7, "the finaliser itself changes nothing"
    again = ledger.take(pool, 10, holder)
    assert sorted(again.units) == list(range(10)), "reclaimed before the next taking"
    (leak,) = ledger.leaks
    assert (leak.holder, leak.pool, leak.units, leak.step) == (holder, pool, units, 0)
    assert leak.taken_at.startswith("test_ledger.py:")
    assert line.__name__ in leak.taken_at
    again.release()


def test_a_hold_that_a_cycle_kept_alive_is_reported_once_collected(ledger, pool) -> None:
    class Owner:
        def __init__(self, hold: Hold) -> None:
            self.hold = hold
            self.myself = self

    gc.collect()
    gc.disable()
    try:
        Owner(ledger.take(pool, 2, ledger.holder(Kind.TURN, "cycle")))
        ledger.settle(0)
        assert ledger.leaks == []
        gc.collect()
        ledger.settle(0)
    finally:
        gc.enable()
    assert [leak.holder.name for leak in ledger.leaks] == ["cycle"]
    assert len(pool.free) == 10
    assert not ledger.live


def test_dropped_units_wait_for_the_newest_step(ledger, pool) -> None:
    ledger.step = 4
    hold = ledger.take(pool, 2, ledger.holder(Kind.TURN, "turn"))
    del hold
    ledger.settle(3)
    assert pool.counts()["RETIRING"] == 2
    ledger.settle(4)
    assert len(pool.free) == 10


def test_a_hold_that_was_reclaimed_is_dead_to_its_owner_and_not_reported_again(ledger, pool) -> None:
    hold = ledger.take(pool, 2, ledger.holder(Kind.TURN, "turn"))
    ledger.reclaim(hold.grant)
    session = ledger.holder(Kind.SESSION, "session")
    with pytest.raises(DeadHold, match="reclaimed by the audit"):
        hold.move_to(session)
    assert session.held == [0, 0]
    with pytest.raises(DeadHold, match="reclaimed by the audit"):
        hold.release()
    other = ledger.take(pool, 2, ledger.holder(Kind.TURN, "turn"))
    ledger.reclaim(other.grant)
    del other
    ledger.settle(0)
    assert ledger.leaks == []
    assert len(pool.free) == 10


@pytest.mark.parametrize("give_up", ["release", "shrink", "shrink_front"])
@pytest.mark.parametrize("on_hold", [False, True])
def test_units_that_a_step_in_flight_names_retire_until_it_settles(ledger, pool, give_up, on_hold) -> None:
    ledger.step = 2
    hold = ledger.take(pool, 4, ledger.holder(Kind.TURN, "turn"))
    if on_hold:
        hold.fence(2)
        hold.fence(1)
    counts = () if give_up == "release" else (4,)
    getattr(hold, give_up)(*counts, *(() if on_hold else (2,)))
    assert (pool.counts()["RETIRING"], pool.counts()["FREE"]) == (4, 6)
    ledger.settle(1)
    assert pool.counts()["RETIRING"] == 4
    with pytest.raises(OutOfUnits):
        ledger.take(pool, 7, ledger.holder(Kind.TURN, "another"))
    ledger.settle(2)
    assert (pool.counts()["RETIRING"], pool.counts()["FREE"]) == (0, 10)
    if give_up != "release":
        hold.release()


def test_fences_travel_with_units_that_are_split_joined_and_passed(ledger, pool) -> None:
    ledger.step = 3
    holder = ledger.holder(Kind.TURN, "turn")
    hold = ledger.take(pool, 4, holder)
    hold.fence(3)
    part = hold.split(2)
    joined, passed = ledger.take(pool, 0, holder), ledger.take(pool, 0, holder)
    joined.join(part)
    hold.pass_front(1, passed)
    for each in (hold, joined, passed):
        each.release()
    assert pool.counts()["RETIRING"] == 4
    ledger.settle(3)
    assert len(pool.free) == 10


@pytest.mark.asserts
@pytest.mark.parametrize("count", [-1, 4])
def test_units_that_a_hold_does_not_have_are_not_passed_on(ledger, pool, count: int) -> None:
    holder = ledger.holder(Kind.TURN, "turn")
    hold, other = ledger.take(pool, 3, holder), ledger.take(pool, 1, holder)
    units, others = list(hold.units), list(other.units)
    with pytest.raises(AssertionError, match="not that many units"):
        hold.pass_front(count, other)
    assert (hold.units, other.units) == (units, others)
    for each in (hold, other):
        each.release()


def test_a_grow_that_is_taken_back_leaves_nothing_retiring(ledger, pool) -> None:
    ledger.step = 1
    hold = ledger.take(pool, 2, ledger.holder(Kind.TURN, "turn"))
    hold.fence(1)
    free = sorted(pool.free)
    hold.grow(3)
    hold.ungrow(3)
    assert sorted(pool.free) == free
    assert len(hold) == 2
    hold.release()
    assert pool.counts()["RETIRING"] == 2, "the others are still behind their fence"


def test_a_step_settles_once_and_not_before_it_is_planned(ledger) -> None:
    ledger.step = 2
    ledger.settle(2)
    ledger.settle(2)
    for step in (1, 3):
        with pytest.raises(LedgerError, match="cannot settle"):
            ledger.settle(step)


def test_the_recorder_keeps_the_last_transitions_and_no_more(ledger, pool) -> None:
    ledger.step = 5
    holder = ledger.holder(Kind.TURN, "turn")
    hold = ledger.take(pool, 1, holder)
    assert ledger.recorder[-1] == (5, "take", hold.grant.serial, pool.index, 1, holder)
    for _ in range(RECORDER_LENGTH):
        hold.grow(1)
        hold.shrink(1)
    assert len(ledger.recorder) == RECORDER_LENGTH
    assert [what for _, what, *_ in ledger.recorder][-2:] == ["grow", "shrink"]
    hold.release()


def test_a_poisoned_unit_goes_to_quarantine_with_its_last_reference(ledger, pool) -> None:
    hold = ledger.take(pool, 3, ledger.holder(Kind.TURN, "turn"))
    doubtful = hold.units[0]
    pool.poison(doubtful, 2)
    hold.shrink_front(1)
    assert pool.quarantine == []
    hold.grant.units.append(doubtful)
    pool.by_kind[Kind.TURN] += 1
    hold.release()
    assert pool.quarantine == [doubtful]
    assert doubtful not in pool.free
    assert pool.poisoned == {}
    pool.poison(pool.free.pop(), 0)
    assert pool.counts()["QUARANTINE"] == 2


def test_pools_are_those_of_the_layout_and_no_size_is_negative() -> None:
    dense = named_layout("dense", 16)
    full = (Component.FULL, Tier.DEVICE)
    with pytest.raises(ValueError, match="no state component"):
        Ledger(dense, {full: 1, (Component.STATE, Tier.DEVICE): 1})
    with pytest.raises(ValueError, match="no device pool"):
        Ledger(dense, {(Component.FULL, Tier.HOST): 1})
    with pytest.raises(ValueError, match="-1 units"):
        Ledger(dense, {full: -1})
    tiers = Ledger(dense, {full: 2, (Component.FULL, Tier.DISK): 3})
    assert tiers.pool(Component.FULL, Tier.DISK).name == "full on disk"
    assert tiers.pool(Component.FULL).size == 2
