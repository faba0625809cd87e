"""Forced tokens: known at once, computed like a prompt, sampled never; seals of several tokens."""

from collections.abc import Callable

import pytest

from holdfast.core.layout import Component
from holdfast.core.plan import RowResult, StepResult
from holdfast.core.registry import Plan
from holdfast.core.session import Life
from holdfast.core.turn import KEEP_ALL, Turn, TurnEvent
from tests.core.driver import LAYOUTS, Driver, prompt

RUN = [7, 8, 9, 10, 11]
BOTH = pytest.mark.parametrize("overlap", [False, True])
EVERY = pytest.mark.parametrize("layout", LAYOUTS)
Spoil = Callable[[Plan, StepResult], StepResult]


def forcing(runs: dict[int, list[int]], finish: dict[int, str] | None = None) -> Spoil:
    """An executor that adds `runs[n]` to the result with which a turn has generated n tokens.

    With `finish[n]` the result that ends at n tokens, forced ones included, ends the turn.
    """

    def spoil(plan: Plan, result: StepResult) -> StepResult:
        for row, out in zip(plan.rows, result.rows, strict=False):
            if row.sample and not row.turn.over:
                run = runs.get(row.turn.generated + len(out.tokens), [])
                left = row.turn.request.max_tokens - row.turn.generated - len(out.tokens)
                out.tokens, out.forced = out.tokens + run[:left], len(run[:left])
                out.finish = (finish or {}).get(row.turn.generated + len(out.tokens))
        return result

    return spoil


def said(driver: Driver, history: list[int], count: int, runs: dict[int, list[int]]) -> list[int]:
    """What a turn of `count` tokens says after a history, without any memory."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += driver.says(history + tokens, 1)
        tokens += runs.get(len(tokens), [])
    return tokens[:count]


def ran_ahead(layout: str, **more: object) -> tuple[Driver, Turn]:
    """A turn with 10 known tokens of history that has said 2 tokens and 5 forced ones; a row is in flight."""
    driver = Driver(layout, 3, overlap=True, **more)
    driver.open("a")
    driver.turn("a", 7, 3)
    driver.spoil = forcing({2: RUN})
    turn = driver.submit("a", prompt(4, 5), 20, turn_id="forced")
    driver.until(lambda: turn.generated == 7)
    return driver, turn


def expected(driver: Driver, count: int) -> list[int]:
    """The first `count` tokens of the turn that `ran_ahead`."""
    return said(driver, driver.tokens("a")[:14], count, {2: RUN})


@pytest.mark.no_cover
@BOTH
@EVERY
def test_forced_tokens_are_said_with_the_token_before_them_and_cost_no_step(
    layout: str, overlap: bool
) -> None:
    runs = {2: RUN, 8: [3], 12: [5, 6]}
    driver = Driver(layout, 3, overlap=overlap)
    driver.open("a")
    driver.spoil = forcing(runs)
    turn = driver.submit("a", prompt(7), 16)
    driver.run()
    plain = Driver(layout, 3, overlap=overlap)
    plain.open("a")
    plain.turn("a", 7, 16)
    assert driver.heard[turn.request.turn_id] == said(driver, list(prompt(7)), 16, runs)
    assert driver.tokens("a")[7:] == driver.heard[turn.request.turn_id]
    assert turn.generated == 16
    sampled = [event for event in driver.events if event.kind == "tokens"]
    assert [len(event.tokens) for event in sampled] == [1, 6, 2, 1, 1, 3, 1, 1]
    rows = sum(len(plan.rows) for plan in driver.plans)
    assert rows < sum(len(plan.rows) for plan in plain.plans) - 4
    assert driver.session().sequence.computed == 23
    assert driver.registry.counters.computed_tokens == 23 and driver.registry.counters.generated_tokens == 16


@EVERY
def test_the_sample_of_a_row_in_flight_is_withdrawn(layout: str) -> None:
    driver, turn = ran_ahead(layout)
    (row,) = driver.registry.flights[0].rows
    assert (row.start, row.count, row.sample, turn.awaiting) == (15, 1, False, 0)
    (chunk,) = driver.plan().rows
    assert (chunk.start, chunk.count, chunk.tokens, chunk.sample) == (16, 5, RUN, True)
    assert turn.awaiting == 1
    driver.settle()
    assert turn.generated == 7, "nothing was sampled"
    (after,) = driver.plan().rows
    assert (after.start, after.count, after.tokens) == (21, 1, [])
    driver.run()
    assert driver.heard["forced"] == expected(driver, 20)


def test_other_turns_of_the_step_keep_their_samples() -> None:
    driver = Driver("hybrid", 3, overlap=True)
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        driver.submit(name, prompt(4, seed), 9, turn_id=name)
    driver.until(lambda: driver.session("a").turn.generated == 1)

    def only_a(plan: Plan, result: StepResult) -> StepResult:
        rows = result.rows
        assert [row.turn.session_id for row in plan.rows] == ["a", "b"]
        rows[0] = RowResult(rows[0].tokens + RUN, forced=len(RUN))
        return result

    driver.spoil = only_a
    driver.step()
    driver.spoil = None
    (mine, other) = driver.registry.flights[0].rows
    assert (mine.sample, other.sample) == (False, True)
    driver.run()
    assert driver.heard["b"] == driver.says(list(prompt(4, 1)), 9)
    assert driver.heard["a"] == said(driver, list(prompt(4)), 9, {2: RUN})


@BOTH
@EVERY
def test_a_run_is_computed_in_chunks_and_sampled_after_the_last(layout: str, overlap: bool) -> None:
    driver = Driver(layout, 3, overlap=overlap, chunk_tokens=2)
    driver.open("a")
    driver.spoil = forcing({1: RUN})
    turn = driver.submit("a", prompt(2), 9)
    driver.until(lambda: turn.generated == 6)
    first = len(driver.plans)
    driver.run()
    rows = [(row.count, row.sample) for plan in driver.plans[first:] for row in plan.rows]
    assert rows[:3] == [(2, False), (2, False), (1 if overlap else 2, True)]
    assert driver.tokens("a")[2:] == said(driver, list(prompt(2)), 9, {1: RUN})


def test_a_run_that_finds_no_room_is_computed_in_smaller_parts() -> None:
    driver, turn = ran_ahead("dense")
    with driver.starved("chunk", times=2) as struck:
        (chunk,) = driver.plan().rows
    assert struck and chunk.count == 2 and not chunk.sample
    driver.run()
    assert driver.heard["forced"] == expected(driver, 20) and turn.retracts == 0


def test_a_step_computes_no_more_of_a_run_than_its_budget() -> None:
    driver, _ = ran_ahead("window")
    driver.budget = 3
    (chunk,) = driver.plan().rows
    assert (chunk.count, chunk.sample) == (3, False)
    driver.run()
    assert driver.heard["forced"] == expected(driver, 20)


# --- turns that end otherwise ---


@pytest.mark.no_cover
@EVERY
@pytest.mark.parametrize("planned", [False, True])
def test_a_turn_with_a_run_is_taken_back_and_goes_on(layout: str, planned: bool) -> None:
    driver, turn = ran_ahead(layout)
    if planned:
        driver.plan()
    turn.will_end(TurnEvent.RETRACT, "memory is short")
    driver.land()
    assert (turn.state.value, turn.retracts) == ("queued", 1)
    driver.run()
    assert driver.heard["forced"] == expected(driver, 20)


@pytest.mark.no_cover
@EVERY
@pytest.mark.parametrize("keep", [None, 0, 1, 2, 4, 7, KEEP_ALL])
@pytest.mark.parametrize("planned", [False, True])
def test_a_cut_inside_a_run_keeps_exactly_what_was_asked_for(
    layout: str, keep: int | None, planned: bool
) -> None:
    driver, turn = ran_ahead(layout)
    whole = expected(driver, 8)
    if planned:
        driver.plan()
    driver.scheduler.abort("a", "forced", 0.0, keep)
    driver.land()
    driver.run()
    assert turn.state.value == "aborted"
    kept = {None: None, KEEP_ALL: 8 if planned else 7}.get(keep, keep)
    history = driver.tokens("a")
    assert history[14:] == ([] if kept is None else whole[:kept])
    assert len(history) == (10 if kept is None else 14 + kept)
    driver.spoil = None
    following = driver.turn("a", 3, 4, 9)
    assert driver.heard[following.request.turn_id] == driver.says(history + list(prompt(3, 9)), 4)


@pytest.mark.no_cover
@EVERY
@pytest.mark.parametrize("how", ["before it", "with it"])
def test_a_failed_step_leaves_the_run_known(layout: str, how: str) -> None:
    driver, turn = ran_ahead(layout)
    if how == "with it":
        driver.plan()
        driver.settle()
    driver.settle("the executor raised")
    driver.land()
    assert turn.generated == 7 and turn.awaiting == 0
    driver.run()
    assert driver.heard["forced"] == expected(driver, 20)


@EVERY
def test_a_session_is_closed_inside_a_run(layout: str) -> None:
    driver, _ = ran_ahead(layout)
    driver.plan()
    driver.close("a")
    assert driver.kinds("a")[-2:] == [("aborted", "forced"), ("closed", "")]
    driver.scheduler.flush()
    driver.run()
    assert driver.all_free()


def test_a_deadline_inside_a_run_keeps_what_it_says() -> None:
    driver = Driver("hybrid", 3, overlap=True)
    driver.open("a")
    driver.spoil = forcing({2: RUN})
    turn = driver.submit("a", prompt(4), 20, deadline=5.0, on_abort=4)
    driver.until(lambda: turn.generated == 7)
    driver.now = 6.0
    driver.run()
    assert turn.state.value == "aborted" and turn.generated == 4
    assert driver.tokens("a")[4:] == said(driver, list(prompt(4)), 4, {2: RUN})


# --- turns that end with a run, and their seals ---


def ending(layout: str, overlap: bool, reason: str, **more: object) -> tuple[Driver, Turn]:
    """A turn of 10 tokens in all that has just finished, its last five forced."""
    driver = Driver(layout, 3, overlap=overlap, **more)
    driver.open("a")
    limit = 7 if reason == "length" else 30
    driver.spoil = forcing({2: RUN}, {7: "stop"} if reason == "stop" else None)
    turn = driver.submit("a", prompt(3), limit)
    driver.until(lambda: turn.over)
    driver.spoil = None
    assert turn.generated == 7 and driver.events[-1].reason == reason
    return driver, turn


@pytest.mark.no_cover
@BOTH
@EVERY
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_seal_computes_a_whole_run(layout: str, overlap: bool, reason: str) -> None:
    driver, turn = ending(layout, overlap, reason)
    session = driver.session()
    assert session.life is Life.SEALING and session.unsettled == overlap
    assert turn.unsealed == (5 if overlap else 6), "a row in flight computes one"
    driver.land()
    assert session in driver.registry.seals and session in driver.registry.resting
    (seal,) = driver.plan().rows
    assert (seal.count, seal.sample, seal.turn) == (turn.unsealed, False, turn)
    driver.run()
    assert session.life is Life.IDLE and session.sequence.computed == session.sequence.known == 10
    assert driver.registry.counters.computed_tokens == 10
    following = driver.turn("a", 3, 2, 1)
    assert (following.cached, following.computed) == (10, 4)
    assert driver.heard[following.request.turn_id] == driver.says(driver.tokens("a")[:13], 2)


@EVERY
@pytest.mark.parametrize(("budget", "chunk"), [(4096, 2), (2, 2048)])
def test_a_long_run_is_sealed_in_several_rows(layout: str, budget: int, chunk: int) -> None:
    driver, _ = ending(layout, True, "stop", chunk_tokens=chunk)
    driver.land()
    driver.budget = budget
    seals: list[int] = []
    while driver.registry.seals:
        seals += [row.count for row in driver.plan().rows]
        driver.land()
    assert seals == [2, 2, 1]
    assert driver.session().life is Life.IDLE and driver.session().sequence.computed == 10


@EVERY
@pytest.mark.parametrize("sealed", [0, 2])
def test_a_turn_that_follows_before_the_seal_counts_the_run_as_cached(layout: str, sealed: int) -> None:
    driver, _ = ending(layout, True, "stop")
    driver.land()
    if sealed:
        driver.budget = sealed
        driver.plan()
        driver.land()
        driver.budget = 4096
    assert driver.registry.seals
    following = driver.turn("a", 3, 2, 1)
    assert (following.cached, following.known_before) == (10, 10)
    assert following.computed == 4 + 5 - sealed
    assert driver.heard[following.request.turn_id] == driver.says(driver.tokens("a")[:13], 2)


def test_memory_that_was_dropped_does_not_count_as_cached() -> None:
    driver, _ = ending("dense", False, "length")
    driver.registry.give_up(driver.session())
    following = driver.turn("a", 3, 2, 1)
    assert following.cached == 0


def test_a_turn_that_follows_the_row_in_flight_takes_the_rest_along() -> None:
    driver, turn = ending("hybrid", True, "stop")
    following = driver.submit("a", prompt(3, 1), 2)
    driver.land()
    assert not driver.registry.seals, "its turn computes what is left"
    driver.run()
    assert following.cached == 10 and turn.generated == 7
    assert driver.heard[following.request.turn_id] == driver.says(driver.tokens("a")[:13], 2)


def test_a_seal_of_a_run_that_finds_no_page_is_skipped() -> None:
    driver, _ = ending("dense", False, "length")
    with driver.starved("seal") as struck:
        assert not driver.plan().rows
    assert struck and driver.session().life is Life.IDLE
    driver.land()
    assert driver.turn("a", 3, 2, 1).cached == 10


@EVERY
def test_a_lost_row_of_a_seal_is_not_made_up_for(layout: str) -> None:
    driver, _ = ending(layout, True, "stop")
    driver.land()
    driver.budget = 2
    driver.plan()
    driver.settle("the executor raised")
    session = driver.session()
    assert session.life is Life.IDLE and not driver.registry.seals
    driver.budget = 4096
    following = driver.turn("a", 3, 2, 1)
    assert driver.heard[following.request.turn_id] == driver.says(driver.tokens("a")[:13], 2)


@EVERY
def test_a_request_of_its_own_is_not_sealed(layout: str) -> None:
    driver = Driver(layout, 3, overlap=True, leave_history=True)
    driver.spoil = forcing({2: RUN}, {7: "stop"})
    turn = driver.request(prompt(3), 30)
    driver.until(lambda: turn.over)
    driver.land()
    driver.run()
    assert driver.kinds("r1") == [("finished", "r1"), ("closed", "")]


# --- what an executor may not return ---


@BOTH
@pytest.mark.parametrize(
    ("tokens", "forced", "said_of_it"),
    [
        ([7], 1, "0 tokens came back"),
        ([7, 8, 9], 1, "2 tokens came back"),
        ([], -1, "forced tokens came back"),
        ([7, *RUN, *RUN, *RUN, *RUN], 20, "20 forced tokens came back where at most 17"),
    ],
)
def test_a_result_with_wrongly_counted_forced_tokens_is_a_fault(
    tokens: list[int], forced: int, said_of_it: str, overlap: bool
) -> None:
    driver = Driver("hybrid", 3, overlap=overlap)
    driver.open("a")
    turn = driver.submit("a", prompt(4), 20)
    driver.until(lambda: turn.generated == 2)
    faults: list[str] = []

    def spoil(plan: Plan, result: StepResult) -> StepResult:
        driver.spoil = None
        result.rows[0] = RowResult(tokens, forced=forced)
        faults.append(driver.scheduler.settler._fault(plan.rows[0], result.rows[0]) or "")
        return result

    driver.spoil = spoil
    driver.until(lambda: turn.failures == 1)
    assert said_of_it in faults[0]
    driver.run()
    assert driver.tokens("a")[4:] == driver.says(list(prompt(4)), 20)


def test_a_row_whose_sample_was_withdrawn_returns_no_tokens() -> None:
    driver, turn = ran_ahead("dense")

    def spoil(_plan: Plan, result: StepResult) -> StepResult:
        driver.spoil = None
        result.rows[0].tokens = [RUN[0]]
        return result

    driver.spoil = spoil
    driver.land()
    assert turn.failures == 1
    driver.run()
    assert driver.heard["forced"] == expected(driver, 20)


# --- drafts ---


@pytest.mark.no_cover
@EVERY
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_run_after_accepted_drafts_counts_no_draft(layout: str, accepted: int) -> None:
    driver = Driver(layout, 3)

    def propose(session, _turn):
        history = driver.tokens(session.id)
        return [*driver.says(history, accepted), *[999] * (3 - accepted)]

    driver.scheduler.planner.propose = propose
    driver.open("a")
    turn = driver.submit("a", prompt(6), 16)
    driver.until(lambda: turn.generated >= 1)
    at = turn.generated + accepted + 1
    driver.spoil = forcing({at: RUN})
    counters = driver.registry.counters
    before = counters.drafted_tokens, counters.accepted_tokens
    (row,) = driver.step().rows
    assert row.drafts == 3 and turn.generated == at + 5
    assert (counters.drafted_tokens, counters.accepted_tokens) == (before[0] + 3, before[1] + accepted)
    if not driver.layout.state or accepted == 3:
        assert driver.session().sequence.computed == 6 + at - 1
    driver.spoil = None
    driver.run()
    assert driver.tokens("a")[6:] == said(driver, list(prompt(6)), 16, {at: RUN})
    assert Component.STATE not in driver.layout.components or driver.session().sequence.spare is None


@pytest.mark.no_cover
@BOTH
@EVERY
def test_forced_tokens_follow_an_input_whose_last_chunk_is_one_token(layout: str, overlap: bool) -> None:
    driver = Driver(layout, 3, overlap=overlap, chunk_tokens=4)
    driver.open("a")
    driver.turn("a", 7, 2)
    driver.registry.drop_memory(driver.session())
    driver.scheduler.flush()
    history = driver.tokens()
    driver.spoil = forcing({1: RUN})
    turn = driver.submit("a", (), 12, goes_on=True)
    driver.run()
    assert driver.heard[turn.request.turn_id] == said(driver, history, 12, {1: RUN})
