"""Checkpoints of spilled sessions: they stay on the device, serve forks and cuts, and give way in turns."""

import pytest

from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import OutOfUnits, OverQuota
from holdfast.core.session import Place
from tests.core.driver import LAYOUTS, Driver, prompt

PAGE = 4
FULL, WINDOW, STATE = Component.FULL, Component.WINDOW, Component.STATE
POINTED = [name for name in LAYOUTS if not Driver(name).layout.cuts_anywhere]
KEPT = {name: [20, 30] if Driver(name).layout.window else [10, 20, 30] for name in POINTED}
"""Checkpoints of a session of four turns that is away: one that reads a window of the tree is given up."""


def talk(driver: Driver, name: str, turns: int = 3) -> None:
    """Turns of ten tokens each."""
    driver.open(name)
    for number in range(turns):
        driver.turn(name, 8, 2, sum(map(ord, name)) + number)


def away(driver: Driver, name: str, tier: Tier = Tier.HOST) -> None:
    assert driver.scheduler.spill(name, driver.now, tier)
    driver.run()
    assert driver.session(name).place is Place.AWAY


def lengths(driver: Driver, name: str) -> list[int]:
    """Where a session has checkpoints."""
    return [point.length for point in driver.session(name).sequence.points]


def wait(driver: Driver, name: str, known: int, forks: bool) -> int:
    """Step until a verb may act; returns how many steps that took."""
    for steps in range(20):
        if driver.scheduler.ready(name, known, forks, driver.now):
            return steps
        driver.step()
    raise AssertionError("the verb waits for ever")


def ask(driver: Driver, name: str, count: int, component: Component) -> bool:
    """Ask for so many free units in a session's name."""
    pool = driver.ledger.pool(component)
    return driver.scheduler.pressure.make_room(
        OutOfUnits(pool, count, len(pool.free)), driver.session(name), may_retract=False
    )


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("layout", POINTED)
def test_a_fork_at_an_older_turn_of_a_spilled_session_computes_nothing_again(layout: str, tier: Tier) -> None:
    driver = Driver(layout, PAGE, host=100, disk=100)
    talk(driver, "a", 4)
    away(driver, "a", tier)
    assert lengths(driver, "a") == KEPT[layout]
    assert wait(driver, "a", 20, forks=True) > 0
    assert lengths(driver, "a") == KEPT[layout]
    driver.scheduler.fork("a", "b", driver.now, known=20)
    turn = driver.turn("b", 5, 2, 9)
    assert (turn.cached, turn.computed) == (20, 6)
    assert driver.turn("a", 3, 2, 9).cached == 40
    driver.close("b")
    driver.close("a")
    driver.scheduler.flush()
    assert driver.all_free()


@pytest.mark.parametrize("layout", POINTED)
def test_a_cut_of_a_spilled_session_waits_for_its_checkpoint(layout: str) -> None:
    driver = Driver(layout, PAGE, host=100)
    talk(driver, "a", 4)
    away(driver, "a")
    assert driver.scheduler.ready("a", 9, False, driver.now), "there is no checkpoint that low"
    assert wait(driver, "a", 30, forks=False) > 0
    driver.scheduler.rewind("a", 3, driver.now)
    assert driver.turn("a", 5, 2, 9).cached == 30
    assert lengths(driver, "a") == KEPT[layout]


@pytest.mark.parametrize("layout", POINTED)
def test_a_cancelled_spill_and_a_lost_parcel(layout: str) -> None:
    driver = Driver(layout, PAGE, host=100)
    talk(driver, "a")
    assert driver.scheduler.spill("a", driver.now)
    assert driver.turn("a", 3, 2, 9).cached == 30, "its turn came at once"
    assert lengths(driver, "a") == KEPT[layout]
    away(driver, "a")
    driver.scheduler.rewind("a", 1, driver.now)
    assert lengths(driver, "a") == [] and driver.session("a").sequence.computed == 0, "nobody waited"
    assert driver.session("a") not in driver.registry.queues.checkpointed
    driver.close("a")
    assert driver.all_free()


def test_sessions_give_up_a_checkpoint_each_in_turns() -> None:
    driver = Driver("hybrid", PAGE, slots=18, host=100)
    driver.registry.tree.state_budget = 0
    for name in "abc":
        talk(driver, name, 5)
    away(driver, "a")
    away(driver, "b")
    assert [lengths(driver, name) for name in "abc"] == [[10, 20, 30, 40]] * 3
    assert driver.counts(STATE) == {"SESSION": 1, "CHECKPOINT": 12, "FREE": 5}
    assert ask(driver, "c", 6, STATE)
    assert [lengths(driver, name) for name in "abc"] == [[20, 30, 40], [10, 20, 30, 40], [10, 20, 30, 40]]
    assert ask(driver, "c", 8, STATE)
    assert [lengths(driver, name) for name in "abc"] == [[20, 40], [20, 30, 40], [10, 20, 30, 40]]
    assert ask(driver, "c", 13, STATE)
    assert [lengths(driver, name) for name in "abc"] == [[], [], [10, 20, 30, 40]], "the asker's are the last"
    assert ask(driver, "c", 15, STATE)
    assert [lengths(driver, name) for name in "abc"] == [[], [], [20, 40]]
    assert driver.counts(STATE) == {"SESSION": 1, "CHECKPOINT": 2, "FREE": 15}
    assert list(driver.registry.queues.checkpointed) == [driver.session("c")]


def test_a_session_that_comes_to_rest_is_the_last_to_give_up_a_checkpoint() -> None:
    driver = Driver("hybrid", PAGE, slots=14, host=100)
    for name in "abc":
        talk(driver, name)
    driver.turn("a", 8, 2, 9)
    assert [session.id for session in driver.registry.queues.checkpointed] == ["b", "c", "a"]


def test_a_session_whose_turn_runs_is_listed_again_at_its_end() -> None:
    driver = Driver("hybrid", PAGE, slots=20)
    for name in "ab":
        talk(driver, name)
    turn = driver.submit("a", prompt(8, 9), 5)
    driver.until(lambda: turn.generated == 2)
    driver.scheduler.flush()
    assert not ask(driver, "b", 20, STATE)
    assert lengths(driver, "a") == [30], "where its turn began"
    assert driver.session("a") not in driver.registry.queues.checkpointed
    driver.run()
    assert lengths(driver, "a") == [30]
    assert driver.session("a") in driver.registry.queues.checkpointed


def test_only_the_tenant_at_its_quota_gives_up_checkpoints() -> None:
    driver = Driver("hybrid", PAGE, slots=40, host=100)
    talk(driver, "a")
    driver.open("b", tenant="blue")
    driver.turn("b", 8, 2, 1)
    driver.turn("b", 8, 2, 2)
    away(driver, "a")
    driver.scheduler.flush()
    pool, account = driver.ledger.pool(STATE), driver.session("b").holder.account
    shortfall = OverQuota(pool, pool.room(account) + 1, account)
    assert driver.scheduler.pressure.make_room(shortfall, driver.session("b"), may_retract=False)
    assert (lengths(driver, "a"), lengths(driver, "b")) == ([10, 20], [])


@pytest.mark.parametrize("component", [WINDOW, STATE])
def test_a_session_that_leaves_for_lack_of_slots_or_windows_takes_none_of_them(component: Component) -> None:
    driver = Driver("full+window+state", PAGE, pages=40, slots=6, host=100, durable_turns=True)
    talk(driver, "a")
    assert [point.pinned for point in driver.session("a").sequence.points][-1], "the turn is not durable yet"
    driver.open("b")
    pool = driver.ledger.pool(component)
    ask(driver, "b", pool.size, component)
    assert driver.session("a").place is Place.LEAVING and lengths(driver, "a") == []
    driver.run()
    assert len(pool.free) == pool.size


def test_checkpoints_leave_a_part_of_each_pool_free() -> None:
    driver = Driver("hybrid", PAGE, slots=64, host=100)
    for name in "abcde":
        talk(driver, name, 5)
    for name in "abcd":
        away(driver, name)
    pool = driver.ledger.pool(STATE)
    taken = driver.ledger.take(pool, len(pool.free) - 2, driver.session("e").checkpoints)
    driver.scheduler.strict = False
    driver.step()
    assert sum(len(lengths(driver, name)) for name in "abcde") == 20, "a thirty-second is free"
    more = driver.ledger.take(pool, 2, driver.session("e").checkpoints)
    driver.step()
    assert len(pool.free) == 2
    assert [lengths(driver, name) for name in "abc"] == [[20, 30, 40], [20, 30, 40], [10, 20, 30, 40]]
    taken.release()
    more.release()
    assert driver.scheduler.audit.census() == []


def test_a_prefetch_takes_the_place_of_a_checkpoint() -> None:
    driver = Driver("hybrid", PAGE, slots=12, host=100)
    for name in "abc":
        talk(driver, name)
    away(driver, "a")
    driver.scheduler.flush()
    pool = driver.ledger.pool(STATE)
    taken = driver.ledger.take(pool, len(pool.free) - 1, driver.session("c").checkpoints)
    driver.scheduler.strict = False
    driver.scheduler.tick(driver.now)
    driver.scheduler.planner.prefetch.expect(driver.session("a"), 1.0)
    driver.step()
    driver.step()
    assert driver.session("a").place is Place.HOME
    assert [driver.session(name).place for name in "bc"] == [Place.HOME, Place.HOME]
    assert [lengths(driver, name) for name in "abc"] == [[10, 20], [20], [10, 20]]
    taken.release()
    driver.run()
