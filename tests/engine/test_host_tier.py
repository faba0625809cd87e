"""Copies between the device and the host: only their own turn waits for them, and no unit is mistaken."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch

from holdfast.core.layout import Component, Tier
from holdfast.core.plan import TierMove
from holdfast.engine.engine import Engine, Session
from holdfast.engine.tiers import host as host_tier
from holdfast.engine.tiers.host import CopyEvent, HostTier, StorageCopy, ThreadCopy
from tests.engine.conftest import Make
from tests.engine.direct import direct
from tests.engine.slow_copies import Queued, SlowCopier, slow_down
from tests.engine.tiny import WORDS, greedy, word

FOREVER = 1 << 30


def said(turn: int, count: int = 21) -> list[int]:
    return [word(WORDS[(turn * 3 + place) % len(WORDS)]) for place in range(count)]


def talk(session: Session, turns: range) -> list[list[int]]:
    return [session.say(said(turn), greedy(9)).token_ids for turn in turns]


def conversation(make: Make) -> list[list[int]]:
    """Six turns of a session that nothing happens to."""
    return talk(make().session(), range(6))


def state(engine: Engine, name: str) -> str:
    return engine.loop.scheduler.registry.find(name).state


def run(engine: Engine) -> None:
    while engine.loop.busy:
        engine.drive()


def leave(engine: Engine, name: str) -> None:
    """A session sets out for the host."""
    while engine.loop.scheduler.registry.seals or engine.loop.scheduler.registry.flights:
        engine.drive()
    assert direct(engine.loop, "spill", name, Tier.HOST)
    engine.drive()
    assert state(engine, name) == "SPILLING"


def finish(copier: SlowCopier) -> None:
    for copy in copier.copies:
        copy.synchronize()


def checked(session: Session, turn: int, expected: list[int]) -> None:
    """A turn says what it should, and computes nothing of the history."""
    known = session._engine.known_tokens(session.id)
    answer = session.say(said(turn), greedy(9))
    assert answer.token_ids == expected
    assert answer.usage.cached_tokens == known


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def slow(request: pytest.FixtureRequest, make_any: Make) -> tuple[Engine, SlowCopier, list[list[int]]]:
    """An engine whose copies never end by themselves, and what a session of it should say."""
    expected = make_any.once(conversation)[:6]
    engine = make_any(overlap=request.param, host_memory=8 << 20)
    return engine, slow_down(engine, FOREVER), expected


def test_others_go_on_while_a_session_leaves_and_returns(
    slow: tuple[Engine, SlowCopier, list[list[int]]],
) -> None:
    engine, copier, expected = slow
    session, other = engine.session(id="s"), engine.session(id="other")
    assert talk(session, range(2)) == expected[:2]
    leave(engine, "s")
    assert talk(other, range(2)) == expected[:2]
    assert state(engine, "s") == "SPILLING", "two turns later it is still on its way"
    finish(copier)
    run(engine)
    assert state(engine, "s") == "SPILLED"
    turn = session.say(said(2), greedy(9))
    engine.drive()
    assert state(engine, "s") == "RESTORING"
    assert talk(other, range(2, 4)) == expected[2:4]
    assert not turn.done and state(engine, "s") == "RESTORING"
    finish(copier)
    assert turn.token_ids == expected[2]
    assert turn.usage.computed_tokens <= 21 + 9
    assert copier.fenced == 0, "nothing was waited for"


def test_a_turn_calls_a_leaving_session_back(slow: tuple[Engine, SlowCopier, list[list[int]]]) -> None:
    engine, copier, expected = slow
    session = engine.session(id="s")
    assert talk(session, range(2)) == expected[:2]
    leave(engine, "s")
    checked(session, 2, expected[2])
    assert copier.fenced == 1, "its copy ends before anything else is launched"
    leave(engine, "s")
    finish(copier)
    run(engine)
    assert state(engine, "s") == "SPILLED"
    copier.patience = 0
    checked(session, 3, expected[3])


def test_the_host_memory_of_an_abandoned_copy_is_given_to_another(
    slow: tuple[Engine, SlowCopier, list[list[int]]],
) -> None:
    """Its units go to the next session that leaves, which must not read what the first still writes."""
    engine, copier, expected = slow
    first, second = engine.session(id="first"), engine.session(id="second")
    assert talk(first, range(2)) == expected[:2]
    assert second.say(said(4), greedy(9)).token_ids
    follow = engine.session(id="third").say(said(4), greedy(9)).token_ids
    leave(engine, "first")
    abandoned = {tuple(each.targets) for each in copier.copies[0].copies}
    checked(first, 2, expected[2])
    leave(engine, "second")
    taken = {tuple(each.targets) for each in copier.copies[-1].copies}
    assert {unit for units in abandoned for unit in units} & {unit for units in taken for unit in units}
    finish(copier)
    run(engine)
    assert state(engine, "second") == "SPILLED"
    copier.patience = 0
    third = engine.resume("third")
    assert second.say(said(5), greedy(9)).token_ids == third.say(said(5), greedy(9)).token_ids
    assert follow


def test_a_session_is_closed_while_it_returns(slow: tuple[Engine, SlowCopier, list[list[int]]]) -> None:
    """The units that it was to have are somebody else's before its copy is over."""
    engine, copier, expected = slow
    session = engine.session(id="s")
    assert talk(session, range(3)) == expected[:3]
    leave(engine, "s")
    finish(copier)
    run(engine)
    assert direct(engine.loop, "restore", "s")
    engine.drive()
    assert state(engine, "s") == "RESTORING"
    session.close()
    assert talk(engine.session(id="other"), range(4)) == expected[:4]
    assert copier.fenced == 1


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_step_that_fails_abandons_its_copies(
    make_any: Make, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_any.once(conversation)[:4]
    engine = make_any(overlap=overlap, host_memory=8 << 20)
    copier = slow_down(engine, FOREVER)
    session, other = engine.session(id="s"), engine.session(id="other")
    assert talk(session, range(2)) == expected[:2]
    assert talk(other, range(2)) == expected[:2]
    run(engine)
    original = engine.loop.executor._compute

    def fails(*arguments: object) -> None:
        monkeypatch.setattr(engine.loop.executor, "_compute", original)
        raise RuntimeError("no device")

    turn = other.say(said(2), greedy(9))
    assert direct(engine.loop, "spill", "s", Tier.HOST)
    monkeypatch.setattr(engine.loop.executor, "_compute", fails)
    engine.drive()
    for _ in range(3):
        engine.drive()
    assert state(engine, "s") != "SPILLING"
    assert copier.fenced == 1
    checked(session, 2, expected[2])
    assert turn.token_ids in ([], expected[2])


def test_a_copy_that_cannot_be_waited_for_fails_the_step_alone(
    slow: tuple[Engine, SlowCopier, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is launched past a copy that still writes: it is ordered again with the next step."""
    engine, copier, expected = slow
    session = engine.session(id="s")
    assert talk(session, range(2)) == expected[:2]
    leave(engine, "s")
    original = copier.fence

    def fails(event: CopyEvent) -> None:
        monkeypatch.setattr(copier, "fence", original)
        raise RuntimeError("no device")

    monkeypatch.setattr(copier, "fence", fails)
    assert session.say(said(2), greedy(9)).token_ids == expected[2]
    assert copier.fenced == 1
    assert copier.copies[0].over


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_thread_copies_large_moves(make_any: Make, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make_any.once(conversation)[:6]
    engine = make_any(overlap=overlap, host_memory=8 << 20)
    monkeypatch.setattr(host_tier, "INLINE_BYTES_MAX", 0)
    begin, threads = threading.Event(), set[str]()
    original = host_tier.copy_units

    def held_up(copies: Sequence[StorageCopy]) -> None:
        threads.add(threading.current_thread().name)
        assert begin.wait(60)
        original(copies)

    monkeypatch.setattr(host_tier, "copy_units", held_up)
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


def test_adjacent_units_are_copied_at_once() -> None:
    runs = host_tier._runs([5, 6, 7, 1, 2, 9], [0, 1, 2, 3, 8, 9])
    assert list(runs) == [(5, 0, 3), (1, 3, 1), (2, 8, 1), (9, 9, 1)]
    source, target = torch.arange(40.0).view(10, 4), torch.zeros(10, 4)
    host_tier.copy_units([StorageCopy(source, [5, 6, 1, 9], target, [2, 3, 4, 0])])
    assert target[:, 0].tolist() == [36.0, 0, 20.0, 24.0, 4.0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("direction", ["there", "back"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_copy_that_fails_costs_the_session_its_memory_at_most(
    make_any: Make,
    overlap: bool,
    direction: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = make_any.once(conversation)[:4]
    engine = make_any(overlap=overlap, host_memory=8 << 20)
    monkeypatch.setattr(host_tier, "INLINE_BYTES_MAX", 0)
    original = host_tier.copy_units

    def fails(copies: Sequence[StorageCopy]) -> None:
        raise MemoryError("no room to copy")

    session = engine.session(id="s")
    assert talk(session, range(2)) == expected[:2]
    run(engine)
    if direction == "there":
        monkeypatch.setattr(host_tier, "copy_units", fails)
    assert direct(engine.loop, "spill", "s", Tier.HOST)
    run(engine)
    assert state(engine, "s") == ("IDLE" if direction == "there" else "SPILLED")
    monkeypatch.setattr(host_tier, "copy_units", fails)
    assert session.say(said(2), greedy(9)).token_ids == expected[2]
    monkeypatch.setattr(host_tier, "copy_units", original)
    assert caplog.text.count("a copy between the device and the host failed") == 1, "logged once"
    assert session.say(said(3), greedy(9)).token_ids == expected[3]


class FailsWhenLookedAt(Future[None]):
    """A copy that ends badly right after somebody saw that it was not over."""

    def done(self) -> bool:
        over = super().done()
        if not over:
            self.set_exception(MemoryError("no room to copy"))
        return over


def test_a_copy_that_fails_while_it_is_looked_at_has_not_arrived() -> None:
    errand = ThreadCopy(FailsWhenLookedAt())
    assert not errand.query()
    with pytest.raises(MemoryError):
        errand.query()
    tier = HostTier()
    tier._running[7] = ThreadCopy(FailsWhenLookedAt())
    assert [tier.take_finished(), tier.take_finished(), tier.take_finished()] == [{}, {7: False}, {}]


def test_an_idle_engine_does_not_spin(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(host_memory=8 << 20)
    copier = slow_down(engine, FOREVER)
    session = engine.session(id="s")
    talk(session, range(1))
    leave(engine, "s")
    naps: list[float] = []
    monkeypatch.setattr("time.sleep", naps.append)
    for _ in range(3):
        engine.drive()
    assert len(naps) > 3
    finish(copier)


def test_an_engine_that_ends_waits_for_its_copies(make: Make) -> None:
    engine = make(host_memory=8 << 20)
    copier = slow_down(engine, FOREVER)
    talk(engine.session(id="s"), range(1))
    leave(engine, "s")
    engine.loop.executor.host_tier.drain()
    assert all(copy.over for copy in copier.copies)


def test_the_memory_of_an_abandoned_copy_stays_until_it_is_over() -> None:
    tier, copier = HostTier(), Queued(FOREVER)
    tier.copier = copier
    for number in range(3):
        tier._running[number] = copier.copy([])
    tier.fence_abandoned({2})
    assert (copier.fenced, [copy.over for copy in copier.copies]) == (2, [False] * 3)
    copier.copies[0].synchronize()
    tier.fence_abandoned({2})
    assert tier._abandoned == [copier.copies[1]], "what is over is waited for no more"
    assert copier.fenced == 2
    tier.drain()
    assert [copy.over for copy in copier.copies] == [True] * 3


def test_a_rank_keeps_a_fenced_copy_until_it_is_over() -> None:
    """The copies of a GPU go on behind a fence; main memory is not read before they are over."""
    tier, copier = HostTier(), Queued(FOREVER)
    tier.copier = copier
    for number in range(3):
        tier._started[number] = copier.copy([])
    tier.follow_fence([0, 1])
    copier.copies[0].synchronize()
    tier.follow_fence([])
    assert tier._abandoned == [copier.copies[1]], "nothing is left of a copy that is over"
    tier.complete()
    assert [copy.over for copy in copier.copies] == [True, True, False], "nobody has fenced the last one"
    tier.follow_fence([2])
    assert tier._abandoned == [copier.copies[2]]


def test_other_ranks_fence_a_move_that_fails_to_begin(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have been told of all moves of the plan."""
    engine = make(host_memory=8 << 20)
    tier = engine.loop.executor.host_tier
    told: list[tuple[str, list[int]]] = []

    class Told:
        def move(self, moves: Sequence[TierMove]) -> None:
            told.append(("move", sorted({move.number for move in moves})))

        def fence(self, numbers: Sequence[int]) -> None:
            told.append(("fence", list(numbers)))

    begun: list[CopyEvent] = []

    def fails(copies: Sequence[StorageCopy]) -> CopyEvent:
        if begun:
            raise MemoryError("no pinned memory")
        begun.append(ThreadCopy(None))
        return begun[0]

    monkeypatch.setattr(tier, "_lead", Told())
    monkeypatch.setattr(tier.copier, "copy", fails)
    moves = [TierMove(number, Component.FULL, Tier.DEVICE, [0], Tier.HOST, [number]) for number in range(3)]
    with pytest.raises(MemoryError):
        tier.start(moves)
    assert told == [("move", [0, 1, 2]), ("fence", [1, 2])]
    tier.fence_abandoned(())
    assert told[2:] == [("fence", [0])]


def test_no_moves() -> None:
    idle = HostTier()
    idle.start([])
    idle.fence_abandoned({})
    assert (idle.settle([]), idle.take_finished()) == ([], {})


def test_leaving_again_copies_only_what_is_new(make_any: Make) -> None:
    expected = talk(make_any().session(), range(7))
    engine = make_any(host_memory=8 << 20)
    tier = engine.loop.executor.host_tier
    session = engine.session(id="s")
    assert talk(session, range(5)) == expected[:5]
    assert session.spill()
    whole = tier.bytes_copied[Tier.HOST]
    assert tier.bytes_copied[Tier.DEVICE] == 0
    checked(session, 5, expected[5])
    assert tier.bytes_copied[Tier.DEVICE] == whole, "all of it came back"
    assert session.spill()
    again = tier.bytes_copied[Tier.HOST] - whole
    # A window that has slid past its copy, and a state, are copied whole.
    assert 0 < again < whole if engine.loop.scheduler.registry.ledger.layout.full else again <= whole
    checked(session, 6, expected[6])


def test_a_move_is_one_copy_a_tensor_whatever_its_pages_and_layers(make_any: Make) -> None:
    engine = make_any(host_memory=8 << 20)
    copier = slow_down(engine, 0)
    session = engine.session(id="s")
    tensors = sum(len(engine.loop.executor.memory.storage(name)) for name in ("full", "window", "state"))
    for turns in (range(1), range(1, 5)):
        talk(session, turns)
        assert session.spill()
        assert len(copier.copies[-1].copies) == tensors
