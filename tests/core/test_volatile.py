"""Volatile sessions: cut and forked at any token, shared while they speak, counted towards no limit."""

import pytest

from holdfast.core.errors import SessionBusy, SessionExists, TooManySessions, UnknownBoundary
from holdfast.core.layout import Tier
from holdfast.core.session import Place, Session
from holdfast.core.turn import Turn, TurnRequest
from tests.core.driver import LAYOUTS, Driver, prompt


def hidden(driver: Driver, name: str = "a", tenant: str = "red") -> Session:
    return driver.scheduler.open(name, tenant, driver.now, volatile=True)


def follow(driver: Driver, name: str, count: int, keep: int, seed: int = 9) -> Turn:
    """A turn that follows the first `keep` tokens of a session."""
    driver.serial += 1
    request = TurnRequest(f"t{driver.serial}", prompt(count, seed), 3)
    return driver.scheduler.submit(name, request, driver.now, keep)


def conversation(driver: Driver, name: str = "a") -> Session:
    """A volatile session of three turns, of 10 + 2, 9 + 2 and 8 + 2 tokens."""
    session = hidden(driver, name)
    for seed, count in enumerate((10, 9, 8)):
        driver.turn(name, count, 2, seed)
    assert session.boundaries == [12, 23, 33]
    return session


@pytest.mark.no_cover
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keep", [0, 5, 12, 15, 31, 32, 33])
def test_a_turn_may_follow_any_part_of_the_history(layout: str, keep: int) -> None:
    driver = Driver(layout, 4)
    session = conversation(driver)
    before = driver.tokens()
    turn = follow(driver, "a", 6, keep)
    assert turn.known_before == keep
    driver.run()
    assert driver.tokens() == [*before[:keep], *prompt(6, 9), *driver.heard[turn.request.turn_id]]
    kept = [boundary for boundary in (12, 23, 33) if boundary < keep]
    assert session.boundaries == [*kept, *([keep] if keep else []), keep + 9]
    assert session.last is turn
    if driver.layout.cuts_anywhere:
        assert turn.cached == keep
    driver.close()


@pytest.mark.parametrize("keep", [-1, 34])
def test_a_history_that_is_not_there_is_refused_and_nothing_changes(keep: int) -> None:
    driver = Driver("dense", 4)
    session = conversation(driver)
    with pytest.raises(UnknownBoundary, match="has 33 tokens"):
        follow(driver, "a", 6, keep)
    with pytest.raises(UnknownBoundary):
        driver.scheduler.fork("a", "b", driver.now, known=keep)
    assert (len(driver.tokens()), session.boundaries) == (33, [12, 23, 33])
    assert session.last is not None and "b" not in driver.registry.sessions


def test_a_cut_waits_for_rows_in_flight() -> None:
    driver = Driver("dense", 4)
    hidden(driver)
    driver.submit("a", prompt(10), 2)
    driver.until(lambda: driver.session().turn is None)
    driver.plan()
    assert driver.session().unsettled
    with pytest.raises(SessionBusy):
        follow(driver, "a", 3, 10)
    assert driver.session().boundaries == [12]
    follow(driver, "a", 3, 12)
    driver.run()
    assert driver.session().boundaries == [12, 18]


@pytest.mark.no_cover
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("known", [0, 7, 12, 21, 33])
def test_a_fork_may_begin_at_any_token(layout: str, known: int) -> None:
    driver = Driver(layout, 4)
    conversation(driver)
    before = driver.tokens()
    child = driver.scheduler.fork("a", "b", driver.now, known=known)
    assert child.volatile and child.boundaries[-1:] == ([known] if known else [])
    turn = driver.turn("b", 5, 3, 8)
    assert driver.tokens("b")[: known + 5] == [*before[:known], *prompt(5, 8)]
    assert driver.tokens() == before
    if driver.layout.cuts_anywhere:
        assert turn.cached == known
    for name in ("a", "b"):
        driver.close(name)


def test_the_same_conversation_twice_at_once_shares_its_history_where_lengths_are_free() -> None:
    driver = Driver("dense", 4, chunk_tokens=4)
    conversation(driver)
    history = tuple(driver.tokens())
    driver.submit("a", prompt(30, 5), 5)
    driver.step()
    assert driver.session().turn is not None
    with pytest.raises(SessionBusy):
        driver.scheduler.fork("a", "b", driver.now, known=33)
    hidden(driver, "b")
    other = driver.submit("b", (*history, *prompt(6, 6)), 2)
    driver.run()
    assert other.cached == 32
    driver.registry.tree.flush()
    for name in ("a", "b"):
        driver.close(name)


def test_what_cannot_be_shared_stays_with_its_session() -> None:
    for layout in LAYOUTS:
        driver = Driver(layout, 4)
        named, session = driver.open("named"), conversation(driver)
        driver.turn("named", 33, 2, 7)
        lengths = {each.id: each.sequence.lease.length for each in (named, session) if each.sequence.lease}
        for name in ("named", "a"):
            driver.submit(name, prompt(3, 4), 2)
        assert named.sequence.lease is not None and session.sequence.lease is not None
        assert named.sequence.lease.length == lengths["named"]
        shared = driver.layout.cuts_anywhere
        assert session.sequence.lease.length == (32 if shared else lengths["a"])
        driver.run()


def test_a_session_that_is_away_or_being_sealed_shares_nothing() -> None:
    driver = Driver("dense", 4, host=100)
    session = hidden(driver)
    driver.submit("a", prompt(10), 2)
    driver.until(lambda: session.turn is None)
    driver.plan()
    assert session.unsettled and session.sequence.lease is not None
    length = session.sequence.lease.length
    driver.submit("a", prompt(3, 1), 2)
    assert session.sequence.lease.length == length
    driver.run()
    assert driver.scheduler.spill("a", driver.now)
    driver.run()
    assert session.place is Place.AWAY
    driver.submit("a", prompt(3, 2), 2)
    driver.run()
    assert session.boundaries == [12, 17, 22]


def test_a_copy_that_is_not_complete_is_not_shared() -> None:
    driver = Driver("dense", 4)
    conversation(driver)
    child = driver.scheduler.fork("a", "b", driver.now, known=33)
    assert driver.registry.copying(child) and child.sequence.lease is not None
    driver.submit("b", prompt(3, 3), 2)
    assert child.sequence.lease.length == 32
    driver.run()


def test_volatile_sessions_count_towards_no_limit() -> None:
    driver = Driver("dense", 4, sessions_max=2, tenant_sessions_max=1)
    for number in range(5):
        hidden(driver, f"h{number}")
    assert (driver.registry.volatile, driver.registry.tenants) == (5, {})
    driver.open("red 1")
    with pytest.raises(TooManySessions):
        driver.open("red 2")
    driver.open("blue 1", "blue")
    with pytest.raises(TooManySessions):
        driver.open("green 1", "green")
    with pytest.raises(SessionExists):
        hidden(driver, "h1")
    driver.turn("h1", 4, 2)
    driver.scheduler.fork("h1", "h5", driver.now)
    with pytest.raises(TooManySessions):
        driver.scheduler.fork("red 1", "red 3", driver.now)
    for number in range(6):
        driver.close(f"h{number}")
    assert (driver.registry.volatile, driver.registry.tenants) == (0, {"red": 1, "blue": 1})


def test_a_volatile_turn_needs_no_journal() -> None:
    driver = Driver("hybrid", 4, durable_turns=True)
    named, session = driver.open("named"), hidden(driver)
    for name in ("named", "a"):
        driver.turn(name, 9, 2)
        driver.submit(name, prompt(3, 2), 9)
        driver.step()
        driver.scheduler.interrupt(name, driver.now, 0)
        driver.run()
    assert (named.durable, session.durable) == (False, True)
    assert [point.pinned for point in named.sequence.points].count(True)
    assert not [point.pinned for point in session.sequence.points].count(True)


def test_a_volatile_session_goes_to_the_host_and_never_to_a_file() -> None:
    driver = Driver("dense", 4, host=100, disk=100)
    conversation(driver)
    assert not driver.scheduler.spill("a", driver.now, Tier.DISK)
    assert driver.scheduler.spill("a", driver.now)
    driver.run()
    assert driver.session().parcel is not None and driver.session().parcel.tier is Tier.HOST


@pytest.mark.parametrize("layout", LAYOUTS)
def test_volatile_sessions_give_way_to_others(layout: str) -> None:
    driver = Driver(layout, 4, pages=16, slots=5, disk=40)
    for number in range(4):
        hidden(driver, f"h{number}")
        driver.turn(f"h{number}", 30, 2, number)
    driver.open("named")
    turn = driver.turn("named", 50, 4, 6)
    assert turn.over and len(driver.tokens("named")) == 54
    on_disk = [pool for (_, tier), pool in driver.ledger.pools.items() if tier is Tier.DISK]
    assert on_disk and all(len(pool.free) == pool.size for pool in on_disk)


def test_a_fork_at_a_turn_leaves_out_a_later_one_that_ends_at_the_same_place() -> None:
    driver = Driver("dense", 4)
    driver.scheduler.open("a", "red", driver.now)
    driver.turn("a", 10, 2, 0)
    turn = driver.submit("a", (), 5, goes_on=True)
    driver.plan()
    driver.scheduler.abort("a", turn.request.turn_id, driver.now, 0, "left")
    driver.run()
    assert driver.session().boundaries == [12, 12]
    assert [driver.scheduler.fork("a", f"b{turns}", driver.now, turns).boundaries for turns in range(3)] == [
        [],
        [12],
        [12, 12],
    ]
