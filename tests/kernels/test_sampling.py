"""Sampling: which tokens may be drawn and how often, what a draw depends on, and the implementations alike.

The Triton kernel runs in Triton's interpreter, on the CPU, where a row takes long: it is compared with the
torch implementation row by row, and the statistics are those of the torch implementation alone.
"""

from __future__ import annotations

import pytest
import torch

from holdfast.kernels import torch as reference
from holdfast.kernels import triton as device
from holdfast.kernels.torch import sampling
from holdfast.kernels.torch.sampling import waiting_times
from holdfast.kernels.triton import sampling as sections
from tests.kernels import naive
from tests.kernels.batches import NAN

# The interpreter computes with NumPy, which remarks on masked values and on scalars that are arrays.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton"),
]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.fixture(params=["compiled", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C kernel, where this machine has it, and what serves elsewhere."""
    if request.param == "torch":
        monkeypatch.setattr(sampling.compiled, "sample", lambda *_: None)


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def parameters(rows: int, **given: object) -> list[torch.Tensor]:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 5, "positions": 3} | given
    types = [torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int32]
    return [
        torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()
        for value, dtype in zip(values.values(), types, strict=True)
    ]


@pytest.mark.usefixtures("implementation")
def test_sampling_takes_only_kept_tokens_and_all_of_them(generator: torch.Generator) -> None:
    logits = normal(generator, 40) * 2
    cases = [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.2), (9, 0.7, 0.05), (0, 0.0, 0.0)]
    seeds = torch.arange(4000)
    for top_k, top_p, min_p in cases:
        drawn = reference.sample_tokens(
            logits.expand(4000, 40),
            *parameters(4000, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p, seeds=seeds),
        )
        kept = naive.kept_tokens(logits / 0.8, top_k, top_p, min_p)
        assert set(drawn.tolist()) <= kept
        probabilities = torch.softmax(logits / 0.8, 0)
        mass = sum(float(probabilities[token]) for token in kept)
        frequent = {token for token in kept if float(probabilities[token]) / mass > 0.01}
        assert set(drawn.tolist()) >= frequent
        for token in frequent:
            share = float((drawn == token).float().mean())
            assert abs(share - float(probabilities[token]) / mass) < 0.04


@pytest.mark.usefixtures("implementation")
def test_sampling_needs_a_full_sort_only_for_flat_rows(generator: torch.Generator) -> None:
    """A nearly flat distribution keeps more tokens than the candidates that are looked at first."""
    logits = normal(generator, 5000) * 0.01
    drawn = reference.sample_tokens(
        logits.expand(2000, 5000), *parameters(2000, top_p=0.9, seeds=torch.arange(2000))
    )
    order = logits.argsort(descending=True).tolist()
    ranks = {token: rank for rank, token in enumerate(order)}
    assert max(ranks[token] for token in drawn.tolist()) > 4000
    assert max(ranks[token] for token in drawn.tolist()) < 4600


@pytest.mark.usefixtures("implementation")
def test_sampling_depends_on_seed_and_position_alone(generator: torch.Generator) -> None:
    logits = normal(generator, 6, 300)
    given = {
        "temperature": torch.tensor([0.0, 0.7, 1.0, 1.3, 0.9, 1.0]),
        "top_k": torch.tensor([0, 0, 5, 0, 20, 0]),
        "top_p": torch.tensor([1.0, 0.9, 1.0, 1.0, 0.8, 1.0]),
        "seeds": torch.tensor([1, 2, 3, 2**40 + 3, 5, 6]),
        "positions": torch.tensor([10, 11, 12, 13, 14, 15]),
    }
    together = parameters(6, **given)
    drawn = reference.sample_tokens(logits, *together)
    assert int(drawn[0]) == int(logits[0].argmax())
    for row in range(6):
        alone = reference.sample_tokens(logits[row : row + 1], *[value[row : row + 1] for value in together])
        assert int(alone) == int(drawn[row])
    many = [
        reference.sample_tokens(logits[3:4], *parameters(1, seeds=seed, positions=position)).item()
        for seed in (1, 2, 2**33 + 1)
        for position in range(20)
    ]
    assert len(set(many)) > 30


@pytest.mark.usefixtures("interpreter")
@pytest.mark.usefixtures("implementation")
def test_sampling_refuses_rows_that_are_not_numbers() -> None:
    logits = torch.zeros(4, 17)
    logits[1, 3] = NAN
    logits[2] = -torch.inf
    logits[3, 5] = torch.inf
    for ops in (reference, device):
        for temperature in (0.0, 1.0):
            drawn = ops.sample_tokens(logits, *parameters(4, temperature=temperature)).tolist()
            assert drawn[0] >= 0
            assert drawn[1:] == [-1, -1, -1]


@pytest.mark.usefixtures("interpreter")
def test_a_draw_ends_where_logits_over_the_temperature_are_not_finite() -> None:
    logits = torch.arange(34.0).reshape(2, 17) * 1e37
    drawn = device.sample_tokens(logits, *parameters(2, temperature=1e-4, top_k=5))
    assert all(0 <= token < 17 for token in drawn.tolist())


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("section", [64, 8192])
def test_sampling_is_the_same_on_both_implementations(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, section: int
) -> None:
    """Peaked and flat rows, every combination of limits, ties, and an odd width."""
    monkeypatch.setattr(sections, "SECTION", section)
    rows, width = 12, 333
    logits = normal(generator, rows, width) * torch.tensor([0.1, 1.0, 4.0]).repeat(rows // 3).unsqueeze(1)
    logits[::5] = logits[::5].round()
    rows_of = torch.arange(rows)
    given = parameters(
        rows,
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.6]).repeat(rows // 4),
        top_k=torch.where(rows_of % 2 == 0, 0, 1 + rows_of),
        top_p=torch.where(rows_of % 3 == 0, 1.0, 0.08 * rows_of),
        min_p=torch.where(rows_of % 5 == 0, 0.1, 0.0),
        seeds=rows_of * 7919 + 2**35,
        positions=rows_of + 100,
    )
    expected = reference.sample_tokens(logits, *given)
    assert torch.equal(device.sample_tokens(logits, *given), expected)
    longer = [*given[:-1], given[-1].long()]
    assert torch.equal(reference.sample_tokens(logits, *longer), expected)
    assert torch.equal(device.sample_tokens(logits[:2], *[each[:2] for each in longer]), expected[:2])
    assert len(set(expected.tolist())) > 6
    assert torch.equal(device.sample_tokens(logits[:6], *given, greedy=True), logits[:6].argmax(-1))


def test_waiting_times_are_exponential_over_seeds_positions_and_tokens() -> None:
    """The share of uniform numbers below each tenth, along each of the three things that they depend on."""
    one = torch.ones(1, dtype=torch.int64)
    along = torch.arange(20_000)
    draws = {
        "tokens": waiting_times(one, one, along.unsqueeze(0)).flatten(),
        "seeds": waiting_times(along, one.expand(20_000), one.unsqueeze(0)).flatten(),
        "positions": waiting_times(one.expand(20_000), along, one.unsqueeze(0)).flatten(),
        "high bits": waiting_times(along << 32, one.expand(20_000), one.unsqueeze(0)).flatten(),
    }
    for name, times in draws.items():
        uniform = torch.exp(-times)
        for tenth in range(1, 10):
            assert abs(float((uniform < tenth / 10).float().mean()) - tenth / 10) < 0.015, name
        centred = uniform - 0.5
        assert abs(float((centred[1:] * centred[:-1]).mean())) < 0.003, name


def test_waiting_times_are_positive_and_finite_for_all_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time of zero would let a token win whatever its weight, once in a few hundred draws."""
    extremes = torch.tensor([[0, 1, 2**31 - 1, -(2**31), -2, -1]], dtype=torch.int32)
    monkeypatch.setattr(sampling, "_mix", lambda value: extremes.clone() if value.dim() == 2 else value)
    one = torch.ones(1, dtype=torch.int64)
    times = waiting_times(one, one, extremes)
    assert bool((times > 0).all())
    assert bool(times.isfinite().all())
