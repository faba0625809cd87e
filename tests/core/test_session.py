"""The tables of sessions: every pair of life and event, every pair of place and event, and what is shown."""

import pytest

from holdfast.core.errors import IllegalTransition
from holdfast.core.layout import MemoryLayout
from holdfast.core.retention import Retention
from holdfast.core.session import LIFE_TABLE, PLACE_TABLE, SHOWN, Life, Place, Session
from tests.core.world import make_ledger

LIFE_EVENTS = sorted({event for _, event in LIFE_TABLE})
PLACE_EVENTS = sorted({event for _, event in PLACE_TABLE})

# The same tables in another form, written out so that a change of one needs a change of the other.
LIVES = {
    "IDLE": {"submit": "QUEUED", "close": "CLOSED", "defer close": "CLOSING"},
    "QUEUED": {"admit": "RUNNING", "end": "IDLE"},
    "RUNNING": {"retract": "QUEUED", "end": "IDLE", "seal": "SEALING", "defer close": "CLOSING"},
    "SEALING": {"submit": "QUEUED", "end": "IDLE", "close": "CLOSED", "defer close": "CLOSING"},
    "CLOSING": {"close": "CLOSED"},
    "CLOSED": {},
}
PLACES = {
    "HOME": {"spill": "LEAVING", "adopt": "AWAY"},
    "LEAVING": {"settle": "AWAY", "drop": "HOME"},
    "AWAY": {"restore": "RETURNING", "drop": "HOME"},
    "RETURNING": {"settle": "HOME", "cancel": "AWAY", "drop": "HOME"},
}


def make_session(ttl: float | None = 60.0) -> Session:
    """A session that has just been opened."""
    return Session(make_ledger(MemoryLayout(4)), "a", "red", 3, 2.0, Retention(ttl))


@pytest.mark.parametrize("event", LIFE_EVENTS)
@pytest.mark.parametrize("life", Life)
def test_every_pair_of_life_and_event(life: Life, event: str) -> None:
    session = make_session()
    session.life = life
    after = LIVES[life.name].get(event)
    if after is None:
        with pytest.raises(IllegalTransition, match=f"session a: {event} while {life.value}"):
            session.on(event)
        assert session.life is life
    else:
        session.on(event)
        assert session.life is Life[after]


@pytest.mark.parametrize("event", PLACE_EVENTS)
@pytest.mark.parametrize("place", Place)
def test_every_pair_of_place_and_event(place: Place, event: str) -> None:
    session = make_session()
    session.place = place
    after = PLACES[place.name].get(event)
    if after is None:
        with pytest.raises(IllegalTransition, match=f"memory of session a: {event} while {place.value}"):
            session.moved(event)
        assert session.place is place
    else:
        session.moved(event)
        assert session.place is Place[after]


def test_every_life_and_place_can_be_reached_and_only_closed_is_the_end() -> None:
    assert set(LIFE_TABLE.values()) | {Life.IDLE} == set(Life)
    assert {life for life, _ in LIFE_TABLE} == set(Life) - {Life.CLOSED}
    assert set(PLACE_TABLE.values()) == {place for place, _ in PLACE_TABLE} == set(Place)


@pytest.mark.parametrize("place", Place)
@pytest.mark.parametrize("life", Life)
def test_the_state_that_clients_see(life: Life, place: Place) -> None:
    session = make_session()
    session.life, session.place = life, place
    shown = {
        ("IDLE", "LEAVING"): "SPILLING",
        ("IDLE", "AWAY"): "SPILLED",
        ("IDLE", "RETURNING"): "RESTORING",
        ("QUEUED", "RETURNING"): "RESTORING",
    }
    assert session.state == shown.get((life.name, place.name), life.name)
    assert len(SHOWN) == len(shown)


@pytest.mark.parametrize("unsettled", [0, 1])
@pytest.mark.parametrize("life", Life)
def test_memory_is_at_rest_while_no_turn_has_it_and_nothing_in_flight_names_it(
    life: Life, unsettled: int
) -> None:
    session = make_session()
    session.life, session.unsettled = life, unsettled
    assert session.at_rest is (not unsettled and life.name in ("IDLE", "QUEUED", "SEALING"))


def test_a_fresh_session() -> None:
    session = make_session()
    assert (session.id, session.tenant, session.number) == ("a", "red", 3)
    assert (session.created, session.idle_since, session.retention.ttl) == (2.0, 2.0, 60.0)
    assert (session.state, session.one_shot) == ("IDLE", False)
    assert make_session(ttl=None).one_shot
