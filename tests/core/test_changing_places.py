"""Two sessions change places where neither the device nor the host has room for one of them whole."""

import pytest

from holdfast.core.layout import Component, Tier, named_layout
from holdfast.core.policy import Share
from holdfast.core.session import Place
from tests.core.driver import LAYOUTS, Driver

FULL, STATE = Component.FULL, Component.STATE
PAGED_FULL = tuple(name for name in LAYOUTS if named_layout(name, 1).full)
PAGE = 4


def crowd(layout: str = "dense", host: int = 40) -> Driver:
    """`a` is on the host and `b` on the device, of 25 pages each."""
    driver = Driver(layout, PAGE, pages=40, host=host)
    for seed, name in enumerate("ab"):
        driver.open(name)
        driver.turn(name, 96, 4, seed)
    assert [driver.session(name).place for name in "ab"] == [Place.AWAY, Place.HOME]
    return driver


def pages_moved(driver: Driver, since: int, tier: Tier) -> int:
    """Full pages that moved to a tier in the plans since one."""
    moves = [move for plan in driver.plans[since:] for move in plan.moves]
    return sum(len(move.sources) for move in moves if (move.component, move.destination_tier) == (FULL, tier))


@pytest.mark.parametrize("layout", PAGED_FULL)
def test_nothing_is_computed_again_however_often_they_change(layout: str) -> None:
    driver = crowd(layout)
    for seed, name in enumerate("abab", start=2):
        turn = driver.turn(name, 3, 2, seed)
        assert turn.cached == 100 + 5 * ((seed - 2) // 2)
        assert driver.tokens(name)[-2:] == driver.says(driver.tokens(name)[:-2], 2)
    assert driver.registry.counters.dropped == 0
    for name in "ab":
        driver.close(name)
    driver.registry.tree.flush()
    driver.run()
    sizes = {Tier.DEVICE: 40, Tier.HOST: 40}
    assert {tier: driver.counts(FULL, tier) for tier in sizes} == {
        tier: {"FREE": size} for tier, size in sizes.items()
    }


def test_as_much_leaves_as_the_host_has_room_for() -> None:
    driver = crowd()
    before = len(driver.plans)
    driver.turn("a", 3, 2, 2)
    assert pages_moved(driver, before, Tier.HOST) == 15, "the host had 40 pages, and a lay on 25"
    b = driver.session("b")
    assert b.place is Place.AWAY and b.sequence.leased_pages == 10
    before = len(driver.plans)
    assert driver.turn("b", 3, 2, 3).cached == 100
    assert pages_moved(driver, before, Tier.DEVICE) == 15


def test_what_leaves_again_whole_has_taken_its_first_pages_back() -> None:
    driver = crowd()
    driver.turn("a", 3, 2, 2)
    driver.turn("b", 3, 2, 3)
    driver.close("a")
    driver.registry.tree.flush()
    assert driver.scheduler.spill("b", driver.now, Tier.HOST)
    driver.run()
    assert driver.session("b").sequence.leased_pages == 0
    assert driver.counts(FULL, Tier.HOST) == {"SESSION": 27, "FREE": 13}


def test_too_little_room_on_the_host_drops_the_whole_session() -> None:
    driver = crowd(host=30)  # 5 pages of room, and 10 are lacking.
    assert driver.turn("a", 3, 2, 2).cached == 100
    assert driver.registry.counters.dropped == 1
    assert driver.turn("b", 3, 2, 3).cached == 0


def test_the_copy_of_what_stays_makes_room() -> None:
    driver = crowd()
    driver.turn("a", 3, 2, 2)
    copy = driver.session("a").sequence.copy
    assert copy is not None and copy.size(FULL) == 25
    assert copy.size(STATE) == 0
    assert driver.counts(FULL, Tier.HOST) == {"SESSION": 15, "COPY": 25}
    before = len(driver.plans)
    assert driver.turn("b", 3, 2, 3).cached == 100
    a = driver.session("a")
    assert a.place is Place.AWAY and a.sequence.leased_pages == 2
    assert pages_moved(driver, before, Tier.HOST) == 2, "the other 23 pages were in the copy"


def test_too_little_room_on_the_host_costs_one_session_and_not_two() -> None:
    driver = Driver("dense", PAGE, pages=65, host=30)
    for seed, name in enumerate("abc"):
        driver.open(name)
        driver.turn(name, 96, 4, seed)
    assert driver.turn("a", 3, 2, 3).cached == 100
    b, c = driver.session("b"), driver.session("c")
    assert (b.sequence.computed, c.sequence.computed) == (0, 100)
    assert c.place is Place.HOME


@pytest.mark.parametrize(("layout", "points"), [("window", []), ("hybrid", [50]), ("full+window+state", [])])
def test_checkpoints_keep_no_pages_on_the_device(layout: str, points: list[int]) -> None:
    driver = Driver(layout, PAGE, pages=40, host=40, durable_turns=True)
    for seed, name in enumerate("ab"):
        driver.open(name)
        driver.turn(name, 46, 4, seed)
        driver.turn(name, 46, 4, seed)
    b = driver.session("b")
    assert b.sequence.points[-1].pinned
    assert driver.turn("a", 3, 2, 2).cached == 100
    assert b.place is Place.AWAY and b.sequence.leased_pages == 10
    assert [point.length for point in b.sequence.points] == points
    assert not any(point.pinned for point in b.sequence.points)
    assert driver.turn("b", 3, 2, 3).cached == 100


def test_a_session_stays_whole_where_the_host_has_no_room_for_its_state() -> None:
    driver = Driver("hybrid", PAGE, pages=40, host=40)
    driver.open("root")
    driver.turn("root", 4, 4, 9)
    for number in range(39):
        driver.scheduler.fork("root", f"f{number}", driver.now)
        driver.run()
        assert driver.scheduler.spill(f"f{number}", driver.now, Tier.HOST)
        driver.run()
    for seed, name in enumerate("ab"):
        driver.open(name)
        driver.turn(name, 96, 4, seed)
    assert driver.counts(FULL, Tier.HOST) == {"SESSION": 25, "FREE": 15}
    assert driver.counts(STATE, Tier.HOST) == {"SESSION": 40}
    before = len(driver.plans)
    assert driver.turn("a", 3, 2, 2).cached == 100
    assert pages_moved(driver, before, Tier.HOST) == 0
    assert driver.session("b").sequence.computed == 0


def test_at_the_quota_of_a_tenant_its_own_session_changes_places() -> None:
    driver = Driver("dense", PAGE, pages=80, host=80, shares={"red": Share(device=0.5, host=0.5)})
    for seed, name in enumerate("ab"):
        driver.open(name)
        driver.turn(name, 96, 4, seed)
    assert [driver.session(name).place for name in "ab"] == [Place.AWAY, Place.HOME]
    assert driver.turn("a", 3, 2, 2).cached == 100
    assert driver.session("b").sequence.leased_pages == 10
    assert driver.turn("b", 3, 2, 3).cached == 100
    assert driver.registry.counters.dropped == 0
