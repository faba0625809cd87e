"""Turns with `max_tokens` 0 on real models: the input is computed and kept, and nothing is said."""

from pathlib import Path

import pytest

from holdfast.engine.engine import Session
from holdfast.engine.sampling import Sampling, SamplingError
from tests.engine.conftest import Make
from tests.engine.tiny import greedy, tiny_engine, word

PROMPT = [word("the"), word("river"), word("runs"), word("cold"), word("and")] * 9
MORE = [word("deep"), word("under"), word("old")]
NOTHING = Sampling(max_tokens=0)


def known(session: Session) -> int:
    return session._engine.known_tokens(session.id)


def computed(session: Session) -> int:
    return session._engine.loop.scheduler.registry.find(session.id).sequence.computed


def test_a_turn_after_it_says_what_it_says_after_the_same_tokens_at_once(make_any: Make) -> None:
    engine = make_any(chunk_tokens=16)
    with engine.session() as whole:
        expected = whole.say([*PROMPT, *MORE], greedy(8)).wait()
        with engine.session() as split:
            mute = split.say(PROMPT, NOTHING).wait()
            assert (mute.text, mute.token_ids, mute.finish_reason) == ("", [], "length")
            assert computed(split) == known(split) == len(PROMPT)
            turn = split.say(MORE, greedy(8)).wait()
            assert turn.token_ids == expected.token_ids
            assert turn.usage.cached_tokens == len(PROMPT)
            assert split.turns == 2


def test_the_log_probabilities_of_its_input_are_those_of_any_turn(make_any: Make) -> None:
    engine = make_any(chunk_tokens=16)
    asked = engine.generate([PROMPT], greedy(1, prompt_logprobs=2))[0]
    mute = engine.generate([PROMPT], Sampling(max_tokens=0, prompt_logprobs=2))[0]
    assert len(mute.prompt_logprobs) == len(PROMPT) - 1
    assert [each.token for each in mute.prompt_logprobs] == PROMPT[1:]
    for one, other in zip(mute.prompt_logprobs, asked.prompt_logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert mute.usage.completion_tokens == 0


def test_a_prompt_that_was_computed_alone_is_found_by_a_request(make_any: Make) -> None:
    engine = make_any()
    engine.generate([PROMPT], NOTHING)
    turn = engine.generate([[*PROMPT, *MORE]], greedy(3))[0]
    page_size = engine.loop.scheduler.registry.ledger.layout.page_size
    assert turn.usage.cached_tokens >= (len(PROMPT) - 1) // page_size * page_size


def test_it_is_spilled_forked_and_rewound_like_any_turn(make_any: Make) -> None:
    engine = make_any(host_memory=8 << 20)
    with engine.session() as session:
        session.say(PROMPT, NOTHING).wait()
        assert session.spill("host")
        with session.fork() as child:
            forked = child.say(MORE, greedy(6)).wait().token_ids
        assert session.say(MORE, greedy(6)).wait().token_ids == forked
        session.rewind(1)
        session.say(MORE, NOTHING).wait()
        session.interrupt(keep="none")
        assert session.turns == 1
        assert session.say(MORE, greedy(6)).wait().token_ids == forked


def test_it_is_rolled_back_when_it_is_aborted(make_any: Make) -> None:
    engine = make_any(chunk_tokens=16)
    with engine.session() as session:
        expected = session.say(MORE, greedy(4)).wait().token_ids
        turn = session.say(PROMPT, NOTHING)
        engine.drive()
        assert not turn.done
        session.interrupt(keep="none")
        assert known(session) == len(MORE) + len(expected)
        assert session.turns == 1


def test_it_survives_a_restart(directories: dict[str, Path], tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    with tiny_engine(directories["bamba"], journal=journal) as engine:
        session = engine.session()
        session.say(PROMPT, NOTHING).wait()
        session.say(MORE, NOTHING).wait()
        with session.fork() as child:
            expected = child.say(MORE, greedy(6)).wait().token_ids
    with tiny_engine(directories["bamba"], journal=journal) as engine:
        again = engine.resume(session.id)
        assert (again.turns, known(again)) == (2, len(PROMPT) + len(MORE))
        assert again.say(MORE, greedy(6)).wait().token_ids == expected


def test_less_than_nothing_is_refused_and_so_is_a_minimum_above_it() -> None:
    with pytest.raises(SamplingError, match="max_tokens"):
        Sampling(max_tokens=-1)
    with pytest.raises(SamplingError, match="min_tokens"):
        Sampling(max_tokens=0, min_tokens=1)
