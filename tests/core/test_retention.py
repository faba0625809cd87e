"""Retention: who leaves the device first, how far pins count, and when idle sessions are closed."""

import pytest

from holdfast.core.errors import SessionExpired, UnknownSession
from holdfast.core.ledger import OutOfUnits
from holdfast.core.policy import Share, spill_order
from holdfast.core.retention import Retention
from holdfast.core.session import Place
from holdfast.core.turn import TurnState
from tests.core.driver import LAYOUTS, Driver, prompt


def crowd(names: str, *, layout: str = "dense", tenant: str = "red", **more: object) -> Driver:
    """Idle sessions of 32 tokens each, one after the other."""
    driver = Driver(layout, 4, **{"pages": 8 * len(names) + 2, "slots": len(names) + 3} | more)
    for seed, name in enumerate(names):
        driver.open(name, tenant)
        driver.now += 10.0
        driver.turn(name, 30, 2, seed)
    return driver


def keep(driver: Driver, name: str, **retention: object) -> None:
    driver.scheduler.retain(name, Retention(**retention), driver.now)


def there(driver: Driver) -> str:
    """The sessions whose memory is on the device."""
    sessions = driver.registry.sessions.values()
    return "".join(
        each.id for each in sessions if each.place is Place.HOME and each.sequence.lease is not None
    )


def lack(driver: Driver, name: str, more: int) -> bool:
    """Let a session need more pages than are free."""
    pool = next(iter(driver.ledger.pools.values()))
    shortfall = OutOfUnits(pool, len(pool.free) + more, len(pool.free))
    return driver.scheduler.pressure.make_room(shortfall, driver.session(name), may_retract=False)


def test_the_lowest_priority_leaves_first_and_then_the_longest_idle() -> None:
    driver = crowd("abcd")
    for name, priority in (("a", 2), ("b", 0), ("c", 0), ("d", -1)):
        driver.session(name).retention = Retention(60.0, priority=priority)
    assert [each.id for each in spill_order(driver.registry.resting, driver.now)] == ["d", "b", "c", "a"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pinned_session_leaves_after_all_others(layout: str) -> None:
    driver = crowd("abcd", layout=layout, pinned_share=1.0)
    keep(driver, "a", pinned=True, priority=-4)
    driver.open("new")
    left = []
    while there(driver):
        before = there(driver)
        lack(driver, "new", 1)
        driver.run()
        left += [name for name in before if name not in there(driver)]
    assert left == ["b", "c", "d", "a"], "although it is idle longest, and has the lowest priority"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pins_never_keep_a_turn_out(layout: str) -> None:
    driver = crowd("abcd", layout=layout, pinned_share=1.0, slots=4)
    for name in "abcd":
        keep(driver, name, pinned=True)
    driver.open("new", "blue")
    turn = driver.submit("new", prompt(100, 9), 20)
    driver.run()
    assert turn.state is TurnState.FINISHED
    assert driver.session("a").sequence.computed == 0, "the longest idle of those that are pinned"


def test_pinned_sessions_leave_before_a_running_turn_is_taken_back() -> None:
    driver = crowd("ab", pinned_share=1.0, pages=20)
    for name in "ab":
        keep(driver, name, pinned=True)
    for seed, name in enumerate(("x", "y")):
        driver.open(name, "blue")
        driver.submit(name, prompt(9, 20 + seed), 26)
    driver.run()
    assert driver.registry.counters.retracts == 0
    assert "x" in there(driver) and "y" in there(driver)


def test_a_pin_beyond_the_tenants_limit_does_not_count() -> None:
    driver = crowd("abcd", pages=40, pinned_share=0.5)
    for name in "bcd":
        keep(driver, name, pinned=True)
    account = driver.session("a").holder.account
    counting = driver.scheduler.pressure.pinned_sessions(account, driver.registry.resting)
    assert sorted(each.id for each in counting) == ["b", "c"], "20 pages hold two sessions, opened first"
    driver.open("new")
    lack(driver, "new", 9)
    assert there(driver) == "bc"


def test_the_limit_is_a_part_of_the_tenants_quota() -> None:
    driver = crowd("ab", pages=80, pinned_share=0.5, shares={"red": Share(device=0.25)})
    for name in "ab":
        keep(driver, name, pinned=True)
    account = driver.session("a").holder.account
    counting = driver.scheduler.pressure.pinned_sessions(account, driver.registry.resting)
    assert [each.id for each in counting] == ["a"], "10 pages of 20"


def test_pinned_memory_on_the_host_leaves_it_last() -> None:
    driver = crowd("abc", pages=100, host=16, tenant="red")
    keep(driver, "a", pinned=True)
    assert all(driver.scheduler.spill(name, driver.now) for name in "ab")
    driver.run()
    driver.open("new", "blue")
    driver.turn("new", 30, 2, 7)
    assert driver.scheduler.spill("new", driver.now), "the tenant that has more of the host makes room"
    driver.run()
    places = {name: driver.session(name).place for name in ("a", "b", "new")}
    assert places == {"a": Place.AWAY, "b": Place.HOME, "new": Place.AWAY}
    assert driver.session("b").sequence.computed == 0


def test_a_fork_is_kept_like_its_parent() -> None:
    driver = crowd("a")
    keep(driver, "a", ttl=7.0, pinned=True, priority=3)
    child = driver.scheduler.fork("a", "child", driver.now)
    assert child.retention == Retention(7.0, True, 3)


def test_a_time_to_live_may_be_changed_and_the_change_counts_as_use() -> None:
    driver = crowd("ab", session_ttl=100.0)
    driver.now += 80.0
    keep(driver, "a", ttl=30.0)
    driver.now += 29.0
    driver.scheduler.tick(driver.now)
    assert list(driver.registry.sessions) == ["a"], "b was idle for 109 seconds, a for 29"
    driver.now += 1.0
    with pytest.raises(SessionExpired):
        keep(driver, "a")


def test_a_longer_time_to_live_holds_at_once() -> None:
    driver = crowd("a", session_ttl=100.0)
    keep(driver, "a", ttl=1000.0)
    driver.now += 900.0
    driver.scheduler.tick(driver.now)
    assert "a" in driver.registry.sessions
    keep(driver, "a")
    assert driver.session("a").retention.ttl == 100.0, "the server's own again"


def test_the_time_to_live_of_a_session_with_a_turn_begins_at_its_end() -> None:
    driver = crowd("a", session_ttl=100.0)
    driver.submit("a", prompt(3, 5), 4)
    driver.step()
    keep(driver, "a", ttl=5.0)
    driver.now += 50.0
    driver.run()
    assert driver.session("a").retention.ttl == 5.0
    driver.now += 5.0
    driver.scheduler.tick(driver.now)
    assert "a" not in driver.registry.sessions


def test_a_session_without_memory_can_be_kept_and_stays_off_the_lists() -> None:
    driver = Driver()
    driver.open("a")
    keep(driver, "a", pinned=True)
    assert driver.session("a") not in driver.registry.resting


def test_a_request_of_its_own_has_no_retention() -> None:
    driver = Driver()
    turn = driver.request(prompt(5), 3)
    with pytest.raises(UnknownSession):
        driver.scheduler.retain(turn.request.turn_id, Retention(5.0), driver.now)
