"""Constrained turns in the simulated world: what a matcher forces, and that every slip is found."""

import pytest

from holdfast.core.layout import LAYOUT_NAMES, Tier
from holdfast.core.plan import RowResult
from holdfast.core.session import Life, Session
from holdfast.core.settler import Settler
from holdfast.core.tiers import Parcel
from holdfast.sim.constraint import RUN_MAX, Constraints, Matcher, unconstrained
from holdfast.sim.content import content_of, next_token
from holdfast.sim.device import SimDevice, WrongContent
from holdfast.sim.found import Found
from holdfast.sim.reference import Conversation, Mismatch
from holdfast.sim.world import Setup, World

VOCABULARY = 50


def talk(matcher: Matcher, count: int) -> list[int]:
    """The first tokens of a turn whose model always says 0."""
    said = []
    for _ in range(count):
        said.append(matcher.mask(0))
        matcher.accept(said[-1:])
    return said


def test_a_run_is_what_comes_whether_it_is_taken_at_once_or_token_by_token() -> None:
    one, other = Matcher(VOCABULARY, 3), Matcher(VOCABULARY, 3)
    runs = []
    said = talk(one, 200)
    for place in range(200):
        if other.accepted == place:
            runs.append(other.forced())
            assert said[place : place + len(runs[-1])] == runs[-1][: 200 - place]
            other.accept(runs[-1] or said[place : place + 1])
    lengths = {len(run) for run in runs}
    assert 0 in lengths and max(lengths) <= RUN_MAX and len(lengths) > 4


def test_a_token_that_is_lost_or_taken_twice_changes_what_follows() -> None:
    right, lost, doubled = (Matcher(VOCABULARY, 5) for _ in range(3))
    said = talk(right, 20)
    lost.accept(said[:9] + said[10:])
    doubled.accept([*said, said[-1]])
    assert (right.accepted, lost.accepted, doubled.accepted) == (20, 19, 21)
    following = talk(right, 30)
    assert talk(lost, 30) != following and talk(doubled, 30) != following


def test_a_copy_goes_its_own_way() -> None:
    matcher = Matcher(VOCABULARY, 1, takes_runs=False)
    talk(matcher, 7)
    copy = matcher.copy()
    assert not copy.takes_runs
    assert talk(copy, 40) == talk(matcher.copy(), 40)
    assert (matcher.accepted, copy.accepted) == (7, 47)


def test_some_worlds_constrain_no_turn_some_half_of_them_some_all() -> None:
    shares = {Constraints(seed, VOCABULARY).share for seed in range(30)}
    assert shares == {0.0, 0.5, 1.0}
    worlds = [Constraints(seed, VOCABULARY) for seed in range(30)]
    half = next(world for world in worlds if world.share == 0.5)
    matchers = [half.matcher(f"t{number}") for number in range(300)]
    constrained = [matcher for matcher in matchers if matcher is not None]
    assert 100 < len(constrained) < 200
    assert {matcher.takes_runs for matcher in constrained} == {True, False}
    again = [half.matcher(f"t{number}") for number in range(300)]
    assert [each and talk(each, 9) for each in again] == [each and talk(each, 9) for each in matchers]
    assert unconstrained("t1") is None


def test_a_client_knows_what_a_constrained_turn_must_say() -> None:
    conversation = Conversation("s1", VOCABULARY)
    conversation.begin("t1", (1, 2), Matcher(VOCABULARY, 4))
    first = Matcher(VOCABULARY, 4).mask(next_token(content_of([1, 2]), VOCABULARY))
    conversation.hear([first])
    plain = next_token(content_of([1, 2, first]), VOCABULARY)
    with pytest.raises(Mismatch, match="token 3"):
        conversation.hear([plain])


def constrained_world(layout: str, overlap: bool, seed: int = 3) -> World:
    """A world in which every turn is constrained."""
    world = World(Setup(seed, layout, 3, "mix", 0.0))
    world.constraints.share = 1.0
    world.overlap = overlap
    return world


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("overlap", [False, True])
def test_runs_are_taken_and_samples_are_withdrawn(
    layout: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[int] = []
    withdrawn: list[int] = []
    original, withdraw = SimDevice._force, Settler._withdraw_samples

    def counted(self: SimDevice, *arguments: object) -> RowResult:
        out = original(self, *arguments)
        forced.append(out.forced)
        return out

    def noted(self: Settler) -> None:
        withdrawn.append(len(self.ahead))
        withdraw(self)

    monkeypatch.setattr(SimDevice, "_force", counted)
    monkeypatch.setattr(Settler, "_withdraw_samples", noted)
    for seed in range(4):
        world = constrained_world(layout, overlap, seed)
        world.run(150)
        world.close_down()
    assert sum(forced) > 50 and max(forced) > 4
    assert bool(withdrawn) is overlap


def test_a_matcher_that_has_missed_a_token_is_found() -> None:
    world = constrained_world("dense", overlap=False)
    matchers = world.device._matchers

    def spoilt() -> bool:
        for session in world.scheduler.registry.running:
            _, matcher = matchers.get(session.number, ("", None))
            if matcher is not None and session.turn is not None and session.turn.generated > 2:
                matcher.accepted -= 1
                return True
        return False

    while not spoilt():
        world.run(1)
    with pytest.raises(Found, match="a matcher has taken"):
        world.run(30)


def test_matchers_that_are_lost_are_made_again() -> None:
    world, other = (constrained_world("hybrid", overlap=True) for _ in range(2))
    world.run(200)
    for _ in range(200):
        other.run(1)
        other.device._matchers.clear()
    assert world.state_hash == other.state_hash


def test_a_row_that_samples_what_is_known_is_told() -> None:
    world = constrained_world("dense", overlap=False)
    registry = world.scheduler.registry
    while not any(session.turn is not None and session.turn.generated > 2 for session in registry.running):
        world.run(1)
    plan = world.scheduler.plan(64, world.now)
    row = next(row for row in plan.rows if row.sample and row.turn.generated > 2)
    row.start -= 1
    tokens = registry.sessions[row.turn.session_id].sequence.tokens
    with pytest.raises(WrongContent, match="a row samples token"):
        world.device._matcher(row, tokens.slice(0, len(tokens)))


def test_a_seal_that_leaves_tokens_is_found() -> None:
    world = constrained_world("dense", overlap=True)
    sessions = world.scheduler.registry.sessions

    def sealed() -> list[Session]:
        idle = (session for session in sessions.values() if session.life is Life.IDLE)
        return [session for session in idle if session.sequence.computed == session.sequence.known > 0]

    while not sealed():
        world.run(1)
    session = sealed()[0]
    world.lists.check_seal(session)
    session.sequence.tokens.append(1)
    with pytest.raises(Found, match="1 tokens to be computed"):
        world.lists.check_seal(session)


# --- files beside the host ---


def test_memory_with_a_file_leaves_the_host_for_the_disk_without_a_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sunk: list[Parcel] = []
    for seed in range(60):
        world = World(Setup(seed, "hybrid", 3, "mix", 0.0))
        if not (world.ledger.has(Tier.HOST) and world.ledger.has(Tier.DISK)):
            continue
        fill = world.files.fill

        def noted(fill=fill, files=world.files) -> None:
            sunk.extend(parcel for parcel, _ in files._copies if parcel.tier is Tier.DISK)
            fill()

        monkeypatch.setattr(world.files, "fill", noted)
        world.run(200)
        world.close_down()
    assert sunk
