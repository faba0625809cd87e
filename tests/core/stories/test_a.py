"""The five failures that everything here starts from: each story on the real core, each count written out."""

import pytest

from holdfast.core import errors
from holdfast.core.layout import Component
from holdfast.core.ledger import Kind
from holdfast.core.session import Life
from tests.core.driver import LAYOUTS, PAGE_SIZES, STATEFUL, Driver, holder_units, prompt

FULL, WINDOW, STATE = Component.FULL, Component.WINDOW, Component.STATE


# --- A1: close gives everything back, and the audit is exact whoever is open ---


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_A1_close_returns_every_unit_of_every_component(layout: str, page_size: int) -> None:
    driver = Driver(layout, page_size)
    for name in ("a", "b", "c"):
        driver.open(name)
    for seed, name in enumerate(("a", "b", "c")):
        driver.turn(name, 40, 5, seed)
        driver.turn(name, 10, 5, seed + 10)
    for pool in driver.ledger.pools.values():
        assert pool.by_kind[Kind.SESSION] > 0
        assert pool.by_kind[Kind.TURN] == pool.by_kind[Kind.RETIRING] == 0
    for name in ("b", "a", "c"):
        driver.close(name)
        assert holder_units(driver, Kind.SESSION, name) == holder_units(driver, Kind.CHECKPOINT, name) == 0
    for pool in driver.ledger.pools.values():
        assert pool.by_kind[Kind.TREE] + len(pool.free) == pool.size, "only the shared prompts are left"
    driver.scheduler.flush()
    assert driver.all_free()
    assert not driver.registry.tree.leases.records and not driver.registry.tree.roots


@pytest.mark.parametrize("layout", STATEFUL)
def test_A1_each_close_returns_the_state_slot_again_and_again(layout: str) -> None:
    driver = Driver(layout, 16, slots=4)
    for round_number in range(20):
        driver.open("a")
        driver.turn("a", 5, 3, round_number)
        driver.turn("a", 5, 3, round_number + 100)
        # One slot is the session's state, one the checkpoint at the end of its first turn.
        assert driver.counts(STATE) == {"FREE": 2, "SESSION": 1, "CHECKPOINT": 1}
        driver.close("a")
        assert driver.counts(STATE) == {"FREE": 4}


@pytest.mark.no_cover
@pytest.mark.parametrize("sessions", [0, 1, 1000])
def test_A1_the_idle_audit_is_exact_with_any_number_of_sessions(sessions: int) -> None:
    driver = Driver("hybrid", 16, pages=1100, slots=1100, budget=2048, strict=sessions <= 1)
    for number in range(sessions):
        driver.open(f"s{number}")
        driver.submit(f"s{number}", prompt(6, number), 2)
    driver.run()
    assert driver.counts(STATE) == {"FREE": 1100 - sessions, **({"SESSION": sessions} if sessions else {})}
    assert driver.counts(FULL) == driver.counts(STATE)
    assert driver.scheduler.audit.census() == []
    for number in range(sessions):
        driver.scheduler.close(f"s{number}", driver.now)
    assert driver.all_free()
    assert driver.scheduler.audit.census() == []


# --- A2: admission is all or nothing ---


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_A2_an_admission_that_fails_holds_nothing_and_can_be_retried(layout: str, page_size: int) -> None:
    driver = Driver(layout, page_size, leave_history=True)
    driver.open("teacher")
    driver.turn("teacher", 40, 5)
    history = driver.tokens("teacher")
    driver.close("teacher")  # Its history is in the tree, with a tail where it does not end with a page.
    driver.open("other", tenant="blue")
    driver.submit("other", prompt(3, 9), 20)  # Somebody decodes all the while.
    driver.step()
    driver.open("a")
    turn = driver.submit("a", (*history, *prompt(7, 1)), 4)

    def held() -> tuple[object, ...]:
        """What the waiting session and the tree hold, who leases, and who waits."""
        now = driver.snapshot()
        mine = sorted(
            hold for hold in now["holds"].values() if "other" not in hold[1] and hold[1] != "TREE blue"
        )
        return mine, len(now["leases"]), now["sessions"]["a"], now["queue"], now["planned"]

    waiting = held()
    with driver.starved("first chunk", "tail copy") as struck:
        for _ in range(5):
            plan = driver.step()
            assert [row.turn.session_id for row in plan.rows] == ["other"] and not plan.copies
            assert held() == waiting
    assert len(struck) >= 5
    driver.run()
    assert turn.state.value == "finished"
    assert driver.heard[turn.request.turn_id] == driver.says([*history, *prompt(7, 1)], 4)
    assert turn.cached == len(history) == 45


def test_A2_what_was_added_keeps_its_slot_and_what_was_not_holds_none() -> None:
    driver = Driver("hybrid", 16, slots=4, budget=64)
    for name in ("a", "b", "c"):
        driver.open(name)
    turns = [driver.submit(name, prompt(20, seed), 30) for seed, name in enumerate(("a", "b", "c"))]
    driver.step()
    # A first turn writes to one slot, and leaves the state at 16 tokens for the tree: two slots each.
    running = [session.id for session in driver.registry.running]
    assert running == ["a", "b"]
    assert holder_units(driver, Kind.TURN, "t1 of a") + holder_units(driver, Kind.TURN, "t2 of b") == 4 + 2
    assert holder_units(driver, Kind.SESSION, "c") == holder_units(driver, Kind.TURN, "t3 of c") == 0
    assert turns[2].state.value == "queued"
    driver.run()
    assert [turn.state.value for turn in turns] == ["finished"] * 3


# --- A3: the turn holds or the session holds, never both ---


@pytest.mark.no_cover
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_A3_one_holder_in_chunked_mixed_and_overlapped_steps(
    layout: str, page_size: int, overlap: bool
) -> None:
    driver = Driver(layout, page_size, budget=9, overlap=overlap, chunk_tokens=7)
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        driver.turn(name, 12, 3, seed)
    long = driver.submit("a", prompt(40, 2), 6, turn_id="long")
    short = driver.submit("b", prompt(2, 3), 12, turn_id="short")
    mixed = 0
    while driver.registry.running or driver.registry.queue:
        plan = driver.step()
        counts = sorted(row.count for row in plan.rows)
        mixed += len(counts) == 2 and counts[0] == 1 < counts[1] <= 7
        for session, turn in ((driver.session("a"), long), (driver.session("b"), short)):
            if session.life is Life.RUNNING:
                assert sum(session.holder.held) == 0, "the turn has it all"
                assert sum(turn.holder.held) > 0
            else:
                assert sum(turn.holder.held) == 0, "the session has it all"
                assert sum(session.holder.held) > 0
    assert mixed >= 2, "decode rows and chunks did share steps"
    driver.run()
    # The last token is computed by one more row after the finish, which is none of the turn's.
    assert (long.cached, long.computed) == (15, 45)
    assert (short.cached, short.computed) == (15, 13)


@pytest.mark.no_cover
@pytest.mark.parametrize("layout", LAYOUTS)
def test_A3_a_retracted_turn_gives_its_memory_back_to_the_session(layout: str) -> None:
    driver = Driver(layout, 1, pages=70, slots=5)
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        driver.turn(name, 10, 2, seed)
    turns = [driver.submit(name, prompt(5, seed + 5), 30) for seed, name in enumerate(("a", "b"))]
    retracted = 0
    while driver.registry.running or driver.registry.queue:
        driver.step()
        for name, turn in zip(("a", "b"), turns, strict=True):
            session = driver.session(name)
            if session.life is Life.QUEUED and turn.retracts:
                retracted += 1
                assert sum(turn.holder.held) == 0
                assert session.sequence.computed <= 12
    driver.run()
    if driver.layout.full:
        assert retracted > 0, "35 + 35 tokens and two histories of 12 do not fit into 70 pages"
    for turn in turns:
        assert turn.state.value == "finished" and turn.generated == 30


# --- A4: trim frees whole pages, and exactly those past the cut ---


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_A4_after_every_settle_allocated_is_what_computed_and_flights_need(
    layout: str, page_size: int
) -> None:
    def guesses(session, turn):
        """Drafts of which the first is right and the second is wrong."""
        history = session.sequence.tokens
        right = driver.says(history.slice(0, len(history)), 1)[0]
        return [right, (right + 1) % 1000, 7]

    driver = Driver(layout, page_size, propose=guesses)
    driver.open("a")
    session, sequence = driver.session("a"), driver.session("a").sequence
    for seed in range(6):
        turn = driver.submit("a", prompt(9, seed), 7)
        while driver.registry.running or driver.registry.queue or driver.registry.seals:
            driver.step()
            if driver.layout.paged:
                assert sequence.pages == max(driver.layout.pages_for(sequence.planned), sequence.leased_pages)
            if sequence.full is not None:
                assert len(sequence.full) == sequence.pages - sequence.leased_pages
            assert sequence.planned == sequence.computed
            assert sequence.spare is None, "the slot of the drafts is given back"
        assert turn.generated == 7
        history = driver.tokens("a")
        assert history[-7:] == driver.says(history[:-7], 7)
        assert sequence.computed == sequence.known == len(history) == 16 * (seed + 1)
    if driver.layout.full:
        full = driver.counts(FULL)
        assert full["SESSION"] + full.get("TREE", 0) == driver.layout.pages_for(96)
    assert session.life is Life.IDLE
    driver.close("a")
    driver.scheduler.flush()
    assert driver.all_free()


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
def test_A4_an_interruption_inside_a_page_keeps_the_page(page_size: int) -> None:
    driver = Driver("dense", page_size)
    driver.open("a")
    driver.turn("a", 20, 10)
    turn = driver.submit("a", prompt(11, 1), 40)
    driver.until(lambda: turn.generated == 25)
    known = 30 + 11 + 4
    driver.scheduler.abort("a", turn.request.turn_id, driver.now, keep=4)
    driver.run()
    sequence = driver.session("a").sequence
    assert sequence.known == known and sequence.computed == known
    counts = driver.counts(FULL)
    assert counts["SESSION"] + counts.get("TREE", 0) == driver.layout.pages_for(known)
    later = driver.turn("a", 5, 3, 2)
    assert (later.cached, later.computed) == (known, 7)


# --- A5: an abort leaves the session at its last commit ---


@pytest.fixture(params=[(layout, size) for layout in LAYOUTS for size in PAGE_SIZES], ids=str)
def chatting(request: pytest.FixtureRequest) -> Driver:
    """A session `a` with one finished turn of 20 + 5 tokens."""
    driver = Driver(*request.param, budget=8)
    driver.open("a")
    driver.turn("a", 20, 5)
    return driver


def at_last_commit(driver: Driver, history: list[int]) -> None:
    """The session is as it was after its last turn, and the next turn computes its own tokens alone."""
    session = driver.session("a")
    assert session.life is Life.IDLE and session.turn is None
    assert driver.tokens("a") == history
    assert session.boundaries == [25]
    turn = driver.turn("a", 6, 4, 77)
    assert (turn.cached, turn.computed) == (25, 9)
    assert driver.tokens("a")[-4:] == driver.says([*history, *prompt(6, 77)], 4)
    driver.close("a")
    driver.scheduler.flush()
    assert driver.all_free()


@pytest.mark.no_cover
def test_A5_abort_before_admission(chatting: Driver) -> None:
    history = chatting.tokens("a")
    before = chatting.all_counts()
    turn = chatting.submit("a", prompt(9, 1), 4)
    chatting.scheduler.abort("a", turn.request.turn_id, chatting.now)
    assert turn.state.value == "aborted"
    assert chatting.all_counts() == before
    at_last_commit(chatting, history)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_A5_abort_of_the_first_turn_in_flight(layout: str) -> None:
    driver = Driver(layout, 3, budget=8)
    session = driver.open("a")
    turn = driver.submit("a", prompt(20), 5)
    driver.step()
    driver.plan()
    driver.scheduler.abort("a", turn.request.turn_id, driver.now)
    driver.run()
    assert (session.life, driver.tokens("a"), session.boundaries) == (Life.IDLE, [], [])
    driver.scheduler.flush()
    driver.run()
    assert driver.all_free(), "a session that has said nothing holds nothing"
    again = driver.turn("a", 20, 5)
    assert (again.cached, again.computed) == (0, 24)


@pytest.mark.no_cover
@pytest.mark.no_cover
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_A5_abort_of_a_later_turn_in_flight(chatting: Driver, steps: int) -> None:
    history = chatting.tokens("a")
    turn = chatting.submit("a", prompt(15, 1), 10)
    for _ in range(steps):
        chatting.step()
    chatting.plan()
    chatting.scheduler.abort("a", turn.request.turn_id, chatting.now)
    assert chatting.session("a").life is Life.RUNNING, "its row is in flight"
    chatting.run()
    assert turn.state.value == "aborted"
    at_last_commit(chatting, history)


@pytest.mark.no_cover
def test_A5_a_second_turn_at_once_is_refused(chatting: Driver) -> None:
    turn = chatting.submit("a", prompt(15, 1), 6)
    for _ in range(5):
        with chatting.unchanged(errors.SessionBusy):
            chatting.submit("a", prompt(3, 2), 2, turn_id="second")
        chatting.step()
    chatting.run()
    assert turn.state.value == "finished" and turn.generated == 6
    assert ("finished", "t2") in chatting.kinds("a")
    assert all(turn_id != "second" for _, turn_id in chatting.kinds("a"))


def test_A5_history_does_not_advance_when_the_turn_fails(chatting: Driver) -> None:
    history = chatting.tokens("a")
    turn = chatting.submit("a", prompt(15, 1), 6)
    for _ in range(2):
        chatting.step()
        chatting.plan()
        chatting.settle(error="the device is on fire")
    assert turn.state.value == "failed"
    at_last_commit(chatting, history)
