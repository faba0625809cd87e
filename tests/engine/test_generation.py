"""Sampling through the whole engine: seeds, log-probabilities, choices, penalties, bias, limits and stops."""

import math
from types import MethodType

import pytest
import torch

from holdfast.engine.engine import Engine
from holdfast.engine.sampling import Sampling, SamplingError
from holdfast.engine.step.prompt_logprobs import PROMPT_ROWS
from holdfast.models.model import Model
from tests.engine.conftest import Make
from tests.engine.tiny import END, VOCABULARY, byte_tokens, greedy, tokenizer, word
from tests.models.paged import PagedRunner, Sequence

PROMPT = [word("the"), word("river"), *byte_tokens(" is"), word("cold")]
OTHERS = [[word("old")] * 5, [word("stones")] * 33, [word("runs"), word("deep")]]


def logprobs_of(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """The model's own log-probabilities of what follows each token, computed at once."""
    return PagedRunner(engine.loop.setup.model, 16).run([(Sequence(), tokens)])[0].log_softmax(dim=-1)


def close(found: list[float], expected: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(found), expected, atol=2e-4)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_seed_gives_the_same_tokens_in_any_company(make: Make, overlap: bool) -> None:
    sampling = Sampling(max_tokens=30, seed=11, temperature=1.2, top_p=0.95, top_k=200, ignore_eos=True)
    alone = make().generate([PROMPT], sampling)[0].token_ids
    engine = make(overlap=overlap, chunk_tokens=4)
    crowd = [
        engine.session().say(other, Sampling(max_tokens=40, seed=5, ignore_eos=True)) for other in OTHERS
    ]
    assert engine.generate([PROMPT], sampling)[0].token_ids == alone
    assert all(turn.finish_reason == "length" for turn in crowd)
    reseeded = Sampling(max_tokens=30, seed=12, temperature=1.2, ignore_eos=True)
    assert engine.generate([PROMPT], reseeded)[0].token_ids != alone


def test_without_a_seed_two_answers_differ(engine: Engine) -> None:
    first, second = engine.generate([PROMPT, PROMPT], Sampling(max_tokens=20, ignore_eos=True))
    assert first.token_ids != second.token_ids


def test_log_probabilities_of_what_is_said(engine: Engine) -> None:
    turns = [engine.session().say(PROMPT, greedy(10, logprobs=top)) for top in (0, 3)]
    silent = engine.session().say(OTHERS[0], greedy(10))
    tokens = turns[1].token_ids
    expected = logprobs_of(engine, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    for turn, top in zip(turns, (0, 3), strict=True):
        assert [each.token for each in turn.logprobs] == tokens
        assert close(
            [each.logprob for each in turn.logprobs], expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        )
        assert all(len(each.top) == top for each in turn.logprobs)
    for place, each in enumerate(turns[1].logprobs):
        assert close([value for _, value in each.top], expected[place].topk(3).values)
        assert each.top[0][0] == tokens[place]
    assert silent.wait().logprobs == []


@pytest.mark.parametrize("chunk", [2, 512])
def test_log_probabilities_of_a_prompt_are_computed_not_taken_from_the_tree(make: Make, chunk: int) -> None:
    engine = make(chunk_tokens=chunk, page_size=1)
    prompt = PROMPT * 4
    engine.generate([prompt], greedy(3))
    (shared,) = engine.generate([prompt], greedy(3))
    assert shared.usage.cached_tokens > 0
    assert shared.prompt_logprobs == []
    (turn,) = engine.generate([prompt], greedy(3, prompt_logprobs=2))
    assert turn.usage.cached_tokens == 0
    expected = logprobs_of(engine, prompt)
    assert [each.token for each in turn.prompt_logprobs] == prompt[1:]
    following = torch.tensor(prompt[1:])[:, None]
    assert close([each.logprob for each in turn.prompt_logprobs], expected[:-1].gather(1, following)[:, 0])
    assert close([each.top[1][1] for each in turn.prompt_logprobs], expected[:-1].topk(2).values[:, 1])


def test_log_probabilities_of_a_long_chunk_are_computed_some_at_a_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of all of it may be more than a GPU has room for."""
    engine, prompt = make(chunk_tokens=512), PROMPT * 70
    expected = logprobs_of(engine, prompt)
    rows: list[int] = []

    def logits(model: Model, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return Model.logits(model, hidden)

    monkeypatch.setattr(engine.loop.setup.model, "logits", MethodType(logits, engine.loop.setup.model))
    (turn,) = engine.generate([prompt], greedy(3, prompt_logprobs=2))
    assert sum(rows) >= len(prompt) > 3 * PROMPT_ROWS
    assert max(rows) == PROMPT_ROWS
    following = torch.tensor(prompt[1:])[:, None]
    assert close([each.logprob for each in turn.prompt_logprobs], expected[:-1].gather(1, following)[:, 0])


def test_log_probabilities_of_a_later_turn_are_of_its_own_input(engine: Engine) -> None:
    session = engine.session()
    said = session.say(PROMPT, greedy(4)).token_ids
    turn = session.say(OTHERS[2] * 3, greedy(2, prompt_logprobs=0))
    whole = PROMPT + said + OTHERS[2] * 3
    expected = logprobs_of(engine, whole)
    begin = len(PROMPT) + len(said)
    following = torch.tensor(whole[begin + 1 :])[:, None]
    assert [each.token for each in turn.prompt_logprobs] == whole[begin + 1 :]
    assert close(
        [each.logprob for each in turn.prompt_logprobs], expected[begin:-1].gather(1, following)[:, 0]
    )
    assert turn.usage.cached_tokens == begin


def test_several_choices_compute_their_prompt_once(make: Make) -> None:
    engine = make()
    prompt = PROMPT * 8
    turns = engine.generate([prompt], Sampling(n=4, max_tokens=12, seed=3, ignore_eos=True))
    assert len({tuple(turn.token_ids) for turn in turns}) == 4
    alone = make().generate([prompt], Sampling(max_tokens=12, seed=3, ignore_eos=True))[0]
    assert turns[0].token_ids == alone.token_ids
    whole_pages = (len(prompt) - 1) // 16 * 16
    assert [turn.usage.cached_tokens for turn in turns] == [0, whole_pages, whole_pages, whole_pages]


def test_a_bias_forces_and_forbids(engine: Engine) -> None:
    forced = engine.generate([PROMPT], greedy(6, logit_bias={word("deep"): 100.0}))[0]
    assert forced.token_ids == [word("deep")] * 6
    plain = engine.generate([PROMPT], greedy(6))[0].token_ids
    banned = engine.generate([PROMPT], greedy(6, logit_bias={plain[0]: -100.0}))[0].token_ids
    assert plain[0] not in banned


def test_penalties_keep_tokens_from_coming_back(engine: Engine) -> None:
    bias = {word("deep"): 4.0, word("old"): 3.5, word("cold"): 3.0}
    plain = engine.generate([PROMPT], greedy(12, logit_bias=bias))[0].token_ids
    penalised = engine.generate(
        [PROMPT], greedy(12, logit_bias=bias, frequency_penalty=2.0, presence_penalty=2.0)
    )
    assert len(set(penalised[0].token_ids)) > len(set(plain))
    repeated = engine.generate([PROMPT], greedy(12, repetition_penalty=100.0))[0].token_ids
    assert len(set(repeated)) == 12
    assert not set(repeated) & set(PROMPT)


def test_penalties_count_once_what_a_lost_step_sampled(make: Make) -> None:
    """The same answer whether or not a step had to be repeated."""
    sampling = greedy(20, frequency_penalty=1.5)
    expected = make().generate([PROMPT], sampling)[0].token_ids
    engine = make()
    finish, calls = engine.loop.executor.finish, 0

    def failing(flight: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise RuntimeError("lost")
        return finish(flight)  # type: ignore[arg-type]

    engine.loop.executor.finish = failing  # type: ignore[method-assign,assignment]
    assert engine.generate([PROMPT], sampling)[0].token_ids == expected


def test_the_end_token_ends_a_turn_but_not_too_early(engine: Engine) -> None:
    always = {END: 100.0}
    ended = engine.generate([PROMPT], Sampling(temperature=0.0, logit_bias=always))[0]
    assert (ended.token_ids, ended.finish_reason, ended.text) == ([END], "stop", "")
    later = engine.generate([PROMPT], Sampling(temperature=0.0, logit_bias=always, min_tokens=5))[0]
    assert len(later.token_ids) == 6
    assert (later.token_ids[-1], later.finish_reason) == (END, "stop")
    assert END not in later.token_ids[:-1]
    ignored = engine.generate([PROMPT], greedy(7, logit_bias=always))[0]
    assert (ignored.token_ids, ignored.finish_reason) == ([END] * 7, "length")


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_stops_end_a_turn_where_they_are_said(make: Make, overlap: bool) -> None:
    engine = make(overlap=overlap)
    plain = engine.generate([PROMPT], greedy(30))[0]
    token = plain.token_ids[10]
    first = plain.token_ids.index(token)
    by_id = engine.generate([PROMPT], greedy(30, stop_token_ids=[token]))[0]
    assert (by_id.token_ids, by_id.finish_reason) == (plain.token_ids[: first + 1], "stop")
    forced = greedy(30, logit_bias={word("deep"): 100.0}, stop=["deep deep d"])
    by_text = engine.generate([PROMPT], forced)[0]
    assert (by_text.token_ids, by_text.text, by_text.finish_reason) == ([word("deep")] * 3, " ", "stop")


def test_without_a_limit_a_turn_fills_the_context(make: Make) -> None:
    engine = make(context_length=64)
    (turn,) = engine.generate([PROMPT], Sampling(temperature=0.0, ignore_eos=True))
    assert (turn.finish_reason, len(turn.token_ids)) == ("length", 64 - len(PROMPT))
    small = make(kv_tokens=48)
    (turn,) = small.generate([PROMPT], Sampling(temperature=0.0, ignore_eos=True))
    assert len(turn.token_ids) == 48 - len(PROMPT)


def test_texts_are_prompts_too(engine: Engine) -> None:
    one, other = engine.generate(["the river", "is cold"], greedy(5))
    assert one.usage.prompt_tokens == len(tokenizer().encode("the river"))
    assert engine.generate("is cold", greedy(5))[0].token_ids == other.token_ids
    assert one.text == tokenizer().decode(one.token_ids)


def test_progress_counts_prompts(engine: Engine) -> None:
    seen: list[tuple[str, int, int]] = []
    engine.generate([PROMPT, *OTHERS], greedy(3), progress=lambda *step: seen.append(step))
    assert seen == [("generate", done, 4) for done in range(1, 5)]


def test_tokens_that_the_model_does_not_have_are_refused(engine: Engine) -> None:
    with pytest.raises(SamplingError, match="logit_bias"):
        engine.generate([PROMPT], greedy(3, logit_bias={VOCABULARY: 1.0}))
    assert not engine.loop.busy


def test_log_probabilities_add_up(engine: Engine) -> None:
    (turn,) = engine.generate([PROMPT], greedy(3, logprobs=100))
    for each in turn.logprobs:
        assert 0.0 < sum(math.exp(value) for _, value in each.top) <= 1.0 + 1e-5
