"""What a commit and a revision of an open turn leave behind: times, deadlines, cuts, shared prompts."""

import pytest

from holdfast.core.turn import NEVER, TurnState
from tests.core.driver import STATEFUL, Driver, prompt


def test_a_commit_ends_the_deadline_of_the_open_turn_and_begins_its_own() -> None:
    driver = Driver("dense", 3)
    session = driver.open("a")
    driver.listen("a", prompt(5), deadline=10.0)
    driver.run()
    turn = driver.commit("a", 500, deadline=30.0)
    driver.now = 15.0
    driver.step()
    assert session.turn is turn, "the deadline of the open turn means nothing any more"
    driver.now = 31.0
    driver.run()
    assert session.turn is None and turn.state is TurnState.ABORTED


def test_a_committed_turn_comes_after_those_that_came_before_its_commit() -> None:
    driver = Driver("dense", 3)
    for name in ("a", "b"):
        driver.open(name)
    turn = driver.listen("a", prompt(5))
    driver.run()
    between = driver.submit("b", prompt(4, 1), 2)
    driver.now = 3.0
    driver.commit("a", 2)
    assert turn.number > between.number
    assert (turn.arrived, turn.admitted) == (3.0, 3.0)


def test_what_the_tree_has_of_an_input_is_looked_up_again_when_it_is_revised() -> None:
    driver = Driver("dense", 4, running_max=1)
    driver.request(prompt(21, 5), 2)
    driver.run()
    driver.open("a")
    turn = driver.listen("a", prompt(9))
    prompts = driver.scheduler.planner.prompts
    assert prompts.cached(turn) == 0
    driver.say("a", prompt(21, 5), 0)
    assert prompts.cached(turn) == 20


def test_what_follows_an_input_in_flight_is_no_revision() -> None:
    driver = Driver("dense", 4, overlap=True)
    driver.open("a")
    turn = driver.listen("a", prompt(9))
    driver.plan()
    driver.say("a", prompt(6, 1))
    assert turn.revised == NEVER
    assert [row.count for row in driver.plan().rows] == [6]
    driver.land()


def test_a_revision_that_rows_in_flight_held_up_is_computed_once_they_have_settled() -> None:
    driver = Driver("dense", 4, overlap=True)
    driver.open("a")
    driver.listen("a", prompt(9))
    driver.plan()
    driver.say("a", prompt(9, 1), 4)
    assert not driver.plan().rows and not driver.registry.queues.unheard
    driver.land()
    assert driver.registry.queues.unheard and driver.session().sequence.computed == 4
    driver.run()
    assert driver.session().sequence.computed == 12


def test_an_input_of_which_nothing_is_left_starts_from_what_others_have_computed() -> None:
    driver = Driver("dense", 4)
    driver.request(prompt(21, 5), 2)
    driver.run()
    driver.open("a")
    driver.listen("a", prompt(9))
    driver.run()
    before = driver.registry.counters.computed_tokens
    driver.say("a", (*prompt(21, 5), 1), 0)
    driver.run()
    assert driver.registry.counters.computed_tokens - before == 1, "all but the last token, which waits"


@pytest.mark.parametrize("layout", STATEFUL)
def test_a_revision_takes_cuts_along_that_lie_past_it(layout: str) -> None:
    driver = Driver(layout, 4, chunk_tokens=4, budget=4)
    driver.request(prompt(30), 2)
    driver.run()
    session = driver.open("a")
    driver.listen("a", (*prompt(22), *prompt(30, 7)))
    driver.until(lambda: session.sequence.computed > 4)
    mark = session.sequence.mark
    assert mark is not None
    mark.cuts = [3000]  # Where the tree branches from the old input.
    limit = session.sequence.computed - 1
    driver.say("a", prompt(9, 8), limit)
    assert mark.cuts == [] or session.sequence.mark is None
    driver.run()


def test_a_commit_that_revises_its_input_shares_its_prompt_as_any_first_turn() -> None:
    driver = Driver("dense", 4, overlap=True)
    driver.open("a")
    driver.listen("a", prompt(30))
    driver.plan()
    driver.say("a", prompt(22, 3), 10)
    driver.commit("a", 2)
    driver.run()
    other = driver.request((*prompt(30)[:10], *prompt(22, 3)), 2)
    driver.run()
    assert other.cached == 28
