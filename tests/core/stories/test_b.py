"""More failures of the same field: aborts in every phase, refusals, pressure, transit, clocks, counts."""

import pytest

from holdfast.core import errors
from holdfast.core.layout import Component, MemoryLayout, Tier
from holdfast.core.ledger import Kind
from holdfast.core.session import Life, Place
from tests.core.driver import LAYOUTS, PAGE_SIZES, STATEFUL, Driver, holder_units, prompt

FULL, WINDOW, STATE = Component.FULL, Component.WINDOW, Component.STATE


# --- B1: as A1, on hybrid models, with checkpoints on ---


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("windowed", [False, True])
def test_B1_checkpoints_of_a_hybrid_session_go_when_it_closes(page_size: int, windowed: bool) -> None:
    layout = MemoryLayout(page_size, window=8 if windowed else 0, state=True, checkpoint_tokens=10)
    driver = Driver(layout, slots=12, checkpoints=3)
    for round_number in range(3):
        driver.open("a")
        for turn in range(6):
            # An input longer than checkpoint_tokens leaves a point at its end, beside the one at its start.
            driver.turn("a", 20, 5, 10 * round_number + turn)
        shared = driver.counts(STATE).get("TREE", 0)
        assert driver.counts(STATE)["CHECKPOINT"] == 3, "as many as the policy keeps"
        assert driver.counts(STATE)["SESSION"] == 1
        assert len(driver.session("a").sequence.points) == 3
        driver.close("a")
        assert driver.counts(STATE) == {"FREE": 12 - shared, **({"TREE": shared} if shared else {})}
        driver.scheduler.flush()
        assert driver.all_free()


# --- B4: abort at every phase returns the session to IDLE ---


def drafting(session, turn):
    """Guesses that are always wrong."""
    return [1, 2]


@pytest.mark.no_cover
@pytest.mark.parametrize("phase", ["queued", "mid-chunk", "decoding", "drafting", "retracted"])
@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_B4_abort_in_every_phase_returns_the_session_to_idle(
    layout: str, in_flight: bool, phase: str
) -> None:
    driver = Driver(layout, 3, budget=6, propose=drafting if phase == "drafting" else None)
    session = driver.open("a")
    driver.turn("a", 10, 4)
    turn = driver.submit("a", prompt(15, 1), 8)
    if phase == "mid-chunk":
        driver.step()
        assert turn.generated == 0 and session.sequence.computed == 20
    elif phase in ("decoding", "drafting"):
        driver.until(lambda: turn.generated >= 2)
    elif phase == "retracted":
        driver.step()
        driver.plan()
        driver.settle(error="once")
        assert turn.retracts == 1
    if in_flight:
        driver.plan()
    driver.scheduler.abort("a", turn.request.turn_id, driver.now)
    driver.run()
    assert (session.life, turn.state.value) == (Life.IDLE, "aborted")
    assert driver.kinds("a")[-1] == ("aborted", turn.request.turn_id)
    assert len(driver.tokens("a")) == 14
    assert driver.turn("a", 3, 2, 2).state.value == "finished"
    with driver.unchanged(errors.UnknownTurn):
        driver.scheduler.abort("a", turn.request.turn_id, driver.now)


@pytest.mark.parametrize("planned", [False, True])
def test_B4_abort_while_sealing_is_stale_and_the_session_comes_to_rest(planned: bool) -> None:
    driver = Driver("hybrid", 3)
    session = driver.open("a")
    turn = driver.submit("a", prompt(10), 4)
    driver.until(lambda: session.life is Life.SEALING)
    if planned:
        driver.plan()
    with driver.unchanged(errors.UnknownTurn):
        driver.scheduler.abort("a", turn.request.turn_id, driver.now)
    driver.run()
    assert session.life is Life.IDLE and session.sequence.computed == 14


def test_B4_abort_while_closing_is_stale_and_the_session_closes() -> None:
    driver = Driver("hybrid", 3)
    session = driver.open("a")
    turn = driver.submit("a", prompt(10), 4)
    driver.step()
    driver.plan()
    driver.scheduler.close("a", driver.now)
    assert session.life is Life.CLOSING
    with driver.unchanged(errors.UnknownTurn):
        driver.scheduler.abort("a", turn.request.turn_id, driver.now)
    driver.run()
    assert session.life is Life.CLOSED
    assert driver.kinds("a") == [("aborted", "t1"), ("closed", "")]


# --- B5: a refused turn changes nothing ---


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_B5_an_over_long_turn_leaves_the_history_alone(layout: str, page_size: int) -> None:
    driver = Driver(layout, page_size, pages=2000, context_length=1000)
    driver.open("a")
    driver.turn("a", 900, 20)
    with driver.unchanged(errors.ContextExceeded):
        driver.submit("a", prompt(70, 1), 11)
    with pytest.raises(
        errors.ContextExceeded, match="context length of 1001 tokens; the maximum is 1000"
    ) as caught:
        driver.submit("a", prompt(70, 1), 11)
    assert (caught.value.needed, caught.value.limit) == (1001, 1000)
    turn = driver.turn("a", 70, 10, 1)
    assert (turn.cached, turn.computed) == (920, 79)


# --- B6: the scheduler always gets on ---


@pytest.mark.no_cover
@pytest.mark.parametrize("host", [0, 100, 1000])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_B6_four_sessions_of_25_pages_in_a_pool_of_100_all_finish(page_size: int, host: int) -> None:
    driver = Driver("dense", page_size, pages=100, host=host, budget=512)
    names = ("a", "b", "c", "d")
    size = 25 * page_size
    for seed, name in enumerate(names):
        driver.open(name)
        driver.turn(name, size - 1, 1, seed)
    # Their memory fills the pool to the last page, and each history has its 25 pages.
    assert driver.counts(FULL).get("FREE", 0) == 0
    turns = [driver.submit(name, prompt(page_size, seed + 9), page_size) for seed, name in enumerate(names)]
    driver.run()
    assert [turn.state.value for turn in turns] == ["finished"] * 4
    for seed, (name, turn) in enumerate(zip(names, turns, strict=True)):
        history = driver.tokens(name)
        assert turn.generated == page_size
        assert history[size : size + page_size] == list(prompt(page_size, seed + 9))
        assert history[-page_size:] == driver.says(history[:-page_size], page_size)
    counters = driver.registry.counters
    assert counters.spills + counters.dropped + counters.retracts > 0
    assert counters.spills > 0 or not host
    for name in names:
        driver.close(name)
    driver.scheduler.flush()
    assert driver.all_free()


@pytest.mark.no_cover
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", STATEFUL)
def test_B6_more_sessions_than_state_slots_all_finish(layout: str, overlap: bool) -> None:
    driver = Driver(layout, 4, slots=5, host=40, overlap=overlap)
    names = [f"s{number}" for number in range(12)]
    for name in names:
        driver.open(name)
    for round_number in range(3):
        turns = [
            driver.submit(name, prompt(9, 20 * round_number + seed), 4) for seed, name in enumerate(names)
        ]
        driver.run()
        assert {turn.state.value for turn in turns} == {"finished"}
    assert all(len(driver.tokens(name)) == 39 for name in names)


def test_B6_a_turn_that_cannot_fit_alone_is_refused_with_the_figure() -> None:
    driver = Driver("dense", 16, pages=100)
    driver.open("a")
    with driver.unchanged(errors.TooLarge):
        driver.submit("a", prompt(1590), 11)
    with pytest.raises(errors.TooLarge) as caught:
        driver.submit("a", prompt(1590), 11)
    assert (caught.value.component, caught.value.needed, caught.value.available) == ("full", 101, 100)
    assert driver.turn("a", 1590, 10).state.value == "finished"


def test_B6_paused_sessions_do_not_keep_a_new_one_waiting() -> None:
    driver = Driver("hybrid", 16, pages=20, slots=4)
    for seed in range(10):
        driver.open(f"s{seed}")
        turn = driver.turn(f"s{seed}", 100, 3, seed)
        assert turn.state.value == "finished"
    assert driver.registry.counters.dropped > 0, "without another tier, memory at rest is dropped"
    again = driver.turn("s0", 5, 3, 50)
    assert again.state.value == "finished"
    assert driver.tokens("s0")[-3:] == driver.says(driver.tokens("s0")[:-3], 3)


# --- B7: an empty turn is a refusal, or goes on where that was asked for ---


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_B7_an_empty_turn_is_refused_or_goes_on(layout: str, page_size: int) -> None:
    driver = Driver(layout, page_size)
    driver.open("a")
    with driver.unchanged(errors.EmptyTurn):
        driver.submit("a", (), 5)
    with driver.unchanged(errors.EmptyTurn):
        driver.submit("a", (), 5, goes_on=True)  # There is nothing yet to go on with.
    driver.turn("a", 30, 4)
    with driver.unchanged(errors.EmptyTurn):
        driver.submit("a", (), 5)
    history = driver.tokens("a")
    turn = driver.submit("a", (), 5, goes_on=True)
    driver.run()
    assert turn.generated == 5
    assert driver.tokens("a") == history + driver.says(history, 5)
    assert driver.session("a").boundaries == [34, 39]


# --- B9: TRANSIT is a holder ---


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_B9_what_waits_in_a_copy_queue_is_accounted_for(layout: str, page_size: int) -> None:
    driver = Driver(layout, page_size, host=100)
    session = driver.open("a")
    driver.turn("a", 30, 4)
    own = {pool.component: session.holder.held[pool.index] for pool in driver.ledger.pools.values()}
    assert driver.scheduler.spill("a", driver.now)
    assert session.state == "SPILLING"
    driver.plan()  # The copy is in flight: the source is the session's, the destination is in transit.
    for component, units in ((c, session.holder.held[driver.ledger.pool(c).index]) for c in own):
        assert driver.counts(component, Tier.HOST).get("TRANSIT", 0) == units
    assert driver.scheduler.audit.census() == []
    moved = {c: driver.counts(c, Tier.HOST).get("TRANSIT", 0) for c in own}
    driver.land()
    assert session.state == "SPILLED" and driver.scheduler.audit.census() == []
    for component, units in moved.items():
        assert driver.counts(component, Tier.HOST).get("SESSION", 0) == units
        assert driver.counts(component, Tier.HOST).get("TRANSIT", 0) == 0
        assert driver.counts(component).get("SESSION", 0) == 0
    turn = driver.submit("a", prompt(3, 1), 2)
    driver.plan()
    assert session.state == "RESTORING"
    for component, units in moved.items():
        assert driver.counts(component).get("TRANSIT", 0) == units
    assert driver.scheduler.audit.census() == []
    driver.run()
    assert (turn.cached, turn.computed) == (34, 4), "what came back is not computed again"
    for component, units in moved.items():
        kept = 0 if component is Component.STATE else units - bool(34 % page_size)
        counts = driver.counts(component, Tier.HOST)
        assert (counts.get("COPY", 0), counts["FREE"]) == (kept, 100 - kept), "whole pages stay on the host"
    driver.close("a")
    assert all(driver.counts(component, Tier.HOST) == {"FREE": 100} for component in own)


# --- B10: page sizes, layouts, mixed chunks, drafts and windows together ---


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("drafts", [False, True])
def test_B10_nothing_leaks_in_mixed_steps_of_any_layout_and_page_size(
    layout: str, page_size: int, drafts: bool
) -> None:
    def half_right(session, turn):
        history = session.sequence.tokens
        said = driver.says(history.slice(0, len(history)), 3)
        return said if turn.generated % 2 else [said[0], 3]

    driver = Driver(
        layout,
        page_size,
        budget=11,
        overlap=not drafts,
        propose=half_right if drafts else None,
        chunk_tokens=5,
    )
    names = ("a", "b", "c")
    for name in names:
        driver.open(name)
    for round_number in range(3):
        for seed, name in enumerate(names):
            driver.submit(name, prompt(7 + 9 * seed, 10 * round_number + seed), 3 + 4 * seed)
            driver.step()
        driver.request(prompt(13, 90 + round_number), 5)
        driver.run()
    for seed, name in enumerate(names):
        assert driver.session(name).sequence.computed == len(driver.tokens(name)) == 3 * (10 + 13 * seed)
        driver.close(name)
    driver.scheduler.flush()
    assert driver.all_free()


# --- B11: marks move on commit only ---


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_B11_a_retraction_does_not_move_the_mark(layout: str, page_size: int) -> None:
    driver = Driver(layout, page_size)
    session = driver.open("a")
    driver.turn("a", 30, 4)
    history = driver.tokens("a")
    turn = driver.submit("a", prompt(12, 1), 20)
    for failure in range(3):
        while turn.generated < 3 * (failure + 1):
            driver.step()
        assert session.sequence.mark is not None
        assert (session.sequence.mark.known, session.sequence.mark.point.length) == (34, 34)
        turn.failures = 0
        driver.plan()
        driver.settle(error="once more")
        assert turn.retracts == failure + 1
        assert (session.boundaries, session.sequence.computed) == ([34], 34)
        assert turn.known_before == 34
    driver.scheduler.abort("a", turn.request.turn_id, driver.now)
    driver.run()
    assert driver.tokens("a") == history
    again = driver.turn("a", 5, 3, 2)
    assert (again.cached, again.computed) == (34, 7)


# --- B12: a finding is healed and reported, and the service goes on ---


def test_B12_a_finding_never_stops_the_service() -> None:
    driver = Driver("hybrid", 4)
    for seed, name in enumerate(("a", "b", "c")):
        driver.open(name)
        driver.turn(name, 9, 3, seed)
    turns = {name: driver.submit(name, prompt(6, seed + 7), 10) for seed, name in enumerate(("a", "b"))}
    driver.until(lambda: all(turn.generated >= 2 for turn in turns.values()))
    # Plant it: a page of the running turn of `a` is on the free list as well.
    full = driver.session("a").sequence.full
    assert full is not None
    pool = driver.ledger.pool(FULL)
    pool.free.append(full.units[-1])
    plan = driver.scheduler.plan(64, driver.now)
    events = driver.scheduler.settle(plan, driver.compute(plan), driver.now)
    found = [event for event in events if event.kind == "finding"]
    assert found and "claimed while free" in found[0].reason
    failed = [event for event in events if event.kind == "failed"]
    assert [event.session_id for event in failed] == ["a"]
    assert turns["a"].state.value == "failed" and turns["b"].state.value == "running"
    assert pool.counts()["QUARANTINE"] == 1
    for name, seed in (("a", 31), ("c", 32)):
        assert driver.turn(name, 4, 3, seed).state.value == "finished"
    assert turns["b"].state.value == "finished" and turns["b"].generated == 10
    assert driver.tokens("b")[-10:] == driver.says(driver.tokens("b")[:-10], 10)


# --- B13: idle time counts from the end of a turn; sessions are capped ---


def test_B13_the_idle_clock_stands_still_while_a_turn_waits_or_runs() -> None:
    driver = Driver("dense", 4)
    session = driver.open("a", ttl=10.0)
    driver.now = 9.0
    turn = driver.submit("a", prompt(5), 4)
    for now in (20.0, 40.0, 60.0, 80.0):
        driver.now = now
        driver.step()
    assert turn.state.value == "finished" and turn.generated == 4
    assert session.idle_since == 80.0
    driver.now = 89.9
    driver.run()
    driver.scheduler.tick(89.999)
    assert session.life is Life.IDLE
    driver.scheduler.tick(90.0)
    assert session.life is Life.CLOSED
    driver.now = 90.0
    driver.run()
    assert driver.kinds("a") == [("finished", "t1"), ("closed", "")]
    with driver.unchanged(errors.SessionExpired):
        driver.submit("a", prompt(2), 2)
    assert driver.open("a").life is Life.IDLE, "the name is free again"


def test_B13_sessions_are_capped_for_the_server_and_for_each_tenant() -> None:
    driver = Driver("dense", 4, sessions_max=5, tenant_sessions_max=3)
    for number in range(3):
        driver.open(f"red {number}", tenant="red")
    with driver.unchanged(errors.TooManySessions):
        driver.open("red 3", tenant="red")
    driver.open("b0", tenant="blue")
    driver.open("b1", tenant="blue")
    with driver.unchanged(errors.TooManySessions):
        driver.open("b2", tenant="blue")
    with driver.unchanged(errors.TooManySessions):
        driver.request(prompt(4), 2, tenant="blue")
    driver.close("red 1")
    assert driver.open("b2", tenant="blue").life is Life.IDLE


# --- B14: a turn computes its own tokens, however long the history ---


@pytest.mark.parametrize(
    ("layout", "page_size"), [("dense", 16), ("dense", 64), ("hybrid", 16), ("window", 64)]
)
def test_B14_a_turn_past_8192_tokens_of_history_computes_its_own_tokens(layout: str, page_size: int) -> None:
    driver = Driver(layout, page_size, pages=1200)
    driver.open("a")
    driver.turn("a", 9000, 3)
    for seed in range(1, 5):
        known = len(driver.tokens("a"))
        turn = driver.turn("a", 20, 3, seed)
        assert (turn.cached, turn.computed) == (known, 22)
    assert driver.registry.counters.cached_tokens == 9003 + 9026 + 9049 + 9072


@pytest.mark.no_cover
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_B14_cached_and_computed_add_up_over_many_turns(layout: str, page_size: int) -> None:
    driver = Driver(layout, page_size)
    driver.open("a")
    known = 0
    for seed in range(12):
        turn = driver.turn("a", 5 + seed, 4, seed)
        assert turn.cached == known and turn.computed == 5 + seed + 3
        known += 5 + seed + 4


# --- B18: reports name holders ---


def test_B18_a_leak_report_names_the_culprit_and_no_healthy_session() -> None:
    driver = Driver("hybrid", 4)
    for seed, name in enumerate(("ada", "bob", "eve")):
        driver.open(name)
        driver.turn(name, 20, 3, seed)
    culprit = driver.ledger.holder(Kind.TURN, "t9 of eve")
    pool = driver.ledger.pool(FULL)
    parked = [driver.ledger.take(pool, 3, culprit)]
    units = list(parked[0].units)
    found = driver.scheduler.audit.census()
    assert [(finding.kind, finding.holder, sorted(finding.units)) for finding in found] == [
        ("unclaimed", "TURN t9 of eve", sorted(units))
    ]
    assert "ada" not in str(found[0]) and "bob" not in str(found[0])
    assert any("take" in line and "TURN t9 of eve" in line for line in found[0].trail)
    parked.clear()
    assert driver.scheduler.audit.census() == [], "it was reclaimed, and is not reported twice"
    assert holder_units(driver, Kind.SESSION, "ada") > 0
    for name in ("ada", "bob", "eve"):
        assert driver.turn(name, 3, 2, 8).cached == 23


def test_B18_a_spilled_session_is_no_leak() -> None:
    driver = Driver("hybrid", 4, host=50)
    session = driver.open("a")
    driver.turn("a", 20, 3)
    driver.scheduler.spill("a", driver.now)
    driver.run()
    assert session.place is Place.AWAY
    assert driver.scheduler.audit.census() == []
