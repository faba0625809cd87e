"""Making plans: rows, chunks, budgets, drafts, seals, waiting for prefixes, restores, shortage."""

import pytest

from holdfast.core.layout import Component, Tier
from holdfast.core.prompts import shared_pages
from holdfast.core.session import Life, Place
from tests.core.driver import LAYOUTS, STATEFUL, VOCABULARY, Driver, prompt

FULL, STATE = Component.FULL, Component.STATE


def rows(plan) -> list[tuple[str, int, int, bool]]:
    """Whose rows a plan has, where they start, how many tokens, and whether they sample."""
    return [(row.turn.session_id, row.start, row.count, row.sample) for row in plan.rows]


# --- budgets and chunks ---


def test_decode_rows_come_first_then_chunks_then_seals_then_new_turns() -> None:
    driver = Driver("dense", 4, budget=16, chunk_tokens=10)
    for name in ("decoding", "chunked", "sealing", "new"):
        driver.open(name)
    driver.submit("decoding", prompt(4, 1), 9)
    driver.submit("sealing", prompt(4, 2), 1)
    driver.step()
    driver.submit("chunked", prompt(40, 3), 2)
    driver.budget = 8
    driver.plan()
    driver.settle()
    driver.submit("new", prompt(30, 4), 2)
    driver.budget = 16
    # `sealing` had its last token computed in the step before, with what the budget left; `chunked` leaves
    # half of this one to `new`.
    assert rows(driver.plan()) == [
        ("decoding", 5, 1, True),
        ("chunked", 6, 8, False),
        ("new", 0, 7, False),
    ]
    driver.settle()
    driver.run()


def test_a_step_has_no_more_tokens_than_its_budget() -> None:
    driver = Driver("dense", 4, budget=7, chunk_tokens=100)
    for seed in range(10):
        driver.open(f"s{seed}")
        driver.submit(f"s{seed}", prompt(11, seed), 5)
    while driver.registry.running or driver.registry.queue:
        plan = driver.step()
        assert 0 < sum(row.count for row in plan.rows) <= 7
    driver.run()


def test_no_more_turns_run_than_may() -> None:
    driver = Driver("dense", 4, running_max=2)
    for seed in range(5):
        driver.open(f"s{seed}")
        driver.submit(f"s{seed}", prompt(4, seed), 5)
    driver.step()
    assert [session.id for session in driver.registry.running] == ["s0", "s1"]
    driver.run()
    assert driver.registry.counters.admitted == 5


@pytest.mark.parametrize("how", ["abort", "close", "deadline"])
def test_nothing_is_remembered_of_a_turn_that_waits_no_more(how: str) -> None:
    driver = Driver("dense", 4, pages=12)
    driver.open("a")
    driver.submit("a", prompt(5), 9)
    driver.step()
    driver.open("b")  # Its turn is looked at, and finds no room beside the other.
    turn = driver.submit("b", prompt(44, 1), 2, deadline=driver.now + 5)
    driver.step()
    assert driver.scheduler.planner.prompts.matches
    if how == "abort":
        driver.scheduler.abort("b", turn.request.turn_id, driver.now)
    elif how == "close":
        driver.scheduler.close("b", driver.now)
    driver.now += 6
    driver.step()
    assert turn.over and not driver.scheduler.planner.prompts.matches


def test_with_overlap_a_row_takes_the_token_that_the_row_before_it_samples() -> None:
    driver = Driver("dense", 4)
    driver.open("a")
    driver.submit("a", prompt(5), 3)
    first, second = driver.plan(), driver.plan()
    assert rows(first) == [("a", 0, 5, True)]
    assert rows(second) == [("a", 5, 1, True)] and second.rows[0].tokens == []
    driver.settle()
    assert rows(driver.plan()) == [("a", 6, 1, True)]
    driver.settle()
    assert rows(driver.plan()) == [], "the last token is sampled, and not known yet"
    driver.settle()
    driver.settle()
    assert rows(driver.plan()) == [("a", 7, 1, False)], "the row after the last token is the seal"
    driver.run()
    assert driver.session("a").sequence.computed == 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_overlap_a_turn_that_follows_at_once_takes_the_last_token_along(layout: str) -> None:
    driver = Driver(layout, 4, overlap=True)
    for name in ("a", "b"):
        driver.open(name)
    driver.submit("b", prompt(5, 1), 30)
    driver.submit("a", prompt(5), 3)
    driver.until(lambda: driver.session("a").turn is None)
    assert [row.turn.session_id for flight in driver.registry.flights for row in flight.rows] == ["b"]
    following = driver.submit("a", prompt(6, 2), 2)
    assert rows(driver.plan())[1:] == [("a", 7, 7, True)], "it waits for no row of the turn before it"
    driver.run()
    assert following.cached == 8, "the token that it took along is none of its own"
    history = [*prompt(5), *driver.says(list(prompt(5)), 3), *prompt(6, 2)]
    assert driver.tokens("a") == [*history, *driver.says(history, 2)]


# --- shortage ---


def test_a_decode_row_waits_when_no_page_can_be_had() -> None:
    driver = Driver("dense", 1)
    for name in ("a", "b"):
        driver.open(name)
    driver.submit("a", prompt(4), 6)
    driver.submit("b", prompt(4, 1), 6)
    driver.step()
    with driver.starved("decode page", times=1):
        assert rows(driver.step()) == [("b", 4, 1, True)]
    driver.run()
    assert driver.tokens("a")[4:] == driver.says(list(prompt(4)), 6)


def test_a_decode_row_waits_when_the_room_that_was_made_does_not_suffice() -> None:
    driver = Driver("dense", 1, pages=20)
    driver.open("a")
    driver.request(prompt(10, 3), 2)  # What it leaves in the tree can be evicted.
    driver.run()
    driver.submit("a", prompt(4), 8)
    driver.until(lambda: not driver.ledger.pool(FULL).free)
    with driver.starved("decode page", times=1) as struck:
        driver.plan()
    assert struck == ["decode page"], "a page was evicted for it, and then could not be had"
    driver.run()
    assert len(driver.tokens("a")) == 12


def test_a_chunk_that_finds_no_room_is_halved_until_it_does() -> None:
    driver = Driver("dense", 1, pages=30, budget=8)
    driver.open("a")
    driver.submit("a", prompt(20), 2)
    driver.step()
    with driver.starved("chunk", times=2):
        assert rows(driver.step()) == [("a", 8, 2, False)], "8, 4, then 2 tokens"
    driver.run()
    assert driver.tokens("a")[20:] == driver.says(list(prompt(20)), 2)


def test_a_chunk_that_finds_no_room_at_all_waits() -> None:
    driver = Driver("dense", 1, pages=40, budget=8)
    for name in ("a", "b"):
        driver.open(name)
    driver.submit("b", prompt(3, 1), 20)
    driver.step()
    driver.submit("a", prompt(20), 2)
    driver.step()
    with driver.starved("chunk"):
        assert rows(driver.step()) == [("b", 4, 1, True)]
    driver.run()
    assert driver.tokens("a")[20:] == driver.says(list(prompt(20)), 2)


def test_a_turn_taken_back_for_an_older_one_gets_no_row_in_the_same_plan() -> None:
    driver = Driver("dense", 1, pages=30, budget=20)
    for name in ("old", "young"):
        driver.open(name)
    old = driver.submit("old", prompt(26), 2)
    driver.step()
    young = driver.submit("young", prompt(12, 1), 2)
    driver.budget = 8
    driver.until(lambda: young.retracts > 0 or old.over)
    driver.run()
    assert (old.retracts, old.state.value, young.state.value) == (0, "finished", "finished")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chunk_takes_memory_from_a_younger_one_that_is_chunked_too(layout: str) -> None:
    driver = Driver(layout, 1, pages=42, slots=6, budget=6, chunk_tokens=3)
    for name in ("old", "young"):
        driver.open(name)
    old = driver.submit("old", prompt(36), 2)
    young = driver.submit("young", prompt(36, 1), 2)
    driver.run()
    assert old.retracts == 0
    assert driver.layout.full is (young.retracts > 0)
    for name, seed in (("old", 0), ("young", 1)):
        assert driver.tokens(name)[36:] == driver.says(list(prompt(36, seed)), 2)


# --- drafts ---


def right(driver: Driver, count: int):
    """A proposer that is always right."""

    def propose(session, turn):
        history = session.sequence.tokens
        return driver.says(history.slice(0, len(history)), count)

    return propose


@pytest.mark.parametrize("layout", LAYOUTS)
def test_right_drafts_are_accepted_and_cost_fewer_steps(layout: str) -> None:
    driver = Driver(layout, 3)
    driver.scheduler.planner.propose = right(driver, 3)
    driver.open("a")
    turn = driver.submit("a", prompt(10), 9)
    steps = driver.run()
    assert turn.generated == 9
    assert steps <= 5, "four tokens a step"
    assert driver.tokens("a")[10:] == driver.says(list(prompt(10)), 9)


@pytest.mark.parametrize("outside", [-1, VOCABULARY])
def test_a_row_carries_no_draft_from_outside_the_vocabulary(outside: int) -> None:
    driver = Driver("dense", 3, propose=lambda session, turn: [outside, 1, 2])
    driver.open("a")
    driver.submit("a", prompt(10), 5)
    while not driver.session("a").boundaries:
        plan = driver.plan()
        assert all(0 <= token < VOCABULARY for row in plan.rows for token in row.tokens)
        assert not any(row.drafts for row in plan.rows)
        driver.settle()
    assert driver.tokens("a")[10:] == driver.says(list(prompt(10)), 5)


def test_rows_with_drafts_are_not_overlapped() -> None:
    driver = Driver("hybrid", 3)
    driver.scheduler.planner.propose = right(driver, 2)
    driver.open("a")
    driver.turn("a", 5, 2)
    driver.submit("a", prompt(4, 1), 9)
    first = driver.plan()
    assert first.rows and not driver.plan().rows, "the turn waits for its row in flight"
    driver.land()
    assert driver.plan().rows[0].drafts == 2
    driver.run()


def test_drafts_never_run_past_what_may_be_generated() -> None:
    driver = Driver("dense", 3)
    driver.scheduler.planner.propose = right(driver, 50)
    driver.open("a")
    turn = driver.submit("a", prompt(4), 6)
    plans = []
    while not turn.over:
        plans.append(driver.step())
    # The first row of a turn has none; the next may guess four of the five tokens that are left.
    assert [row.drafts for plan in plans for row in plan.rows] == [0, 4]
    driver.run()
    assert turn.generated == 6


def test_without_room_for_drafts_the_row_goes_without_them() -> None:
    driver = Driver("hybrid", 3)
    driver.scheduler.planner.propose = right(driver, 3)
    driver.open("a")
    turn = driver.submit("a", prompt(4), 6)
    driver.step()
    with driver.starved("draft reserve"):
        plan = driver.step()
    assert [row.drafts for row in plan.rows] == [0]
    driver.run()
    assert turn.generated == 6


def test_drafts_may_have_room_made_for_them_by_the_tree_but_take_back_no_turn() -> None:
    driver = Driver("hybrid", 4, slots=5)
    driver.scheduler.planner.propose = right(driver, 3)
    driver.request(prompt(9, 3), 2)
    driver.run()
    driver.request(prompt(9, 4), 2)
    driver.run()
    driver.open("a")
    turn = driver.submit("a", prompt(3), 9)
    driver.step()
    assert driver.counts(STATE).get("FREE", 0) == 0 and driver.counts(STATE)["TREE"] == 4
    assert [row.drafts for row in driver.step().rows] == [3]
    assert driver.counts(STATE)["TREE"] == 3
    driver.run()
    assert turn.generated == 9


# --- seals ---


def test_a_seal_that_finds_no_page_is_skipped() -> None:
    driver = Driver("dense", 1)
    session = driver.open("a")
    driver.submit("a", prompt(4), 3)
    driver.until(lambda: session.life is Life.SEALING)
    with driver.starved("seal"):
        assert not driver.step().rows
    assert session.life is Life.IDLE and session.sequence.computed == 6
    turn = driver.turn("a", 2, 2, 1)
    assert (turn.cached, turn.computed) == (7, 4), "the late token counts as cached, and is computed now"


def test_seals_wait_for_budget() -> None:
    driver = Driver("dense", 1, budget=8)
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        driver.submit(name, prompt(4, seed), 1)
    driver.step()
    assert len(driver.registry.seals) == 2
    driver.budget = 1
    assert rows(driver.step()) == [("a", 4, 1, False)]
    assert rows(driver.step()) == [("b", 4, 1, False)]
    driver.run()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_seal_is_left_for_a_while_to_the_turn_that_follows(layout: str) -> None:
    """Neither the token nor a step is computed twice, and the next turn is in the very next plan."""
    driver = Driver(layout, 4, overlap=True, seal_seconds=5.0)
    session = driver.open("a")
    driver.submit("a", prompt(6), 3)
    driver.until(lambda: session.life is Life.SEALING)
    now = driver.now
    assert not driver.registry.seals_due(now) and driver.registry.seals_due(now + 5.0)
    assert not driver.plan().rows, "the seal is not due"
    driver.settle()
    driver.submit("a", prompt(4, 1), 2)
    assert rows(driver.plan()) == [("a", 8, 5, True)], "the token that was left, and the input"
    driver.settle()
    driver.until(lambda: session.life is Life.SEALING)
    driver.now += 5.0
    driver.run()
    assert session.life is Life.IDLE and not driver.registry.seals_due(driver.now)


def test_a_seal_that_is_due_is_planned_and_a_younger_one_is_not() -> None:
    driver = Driver("dense", 1, seal_seconds=5.0)
    for seed, name in enumerate(("a", "b")):
        session = driver.open(name)
        driver.submit(name, prompt(4, seed), 1)
        driver.until(lambda session=session: session.life is Life.SEALING)  # type: ignore[misc]
        driver.now += 3.0
    assert rows(driver.step()) == [("a", 4, 1, False)]
    driver.now += 3.0
    assert rows(driver.step()) == [("b", 4, 1, False)]
    driver.run()


# --- prefixes that another turn is computing ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_waits_for_a_prefix_that_another_is_computing(layout: str) -> None:
    driver = Driver(layout, 4, budget=20, chunk_tokens=8)
    first = driver.request(prompt(41), 2)
    driver.step()
    second = driver.request((*prompt(33), 9, 9), 2)
    while not first.generated:
        assert second.state.value == "queued"
        driver.step()
    driver.run()
    assert second.cached == 32, "computed once"
    assert second.computed == 3 + 1
    assert driver.heard["r2"] == driver.says([*prompt(33), 9, 9], 2)


def test_a_request_does_not_wait_for_a_prefix_that_is_past_the_place_where_a_point_could_be_left() -> None:
    driver = Driver("hybrid", 4, budget=20, chunk_tokens=16)
    first = driver.request(prompt(60), 2)
    driver.step()
    driver.step()
    second = driver.request((*prompt(9), 9, 9), 2)
    driver.step()
    assert second.state.value == "running" and not first.generated
    driver.run()
    assert second.cached == 0


@pytest.mark.parametrize("other", ["tenant", "later turn", "prompt", "aborted"])
def test_a_request_does_not_wait_for_what_it_cannot_share(other: str) -> None:
    driver = Driver("dense", 4, budget=12, chunk_tokens=8)
    driver.open("a")
    if other == "later turn":
        driver.turn("a", 5, 1, 3)
    turn = driver.submit("a", prompt(60), 2)
    driver.step()
    driver.plan()
    if other == "aborted":
        driver.scheduler.abort("a", turn.request.turn_id, driver.now)
    tenant = "blue" if other == "tenant" else "red"
    second = driver.request(prompt(20, 1 if other == "prompt" else 0), 2, tenant=tenant)
    driver.plan()
    assert second.state.value == "running"
    driver.run()
    assert second.state.value == "finished"


def test_a_request_waits_no_longer_than_the_other_runs() -> None:
    driver = Driver("dense", 4, budget=12, chunk_tokens=8)
    driver.open("a")
    turn = driver.submit("a", prompt(60), 2)
    driver.step()
    second = driver.request(prompt(50), 2)
    driver.step()
    assert second.state.value == "queued"
    driver.scheduler.abort("a", turn.request.turn_id, driver.now)
    driver.run()
    assert second.state.value == "finished" and driver.heard["r2"] == driver.says(list(prompt(50)), 2)


def test_how_many_pages_two_prompts_share() -> None:
    left = bytes(range(32))
    for same in range(9):
        right_side = left[: same * 4] + bytes(32 - same * 4)
        expected = same if same else 0
        assert shared_pages(left, right_side, 8, 4) == expected
    assert shared_pages(left, left, 5, 4) == 5
    assert shared_pages(left, left, 0, 4) == 0


# --- memory that is away ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_turn_cancels_a_spill_that_is_on_its_way(layout: str) -> None:
    driver = Driver(layout, 4, host=100)
    session = driver.open("a")
    driver.turn("a", 20, 4)
    driver.scheduler.spill("a", driver.now)
    driver.plan()
    turn = driver.submit("a", prompt(3, 1), 2)
    driver.plan()
    assert session.place is Place.HOME and turn.state.value == "running"
    driver.run()
    assert (turn.cached, turn.computed) == (24, 4), "the source was still there"
    for component in driver.layout.components:
        assert driver.counts(component, Tier.HOST) == {"FREE": 100}


def test_a_restore_that_can_never_succeed_gives_the_parcel_up() -> None:
    driver = Driver("hybrid", 4, host=100)
    driver.open("a")
    driver.turn("a", 20, 4)
    driver.scheduler.spill("a", driver.now)
    driver.run()
    turn = driver.submit("a", prompt(3, 1), 2)
    with driver.starved("restore"):
        driver.step()
    assert driver.session("a").parcel is None and turn.state.value == "running"
    assert driver.registry.counters.dropped == 1
    driver.run()
    assert turn.cached == 0, "the tree kept nothing for it alone"
    assert driver.tokens("a")[-2:] == driver.says(driver.tokens("a")[:-2], 2)


def test_a_restore_waits_while_others_run() -> None:
    driver = Driver("hybrid", 4, host=100)
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        driver.turn(name, 20, 4, seed)
    driver.scheduler.spill("a", driver.now)
    driver.run()
    driver.submit("b", prompt(3, 1), 9)
    driver.step()
    turn = driver.submit("a", prompt(3, 1), 2)
    with driver.starved("restore"):
        for _ in range(3):
            driver.step()
            assert driver.session("a").place is Place.AWAY
    driver.run()
    assert turn.cached == 24


@pytest.mark.parametrize("layout", ["dense", "hybrid", "full+window+state"])
def test_a_restore_makes_room_in_every_component(layout: str) -> None:
    driver = Driver(layout, 4, pages=14, slots=4, host=200)
    driver.open("a")
    driver.turn("a", 20, 4)
    driver.scheduler.spill("a", driver.now)
    driver.run()
    driver.open("b")
    driver.turn("b", 30, 4, 1)
    turn = driver.turn("a", 3, 2, 2)
    assert turn.state.value == "finished" and turn.cached == 24
    assert driver.session("b").place is not Place.HOME or driver.session("b").sequence.computed in (0, 34)


# --- nothing can be planned ---


def test_when_nothing_at_all_can_be_planned_the_youngest_turn_is_taken_back() -> None:
    driver = Driver("dense", 1)
    turns = []
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        turns.append(driver.submit(name, prompt(4, seed), 6))
    driver.step()
    with driver.starved("decode page", times=2):
        plan = driver.step()
    assert turns[1].retracts == 1 and turns[0].retracts == 0
    assert ("a", 4, 1, True) in rows(plan), "the plan was made anew"
    driver.run()
    assert [turn.generated for turn in turns] == [6, 6]


@pytest.mark.parametrize(("failures", "computed"), [(1, 6), (2, 0)])
def test_when_the_only_turn_cannot_be_planned_twice_what_rests_gives_way(
    failures: int, computed: int
) -> None:
    driver = Driver("dense", 1, host=100)
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        driver.turn(name, 4, 2, seed)
    turn = driver.submit("a", prompt(4, 7), 6)
    driver.step()
    with driver.starved("decode page", times=failures):
        plan = driver.step()
    assert len(plan.rows) == 1 and turn.state.value == "running"
    assert driver.session("b").sequence.computed == computed and driver.session("b").sequence.known == 6
    driver.run()
    assert turn.generated == 6


@pytest.mark.parametrize("layout", STATEFUL)
def test_an_admission_that_needs_two_components_makes_room_for_both(layout: str) -> None:
    driver = Driver(layout, 4, pages=16, slots=3)
    driver.open("a")
    driver.turn("a", 9, 3)
    history = len(driver.tokens("a"))
    driver.request(prompt(30, 5), 3)
    driver.run()
    turn = driver.turn("a", 20, 3, 1)
    assert turn.state.value == "finished" and turn.cached == history, "its own memory was not dropped for it"
