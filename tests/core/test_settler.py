"""Settling: results that are wrong, steps that fail, seals that are lost, moves that do not arrive."""

import pytest

from holdfast.core.layout import Component, Tier
from holdfast.core.plan import StepResult
from holdfast.core.registry import Plan
from holdfast.core.session import Life, Place
from tests.core.driver import LAYOUTS, Driver, prompt

FULL, STATE = Component.FULL, Component.STATE


def decoding(layout: str = "hybrid", **more: object):
    """Two sessions of 10 known tokens, each with a turn that has generated two."""
    driver = Driver(layout, 3, **more)
    turns = {}
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        driver.turn(name, 7, 3, seed)
    for seed, name in enumerate(("a", "b")):
        turns[name] = driver.submit(name, prompt(4, seed + 5), 8)
    driver.until(lambda: turns["b"].generated == 2)
    return driver, turns


def spoil_once(driver: Driver, change) -> None:
    """Let the next result that comes back be changed."""

    def spoil(plan, result):
        driver.spoil = None
        change(result)
        return result

    driver.spoil = spoil


def finished(driver: Driver, turns) -> None:
    """Both turns have said what they must say, to the last token."""
    driver.run()
    for seed, (name, turn) in enumerate(turns.items()):
        assert turn.state.value == "finished" and turn.generated == 8
        start = len(driver.tokens(name)) - 8
        assert driver.tokens(name)[start:] == driver.says(driver.tokens(name)[:start], 8)
        assert driver.heard[turn.request.turn_id] == driver.tokens(name)[start:]
        assert driver.tokens(name)[10:14] == list(prompt(4, seed + 5))


# --- what comes back ---


def test_an_executor_may_say_that_a_turn_is_finished() -> None:
    driver, turns = decoding()

    def stop(result: StepResult) -> None:
        result.rows[0].finish = "stop"

    spoil_once(driver, stop)
    driver.step()
    assert turns["a"].state.value == "finished" and turns["a"].generated == 3
    assert [event.reason for event in driver.events if event.kind == "finished"][-1] == "stop"
    driver.run()
    assert driver.session("a").sequence.computed == 17


@pytest.mark.no_cover
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([], "0 tokens came back where 1 to 1 were possible"),
        ([1, 2], "2 tokens came back where 1 to 1 were possible"),
        ([1000], "token 1000 is not in the vocabulary of 1000"),
        ([-1], "token -1 is not in the vocabulary of 1000"),
    ],
)
def test_a_row_with_a_wrong_result_is_tried_once_more(layout: str, tokens: list[int], said: str) -> None:
    driver, turns = decoding(layout)

    def spoil(result: StepResult) -> None:
        result.rows[0].tokens = tokens

    spoil_once(driver, spoil)
    driver.step()
    assert turns["a"].retracts == 1 and turns["b"].generated == 3, "the other row stands"
    finished(driver, turns)
    turn = driver.submit("a", prompt(3, 9), 4)
    for _ in range(2):
        driver.until(lambda: turn.state.value == "running")
        spoil_once(driver, spoil)
        driver.step()
    assert turn.state.value == "failed"
    assert [event.reason for event in driver.events if event.kind == "failed"] == [said]


def test_tokens_that_nobody_asked_for_are_a_fault() -> None:
    driver = Driver("dense", 3, budget=4)
    driver.open("a")
    turn = driver.submit("a", prompt(10), 3)

    def spoil(result: StepResult) -> None:
        result.rows[0].tokens = [5]

    spoil_once(driver, spoil)
    driver.step()
    assert turn.retracts == 1
    driver.run()
    assert driver.tokens("a")[10:] == driver.says(list(prompt(10)), 3)


def test_a_row_that_says_it_cannot_be_computed_fails_its_turn_at_once() -> None:
    driver, turns = decoding()

    def spoil(result: StepResult) -> None:
        result.rows[0].error = "numeric_error"

    spoil_once(driver, spoil)
    driver.step()
    assert turns["a"].state.value == "failed" and turns["a"].retracts == 0
    assert [event.reason for event in driver.events if event.kind == "failed"] == ["numeric_error"]
    assert len(driver.tokens("a")) == 10 and driver.session("a").sequence.computed == 10
    again = driver.turn("a", 2, 2, 30)
    assert (again.cached, again.computed) == (10, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_of_a_turn_that_is_being_aborted_does_not_save_it(layout: str) -> None:
    driver, turns = decoding(layout)
    driver.plan()
    driver.scheduler.abort("a", turns["a"].request.turn_id, driver.now, keep=1)

    def spoil(result: StepResult) -> None:
        result.rows[0].tokens = []

    spoil_once(driver, spoil)
    driver.settle()
    assert turns["a"].state.value == "aborted"
    assert len(driver.tokens("a")) == 10 + 4 + 1, "what the client asked to keep is kept"
    driver.run()
    again = driver.turn("a", 2, 2, 30)
    assert driver.tokens("a")[-2:] == driver.says(driver.tokens("a")[:-2], 2)
    assert again.cached >= 10


# --- steps that fail ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_missing_rows_fail_the_whole_step(layout: str) -> None:
    driver, turns = decoding(layout)
    spoil_once(driver, lambda result: result.rows.pop())
    driver.step()
    assert [turn.retracts for turn in turns.values()] == [1, 1]
    assert [turn.failures for turn in turns.values()] == [1, 1]
    finished(driver, turns)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_failed_step_voids_the_plans_made_after_it(layout: str) -> None:
    driver, turns = decoding(layout)
    driver.plan()
    later = driver.plan()
    driver.settle(error="lost")
    assert later.void
    assert [turn.failures for turn in turns.values()] == [1, 1]
    driver.settle()
    assert [turn.retracts for turn in turns.values()] == [1, 1]
    finished(driver, turns)


def test_a_turn_that_was_only_in_a_later_plan_is_not_to_blame() -> None:
    driver, _ = decoding()
    driver.open("c")
    third = driver.submit("c", prompt(4, 20), 8)
    driver.budget = 2
    driver.plan()
    driver.budget = 64
    driver.plan()
    assert third.state.value == "running"
    driver.settle(error="lost")
    assert (third.retracts, third.failures) == (1, 0)
    driver.settle()
    driver.run()
    assert third.generated == 8


def test_a_turn_that_is_being_aborted_ends_with_the_step_that_failed() -> None:
    driver, turns = decoding()
    driver.plan()
    driver.scheduler.abort("a", turns["a"].request.turn_id, driver.now)
    driver.settle(error="lost")
    assert turns["a"].state.value == "aborted" and len(driver.tokens("a")) == 10
    assert turns["b"].state.value == "queued"


def test_closing_sessions_close_with_the_step_that_failed() -> None:
    driver, _ = decoding()
    driver.plan()
    driver.scheduler.close("a", driver.now)
    driver.settle(error="lost")
    assert "a" not in driver.registry.sessions
    driver.run()


@pytest.mark.parametrize("gone", [False, True])
def test_memory_whose_copy_was_lost_is_given_up(gone: bool) -> None:
    driver = Driver("hybrid", 16)
    driver.open("a")
    driver.turn("a", 20, 4)
    child = driver.scheduler.fork("a", "b", driver.now)
    assert child.sequence.computed == 24
    plan = driver.plan()
    assert len(plan.copies) == 2
    if gone:
        driver.scheduler.close("b", driver.now)
    driver.settle(error="lost")
    if gone:
        assert driver.registry.tree.leases.records.keys() == {
            driver.session("a").sequence.lease.record.serial
        }
        return
    assert (child.sequence.known, child.sequence.computed) == (24, 0)
    history = driver.tokens("b")
    driver.turn("b", 3, 2, 4)
    assert driver.tokens("b")[-2:] == driver.says([*history, *prompt(3, 4)], 2)


def test_a_copy_may_settle_after_its_owner_is_gone() -> None:
    driver = Driver("hybrid", 16)
    driver.open("a")
    driver.turn("a", 20, 4)
    driver.scheduler.fork("a", "b", driver.now)
    driver.plan()
    driver.scheduler.close("b", driver.now)
    driver.settle()
    driver.run()
    assert driver.turn("a", 3, 2, 4).cached == 24


# --- seals ---


@pytest.mark.parametrize("how", ["step", "row"])
@pytest.mark.parametrize("then", ["rest", "turn", "close"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_seal_that_is_lost_is_made_up_for(layout: str, then: str, how: str) -> None:
    driver = Driver(layout, 3)
    session = driver.open("a")
    driver.turn("a", 7, 3)
    turn = driver.submit("a", prompt(5, 1), 4)
    driver.until(lambda: turn.over)
    history = driver.tokens("a")
    driver.plan()
    assert session.life is Life.SEALING and session.unsettled == 1
    if then == "turn":
        driver.submit("a", prompt(2, 2), 3)
    elif then == "close":
        driver.scheduler.close("a", driver.now)
    if how == "step":
        driver.settle(error="lost")
    else:

        def spoil(result: StepResult) -> None:
            result.rows[0].error = "numeric_error"

        spoil_once(driver, spoil)
        driver.settle()
    if then == "close":
        assert session.life is Life.CLOSED
        return
    assert session.life is (Life.QUEUED if then == "turn" else Life.IDLE)
    assert session.sequence.computed == (10 if driver.layout.state else 18), "nothing that is in doubt"
    if then == "rest":
        driver.submit("a", prompt(2, 2), 3)
    driver.run()
    expected = [*history, *prompt(2, 2)]
    assert driver.tokens("a") == expected + driver.says(expected, 3)


def test_a_lost_seal_that_cannot_even_fall_back_drops_the_memory() -> None:
    driver = Driver("hybrid", 16)
    session = driver.open("a")
    driver.turn("a", 20, 4)
    driver.turn("a", 20, 4, 1)
    driver.scheduler.fork("a", "b", driver.now)  # All whole pages are the tree's now, up to 48 tokens.
    driver.run()
    turn = driver.submit("a", prompt(3, 2), 3)
    driver.until(lambda: turn.over)
    driver.plan()
    # The mark's point is lost, and only one inside the leased prefix is left.
    for point in [point for point in session.sequence.points if point.length >= 48]:
        session.sequence.drop_point(point)
    assert [point.length for point in session.sequence.points] == [24]
    history = driver.tokens("a")
    with driver.starved("", "chunk", "seal", "fork copy", "decode page", "first chunk"):
        driver.settle(error="lost")
    assert session.sequence.computed == 0 and session.life is Life.IDLE
    driver.turn("a", 3, 2, 3)
    assert driver.tokens("a")[-2:] == driver.says([*history, *prompt(3, 3)], 2)


# --- moves between tiers ---


@pytest.mark.no_cover
@pytest.mark.parametrize("how", ["flag", "missing flags", "step"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_spill_that_did_not_arrive_leaves_the_memory_at_home(layout: str, how: str) -> None:
    driver = Driver(layout, 3, host=100)
    session = driver.open("a")
    driver.turn("a", 7, 3)
    own = driver.registry.moves.parcel_units(session)
    driver.scheduler.spill("a", driver.now)
    driver.plan()
    lose_moves(driver, how)
    assert session.place is Place.HOME and session.parcel is None
    assert driver.registry.counters.spills == 0
    driver.run()
    for component in driver.layout.components:
        assert driver.counts(component, Tier.HOST) == {"FREE": 100}
        assert driver.counts(component)["SESSION"] == own[component]
    turn = driver.turn("a", 2, 2, 1)
    assert (turn.cached, turn.computed) == (10, 3)


@pytest.mark.no_cover
@pytest.mark.parametrize("how", ["flag", "missing flags", "step"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restore_that_did_not_arrive_is_computed_again(layout: str, how: str) -> None:
    driver = Driver(layout, 3, host=100)
    session = driver.open("a")
    driver.turn("a", 7, 3)
    history = driver.tokens("a")
    driver.scheduler.spill("a", driver.now)
    driver.run()
    driver.submit("a", prompt(2, 1), 2)
    driver.plan()
    assert session.place is Place.RETURNING
    lose_moves(driver, how)
    assert session.place is Place.HOME and session.sequence.computed == 0
    driver.run()
    expected = [*history, *prompt(2, 1)]
    assert driver.tokens("a") == expected + driver.says(expected, 2)
    for component in driver.layout.components:
        assert driver.counts(component, Tier.HOST) == {"FREE": 100}


def lose_moves(driver: Driver, how: str) -> None:
    """Settle the plan in flight, without its moves."""

    def spoil(result: StepResult) -> None:
        result.moved = [] if how == "missing flags" else [False, *result.moved[1:]]

    if how == "step":
        driver.settle(error="lost")
    else:
        spoil_once(driver, spoil)
        driver.settle()


def test_a_move_of_a_cancelled_spill_completes_nothing() -> None:
    driver = Driver("dense", 3, host=100)
    session = driver.open("a")
    driver.turn("a", 7, 3)
    driver.turn("a", 2, 2)
    driver.scheduler.spill("a", driver.now)
    driver.plan()
    driver.scheduler.rewind("a", 1, driver.now)
    assert session.place is Place.HOME
    assert driver.counts(FULL, Tier.HOST).get("RETIRING", 0) > 0, "the copy is still being written"
    driver.settle()
    assert session.place is Place.HOME and session.sequence.computed == 10
    driver.run()
    assert driver.counts(FULL, Tier.HOST) == {"FREE": 100}


# --- findings while rows are in flight ---


@pytest.mark.parametrize("when", ["running", "sealing", "resting", "closing"])
def test_memory_that_a_finding_has_tainted_goes_as_soon_as_no_row_names_it(when: str) -> None:
    driver = Driver("hybrid", 3)
    session = driver.open("a")
    driver.turn("a", 7, 3)
    history = driver.tokens("a")
    if when != "resting":
        turn = driver.submit("a", prompt(4, 1), 3)
        driver.until(lambda: turn.over if when == "sealing" else turn.generated == 1)
        history = driver.tokens("a") if when == "sealing" else history
    else:
        driver.open("b")
        driver.submit("b", prompt(4, 1), 3)
        driver.step()
    first = driver.plan()
    driver.plan()
    if when == "closing":
        driver.scheduler.close("a", driver.now)
    full = session.sequence.full
    assert full is not None
    driver.ledger.pool(FULL).free.insert(0, full.units[0])
    events = driver.scheduler.settle(first, driver.compute(first), driver.now)
    driver.device.settled(first)
    assert [event.kind for event in events].count("finding") == 1
    driver.land()
    driver.run()
    if when == "closing":
        assert session.life is Life.CLOSED
        return
    assert session.life is Life.IDLE and not driver.registry.queues.tainted
    assert session.sequence.computed == 0, "not one unit of it is used again"
    assert driver.tokens("a") == history
    driver.turn("a", 2, 2, 9)
    assert driver.tokens("a")[-2:] == driver.says([*history, *prompt(2, 9)], 2)


def test_a_session_that_closes_in_a_failed_step_leaves_nothing_that_the_step_was_to_copy() -> None:
    driver = Driver(page_size=16, leave_history=True)
    driver.open("a")
    driver.turn("a", 21, 4)
    driver.run()
    driver.scheduler.fork("a", "b", driver.now)
    history = driver.tokens("b")
    driver.submit("b", prompt(3, seed=9), 4)
    plan = driver.plan()
    assert plan.copies, "the fork copies the partly filled page"
    driver.scheduler.close("b", driver.now)
    driver.settle(error="the executor raised")
    assert "b" not in driver.scheduler.registry.sessions
    driver.open("c")
    turn = driver.submit("c", (*history, 7), 3)
    driver.run()
    assert turn.cached == 16, "only the shared whole page, which the device has verified, can be leaned on"


def test_a_recount_in_an_idle_moment_drops_whom_it_finds_at_fault() -> None:
    driver = Driver("hybrid", 3)
    session = driver.open("a")
    driver.turn("a", 7, 3)
    assert driver.scheduler.recount() == []
    full = session.sequence.full
    assert full is not None
    unit = full.units[0]
    driver.ledger.pool(FULL).free.insert(0, unit)
    (finding,) = driver.scheduler.recount()
    assert (finding.kind, finding.healed) == ("claimed while free", "quarantined")
    assert [event.kind for event in driver.scheduler.take_events()] == ["finding"]
    assert session.sequence.computed == 0 and driver.ledger.pool(FULL).quarantine == [unit]
    assert driver.scheduler.recount() == []
    assert driver.turn("a", 3, 2, 1).computed == 8, "two pages of it are in the tree, and were never in doubt"


# --- answers that end while a row is in flight ---


def stop(plan: Plan, result: StepResult) -> StepResult:
    """Every answer ends with what it has just said."""
    for row, out in zip(plan.rows, result.rows, strict=True):
        if row.sample:
            out.finish = "stop"
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_row_in_flight_when_an_answer_ends_is_its_seal(layout: str) -> None:
    driver = Driver(layout, 3, overlap=True)
    session = driver.open("a")
    turn = driver.submit("a", prompt(5), 30)
    driver.until(lambda: turn.generated == 4)
    driver.plan()
    driver.spoil = stop
    driver.settle()
    driver.spoil = None
    assert (session.life, session.unsettled, turn.generated) == (Life.SEALING, 1, 5)
    driver.settle()
    assert session.life is Life.IDLE and session.sequence.computed == session.sequence.known == 10
    following = driver.turn("a", 3, 2, 1)
    assert (following.cached, following.computed) == (10, 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_that_ends_while_a_row_is_in_flight_closes_after_it(layout: str) -> None:
    driver = Driver(layout, 3, overlap=True)
    turn = driver.request(prompt(5), 30)
    driver.until(lambda: turn.generated == 4)
    driver.plan()
    driver.spoil = stop
    driver.settle()
    driver.spoil = None
    assert driver.kinds("r1") == [("finished", "r1")] and "r1" in driver.registry.sessions
    driver.settle()
    assert driver.kinds("r1") == [("finished", "r1"), ("closed", "")]
    assert not driver.registry.sessions


@pytest.mark.parametrize("overlap", [False, True])
def test_seals_are_counted_with_what_was_computed(overlap: bool) -> None:
    driver = Driver("hybrid", 3, overlap=overlap)
    driver.open("a")
    driver.turn("a", 7, 3)
    assert driver.session().sequence.computed == 10
    assert driver.registry.counters.computed_tokens == 10


def test_a_recount_in_parts_ends_after_all_of_them_and_finds_the_same() -> None:
    driver = Driver("hybrid", 3)
    session = driver.open("a")
    driver.turn("a", 7, 3)
    parts = 1
    while not driver.scheduler.recount_some(1):
        parts += 1
    assert parts > 3 and driver.scheduler.take_events() == []
    full = session.sequence.full
    assert full is not None
    unit = full.units[0]
    driver.ledger.pool(FULL).free.insert(0, unit)
    while not driver.scheduler.recount_some(1):
        pass
    assert [event.kind for event in driver.scheduler.take_events()] == ["finding"]
    assert session.sequence.computed == 0 and driver.ledger.pool(FULL).quarantine == [unit]
