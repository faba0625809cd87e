"""Memory that is carried beside the steps: nobody waits for it but its own turn, and it is never mistaken."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from holdfast.core.layout import Tier
from holdfast.engine.engine import Engine, Session
from holdfast.engine.tiers import host as carrier
from holdfast.engine.tiers.host import Carrier, Errand, Load, Mark
from tests.engine.conftest import Make
from tests.engine.slow import SlowWay, slow_down
from tests.engine.tiny import WORDS, greedy, word

FOREVER = 1 << 30


def said(turn: int, count: int = 21) -> list[int]:
    return [word(WORDS[(turn * 3 + place) % len(WORDS)]) for place in range(count)]


def talk(session: Session, turns: range) -> list[list[int]]:
    return [session.say(said(turn), greedy(9)).token_ids for turn in turns]


def state(engine: Engine, name: str) -> str:
    return engine.loop.scheduler.registry.find(name).state


def run(engine: Engine) -> None:
    while engine.loop.busy:
        engine.drive()


def leave(engine: Engine, name: str) -> None:
    """A session sets out for the host."""
    while engine.loop.scheduler.registry.seals or engine.loop.scheduler.registry.flights:
        engine.drive()
    assert engine.loop.spill(name, Tier.HOST)
    engine.drive()
    assert state(engine, name) == "SPILLING"


def finish(way: SlowWay) -> None:
    for copy in way.copies:
        copy.synchronize()


def checked(session: Session, turn: int, expected: list[int]) -> None:
    """A turn says what it should, and computes nothing of the history."""
    known = session._engine.known_tokens(session.id)
    answer = session.say(said(turn), greedy(9))
    assert answer.token_ids == expected
    assert answer.usage.cached_tokens == known


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def slow(request: pytest.FixtureRequest, make_any: Make) -> tuple[Engine, SlowWay, list[list[int]]]:
    """An engine whose copies never end by themselves, and what a session of it should say."""
    expected = talk(make_any().session(), range(6))
    engine = make_any(overlap=request.param, host_memory=8 << 20)
    return engine, slow_down(engine, FOREVER), expected


def test_others_go_on_while_a_session_leaves_and_returns(
    slow: tuple[Engine, SlowWay, list[list[int]]],
) -> None:
    engine, way, expected = slow
    session, other = engine.session(id="s"), engine.session(id="other")
    assert talk(session, range(2)) == expected[:2]
    leave(engine, "s")
    assert talk(other, range(2)) == expected[:2]
    assert state(engine, "s") == "SPILLING", "two turns later it is still on its way"
    finish(way)
    run(engine)
    assert state(engine, "s") == "SPILLED"
    turn = session.say(said(2), greedy(9))
    engine.drive()
    assert state(engine, "s") == "RESTORING"
    assert talk(other, range(2, 4)) == expected[2:4]
    assert not turn.done and state(engine, "s") == "RESTORING"
    finish(way)
    assert turn.token_ids == expected[2]
    assert turn.usage.computed_tokens <= 21 + 9
    assert way.ordered == 0, "nothing was waited for"


def test_a_turn_calls_a_leaving_session_back(slow: tuple[Engine, SlowWay, list[list[int]]]) -> None:
    engine, way, expected = slow
    session = engine.session(id="s")
    assert talk(session, range(2)) == expected[:2]
    leave(engine, "s")
    checked(session, 2, expected[2])
    assert way.ordered == 1, "its copy ends before anything else is launched"
    leave(engine, "s")
    finish(way)
    run(engine)
    assert state(engine, "s") == "SPILLED"
    way.patience = 0
    checked(session, 3, expected[3])


def test_the_host_memory_of_a_copy_that_nobody_wants_is_given_to_another(
    slow: tuple[Engine, SlowWay, list[list[int]]],
) -> None:
    """Its units go to the next session that leaves, which must not read what the first still writes."""
    engine, way, expected = slow
    first, second = engine.session(id="first"), engine.session(id="second")
    assert talk(first, range(2)) == expected[:2]
    assert second.say(said(4), greedy(9)).token_ids
    follow = engine.session(id="third").say(said(4), greedy(9)).token_ids
    leave(engine, "first")
    forsaken = {tuple(load.targets) for load in way.copies[0].parcel}
    checked(first, 2, expected[2])
    leave(engine, "second")
    taken = {tuple(load.targets) for load in way.copies[-1].parcel}
    assert {unit for units in forsaken for unit in units} & {unit for units in taken for unit in units}
    finish(way)
    run(engine)
    assert state(engine, "second") == "SPILLED"
    way.patience = 0
    third = engine.resume("third")
    assert second.say(said(5), greedy(9)).token_ids == third.say(said(5), greedy(9)).token_ids
    assert follow


def test_a_session_is_closed_while_it_returns(slow: tuple[Engine, SlowWay, list[list[int]]]) -> None:
    """The units that it was to have are somebody else's before its copy is over."""
    engine, way, expected = slow
    session = engine.session(id="s")
    assert talk(session, range(3)) == expected[:3]
    leave(engine, "s")
    finish(way)
    run(engine)
    assert engine.loop.restore("s")
    engine.drive()
    assert state(engine, "s") == "RESTORING"
    session.close()
    assert talk(engine.session(id="other"), range(4)) == expected[:4]
    assert way.ordered == 1


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_step_that_fails_takes_its_parcels_with_it(
    make_any: Make, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = talk(make_any().session(), range(4))
    engine = make_any(overlap=overlap, host_memory=8 << 20)
    way = slow_down(engine, FOREVER)
    session, other = engine.session(id="s"), engine.session(id="other")
    assert talk(session, range(2)) == expected[:2]
    assert talk(other, range(2)) == expected[:2]
    run(engine)
    original = engine.loop.executor._compute

    def fails(*arguments: object) -> None:
        monkeypatch.setattr(engine.loop.executor, "_compute", original)
        raise RuntimeError("no device")

    turn = other.say(said(2), greedy(9))
    assert engine.loop.spill("s", Tier.HOST)
    monkeypatch.setattr(engine.loop.executor, "_compute", fails)
    engine.drive()
    for _ in range(3):
        engine.drive()
    assert state(engine, "s") != "SPILLING"
    assert way.ordered == 1
    checked(session, 2, expected[2])
    assert turn.token_ids in ([], expected[2])


def test_a_copy_that_cannot_be_waited_for_fails_the_step_alone(
    slow: tuple[Engine, SlowWay, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is launched past a copy that still writes: it is ordered again with the next step."""
    engine, way, expected = slow
    session = engine.session(id="s")
    assert talk(session, range(2)) == expected[:2]
    leave(engine, "s")
    original = way.order

    def fails(mark: Mark) -> None:
        monkeypatch.setattr(way, "order", original)
        raise RuntimeError("no device")

    monkeypatch.setattr(way, "order", fails)
    assert session.say(said(2), greedy(9)).token_ids == expected[2]
    assert way.ordered == 1
    assert way.copies[0].over


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_thread_carries_what_is_large(
    make_any: Make, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = talk(make_any().session(), range(6))
    engine = make_any(overlap=overlap, host_memory=8 << 20)
    monkeypatch.setattr(carrier, "SMALL", 0)
    begin, threads = threading.Event(), set[str]()
    original = carrier.copy_at_once

    def held_up(parcel: Sequence[Load]) -> None:
        threads.add(threading.current_thread().name)
        assert begin.wait(60)
        original(parcel)

    monkeypatch.setattr(carrier, "copy_at_once", held_up)
    session, other = engine.session(id="s"), engine.session(id="other")
    assert talk(session, range(2)) == expected[:2]
    leave(engine, "s")
    assert talk(other, range(2)) == expected[:2]
    assert state(engine, "s") == "SPILLING"
    begin.set()
    run(engine)
    assert state(engine, "s") == "SPILLED"
    checked(session, 2, expected[2])
    assert {name.rpartition("_")[0] for name in threads} == {"holdfast-copies"}
    run(engine)
    begin.clear()
    leave(engine, "s")
    begin.set()
    checked(session, 3, expected[3])


@pytest.mark.parametrize("way", ["there", "back"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_copy_that_fails_costs_the_session_its_memory_at_most(
    make_any: Make, overlap: bool, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = talk(make_any().session(), range(4))
    engine = make_any(overlap=overlap, host_memory=8 << 20)
    monkeypatch.setattr(carrier, "SMALL", 0)
    original = carrier.copy_at_once

    def fails(parcel: Sequence[Load]) -> None:
        raise MemoryError("no room to copy")

    session = engine.session(id="s")
    assert talk(session, range(2)) == expected[:2]
    run(engine)
    if way == "there":
        monkeypatch.setattr(carrier, "copy_at_once", fails)
    assert engine.loop.spill("s", Tier.HOST)
    run(engine)
    assert state(engine, "s") == ("IDLE" if way == "there" else "SPILLED")
    monkeypatch.setattr(carrier, "copy_at_once", fails)
    assert session.say(said(2), greedy(9)).token_ids == expected[2]
    monkeypatch.setattr(carrier, "copy_at_once", original)
    assert caplog.text.count("a copy between the device and the host failed") == 1, "said once"
    assert session.say(said(3), greedy(9)).token_ids == expected[3]


class FailsWhenLookedAt(Future[None]):
    """A copy that ends badly right after somebody saw that it was not over."""

    def done(self) -> bool:
        over = super().done()
        if not over:
            self.set_exception(MemoryError("no room to copy"))
        return over


def test_a_copy_that_fails_while_it_is_looked_at_has_not_arrived() -> None:
    errand = Errand(FailsWhenLookedAt())
    assert not errand.query()
    with pytest.raises(MemoryError):
        errand.query()
    beside = Carrier()
    beside._late[7] = Errand(FailsWhenLookedAt())
    assert [beside.arrived(), beside.arrived(), beside.arrived()] == [{}, {7: False}, {}]


def test_an_idle_engine_does_not_spin(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(host_memory=8 << 20)
    way = slow_down(engine, FOREVER)
    session = engine.session(id="s")
    talk(session, range(1))
    leave(engine, "s")
    naps: list[float] = []
    monkeypatch.setattr("time.sleep", naps.append)
    for _ in range(3):
        engine.drive()
    assert len(naps) > 3
    finish(way)


def test_an_engine_that_ends_waits_for_its_copies(make: Make) -> None:
    engine = make(host_memory=8 << 20)
    way = slow_down(engine, FOREVER)
    talk(engine.session(id="s"), range(1))
    leave(engine, "s")
    engine.loop.executor.carrier.drain()
    assert all(copy.over for copy in way.copies)


class Queued(SlowWay):
    """As a GPU has it: what is launched later waits for a copy, whoever launches it does not."""

    def order(self, mark: Mark) -> None:
        self.ordered += 1


def test_the_memory_of_a_copy_that_nobody_wants_stays_until_it_is_over() -> None:
    beside, way = Carrier(), Queued(FOREVER)
    beside.way = way
    for number in range(3):
        beside._late[number] = way.carry([])
    beside.forsake({2})
    assert (way.ordered, [copy.over for copy in way.copies]) == (2, [False] * 3)
    way.copies[0].synchronize()
    beside.forsake({2})
    assert beside._forsaken == [way.copies[1]], "what is over is waited for no more"
    assert way.ordered == 2
    beside.drain()
    assert [copy.over for copy in way.copies] == [True] * 3


def test_nothing_to_carry() -> None:
    idle = Carrier()
    idle.start([])
    idle.forsake({})
    assert (idle.came([]), idle.arrived()) == ([], {})
