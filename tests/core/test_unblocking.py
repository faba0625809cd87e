"""Plans that come out empty although a turn waits: who loses memory then, and who does not."""

import pytest

from holdfast.core.layout import Component, Tier
from holdfast.core.pool import OutOfUnits
from holdfast.core.session import Place
from tests.core.driver import Driver, prompt

PAGE = 4


def holding(driver: Driver) -> list[str]:
    """The sessions that have computed something, wherever it lies."""
    return [name for name, session in driver.registry.sessions.items() if session.sequence.computed]


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("layout", ["hybrid", "state"])
def test_a_request_that_copies_a_tail_evicts_what_its_first_row_needs_too(layout: str, busy: bool) -> None:
    """One slot is free: the copy of the tail takes it, the row finds none, and all of it is taken back."""
    driver = Driver(layout, PAGE, slots=5 if busy else 4)
    driver.open("kept", "blue")
    driver.turn("kept", 7, 3, 3)
    first = driver.request(prompt(4, 1), 2)
    driver.run()
    if busy:
        driver.submit(driver.open("busy", "blue").id, prompt(3, 5), 50)
        driver.step()
    assert len(driver.ledger.pool(Component.STATE).free) == 1
    history = prompt(4, 1) + tuple(driver.heard[first.request.turn_id])
    second = driver.request((*history, 3), 2)
    plan = driver.step()
    assert second in [row.turn for row in plan.rows], "no other turn has to end first"
    driver.run()
    assert driver.registry.counters.dropped == 0
    assert driver.session("kept").sequence.computed == 10


def test_what_an_attempt_gave_back_is_needed_again() -> None:
    driver = Driver("dense", PAGE, pages=10)
    pool = driver.ledger.pool(Component.FULL)
    shortfall = OutOfUnits(pool, 3, 2)
    shortfall.give_back(6)
    assert (shortfall.asked, shortfall.free) == (7, 6)
    shortfall.give_back(5)
    assert (shortfall.asked, shortfall.free) == (7, 5), "somebody else took one"


def four_at_rest() -> Driver:
    """A session away, one that is pinned, and two that are not, the first idle for longer."""
    driver = Driver("dense", PAGE, host=100)
    for name, pinned in (("away", False), ("pinned", True), ("idle", False), ("later", False)):
        driver.open(name, pinned=pinned)
        driver.turn(name, 9, 3, ord(name[0]))
        driver.now += 100.0
    assert driver.scheduler.spill("away", driver.now, Tier.HOST)
    driver.run()
    assert driver.session("away").place is Place.AWAY
    return driver


@pytest.mark.parametrize(
    ("failures", "left"),
    [
        (1, ["away", "pinned", "idle", "later"]),
        (2, ["away", "pinned", "later"]),
        (3, ["away", "pinned"]),
        (4, ["away"]),
    ],
)
def test_sessions_lose_their_memory_one_after_the_other(failures: int, left: list[str]) -> None:
    driver = four_at_rest()
    with driver.starved("first chunk", times=failures) as struck:
        turn = driver.request(prompt(5, 7), 2)
        plan = driver.plan()
    assert len(struck) == failures and [row.turn for row in plan.rows] == [turn]
    assert holding(driver) == left
    driver.land()
    driver.run()
    assert driver.registry.counters.dropped == 4 - len(left)


def test_a_session_that_is_away_goes_for_what_it_leases() -> None:
    driver = Driver("dense", PAGE, host=100)
    driver.open("parent")
    driver.turn("parent", 9, 3)
    driver.scheduler.fork("parent", "child", driver.now)
    driver.turn("child", 5, 3, 1)
    assert driver.scheduler.spill("child", driver.now, Tier.HOST)
    driver.run()
    assert {each.id for each in driver.scheduler.pressure.last_resorts()} == {"parent", "child"}
    assert driver.session("child").place is Place.AWAY
