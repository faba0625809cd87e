"""Effects of single statements of sequences, pressure and plans: each test fails without one of them."""

import pytest

from holdfast.core.layout import Component, MemoryLayout, Tier, named_layout
from holdfast.core.ledger import OutOfUnits
from holdfast.core.retention import Retention
from holdfast.core.sequence import Sequence
from holdfast.core.session import Place
from tests.core.driver import LAYOUTS, STATEFUL, Driver, prompt

FULL, STATE = Component.FULL, Component.STATE
WINDOWED = tuple(name for name in LAYOUTS if named_layout(name, 1).window)


def ask(driver: Driver, name: str, more: int, component: Component = FULL, may_retract: bool = False) -> bool:
    """Ask for more units than are free, in a session's name."""
    pool = driver.ledger.pool(component)
    shortfall = OutOfUnits(pool, len(pool.free) + more, len(pool.free))
    return driver.scheduler.pressure.make_room(shortfall, driver.session(name), may_retract)


# --- sequences ---


def test_tokens_that_fit_into_the_last_page_reserve_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []
    original = Sequence._reserve
    monkeypatch.setattr(
        Sequence, "_reserve", lambda self, planned: reserved.append(planned) or original(self, planned)
    )
    driver = Driver("dense", 16)
    driver.open("a")
    driver.turn("a", 4, 40)
    assert reserved == [4, 17, 33]
    tables = [row.table for plan in driver.plans for row in plan.rows]
    assert len(tables) == 41 and sum(table is not None for table in tables) == 3


@pytest.mark.parametrize("layout", WINDOWED)
def test_window_pages_that_come_back_from_a_point_are_in_the_block_table_again(layout: str) -> None:
    driver = Driver(layout, 4)
    driver.open("a")
    for seed in range(3):
        driver.turn("a", 20, 4, seed)
    driver.submit("a", prompt(20, 4), 4)
    driver.plan()
    driver.settle(error="lost")  # The whole table is sent again, without what only points read.
    driver.run()
    for turns in (3, 2, 1):
        driver.scheduler.rewind("a", turns, driver.now)
        driver.turn("a", 3, 2, 7)
        assert driver.tokens("a")[-2:] == driver.says(driver.tokens("a")[:-2], 2)


@pytest.mark.parametrize("layout", WINDOWED)
def test_window_pages_of_the_tree_that_nothing_reads_are_unlocked(layout: str) -> None:
    driver = Driver(layout, 4, leave_history=True)
    driver.request(prompt(41), 2)
    driver.run()
    session = driver.open("a")
    turn = driver.submit("a", prompt(41), 30)
    driver.until(lambda: turn.generated == 20)
    lease = session.sequence.lease
    assert lease is not None and lease.pages == 10
    assert lease.window_first == 8, "the mark is where the turn began"
    driver.run()
    driver.turn("a", 20, 4, 2)
    lease = session.sequence.lease
    assert lease is not None and lease.window_first in (8, lease.pages)


@pytest.mark.parametrize("layout", STATEFUL)
def test_a_state_of_the_tree_is_unlocked_once_the_session_has_its_own(layout: str) -> None:
    driver = Driver(layout, 4, leave_history=True)
    driver.request(prompt(41), 2)
    driver.run()
    driver.open("a")
    turn = driver.turn("a", 41, 3)
    assert turn.cached == 40
    assert not any(node.state_leases for node in driver.registry.tree.forest.nodes())


def test_without_a_slot_for_it_an_input_leaves_no_point() -> None:
    driver = Driver(MemoryLayout(4, state=True, checkpoint_tokens=8))
    driver.open("a")
    driver.turn("a", 3, 2)
    with driver.starved("resume point") as struck:
        turn = driver.submit("a", prompt(20, 1), 6)
        driver.until(lambda: turn.generated == 1)
    assert struck == ["resume point"]
    assert [point.length for point in driver.session("a").sequence.points] == [5]
    driver.run()


@pytest.mark.parametrize("layout", STATEFUL)
def test_a_turn_that_catches_up_on_its_history_keeps_one_mark(layout: str) -> None:
    driver = Driver(layout, 4)
    session = driver.open("a")
    driver.turn("a", 20, 4)
    driver.registry.give_up(session)
    driver.scheduler.flush()
    turn = driver.submit("a", prompt(6, 1), 20)
    driver.until(lambda: turn.generated == 3)
    mark = session.sequence.mark
    assert mark is not None and mark.successor is None
    assert [point.length for point in session.sequence.points if point is mark.point] == [24]
    assert not [point for point in session.sequence.points if point.length < 24 and point.length != 20]
    driver.run()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_that_was_dropped_while_it_was_away_is_at_home_when_it_is_computed_again(layout: str) -> None:
    driver = Driver(layout, 4, host=50)
    session = driver.open("a")
    driver.turn("a", 20, 4)
    assert driver.scheduler.spill("a", driver.now)
    driver.run()
    assert session.sequence.away
    driver.registry.give_up(session)
    assert not session.sequence.away
    driver.turn("a", 3, 2, 1)
    assert driver.scheduler.spill("a", driver.now)
    driver.run()
    assert driver.turn("a", 3, 2, 2).cached == 29


# --- pressure ---


def test_listeners_give_way_until_there_is_enough_the_youngest_first() -> None:
    driver = Driver("dense", 4, pages=40)
    for name in ("a", "b", "c"):
        driver.open(name)
    turns = [driver.listen(name, prompt(40, seed)) for seed, name in enumerate(("a", "b"))]
    driver.run()
    assert ask(driver, "c", 2)
    assert [turn.retracts for turn in turns] == [0, 1]


@pytest.mark.parametrize("may_retract", [False, True])
def test_pinned_sessions_give_way_before_a_running_turn(may_retract: bool) -> None:
    driver = Driver("dense", 4, pages=40)
    pinned = driver.open("pinned", pinned=True)
    driver.turn("pinned", 30, 2)
    turns = []
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        turns.append(driver.submit(name, prompt(9, seed + 1), 20))
    driver.until(lambda: turns[1].generated == 3)
    driver.scheduler.flush()
    assert pinned.sequence.computed == 32
    assert ask(driver, "a", 2, may_retract=may_retract)
    assert pinned.sequence.computed == 0 and [turn.retracts for turn in turns] == [0, 0]


def test_a_turn_that_is_taken_back_may_lose_the_memory_of_its_session_too() -> None:
    driver = Driver("dense", 4, pages=40)
    turns = []
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        driver.turn(name, 30, 2, seed)
    for seed, name in enumerate(("a", "b")):
        turns.append(driver.submit(name, prompt(9, seed + 5), 20))
    driver.until(lambda: turns[1].generated == 3)
    taken = 40 - len(driver.ledger.pool(FULL).free)
    assert ask(driver, "a", taken // 2, may_retract=True)
    assert [turn.retracts for turn in turns] == [0, 1]
    assert driver.session("b").sequence.computed == 0 < driver.session("a").sequence.computed


def test_a_listener_with_rows_in_flight_is_taken_back_after_them() -> None:
    driver = Driver("dense", 4, pages=40)
    for name in ("a", "b"):
        driver.open(name)
    turn = driver.listen("a", prompt(40))
    driver.plan()
    assert not ask(driver, "b", 2)
    assert turn.ending is not None and turn.retracts == 0
    driver.settle()
    assert turn.ending is None and turn.retracts == 1


def test_running_turns_give_up_their_points_until_there_is_enough() -> None:
    driver = Driver(MemoryLayout(4, state=True, checkpoint_tokens=8), slots=12)
    for name in ("a", "b", "c"):
        driver.open(name)
    for seed, name in enumerate(("a", "b")):
        driver.turn(name, 3, 2, seed)
    turns = [driver.submit(name, prompt(20, seed + 5), 30) for seed, name in enumerate(("a", "b"))]
    driver.until(lambda: turns[1].generated == 3)
    points = [driver.session(name).sequence.points for name in ("a", "b")]
    assert [len(each) for each in points] == [2, 2]
    assert ask(driver, "c", 1, STATE)
    assert [len(each) for each in points] == [1, 2]


@pytest.mark.parametrize("asker", ["b", "c"])
def test_no_further_turn_is_taken_back_once_the_one_that_asks_is(asker: str) -> None:
    driver = Driver("dense", 1, pages=40)
    turns = {}
    for seed, name in enumerate(("a", "b", "c")):
        driver.open(name)
        turns[name] = driver.submit(name, prompt(5, seed), 20)
    driver.until(lambda: turns["a"].generated >= 5)
    driver.land()
    assert not ask(driver, asker, 40, may_retract=True)
    states = {name: turn.state.value for name, turn in turns.items()}
    assert states == {"a": "running", "b": "running" if asker == "c" else "queued", "c": "queued"}
    driver.run()


def test_memory_waits_for_another_tenants_turn_to_make_room() -> None:
    driver = Driver("dense", 4, host=50)
    driver.open("a")
    driver.turn("a", 9, 3)
    assert driver.scheduler.spill("a", driver.now)
    driver.run()
    driver.open("b", "blue")
    driver.submit("b", prompt(5, 3), 20)
    driver.step()
    with driver.starved("restore"):
        assert not driver.scheduler.restore("a", driver.now)
    assert driver.session("a").place is Place.AWAY, "it is not given up"


def away(driver: Driver, *names: str, tier: Tier = Tier.DISK) -> None:
    """Sessions of one tenant with a second turn of eight pages each, which are on another tier."""
    for seed, name in enumerate(names):
        driver.open(name)
        driver.turn(name, 3, 1, 10 * seed)
        driver.turn(name, 26, 2, 10 * seed + 1)
        assert driver.scheduler.spill(name, driver.now, tier)
        driver.run()


@pytest.mark.parametrize("volatile", [False, True])
def test_a_spill_takes_no_room_that_it_will_not_use(volatile: bool) -> None:
    driver = Driver("dense", 4, pages=100, host=0 if volatile else 20, disk=20)
    away(driver, "first", "second")
    driver.scheduler.open("light", "blue", driver.now, Retention(), volatile)
    driver.turn("light", 3, 1, 50)
    driver.turn("light", 26, 2, 51)
    assert driver.scheduler.spill("light", driver.now) is not volatile
    for name in ("first", "second"):
        parcel = driver.session(name).parcel
        assert parcel is not None and parcel.tier is Tier.DISK
    assert driver.registry.counters.dropped == 0


def test_memory_that_a_copy_has_yet_to_complete_takes_no_room_elsewhere() -> None:
    driver = Driver("dense", 4, pages=100, disk=20)
    away(driver, "first", "second")
    driver.open("light", "blue")
    driver.turn("light", 31, 2, 50)
    driver.scheduler.fork("light", "fork", driver.now)
    assert driver.registry.copies
    assert not driver.scheduler.spill("fork", driver.now)
    assert driver.registry.counters.dropped == 0


def test_what_finds_no_room_on_disk_stays_on_the_host() -> None:
    driver = Driver("dense", 4, host=20, disk=100, on_disk=lambda session: True)
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        driver.turn(name, 40, 2, seed)
    assert driver.scheduler.spill("a", driver.now, Tier.HOST)
    driver.run()
    with driver.starved("sink") as struck:
        assert driver.scheduler.spill("b", driver.now)
    assert struck == ["sink"]
    parcels = [driver.session(name).parcel for name in ("a", "b")]
    assert [parcel.tier for parcel in parcels if parcel is not None] == [Tier.HOST, Tier.DISK]


def test_what_finds_no_room_on_disk_gives_way_to_a_tenant_that_has_less() -> None:
    driver = Driver("dense", 4, pages=100, host=20, disk=100, on_disk=lambda session: True)
    away(driver, "first", "second", tier=Tier.HOST)
    driver.open("light", "blue")
    driver.turn("light", 3, 1, 50)
    driver.turn("light", 26, 2, 51)
    with driver.starved("sink"):
        assert driver.scheduler.spill("light", driver.now)
    parcels = [driver.session(name).parcel for name in ("first", "second", "light")]
    assert [parcel and parcel.tier for parcel in parcels] == [None, Tier.HOST, Tier.HOST]


# --- plans ---


def test_taking_back_the_youngest_turn_takes_nothing_from_sessions_at_rest() -> None:
    driver = Driver("dense", 1)
    driver.open("rests")
    driver.turn("rests", 4, 2, 5)
    turns = []
    for seed, name in enumerate(("a", "b")):
        driver.open(name)
        turns.append(driver.submit(name, prompt(4, seed), 6))
    driver.step()
    with driver.starved("decode page", times=2):
        driver.step()
    assert [turn.retracts for turn in turns] == [0, 1]
    assert driver.session("rests").sequence.computed == 6
    assert driver.registry.counters.dropped == 0
    driver.run()
