"""Holds: every transition is counted for its holder and recorded, and what changes nothing is not."""

import pytest

from holdfast.core.layout import Component, named_layout
from holdfast.core.ledger import Holder, Kind, Ledger, Pool
from tests.core.world import make_ledger


@pytest.fixture
def ledger() -> Ledger:
    return make_ledger(named_layout("dense", 4), pages=20)


@pytest.fixture
def pool(ledger: Ledger) -> Pool:
    return ledger.pool(Component.FULL)


@pytest.fixture
def ann(ledger: Ledger) -> Holder:
    return ledger.holder(Kind.SESSION, "ann")


def test_every_transition_is_recorded(ledger: Ledger, pool: Pool, ann: Holder) -> None:
    bob = ledger.holder(Kind.TURN, "bob")
    ledger.step = 3
    hold = ledger.take(pool, 4, ann)
    hold.grow(3)
    hold.shrink(1)
    front = hold.split_front(2)
    front.pass_front(1, hold)
    front.join(hold)
    moved = front.move_to(bob)
    first, second, last = 1, 2, moved.grant.serial
    moved.release()
    dropped = ledger.take(pool, 5, ann)
    serial = dropped.grant.serial
    del dropped
    ledger.reclaim_dropped()
    assert list(ledger.recorder) == [
        (3, "take", first, pool.index, 4, ann),
        (3, "grow", first, pool.index, 3, ann),
        (3, "shrink", first, pool.index, 1, ann),
        (3, "split", second, pool.index, 2, ann),
        (3, "pass", first, pool.index, 1, ann),
        (3, "join", second, pool.index, 5, ann),
        (3, "move", last, pool.index, 6, bob),
        (3, "release", last, pool.index, 6, bob),
        (3, "take", serial, pool.index, 5, ann),
        (3, "reclaim", serial, pool.index, 5, ann),
    ]


def test_units_that_nobody_asked_for_have_no_purpose(ledger: Ledger, pool: Pool, ann: Holder) -> None:
    seen: list[str] = []
    pool.guard(lambda _pool, _count: [seen.append(ledger.purpose), True][1])
    ledger.take(pool, 1, ann).release()
    ledger.purpose = "chunk"
    ledger.take(pool, 1, ann).release()
    assert seen == ["", "chunk"]


def test_a_move_has_a_number_of_its_own(ledger: Ledger, pool: Pool, ann: Holder) -> None:
    hold, other = ledger.take(pool, 2, ann), ledger.take(pool, 1, ann)
    moved = hold.move_to(ledger.holder(Kind.TURN, "bob"))
    later = ledger.take(pool, 1, ann)
    serials = [each.grant.serial for each in (other, moved, later)]
    assert serials == [2, 3, 4] and list(ledger.live) == serials
    for each in (other, moved, later):
        each.release()


def test_nothing_more_and_nothing_less_is_no_transition(ledger: Ledger, pool: Pool, ann: Holder) -> None:
    hold = ledger.take(pool, 2, ann)
    before = list(ledger.recorder)
    hold.grow(0)
    hold.shrink(0)
    hold.shrink_front(0)
    assert list(ledger.recorder) == before and len(hold) == 2
    hold.release()


def test_what_grows_counts_for_its_holder(ledger: Ledger, pool: Pool, ann: Holder) -> None:
    hold = ledger.take(pool, 2, ann)
    hold.grow(1)
    hold.grow(3)
    assert ann.held[pool.index] == ann.account.held[pool.index] == pool.by_kind[Kind.SESSION] == 6
    hold.release()
    assert ann.held[pool.index] == ann.account.held[pool.index] == pool.by_kind[Kind.SESSION] == 0


def test_drops_are_counted(ledger: Ledger, pool: Pool, ann: Holder) -> None:
    hold = ledger.take(pool, 2, ann)
    assert ledger.drops == 0
    del hold
    assert ledger.drops == 1
    ledger.reclaim_dropped()


def test_whoever_keeps_a_hold_that_was_reclaimed_reads_no_unit(
    ledger: Ledger, pool: Pool, ann: Holder
) -> None:
    hold = ledger.take(pool, 2, ann)
    ledger.reclaim(hold.grant)
    assert hold.units == [] and len(pool.free) == pool.size
