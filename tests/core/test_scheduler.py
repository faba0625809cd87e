"""The verbs of clients, one by one: what each leaves known, computed and held."""

import pytest

from holdfast.core import errors
from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import Kind
from holdfast.core.plan import StepResult
from holdfast.core.registry import EXPIRED_KEPT
from holdfast.core.session import Life, Place
from holdfast.core.turn import KEEP_ALL
from tests.core.driver import LAYOUTS, PAGE_SIZES, Driver, prompt

FULL, STATE = Component.FULL, Component.STATE


def chat(layout: str = "hybrid", page_size: int = 3, **more: object) -> Driver:
    """A session `a` with two finished turns: 10 + 4 and 6 + 4 tokens."""
    driver = Driver(layout, page_size, **more)
    driver.open("a")
    driver.turn("a", 10, 4)
    driver.turn("a", 6, 4, 1)
    return driver


def follows(driver: Driver, name: str = "a") -> None:
    """The next turn says what the model says after the session's history."""
    history = driver.tokens(name)
    driver.turn(name, 3, 3, 60)
    assert driver.tokens(name) == [*history, *prompt(3, 60), *driver.says([*history, *prompt(3, 60)], 3)]


# --- interrupt and abort ---


@pytest.mark.parametrize("keep", [None, KEEP_ALL, 0, 2, 4])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_interrupt_cuts_the_last_finished_turn(layout: str, page_size: int, keep: int | None) -> None:
    driver = chat(layout, page_size)
    history = driver.tokens("a")
    driver.scheduler.interrupt("a", driver.now, keep, "t2")
    known = {None: 14, KEEP_ALL: 24}.get(keep, 20 + (keep or 0))
    assert driver.tokens("a") == history[:known]
    session = driver.session("a")
    assert session.boundaries == ([14] if keep is None else [14, known])
    assert (session.last is None) is (keep is None)
    assert session.sequence.computed >= 14, "at worst back to where the turn began"
    follows(driver)


def test_interrupt_twice_cuts_further_but_never_grows() -> None:
    driver = chat()
    driver.scheduler.interrupt("a", driver.now, 3)
    driver.scheduler.interrupt("a", driver.now, 1)
    assert len(driver.tokens("a")) == 21 and driver.session("a").boundaries == [14, 21]
    follows(driver)


@pytest.mark.no_cover
@pytest.mark.parametrize("keep", [None, KEEP_ALL, 0, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_interrupt_ends_the_turn_in_flight(layout: str, keep: int | None) -> None:
    driver = chat(layout)
    turn = driver.submit("a", prompt(6, 2), 30)
    driver.until(lambda: turn.generated == 5)
    driver.plan()
    driver.scheduler.interrupt("a", driver.now, keep)
    driver.run()
    known = {None: 24, KEEP_ALL: 36}.get(keep, 30 + (keep or 0))
    assert len(driver.tokens("a")) == known
    assert turn.generated == (6 if keep in (None, KEEP_ALL) else keep)
    heard = driver.heard[turn.request.turn_id]
    assert len(heard) == (6 if keep == KEEP_ALL else 5), "what comes after the interruption is not sent"
    follows(driver)


def test_a_second_abort_of_a_turn_that_is_ending_does_nothing() -> None:
    driver = chat()
    turn = driver.submit("a", prompt(6, 2), 30)
    driver.until(lambda: turn.generated == 5)
    driver.plan()
    driver.scheduler.abort("a", turn.request.turn_id, driver.now, keep=2)
    driver.scheduler.abort("a", turn.request.turn_id, driver.now)
    driver.run()
    assert len(driver.tokens("a")) == 32, "the first one stands"
    assert driver.kinds("a").count(("aborted", turn.request.turn_id)) == 1


@pytest.mark.parametrize("keep", [None, KEEP_ALL, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_retracted_turn_that_waits_again_can_keep_what_it_said(layout: str, keep: int | None) -> None:
    driver = chat(layout)
    turn = driver.submit("a", prompt(6, 2), 30)
    driver.until(lambda: turn.generated == 3)
    driver.plan()
    driver.settle(error="lost")
    assert driver.session("a").life is Life.QUEUED
    driver.scheduler.abort("a", turn.request.turn_id, driver.now, keep)
    known = {None: 24, KEEP_ALL: 33}.get(keep, 30 + (keep or 0))
    assert len(driver.tokens("a")) == known
    assert driver.session("a").boundaries == ([14, 24] if keep is None else [14, 24, known])
    assert turn.generated == {None: 3, KEEP_ALL: 3}.get(keep, keep)
    follows(driver)


def test_an_abort_replaces_a_retraction_that_waits_for_rows() -> None:
    driver = chat()
    turn = driver.submit("a", prompt(6, 2), 30)
    driver.until(lambda: turn.generated == 3)
    first = driver.plan()
    driver.plan()
    result = driver.compute(first)
    result.rows[0].tokens = [10**6]  # Not in the vocabulary: the turn is to be retracted after its last row.
    driver.scheduler.settle(first, result, driver.now)
    driver.device.settled(first)
    assert turn.ending is not None and turn.ending.event == "retract"
    driver.scheduler.abort("a", turn.request.turn_id, driver.now)
    assert turn.ending.event == "abort" and not turn.ending.trusted
    driver.land()
    assert turn.state.value == "aborted" and len(driver.tokens("a")) == 24
    follows(driver)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_close_does_not_trust_what_follows_a_faulty_row(layout: str) -> None:
    """The row after a faulty one was computed from a token that never was: nobody may lean on its memory."""
    driver = chat(layout, leave_history=True)
    turn = driver.submit("a", prompt(6, 2), 30)
    driver.until(lambda: turn.generated == 3)
    history = driver.tokens("a")
    first = driver.plan()
    driver.plan()
    result = driver.compute(first)
    result.rows[0].tokens = [10**6]
    driver.scheduler.settle(first, result, driver.now)
    driver.device.settled(first)
    driver.scheduler.close("a", driver.now)
    assert turn.ending is not None and turn.ending.event == "abort" and not turn.ending.trusted
    driver.land()
    assert "a" not in driver.registry.sessions
    again = driver.request((*history, 1, 2, 3), 4)
    driver.run()
    assert again.state.value == "finished"


@pytest.mark.parametrize("when", ["queued", "running", "in flight"])
def test_an_aborted_request_of_its_own_leaves_nothing(when: str) -> None:
    driver = Driver("hybrid", 3)
    turn = driver.request(prompt(8), 5)
    if when != "queued":
        driver.step()
    if when == "in flight":
        driver.plan()
    driver.scheduler.abort(turn.session_id, turn.request.turn_id, driver.now)
    driver.run()
    assert driver.kinds("r1") == [("aborted", "r1"), ("closed", "")]
    driver.scheduler.flush()
    assert driver.all_free() and not driver.registry.sessions


# --- one-shot requests ---


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_of_its_own_leaves_its_prefix_to_the_next(layout: str, overlap: bool) -> None:
    driver = Driver(layout, 3, overlap=overlap)
    first = driver.request(prompt(30), 5)
    driver.run()
    assert driver.kinds("r1") == [("finished", "r1"), ("closed", "")]
    assert not driver.registry.sessions
    history = [*prompt(30), *driver.heard["r1"]]
    second = driver.request((*history[:34], 7, 7, 7), 3)
    driver.run()
    assert (first.cached, first.computed) == (0, 34), "nobody needs its last token computed"
    assert second.cached >= 27, "the whole pages of the prompt at least"
    assert driver.heard["r2"] == driver.says([*history[:34], 7, 7, 7], 3)


# --- rewind and fork ---


@pytest.mark.no_cover
@pytest.mark.parametrize("turns", [0, 1, 2, 3])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rewind_goes_back_to_the_end_of_a_turn(layout: str, page_size: int, turns: int) -> None:
    driver = chat(layout, page_size)
    driver.turn("a", 5, 5, 2)
    history = driver.tokens("a")
    driver.scheduler.rewind("a", turns, driver.now)
    known = [0, 14, 24, 34][turns]
    assert driver.tokens("a") == history[:known]
    assert driver.session("a").boundaries == [14, 24, 34][:turns]
    if turns:
        assert driver.session("a").sequence.computed == known, "each end of a turn has its checkpoint"
    follows(driver)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rewind_that_changes_nothing_leaves_the_last_turn_to_be_cut(layout: str) -> None:
    driver = chat(layout, 3)
    history, computed = driver.tokens("a"), driver.session("a").sequence.computed
    driver.scheduler.rewind("a", 2, driver.now)
    assert (driver.tokens("a"), driver.session("a").sequence.computed) == (history, computed)
    driver.scheduler.interrupt("a", driver.now, 2)
    assert driver.tokens("a") == history[:-2]
    driver.scheduler.rewind("a", 1, driver.now)
    with pytest.raises(errors.UnknownTurn):
        driver.scheduler.interrupt("a", driver.now, 0)
    follows(driver)


@pytest.mark.no_cover
@pytest.mark.parametrize("turns", [None, 0, 1, 2])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fork_shares_memory_and_parts_from_it(layout: str, page_size: int, turns: int | None) -> None:
    driver = chat(layout, page_size)
    history = driver.tokens("a")
    child = driver.scheduler.fork("a", "b", driver.now, turns)
    known = 24 if turns is None else [0, 14, 24][turns]
    assert driver.tokens("b") == history[:known]
    assert child.boundaries == [14, 24][: 2 if turns is None else turns]
    # A checkpoint whose window lies partly in the tree and partly apart cannot be shared: computed again.
    apart = bool(driver.layout.window) and page_size == 1 and turns == 1
    again = known if apart else 0
    assert child.sequence.computed == known - again, "nothing else of it is computed again"
    if driver.layout.full:
        used = 400 - driver.counts(FULL)["FREE"]
        assert used <= driver.layout.pages_for(24) + 1, "at most the partly filled page is copied"
    turn = driver.turn("b", 5, 3, 5)
    if not apart:
        assert (turn.cached, turn.computed) == (known, 7)
    follows(driver, "a")
    follows(driver, "b")
    assert driver.tokens("a")[:24] == history
    for name in ("a", "b"):
        driver.close(name)
    driver.scheduler.flush()
    assert driver.all_free()


def test_a_fork_of_a_session_that_has_said_nothing() -> None:
    driver = Driver("hybrid", 3)
    driver.open("a")
    child = driver.scheduler.fork("a", "b", driver.now)
    assert (child.boundaries, driver.tokens("b"), child.tenant) == ([], [], "red")
    follows(driver, "b")


def test_memory_that_finds_no_room_while_others_run_stays_away() -> None:
    driver = chat(host=100)
    driver.scheduler.spill("a", driver.now)
    driver.run()
    driver.open("b")
    driver.submit("b", prompt(5, seed=3), 20)
    driver.step()
    with driver.starved("restore") as struck:
        assert not driver.scheduler.restore("a", driver.now)
    assert struck and driver.session("a").place is Place.AWAY, "there may be room later"
    assert driver.scheduler.restore("a", driver.now)
    driver.run()
    assert driver.session("a").place is Place.HOME
    follows(driver, "a")


@pytest.mark.parametrize("place", ["LEAVING", "AWAY", "RETURNING"])
def test_a_fork_of_a_session_whose_memory_is_away_starts_with_its_tokens(place: str) -> None:
    driver = chat(host=100)
    driver.scheduler.spill("a", driver.now)
    if place != "LEAVING":
        driver.run()
    if place == "RETURNING":
        assert driver.scheduler.pressure.restore(driver.session("a"))
    assert driver.session("a").place is Place[place]
    child = driver.scheduler.fork("a", "b", driver.now)
    assert (child.sequence.known, child.sequence.computed) == (24, 0)
    driver.run()
    follows(driver, "b")
    follows(driver, "a")


def test_a_fork_of_a_fork_whose_copy_is_not_planned_yet_starts_with_its_tokens() -> None:
    driver = chat(page_size=16)
    driver.scheduler.fork("a", "b", driver.now)
    grandchild = driver.scheduler.fork("b", "c", driver.now)
    assert (grandchild.sequence.known, grandchild.sequence.computed) == (24, 0)
    driver.run()
    for name in ("a", "b", "c"):
        follows(driver, name)


@pytest.mark.parametrize("times", [1, 2])
def test_a_fork_that_finds_no_room_starts_with_its_tokens(times: int) -> None:
    driver = chat(page_size=16)
    with driver.starved("fork copy", times=times):
        child = driver.scheduler.fork("a", "b", driver.now)
    assert (child.sequence.known, child.sequence.computed) == (24, 0)
    follows(driver, "b")
    follows(driver, "a")


def test_a_fork_makes_room_for_its_copy() -> None:
    driver = chat("hybrid", 16, slots=4)
    driver.open("z")
    driver.turn("z", 40, 2, 7)  # The last slots: a state of its own and one in the tree.
    assert driver.counts(STATE).get("FREE", 0) == 0
    child = driver.scheduler.fork("a", "b", driver.now)
    assert child.sequence.computed == 24, "something else has given way"
    follows(driver, "b")
    follows(driver, "a")


# --- cuts of sessions whose memory is elsewhere ---


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", ["LEAVING", "AWAY"])
def test_a_rewind_of_a_session_on_its_way_out(layout: str, place: str) -> None:
    driver = chat(layout, host=100)
    driver.scheduler.spill("a", driver.now)
    if place == "AWAY":
        driver.run()
    session = driver.session("a")
    assert session.place is Place[place]
    driver.scheduler.rewind("a", 1, driver.now)
    assert session.place is Place.HOME and session.parcel is None
    assert all(driver.counts(c, Tier.HOST).get("SESSION", 0) == 0 for c in driver.layout.components)
    driver.run()
    follows(driver)


def test_a_rewind_inside_the_leased_prefix_copies_its_page() -> None:
    driver = Driver("dense", 16)
    driver.open("a")
    driver.turn("a", 20, 4)
    driver.turn("a", 20, 4, 1)
    driver.scheduler.fork("a", "b", driver.now)  # The parent leans on all its whole pages now.
    driver.scheduler.rewind("a", 1, driver.now)
    assert [str(copy) for copy, _ in driver.registry.copies] == ["full 0 -> 3"]
    # A second cut, before that copy is planned, cannot rely on it.
    driver.scheduler.rewind("a", 0, driver.now)
    assert driver.session("a").sequence.computed == 0
    driver.run()
    follows(driver, "a")
    follows(driver, "b")


@pytest.mark.parametrize("times", [1, 1000])
def test_a_rewind_that_finds_no_room_for_the_copy_computes_again(times: int) -> None:
    driver = Driver("dense", 16)
    driver.open("a")
    driver.turn("a", 20, 4)
    driver.turn("a", 20, 4, 1)
    driver.scheduler.fork("a", "b", driver.now)
    with driver.starved("cut copy", times=times):
        driver.scheduler.rewind("a", 1, driver.now)
    assert (driver.session("a").sequence.known, driver.session("a").sequence.computed) == (24, 0)
    follows(driver, "a")
    follows(driver, "b")


@pytest.mark.parametrize("starved", [False, True])
def test_a_rewind_makes_room_for_its_copy(starved: bool) -> None:
    driver = Driver("dense", 16, pages=8)
    driver.open("a")
    driver.turn("a", 20, 4)
    driver.turn("a", 20, 4, 1)
    driver.scheduler.fork("a", "b", driver.now)
    driver.run()
    driver.open("z")
    driver.turn("z", 3, 1 + 16 * (driver.counts(FULL)["FREE"] - 1), 7)
    assert driver.counts(FULL).get("FREE", 0) == 0
    with driver.starved("cut copy", times=int(starved)) as struck:
        driver.scheduler.rewind("a", 1, driver.now)
    assert len(struck) == starved, "the room that was made may be gone again"
    assert driver.session("a").sequence.computed == (0 if starved else 24)
    follows(driver, "a")
    follows(driver, "b")


# --- spill by hand, durable, flush ---


def test_spill_by_hand_says_whether_it_began() -> None:
    driver = chat(host=100)
    assert driver.scheduler.spill("a", driver.now)
    assert not driver.scheduler.spill("a", driver.now), "it is leaving already"
    driver.run()
    assert ("spilled", "") in driver.kinds("a")
    assert not driver.scheduler.spill("a", driver.now), "it is away"
    follows(driver)
    assert ("restored", "") in driver.kinds("a")
    assert not chat().scheduler.spill("a", 0.0), "there is no other tier"


def test_spill_gives_up_a_seal_that_is_not_planned() -> None:
    driver = Driver("hybrid", 3, host=100)
    session = driver.open("a")
    driver.submit("a", prompt(10), 4)
    driver.until(lambda: session.life is Life.SEALING)
    assert driver.scheduler.spill("a", driver.now)
    assert session.state == "SPILLING" and not driver.registry.seals
    driver.run()
    turn = driver.turn("a", 3, 3, 1)
    assert (turn.cached, turn.computed) == (14, 3 + 3), (
        "the late token is no work of this turn's, but is computed"
    )


def test_marks_are_kept_until_the_turn_is_durable() -> None:
    driver = Driver("hybrid", 3, durable_turns=True, checkpoints=0)
    session = driver.open("a")
    for seed in range(3):
        driver.turn("a", 6, 4, seed)
    assert [point.pinned for point in session.sequence.points] == [False, True]
    driver.scheduler.durable("a")
    assert session.sequence.points == [] and driver.counts(STATE).get("CHECKPOINT", 0) == 0
    driver.scheduler.durable("nobody")  # A late word of a session that is gone.
    turn = driver.submit("a", prompt(3, 7), 5)
    driver.step()
    driver.scheduler.durable("a")
    assert session.sequence.mark is not None, "a running turn keeps its mark"
    driver.run()
    assert turn.state.value == "finished"


# --- closing ---


@pytest.mark.parametrize(
    "phase", ["queued", "running", "in flight", "sealing", "seal in flight", "queued behind a seal"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_close_in_every_phase(layout: str, phase: str) -> None:
    driver = chat(layout)
    session = driver.session("a")
    turn = driver.submit("a", prompt(6, 2), 3)
    if phase == "running":
        driver.step()
    elif phase == "in flight":
        driver.plan()
    elif phase != "queued":
        driver.until(lambda: session.life is Life.SEALING)
        if phase != "sealing":
            driver.plan()
        if phase == "queued behind a seal":
            turn = driver.submit("a", prompt(6, 3), 3)
            assert session.unsettled == 1
    driver.scheduler.close("a", driver.now)
    if session.life is Life.CLOSING:
        driver.scheduler.close("a", driver.now)  # Once more: it is being closed already.
    driver.run()
    assert session.life is Life.CLOSED and "a" not in driver.registry.sessions
    ends = [kind for kind, turn_id in driver.kinds("a") if turn_id == turn.request.turn_id]
    assert ends == ["finished" if "sealing" in phase or phase == "seal in flight" else "aborted"]
    assert driver.kinds("a")[-1] == ("closed", "")
    driver.scheduler.flush()
    assert driver.all_free()


@pytest.mark.no_cover
@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_history_that_a_copy_has_yet_to_complete_is_not_left_behind(layout: str, in_flight: bool) -> None:
    driver = chat(layout, 16, leave_history=True)
    history = driver.tokens("a")
    driver.scheduler.fork("a", "b", driver.now)
    if in_flight:
        driver.plan()
    before = driver.all_counts()
    driver.scheduler.close("b", driver.now)
    for name, counts in driver.all_counts().items():
        assert counts["TREE"] == before[name]["TREE"]
    driver.run()
    driver.close("a")
    turn = driver.request((*history, 1, 2), 3)
    driver.run()
    assert turn.cached == 24, "what the parent left"
    assert driver.heard["r3"] == driver.says([*history, 1, 2], 3)


# --- time ---


def test_a_deadline_aborts_the_turn_by_its_own_policy() -> None:
    driver = chat()
    rolled = driver.submit("a", prompt(4, 2), 30, deadline=5.0)
    driver.until(lambda: rolled.generated == 4)
    driver.now = 4.9
    driver.step()
    assert rolled.state.value == "running"
    driver.now = 5.0
    driver.step()
    assert rolled.state.value == "aborted" and len(driver.tokens("a")) == 24
    kept = driver.submit("a", prompt(4, 2), 30, deadline=9.0, on_abort=50)
    driver.until(lambda: kept.generated == 4)
    driver.now = 9.0
    driver.step()
    driver.run()
    assert kept.state.value == "aborted" and len(driver.tokens("a")) == 24 + 4 + 4, "all that there was"
    reasons = [event.reason for event in driver.events if event.kind == "aborted"]
    assert reasons == ["deadline", "deadline"]


def test_a_deadline_of_a_turn_that_is_over_means_nothing() -> None:
    driver = chat()
    driver.turn("a", 4, 2, 2, deadline=5.0)
    later = driver.submit("a", prompt(3, 3), 4)
    driver.now = 6.0
    driver.run()
    assert later.state.value == "finished"


def test_a_deadline_while_closing_means_nothing() -> None:
    driver = chat()
    driver.submit("a", prompt(4, 2), 30, deadline=5.0)
    driver.step()
    driver.plan()
    driver.scheduler.close("a", driver.now)
    driver.now = 6.0
    driver.run()
    assert [event.reason for event in driver.events if event.kind == "aborted"] == ["closed"]


def test_a_clock_that_jumps_back_stands_still() -> None:
    driver = Driver("dense", 3)
    session = driver.open("a", ttl=10.0)
    driver.scheduler.tick(8.0)
    driver.scheduler.tick(-100.0)
    assert driver.registry.now == 8.0
    driver.scheduler.tick(9.9)
    assert session.life is Life.IDLE
    driver.scheduler.tick(10.0)
    assert session.life is Life.CLOSED


def test_idle_time_is_watched_by_one_entry_however_many_turns_there_were() -> None:
    driver = Driver("dense", 3)
    session = driver.open("a", ttl=10.0)
    for seed in range(30):
        driver.now += 4.0
        driver.turn("a", 1, 1, seed)
    assert len(driver.registry.deadlines) == 1
    driver.scheduler.close("a", driver.now)
    session = driver.open("a", ttl=10.0)  # The entry of the one before it means nothing to this one.
    driver.now += 9.0
    driver.scheduler.tick(driver.now)
    assert session.life is Life.IDLE and len(driver.registry.deadlines) == 1
    driver.now += 1.0
    driver.scheduler.tick(driver.now)
    assert session.life is Life.CLOSED and not driver.registry.deadlines
    driver.open("b", ttl=10.0)
    driver.scheduler.close("b", driver.now)
    driver.scheduler.tick(driver.now + 10.0)  # The entry of a session that is gone means nothing to anybody.
    assert not driver.registry.deadlines and "b" not in driver.registry.expired


def test_a_session_may_expire_while_its_seal_waits_or_is_in_flight() -> None:
    for in_flight in (False, True):
        driver = Driver("hybrid", 3)
        session = driver.open("a", ttl=10.0)
        driver.submit("a", prompt(10), 4)
        driver.until(lambda session=session: session.life is Life.SEALING)
        if in_flight:
            driver.plan()
        driver.now = 10.0
        driver.scheduler.tick(driver.now)
        assert session.life is (Life.CLOSING if in_flight else Life.CLOSED)
        driver.run()
        assert session.life is Life.CLOSED
        driver.scheduler.flush()
        assert driver.all_free()


def test_only_so_many_expired_names_are_remembered() -> None:
    driver = Driver("dense", 3, strict=False)
    for number in range(EXPIRED_KEPT + 2):
        driver.open(f"s{number}", ttl=1.0)
    now = 1.0
    driver.scheduler.tick(now)
    while driver.registry.overdue:
        now += 0.001
        driver.scheduler.tick(now)
    assert len(driver.registry.expired) == EXPIRED_KEPT
    assert "s0" not in driver.registry.expired and f"s{EXPIRED_KEPT + 1}" in driver.registry.expired
    assert not driver.registry.sessions and not driver.registry.tenants


# --- steps ---


@pytest.mark.asserts
def test_at_most_two_plans_are_in_flight() -> None:
    driver = chat()
    driver.plan()
    driver.plan()
    with pytest.raises(AssertionError, match="settle a plan first"):
        driver.plan()
    driver.land()
    with pytest.raises(Exception, match="not the oldest in flight"):
        driver.scheduler.settle(driver.plans[-1], StepResult([]), driver.now)


def test_a_server_without_the_strict_audit_reports_a_dropped_hold_at_once() -> None:
    driver = chat(strict=False)
    driver.submit("a", prompt(4, 33), 30)
    driver.step()
    driver.ledger.take(driver.ledger.pool(FULL), 2, driver.ledger.holder(Kind.TURN, "t9 of nobody"))
    plan = driver.scheduler.plan(64, driver.now)
    events = driver.scheduler.settle(plan, driver.compute(plan), driver.now)
    (found,) = [event for event in events if event.kind == "finding"]
    assert "t9 of nobody" in found.reason
    assert driver.session("a").life is Life.RUNNING, "it is nobody else's fault"
    driver.run()


def test_a_finding_about_a_request_of_its_own_ends_it() -> None:
    driver = Driver("dense", 3)
    turn = driver.request(prompt(5), 9)
    driver.step()
    full = driver.session("r1").sequence.full
    assert full is not None
    driver.ledger.pool(FULL).free.insert(0, full.units[-1])
    plan = driver.scheduler.plan(64, driver.now)
    events = driver.scheduler.settle(plan, driver.compute(plan), driver.now)
    assert [event.kind for event in events] == ["tokens", "finding", "failed", "closed"]
    assert (
        turn.state.value == "failed" and not driver.registry.sessions and not driver.registry.queues.tainted
    )


def test_a_fork_that_goes_back_past_its_own_memory_leans_on_the_tree_again() -> None:
    """Where a state cannot be gone on from, what the tree has of the history is found all the same."""
    driver = Driver("hybrid", 4)
    driver.open("a")
    for seed in range(3):
        driver.turn("a", 10, 2, seed)
    driver.scheduler.fork("a", "b", driver.now)
    driver.run()
    driver.scheduler.rewind("b", 2, driver.now)
    known = driver.session("b").sequence.known
    turn = driver.turn("b", 3, 2, 9)
    assert 0 < turn.cached < known
