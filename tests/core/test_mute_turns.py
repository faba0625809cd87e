"""Turns with `max_tokens` 0: their input is computed, nothing is sampled, and they end like any turn."""

import pytest

from holdfast.core.session import Life
from holdfast.core.turn import KEEP_ALL, TurnEvent, TurnState
from tests.core.driver import LAYOUTS, Driver, prompt

BOTH = pytest.mark.parametrize("overlap", [False, True])
EVERY = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.mark.no_cover
@BOTH
@EVERY
@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_it_ends_when_its_input_is_computed(layout: str, overlap: bool, count: int) -> None:
    driver = Driver(layout, 3, overlap=overlap, chunk_tokens=8)
    driver.open("a")
    turn = driver.turn("a", count, 0)
    session = driver.session()
    assert (turn.state, turn.generated, turn.first_token) == (TurnState.FINISHED, 0, None)
    assert driver.kinds("a") == [("finished", "t1")]
    assert [event.reason for event in driver.events] == ["length"]
    assert session.life is Life.IDLE and session.boundaries == [count]
    assert session.sequence.computed == session.sequence.known == count
    assert driver.registry.counters.computed_tokens == count
    assert not any(row.sample for plan in driver.plans for row in plan.rows)
    driver.close()
    assert driver.registry.counters.generated_tokens == 0


@BOTH
@EVERY
def test_a_turn_after_it_computes_its_own_input_alone(layout: str, overlap: bool) -> None:
    driver = Driver(layout, 3, overlap=overlap, chunk_tokens=8)
    driver.open("a")
    driver.turn("a", 20, 0)
    driver.turn("a", 5, 0, seed=1)
    turn = driver.turn("a", 4, 6, seed=2)
    assert (turn.cached, turn.known_before) == (25, 25)
    assert driver.heard == {"t3": driver.says(driver.tokens("a")[:29], 6)}
    assert driver.session().boundaries == [20, 25, 35]
    # All known tokens once; the last token of the answer is computed by its seal.
    assert driver.registry.counters.computed_tokens == 35


@EVERY
def test_it_follows_a_turn_whose_last_token_is_not_computed(layout: str) -> None:
    driver = Driver(layout, 3)
    driver.open("a")
    first = driver.submit("a", prompt(7), 3)
    driver.until(lambda: first.over)
    turn = driver.turn("a", 4, 0, seed=1)
    assert (turn.known_before, turn.cached) == (10, 10)
    assert driver.session().sequence.computed == 14
    assert driver.registry.counters.computed_tokens == 14


@BOTH
@EVERY
def test_a_request_of_its_own_leaves_its_prompt_to_others(layout: str, overlap: bool) -> None:
    driver = Driver(layout, 3, overlap=overlap)
    driver.request(prompt(20), 0)
    driver.run()
    assert driver.kinds("r1") == [("finished", "r1"), ("closed", "")]
    warmed = driver.request((*prompt(20), 1, 2, 3), 4)
    driver.run()
    assert warmed.cached >= 18


@BOTH
@EVERY
def test_it_is_retracted_and_computed_again(layout: str, overlap: bool) -> None:
    driver = Driver(layout, 3, overlap=overlap, chunk_tokens=6)
    driver.open("a")
    driver.open("b")
    driver.turn("b", 5, 2)
    turn = driver.submit("b", prompt(40, 3), 0)
    driver.until(lambda: turn.computed > 6)
    if not overlap:
        driver.plan()
    driver.settle("failed")
    assert turn.state is TurnState.QUEUED and turn.retracts == 1
    driver.run()
    assert turn.state is TurnState.FINISHED
    assert driver.session("b").sequence.computed == 47
    later = driver.turn("b", 2, 3, seed=4)
    assert driver.heard[later.request.turn_id] == driver.says(driver.tokens("b")[:49], 3)


@EVERY
def test_a_retraction_that_comes_with_its_last_row_is_void(layout: str) -> None:
    driver = Driver(layout, 3, overlap=True)
    driver.open("a")
    turn = driver.submit("a", prompt(9), 0)
    while driver.session().sequence.planned < 9:
        driver.plan()
    turn.will_end(TurnEvent.RETRACT, "memory is short")
    driver.run()
    assert (turn.state, turn.retracts) == (TurnState.FINISHED, 0)


@pytest.mark.parametrize("keep", [None, 0, KEEP_ALL])
@EVERY
def test_an_abort_with_its_last_row_in_flight_does_as_it_says(layout: str, keep: int | None) -> None:
    driver = Driver(layout, 3, overlap=True)
    driver.open("a")
    driver.turn("a", 7, 3)
    turn = driver.submit("a", prompt(6, 2), 0)
    driver.plan()
    driver.scheduler.abort("a", turn.request.turn_id, driver.now, keep)
    driver.run()
    assert turn.state is TurnState.ABORTED
    assert driver.session().boundaries == ([10] if keep is None else [10, 16])
    later = driver.turn("a", 2, 4, seed=5)
    assert driver.heard[later.request.turn_id] == driver.says(driver.tokens("a")[:-4], 4)


@EVERY
def test_it_is_closed_while_it_runs(layout: str) -> None:
    driver = Driver(layout, 3, overlap=True, chunk_tokens=4)
    driver.open("a")
    driver.submit("a", prompt(9), 0)
    driver.plan()
    driver.close()
    driver.scheduler.flush()
    assert driver.all_free()


@EVERY
def test_it_is_cut_rewound_forked_and_spilled_like_any_turn(layout: str) -> None:
    driver = Driver(layout, 3, host=200)
    driver.open("a")
    driver.turn("a", 7, 3)
    driver.turn("a", 6, 0, seed=1)
    driver.scheduler.interrupt("a", driver.now, 0)
    assert driver.session().boundaries == [10, 16]
    assert driver.scheduler.spill("a", driver.now)
    driver.run()
    driver.scheduler.fork("a", "b", driver.now)
    driver.turn("b", 2, 3, seed=2)
    driver.scheduler.interrupt("a", driver.now, None)
    assert driver.session().boundaries == [10]
    driver.turn("a", 6, 0, seed=3)
    driver.scheduler.rewind("a", 1, driver.now)
    turn = driver.turn("a", 2, 3, seed=2)
    assert driver.heard[turn.request.turn_id] == driver.says(driver.tokens("a")[:12], 3)


@EVERY
def test_with_drafts_no_guess_is_made_for_it(layout: str) -> None:
    guesses: list[int] = []

    def propose(*_: object) -> list[int]:
        guesses.append(1)
        return [1, 2, 3]

    driver = Driver(layout, 3, propose=propose, chunk_tokens=8)
    driver.open("a")
    driver.turn("a", 20, 0)
    assert not guesses
    assert driver.session().sequence.computed == 20


def test_memory_that_is_short_is_made_free_for_its_last_token() -> None:
    driver = Driver("dense", 1, pages=12, chunk_tokens=4, context_length=12)
    driver.open("a")
    driver.open("b")
    driver.turn("b", 4, 1, seed=3)
    turn = driver.turn("a", 9, 0)
    assert turn.state is TurnState.FINISHED
    assert driver.session("a").sequence.computed == 9
    assert driver.session("b").sequence.computed == 0
