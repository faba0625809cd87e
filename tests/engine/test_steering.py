"""Steering: a turn cuts the one before it after what was heard, and goes on from there, in one act."""

import pytest

from holdfast.core.errors import ContextExceeded, NothingToKeep, UnknownTurn
from holdfast.engine.engine import Session
from tests.engine.conftest import Make
from tests.engine.tiny import END, greedy


def history(session: Session) -> list[int]:
    found = session._engine.loop.scheduler.registry.find(session.id)
    return found.sequence.tokens.slice(0, found.history)


def computed(session: Session) -> int:
    return session._engine.loop.scheduler.registry.counters.computed_tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("keep", [0, 2, "all"])
def test_a_running_turn_is_cut_and_followed_within_a_step(
    make_any: Make, overlap: bool, keep: int | str
) -> None:
    engine = make_any(chunk_tokens=16, overlap=overlap)
    with engine.session(system="the old stones") as session:
        session.say("cold and deep", greedy(4)).wait()
        first = session.say("the river", greedy(40))
        while len(first._stream.tokens) < 4:
            engine.drive()
        before = computed(session)
        steps = engine.loop.scheduler.registry.ledger.step
        turn = session.say("under old stones", greedy(6), steer=keep)
        assert engine.loop.scheduler.registry.ledger.step - steps <= 1
        said = turn.wait().usage
        assert first.done and first.finish_reason == "abort"
        kept = first.token_ids
        assert len(kept) == keep if isinstance(keep, int) else len(kept) >= 4
        assert session.turns == 3
        whole = history(session)
        # What the cut discards is not history: nothing before it is computed again, on pages.
        if not engine.loop.scheduler.registry.ledger.layout.state:
            assert computed(session) - before <= len(whole) - said.cached_tokens + 4
        tokens = turn.token_ids
        with engine.session() as fresh:
            prompt = whole[: len(whole) - len(tokens)]
            assert fresh.say(prompt, greedy(6)).token_ids == tokens


def test_a_finished_turn_is_cut_too_and_has_its_end_token_once(make: Make) -> None:
    engine = make()
    with engine.session() as session:
        with pytest.raises(UnknownTurn, match="no turn to steer"):
            session.say("under", greedy(2), steer=0)
        first = session.say("the river", greedy(12)).wait()
        turn = session.say("under old stones", greedy(3), steer=2).wait()
        assert session.turns == 2
        ids = history(session)
        start = first._turn.input_end
        assert ids[start : start + 3] == [*first._stream.tokens[:2], END]
        assert ids[-3:] == turn.token_ids
        session.say("today", greedy(3), steer="all").wait()
        assert session.turns == 3


@pytest.mark.parametrize("overlap", [False, True])
def test_a_turn_that_is_being_aborted_is_cut_further_within_a_step(make_any: Make, overlap: bool) -> None:
    """A client cancels an answer, tells what was heard of it, and goes on, before the answer has ended."""
    engine = make_any(chunk_tokens=16, overlap=overlap)
    with engine.session(system="the old stones") as session:
        session.say("cold and deep", greedy(4)).wait()
        first = session.say("the river", greedy(40))
        while len(first._stream.tokens) < 5:
            engine.drive()
        scheduler = engine.loop.scheduler
        found = scheduler.registry.find(session.id)
        assert found.turn is not None
        scheduler.abort(session.id, found.turn.request.turn_id, engine.loop.now(), 4, "interrupt")
        steps = scheduler.registry.ledger.step
        turn = session.say("under old stones", greedy(6), steer=2)
        assert scheduler.registry.ledger.step - steps <= 1
        turn.wait()
        assert session.turns == 3 and first.done
        whole, tokens = history(session), turn.token_ids
        start = first._turn.input_end
        assert whole[start : start + 2] == first._stream.tokens[:2] and len(tokens) == 6
        with engine.session() as fresh:
            assert fresh.say(whole[: len(whole) - 6], greedy(6)).token_ids == tokens


def test_a_steer_that_is_refused_has_cut_nothing(make: Make) -> None:
    engine = make()
    with engine.session() as session:
        first = session.say("the river", greedy(30))
        engine.drive()
        engine.drive()
        with pytest.raises(NothingToKeep):
            session.say("under", greedy(2), steer=29)
        with pytest.raises(ContextExceeded):
            session.say("under", greedy(100_000), steer=0)
        with pytest.raises(ValueError, match="keep must be"):
            session.say("under", greedy(2), steer="none")
        assert len(first.wait().token_ids) == 30
