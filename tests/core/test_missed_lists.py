"""Which list a session is in, and which it leaves: each test fails without a single statement."""

from holdfast.core.errors import UnknownToken
from holdfast.core.retention import Retention
from holdfast.core.session import Place
from holdfast.core.turn import TurnRequest
from tests.core.driver import VOCABULARY, Driver, prompt


def test_before_the_first_plan_nothing_is_to_be_fetched() -> None:
    registry = Driver().registry
    assert (registry.unfetched, registry.unheard) == (False, False)


def test_a_session_that_computes_is_not_at_rest() -> None:
    driver = Driver("dense", 4)
    session = driver.open("a")
    turn = driver.submit("a", prompt(9), 3)
    driver.until(lambda: turn.over)
    assert list(driver.registry.resting) == list(driver.registry.seals) == [session]
    driver.now += 100.0
    (row,) = driver.plan().rows
    assert row.sample is False and not driver.registry.seals, "its last token is computed"
    assert list(driver.registry.resting) == []
    driver.run()
    assert list(driver.registry.resting) == [session]
    driver.submit("a", prompt(9, 1), 3)
    assert driver.plan().rows
    assert list(driver.registry.resting) == []
    driver.run()
    driver.listen("a", prompt(9, 2))
    assert list(driver.registry.resting) == [session]
    assert driver.plan().rows
    assert (list(driver.registry.resting), list(driver.registry.listening)) == ([], [session])


def test_a_session_whose_retention_changes_was_used_last() -> None:
    driver = Driver("dense", 4)
    first, second = driver.open("a"), driver.open("b")
    for number, name in enumerate("ab"):
        driver.turn(name, 9, 2, number)
    driver.now = 7.0
    driver.scheduler.retain("a", Retention(50.0), driver.now)
    assert first.idle_since == 7.0
    assert list(driver.registry.resting) == [second, first]


def test_a_turn_that_is_there_is_expected_no_more() -> None:
    driver = Driver("dense", 4)
    session = driver.open("a")
    driver.turn("a", 9, 2, expect_return=500.0)
    assert [(key, name) for _, key, name in driver.registry.returns.entries()] == [(session.number, "a")]
    driver.submit("a", prompt(3, 1), 2)
    assert driver.registry.returns.entries() == []


def test_nothing_of_a_closed_session_is_expected() -> None:
    driver = Driver("dense", 4)
    driver.open("a")
    driver.turn("a", 9, 2, expect_return=500.0)
    driver.close("a")
    assert driver.registry.returns.entries() == []


def test_a_closed_session_has_no_copy_on_the_host() -> None:
    driver = Driver("dense", 4, host=50)
    session = driver.open("a")
    driver.turn("a", 9, 3)
    assert driver.scheduler.spill("a", driver.now)
    driver.run()
    assert driver.scheduler.restore("a", driver.now)
    driver.run()
    assert session.place is Place.HOME and list(driver.registry.moves.copied) == [session]
    driver.close("a")
    assert not driver.registry.moves.copied


def test_a_closed_session_is_recalled_no_more() -> None:
    driver = Driver("dense", 4, host=50)
    session = driver.open("a")
    driver.turn("a", 9, 3)
    assert driver.scheduler.spill("a", driver.now)
    driver.run()
    assert not driver.scheduler.recalls.ready(session, 5, forks=True), "its memory is to come back first"
    assert list(driver.registry.recalled) == [session]
    driver.scheduler.close("a", driver.now)
    assert not driver.registry.recalled


def test_a_restore_by_hand_that_is_cancelled_in_its_first_plan_is_not_in_it() -> None:
    driver = Driver("dense", 4, pages=10, host=50)
    session = driver.open("a")
    driver.turn("a", 9, 3)
    assert driver.scheduler.spill("a", driver.now)
    driver.run()
    driver.scheduler.planner.prefetch.expect(session, 60.0)
    assert driver.scheduler.restore("a", driver.now)
    assert session.place is Place.RETURNING and driver.registry.moves.pending
    driver.open("b")
    turn = driver.submit("b", prompt(33, 1), 2)
    plan = driver.plan()
    assert session.place is Place.AWAY and plan.moves == []
    driver.run()
    assert turn.over


def test_a_running_session_without_rows_in_flight_closes_at_once() -> None:
    driver = Driver("dense", 4)
    driver.open("a")
    turn = driver.submit("a", prompt(9), 20)
    driver.step()
    assert not turn.over and not driver.registry.flights
    driver.scheduler.close("a", driver.now)
    assert turn.over and "a" not in driver.registry.sessions


def test_a_history_whose_answers_have_unknown_tokens_is_refused() -> None:
    driver = Driver("dense", 4)
    history = [(TurnRequest("t", prompt(3), 2), [VOCABULARY - 1, VOCABULARY])]
    with driver.unchanged(UnknownToken):
        driver.scheduler.recover("a", "red", driver.now, Retention(None), history)
