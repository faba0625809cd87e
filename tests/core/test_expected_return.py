"""When the next turn of a session is expected: slow ones leave the device first, fast ones last."""

import math

import pytest

from holdfast.core.layout import named_layout
from holdfast.core.policy import COMPARED_MAX, spill_order
from holdfast.core.session import Place
from tests.core.driver import LAYOUTS, Driver, prompt


def resting(hints: dict[str, tuple[float, float | None]], **more: object) -> Driver:
    """Idle sessions of equal size: when the last turn of each ended, and what it said of the next."""
    driver = Driver("dense", 4, pages=4000, **more)
    for number, (name, (ended, hint)) in enumerate(hints.items()):
        driver.open(name)
        driver.now = ended
        driver.turn(name, 9, 2, number, expect_return=hint)
    return driver


def order(driver: Driver, now: float) -> list[str]:
    return [session.id for session in spill_order(driver.registry.resting, now)]


def test_a_slow_tool_goes_before_the_longest_idle_and_a_fast_one_after_the_shortest() -> None:
    driver = resting({"old": (10.0, None), "young": (95.0, None), "slow": (98.0, 600.0), "fast": (99.0, 2.0)})
    assert order(driver, 100.0) == ["slow", "old", "young", "fast"]


def test_the_later_of_two_hints_goes_first() -> None:
    driver = resting({"soon": (90.0, 30.0), "late": (91.0, 500.0), "later": (92.0, 5000.0)})
    assert order(driver, 100.0) == ["later", "late", "soon"]


def test_a_hint_that_has_passed_counts_as_none() -> None:
    driver = resting({"hinted": (10.0, 50.0), "plain": (11.0, None)})
    assert order(driver, 55.0) == ["plain", "hinted"], "it is expected in five seconds"
    assert order(driver, 60.0) == ["hinted", "plain"], "both have been idle for about as long"
    assert order(driver, 1000.0) == ["hinted", "plain"]


def test_of_equals_one_without_a_hint_goes_first() -> None:
    driver = resting({"hinted": (90.0, 20.0), "plain": (90.0, None)})
    assert order(driver, 100.0) == ["plain", "hinted"], "ten seconds each"


@pytest.mark.parametrize("hint", [math.inf, 1e300, math.nan, -5.0])
def test_any_number_is_a_hint(hint: float) -> None:
    driver = resting({"plain": (10.0, None), "hinted": (99.0, hint)})
    assert order(driver, 100.0) == (["plain", "hinted"] if hint < 0 else ["hinted", "plain"])


def test_a_turn_that_was_submitted_is_expected_no_more() -> None:
    driver = resting({"back": (90.0, 900.0), "plain": (90.0, None)}, running_max=1)
    driver.open("busy")
    driver.submit("busy", prompt(3, 7), 5)
    driver.plan()
    turn = driver.submit("back", prompt(3, 8), 2)
    driver.land()
    assert driver.session("back").at_rest and driver.session("back").expected == 0.0
    driver.scheduler.abort("back", turn.request.turn_id, driver.now)
    driver.run()
    assert driver.session("back").expected == 0.0, "it came back early, and may do so again"


def test_a_turn_that_was_cut_gives_no_hint() -> None:
    driver = Driver("dense", 4)
    driver.open("a")
    turn = driver.submit("a", prompt(5), 20, expect_return=60.0)
    driver.until(lambda: turn.generated == 3)
    driver.scheduler.interrupt("a", driver.now, 2)
    driver.run()
    assert turn.state.value == "aborted" and driver.session("a").expected == 0.0


@pytest.mark.no_cover
def test_of_many_sessions_the_slow_go_first_and_the_fast_last() -> None:
    count = COMPARED_MAX + 20
    driver = resting({f"s{number}": (10.0 + number / 100, None) for number in range(count)})
    sessions = list(driver.registry.resting)
    plain = [session.id for session in spill_order(sessions, 40.0)]
    assert plain[COMPARED_MAX:] == [f"s{number}" for number in range(COMPARED_MAX, count)]
    slow, fast = sessions[-1], sessions[0]
    slow.expected, fast.expected = 1000.0, 41.0
    hinted = [session.id for session in spill_order(sessions, 40.0)]
    assert (hinted[0], hinted[-1]) == (slow.id, fast.id)
    assert sorted(hinted) == sorted(plain)
    for number, session in enumerate(sessions):
        session.expected = 1000.0 - number
    everyone = [session.id for session in spill_order(sessions, 40.0)]
    assert everyone[COMPARED_MAX:] == [session.id for session in sessions[COMPARED_MAX:]]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if named_layout(name, 1).full])
@pytest.mark.parametrize("slow", ["a", "b"])
def test_under_pressure_the_session_with_the_slow_tool_is_spilled(layout: str, slow: str) -> None:
    driver = Driver(layout, 4, pages=17, slots=4, host=40, checkpoints=0)
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        driver.turn(name, 18, 3, seed, expect_return=900.0 if name == slow else 1.0)
    driver.open("c")
    turn = driver.submit("c", prompt(25, 5), 2)
    driver.until(lambda: turn.over)
    away = [name for name in ("a", "b") if driver.session(name).place is not Place.HOME]
    assert away == [slow]
