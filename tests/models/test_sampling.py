"""Sampling parameters and the batch sampler: its statistics and what it must not depend on."""

import math
from collections import Counter

import pytest
import torch

from holdfast.engine.sampling import Sampling, SamplingError
from holdfast.engine.step.sampler import BatchSampler, token_logprobs
from holdfast.models.generation import GenerationDefaults

VOCABULARY = 50
CPU = torch.device("cpu")


def filled(**values: object) -> Sampling:
    return Sampling(**values).with_defaults(GenerationDefaults())


def draw(
    logits: torch.Tensor, sampling: Sampling, position: int = 10, prompt: tuple[int, ...] = (1, 2)
) -> int:
    sampler = BatchSampler(1, logits.shape[-1], CPU)
    sampler.admit(0, sampling, prompt=prompt)
    return int(sampler.sample(logits.clone().view(1, -1), [0], [position]).tokens[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("seed", 1 << 64),
        ("n", 0),
        ("n", 1000),
        ("logprobs", -1),
        ("logprobs", 1000),
        ("stop", ""),
        ("stop", ["ok", ""]),
        ("stop", ["x"] * 65),
        ("stop_token_ids", [-1]),
        ("logit_bias", {1: 200.0}),
        ("logit_bias", {-1: 1.0}),
    ],
)
def test_wrong_values_name_their_field(field: str, value: object) -> None:
    with pytest.raises(SamplingError) as caught:
        Sampling(**{field: value})
    assert caught.value.param == field
    assert field in str(caught.value)


def test_minimum_above_maximum_and_unknown_tokens_are_refused() -> None:
    with pytest.raises(SamplingError, match="min_tokens"):
        Sampling(max_tokens=3, min_tokens=4)
    with pytest.raises(SamplingError, match="stop_token_ids names a token past the vocabulary of 50"):
        Sampling(stop_token_ids=[3, 50]).check_vocabulary(50)
    with pytest.raises(SamplingError, match="logit_bias names a token past the vocabulary of 50"):
        Sampling(logit_bias={51: 1.0}).check_vocabulary(50)
    Sampling(stop_token_ids=[49], logit_bias={49: 1.0}).check_vocabulary(50)


def test_defaults_come_from_the_checkpoint_unless_asked_otherwise() -> None:
    defaults = GenerationDefaults((2,), temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)
    left_open = Sampling().with_defaults(defaults)
    assert (left_open.temperature, left_open.top_p, left_open.top_k) == (0.6, 0.9, 20)
    assert (left_open.min_p, left_open.repetition_penalty) == (0.0, 1.1)
    asked = Sampling(temperature=0.0, top_k=0, seed=7).with_defaults(defaults)
    assert (asked.temperature, asked.top_k, asked.seed) == (0.0, 0, 7)
    assert Sampling().with_defaults(defaults).seed != Sampling().with_defaults(defaults).seed


def test_choices_have_seeds_of_their_own() -> None:
    sampling = filled(n=8, seed=5)
    seeds = {sampling.choice(index).seed for index in range(8)}
    assert len(seeds) == 8
    assert sampling.choice(0).seed == 5
    assert sampling.choice(3) == sampling.choice(3)


def test_parameters_cannot_be_changed() -> None:
    sampling = Sampling(logit_bias={1: 2.0}, stop="x")
    with pytest.raises(AttributeError):
        sampling.temperature = 2.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        sampling.logit_bias[1] = 3.0  # type: ignore[index]
    assert sampling.stop_strings == ("x",)


def test_zero_temperature_takes_the_most_likely() -> None:
    logits = torch.randn(VOCABULARY)
    assert draw(logits, filled(temperature=0.0)) == int(logits.argmax())


def test_distribution_follows_the_temperature() -> None:
    """Frequencies over many positions fit the softmax: each within five standard deviations."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -8.0])
    draws = 20_000
    sampler = BatchSampler(1, 5, CPU)
    sampler.admit(0, filled(temperature=0.7, seed=11), prompt=[0])
    rows = logits.repeat(draws, 1)
    tokens = sampler.sample(rows, [0] * draws, list(range(draws))).tokens
    expected = torch.softmax(logits / 0.7, dim=-1)
    found = Counter(tokens.tolist())
    for token, probability in enumerate(expected.tolist()):
        spread = math.sqrt(draws * probability * (1 - probability))
        assert abs(found[token] - draws * probability) <= 5 * spread + 1


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.01}, {0}),
        ({"min_p": 0.3}, {0, 1}),
        ({"top_k": 3, "top_p": 0.6, "min_p": 0.9}, {0}),
    ],
)
def test_only_kept_tokens_are_drawn(parameters: dict[str, float], kept: set[int]) -> None:
    logits = torch.log(torch.tensor([0.4, 0.25, 0.1, 0.1, 0.08, 0.07])) + torch.tensor(
        [0.0, 0.0, 1e-3, 0.0, 0.0, 0.0]
    )
    draws = 500
    sampler = BatchSampler(1, 6, CPU)
    sampler.admit(0, filled(temperature=1.0, seed=3, **parameters), prompt=[0])
    tokens = sampler.sample(logits.repeat(draws, 1), [0] * draws, list(range(draws))).tokens
    assert set(tokens.tolist()) == kept


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    """Alone, in a batch, in another row, beside greedy and penalised rows: the same token each time."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(40, VOCABULARY, generator=generator)
    mine = filled(temperature=1.3, top_p=0.95, seed=1234)
    alone = [draw(logits[step], mine, position=step) for step in range(40)]
    sampler = BatchSampler(4, VOCABULARY, CPU)
    sampler.admit(0, filled(temperature=0.0), prompt=[1])
    sampler.admit(1, filled(temperature=1.0, presence_penalty=1.0, seed=9), prompt=[1, 2])
    sampler.admit(2, filled(temperature=2.0, top_k=5), prompt=[3])
    sampler.admit(3, mine, prompt=[1, 2])
    together = []
    for step in range(40):
        order = [3, 0, 1, 2] if step % 2 else [1, 2, 3]
        noise = torch.randn(len(order), VOCABULARY, generator=generator)
        noise[order.index(3)] = logits[step]
        positions = [step if row == 3 else 7 * step for row in order]
        sampled = sampler.sample(noise, order, positions)
        together.append(int(sampled.tokens[order.index(3)]))
    assert together == alone
    assert len(set(alone)) > 10
    assert alone != [
        draw(logits[step], filled(temperature=1.3, top_p=0.95, seed=1235), step) for step in range(40)
    ]


def naive_penalties(
    logits: list[float], sampling: Sampling, prompt: list[int], said: list[int]
) -> list[float]:
    """The definition, token by token."""
    out = list(logits)
    for token in range(len(out)):
        if token in prompt or token in said:
            penalty = sampling.repetition_penalty or 1.0
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        out[token] -= sampling.frequency_penalty * said.count(token)
        out[token] -= sampling.presence_penalty * (token in said)
    return out


def test_penalties_follow_their_definition() -> None:
    """Greedy tokens of a penalised row equal those of the definition, also when admitted in the middle."""
    generator = torch.Generator().manual_seed(5)
    sampling = filled(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=-0.4)
    prompt, said = [1, 2, 3, 2], [4, 4, 7]
    sampler = BatchSampler(3, VOCABULARY, CPU)
    sampler.admit(2, filled(temperature=0.0), prompt=[1])
    sampler.admit(1, sampling, prompt=prompt, generated=said)
    for step in range(30):
        logits = torch.randn(2, VOCABULARY, generator=generator)
        expected = torch.tensor(naive_penalties(logits[0].tolist(), sampling, prompt, said)).argmax()
        plain = logits[1].argmax()
        sampled = sampler.sample(logits.clone(), [1, 2], [len(prompt) + len(said), step])
        assert sampled.tokens.tolist() == [int(expected), int(plain)]
        said.append(int(expected))
    assert len(set(said)) > 10


def test_a_released_row_leaves_nothing_behind() -> None:
    logits = torch.zeros(VOCABULARY)
    logits[3] = 1.0
    sampler = BatchSampler(1, VOCABULARY, CPU)
    sampler.admit(0, filled(temperature=0.0, presence_penalty=2.0), prompt=[3], generated=[3])
    assert int(sampler.sample(logits.clone()[None], [0], [5]).tokens) != 3
    sampler.release(0)
    sampler.admit(0, filled(temperature=0.0, presence_penalty=2.0), prompt=[3])
    assert int(sampler.sample(logits.clone()[None], [0], [5]).tokens) == 3


def test_bias_and_minimum_length() -> None:
    logits = torch.zeros(VOCABULARY)
    logits[7] = 5.0
    assert draw(logits, filled(temperature=0.0, logit_bias={7: -100.0, 9: 1.0})) == 9
    sampler = BatchSampler(1, VOCABULARY, CPU)
    sampling = filled(temperature=0.0, min_tokens=3, stop_token_ids=[8])
    sampler.admit(0, sampling, prompt=[1, 2, 3, 4], end_tokens=[7])
    logits[8] = 4.0
    logits[9] = 3.0
    tokens = [int(sampler.sample(logits.clone()[None], [0], [position]).tokens) for position in range(4, 9)]
    assert tokens == [9, 9, 9, 7, 7]


def test_ends_that_a_model_cannot_say_are_not_kept_from_coming() -> None:
    """A checkpoint may name end tokens outside the vocabulary; on a GPU an out-of-range index kills the CUDA
    context.
    """
    sampler = BatchSampler(1, VOCABULARY, CPU)
    for ends in ([VOCABULARY], [7, VOCABULARY + 5]):
        sampler.admit(0, filled(temperature=0.0, min_tokens=3), prompt=[1], end_tokens=ends)
        logits = torch.zeros(VOCABULARY)
        logits[7], logits[9] = 5.0, 4.0
        assert int(sampler.sample(logits[None], [0], [1]).tokens) == (9 if 7 in ends else 7)
        sampler.release(0)


def test_logprobs_are_of_the_model_and_only_for_those_who_ask() -> None:
    logits = torch.randn(3, VOCABULARY)
    expected = torch.log_softmax(logits, dim=-1)
    sampler = BatchSampler(3, VOCABULARY, CPU)
    sampler.admit(0, filled(temperature=0.5, logprobs=0, logit_bias={3: 4.0}), prompt=[1])
    sampler.admit(1, filled(temperature=0.5), prompt=[1])
    sampler.admit(2, filled(temperature=2.0, logprobs=4, repetition_penalty=1.3), prompt=[1])
    sampled = sampler.sample(logits.clone(), [0, 1, 2], [1, 1, 1])
    assert sampled.logprob_rows == (0, 2)
    assert sampled.logprobs is not None
    assert sampled.top_ids is not None
    assert sampled.top_logprobs is not None
    for place, row in enumerate(sampled.logprob_rows):
        assert sampled.logprobs[place] == pytest.approx(float(expected[row, sampled.tokens[row]]), abs=1e-5)
    assert sampled.top_ids[1].tolist() == expected[2].topk(4).indices.tolist()
    assert torch.allclose(sampled.top_logprobs[1], expected[2].topk(4).values, atol=1e-5)
    chosen, best, values = token_logprobs(logits, torch.tensor([5, 6, 7]), 2)
    assert torch.allclose(chosen, expected[torch.arange(3), torch.tensor([5, 6, 7])], atol=1e-5)
    assert best[0].tolist() == expected[0].topk(2).indices.tolist()
    assert torch.allclose(values[0], expected[0].topk(2).values, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_says_so_and_harms_no_other(bad: float, temperature: float) -> None:
    logits = torch.randn(3, VOCABULARY)
    healthy = [draw(logits[row], filled(temperature=temperature, seed=row), 4) for row in range(3)]
    logits[1, 5 if bad > 0 or math.isnan(bad) else slice(None)] = bad
    sampler = BatchSampler(3, VOCABULARY, CPU)
    for row in range(3):
        sampler.admit(row, filled(temperature=temperature, seed=row), prompt=[1, 2])
    tokens = sampler.sample(logits, [0, 1, 2], [4, 4, 4]).tokens.tolist()
    assert tokens == [healthy[0], -1, healthy[2]]
