"""Effects of single statements of the verbs and of settling: each test fails without one of them."""

from collections.abc import Callable

import pytest

from holdfast.core import errors
from holdfast.core.layout import Tier
from holdfast.core.plan import StepResult
from holdfast.core.policy import Share
from holdfast.core.retention import Retention
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Life
from holdfast.core.settler import Settler
from holdfast.core.turn import KEEP_ALL, TurnRequest, TurnState
from tests.core.driver import LAYOUTS, Driver, prompt

ASKED = TurnRequest("asked", prompt(3, 4), 2)

VERBS: dict[str, Callable[[Scheduler, float], object]] = {
    "open": lambda core, now: core.open("new", "red", now, Retention()),
    "recover": lambda core, now: core.recover("new", "red", now, Retention(), []),
    "retain": lambda core, now: core.retain("rests", Retention(), now),
    "close": lambda core, now: core.close("rests", now),
    "submit": lambda core, now: core.submit("rests", ASKED, now),
    "listen": lambda core, now: core.listen("rests", ASKED, now),
    "hear": lambda core, now: core.hear("listens", "open", 0, prompt(3), now),
    "commit": lambda core, now: core.commit("listens", "open", ASKED, now),
    "request": lambda core, now: core.request("red", ASKED, now),
    "abort": lambda core, now: core.abort("listens", "open", now),
    "interrupt": lambda core, now: core.interrupt("rests", now, None),
    "rewind": lambda core, now: core.rewind("rests", 0, now),
    "compact": lambda core, now: core.compact("rests", 1, 1, (1, 2), now),
    "fork": lambda core, now: core.fork("rests", "new", now),
    "spill": lambda core, now: core.spill("rests", now),
    "restore": lambda core, now: core.restore("rests", now),
    "ready": lambda core, now: core.ready("rests", 0, False, now),
    "arrive": lambda core, now: core.arrive(10_000, True, now),
    "plan": lambda core, now: core.plan(100, now),
    "settle": lambda core, now: core.settle(core.registry.flights[0], StepResult([]), now),
}


@pytest.mark.parametrize("verb", VERBS)
def test_whatever_happens_ends_what_is_due(verb: str) -> None:
    driver = Driver("dense", 4, host=50)
    driver.open("rests")
    driver.turn("rests", 9, 3)
    driver.open("listens")
    driver.open("idle", ttl=10.0)
    driver.plan()
    driver.scheduler.listen("listens", TurnRequest("open", (), 1), 0.0)
    VERBS[verb](driver.scheduler, 11.0)
    assert driver.registry.now == 11.0
    assert "idle" not in driver.registry.sessions


# --- refusals ---


def sealing(**more: object) -> Driver:
    """A session whose turn is over, and whose last token is yet to be computed."""
    driver = Driver("dense", 4, **more)
    session = driver.open("a")
    driver.submit("a", prompt(9), 2)
    driver.until(lambda: session.turn is None)
    assert session.life is Life.SEALING and session in driver.registry.seals
    return driver


def test_a_fork_to_a_name_that_is_taken_leaves_a_seal_to_be_planned() -> None:
    driver = sealing()
    driver.open("b")
    with driver.unchanged(errors.SessionExists):
        driver.scheduler.fork("a", "b", driver.now)


@pytest.mark.parametrize(
    "verb",
    [
        lambda core: core.interrupt("a", 0.0, None),
        lambda core: core.rewind("a", 0, 0.0),
        lambda core: core.restore("a", 0.0),
    ],
)
def test_a_session_is_busy_while_its_seal_is_in_flight(verb: Callable[[Scheduler], object]) -> None:
    driver = sealing()
    assert driver.plan().rows
    with driver.unchanged(errors.SessionBusy):
        verb(driver.scheduler)


def test_a_verb_gives_up_a_seal_that_is_not_planned() -> None:
    driver = sealing()
    driver.scheduler.rewind("a", 1, driver.now)
    assert driver.session("a").life is Life.IDLE and not driver.registry.seals


def test_a_name_that_is_taken_is_not_opened_again() -> None:
    driver = sealing()
    with driver.unchanged(errors.SessionExists):
        driver.open("a")


def test_a_session_whose_next_turn_has_come_is_expected_no_more() -> None:
    driver = Driver("dense", 4)
    session = driver.open("a")
    driver.turn("a", 5, 2, expect_return=30.0)
    assert session.expected == 30.0
    driver.submit("a", prompt(3, 1), 2)
    assert session.expected == 0.0


def test_a_tenant_has_no_more_than_its_share_of_memory() -> None:
    driver = Driver("dense", 4, pages=40, share=Share(device=0.5))
    driver.open("a")
    with driver.unchanged(errors.OverQuota):
        driver.submit("a", prompt(100), 2)


def test_an_open_turn_longer_than_the_context_is_refused() -> None:
    driver = Driver("dense", 4, context_length=20)
    driver.open("a")
    with driver.unchanged(errors.ContextExceeded):
        driver.listen("a", prompt(30))


def test_a_restore_without_room_says_no() -> None:
    driver = sealing(host=50)
    driver.run()
    assert driver.scheduler.spill("a", driver.now)
    driver.run()
    driver.open("b")
    driver.submit("b", prompt(5, 3), 20)
    driver.step()
    with driver.starved("restore"):
        assert driver.scheduler.restore("a", driver.now) is False


# --- names and turns that are over ---


def test_a_name_that_expired_and_was_used_again_is_unknown_once_it_is_closed() -> None:
    driver = Driver("dense", 4)
    driver.open("a", ttl=5.0)
    driver.now = 6.0
    driver.step()
    with driver.unchanged(errors.SessionExpired):
        driver.scheduler.rewind("a", 0, driver.now)
    driver.open("a")
    driver.close("a")
    with driver.unchanged(errors.UnknownSession):
        driver.scheduler.rewind("a", 0, driver.now)


def test_the_turns_of_a_recovered_session_are_finished() -> None:
    driver = Driver("dense", 4)
    history = [(TurnRequest("before", prompt(5), 3), [1, 2, 3])]
    session = driver.scheduler.recover("a", "red", 0.0, Retention(), history)
    assert session.last is not None
    assert (session.last.state, session.last.over) == (TurnState.FINISHED, True)


def test_a_session_whose_memory_is_in_a_file_rests() -> None:
    driver = Driver("dense", 4, disk=50)
    history = [(TurnRequest("before", prompt(5), 3), [1, 2, 3])]
    session = driver.scheduler.recover("a", "red", 0.0, Retention(), history)
    assert driver.scheduler.adopt("a", 8)
    assert list(driver.registry.resting) == [session]


def test_a_turn_that_was_cut_for_another_cannot_be_cut_when_the_other_is_aborted() -> None:
    driver = Driver("dense", 4)
    driver.open("a")
    for seed in range(2):
        driver.turn("a", 5, 3, seed)
    driver.scheduler.submit("a", ASKED, driver.now, keep=10)
    driver.scheduler.abort("a", "asked", driver.now)
    with driver.unchanged(errors.UnknownTurn):
        driver.scheduler.interrupt("a", driver.now, None)
    assert driver.session("a").boundaries == [8, 10]


@pytest.mark.parametrize("waits", [False, True])
def test_after_a_turn_that_was_rolled_back_the_one_before_it_cannot_be_cut(waits: bool) -> None:
    driver = Driver("dense", 4)
    session = driver.open("a")
    driver.turn("a", 5, 3)
    turn = driver.submit("a", prompt(6, 2), 30)
    driver.until(lambda: turn.generated == 3)
    if waits:
        driver.plan()
        driver.settle(error="lost")
        assert session.life is Life.QUEUED
    driver.scheduler.abort("a", turn.request.turn_id, driver.now)
    driver.run()
    assert driver.tokens("a") == [*prompt(5), *driver.says(list(prompt(5)), 3)]
    with driver.unchanged(errors.UnknownTurn):
        driver.scheduler.interrupt("a", driver.now, None)


def test_a_turn_that_was_cut_keeps_no_more_than_it_has_left() -> None:
    driver = Driver("dense", 4)
    driver.open("a")
    turn = driver.turn("a", 5, 8)
    driver.scheduler.interrupt("a", driver.now, 3)
    assert turn.generated == 3
    with driver.unchanged(errors.NothingToKeep):
        driver.scheduler.interrupt("a", driver.now, 4)


# --- settling ---


def test_a_turn_notes_when_its_first_token_came_and_tokens_are_counted() -> None:
    driver = Driver("dense", 4)
    driver.open("a")
    turn = driver.submit("a", prompt(9), 5)
    driver.now = 2.0
    driver.step()
    driver.now = 4.0
    driver.run()
    assert turn.first_token == 2.0
    counters = driver.registry.counters
    assert (counters.generated_tokens, counters.admitted) == (5, 1)


def test_drafts_are_counted() -> None:
    driver = Driver("dense", 4, propose=lambda session, turn: [1, 2, 3])
    driver.open("a")
    driver.turn("a", 9, 6)
    counters = driver.registry.counters
    drafted = [row for plan in driver.plans for row in plan.rows if row.drafts]
    assert drafted and counters.drafted_tokens == sum(row.drafts for row in drafted)
    assert counters.accepted_tokens == 6 - sum(row.sample for plan in driver.plans for row in plan.rows)


def test_a_prompt_is_shared_once_and_not_looked_at_with_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    original = Settler._publish
    monkeypatch.setattr(
        Settler,
        "_publish",
        lambda self, session, turn: calls.append(session.id) or original(self, session, turn),
    )
    driver = Driver("dense", 4)
    driver.open("a")
    driver.turn("a", 20, 9)
    assert calls == ["a"]


@pytest.mark.parametrize("way", ["finished", "cut"])
def test_the_mark_of_a_turn_stays_pinned_until_the_turn_is_durable(way: str) -> None:
    driver = Driver("hybrid", 3, durable_turns=True)
    session = driver.open("a")
    driver.turn("a", 6, 4)
    driver.scheduler.durable("a")
    assert session.durable and not any(point.pinned for point in session.sequence.points)
    turn = driver.submit("a", prompt(6, 1), 20)
    driver.until(lambda: turn.generated == 3)
    if way == "cut":
        driver.scheduler.abort("a", turn.request.turn_id, driver.now, KEEP_ALL)
    driver.run()
    assert not session.durable and any(point.pinned for point in session.sequence.points)
    driver.scheduler.durable("a")
    assert session.durable and not any(point.pinned for point in session.sequence.points)


def test_only_so_many_checkpoints_are_kept_when_no_journal_is_waited_for() -> None:
    driver = Driver("hybrid", 3, checkpoints=2)
    session = driver.open("a")
    for seed in range(6):
        driver.turn("a", 6, 4, seed)
    assert len(session.sequence.points) == 2
    assert not any(point.pinned for point in session.sequence.points)


@pytest.mark.parametrize("keep", [0, KEEP_ALL])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_commit_that_revises_what_is_in_flight_keeps_nothing_that_was_revised(
    layout: str, keep: int
) -> None:
    driver = Driver(layout, 4, overlap=True)
    driver.open("a")
    driver.turn("a", 5, 2)
    driver.listen("a", prompt(20, 1))
    driver.plan()
    driver.say("a", prompt(9, 2), 6)
    turn = driver.commit("a", 8)
    driver.scheduler.abort("a", turn.request.turn_id, driver.now, keep)
    driver.land()
    session = driver.session("a")
    assert driver.tokens("a")[7:] == [*prompt(20, 1)[:6], *prompt(9, 2)]
    assert session.sequence.computed <= 7 + 6, "what comes after was computed from other tokens"
    driver.turn("a", 3, 4, 5)
    assert driver.tokens("a")[-4:] == driver.says(driver.tokens("a")[:-4], 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_a_failed_step_the_whole_block_table_is_sent_again(layout: str) -> None:
    driver = Driver(layout, 3)
    driver.open("a")
    driver.turn("a", 9, 3)
    driver.submit("a", prompt(4, 1), 8)
    driver.step()
    if not driver.layout.paged:
        return
    plan = driver.plan()
    before = plan.rows[0].table
    assert before is None or before.first > 0
    driver.settle(error="lost")
    again = driver.plan().rows[0].table
    assert again is not None and again.first == 0
    driver.land()
    driver.run()


def test_a_session_whose_copy_was_lost_shares_its_history_later() -> None:
    driver = Driver("hybrid", 16, leave_history=True)
    driver.open("a")
    driver.turn("a", 20, 4)
    child = driver.scheduler.fork("a", "b", driver.now)
    driver.plan()
    driver.settle(error="lost")
    assert not driver.registry.copying(child)
    driver.turn("b", 20, 4, 7)
    history = driver.tokens("b")
    driver.close("b")
    again = driver.request((*history, 1), 2)
    driver.run()
    assert again.cached == len(history)


def test_a_copy_for_a_session_that_was_closed_is_not_made() -> None:
    driver = Driver("dense", 4)
    driver.open("a")
    driver.turn("a", 9, 4)
    driver.scheduler.fork("a", "b", driver.now)
    assert driver.registry.copies
    driver.scheduler.close("b", driver.now)
    assert driver.plan().copies == []


def test_moves_that_were_to_go_with_a_plan_after_a_failed_one_are_lost_with_it() -> None:
    driver = Driver("dense", 4, host=50, overlap=True)
    driver.open("a")
    driver.turn("a", 9, 3)
    driver.open("b")
    driver.submit("b", prompt(5, 1), 8)
    driver.plan()
    assert driver.scheduler.spill("a", driver.now, Tier.HOST)
    assert driver.plan().moves
    driver.settle(error="lost")
    driver.settle()
    assert not driver.registry.transits and driver.session("a").state == "IDLE"
    assert driver.counts(tier=Tier.HOST) == {"FREE": 50}
    driver.run()
