"""Memory that lies in files: moves longer than a step, the host's pressure, and coming back after a death.

The files are the engine's; to the core the disk is one more tier, whose moves may be under way while other
sessions go on.
"""

from itertools import pairwise

import pytest

from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import Hold, Kind
from holdfast.core.plan import StepResult
from holdfast.core.policy import COMPARED_MAX, spill_order
from holdfast.core.registry import Plan
from holdfast.core.retention import Retention
from holdfast.core.session import Place, Session
from holdfast.core.tiers import whole_units
from holdfast.core.turn import TurnRequest
from tests.core.driver import LAYOUTS, PAGE_SIZES, STATEFUL, Driver, prompt


def slow(plan: Plan, result: StepResult) -> StepResult:
    """Moves to and from the disk are not over with their step."""
    if result.error is None:
        result.moved = [
            None if Tier.DISK in (move.source_tier, move.destination_tier) else True for move in plan.moves
        ]
    return result


def resting(layout: str = "hybrid", page_size: int = 4, **sizes: object) -> Driver:
    """A session with two turns whose moves to the disk are slow."""
    driver = Driver(layout, page_size, **{"disk": 100, **sizes})
    driver.open("a")
    for seed in range(2):
        driver.turn("a", 20, 4, seed)
    driver.spoil = slow
    return driver


def underway(driver: Driver) -> int:
    (number,) = driver.registry.transits
    return number


def follows(driver: Driver, name: str = "a", cached: int | None = None) -> None:
    """The next turn says what it should, and computes what it should."""
    known = len(driver.tokens(name))
    turn = driver.submit(name, prompt(3, 8), 4)
    for _ in range(9):
        driver.step()
        for number in list(driver.registry.transits):
            driver.scheduler.arrive(number, True, driver.now)
    driver.run()
    assert driver.tokens(name)[known + 3 :] == driver.says(driver.tokens(name)[: known + 3], 4)
    assert turn.cached == (known if cached is None else cached)


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_others_go_on_while_a_move_is_under_way(layout: str, page_size: int) -> None:
    driver = resting(layout, page_size)
    driver.open("b")
    before = driver.registry.moves.parcel_units(driver.session("a"))
    assert driver.scheduler.spill("a", driver.now, Tier.DISK)
    driver.turn("b", 9, 5, 3)
    assert driver.session("a").state == "SPILLING", "nobody has said that it arrived"
    driver.scheduler.arrive(underway(driver), True, driver.now)
    assert driver.session("a").state == "SPILLED" and not driver.registry.transits
    driver.close("b")
    assert driver.scheduler.restore("a", driver.now)
    assert not driver.scheduler.restore("a", driver.now), "it is on its way already"
    driver.open("c")
    driver.turn("c", 9, 5, 4)
    assert driver.session("a").state == "RESTORING"
    driver.scheduler.arrive(underway(driver), True, driver.now)
    assert driver.session("a").state == "IDLE"
    assert driver.scheduler.arrive(10_000, True, driver.now) is None, "a late word of something cancelled"
    driver.close("c")
    held = driver.session("a").holder.held
    assert {component: held[driver.ledger.pool(component).index] for component in before} == before
    follows(driver)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_turn_cancels_a_spill_and_waits_for_a_restore(layout: str) -> None:
    driver = resting(layout)
    driver.scheduler.spill("a", driver.now, Tier.DISK)
    driver.step()
    number = underway(driver)
    turn = driver.submit("a", prompt(3, 5), 4)
    driver.step()
    assert not driver.registry.transits and turn.state.value == "running"
    driver.scheduler.arrive(number, True, driver.now)
    driver.run()
    assert driver.session("a").place is Place.HOME
    driver.scheduler.spill("a", driver.now, Tier.DISK)
    driver.step()
    driver.scheduler.arrive(underway(driver), True, driver.now)
    turn = driver.submit("a", prompt(3, 6), 4)
    for _ in range(5):
        driver.step()
    assert turn.state.value == "queued" and driver.session("a").state == "RESTORING"
    assert driver.session("a").sequence.computed == 55, "nothing is given up while it is on its way"
    driver.scheduler.arrive(underway(driver), True, driver.now)
    driver.run()
    assert turn.cached == 55 and driver.tokens()[-4:] == driver.says(driver.tokens()[:-4], 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_that_cannot_be_read_is_computed_again(layout: str) -> None:
    driver = resting(layout)
    driver.scheduler.spill("a", driver.now, Tier.DISK)
    driver.step()
    driver.scheduler.arrive(underway(driver), True, driver.now)
    turn = driver.submit("a", prompt(3, 5), 4)
    driver.step()
    driver.scheduler.arrive(underway(driver), False, driver.now)
    driver.run()
    assert turn.cached < 48 and driver.tokens()[-4:] == driver.says(driver.tokens()[:-4], 4)
    assert driver.counts(driver.layout.components[0], Tier.DISK) == {"FREE": 100}


def test_a_file_that_cannot_be_written_leaves_the_session_where_it_is() -> None:
    driver = resting()
    driver.scheduler.spill("a", driver.now, Tier.DISK)
    driver.step()
    driver.scheduler.arrive(underway(driver), False, driver.now)
    assert driver.session("a").state == "IDLE"
    follows(driver)


def test_a_parcel_of_which_one_component_is_lost_is_lost() -> None:
    driver = resting()
    driver.spoil = lambda plan, result: StepResult(result.rows, [None, False][: len(plan.moves)])
    driver.scheduler.spill("a", driver.now, Tier.DISK)
    driver.step()
    assert driver.session("a").state == "IDLE" and not driver.registry.transits
    driver.spoil = slow
    follows(driver)


def test_a_stated_tier_without_room_is_not_replaced_by_another() -> None:
    driver = resting(host=100, disk=0)
    assert not driver.scheduler.spill("a", driver.now, Tier.DISK)
    assert driver.scheduler.spill("a", driver.now, Tier.HOST)


# --- the host's pressure ---


def crowd(driver: Driver, *names: str) -> None:
    """Sessions that are on the host, in the order of their names."""
    for seed, name in enumerate(names):
        driver.open(name)
        driver.turn(name, 20, 4, seed)
        assert driver.scheduler.spill(name, driver.now, Tier.HOST)
        driver.run()


def host_full(driver: Driver) -> list[Hold]:
    """Take all that is free on the host."""
    filler = driver.ledger.holder(Kind.QUARANTINE, "filler")
    pools = [pool for pool in driver.ledger.pools.values() if pool.tier is Tier.HOST]
    return [driver.ledger.take(pool, len(pool.free), filler) for pool in pools]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_on_disk_as_well_leaves_the_host_first(layout: str) -> None:
    kept = {"b", "c"}
    driver = Driver(layout, 4, host=100, disk=100, strict=False, on_disk=lambda session: session.id in kept)
    crowd(driver, "a", "b", "c")
    driver.open("d")
    driver.turn("d", 20, 4, 7)
    held = host_full(driver)
    assert driver.scheduler.pressure.spill(driver.session("d"))
    tiers = [driver.session(name).parcel.tier for name in ("a", "b", "c", "d")]
    assert tiers == [Tier.HOST, Tier.DISK, Tier.HOST, Tier.HOST], "the only copy of `a` is on the host"
    for hold in held:
        hold.release()
    driver.run()
    assert driver.counts(driver.layout.components[0], Tier.DISK)["SESSION"] > 0


@pytest.mark.parametrize("disk", [100, 1])
def test_without_a_file_or_room_on_disk_a_parcel_stays_on_the_host(disk: int) -> None:
    driver = Driver("dense", 4, host=100, disk=disk, strict=False, on_disk=lambda session: disk == 1)
    crowd(driver, "a")
    driver.open("d")
    driver.turn("d", 30, 14, 7)
    held = host_full(driver)
    assert driver.scheduler.pressure.spill(driver.session("d")) is (disk == 100)
    assert driver.session("a").parcel.tier is Tier.HOST
    if disk == 100:
        assert driver.session("d").parcel.tier is Tier.DISK
    for hold in held:
        hold.release()
    driver.run()


def test_the_longest_idle_go_first_and_of_equals_the_cheapest() -> None:
    driver = Driver("dense", 4, pages=2000)
    for number, (length, since) in enumerate([(40, 90.0), (9, 91.0), (20, 20.0), (9, 99.5)]):
        driver.open(f"s{number}")
        driver.now = since
        driver.registry.now = since
        driver.turn(f"s{number}", length, 2, number)
        driver.session(f"s{number}").idle_since = since
    order = [session.id for session in spill_order(driver.registry.resting, 100.0)]
    assert order == ["s2", "s1", "s0", "s3"]
    few: list[Session] = list(driver.registry.resting)
    many = (few * COMPARED_MAX)[: COMPARED_MAX + 3]
    assert spill_order(many, 100.0)[COMPARED_MAX:] == many[COMPARED_MAX:], "the rest is not looked at"


# --- coming back after a death ---


def lines(driver: Driver, name: str) -> dict[Component, list[list[int]]]:
    """What a file of a session would hold: the contents of all its units, by component."""
    session = driver.session(name)
    tier = session.parcel.tier if session.parcel is not None else Tier.DEVICE
    return {
        component: [
            list(driver.device.read_unit((component, place), unit))
            for place, units in ((Tier.DEVICE, leased), (tier, own))
            for unit in units
        ]
        for component, (leased, own) in whole_units(session.sequence, session.parcel).items()
    }


def reborn(driver: Driver, name: str, file: dict[Component, list[list[int]]], **sizes: object) -> Driver:
    """A new server that knows a session's history, and has a file of its memory."""
    old = driver.session(name)
    other = Driver(driver.layout, disk=400, **sizes)
    ends = [0, *old.boundaries]
    history = [
        (
            TurnRequest(f"old {turn}", tuple(driver.tokens(name)[start : end - 2]), 2),
            driver.tokens(name)[end - 2 : end],
        )
        for turn, (start, end) in enumerate(pairwise(ends))
    ]
    session = other.scheduler.recover(name, "red", other.now, Retention(60.0), history)
    assert session.boundaries == old.boundaries and other.tokens(name) == driver.tokens(name)
    if other.scheduler.adopt(name, old.sequence.computed):
        assert session.state == "SPILLED" and session.parcel is not None
        for component, units in file.items():
            for unit, contents in zip(session.parcel.away[component].units, units, strict=True):
                other.device.write_unit((component, Tier.DISK), unit, contents)
    return other


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["device", "host"])
def test_a_session_comes_back_from_its_file(layout: str, page_size: int, where: str) -> None:
    driver = Driver(layout, page_size, host=100)
    driver.open("a")
    driver.open("b")
    for name in ("a", "b"):  # `b` leans on what `a` has published.
        for seed in range(3):
            driver.turn(name, 20 if seed else 64, 4, seed)
    if where == "host":
        assert driver.scheduler.spill("b", driver.now)
        driver.run()
    other = reborn(driver, "b", lines(driver, "b"))
    known = len(other.tokens("b"))
    turn = other.turn("b", 3, 4, 9)
    assert (turn.cached, turn.computed) == (known, 3 + 3), "only its own tokens"
    assert other.tokens("b")[-4:] == other.says(other.tokens("b")[:-4], 4)
    other.scheduler.rewind("b", 1, other.now)
    other.turn("b", 3, 4, 5)
    assert other.tokens("b")[-4:] == other.says(other.tokens("b")[:-4], 4)
    other.close("b")
    assert other.all_free() or other.registry.tree.flush() is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_session_that_leases_its_state_is_whole_as_well(layout: str) -> None:
    """A fork at a page boundary owns nothing yet."""
    driver = Driver(layout, 4)
    driver.open("a")
    driver.turn("a", 12, 4)
    driver.scheduler.fork("a", "b", driver.now)
    driver.run()
    other = reborn(driver, "b", lines(driver, "b"))
    turn = other.turn("b", 3, 4, 9)
    assert (turn.cached, turn.computed) == (16, 6)


@pytest.mark.parametrize("layout", STATEFUL)
def test_a_state_that_is_leased_is_part_of_the_whole(layout: str) -> None:
    """A first turn that began at a prefix of the tree and was cut back to its input leases the state."""
    driver = Driver(layout, 4)
    driver.request(prompt(13), 2)
    driver.run()
    driver.open("b")
    turn = driver.submit("b", prompt(14), 9)
    driver.until(lambda: turn.generated == 2)
    driver.scheduler.interrupt("b", driver.now, keep=0)
    driver.run()
    sequence = driver.session("b").sequence
    assert (sequence.known, sequence.computed, sequence.state) == (14, 12, None)
    other = reborn(driver, "b", lines(driver, "b"))
    turn = other.turn("b", 3, 4, 9)
    assert (turn.cached, turn.computed) == (12, 2 + 6)
    assert other.tokens("b")[-4:] == other.says(other.tokens("b")[:-4], 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_room_on_disk_a_session_is_computed_again(layout: str) -> None:
    driver = Driver(layout, 4)
    driver.open("a")
    driver.turn("a", 40, 4)
    with_room = reborn(driver, "a", lines(driver, "a"))
    assert with_room.session("a").state == "SPILLED"
    with_room.close("a")
    other = Driver(layout, 4, disk=100)
    other.scheduler.recover(
        "a", "red", other.now, Retention(60.0), [(TurnRequest("t", prompt(40), 4), driver.tokens()[40:])]
    )
    with other.starved("adopt") as struck:
        assert not other.scheduler.adopt("a", 44)
    assert struck and other.session("a").state == "IDLE" and not other.registry.tree.leases.records
    turn = other.turn("a", 3, 4, 9)
    assert (turn.cached, turn.computed) == (0, 44 + 6)
    other.scheduler.interrupt("a", other.now, keep=1)
    assert len(other.tokens()) == 48


def test_the_last_turn_can_be_cut_after_a_death() -> None:
    driver = Driver("hybrid", 4)
    driver.open("a")
    driver.turn("a", 12, 2)
    driver.turn("a", 12, 2, 1)
    other = reborn(driver, "a", lines(driver, "a"))
    other.scheduler.interrupt("a", other.now, keep=1)
    assert other.tokens() == driver.tokens()[:-1]
    other.turn("a", 3, 4, 9)
    assert other.tokens()[-4:] == other.says(other.tokens()[:-4], 4)


def test_without_a_disk_nothing_is_adopted_and_nothing_sinks() -> None:
    """A limit may leave room for no session at all, though there are files."""
    driver = Driver("hybrid", 4, pages=12, host=8, on_disk=lambda session: True)
    driver.scheduler.recover("old", "red", 0.0, Retention(), [(TurnRequest("t", prompt(9), 2), [1, 2])])
    assert not driver.scheduler.adopt("old", 8)
    assert driver.session("old").place is Place.HOME
    for seed, name in enumerate("abc"):
        driver.open(name)
        driver.turn(name, 26, 2, seed)
    assert [driver.session(name).place for name in "abc"].count(Place.AWAY) == 1
    assert driver.registry.counters.dropped
    assert driver.turn("old", 3, 2, 9).cached == 0
