"""The shared tables: who is in which list, names that are gone, tiers with room, what is on its way."""

import pytest

from holdfast.core.errors import SessionExpired, UnknownSession
from holdfast.core.layout import Component, Tier, named_layout
from holdfast.core.ledger import Kind, Ledger
from holdfast.core.policy import Policy
from holdfast.core.prefix import PrefixTree
from holdfast.core.registry import Registry
from holdfast.core.retention import Retention
from holdfast.core.session import Life, Place, Session
from holdfast.core.sharing import lean
from holdfast.core.turn import Turn, TurnRequest
from tests.core.driver import Driver, prompt

FULL, STATE = Component.FULL, Component.STATE


def make_registry() -> Registry:
    """A registry of a hybrid model without sessions."""
    ledger = Ledger(named_layout("hybrid", 4), {(FULL, Tier.DEVICE): 10, (STATE, Tier.DEVICE): 4})
    return Registry(ledger, PrefixTree(ledger), Policy())


def enter(registry: Registry, name: str, tenant: str = "red", ttl: float | None = 5.0) -> Session:
    """A session that has just been opened."""
    session = Session(registry.ledger, name, tenant, registry.number(), registry.now, Retention(ttl))
    registry.enter(session)
    return session


def test_numbers_are_given_in_order_of_asking() -> None:
    registry = make_registry()
    assert [registry.number() for _ in range(3)] == [1, 2, 3]


def test_sessions_are_counted_by_tenant_and_struck_off_everything_when_they_leave() -> None:
    registry = make_registry()
    sessions = [enter(registry, name, tenant) for name, tenant in (("a", "red"), ("b", "red"), ("c", "blue"))]
    assert registry.tenants == {"red": 2, "blue": 1}
    for table in (registry.resting, registry.queues.checkpointed, registry.seals, registry.queues.tainted):
        table[sessions[0]] = None
    sessions[0].sequence.fence = 7
    registry.leave(sessions[0])
    assert registry.tenants == {"red": 1, "blue": 1} and list(registry.sessions) == ["b", "c"]
    assert not (registry.resting or registry.queues.checkpointed or registry.seals or registry.queues.tainted)
    registry.leave(sessions[2])
    assert registry.in_flight.forgotten == [sessions[0].number], "the other one was in no plan"
    assert registry.deadlines.entries() == [(5.0, sessions[1].number, "b")]
    assert registry.tenants == {"red": 1}


def test_a_name_that_is_not_there_says_why() -> None:
    registry = make_registry()
    session = enter(registry, "a")
    registry.expired["old"] = None
    assert registry.find("a") is session
    with pytest.raises(SessionExpired):
        registry.find("old")
    with pytest.raises(UnknownSession):
        registry.find("never")


def test_only_sessions_with_memory_rest_and_the_longest_resting_comes_first() -> None:
    registry = make_registry()
    sessions = [enter(registry, name) for name in ("a", "b", "c")]
    assert not registry.resting
    for session in sessions:
        session.sequence.lease = registry.tree.lease_root("red", session.id)
        registry.queues.rest(session)
    assert [session.id for session in registry.resting] == ["a", "b", "c"]
    registry.queues.rest(sessions[0])
    assert [session.id for session in registry.resting] == ["b", "c", "a"]
    for session in sessions:
        session.sequence.close()


def test_idle_time_counts_from_now_and_requests_of_their_own_have_none() -> None:
    registry = make_registry()
    named, one_shot = enter(registry, "a"), enter(registry, "r", ttl=None)
    for session in (named, one_shot):
        request = TurnRequest("t", (1,), 1, deadline=3.0)
        session.turn = Turn(request, session.id, registry.number(), 0.0, session.holder)
        registry.watch_turn(session, session.turn)
    assert registry.deadlines.entries() == [(3.0, -4, "r"), (3.0, -3, "a"), (5.0, 1, "a")]
    registry.now = 7.0
    registry.over(named)
    registry.over(one_shot)
    assert named.turn is one_shot.turn is None
    assert named.idle_since == one_shot.idle_since == 7.0
    due = registry.deadlines.entries()
    assert due == [(5.0, 1, "a")], "one look at the named one, when it could be over first"


def test_events_are_noted_with_what_they_are_about() -> None:
    registry = make_registry()
    session = enter(registry, "a")
    registry.emit("closed", session, None, "why")
    (event,) = registry.events
    assert (event.kind, event.session_id, event.turn, event.tokens, event.reason) == (
        "closed",
        "a",
        None,
        [],
        "why",
    )


@pytest.mark.parametrize(
    ("host", "disk", "tier"),
    [(0, 0, None), (50, 0, Tier.HOST), (1, 50, Tier.DISK), (1, 1, None), (50, 50, Tier.HOST)],
)
def test_the_nearest_tier_with_room_for_all_components_is_chosen(host: int, disk: int, tier) -> None:
    driver = Driver("hybrid", 4, host=host)
    if disk:
        sizes = {(pool.component, pool.tier): pool.size for pool in driver.ledger.pools.values()}
        sizes |= {(component, Tier.DISK): disk for component in driver.layout.components}
        driver.ledger = Ledger(driver.layout, sizes)
        driver.scheduler.__init__(driver.ledger, driver.registry.policy, strict=True)
        driver.registry = driver.scheduler.registry
    driver.open("a")
    driver.turn("a", 10, 3)
    assert driver.registry.moves.spill_tier(driver.session("a")) is tier


def test_a_session_without_memory_has_nothing_to_spill() -> None:
    driver = Driver("hybrid", 4, host=50)
    driver.open("a")
    assert driver.registry.moves.spill_tier(driver.session("a")) is None


def test_units_that_are_leaving_are_counted() -> None:
    driver = Driver("hybrid", 4, host=50)
    driver.open("a")
    driver.turn("a", 10, 3)
    assert driver.registry.moves.leaving_units(FULL) == 0
    own = driver.registry.moves.parcel_units(driver.session("a"))
    assert own == {FULL: 4, STATE: 1}, "and what the tree keeps for it alone"
    driver.scheduler.spill("a", driver.now)
    assert driver.registry.moves.leaving_units(FULL) == own[FULL]
    driver.plan()
    driver.submit("a", prompt(2, 1), 2)
    driver.plan()
    assert driver.registry.moves.leaving_units(FULL) == driver.ledger.pool(FULL).by_kind[Kind.RETIRING]
    driver.run()


def test_a_state_that_the_tree_keeps_for_one_session_is_counted_as_its_own() -> None:
    driver = Driver("hybrid", 4)
    driver.open("a")
    driver.turn("a", 10, 3)
    driver.close("a")
    sequence, tree = driver.open("b").sequence, driver.registry.tree
    sequence.tokens.extend(prompt(10))
    match = tree.match("red", sequence.tokens.packed(0, 10), 9)
    lean(sequence, tree.lease(match, "b"), match.length, {})
    assert sequence.computed == 8 and sequence.state is None
    assert driver.registry.moves.parcel_units(driver.session("b")) == {FULL: 2, STATE: 1}


def test_a_restore_on_its_way_is_not_leaving() -> None:
    driver = Driver("hybrid", 4, host=50)
    driver.open("a")
    driver.turn("a", 10, 3)
    driver.scheduler.spill("a", driver.now)
    driver.run()
    driver.submit("a", prompt(2, 1), 2)
    driver.plan()
    assert driver.session("a").place is Place.RETURNING
    assert driver.registry.moves.leaving_units(FULL) == 0
    driver.run()


def test_dropping_memory_keeps_the_tokens_and_ends_a_seal() -> None:
    driver = Driver("hybrid", 4)
    session = driver.open("a")
    turn = driver.submit("a", prompt(10), 3)
    driver.until(lambda: turn.over)
    assert session.life is Life.SEALING
    driver.registry.drop_memory(session)
    assert session.life is Life.IDLE and not driver.registry.seals
    assert (session.sequence.known, session.sequence.computed) == (13, 0)
    assert session not in driver.registry.resting
    driver.scheduler.flush()
    driver.run()
    assert driver.all_free()


def test_a_fork_is_incomplete_until_its_copies_have_settled() -> None:
    driver = Driver("dense", page_size=16)
    driver.open("a")
    driver.turn("a", 20, 3)
    child = driver.scheduler.fork("a", "b", driver.now)
    assert driver.registry.copying(child) and not driver.registry.copying(driver.session("a"))
    driver.run()
    assert not driver.registry.copying(child)
