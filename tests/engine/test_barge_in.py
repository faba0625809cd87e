"""Barge-in, going back and branching on models of every layout: what the next turn computes, in counts."""

from pathlib import Path

import pytest

from holdfast.core.layout import Component
from holdfast.engine.engine import Engine, Session, Turn
from holdfast.engine.options import make_options
from holdfast.engine.start.startup import open_loop
from tests.engine.conftest import Make
from tests.engine.tiny import WORDS, greedy, word


def said(turn: int, count: int = 20) -> list[int]:
    return [word(WORDS[(turn * 3 + place) % len(WORDS)]) for place in range(count)]


def history(engine: Engine, session: Session) -> list[int]:
    tokens = engine.loop.scheduler.registry.find(session.id).sequence.tokens
    return tokens.slice(0, len(tokens))


def run(engine: Engine) -> None:
    while engine.loop.busy:
        engine.drive()


def interrupted(session: Session, turn: int, heard: int, keep: int | str) -> Turn:
    """A turn that is cut in the middle of what it says."""
    spoken = session.say(said(turn), greedy(60))
    while len(spoken._stream.tokens) < heard:
        session._engine.drive()
    session.interrupt(keep=keep)
    assert spoken.finish_reason == "abort"
    return spoken


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_thirty_interruptions_in_a_row_never_compute_the_history(make_any: Make, overlap: bool) -> None:
    """Each turn computes its own tokens, and at most what the turn before it kept."""
    engine = make_any(overlap=overlap)
    anywhere = engine.loop.setup.memory_plan.layout.cuts_anywhere
    session = engine.session()
    session.say(said(0, 300), greedy(20)).wait()
    run(engine)
    known = 320
    kept = 0
    for number in range(30):
        turn = interrupted(session, number, heard=7, keep=(0, 3, 6)[number % 3])
        own = 20 + len(turn._stream.tokens)
        catching_up = 0 if anywhere else 20 + kept
        assert turn.usage.computed_tokens <= own + catching_up, f"interruption {number}"
        assert turn.usage.cached_tokens >= known - catching_up
        kept = (0, 3, 6)[number % 3]
        known += 20 + kept
        assert len(history(engine, session)) == known
    last = session.say(said(7), greedy(5))
    assert last.usage.computed_tokens <= 20 + 5 + (0 if anywhere else 20 + kept)
    assert session.turns == 32


@pytest.mark.parametrize("keep", ["all", "none"])
def test_keeping_all_or_nothing_costs_nothing(make_any: Make, keep: str) -> None:
    """The next turn computes its own tokens, on every layout: nothing of the history, nothing of the turn."""
    engine = make_any()
    session = engine.session()
    session.say(said(0, 200), greedy(20)).wait()
    for number in range(10):
        interrupted(session, number, heard=5, keep=keep)
        run(engine)
        turn = session.say(said(number + 1), greedy(4))
        known = turn.usage.prompt_tokens - 20
        assert turn.usage.cached_tokens == known
        assert turn.usage.computed_tokens <= 20 + 4 + 1, "the late token of the cut turn is no more"


def test_a_long_input_is_not_computed_again(make_any: Make) -> None:
    """An input above the checkpoint length leaves a resume point at its end."""
    engine = make_any()
    session = engine.session()
    session.say(said(0, 50), greedy(5)).wait()
    turn = session.say(said(1, 400), greedy(60))
    while len(turn._stream.tokens) < 9:
        engine.drive()
    session.interrupt(keep=6)
    after = session.say(said(2), greedy(4))
    assert after.usage.computed_tokens <= 20 + 4 + 6
    assert after.usage.prompt_tokens == 55 + 400 + 6 + 20


def test_the_last_finished_turn_is_cut_as_cheaply(make_any: Make) -> None:
    engine = make_any()
    anywhere = engine.loop.setup.memory_plan.layout.cuts_anywhere
    session = engine.session()
    session.say(said(0, 200), greedy(20)).wait()
    for number in range(5):
        session.say(said(number), greedy(10)).wait()
        session.interrupt(keep=4)
        turn = session.say(said(number + 1), greedy(6))
        assert turn.usage.computed_tokens <= 20 + 6 + (0 if anywhere else 20 + 4)
        session.interrupt(keep="none")
    expected = make_any().session()
    expected.say(said(0, 200), greedy(20)).wait()
    assert history(engine, session)[:220] == history(expected._engine, expected)


def test_rewinding_computes_little(make_any: Make) -> None:
    """To the turn before: nothing of the history. Far back: less than there is, thanks to checkpoints."""
    engine = make_any(checkpoints=4)
    session = engine.session()
    for number in range(12):
        session.say(said(number), greedy(10)).wait()
    ends = [30 * number for number in range(13)]
    plain = make_any().session()
    for number in range(11):
        plain.say(said(number), greedy(10)).wait()
    session.rewind(11)
    turn = session.say(said(20), greedy(5))
    assert turn.token_ids == plain.say(said(20), greedy(5)).token_ids
    assert turn.usage.cached_tokens == ends[11] and turn.usage.computed_tokens <= 25
    session.rewind(6)
    turn = session.say(said(21), greedy(5))
    assert turn.usage.prompt_tokens == ends[6] + 20
    anywhere = engine.loop.setup.memory_plan.layout.cuts_anywhere
    assert turn.usage.cached_tokens == ends[6] if anywhere else turn.usage.cached_tokens > 0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_branch_off_a_spilled_session_computes_and_says_the_same(
    make_any: Make, tmp_path: Path, tier: str
) -> None:
    """A fork and a rewind at an older turn, whose checkpoint stays on the device."""
    engine = make_any(host_memory=1 << 24, disk=tmp_path / "memory")
    session, plain = engine.session(), make_any().session()
    for number in range(6):
        for each in (session, plain):
            each.say(said(number), greedy(10)).wait()
    assert session.spill(tier)
    for each in (session, plain):
        each.rewind(5)
    turn = session.say(said(21), greedy(8))
    assert turn.token_ids == plain.say(said(21), greedy(8)).token_ids
    assert turn.usage.cached_tokens == 150 and turn.usage.computed_tokens <= 28
    assert session.spill(tier)
    child, expected = session.fork(at_turn=4), plain.fork(at_turn=4)
    turn = child.say(said(20), greedy(8))
    assert turn.token_ids == expected.say(said(20), greedy(8)).token_ids
    assert turn.usage.cached_tokens == 120 and turn.usage.computed_tokens <= 28
    assert engine.audit() == []


def test_siblings_never_see_each_other(make_any: Make) -> None:
    engine = make_any()
    parent = engine.session()
    parent.say(said(0, 100), greedy(10)).wait()
    children = [parent.fork() for _ in range(6)]
    turns = [child.say(said(number), greedy(8)) for number, child in enumerate(children)]
    for number, turn in enumerate(turns):
        alone = make_any().session()
        alone.say(said(0, 100), greedy(10)).wait()
        assert turn.token_ids == alone.say(said(number), greedy(8)).token_ids
        assert turn.usage.cached_tokens == 110 and turn.usage.computed_tokens <= 28
    parent.close()
    for number, child in enumerate(children):
        assert child.say(said(number), greedy(3)).usage.cached_tokens == 138


@pytest.mark.parametrize("name", ["echo", "echo-window", "echo-hybrid"])
def test_a_hundred_forks_cost_less_than_two_copies(name: str) -> None:
    """Of a session of 32 thousand tokens, from the ledger; what the model says does not matter."""
    length = 32_000
    sizes = {"kv_tokens": 3 * length, "window_tokens": 3 * length, "context_length": 2 * length}
    engine = Engine(open_loop(name, make_options(chunk_tokens=8192, step_tokens=8192, **sizes)))
    session = engine.session()
    session.say([7] * (length - 3), greedy(3)).wait()
    run(engine)
    ledger, unit_bytes = engine.loop.scheduler.registry.ledger, engine.loop.setup.memory_plan.unit_bytes
    components = ledger.layout.components

    def taken() -> dict[Component, int]:
        pools = {component: ledger.pool(component) for component in components}
        return {component: pool.size - len(pool.free) for component, pool in pools.items()}

    def weight(units: dict[Component, int]) -> int:
        return sum(unit_bytes[component] * count for component, count in units.items())

    alone = taken()
    children = [session.fork() for _ in range(100)]
    engine.drive()
    forked = taken()
    for number, child in enumerate(children):
        turn = child.say([number + 1] * 5, greedy(3))
        assert turn.usage.cached_tokens == length and turn.usage.computed_tokens <= 8
    run(engine)
    talked = taken()
    for units in (forked, talked):
        if Component.FULL in components:
            assert alone[Component.FULL] == length // 16
            assert units[Component.FULL] - alone[Component.FULL] <= 100, "at most one page each"
            assert weight(units) < 2 * weight(alone)
    assert forked.get(Component.STATE, 0) - alone.get(Component.STATE, 0) <= 100, "one slot each"
    engine.close()
    assert engine.audit() == []
