"""Host copies: what a session that came back has left on the host, and how leaving again uses it."""

import pytest

from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import Kind, OutOfUnits
from holdfast.core.policy import Share, spill_order
from holdfast.core.retention import Retention
from holdfast.core.session import Place, Session
from holdfast.core.tiers import start_spill
from tests.core.driver import LAYOUTS, Driver, prompt

FULL, WINDOW, STATE = Component.FULL, Component.WINDOW, Component.STATE
PAGE = 4


def leave(driver: Driver, name: str = "a") -> dict[Component, int]:
    """Let a session leave for the host; how many units of each component were copied."""
    before = len(driver.plans)
    assert driver.scheduler.spill(name, driver.now, Tier.HOST)
    driver.run()
    assert driver.session(name).place is Place.AWAY
    moved = dict.fromkeys(driver.layout.components, 0)
    for plan in driver.plans[before:]:
        for move in plan.moves:
            assert (move.source_tier, move.destination_tier) == (Tier.DEVICE, Tier.HOST)
            moved[move.component] += len(move.sources)
    return moved


def come_back(driver: Driver, name: str = "a") -> None:
    assert driver.scheduler.restore(name, driver.now)
    driver.run()
    assert driver.session(name).place is Place.HOME


def away_and_back(layout: str = "dense", page_size: int = PAGE, tokens: int = 30, **more: object) -> Driver:
    """A session of `tokens` tokens that has been on the host."""
    driver = Driver(layout, page_size, host=more.pop("host", 100), **more)
    driver.open("a")
    driver.turn("a", tokens - 4, 4)
    leave(driver)
    come_back(driver)
    return driver


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_leaving_again_copies_what_is_new(layout: str, page_size: int) -> None:
    driver = away_and_back(layout, page_size, tokens=100, host=300)
    session = driver.session("a")
    for seed, known in ((1, 108), (2, 116)):
        driver.turn("a", 5, 3, seed)
        assert session.sequence.computed == known
        moved = leave(driver)
        new = driver.layout.pages_for(known) - (known - 8) // page_size
        for component, count in moved.items():
            assert count == (1 if component is STATE else new)
        come_back(driver)
    turn = driver.turn("a", 5, 3, 3)
    assert turn.cached == 116 and driver.tokens("a")[-3:] == driver.says(driver.tokens("a")[:-3], 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_leaving_unchanged_copies_nothing_and_frees_the_device_at_once(layout: str) -> None:
    driver = away_and_back(layout)
    driver.run()
    assert driver.scheduler.spill("a", driver.now)
    assert driver.session("a").place is Place.AWAY and not driver.registry.transits
    assert not driver.registry.moves.pending
    driver.run()
    assert all(driver.counts(component).get("SESSION", 0) == 0 for component in driver.layout.components)
    assert driver.turn("a", 3, 2, 1).cached == 30


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_turn_that_is_rolled_back_leaves_the_copy_whole(layout: str) -> None:
    driver = away_and_back(layout)
    turn = driver.submit("a", prompt(9, 1), 50)
    driver.until(lambda: turn.generated > 3)
    driver.scheduler.abort("a", turn.request.turn_id, driver.now)
    driver.run()
    assert sum(leave(driver).values()) == 0


@pytest.mark.parametrize("cut", [0, 13, 16])
def test_a_cut_shortens_the_copy(cut: int) -> None:
    driver = Driver("dense", PAGE, host=100)
    driver.open("a")
    driver.turn("a", cut - 3 if cut else 5, 3)
    driver.turn("a", 20, 4, 1)
    leave(driver)
    come_back(driver)
    driver.scheduler.rewind("a", 1 if cut else 0, driver.now)
    copy = driver.session("a").sequence.copy
    if not cut:
        assert copy is None and driver.counts(FULL, Tier.HOST) == {"FREE": 100}
        return
    assert copy is not None and copy.length == cut
    assert driver.counts(FULL, Tier.HOST)["COPY"] == driver.layout.pages_for(cut)
    driver.turn("a", 6, 2, 2)
    assert driver.counts(FULL, Tier.HOST)["COPY"] == cut // PAGE, "what was partly filled is stale"
    assert leave(driver)[FULL] == driver.layout.pages_for(cut + 8) - cut // PAGE
    assert driver.turn("a", 3, 2, 3).cached == cut + 8


def test_a_cut_at_rest_can_leave_without_a_copy() -> None:
    driver = away_and_back(tokens=30)
    driver.turn("a", 5, 3, 1)
    driver.scheduler.interrupt("a", driver.now, keep=None)
    driver.run()
    assert driver.session("a").sequence.computed == 30
    assert leave(driver)[FULL] == 1, "the partly filled page was given up with the turn"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fork_shares_pages_and_the_parent_leaves_without_them(layout: str) -> None:
    driver = away_and_back(layout, tokens=30)
    driver.scheduler.fork("a", "b", driver.now)
    driver.run()
    assert driver.session("b").sequence.copy is None
    parent = driver.session("a").sequence
    assert parent.copy is not None
    shared = parent.leased_pages
    moved = leave(driver)
    assert sum(moved.values()) == 0 and driver.scheduler.audit.census() == []
    if driver.layout.full:
        assert driver.counts(FULL, Tier.HOST)["SESSION"] == driver.layout.pages_for(30) - shared
    assert "COPY" not in driver.counts(driver.layout.components[0], Tier.HOST)
    assert driver.turn("a", 3, 2, 1).cached == 30
    # Once nobody else leans on them, the shared pages leave as well: they come before those of the copy.
    driver.close("b")
    driver.registry.tree.flush()
    moved = leave(driver)
    if driver.layout.full:
        assert moved[FULL] == driver.layout.pages_for(35) - (30 // PAGE - shared)
    assert driver.turn("a", 3, 2, 2).cached == 35


def test_a_short_host_gives_up_copies_before_memory_of_sessions_that_are_away() -> None:
    driver = Driver("dense", PAGE, pages=60, host=17)
    for name in ("a", "b"):
        driver.open(name)
        driver.turn(name, 26, 4, ord(name))
        leave(driver, name)
    come_back(driver, "a")
    assert driver.counts(FULL, Tier.HOST) == {"SESSION": 8, "COPY": 8, "FREE": 1}
    driver.open("c")
    driver.turn("c", 26, 4, 5)
    leave(driver, "c")
    assert driver.session("b").place is Place.AWAY
    assert driver.session("a").sequence.copy is None and driver.registry.moves.copied == {}
    assert driver.counts(FULL, Tier.HOST) == {"SESSION": 16, "FREE": 1}
    assert driver.turn("b", 3, 2, 6).cached == 30
    assert driver.turn("a", 3, 2, 7).cached == 30


def test_the_copy_that_came_back_last_goes_first_and_only_as_many_as_needed() -> None:
    driver = Driver("dense", PAGE, pages=80, host=25)
    for name in ("a", "b", "c"):
        driver.open(name)
        driver.turn(name, 26, 4, ord(name))
        leave(driver, name)
    for name in ("c", "a", "b"):
        come_back(driver, name)
    driver.open("d")
    driver.turn("d", 26, 4, 5)
    leave(driver, "d")
    kept = [name for name in "abc" if driver.session(name).sequence.copy is not None]
    assert kept == ["a", "c"]


def test_at_a_quota_copies_of_other_tenants_stay() -> None:
    driver = Driver("dense", PAGE, pages=80, host=40, shares={"red": Share(host=0.25)})
    for name, tenant in (("a", "red"), ("b", "blue")):
        driver.open(name, tenant)
        driver.turn(name, 26, 4, ord(name))
        leave(driver, name)
        come_back(driver, name)
    driver.open("c", "red")
    driver.turn("c", 26, 4, 5)
    leave(driver, "c")
    assert driver.session("a").sequence.copy is None
    assert driver.session("b").sequence.copy is not None


def test_beyond_its_quota_a_session_takes_no_copies_of_others() -> None:
    driver = Driver("dense", PAGE, pages=80, host=20, shares={"red": Share(host=0.5)})
    driver.open("a", "blue")
    driver.turn("a", 26, 4)
    leave(driver)
    come_back(driver)
    driver.open("b", "red")
    driver.turn("b", 54, 4, 1)
    assert not driver.scheduler.spill("b", driver.now, Tier.HOST)
    assert driver.session("a").sequence.copy is not None


def test_within_its_quota_a_short_host_gives_up_copies_of_others() -> None:
    """The tenant's own copy is in the way of its quota, and then another's in the way of the pool."""
    driver = Driver("dense", PAGE, pages=80, host=26, shares={"red": Share(host=0.62)})
    for name, tenant in (("a", "blue"), ("b", "blue"), ("c", "red")):
        driver.open(name, tenant)
        driver.turn(name, 26, 4, ord(name))
        leave(driver, name)
    come_back(driver, "b")
    come_back(driver, "c")
    assert driver.counts(FULL, Tier.HOST) == {"SESSION": 8, "COPY": 16, "FREE": 2}
    driver.open("d", "red")
    driver.turn("d", 54, 4, 5)
    assert leave(driver, "d") == {FULL: 15}
    assert driver.session("a").place is Place.AWAY
    assert driver.counts(FULL, Tier.HOST) == {"SESSION": 23, "FREE": 3}


def test_the_copy_of_a_session_that_leaves_is_not_given_up() -> None:
    driver = Driver("dense", PAGE, pages=80, host=14)
    driver.open("a")
    driver.turn("a", 26, 4)
    leave(driver)
    come_back(driver)
    driver.turn("a", 9, 3, 1)
    driver.open("b")
    driver.turn("b", 26, 4, 2)
    assert driver.scheduler.spill("a", driver.now) and driver.session("a").place is Place.LEAVING
    assert not driver.scheduler.spill("b", driver.now), "only what leaves could make room"
    driver.run()
    assert driver.session("a").place is Place.AWAY
    assert driver.turn("a", 3, 2, 3).cached == 42


def test_a_cancelled_spill_keeps_the_copy() -> None:
    driver = away_and_back()
    driver.turn("a", 9, 3, 1)
    assert driver.scheduler.spill("a", driver.now)
    turn = driver.submit("a", prompt(3, 2), 2)
    driver.run()
    assert turn.cached == 42 and driver.scheduler.audit.census() == []
    assert driver.counts(FULL, Tier.HOST)["COPY"] == 30 // PAGE
    assert leave(driver)[FULL] == driver.layout.pages_for(47) - 30 // PAGE


def test_a_failed_spill_keeps_the_copy() -> None:
    driver = away_and_back("hybrid")
    driver.turn("a", 9, 3, 1)
    pool = driver.ledger.pool(STATE, Tier.HOST)
    filler = driver.ledger.take(pool, len(pool.free), driver.ledger.holder(Kind.QUARANTINE, "filler"))
    assert not driver.scheduler.spill("a", driver.now)
    assert driver.counts(FULL, Tier.HOST)["COPY"] == 30 // PAGE
    filler.release()
    assert leave(driver) == {FULL: driver.layout.pages_for(42) - 30 // PAGE, STATE: 1}


@pytest.mark.parametrize("end", ["close", "drop", "disk"])
def test_the_copy_goes_with_the_memory(end: str) -> None:
    driver = away_and_back("full+window+state", disk=100)
    if end == "close":
        driver.close("a")
    elif end == "drop":
        driver.registry.give_up(driver.session("a"))
    else:
        assert driver.scheduler.spill("a", driver.now, Tier.DISK)
        driver.run()
    for component in driver.layout.components:
        assert driver.counts(component, Tier.HOST) == {"FREE": 100}
    assert driver.scheduler.audit.census() == []


def test_what_comes_back_from_disk_has_no_copy() -> None:
    driver = Driver("dense", PAGE, disk=100)
    driver.open("a")
    driver.turn("a", 26, 4)
    assert driver.scheduler.spill("a", driver.now, Tier.DISK)
    driver.run()
    come_back(driver)
    assert driver.session("a").sequence.copy is None and driver.registry.moves.copied == {}
    assert driver.counts(FULL, Tier.DISK) == {"FREE": 100}


def test_a_window_that_slid_past_its_copy_is_copied_whole() -> None:
    driver = away_and_back("window")
    driver.turn("a", 40, 4, 1)
    moved = leave(driver)
    assert moved[WINDOW] == driver.layout.pages_for(74) - driver.layout.window_first_page(74)
    assert moved[FULL] == driver.layout.pages_for(74) - 30 // PAGE
    assert driver.turn("a", 3, 2, 2).cached == 74


def test_the_audit_names_the_copy() -> None:
    driver = away_and_back()
    copy = driver.session("a").sequence.copy
    assert copy is not None
    assert {repr(run.hold.holder) for run in copy.runs.values()} == {"COPY a"}
    driver.session("a").sequence.copy = None
    (finding,) = driver.scheduler.audit.census()
    assert finding.holder == "COPY a" and finding.healed == "reclaimed"


def test_a_32k_session_leaves_again_with_two_percent() -> None:
    """32,768 tokens in pages of 64; a turn of 64 tokens."""
    driver = Driver("dense", 64, pages=1200, host=1200, chunk_tokens=8192, budget=8192)
    driver.open("a")
    driver.turn("a", 32_704, 64)
    whole = leave(driver)[FULL]
    come_back(driver)
    driver.turn("a", 32, 32, 1)
    assert whole == 512 and leave(driver)[FULL] <= 0.02 * whole


def test_a_spill_that_finds_no_unit_raises_and_keeps_the_copy() -> None:
    driver = away_and_back()
    driver.turn("a", 9, 3, 1)
    pool = driver.ledger.pool(FULL, Tier.HOST)
    filler = driver.ledger.take(pool, len(pool.free), driver.ledger.holder(Kind.QUARANTINE, "filler"))
    sequence = driver.session("a").sequence
    with pytest.raises(OutOfUnits):
        start_spill(sequence, Tier.HOST, driver.ledger.holder(Kind.TRANSIT, "a"), 1)
    filler.release()
    assert leave(driver)[FULL] == driver.layout.pages_for(42) - 30 // PAGE


def test_of_equals_a_session_with_a_whole_copy_leaves_first() -> None:
    driver = Driver("dense", PAGE, pages=40, host=100)
    for name in ("a", "b", "c"):
        driver.open(name)
        driver.turn(name, 26, 4, ord(name))
    leave(driver, "b")
    come_back(driver, "b")
    resting = [driver.session(name) for name in ("a", "b", "c")]
    assert [session.id for session in spill_order(resting, driver.now)] == ["b", "a", "c"]
    driver.turn("b", 3, 2, 1)
    assert [session.id for session in spill_order(resting, driver.now)] == ["a", "c", "b"], "it is longer now"


def test_the_copy_of_a_state_that_was_cut_is_not_whole() -> None:
    driver = Driver("hybrid", PAGE, host=100)
    driver.open("a")
    driver.turn("a", 9, 3)
    driver.turn("a", 9, 3, 1)
    leave(driver)
    come_back(driver)
    copy = driver.session("a").sequence.copy
    assert copy is not None and copy.is_whole(24) and not copy.is_whole(25)
    copy.follow(12)
    assert not copy.is_whole(12)


def test_sessions_whose_turn_waits_give_way_last_and_the_first_turn_at_the_end() -> None:
    driver = Driver("dense", PAGE, pages=60, host=100)
    for name in ("a", "b", "c", "d"):
        driver.open(name)
        driver.turn(name, 26, 4, ord(name))
    driver.now += 100.0
    driver.submit("b", prompt(3), 2)
    driver.submit("a", prompt(3), 2)
    resting = [driver.session(name) for name in ("a", "b", "c", "d")]
    assert [session.id for session in spill_order(resting, driver.now)] == ["c", "d", "a", "b"]
    driver.run()


def half_of_them_away(host: int, **policy: object) -> tuple[Driver, list[Session]]:
    """Eight sessions on a device for four of them; those that are on the host."""
    driver = Driver("dense", PAGE, pages=35, host=host, **policy)
    for number in range(8):
        driver.open(f"s{number}")
        driver.turn(f"s{number}", 26, 4, number)
    sessions = list(driver.registry.sessions.values())
    away = [session for session in sessions if session.place is Place.AWAY]
    assert len(away) == 4 and leaving(driver) == 0
    return driver, away


def leaving(driver: Driver) -> int:
    """How many sessions are on their way to the host."""
    return sum(session.place is Place.LEAVING for session in driver.registry.sessions.values())


def test_room_is_made_for_several_waiting_turns_at_a_time() -> None:
    driver, away = half_of_them_away(host=100)
    turns = [driver.submit(session.id, prompt(3, 9), 2) for session in away[:3]]
    plan = driver.step()
    assert len({move.number for move in plan.moves}) >= 3, "three leave at once"
    driver.run()
    assert all(turn.cached == 30 for turn in turns)
    assert driver.registry.counters.dropped == 0


def test_nobody_leaves_ahead_where_the_host_has_no_room() -> None:
    driver, away = half_of_them_away(host=33)
    driver.scheduler.pressure.leave_ahead(away)
    assert leaving(driver) == 0
    assert driver.registry.counters.dropped == 0


def test_no_copy_is_given_up_for_whoever_leaves_ahead() -> None:
    driver = Driver("dense", PAGE, pages=20, host=25)
    for name in ("a", "b", "c"):
        driver.open(name)
        driver.turn(name, 26, 4, ord(name))
        leave(driver, name)
    come_back(driver, "a")
    driver.turn("a", 9, 3, 1)
    driver.open("d")
    driver.turn("d", 26, 4, 2)
    assert driver.counts().get("FREE", 0) < 8, "one more does not fit"
    assert driver.counts(FULL, Tier.HOST) == {"SESSION": 16, "COPY": 7, "FREE": 2}
    driver.scheduler.pressure.leave_ahead([driver.session("b")])
    assert leaving(driver) == 0
    assert driver.counts(FULL, Tier.HOST) == {"SESSION": 16, "COPY": 7, "FREE": 2}


@pytest.mark.parametrize("needed", ["by a turn that waits", "pinned"])
def test_what_is_needed_next_or_pinned_does_not_leave_ahead(needed: str) -> None:
    driver, away = half_of_them_away(host=100, pinned_share=1.0)
    for session in driver.registry.sessions.values():
        if session.place is Place.HOME and needed == "pinned":
            session.retention = Retention(pinned=True)
        elif session.place is Place.HOME:
            driver.submit(session.id, prompt(3, 9), 2)
    driver.scheduler.pressure.leave_ahead(away)
    assert leaving(driver) == 0
    driver.run()


def test_what_leaves_already_counts_and_the_next_one_follows_it() -> None:
    driver, away = half_of_them_away(host=100)
    left = []
    for count in (1, 1, 2):
        driver.scheduler.pressure.leave_ahead(away[:count])
        left.append(leaving(driver))
    assert left == [1, 1, 2]
    driver.run()


def test_a_whole_copy_leaves_although_the_host_is_full() -> None:
    driver = away_and_back("hybrid")
    fillers = []
    for component in driver.layout.components:
        pool = driver.ledger.pool(component, Tier.HOST)
        filler = driver.ledger.holder(Kind.QUARANTINE, "filler")
        fillers.append(driver.ledger.take(pool, len(pool.free), filler))
    assert driver.scheduler.spill("a", driver.now)
    assert driver.session("a").place is Place.AWAY
    for each in fillers:
        each.release()
    assert driver.turn("a", 3, 2, 1).cached == 30


def test_a_session_that_comes_back_again_is_the_last_that_came_back() -> None:
    driver = Driver("dense", PAGE, pages=80, host=25)
    for name in ("a", "b"):
        driver.open(name)
        driver.turn(name, 26, 4, ord(name))
        leave(driver, name)
        come_back(driver, name)
    leave(driver, "a")
    come_back(driver, "a")
    assert [session.id for session in driver.registry.moves.copied] == ["b", "a"]
    driver.open("c")
    driver.turn("c", 40, 4, 5)
    leave(driver, "c")
    assert [name for name in "ab" if driver.session(name).sequence.copy is not None] == ["b"]


def test_nobody_leaves_ahead_before_a_session_that_has_no_room() -> None:
    driver = Driver("dense", PAGE, pages=22, host=13)
    for name, tokens in (("waiting", 26), ("long idle", 26), ("short", 6)):
        driver.open(name)
        driver.turn(name, tokens, 4, len(name))
        driver.now += 1000.0
        if name == "waiting":
            leave(driver, name)
    idle = [driver.session(name) for name in ("short", "long idle")]
    assert [session.id for session in spill_order(idle, driver.now)] == ["long idle", "short"]
    assert driver.registry.moves.spill_tier(idle[0], (Tier.HOST,)) is Tier.HOST
    assert driver.registry.moves.spill_tier(idle[1], (Tier.HOST,)) is None
    # 22 pages less 8 and 3: what waits would need 8 of the 11 that are free; the second one lacks 5.
    waiting = driver.session("waiting")
    assert waiting.place is Place.AWAY
    driver.scheduler.pressure.leave_ahead([waiting, waiting])
    assert {session.place for session in idle} == {Place.HOME}
