"""Effects of single statements that no story is about: each test fails without one of them."""

import pytest

from holdfast.core.deadlines import SLACK, Deadlines
from holdfast.core.ledger import Kind
from holdfast.core.session import Life
from holdfast.core.waiting import Lanes
from tests.core.driver import LAYOUTS, PAGE_SIZES, Driver, prompt


def test_deadlines_come_up_in_order_after_dropped_ones_were_cleared_away() -> None:
    deadlines = Deadlines()
    deadlines.add(1, 9.0, "late")
    deadlines.add(2, 3.0, "early")
    count = 3 + SLACK
    for key in range(10, 10 + count):
        deadlines.add(key, 5.0, "dropped")
    for key in range(10, 10 + count):
        deadlines.drop(key)
    assert len(deadlines) < count, "dropped entries were cleared away"
    assert list(deadlines.due(4.0)) == [(2, "early")]


def test_a_parcel_names_who_carries_it() -> None:
    driver = Driver("dense", 4, host=50)
    session = driver.open("a")
    driver.turn("a", 9, 3)
    assert driver.scheduler.spill("a", driver.now)
    assert session.parcel is not None
    holder = session.parcel.holder
    assert (holder.kind, holder.name, holder.account.name) == (Kind.TRANSIT, "a", session.tenant)


def test_tenants_whose_turns_wait_no_more_leave_nothing_behind() -> None:
    lanes = Lanes()
    driver = Driver("dense", 4)
    driver.open("a")
    turn = driver.submit("a", prompt(3), 2)
    lanes.add((0, "patient", turn))
    for number in range(1, 20):
        lanes.add((number, f"tenant {number}", turn))
        lanes.remove((number, f"tenant {number}", turn))
    assert list(lanes._lanes) == ["patient"]


def test_a_new_session_is_expected_at_no_time_and_waits_for_no_journal() -> None:
    session = Driver("dense", 4).open("a")
    assert (session.expected, session.durable) == (0.0, True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_that_a_spill_in_flight_reads_is_not_free_before_it_has_settled(layout: str) -> None:
    driver = Driver(layout, 4, host=50, leave_history=False)
    session = driver.open("a")
    driver.turn("a", 9, 3)
    assert driver.scheduler.spill("a", driver.now)
    plan = driver.plan()
    sources = {move.component: set(move.sources) for move in plan.moves}
    assert set(sources) == set(driver.layout.components)
    driver.scheduler.close("a", driver.now)
    assert session.life is Life.CLOSED
    for component, units in sources.items():
        assert not units & set(driver.ledger.pool(component).free)
    driver.run()
    for component, units in sources.items():
        assert units <= set(driver.ledger.pool(component).free)


def test_a_spill_that_is_given_up_before_its_plan_moves_nothing() -> None:
    driver = Driver("hybrid", 4, host=50)
    driver.open("a")
    driver.turn("a", 9, 3)
    assert driver.scheduler.spill("a", driver.now)
    driver.scheduler.close("a", driver.now)
    assert driver.plan().moves == []


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_spill_is_asked_for_exactly_the_room_that_it_takes(layout: str, page_size: int) -> None:
    for count, said in ((9, 3), (24, 1), (33, 2)):
        driver = Driver(layout, page_size, host=200)
        session = driver.open("a")
        driver.turn("a", count, said)
        needs = driver.registry.moves.parcel_units(session)
        assert driver.scheduler.spill("a", driver.now)
        assert session.parcel is not None
        assert {component: len(hold) for component, hold in session.parcel.away.items()} == needs


def test_copies_for_memory_that_is_dropped_are_not_made() -> None:
    driver = Driver("dense", 4)
    driver.open("a")
    driver.turn("a", 9, 4)
    child = driver.scheduler.fork("a", "b", driver.now)
    assert driver.registry.copies
    driver.registry.drop_memory(child)
    assert driver.plan().copies == []


def test_sessions_that_lose_memory_to_pressure_are_counted() -> None:
    driver = Driver("dense", 4)
    session = driver.open("a")
    driver.registry.give_up(session)
    assert driver.registry.counters.dropped == 0
    driver.turn("a", 9, 4)
    driver.registry.give_up(session)
    assert (driver.registry.counters.dropped, session.sequence.computed) == (1, 0)


def test_a_session_that_rests_again_is_the_last_to_give_way() -> None:
    driver = Driver("dense", 4)
    first, second = driver.open("a"), driver.open("b")
    for name in ("a", "b"):
        driver.turn(name, 5, 2)
    assert list(driver.registry.resting) == [first, second]
    driver.registry.queues.rest(first)
    assert list(driver.registry.resting) == [second, first]


def test_a_session_whose_memory_is_dropped_is_not_sealed() -> None:
    driver = Driver("dense", 4)
    session = driver.open("a")
    driver.submit("a", prompt(9), 2)
    driver.until(lambda: session.turn is None)
    assert session in driver.registry.seals
    driver.registry.drop_memory(session)
    assert (session.life, list(driver.registry.seals)) == (Life.IDLE, [])


def test_a_closed_session_is_on_no_list_of_memory_to_drop() -> None:
    driver = Driver("dense", 4)
    session = driver.open("a")
    driver.turn("a", 9, 2)
    driver.registry.queues.tainted[session] = None
    driver.close("a")
    assert not driver.registry.queues.tainted
