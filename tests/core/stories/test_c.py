"""Failures of the field's best engine today: retracts, overlapping turns, stale events, flush, close."""

import pytest

from holdfast.core import errors
from holdfast.core.layout import Component
from holdfast.core.ledger import DeadHold, Kind, LedgerError
from holdfast.core.plan import StepResult
from holdfast.core.session import Life
from tests.core.driver import LAYOUTS, PAGE_SIZES, Driver, holder_units, prompt

FULL, WINDOW, STATE = Component.FULL, Component.WINDOW, Component.STATE


# --- C1: a retract frees what the turn added, and the turn stays the session's one turn ---


@pytest.mark.no_cover
@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_C1_a_retract_frees_what_the_turn_added_and_keeps_the_mark(layout: str, page_size: int) -> None:
    driver = Driver(layout, page_size)
    session = driver.open("a")
    driver.turn("a", 30, 4)
    at_rest = driver.all_counts()
    turn = driver.submit("a", prompt(70, 1), 20)
    driver.until(lambda: turn.generated == 5)
    if driver.layout.full:
        added = driver.layout.pages_for(34 + 70 + 4) - driver.layout.pages_for(34)
        assert driver.counts(FULL)["FREE"] == at_rest["full on device"]["FREE"] - added
    said = driver.tokens("a")
    driver.plan()
    driver.settle(error="lost")
    assert (turn.retracts, session.life) == (1, Life.QUEUED)
    assert session.sequence.computed == 34 and driver.tokens("a") == said
    assert session.boundaries == [34] and session.turn is turn
    for name, counts in driver.all_counts().items():
        assert counts["FREE"] == at_rest[name]["FREE"], "all that the turn added is free again"
        assert counts["TURN"] == 0
    with driver.unchanged(errors.SessionBusy):
        driver.submit("a", prompt(3, 2), 2, turn_id="third")
    driver.run()
    assert turn.generated == 20 and driver.tokens("a")[: len(said)] == said
    assert driver.tokens("a")[34:104] == list(prompt(70, 1)), "nobody has edited the waiting turn's prompt"
    assert driver.heard[turn.request.turn_id] == driver.tokens("a")[104:], "what was streamed stays streamed"


# --- C2, C3: a refused overlapping turn touches nothing ---


def play_overlapping_turns(layout: str, overlap: bool, first: bool) -> None:
    driver = Driver(layout, 3, budget=7, overlap=overlap)
    session = driver.open("a")
    if not first:
        driver.turn("a", 11, 3)
    before = len(driver.tokens("a"))
    turn = driver.submit("a", prompt(20, 1), 6, turn_id="live")
    refused = 0
    while session.life is not Life.IDLE:
        if session.life is not Life.SEALING:
            for attempt in range(2):
                with driver.unchanged(errors.SessionBusy):
                    driver.submit("a", prompt(4, 2), 3, turn_id=f"late {attempt}")
                refused += 1
        assert session.life is Life.SEALING or session.turn is turn
        driver.step()
    driver.run()
    assert refused >= 2 * 7
    assert driver.kinds("a")[-1] == ("finished", "live")
    assert len(driver.tokens("a")) == before + 26
    assert driver.tokens("a")[-6:] == driver.says(driver.tokens("a")[:-6], 6)
    driver.close("a")
    driver.scheduler.flush()
    assert driver.all_free()


@pytest.mark.no_cover
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_C2_a_refused_overlapping_turn_leaves_the_live_turn_alone(layout: str, overlap: bool) -> None:
    play_overlapping_turns(layout, overlap, first=False)


@pytest.mark.no_cover
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_C3_a_refused_overlapping_turn_leaves_the_first_turn_alone(layout: str, overlap: bool) -> None:
    play_overlapping_turns(layout, overlap, first=True)


# --- C4: stale events are refused by turn id ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_C4_events_of_an_earlier_turn_do_not_touch_the_memory_of_a_later_one(layout: str) -> None:
    driver = Driver(layout, 3)
    driver.open("a")
    # The first turn is refused by an abort before the session has any memory ...
    driver.submit("a", prompt(5, 1), 3, turn_id="early")
    driver.scheduler.abort("a", "early", driver.now)
    # ... and its client ends it once more when another turn has given the session memory.
    driver.submit("a", prompt(20, 2), 6, turn_id="good")
    for _ in range(3):
        driver.step()
        for stale in ("early", "never"):
            with driver.unchanged(errors.UnknownTurn):
                driver.scheduler.abort("a", stale, driver.now)
            with driver.unchanged(errors.UnknownTurn):
                driver.scheduler.interrupt("a", driver.now, keep=0, turn_id=stale)
    driver.run()
    with driver.unchanged(errors.UnknownTurn):
        driver.scheduler.abort("a", "early", driver.now)
    with driver.unchanged(errors.UnknownTurn):
        driver.scheduler.interrupt("a", driver.now, keep=None, turn_id="early")
    assert driver.kinds("a") == [("aborted", "early"), ("finished", "good")]
    turn = driver.turn("a", 2, 2, 3)
    assert (turn.cached, turn.computed) == (26, 3)


def test_C4_a_result_for_a_plan_that_is_not_the_oldest_in_flight_is_refused() -> None:
    driver = Driver("dense", 3)
    driver.open("a")
    driver.submit("a", prompt(5), 3)
    driver.plan()
    later = driver.plan()
    before = driver.snapshot()
    with pytest.raises(errors.IllegalTransition, match="not the oldest in flight"):
        driver.scheduler.settle(later, StepResult([]), driver.now)
    assert driver.snapshot() == before
    driver.land()
    driver.run()


# --- C5: only units that were taken can be released ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_C5_closing_a_session_without_memory_frees_nothing(layout: str) -> None:
    driver = Driver(layout, 4, pages=40, slots=16)
    sizes = {pool.name: pool.size for pool in driver.ledger.pools.values()}
    driver.open("never ran")
    driver.open("aborted")
    turn = driver.submit("aborted", prompt(9), 3)
    driver.plan()
    driver.scheduler.abort("aborted", turn.request.turn_id, driver.now)
    driver.run()
    driver.open("dropped")
    driver.turn("dropped", 9, 3, 1)
    driver.registry.drop_memory(driver.session("dropped"))
    for name in ("never ran", "aborted", "dropped"):
        driver.close(name)
        with driver.unchanged(errors.UnknownSession):
            driver.scheduler.close(name, driver.now)
    driver.scheduler.flush()
    for pool in driver.ledger.pools.values():
        assert sorted(pool.free) == list(range(sizes[pool.name])), "each unit once, none that never was"


def test_C5_a_dead_hold_and_a_placeholder_cannot_be_released() -> None:
    driver = Driver("hybrid", 4, slots=16)
    pool = driver.ledger.pool(STATE)
    hold = driver.ledger.take(pool, 1, driver.ledger.holder(Kind.SESSION, "a"))
    hold.release()
    with pytest.raises(DeadHold):
        hold.release()
    with pytest.raises(DeadHold):
        hold.move_to(driver.ledger.holder(Kind.SESSION, "b"))
    assert len(pool.free) == 16
    assert issubclass(DeadHold, LedgerError)


# --- C6: the census sees every owner ---


def test_C6_the_census_sees_two_owners_of_one_page() -> None:
    driver = Driver("hybrid", 4)
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        driver.turn(name, 10, 3, seed)
    mine, theirs = (driver.session(name).sequence.full for name in ("a", "b"))
    assert mine is not None and theirs is not None
    taken = theirs.units[0]
    lost = mine.units[0]
    mine.units[0] = taken
    found = {finding.kind: finding for finding in driver.scheduler.audit.census()}
    assert set(found) == {"claimed twice", "lost"}
    assert found["claimed twice"].units == [taken] and found["lost"].units == [lost]
    assert found["claimed twice"].holder == "SESSION a, SESSION b"
    assert {owner.holder.name for owner in found["claimed twice"].owners} == {"a", "b"}


@pytest.mark.no_cover
@pytest.mark.parametrize("layout", LAYOUTS)
def test_C6_every_unit_has_exactly_one_owner_that_the_census_counts(layout: str) -> None:
    driver = Driver(layout, 4, host=200)
    for seed, name in enumerate(("resting", "running", "spilled", "queued")):
        driver.open(name)
        driver.turn(name, 18, 3, seed)
    driver.scheduler.spill("spilled", driver.now)
    driver.run()
    driver.submit("running", prompt(9, 8), 5)
    driver.step()
    driver.submit("queued", prompt(9, 9), 5)
    for pool in driver.ledger.pools.values():
        held = sum(len(grant.units) for grant in driver.ledger.live.values() if grant.pool is pool)
        retiring = sum(len(units) for _, units in pool.retiring)
        assert held + retiring + len(pool.free) == pool.size
        assert sum(pool.counts().values()) == pool.size
    assert driver.scheduler.audit.census() == []
    assert holder_units(driver, Kind.SESSION, "spilled") > 0
    assert holder_units(driver, Kind.TURN, "t5 of running") > 0
    driver.run()


# --- C7: a turn longer than the idle time-out does not close its own session ---


def test_C7_a_turn_longer_than_the_time_out_keeps_its_session() -> None:
    driver = Driver("hybrid", 4, session_ttl=5.0)
    session = driver.open("a")
    turn = driver.submit("a", prompt(5), 30)
    while not turn.over:
        driver.now += 3.0
        driver.step()
    ended = driver.now
    assert ended >= 90.0, "eighteen time-outs long"
    driver.run()
    assert session.life is Life.IDLE and session.idle_since == ended
    driver.now = ended + 4.9
    driver.scheduler.tick(driver.now)
    assert session.life is Life.IDLE
    second = driver.submit("a", prompt(2, 1), 2)
    driver.now = ended + 5.1
    driver.scheduler.tick(driver.now)
    assert second.state.value == "queued", "a waiting turn stops the clock as well"
    driver.run()
    assert second.cached == 35
    driver.now += 5.0
    driver.scheduler.tick(driver.now)
    assert session.life is Life.CLOSED


# --- C8: flush evicts what nobody holds; sessions keep theirs ---


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_C8_flushing_the_cache_leaves_sessions_their_memory(layout: str, page_size: int) -> None:
    driver = Driver(layout, page_size)
    driver.open("a")
    driver.turn("a", 70, 4)
    kept = driver.all_counts()
    driver.request(prompt(70, 1), 4)
    driver.run()
    driver.scheduler.flush()
    driver.run()
    after = driver.all_counts()
    for name, counts in after.items():
        assert counts["SESSION"] == kept[name]["SESSION"]
        assert counts["CHECKPOINT"] == kept[name]["CHECKPOINT"]
        # A published state that no lease needs any more may go; pages that the session leans on stay.
        assert counts["TREE"] <= kept[name]["TREE"]
    if driver.layout.full:
        assert after["full on device"] == kept["full on device"]
    turn = driver.turn("a", 5, 3, 2)
    assert (turn.cached, turn.computed) == (74, 7)
    driver.close("a")
    driver.scheduler.flush()
    assert driver.all_free()


# --- C9: after close, the whole history can be reused ---


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_C9_a_later_session_with_the_same_history_hits_all_of_it(layout: str, page_size: int) -> None:
    driver = Driver(layout, page_size, pages=2200, leave_history=True)
    driver.open("a")
    driver.turn("a", 256, 50)
    driver.turn("a", 556, 50, 1)
    history = driver.tokens("a")
    assert len(history) == 912
    driver.close("a")
    driver.open("b")
    turn = driver.submit("b", (*history, *prompt(8, 2)), 4)
    driver.run()
    assert (turn.cached, turn.computed) == (912, 8 + 3)
    assert driver.heard[turn.request.turn_id] == driver.says([*history, *prompt(8, 2)], 4)
    other = driver.open("c", tenant="blue")
    stranger = driver.submit(other.id, (*history, *prompt(8, 2)), 4)
    driver.run()
    assert stranger.cached == 0, "another tenant finds nothing"


def test_C9_without_the_setting_only_the_first_prompt_stays() -> None:
    driver = Driver("dense", 16, pages=2200, leave_history=False)
    driver.open("a")
    driver.turn("a", 257, 50)
    driver.turn("a", 555, 50, 1)
    history = driver.tokens("a")
    driver.close("a")
    driver.open("b")
    turn = driver.submit("b", (*history, *prompt(8, 2)), 4)
    driver.run()
    assert turn.cached == 256
