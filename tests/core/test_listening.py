"""Open turns: their input is computed while it is said, revised, committed, or taken back whole."""

import pytest

from holdfast.core import errors
from holdfast.core.layout import Component
from holdfast.core.listening import common
from holdfast.core.policy import Share
from holdfast.core.session import Life
from holdfast.core.turn import KEEP_ALL, TurnRequest, TurnState
from tests.core.driver import LAYOUTS, STATEFUL, Driver, prompt

BOTH = pytest.mark.parametrize("overlap", [False, True])
EVERY = pytest.mark.parametrize("layout", LAYOUTS)


def counted_after(driver: Driver, name: str, max_tokens: int, more: tuple[int, ...]) -> tuple[int, int]:
    """Commit; tokens computed and steps made until the first token."""
    turn = driver.commit(name, max_tokens, more)
    before, steps = driver.registry.counters.computed_tokens, 0
    while turn.first_token is None:
        driver.step()
        driver.land()
        steps += 1
    return driver.registry.counters.computed_tokens - before, steps


@pytest.mark.no_cover
@BOTH
@EVERY
def test_a_long_input_costs_as_much_at_its_commit_as_one_token(layout: str, overlap: bool) -> None:
    driver = Driver(layout, 16, overlap=overlap, chunk_tokens=64)
    driver.open("a")
    driver.turn("a", 30, 3)
    driver.listen("a")
    said = prompt(2000, 5)
    for at in range(0, 2000, 50):
        driver.say("a", said[at : at + 50])
        driver.step()
    driver.run()
    assert driver.session().state == "LISTENING"
    assert driver.heard == {"t1": driver.says(list(prompt(30)), 3)}
    long = counted_after(driver, "a", 4, (7,))
    driver.run()
    driver.listen("a", (9,))
    driver.run()
    short = counted_after(driver, "a", 4, (7,))
    assert long == short == (2, 1)
    history = driver.tokens()
    driver.run()
    assert driver.heard["c2"] == driver.says([*history[:33], *said, 7], 4)


@pytest.mark.no_cover
@BOTH
@EVERY
def test_nothing_is_sampled_and_the_last_token_waits(layout: str, overlap: bool) -> None:
    driver = Driver(layout, 3, overlap=overlap, chunk_tokens=8)
    driver.open("a")
    turn = driver.listen("a", prompt(20))
    driver.run()
    sequence = driver.session().sequence
    assert (sequence.known, sequence.computed, turn.generated) == (20, 19, 0)
    assert not any(row.sample for plan in driver.plans for row in plan.rows)
    driver.commit("a", 0)
    driver.run()
    assert turn.state is TurnState.FINISHED and sequence.computed == 20
    assert (turn.computed_ahead, turn.computed) == (19, 20)


def test_a_session_has_the_input_of_an_open_turn_in_its_history_from_the_commit_on() -> None:
    driver = Driver("dense", 3)
    session = driver.open("a")
    assert session.history == 0
    driver.turn("a", 10, 2)
    assert session.history == 12 and not driver.registry.unheard
    driver.listen("a", prompt(20))
    assert session.history == 12 and driver.registry.unheard, "a plan has something to compute"
    driver.run()
    assert session.history == 12 and not driver.registry.unheard
    driver.commit("a", 1)
    assert session.history == 32
    driver.run()
    assert session.history == 33


@pytest.mark.no_cover
@BOTH
@EVERY
@pytest.mark.parametrize("start", [0, 1, 7, 12, 19, 20])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_a_revision_falls_back_to_where_it_begins(layout: str, overlap: bool, start: int, count: int) -> None:
    driver = Driver(layout, 3, overlap=overlap, chunk_tokens=8, budget=8)
    driver.open("a")
    driver.turn("a", 10, 3)
    driver.listen("a", prompt(20, 1))
    driver.run()
    driver.say("a", prompt(count, 2), start)
    driver.run()
    driver.say("a", prompt(4, 3))
    driver.run()
    driver.commit("a", 5)
    driver.run()
    said = (*prompt(20, 1)[:start], *prompt(count, 2), *prompt(4, 3))
    assert driver.heard["c2"] == driver.says([*driver.tokens()[:13], *said], 5)
    driver.close()
    driver.scheduler.flush()
    assert driver.all_free()


@pytest.mark.no_cover
@EVERY
@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("start", [0, 4, 11])
def test_a_revision_meets_rows_in_flight(layout: str, steps: int, start: int) -> None:
    driver = Driver(layout, 3, overlap=True, chunk_tokens=4, budget=4)
    driver.open("a")
    turn = driver.listen("a", prompt(18))
    for _ in range(steps):
        driver.step()
    driver.say("a", prompt(6, 2), start)
    driver.say("a", prompt(6, 3), start + 3)
    driver.commit("a", 3, (5,))
    driver.run()
    said = [*prompt(18)[:start], *prompt(6, 2)[:3], *prompt(6, 3), 5]
    assert driver.tokens()[: len(said)] == said
    assert driver.heard == {"c1": driver.says(said, 3)}
    assert turn.state is TurnState.FINISHED


@pytest.mark.parametrize("layout", STATEFUL)
def test_a_revision_of_the_last_words_keeps_the_rest(layout: str) -> None:
    driver = Driver(layout, 3)
    driver.open("a")
    driver.listen("a", prompt(100))
    driver.run()
    for piece in range(6):
        driver.say("a", prompt(4, piece))
        driver.run()
    computed = driver.registry.counters.computed_tokens
    driver.say("a", prompt(5, 9), 121)
    driver.run()
    # Back to the last point before the revision, not to the beginning.
    assert driver.registry.counters.computed_tokens - computed <= 10
    mark = driver.session().sequence.mark
    assert mark is not None
    assert len([p for p in driver.session().sequence.points if p is not mark.point]) <= 2


@BOTH
@EVERY
@pytest.mark.parametrize("way", ["abort", "interrupt", "close", "deadline", "keep"])
@pytest.mark.parametrize("steps", range(4))
def test_what_is_not_committed_was_never_said(layout: str, overlap: bool, way: str, steps: int) -> None:
    driver = Driver(layout, 3, overlap=overlap, chunk_tokens=4, budget=4)
    driver.open("a")
    driver.turn("a", 10, 3)
    before, session = driver.tokens(), driver.session()
    computed, last = session.sequence.computed, session.last
    turn = driver.listen("a", prompt(15, 1), deadline=5.0, on_abort=0)
    for _ in range(steps):
        driver.step()
    if steps == 3:
        driver.say("a", (3, 4), 2)
    if way == "abort":
        driver.scheduler.abort("a", turn.request.turn_id, driver.now)
    elif way == "keep":
        driver.scheduler.abort("a", turn.request.turn_id, driver.now, KEEP_ALL)
    elif way == "interrupt":
        driver.scheduler.interrupt("a", driver.now, 0)
    elif way == "deadline":
        driver.now = 6.0
        driver.scheduler.tick(driver.now)
    else:
        driver.scheduler.close("a", driver.now)
    if overlap and steps and way != "close":
        with pytest.raises(errors.UnknownTurn):
            driver.say("a", (1,))
    driver.run()
    assert turn.state is TurnState.ABORTED
    if way == "close":
        driver.scheduler.flush()
        assert driver.all_free()
        return
    assert driver.tokens() == before and session.last is last and session.life is Life.IDLE
    assert session.sequence.computed == computed
    driver.scheduler.interrupt("a", driver.now, 1)
    assert driver.tokens() == before[:11]


@BOTH
@EVERY
def test_answers_go_first(layout: str, overlap: bool) -> None:
    driver = Driver(layout, 3, overlap=overlap, budget=10, running_max=3, listening_tokens=6)
    for name in "abcde":
        driver.open(name)
    driver.listen("a", prompt(60))
    for name in "bcd":
        driver.submit(name, prompt(20, 3), 12)
    for _ in range(8):
        plan = driver.step()
        running = {session.id for session in driver.registry.running}
        ahead = [row for row in plan.rows if row.turn.is_open]
        if ahead:
            assert sum(row.count for row in ahead) <= 6
            assert {row.turn.session_id for row in plan.rows} >= running
            assert len(plan.rows) <= 3
    driver.run()
    assert driver.session("a").sequence.computed == 59


@EVERY
def test_a_committed_turn_waits_for_its_place_with_what_it_has_computed(layout: str) -> None:
    driver = Driver(layout, 3, running_max=2)
    for name in "abc":
        driver.open(name)
    turn = driver.listen("a", prompt(40))
    driver.run()
    busy = [driver.submit(name, prompt(9, seed), 6) for seed, name in enumerate("bc", 2)]
    driver.step()
    driver.commit("a", 2)
    driver.until(lambda: all(other.over for other in busy))
    assert turn.generated == 0 and turn.computed == 39
    driver.run()
    assert turn.generated == 2
    assert not driver.registry.listening


@BOTH
@EVERY
def test_listening_gives_way_before_anything_else_that_is_wanted(layout: str, overlap: bool) -> None:
    driver = Driver(layout, 4, pages=24, slots=4, overlap=overlap)
    for name in "ab":
        driver.open(name)
    driver.turn("b", 8, 2)
    resting = driver.session("b").sequence.computed
    turn = driver.listen("a", prompt(60))
    driver.run()
    assert driver.session("a").life is Life.RUNNING
    driver.open("c")
    answer = driver.submit("c", prompt(70, 3), 10)
    driver.until(lambda: answer.over)
    if Component.FULL in driver.layout.components:
        assert turn.retracts == 1 and answer.retracts == 0
        assert driver.session("b").sequence.computed == resting
    assert driver.heard[answer.request.turn_id] == driver.says(list(prompt(70, 3)), 10)
    driver.run()
    driver.commit("a", 4)
    driver.run()
    assert driver.heard["c3"] == driver.says(list(prompt(60)), 4)


def test_a_retracted_listener_does_not_compete_for_memory() -> None:
    driver = Driver("dense", 4, pages=20, slots=4)
    driver.open("a")
    turn = driver.listen("a", prompt(40))
    driver.run()
    driver.open("c")
    answer = driver.submit("c", prompt(60, 3), 10)
    driver.step()
    assert driver.session("a").life is Life.QUEUED and turn.retracts == 1
    driver.until(lambda: answer.over)
    assert driver.session("a").life is Life.QUEUED
    driver.run()
    driver.say("a", (4,))
    driver.run()
    assert driver.session("a").sequence.computed in (0, 40)


@EVERY
def test_a_listener_takes_memory_of_what_rests_but_of_no_turn(layout: str) -> None:
    driver = Driver(layout, 4, pages=20, slots=4, host=100)
    for name in "abc":
        driver.open(name)
    driver.turn("b", 50, 2)
    driver.listen("c", prompt(20, 5))
    driver.run()
    held = driver.session("c").sequence.computed
    driver.listen("a", prompt(40))
    driver.run()
    assert driver.session("c").sequence.computed == held
    for name in "ac":
        driver.scheduler.close(name, driver.now)
    driver.run()


@EVERY
def test_a_step_that_fails_is_tried_again(layout: str) -> None:
    driver = Driver(layout, 3, overlap=True, chunk_tokens=4, budget=4)
    driver.open("a")
    driver.listen("a", prompt(30))
    for _ in range(3):
        driver.step()
    driver.say("a", prompt(9, 2), 5)
    driver.settle("the executor raised")
    driver.run()
    assert driver.tokens() == [*prompt(30)[:5], *prompt(9, 2)]
    driver.commit("a", 3)
    driver.run()
    assert driver.heard["c1"] == driver.says([*prompt(30)[:5], *prompt(9, 2)], 3)


@EVERY
def test_a_commit_that_waits_for_its_revision_may_be_cut_to_its_input(layout: str) -> None:
    driver = Driver(layout, 3, overlap=True, chunk_tokens=4, budget=4)
    driver.open("a")
    driver.listen("a", prompt(30))
    for _ in range(3):
        driver.step()
    driver.say("a", prompt(9, 2), 5)
    turn = driver.commit("a", 3)
    driver.scheduler.abort("a", turn.request.turn_id, driver.now, keep=0)
    driver.run()
    assert driver.tokens() == [*prompt(30)[:5], *prompt(9, 2)]
    assert driver.session().boundaries == [14]


@EVERY
def test_an_open_input_is_shared_with_nobody_until_it_is_committed(layout: str) -> None:
    driver = Driver(layout, 3)
    driver.open("a")
    driver.listen("a", prompt(40))
    driver.run()
    assert not any(counts["TREE"] for counts in driver.all_counts().values())
    driver.commit("a", 2)
    driver.run()
    other = driver.request(prompt(40), 2)
    driver.run()
    assert other.cached == (39 if layout == "dense" else other.cached)


@EVERY
def test_an_open_turn_starts_from_what_others_have_computed(layout: str) -> None:
    driver = Driver(layout, 3)
    driver.request(prompt(40), 2)
    driver.run()
    driver.open("a")
    turn = driver.listen("a", (*prompt(40), 1, 2, 3))
    driver.run()
    assert turn.cached >= 36
    driver.say("a", prompt(8, 2), 12)
    driver.run()
    driver.commit("a", 2)
    driver.run()
    assert driver.heard["c2"] == driver.says([*prompt(40)[:12], *prompt(8, 2)], 2)


def test_a_commit_computes_again_what_it_asks_for() -> None:
    driver = Driver("dense", 3)
    driver.open("a")
    driver.turn("a", 10, 2)
    driver.listen("a", prompt(30, 1))
    driver.run()
    with driver.unchanged(errors.AlreadyComputed):
        driver.commit("a", 2, computes_from=4)
    turn = driver.commit("a", 2, computes_from=15)
    before = turn.computed
    driver.run()
    assert turn.computed - before == 28
    driver.listen("a", (1, 2))
    with driver.unchanged(errors.AlreadyComputed):
        driver.commit("a", 2, computes_from=4)


def test_a_turn_of_nothing_is_refused_and_one_that_goes_on_goes_on() -> None:
    driver = Driver("dense", 3)
    driver.open("a")
    driver.turn("a", 10, 2)
    driver.listen("a", (1, 2, 3))
    driver.run()
    driver.say("a", (), 0)
    driver.run()
    with driver.unchanged(errors.EmptyTurn):
        driver.commit("a", 2)
    driver.commit("a", 2, goes_on=True)
    driver.run()
    assert driver.heard["c2"] == driver.says(driver.tokens()[:12], 2)


def test_refusals_change_nothing() -> None:
    driver = Driver("dense", 3, context_length=60, queue_max=1)
    for name in "ab":
        driver.open(name)
    turn = driver.listen("a", prompt(9))
    name = turn.request.turn_id
    with driver.unchanged(errors.SessionBusy):
        driver.listen("a")
    with driver.unchanged(errors.SessionBusy):
        driver.submit("a", (1,), 2)
    with driver.unchanged(errors.QueueFull):
        driver.scheduler.listen("b", TurnRequest("x", (1,), 1), driver.now)
    with driver.unchanged(errors.UnknownPosition):
        driver.say("a", (1,), 10)
    with driver.unchanged(errors.UnknownPosition):
        driver.say("a", (1,), -1)
    with driver.unchanged(errors.ContextExceeded):
        driver.say("a", prompt(60))
    with driver.unchanged(errors.ContextExceeded):
        driver.commit("a", 60)
    with driver.unchanged(errors.UnknownToken):
        driver.say("a", (5000,))
    with driver.unchanged(errors.UnknownTurn):
        driver.scheduler.hear("a", "another", 0, (1,), driver.now)
    with driver.unchanged(errors.UnknownTurn):
        driver.scheduler.commit("b", name, turn.request, driver.now)
    driver.commit("a", 2)
    with driver.unchanged(errors.UnknownTurn):
        driver.scheduler.hear("a", "c1", 0, (1,), driver.now)
    driver.run()


@EVERY
def test_memory_that_is_away_comes_back_while_the_input_is_said(layout: str) -> None:
    driver = Driver(layout, 3, host=100)
    driver.open("a")
    driver.turn("a", 20, 3)
    assert driver.scheduler.spill("a", driver.now)
    driver.run()
    assert driver.session().state == "SPILLED"
    turn = driver.listen("a", prompt(9, 1))
    driver.run()
    assert (driver.session().sequence.computed, turn.cached) == (31, 23)


def test_a_turn_is_durable_while_the_next_is_said() -> None:
    driver = Driver("hybrid", 3, durable_turns=True)
    driver.open("a")
    driver.turn("a", 20, 3)
    turn = driver.listen("a", prompt(9, 1))
    driver.run()
    driver.scheduler.durable("a")
    assert driver.session().durable
    driver.scheduler.abort("a", turn.request.turn_id, driver.now)
    driver.run()
    assert not any(point.pinned for point in driver.session().sequence.points)


def test_common_tokens() -> None:
    assert [common((1, 2, 3), other) for other in ((), (1,), (1, 2, 4, 5), (1, 2, 3, 4), (7, 2, 3))] == [
        0,
        1,
        2,
        3,
        0,
    ]


def test_an_open_turn_is_taken_back_later_if_more_is_said() -> None:
    driver = Driver("dense", 3)
    session = driver.open("a")
    turn = driver.listen("a", prompt(9), deadline=5.0)
    driver.run()
    driver.scheduler.listening.put_off(session, turn, 20.0)
    driver.scheduler.tick(10.0)
    assert session.turn is turn
    driver.scheduler.tick(21.0)
    assert session.turn is None and turn.state is TurnState.ABORTED


def test_a_turn_that_was_retracted_is_revised_while_it_waits() -> None:
    driver = Driver("dense", 4, pages=20, slots=4)
    driver.open("a")
    turn = driver.listen("a", prompt(40))
    driver.run()
    driver.open("c")
    answer = driver.submit("c", prompt(60, 3), 10)
    driver.step()
    assert turn.retracts == 1
    driver.say("a", prompt(5, 2), 7)
    driver.say("a", prompt(5, 4))
    assert driver.tokens("a") == [*prompt(40)[:7], *prompt(5, 2), *prompt(5, 4)]
    driver.until(lambda: answer.over)
    driver.commit("a", 3)
    driver.run()
    assert driver.heard["c2"] == driver.says(driver.tokens("a")[:17], 3)


def test_a_tenant_at_its_quota_computes_nothing_ahead() -> None:
    driver = Driver("dense", 4, pages=40, shares={"red": Share(0.5)})
    for name, tenant in (("a", "red"), ("b", "red"), ("c", "blue")):
        driver.open(name, tenant)
    answers = [driver.submit("a", prompt(30), 30), driver.submit("b", prompt(30, 1), 30)]
    driver.listen("c", prompt(20, 2))
    driver.until(lambda: all(each.generated > 5 for each in answers) or any(e.over for e in answers))
    assert driver.session("c").sequence.computed == 19
    driver.open("d", "red")
    driver.listen("d", prompt(30, 3))
    driver.until(lambda: all(each.over for each in answers))
    driver.run()
    for name, turn in zip("ab", answers, strict=True):
        assert driver.heard[turn.request.turn_id] == driver.says(driver.tokens(name)[:30], 30)


def test_without_memory_for_a_row_an_open_turn_waits() -> None:
    driver = Driver("dense", 3, chunk_tokens=6)
    driver.open("a")
    driver.listen("a", prompt(5))
    driver.run()
    with driver.starved("chunk") as struck:
        driver.say("a", prompt(20, 2))
        driver.run()
        assert struck and driver.session().sequence.computed == 4
    driver.say("a", (3,))
    driver.run()
    assert driver.session().sequence.computed == 25


@EVERY
def test_listeners_with_rows_in_flight_give_way_after_them(layout: str) -> None:
    driver = Driver(layout, 4, pages=24, slots=6, overlap=True, chunk_tokens=8, listening_tokens=16)
    for name, tenant in (("a", "red"), ("b", "red"), ("c", "blue"), ("d", "blue")):
        driver.open(name, tenant)
    for seed, name in enumerate("abc"):
        driver.listen(name, prompt(24, seed))
    for _ in range(3):
        driver.step()
    answer = driver.submit("d", prompt(70, 9), 12)
    driver.until(lambda: answer.over)
    assert answer.retracts == 0
    assert driver.heard[answer.request.turn_id] == driver.says(list(prompt(70, 9)), 12)
    for name in "abc":
        driver.commit(name, 2)
    driver.run()
