"""Prefetch: memory comes back before its turn, into room that nobody needs sooner."""

import pytest

from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import OutOfUnits
from holdfast.core.policy import Share
from holdfast.core.prefetch import ATTEMPTS_MAX, EXPECTED_MAX
from holdfast.core.pressure import Pressure
from holdfast.core.session import Place, Session
from tests.core.driver import LAYOUTS, Driver, prompt

FULL = Component.FULL


def away(driver: Driver, name: str, tokens: int = 24, **more: object) -> Session:
    """A session whose memory is on the host, or on the disk where there is no host."""
    driver.open(name, **more)
    driver.turn(name, tokens - 4, 4, seed=sum(map(ord, name)))
    assert driver.scheduler.spill(name, driver.now)
    driver.run()
    session = driver.session(name)
    assert session.place is Place.AWAY
    return session


def expect(driver: Driver, name: str, seconds: float = 1.0) -> None:
    driver.scheduler.tick(driver.now)
    driver.scheduler.planner.prefetch.expect(driver.session(name), seconds)
    driver.scheduler.tick(driver.now)


def fetched(driver: Driver, steps: int = 6) -> None:
    """Make plans as an engine does while there may be something to bring back."""
    for _ in range(steps):
        if driver.registry.unfetched or driver.registry.transits:
            driver.step()
    driver.run()


def moved_home(driver: Driver) -> int:
    """How many units plans have copied to the device."""
    moves = (move for plan in driver.plans for move in plan.moves)
    return sum(len(move.sources) for move in moves if move.destination_tier is Tier.DEVICE)


@pytest.mark.parametrize("tiers", [{"host": 100}, {"disk": 100}], ids=["host", "disk"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_there_before_its_turn(layout: str, tiers: dict[str, int]) -> None:
    driver = Driver(layout, 4, **tiers)
    session = away(driver, "a")
    expect(driver, "a")
    assert driver.registry.unfetched
    fetched(driver)
    assert session.place is Place.HOME and not driver.registry.queues.expected
    copied = moved_home(driver)
    assert copied > 0
    turn = driver.submit("a", prompt(3, 1), 2)
    plan = driver.step()
    assert [row.turn for row in plan.rows] == [turn], "the first plan computes it"
    driver.run()
    assert turn.cached == 24 and moved_home(driver) == copied


def test_the_hint_of_a_turn_brings_memory_back_in_time() -> None:
    driver = Driver("dense", 4, host=100)
    driver.open("a")
    driver.turn("a", 20, 4, expect_return=60.0)
    assert driver.scheduler.spill("a", driver.now)
    driver.run()
    driver.now = 57.0
    fetched(driver)
    driver.scheduler.tick(driver.now)
    assert not driver.registry.unfetched and driver.session("a").place is Place.AWAY
    driver.now = 58.5
    driver.scheduler.tick(driver.now)
    assert driver.registry.unfetched
    fetched(driver)
    assert driver.session("a").place is Place.HOME


def test_a_session_at_home_has_nothing_to_come_back() -> None:
    driver = Driver("dense", 4, host=100)
    driver.open("a")
    driver.turn("a", 20, 4)
    expect(driver, "a")
    fetched(driver)
    assert moved_home(driver) == 0 and not driver.registry.queues.expected
    turn = driver.submit("a", prompt(3), 2)
    driver.scheduler.planner.prefetch.expect(driver.session("a"), 1.0)
    assert driver.session("a").expected == 0.0, "its turn is there"
    driver.run()
    assert turn.over


def test_a_time_that_has_passed_is_not_waited_for() -> None:
    driver = Driver("dense", 4, host=100)
    away(driver, "a")
    expect(driver, "a", 1.0)
    driver.now = 5.0
    fetched(driver)
    assert driver.session("a").place is Place.AWAY and not driver.registry.queues.expected


def test_a_session_that_leaves_is_brought_back_after_it_has_left() -> None:
    driver = Driver("dense", 4, host=100, overlap=True)
    driver.open("a")
    driver.turn("a", 20, 4)
    assert driver.scheduler.spill("a", driver.now)
    expect(driver, "a")
    assert driver.session("a").place is Place.LEAVING
    fetched(driver, 12)
    assert driver.session("a").place is Place.HOME and moved_home(driver) > 0


def test_the_one_that_is_needed_first_comes_first_and_one_at_a_time() -> None:
    driver = Driver("dense", 4, host=100)
    for name in ("late", "soon"):
        away(driver, name)
    expect(driver, "late", 1.9)
    expect(driver, "soon", 1.0)
    driver.plan()
    assert driver.session("soon").place is Place.RETURNING
    assert driver.session("late").place is Place.AWAY
    driver.land()
    fetched(driver)
    assert driver.session("late").place is Place.HOME


# --- room ---


def test_a_prefetch_waits_while_a_turn_does() -> None:
    driver = Driver("dense", 4, pages=40, host=100, running_max=1)
    away(driver, "a")
    for name in ("b", "c"):
        driver.open(name)
        driver.submit(name, prompt(4), 9)
    expect(driver, "a", 100.0)
    driver.now = 99.0
    driver.step()
    assert driver.registry.queue and driver.session("a").place is Place.AWAY
    driver.until(lambda: not driver.registry.queue)
    fetched(driver)
    assert driver.session("a").place is Place.HOME


def test_running_turns_keep_a_reserve() -> None:
    driver = Driver("dense", 4, pages=13, host=100)
    away(driver, "a", 32)
    driver.open("b")
    turn = driver.submit("b", prompt(8), 9)
    driver.step()
    expect(driver, "a")
    driver.step()
    assert driver.session("a").place is Place.AWAY, "8 of 10 pages are too many beside a turn that grows"
    driver.until(lambda: turn.over)
    driver.close("b")
    expect(driver, "a")
    fetched(driver)
    assert driver.session("a").place is Place.HOME


def test_sessions_that_stay_away_longer_make_room() -> None:
    driver = Driver("dense", 4, pages=20, host=100)
    away(driver, "a", 32)
    for name, hint in (("soon", 0.5), ("later", 500.0)):
        driver.open(name)
        driver.turn(name, 24, 4, seed=5 if hint < 1 else 6, expect_return=hint)
    driver.now += 0.1
    expect(driver, "a")
    fetched(driver, 12)
    places = {name: driver.session(name).place for name in ("a", "soon", "later")}
    assert places == {"a": Place.HOME, "soon": Place.HOME, "later": Place.AWAY}


@pytest.mark.parametrize(("priority", "leaves"), [(2, False), (1, True), (0, True)])
def test_nobody_leaves_where_one_of_a_lower_priority_stays(priority: int, leaves: bool) -> None:
    driver = Driver("dense", 4, pages=20, host=100)
    away(driver, "a", 32, priority=2)
    for name, hint, own in (("soon", 0.5, 1), ("later", 500.0, priority)):
        driver.open(name, priority=own)
        driver.turn(name, 24, 4, seed=5 if hint < 1 else 6, expect_return=hint)
    driver.now += 0.1
    expect(driver, "a")
    fetched(driver, 12)
    places = {name: driver.session(name).place for name in ("a", "soon", "later")}
    there, gone = (Place.HOME, Place.AWAY) if leaves else (Place.AWAY, Place.HOME)
    assert places == {"a": there, "soon": Place.HOME, "later": gone}


@pytest.mark.parametrize("why", ["expected earlier", "priority", "pinned", "no room on the host"])
def test_nobody_else_makes_room(why: str) -> None:
    driver = Driver("dense", 4, pages=12, host=8 if why == "no room on the host" else 100, pinned_share=1.0)
    away(driver, "a", 32)
    driver.open("b", pinned=why == "pinned", priority=1 if why == "priority" else 0)
    driver.turn("b", 24, 4, seed=9, expect_return=0.5 if why == "expected earlier" else 500.0)
    expect(driver, "a")
    fetched(driver)
    assert driver.session("a").place is Place.AWAY and driver.session("b").place is Place.HOME
    assert not driver.registry.unfetched, "nothing is on its way that would make room"
    assert driver.registry.counters.dropped == 0


@pytest.mark.parametrize("why", ["the session", "a turn"])
def test_nobody_makes_room_in_vain(why: str) -> None:
    """For a session that leaves nothing to others, or has no room beside a turn that runs."""
    driver = Driver("dense", 4, pages=18, host=100)
    away(driver, "a", 72 if why == "the session" else 40)
    driver.open("b")
    driver.turn("b", 8, 4, seed=9, expect_return=500.0)
    if why == "a turn":
        driver.open("c")
        driver.submit("c", prompt(24, 3), 9)
        driver.step()
    expect(driver, "a")
    for _ in range(4):
        driver.step()
    assert driver.session("a").place is Place.AWAY and driver.session("b").place is Place.HOME


def test_prefixes_that_nobody_leases_make_room() -> None:
    driver = Driver("dense", 4, pages=14, host=100)
    away(driver, "a", 32)
    driver.request(prompt(24, 8), 4)
    driver.run()
    assert driver.counts()["TREE"] >= 6
    expect(driver, "a")
    fetched(driver)
    assert driver.session("a").place is Place.HOME


def test_a_tenant_at_its_quota_makes_room_alone() -> None:
    driver = Driver("dense", 4, pages=40, host=100, shares={"red": Share(device=0.25)})
    away(driver, "a", 32)
    driver.open("x", tenant="blue")
    driver.turn("x", 20, 4, seed=4, expect_return=900.0)
    driver.open("b")
    driver.turn("b", 20, 4, seed=3, expect_return=0.5)
    expect(driver, "a")
    fetched(driver)
    assert driver.session("a").place is Place.AWAY, "its other session is needed sooner"
    driver.now = 10.0
    expect(driver, "a")
    fetched(driver)
    assert driver.session("a").place is Place.HOME and driver.session("b").place is Place.AWAY
    assert driver.session("x").place is Place.HOME


def test_a_tenant_whose_turn_is_at_the_quota_brings_nothing_back() -> None:
    driver = Driver("dense", 4, pages=200, host=100, shares={"red": Share(device=0.1)})
    away(driver, "a", 8)
    away(driver, "x", 8, tenant="blue")
    driver.open("b")
    turn = driver.submit("b", prompt(60, 3), 18)
    driver.until(lambda: turn.generated > 10)
    expect(driver, "a")
    expect(driver, "x")
    planner = driver.scheduler.planner
    planner.prefetch.fetch(short=False, full={"red"})
    assert driver.session("a").place is Place.AWAY
    assert driver.session("x").place is Place.RETURNING, "another tenant's is"
    driver.run()


def test_an_allocation_that_fails_leaves_everything_where_it_is() -> None:
    driver = Driver("dense", 4, host=100)
    away(driver, "a")
    expect(driver, "a")
    with driver.starved("restore") as struck:
        driver.step()
    assert struck and driver.session("a").place is Place.AWAY
    expect(driver, "a")
    fetched(driver)
    assert driver.session("a").place is Place.HOME


# --- cancelled ---


def under_way(driver: Driver, *names: str) -> None:
    """Begin a prefetch that is still under way when its step has settled."""
    for name in names:
        expect(driver, name)
    plan = driver.plan()
    assert driver.session(names[0]).place is Place.RETURNING
    result = driver.compute(plan)
    result.moved = [None for _ in plan.moves]
    driver.hear(driver.scheduler.settle(plan, result, driver.now))
    driver.device.settled(plan)


@pytest.mark.parametrize("settled", [False, True], ids=["in flight", "settled"])
@pytest.mark.parametrize("layout", ["dense", "full+window+state"])
def test_pressure_cancels_it_before_anything_is_lost(layout: str, settled: bool) -> None:
    driver = Driver(layout, 4, pages=20, host=100)
    session = away(driver, "a", 32)
    driver.open("b")
    driver.turn("b", 8, 4, seed=7)
    if settled:
        under_way(driver, "a")
    else:
        expect(driver, "a")
        driver.plan()
    assert driver.counts()["TRANSIT"] == 8
    (number,) = driver.registry.transits
    turn = driver.submit("b", prompt(40, 2), 5)
    driver.plan()
    assert session.place is Place.AWAY and not driver.registry.queues.expected
    driver.land()
    driver.scheduler.arrive(number, True, driver.now)
    driver.run()
    assert turn.over and not turn.retracts and driver.registry.counters.dropped == 0
    assert session.place is Place.AWAY
    assert driver.turn("a", 3, 2, 1).cached == 32, "its source was there all the time"


def test_another_tenants_is_not_cancelled_for_a_quota() -> None:
    driver = Driver("dense", 4, pages=40, host=100, shares={"blue": Share(device=0.25)})
    session = away(driver, "a", 32)
    under_way(driver, "a")
    driver.open("b", tenant="blue")
    driver.turn("b", 20, 4, seed=5)
    driver.open("c", tenant="blue")
    driver.submit("c", prompt(24, 6), 3)
    for _ in range(4):
        driver.step()
    assert session.place is Place.RETURNING
    driver.scheduler.arrive(next(iter(driver.registry.transits)), True, driver.now)
    driver.run()


def test_as_many_are_cancelled_as_are_needed() -> None:
    driver = Driver("dense", 4, pages=40, host=100)
    first, second = (away(driver, name, 32) for name in ("a", "b"))
    under_way(driver, "a", "b")
    driver.scheduler.pressure.begin_restore(second)
    driver.plan()
    driver.open("c")
    driver.submit("c", prompt(100, 2), 5)
    driver.plan()
    assert {first.place, second.place} == {Place.AWAY, Place.RETURNING}
    driver.land()
    driver.run()


def test_a_close_ends_it() -> None:
    driver = Driver("dense", 4, host=100)
    away(driver, "a")
    under_way(driver, "a")
    driver.close("a")
    assert not driver.registry.queues.expected and not driver.registry.returns.entries()
    driver.scheduler.flush()
    driver.step()
    driver.step()
    assert driver.all_free()


def test_its_turn_takes_it_over() -> None:
    driver = Driver("dense", 4, host=100)
    away(driver, "a")
    under_way(driver, "a")
    turn = driver.submit("a", prompt(3, 1), 2)
    assert not driver.registry.queues.expected
    driver.step()
    (number,) = driver.registry.transits
    for move in driver.plans[-2].moves:
        driver.device.move(move)
    driver.scheduler.arrive(number, True, driver.now)
    driver.run()
    assert turn.cached == 24


def test_a_cut_ends_it() -> None:
    driver = Driver("dense", 4, host=100)
    away(driver, "a")
    under_way(driver, "a")
    driver.scheduler.rewind("a", 0, driver.now)
    assert not driver.registry.queues.expected and driver.session("a").place is Place.HOME
    driver.run()
    assert driver.turn("a", 5, 2, 1).cached == 0


# --- how many ---


def test_a_list_of_expected_sessions_is_bounded() -> None:
    driver = Driver("dense", 4, pages=20, host=600, running_max=1)
    names = [f"s{number}" for number in range(EXPECTED_MAX + 5)]
    for name in names:
        away(driver, name, 8)
    driver.open("home")
    driver.turn("home", 4, 4)
    for name in ("home", *names):
        driver.scheduler.planner.prefetch.expect(driver.session(name), 1.0)
    assert [session.id for session in driver.registry.queues.expected] == names[:EXPECTED_MAX]


def test_tenants_share_a_full_list() -> None:
    """A tenant with less of it takes the place of the session of the other one that is needed last."""
    driver = Driver("dense", 4, pages=20, host=600, running_max=1)
    names = [f"s{number}" for number in range(EXPECTED_MAX)]
    for name in names:
        away(driver, name, 8)
    for number in range(EXPECTED_MAX):
        driver.open(f"b{number}", "blue")
        driver.turn(f"b{number}", 4, 4, seed=number)
        assert driver.scheduler.spill(f"b{number}", driver.now)
        driver.run()
    prefetch, expected = driver.scheduler.planner.prefetch, driver.registry.queues.expected
    for number, name in enumerate(names):
        prefetch.expect(driver.session(name), 500.0 - abs(10 - number))
    for number in range(EXPECTED_MAX):
        prefetch.expect(driver.session(f"b{number}"), 1.0)
    half = EXPECTED_MAX // 2
    blue = [session.id for session in expected if session.tenant == "blue"]
    assert blue == [f"b{number}" for number in range(half)], "and no more than half"
    kept = {session.id for session in expected if session.tenant == "red"}
    needed_first = sorted(range(EXPECTED_MAX), key=lambda number: 500.0 - abs(10 - number))
    assert kept == {names[number] for number in needed_first[:half]}


def test_a_full_list_hears_of_its_sessions_again() -> None:
    driver = Driver("dense", 4, pages=20, host=600, running_max=1)
    names = [f"s{number}" for number in range(EXPECTED_MAX)]
    for name in names:
        away(driver, name, 8)
    prefetch, queues = driver.scheduler.planner.prefetch, driver.registry.queues
    for name in names:
        prefetch.expect(driver.session(name), 9.0)
    queues.unfetched = False
    prefetch.expect(driver.session("s0"), 1.0)
    assert queues.unfetched and len(queues.expected) == EXPECTED_MAX
    assert driver.session("s0").expected == driver.registry.now + 1.0


def test_a_plan_looks_for_room_for_a_few_sessions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver("dense", 4, host=600)
    names = [f"s{number}" for number in range(3 * ATTEMPTS_MAX)]
    for name in names:
        away(driver, name, 8)
    for number, name in enumerate(names):
        expect(driver, name, 2.0 - number / 100)
    asked: list[str] = []

    def no_room(shortfall: OutOfUnits, session: Session) -> bool:
        asked.append(session.id)
        return False

    monkeypatch.setattr(type(driver.scheduler.pressure), "make_room_ahead", lambda _, *given: no_room(*given))
    driver.plan()
    assert asked == names[: -ATTEMPTS_MAX - 1 : -1]


def test_the_next_one_comes_back_where_the_first_finds_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver("dense", 4, host=100)
    first, second = (away(driver, name) for name in ("a", "b"))
    expect(driver, "a", 1.0)
    expect(driver, "b", 1.5)
    begin = Pressure.begin_restore

    def fails_once(pressure: Pressure, session: Session) -> None:
        if session is first:
            raise OutOfUnits(driver.ledger.pool(FULL), 1, 0)
        begin(pressure, session)

    monkeypatch.setattr(Pressure, "begin_restore", fails_once)
    driver.plan()
    assert (first.place, second.place) == (Place.AWAY, Place.RETURNING)
    driver.land()
    driver.run()


def test_states_of_running_turns_are_there_already() -> None:
    driver = Driver("hybrid", 4, slots=4, host=100, checkpoints=0)
    session = away(driver, "a", 8)
    driver.open("b")
    driver.submit("b", prompt(30), 30)
    driver.step()
    expect(driver, "a")
    free = len(driver.ledger.pool(Component.STATE).free)
    assert free == 2, "one for the session, one to spare"
    driver.plan()
    assert session.place is Place.RETURNING
    driver.land()
    driver.run()
