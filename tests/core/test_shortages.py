"""Several shortages at once: room is made for each of them, and whoever waits for room is not overtaken."""

import pytest

from holdfast.core.layout import Component
from holdfast.core.policy import Share
from holdfast.core.turn import Turn
from tests.core.driver import Driver, prompt

PAGE = 16
PATIENCE = 60


def until_over(driver: Driver, turn: Turn) -> int:
    """How many steps it takes until a turn is over."""
    for step in range(PATIENCE):
        if turn.over:
            return step
        driver.step()
    raise AssertionError(f"the turn waits after {PATIENCE} steps")


def admitted(*turns: Turn) -> list[bool]:
    """Which turns have been admitted."""
    return [turn.admitted is not None for turn in turns]


# --- waiting turns ------------------------------------------------------------------------------------


def beside_an_answer(**policy: object) -> Driver:
    """A server of 20 pages, 8 of which an answer is going to fill in the end: 14 are free now."""
    driver = Driver("dense", PAGE, pages=20, **policy)
    driver.open("answer")
    driver.submit("answer", prompt(90), 30)
    driver.step()
    assert driver.counts()["FREE"] == 14
    return driver


def test_a_turn_without_room_is_not_overtaken_by_a_smaller_one() -> None:
    driver = beside_an_answer()
    large, small = driver.request(prompt(15 * PAGE, 1), 2), driver.request(prompt(PAGE, 2), 2)
    driver.step()
    assert admitted(large, small) == [False, False]
    until_over(driver, large)
    driver.run()
    assert small.over


def test_at_a_quota_a_turn_is_not_overtaken_by_a_smaller_one_of_its_tenant() -> None:
    driver = beside_an_answer(shares={"red": Share(0.75)})
    large, small = driver.request(prompt(10 * PAGE, 1), 2), driver.request(prompt(PAGE, 2), 2)
    other = driver.request(prompt(PAGE, 3), 2, "blue")
    driver.step()
    assert admitted(large, small, other) == [False, False, True]
    driver.run()
    assert large.over and small.over


@pytest.mark.parametrize("tenant", ["red", "blue"])
def test_nothing_is_computed_ahead_while_a_waiting_turn_lacks_room(tenant: str) -> None:
    driver = beside_an_answer()
    driver.open("open", tenant)
    driver.listen("open", prompt(2 * PAGE, 1))
    large = driver.request(prompt(15 * PAGE, 2), 2)
    assert not any(row.turn.is_open for row in driver.step().rows)
    until_over(driver, large)
    driver.run()
    assert driver.session("open").sequence.computed == 2 * PAGE - 1


def test_at_a_quota_nothing_of_its_tenant_is_computed_ahead() -> None:
    driver = beside_an_answer(shares={"red": Share(0.75)})
    for name, tenant in (("own", "red"), ("other", "blue")):
        driver.open(name, tenant)
        driver.listen(name, prompt(2 * PAGE, 1))
    large = driver.request(prompt(10 * PAGE, 2), 2)
    ahead = [row.turn.session_id for row in driver.step().rows if row.turn.is_open]
    assert (ahead, admitted(large)) == (["other"], [False])
    until_over(driver, large)


@pytest.mark.parametrize("crowd", [1, 2])
def test_a_committed_turn_has_its_place_when_those_before_it_are_aborted(crowd: int) -> None:
    """Nothing else calls for a plan then: no seal, no turn that waits."""
    driver = Driver("dense", PAGE, running_max=crowd)
    driver.open("a")
    driver.listen("a", prompt(9))
    driver.run()
    for seed in range(1, crowd + 1):
        driver.open(f"s{seed}")
    before = [driver.submit(f"s{seed}", prompt(9, seed), 30) for seed in range(1, crowd + 1)]
    driver.step()
    turn = driver.commit("a", 2)
    driver.step()
    assert turn.generated == 0
    for other in before:
        driver.scheduler.abort(other.session_id, other.request.turn_id, driver.now)
    driver.run()
    assert turn.over


def test_a_turn_that_its_quota_never_admits_gives_up_its_memory_beside_others() -> None:
    """Its session has a state and one of its last turn, which is not durable; a third is beyond the quota."""
    driver = Driver("hybrid", PAGE, slots=20, durable_turns=True, shares={"blue": Share(0.1)})
    driver.open("a", "blue")
    for seed in range(2):
        driver.turn("a", 5, 2, seed)
    assert driver.ledger.account("blue").held[driver.ledger.pool(Component.STATE).index] == 2
    driver.open("other")
    answer = driver.submit("other", prompt(9, 8), 2 * PATIENCE)
    driver.step()
    turn = driver.submit("a", prompt(5, 2), 2)
    until_over(driver, turn)
    assert not answer.over
    assert (turn.cached, driver.registry.counters.dropped) == (0, 1)


# --- more than one shortage ---------------------------------------------------------------------------


def full_of_windows(budget: int) -> tuple[Driver, Turn]:
    """A server whose 20 window pages are full of what rests, less one that an answer has to the end."""
    driver = Driver("window-only", 64, pages=20, budget=budget, shares={"blue": Share(0.25)})
    for seed in range(20):
        driver.open(f"s{seed}")
        driver.turn(f"s{seed}", 9, 1, seed)
    driver.open("answer")
    answer = driver.submit("answer", prompt(3, 90), 60)
    driver.step()
    assert driver.counts(Component.WINDOW) == {"TURN": 1, "SESSION": 19}
    return driver, answer


@pytest.mark.parametrize("budget", [64, 4096])
def test_a_turn_that_goes_in_by_smaller_rows_for_its_quota_makes_room_for_them(budget: int) -> None:
    driver, answer = full_of_windows(budget)
    turn = driver.request(prompt(900, 70), 3, "blue")
    if budget == 64:
        driver.step()
        driver.budget = 4096
    until_over(driver, turn)
    assert not answer.over


def test_whoever_has_room_in_its_quota_but_not_in_the_pool_keeps_others_from_the_pool() -> None:
    driver = Driver("dense", PAGE, pages=20, shares={"blue": Share(0.25)})
    for name in ("rests", "answers"):
        driver.open(name, "blue")
    driver.turn("rests", 2 * PAGE, 3)
    talk = driver.request(prompt(9, 3), 60)
    driver.submit("answers", prompt(2 * PAGE - 1, 1), 20)
    driver.until(lambda: driver.session("answers").sequence.planned == 2 * PAGE)
    assert driver.ledger.account("blue").held[0] == 5, "one more is beyond its quota"
    other = driver.request(prompt(9, 2), 2)
    with driver.starved("decode page", times=1) as struck:
        rows = driver.step().rows
    assert [row.turn for row in rows] == [talk], "the other tenant's turn has to wait as well"
    assert struck and driver.registry.counters.dropped == 1
    driver.step()
    assert (driver.session("answers").sequence.planned, admitted(other)) == (2 * PAGE + 1, [True])
    driver.run()


def test_open_inputs_share_what_a_step_computes_ahead() -> None:
    driver = Driver("dense", PAGE, listening_tokens=8)
    for seed, name in enumerate("ab"):
        driver.open(name)
        driver.listen(name, prompt(20, seed))
    sums = []
    while driver.registry.unheard:
        sums.append(sum(row.count for row in driver.step().rows))
    assert sums == [8, 8, 8, 8, 6, 0]
    assert [driver.session(name).sequence.computed for name in "ab"] == [19, 19]
