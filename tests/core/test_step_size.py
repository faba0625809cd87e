"""Steps are large for inputs alone, and bounded while answers are generated."""

import pytest

from holdfast.core.session import Session
from holdfast.core.turn import Turn
from tests.core.driver import LAYOUTS, Driver, prompt


def sizes(driver: Driver) -> list[list[int]]:
    """The tokens of each row of each plan so far."""
    return [[row.count for row in plan.rows] for plan in driver.plans]


def begin(driver: Driver, *lengths: int, answer: int = 8) -> None:
    """Queue a turn for each length of input, on a session of its own."""
    for length in lengths:
        name = f"s{len(driver.registry.sessions)}"
        driver.open(name)
        driver.submit(name, prompt(length, len(driver.registry.sessions)), answer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_long_input_alone_is_one_step(layout: str) -> None:
    driver = Driver(layout, budget=512, chunk_tokens=512, mixed_tokens=16, pages=800)
    begin(driver, 400, answer=2)
    driver.run()
    assert sum(sizes(driver)[0]) > 300, "a first prompt may leave a point on its way"
    assert len(driver.heard["t1"]) == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_beside_an_answer_an_input_goes_in_bounded_steps(overlap: bool) -> None:
    driver = Driver(budget=512, chunk_tokens=512, mixed_tokens=16, overlap=overlap)
    begin(driver, 5, answer=30)
    driver.step()
    driver.plans.clear()
    begin(driver, 100, answer=3)
    while len(driver.heard.get("t2", [])) < 1:
        driver.step()
    mixed = [step for step in sizes(driver) if len(step) == 2]
    assert all(step[0] == 1 and sum(step) <= 16 for step in mixed)
    assert sum(step[1] for step in mixed if step[1] > 1) == 100, "the input gets on in every step"
    driver.run()


def test_the_bound_grows_with_the_number_of_answers() -> None:
    """Every answer gets on in every step, and as much is left for inputs as the answers take."""
    driver = Driver(budget=512, chunk_tokens=512, mixed_tokens=4)
    begin(driver, *[3] * 10, answer=40)
    while sum(len(said) > 0 for said in driver.heard.values()) < 10:
        driver.step()
    driver.plans.clear()
    begin(driver, 200, answer=1)
    driver.step()
    assert [row.count for row in driver.plans[0].rows] == [1] * 10 + [10]
    driver.step()
    assert [row.count for row in driver.plans[1].rows] == [1] * 10 + [12], "one more turn runs"
    driver.run()


def test_short_inputs_alone_go_in_small_steps() -> None:
    """The first of many are answered first."""
    driver = Driver(budget=512, chunk_tokens=512, mixed_tokens=16)
    begin(driver, 8, 8, 8, 8, answer=2)
    driver.step()
    assert sizes(driver) == [[8, 8]]
    driver.run()


def test_a_policy_without_a_bound_has_none() -> None:
    driver = Driver(budget=512, chunk_tokens=512)
    begin(driver, 5, answer=30)
    driver.step()
    begin(driver, 100, answer=3)
    driver.step()
    assert sizes(driver)[-1] == [1, 100]
    driver.run()


def test_drafts_find_room_in_bounded_steps() -> None:
    def propose(session: Session, turn: Turn) -> list[int]:
        return [1] * 9

    driver = Driver(budget=512, chunk_tokens=512, mixed_tokens=4, propose=propose, drafts_max=3)
    begin(driver, 30, 30, answer=8)
    driver.step()
    assert sizes(driver) == [[30, 30]], "without an answer beside them, inputs get the whole step"
    begin(driver, 200, answer=1)
    driver.step()
    assert sizes(driver)[-1][:2] == [4, 4], "a row has at most three drafts"
    assert sum(sizes(driver)[-1]) == 2 * 2 * (1 + 3)
    driver.run()


def test_a_long_input_leaves_half_of_the_step_to_those_behind_it() -> None:
    """A short turn does not wait until a long input before it is computed."""
    driver = Driver(budget=64, chunk_tokens=64)
    begin(driver, 300)
    driver.step()
    assert sizes(driver)[-1] == [64], "alone it takes all of it"
    begin(driver, 200)
    driver.step()
    assert sizes(driver)[-1] == [32, 32]
    begin(driver, 5)
    driver.step()
    assert sizes(driver)[-1] == [32, 16, 5]
    driver.step()
    assert sizes(driver)[-1] == [1, 32, 31]
    driver.run()


def test_an_input_that_ends_in_a_step_is_not_split() -> None:
    """Its answer would begin a step later, and those of the others no sooner."""
    driver = Driver(budget=64, chunk_tokens=64)
    begin(driver, 124)
    driver.step()
    begin(driver, 40)
    driver.step()
    assert sizes(driver) == [[64], [60, 4]]
    driver.run()


def test_nothing_is_left_to_turns_that_cannot_be_admitted() -> None:
    driver = Driver(budget=64, chunk_tokens=64, running_max=1)
    begin(driver, 300, 5)
    driver.step()
    driver.step()
    assert sizes(driver) == [[64], [64]]
    driver.run()


def test_a_committed_turn_counts_as_one_that_waits_for_its_token() -> None:
    """Its first token does not wait for a large step of another turn's input."""
    driver = Driver(budget=512, chunk_tokens=64, mixed_tokens=16, listening_tokens=256)
    driver.open("l")
    driver.listen("l", prompt(40, 9))
    while driver.registry.unheard:
        driver.step()
    driver.plans.clear()
    begin(driver, 300)
    driver.step()
    driver.commit("l", 4)
    driver.step()
    assert sum(sizes(driver)[0]) == 64
    assert sum(sizes(driver)[1]) <= 16 and 1 in sizes(driver)[1]
    driver.run()


def test_a_long_input_alone_gets_whole_steps_to_its_end() -> None:
    driver = Driver("dense", 4, budget=64, mixed_tokens=16, chunk_tokens=64)
    driver.open("a")
    driver.submit("a", prompt(200), 1)
    assert [sum(row.count for row in driver.step().rows) for _ in range(4)] == [64, 64, 64, 8]
