"""Forks and cuts wait for memory that exists: under pressure, none of it is computed again."""

import random
from contextlib import suppress

import pytest

from holdfast.core.errors import Refused
from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import Kind, OutOfUnits
from holdfast.core.policy import Share
from holdfast.core.session import Place
from tests.core.driver import LAYOUTS, Driver, prompt

PAGE = 16
PAGED = [name for name in LAYOUTS if Component.FULL in Driver(name).layout.components]
STATE = Component.STATE


def wait(driver: Driver, name: str, known: int, forks: bool = True, most: int = 60) -> int:
    """Step until a verb may act; returns how many steps that took."""
    for steps in range(most):
        if driver.scheduler.ready(name, known, forks, driver.now):
            return steps
        driver.step()
    raise AssertionError(f"a verb waits after {most} steps")


def fork(driver: Driver, parent: str, child: str) -> None:
    """Fork a session as a client's verb does."""
    wait(driver, parent, driver.session(parent).sequence.known)
    driver.scheduler.fork(parent, child, driver.now)


def away(driver: Driver, name: str, tier: Tier = Tier.HOST) -> None:
    """Move a session's memory to another tier."""
    assert driver.scheduler.spill(name, driver.now, tier)
    driver.run()
    assert driver.session(name).place is Place.AWAY


@pytest.mark.no_cover
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fork_of_a_session_that_is_away_computes_nothing_again(
    layout: str, overlap: bool, tier: Tier
) -> None:
    driver = Driver(layout, PAGE, pages=12, slots=6, host=40, disk=40, overlap=overlap)
    driver.open("parent")
    driver.turn("parent", 70, 3)
    away(driver, "parent", tier)
    driver.open("other")
    running = driver.submit("other", prompt(120, 1), 40)
    driver.until(lambda: running.generated > 1)
    assert not driver.scheduler.ready("parent", 73, True, driver.now), "its memory is away"
    fork(driver, "parent", "child")
    driver.run()
    for name in ("child", "parent"):
        turn = driver.turn(name, 5, 2, 9)
        assert (turn.cached, turn.computed) == (73, 6), f"{name} computes what is new"
    assert running.over and driver.registry.counters.dropped == 0


@pytest.mark.no_cover
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "window-only"])
def test_a_fork_waits_for_the_page_and_the_slot_that_it_copies(layout: str, overlap: bool) -> None:
    driver = Driver(layout, PAGE, pages=9, slots=3, host=40, overlap=overlap, checkpoints=0)
    for seed, name in enumerate(("idle", "parent")):
        driver.open(name)
        driver.turn(name, 53, 3, seed)
    driver.scheduler.flush()
    taken = [
        driver.ledger.take(pool, len(pool.free), driver.session("idle").checkpoints)
        for (_, tier), pool in driver.ledger.pools.items()
        if tier is Tier.DEVICE
    ]
    assert not driver.scheduler.ready("parent", 56, True, driver.now)
    assert driver.session("idle").place is Place.LEAVING, "it makes room"
    assert wait_without_audit(driver, "parent", 56) > 0
    child = driver.scheduler.fork("parent", "child", driver.now)
    assert child.sequence.computed == 56
    for hold in taken:
        hold.release()
    driver.run()
    for name in ("child", "parent", "idle"):
        assert driver.turn(name, 5, 2, 7).cached == 56
    assert driver.registry.counters.dropped == 0


def wait_without_audit(driver: Driver, name: str, known: int) -> int:
    """Wait while a test holds units that no session knows of."""
    driver.scheduler.strict = False
    steps = wait(driver, name, known)
    driver.scheduler.strict = True
    return steps


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if Driver(name).layout.cuts_anywhere])
def test_a_cut_of_a_session_that_is_away_computes_nothing_again(layout: str, overlap: bool) -> None:
    driver = Driver(layout, PAGE, pages=12, host=40, overlap=overlap)
    driver.open("a")
    driver.turn("a", 40, 3)
    driver.turn("a", 30, 3, 1)
    away(driver, "a")
    driver.open("other")
    running = driver.submit("other", prompt(120, 2), 30)
    driver.until(lambda: running.generated > 1)
    wait(driver, "a", 43, forks=False)
    driver.scheduler.rewind("a", 1, driver.now)
    turn = driver.turn("a", 5, 2, 9)
    assert turn.cached == 43 and driver.registry.counters.dropped == 0


def test_memory_comes_back_for_a_verb_before_turns_are_admitted() -> None:
    driver = Driver("dense", PAGE, pages=9, host=40)
    driver.open("parent")
    driver.turn("parent", 90, 3)
    away(driver, "parent")
    for seed, name in enumerate(("x", "y"), 1):
        driver.open(name)
        driver.submit(name, prompt(70, seed), 6)
        if name == "x":
            driver.step()
            assert not driver.scheduler.ready("parent", 93, True, driver.now)
    fork(driver, "parent", "child")
    assert driver.session("y").turn is not None, "its turn has waited"
    assert driver.session("child").sequence.computed == 93
    driver.run()


def test_a_running_turn_that_lacks_memory_comes_before_a_verb() -> None:
    driver = Driver("dense", PAGE, pages=9, host=40)
    driver.open("parent")
    driver.turn("parent", 40, 3)
    away(driver, "parent")
    turns = []
    for seed, name in enumerate("xy"):
        driver.open(name)
        turns.append(driver.submit(name, prompt(40, seed), 60))
    driver.until(lambda: turns[1].generated >= 12)
    while not driver.registry.counters.retracts:
        assert not driver.scheduler.ready("parent", 43, True, driver.now)
        assert driver.session("parent").place is Place.AWAY
        driver.step()
    fork(driver, "parent", "child")
    assert driver.session("child").sequence.computed == 43
    driver.run()


def test_a_tenant_at_its_quota_waits_alone() -> None:
    driver = Driver("dense", PAGE, pages=24, host=40, shares={"blue": Share(0.25)})
    for name, tenant in (("parent", "blue"), ("x", "blue"), ("other", "red")):
        driver.open(name, tenant)
    driver.turn("parent", 60, 3)
    away(driver, "parent")
    first = driver.submit("x", prompt(50, 1), 40)
    driver.until(lambda: first.generated > 20)
    assert not driver.scheduler.ready("parent", 63, True, driver.now)
    talk = driver.submit("other", prompt(9, 4), 8)
    driver.until(lambda: talk.over)
    assert not first.over, "another tenant is not held up"
    fork(driver, "parent", "child")
    assert driver.session("child").sequence.computed == 63


def test_what_came_back_for_a_verb_is_not_spilled_before_it_has_acted() -> None:
    driver = Driver("dense", PAGE, pages=12, host=40)
    driver.open("parent")
    driver.turn("parent", 90, 3)
    away(driver, "parent")
    assert not driver.scheduler.ready("parent", 93, True, driver.now)
    parent = driver.session("parent")
    while parent.place is not Place.HOME:
        driver.step()
    pool = driver.ledger.pool(Component.FULL)
    shortfall = OutOfUnits(pool, len(pool.free) + 1, len(pool.free))
    driver.open("x")
    assert not driver.scheduler.pressure.make_room(shortfall, driver.session("x"), may_retract=False)
    assert parent.place is Place.HOME
    driver.step()
    assert not driver.registry.recalled, "a verb that never comes holds nothing up"
    assert driver.scheduler.pressure.make_room(shortfall, driver.session("x"), may_retract=False)
    assert parent.place is Place.AWAY, "the host has a whole copy of it"


def test_a_fork_cancels_a_move_and_a_cut_does_so_by_itself() -> None:
    driver = Driver("dense", PAGE, pages=12, host=40)
    driver.open("a")
    driver.turn("a", 90, 3)
    assert driver.scheduler.spill("a", driver.now)
    assert driver.scheduler.ready("a", 40, False, driver.now)
    assert not driver.scheduler.ready("a", 93, True, driver.now)
    assert wait(driver, "a", 93) == 1 and driver.session("a").place is Place.HOME
    assert driver.scheduler.fork("a", "b", driver.now).sequence.computed == 93


def test_memory_that_will_never_have_room_is_not_waited_for() -> None:
    driver = Driver("dense", PAGE, pages=12, host=40)
    driver.open("a")
    driver.turn("a", 90, 3)
    away(driver, "a")
    with driver.starved("restore"):
        wait(driver, "a", 93)
    assert driver.session("a").sequence.computed == 0 and driver.registry.counters.dropped == 1
    driver = Driver("dense", PAGE, pages=3)
    driver.open("a")
    driver.turn("a", 40, 2)
    driver.scheduler.flush()
    assert driver.scheduler.ready("a", 42, True, driver.now), "it has all pages itself"


def test_verbs_that_need_no_memory_wait_for_rows_and_copies_alone() -> None:
    driver = Driver("dense", PAGE, pages=20, host=40)
    assert driver.scheduler.ready("nobody", 1, True, driver.now)
    driver.open("a")
    assert driver.scheduler.ready("a", 0, True, driver.now), "there is nothing to share"
    driver.turn("a", 40, 3)
    away(driver, "a")
    assert driver.scheduler.ready("a", 0, True, driver.now)
    assert driver.scheduler.ready("a", 43, False, driver.now)
    assert driver.session("a").place is Place.AWAY and not driver.registry.recalled
    turn = driver.submit("a", prompt(5, 1), 5)
    assert driver.scheduler.ready("a", 43, True, driver.now), "the verb is refused"
    driver.until(lambda: turn.generated > 1)
    driver.until(lambda: turn.over)
    driver.run()
    driver.scheduler.fork("a", "b", driver.now)
    assert not driver.scheduler.ready("b", 48, True, driver.now), "its copy is not planned"
    driver.run()
    assert driver.scheduler.ready("b", 48, True, driver.now)


def test_a_session_that_is_closed_is_recalled_no_more() -> None:
    driver = Driver("dense", PAGE, pages=12, host=40)
    driver.open("a")
    driver.turn("a", 90, 3)
    away(driver, "a")
    assert not driver.scheduler.ready("a", 93, True, driver.now)
    driver.close("a")
    assert not driver.registry.recalled and driver.scheduler.ready("a", 93, True, driver.now)


def test_verbs_get_their_memory_one_after_the_other() -> None:
    driver = Driver("dense", PAGE, pages=10, host=40)
    for seed, name in enumerate("ab"):
        driver.open(name)
        driver.turn(name, 90, 3, seed)
        away(driver, name)
    driver.open("other")
    running = driver.submit("other", prompt(100, 2), 9)
    driver.until(lambda: running.generated > 1)
    assert not any(driver.scheduler.ready(name, 93, True, driver.now) for name in "ab")
    for name in "ab":
        fork(driver, name, f"child of {name}")
        assert driver.session(f"child of {name}").sequence.computed == 93
        driver.close(f"child of {name}")
    assert running.over


def test_what_nobody_leases_gives_way_to_a_fork_at_once() -> None:
    driver = Driver("dense", PAGE, pages=12)
    driver.request(prompt(90, 1), 3)
    driver.run()
    driver.open("a")
    driver.turn("a", 90, 3)
    assert not driver.ledger.pool(Component.FULL).free, "the rest is in the tree"
    assert driver.scheduler.ready("a", 93, True, driver.now)
    assert driver.scheduler.fork("a", "b", driver.now).sequence.computed == 93


@pytest.mark.no_cover
@pytest.mark.parametrize("layout", PAGED)
def test_sessions_that_are_away_are_kept_while_others_will_make_room(layout: str) -> None:
    """A shared prompt is all they lease on the device: dropping them would free nothing."""
    driver = Driver(layout, PAGE, pages=16, slots=20, host=200)
    shared = prompt(2 * PAGE, 50)
    for seed, name in enumerate("abcdef"):
        driver.open(name)
        driver.submit(name, shared + prompt(40, seed), 3)
        driver.run()
    for turn in range(4):
        turns = [driver.submit(name, prompt(9, 10 * turn + seed), 3) for seed, name in enumerate("abcdef")]
        driver.run()
        # Where no page was free, the last token of the turn before is computed with this one.
        assert all(11 <= each.computed <= 12 for each in turns), "nothing but what is new"
    assert driver.registry.counters.dropped == 0


@pytest.mark.no_cover
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_verbs_that_wait_under_pressure_all_come_to_act(layout: str, overlap: bool, seed: int) -> None:
    """Turns, forks and cuts of more sessions than fit, in any order; the device checks every row."""
    chance = random.Random(f"{layout} {overlap} {seed}")
    driver = Driver(layout, 4, pages=40, slots=9, host=400, overlap=overlap, chunk_tokens=16)
    driver.open("s0")
    waiting: list[tuple[str, int, bool]] = []
    acted = 0
    for number in range(1, 160):
        names = [name for name, each in driver.registry.sessions.items() if each.turn is None]
        name = chance.choice(names) if names else ""
        known = driver.session(name).sequence.known if name else 0
        match chance.randrange(6):
            case 0 if len(driver.registry.sessions) < 9:
                driver.open(f"s{number}")
            case 1 | 2 if name and known < 110:
                driver.submit(name, prompt(chance.randint(1, 30), number), chance.randint(1, 9))
            case 3 if known:
                waiting.append((name, known, True))
            case 4 if known:
                waiting.append((name, driver.session(name).boundaries[0], False))
            case 5 if len(names) > 5:
                driver.scheduler.close(name, driver.now)
        driver.step()
        for verb in list(waiting):
            waited, length, forks = verb
            if not driver.scheduler.ready(waited, length, forks, driver.now):
                continue
            waiting.remove(verb)
            with suppress(Refused):  # It was closed, cut shorter or has a turn in flight since.
                if forks:
                    driver.scheduler.fork(waited, f"f{number} {waited}"[:60], driver.now, known=length)
                else:
                    driver.scheduler.rewind(waited, 1, driver.now)
                acted += 1
    driver.run()
    driver.until(lambda: not driver.registry.recalled)
    assert acted > 5
    for name in list(driver.registry.sessions):
        driver.close(name)
    driver.scheduler.flush()
    driver.run()
    assert driver.all_free()


def test_a_fork_that_copies_nothing_takes_nobodys_memory() -> None:
    driver = Driver("hybrid", 4)
    driver.open("a")
    resting = driver.open("b")
    driver.turn("b", 9, 3)
    pool = driver.ledger.pool(Component.STATE)
    taken = driver.ledger.take(pool, len(pool.free), driver.ledger.holder(Kind.TRANSIT, "all"))
    assert driver.scheduler.ready("a", 0, True, driver.now)
    assert resting.sequence.computed == 12 and not pool.free
    taken.release()
