"""Moving a sequence's memory between tiers: all of it or nothing."""

import pytest

from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import Kind, OutOfUnits
from holdfast.core.tiers import finish_restore, finish_spill, own_holds, start_restore, start_spill
from tests.core.driver import LAYOUTS, PAGE_SIZES, Driver, prompt


def resting(layout: str, page_size: int, host: int = 100):
    """A session with three turns, at rest."""
    driver = Driver(layout, page_size, host=host)
    session = driver.open("a")
    for seed in range(3):
        driver.turn("a", 9, 4, seed)
    return driver, session.sequence


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back_again(layout: str, page_size: int) -> None:
    driver, sequence = resting(layout, page_size)
    ledger = driver.ledger
    own = {component: len(hold) for component, hold in own_holds(sequence).items()}
    assert set(own) == set(driver.layout.components)
    transit = ledger.holder(Kind.TRANSIT, "a")
    parcel, moves = start_spill(sequence, Tier.HOST, transit, 7)
    assert {move.component: len(move.sources) for move in moves} == own
    assert {move.component: len(move.destinations) for move in moves} == own
    assert {(move.number, move.source_tier, move.destination_tier) for move in moves} == {
        (7, Tier.DEVICE, Tier.HOST)
    }
    points = [point.length for point in sequence.points]
    assert points[-2:] == ([] if layout == "dense" else [13, 26]), "they stay"
    assert not any(point.pinned for point in sequence.points)
    assert [len(hold) for hold in own_holds(sequence).values()] == list(own.values()), "the source is there"
    finish_spill(sequence, parcel)
    assert sequence.away and own_holds(sequence) == {} and sequence.faults() == []
    assert {hold.holder.kind for hold in parcel.away.values()} == {Kind.SESSION}
    back = start_restore(sequence, parcel, transit, 8)
    assert {move.component: len(move.destinations) for move in back} == own
    assert {(move.number, move.source_tier, move.destination_tier) for move in back} == {
        (8, Tier.HOST, Tier.DEVICE)
    }
    claimed: list[object] = []
    parcel.claim(claimed)
    assert len(claimed) == 2 * len(own) and parcel.faults() == []
    finish_restore(sequence, parcel)
    assert not sequence.away and sequence.faults() == []
    assert [point.length for point in sequence.points] == points
    assert {component: len(hold) for component, hold in own_holds(sequence).items()} == own
    assert parcel.away == parcel.home == {}
    for component, units in own.items():
        assert driver.counts(component, Tier.HOST) == {"FREE": 100 - units, "COPY": units}


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "state"])
def test_a_spill_without_room_for_all_components_takes_none(layout: str) -> None:
    driver, sequence = resting(layout, 3, host=1)
    before = driver.all_counts()
    points = [point.length for point in sequence.points]
    with pytest.raises(OutOfUnits):
        start_spill(sequence, Tier.HOST, driver.ledger.holder(Kind.TRANSIT, "a"), 1)
    assert driver.all_counts() == before
    assert [point.length for point in sequence.points] == points


def test_a_parcel_can_be_discarded_on_both_sides_at_once() -> None:
    driver, sequence = resting("hybrid", 3)
    transit = driver.ledger.holder(Kind.TRANSIT, "a")
    parcel, _ = start_spill(sequence, Tier.HOST, transit, 1)
    finish_spill(sequence, parcel)
    start_restore(sequence, parcel, transit, 2)
    assert driver.counts(Component.FULL)["TRANSIT"] > 0
    parcel.discard(0)
    for component in driver.layout.components:
        assert driver.counts(component, Tier.HOST) == {"FREE": 100}
        assert "TRANSIT" not in driver.counts(component)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tables_are_sent_again_after_a_restore(layout: str) -> None:
    driver = Driver(layout, 3, host=100)
    driver.open("a")
    driver.turn("a", 20, 4)
    driver.open("b")
    driver.scheduler.spill("a", driver.now)
    driver.run()
    driver.turn("b", 20, 4, 5)  # Takes the units that `a` had, so the same ones do not come back.
    turn = driver.turn("a", 5, 5, 6)
    assert turn.cached == 24 and turn.generated == 5
    assert driver.tokens("a")[-5:] == driver.says([*driver.tokens("a")[:-5]], 5)
    assert prompt(5, 6) == tuple(driver.tokens("a")[24:29])


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("layout", ["window", "full+window+state"])
def test_window_pages_under_the_lease_are_sent_again_after_a_restore(layout: str, page_size: int) -> None:
    """A checkpoint keeps its window while the pages under it go to the tree: a rewind makes it the window."""
    driver = Driver(layout, page_size, host=200, chunk_tokens=3)
    sequence = driver.open("a").sequence
    for count, seed in ((4, 0), (14, 4), (30, 1)):
        driver.turn("a", count, 3, seed)
    driver.scheduler.fork("a", "b", driver.now)
    driver.run()
    driver.scheduler.rewind("a", 2, driver.now)
    turn = driver.submit("a", prompt(20, 2), 2)
    driver.step()
    driver.scheduler.abort("a", turn.request.turn_id, driver.now, keep=0)
    assert sequence.window is not None
    assert sequence.window.first < sequence.leased_pages < sequence.changed == sequence.pages
    assert driver.scheduler.spill("a", driver.now)
    driver.run()
    driver.open("c")
    driver.turn("c", 40, 3, 7)  # Takes the units that `a` had, so the same ones do not come back.
    turn = driver.turn("a", 3, 2, 8)
    assert (turn.cached, turn.generated) == (27, 2)
