"""When memory is short: what gives way, in which order, and what is left alone."""

import pytest

from holdfast.core.layout import Component, MemoryLayout, Tier
from holdfast.core.ledger import OutOfUnits
from holdfast.core.session import Life, Place
from tests.core.driver import LAYOUTS, PAGE_SIZES, Driver, prompt

FULL, STATE = Component.FULL, Component.STATE


def ask(
    driver: Driver, name: str, count: int, component: Component = FULL, may_retract: bool = False
) -> bool:
    """Ask for room in a session's name."""
    pool = driver.ledger.pool(component)
    shortfall = OutOfUnits(pool, count, len(pool.free))
    return driver.scheduler.pressure.make_room(shortfall, driver.session(name), may_retract)


def free(driver: Driver, component: Component = FULL) -> int:
    """How many units are free."""
    return len(driver.ledger.pool(component).free)


def test_the_tree_gives_way_before_any_session() -> None:
    driver = Driver("dense", 4, pages=40)
    driver.open("a")
    driver.turn("a", 30, 2)
    driver.request(prompt(60, 1), 4)
    driver.run()
    assert driver.counts() == {"FREE": 16, "TREE": 7 + 16, "SESSION": 1}
    assert ask(driver, "a", 19)
    assert driver.session("a").holder.held[0] == 1
    assert driver.session("a").sequence.computed == 32


def test_checkpoints_give_way_before_memory_that_is_needed() -> None:
    driver = Driver("hybrid", 4, slots=6)
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        for turn in range(3):
            driver.turn(name, 3, 2, 10 * seed + turn)
    assert driver.counts(STATE) == {"SESSION": 2, "CHECKPOINT": 4}
    assert ask(driver, "b", 1, STATE)
    assert driver.counts(STATE) == {"FREE": 1, "SESSION": 2, "CHECKPOINT": 3}, "one is enough"
    assert ask(driver, "b", 2, STATE)
    assert driver.session("a").sequence.points == []
    assert driver.session("a") not in driver.registry.queues.checkpointed
    assert [point.length for point in driver.session("b").sequence.points] == [5, 10], (
        "the asker keeps its own"
    )
    assert ask(driver, "b", 3, STATE)
    assert [point.length for point in driver.session("b").sequence.points] == [10]


def test_checkpoints_stay_where_they_hold_nothing_that_is_lacking() -> None:
    driver = Driver("hybrid", 4, pages=8, slots=8)
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        for turn in range(2):
            driver.turn(name, 3, 2, 10 * seed + turn)
    assert driver.counts(STATE) == {"FREE": 4, "SESSION": 2, "CHECKPOINT": 2}
    assert ask(driver, "b", free(driver) + 1)
    assert driver.counts(STATE) == {"FREE": 6, "SESSION": 1, "CHECKPOINT": 1}, "a has left, b has all it had"


def test_pinned_checkpoints_stay() -> None:
    driver = Driver("hybrid", 4, slots=4, durable_turns=True)
    driver.open("a")
    for turn in range(2):
        driver.turn("a", 3, 2, turn)
    assert driver.counts(STATE) == {"FREE": 2, "SESSION": 1, "CHECKPOINT": 1}
    assert not ask(driver, "a", 3, STATE)
    assert driver.counts(STATE)["CHECKPOINT"] == 1, "the last turn is not durable yet"
    assert driver.session("a") in driver.registry.queues.checkpointed


def test_points_that_a_running_turn_has_left_on_its_way_give_way() -> None:
    driver = Driver(MemoryLayout(4, state=True, checkpoint_tokens=8), slots=10)
    driver.open("a")
    driver.open("b")
    driver.turn("a", 3, 2)
    turn = driver.submit("a", prompt(20, 1), 30)
    driver.until(lambda: turn.generated == 3)
    assert len(driver.session("a").sequence.points) == 2, "the mark, and the end of the long input"
    taken = 10 - free(driver, STATE)
    assert ask(driver, "b", free(driver, STATE) + 1, STATE)
    assert 10 - free(driver, STATE) == taken - 1
    assert [point.length for point in driver.session("a").sequence.points] == [5]
    assert not ask(driver, "b", free(driver, STATE) + 1, STATE)
    driver.run()
    assert turn.state.value == "finished"


def test_the_longest_resting_session_is_spilled_first() -> None:
    driver = Driver("dense", 4, pages=30, host=100)
    for seed, name in enumerate(("a", "b", "c")):
        driver.open(name)
        driver.turn(name, 30, 2, seed)
    driver.turn("a", 3, 1, 9)
    driver.scheduler.flush()
    before = free(driver)
    assert not ask(driver, "c", before + 1), "it is on its way"
    assert [driver.session(name).place for name in "abc"] == [Place.HOME, Place.LEAVING, Place.HOME]
    assert not ask(driver, "c", before + 1)
    assert len(driver.registry.transits) == 1, "nothing more is given up while enough is coming"
    assert driver.registry.counters.spills == 0, "nothing has left yet"
    driver.step()
    assert driver.session("b").place is Place.AWAY and free(driver) > before
    assert driver.registry.counters.spills == 1


def test_without_another_tier_memory_at_rest_is_dropped_to_its_tokens() -> None:
    driver = Driver("dense", 4, pages=30)
    for seed, name in enumerate(("a", "b", "c")):
        driver.open(name)
        driver.turn(name, 30, 2, seed)
    assert ask(driver, "c", free(driver) + 8), "its own page, and seven that it alone leased"
    sequence = driver.session("a").sequence
    assert (sequence.known, sequence.computed, sequence.lease) == (32, 0, None)
    assert driver.session("b").sequence.computed == 32
    assert driver.registry.counters.dropped == 1
    assert driver.session("a") not in driver.registry.resting
    turn = driver.turn("a", 3, 2, 5)
    assert (turn.cached, turn.computed) == (0, 36)


def test_a_spill_that_finds_no_room_after_all_drops_instead() -> None:
    driver = Driver("dense", 4, pages=30, host=100)
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        driver.turn(name, 30, 2, seed)
    with driver.starved("spill", times=2) as struck:
        assert ask(driver, "b", free(driver) + 5)
    assert struck == ["spill", "spill"], "all of it, and then as much as fits"
    assert driver.session("a").sequence.computed == 0 and driver.registry.counters.dropped == 1
    assert driver.counts(FULL, Tier.HOST) == {"FREE": 100}


def test_sessions_that_are_away_give_up_the_prefix_they_lease_last() -> None:
    driver = Driver("dense", 4, pages=40, host=100)
    for seed, (parent, child) in enumerate((("a", "c"), ("d", "e"))):
        driver.open(parent)
        driver.turn(parent, 41, 2, seed)
        driver.scheduler.fork(parent, child, driver.now)
        driver.run()
        for name in (parent, child):
            driver.scheduler.spill(name, driver.now)
            driver.run()
            assert driver.session(name).place is Place.AWAY
    assert driver.counts() == {"FREE": 20, "TREE": 20}, "two of them need each prefix, and neither alone"
    driver.open("b")
    assert ask(driver, "b", 25)
    for name in ("a", "c"):
        assert driver.session(name).place is Place.HOME and driver.session(name).parcel is None
    for name in ("d", "e"):
        assert driver.session(name).place is Place.AWAY, "no more is given up than must be"
    assert driver.counts() == {"FREE": 30, "TREE": 10}
    assert driver.counts(FULL, Tier.HOST) == {"FREE": 98, "SESSION": 2}
    assert driver.turn("a", 3, 2, 9).cached == 0
    assert driver.turn("d", 3, 2, 9).cached == 43


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_first_prompt_that_lies_in_the_tree_goes_along_and_comes_back(layout: str, page_size: int) -> None:
    driver = Driver(layout, page_size, pages=2 * (100 // page_size + 1) + 3, slots=5, host=400)
    for seed, name in enumerate(("a", "b", "c")):
        driver.open(name)
        driver.turn(name, 80, 4, seed)
    for name in ("a", "b", "c", "a"):
        assert driver.turn(name, 3, 3, 9).cached == len(driver.tokens(name)) - 6, "nothing is computed again"
    assert driver.registry.counters.dropped == 0


def test_a_prefix_that_others_lease_stays_and_the_rest_goes_along() -> None:
    driver = Driver("dense", 4, host=100)
    for name in ("a", "b"):
        driver.open(name)
        driver.submit(name, (*prompt(20), *prompt(20, 1 + ord(name))), 2)
        driver.run()
    assert driver.scheduler.spill("a", driver.now)
    driver.run()
    assert driver.session("a").sequence.lease.length == 20, "what b begins with as well"
    assert driver.counts(FULL, Tier.HOST)["SESSION"] == 11 - 5
    turn = driver.turn("a", 3, 2, 5)
    assert turn.cached == 42


def test_memory_that_a_copy_has_yet_to_complete_is_not_spilled() -> None:
    driver = Driver("hybrid", 16, host=100)
    driver.open("a")
    driver.turn("a", 20, 4)
    driver.scheduler.fork("a", "b", driver.now)
    assert not driver.scheduler.spill("b", driver.now)
    driver.run()
    assert driver.scheduler.spill("b", driver.now)


@pytest.mark.parametrize("host", [0, 100])
def test_a_session_whose_seal_waits_gives_way_without_it(host: int) -> None:
    driver = Driver("dense", 4, pages=30, host=host)
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        driver.turn(name, 3, 2, seed)
    session = driver.session("a")
    turn = driver.submit("a", prompt(30, 5), 2)
    driver.until(lambda: turn.over)
    assert session.life is Life.SEALING
    ask(driver, "b", 30 - 3)
    assert session.life is Life.IDLE and not driver.registry.seals
    assert session.place is (Place.LEAVING if host else Place.HOME)
    driver.run()
    assert driver.turn("a", 3, 2, 6).state.value == "finished"


def test_a_session_that_has_none_of_what_is_short_is_left_alone() -> None:
    driver = Driver("dense", 4, pages=30)
    driver.open("a")
    driver.open("b")
    turn = driver.submit("a", prompt(9), 4)
    driver.step()
    driver.plan()
    driver.settle(error="once")  # Back to its mark, which is nothing at all; it waits again.
    assert turn.retracts == 1 and driver.session("a") in driver.registry.resting
    assert not ask(driver, "b", 31)
    assert driver.registry.counters.dropped == 0
    driver.run()
    assert turn.state.value == "finished"


# --- retractions ---


def crowded(overlap: bool = False) -> tuple[Driver, list]:
    """Three running turns that have taken almost all of memory."""
    driver = Driver("dense", 1, pages=40, overlap=overlap)
    turns = []
    for seed, name in enumerate(("a", "b", "c")):
        driver.open(name)
        turns.append(driver.submit(name, prompt(5 + seed, seed), 20))
    driver.until(lambda: turns[0].generated >= 6)
    return driver, turns


def test_the_youngest_of_those_that_lose_least_is_retracted_never_the_oldest() -> None:
    driver, turns = crowded()
    driver.run()
    assert turns[0].retracts == 0 < turns[2].retracts
    assert [turn.state.value for turn in turns] == ["finished"] * 3
    assert driver.registry.counters.retracts >= 1


def test_a_turn_with_rows_in_flight_is_retracted_when_they_have_settled() -> None:
    driver, turns = crowded(overlap=True)
    driver.land()
    driver.plan()
    need = free(driver) + 2
    assert not ask(driver, "a", need, may_retract=True)
    victims = [turn for turn in turns if turn.ending is not None]
    assert len(victims) == 1 and victims[0] is not turns[0]
    assert not ask(driver, "a", 39, may_retract=True), "one at a time: it is on its way"
    assert len([turn for turn in turns if turn.ending is not None]) == 1
    driver.settle()
    assert victims[0].retracts == 1 and victims[0].state.value == "queued"
    driver.run()
    assert [turn.state.value for turn in turns] == ["finished"] * 3


def test_turns_without_rows_in_flight_are_taken_back_at_once_until_enough_is_free() -> None:
    driver, turns = crowded()
    driver.land()
    assert ask(driver, "a", free(driver) + 9, may_retract=True)
    assert [turn.state.value for turn in turns] == ["running", "queued", "queued"]
    driver.run()
    assert [turn.state.value for turn in turns] == ["finished"] * 3


def test_a_turn_that_asks_may_be_the_one_that_is_taken_back() -> None:
    driver, turns = crowded()
    driver.land()
    assert not ask(driver, "b", 40, may_retract=True)
    assert turns[1].state.value == "queued" and turns[0].state.value == "running"
    driver.run()
    assert [turn.state.value for turn in turns] == ["finished"] * 3


def test_the_only_running_turn_is_never_taken_back() -> None:
    driver = Driver("dense", 1, pages=40)
    driver.open("a")
    turn = driver.submit("a", prompt(5), 20)
    driver.until(lambda: turn.generated >= 6)
    assert not ask(driver, "a", 39, may_retract=True)
    assert turn.state.value == "running"
    driver.run()
    assert turn.state.value == "finished"


def test_room_that_is_there_already_is_no_reason_to_give_anything_up() -> None:
    driver = Driver("dense", 4, pages=30)
    driver.open("a")
    driver.turn("a", 30, 2)
    before = driver.snapshot()
    assert not ask(driver, "a", 3), "the allocation has failed for another reason"
    assert driver.snapshot() == before
