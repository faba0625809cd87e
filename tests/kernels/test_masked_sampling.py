"""Sampling under token masks: the C kernel, torch and interpreted Triton against a float64 formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast import kernels
from holdfast.kernels import TokenMasks
from holdfast.kernels import torch as reference
from holdfast.kernels import triton as device
from holdfast.kernels.torch import sampling
from holdfast.kernels.triton import sampling as sections
from tests.kernels import naive
from tests.kernels.batches import NAN
from tests.kernels.test_sampling import parameters

Sample = Callable[..., torch.Tensor]

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton"),
]

ROWS = 12


@pytest.fixture(params=["compiled", "torch", "triton"])
def sample(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sample:
    """The implementations: the C kernel, where this machine has it, what serves elsewhere, and Triton."""
    if request.param == "triton":
        request.getfixturevalue("interpreter")
        monkeypatch.setattr(sections, "SECTION", 64)
        return device.sample_tokens
    if request.param == "torch":
        monkeypatch.setattr(sampling.compiled, "sample", lambda *_: None)
    return reference.sample_tokens


def mixed(rows: int = ROWS) -> list[torch.Tensor]:
    """Every combination of limits, with and without a temperature."""
    at = torch.arange(rows)
    return parameters(
        rows,
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.6])[at % 4],
        top_k=torch.where(at % 2 == 0, 0, 1 + at),
        top_p=torch.where(at % 3 == 0, 1.0, 0.08 * at),
        min_p=torch.where(at % 5 == 0, 0.1, 0.0),
        seeds=at * 7919 + 2**35,
        positions=at + 100,
    )


def random_logits(width: int, seed: int) -> torch.Tensor:
    """Flat and peaked rows."""
    made = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(seed))
    return made * torch.tensor([0.3, 1.0, 4.0]).repeat(ROWS // 3).unsqueeze(1)


def by_formula(
    logits: torch.Tensor, given: list[torch.Tensor], masks: torch.Tensor, rows: list[int]
) -> list[int]:
    """The float64 formula, row by row; `masks` are booleans."""
    heat, top_k, top_p, min_p, seeds, positions = given
    times = sampling.waiting_times(seeds, positions, torch.arange(logits.shape[1]).unsqueeze(0))
    everything = torch.ones(logits.shape[1], dtype=torch.bool)
    return [
        naive.sampled_token(
            logits[row],
            masks[at] if at >= 0 else everything,
            float(heat[row]), int(top_k[row]), float(top_p[row]), float(min_p[row]),
            times[row],
        )
        for row, at in enumerate(rows)
    ]  # fmt: skip


@pytest.mark.parametrize("width", [17, 64, 333])
def test_masked_rows_follow_the_formula(sample: Sample, width: int) -> None:
    """Masks of a few and of many tokens, shared masks, and rows without one."""
    taken = set()
    for seed in range(1 if sample is device.sample_tokens else 3):  # The interpreter is slow.
        logits, given = random_logits(width, seed), mixed()
        generator = torch.Generator().manual_seed(100 + seed)
        shares = torch.tensor([0.05, 0.3, 0.9, 0.5]).unsqueeze(1)
        masks = torch.rand(4, width, generator=generator) < shares
        masks[:, 3] = True
        rows = [0, 1, 2, 3, -1, 2, 1, 0, 3, -1, 0, 1]
        drawn = sample(
            logits, *given, masks=TokenMasks(naive.packed_mask(masks), torch.tensor(rows, dtype=torch.int32))
        )
        assert drawn.tolist() == by_formula(logits, given, masks, rows)
        taken.update(drawn.tolist())
    assert len(taken) > 5


@pytest.mark.parametrize("greedy", [False, True])
def test_one_allowed_token_is_taken_and_none_gives_no_token(sample: Sample, greedy: bool) -> None:
    width = 75
    logits, given = random_logits(width, 5), mixed()
    masks = torch.zeros(3, width, dtype=torch.bool)
    masks[1, 74] = masks[2, 0] = True
    rows = torch.tensor([0, 1, 2, -1] * 3, dtype=torch.int32)
    drawn = sample(logits, *given, masks=TokenMasks(naive.packed_mask(masks), rows), greedy=greedy)
    plain = sample(logits, *given, greedy=greedy)
    for row, token in enumerate(drawn.tolist()):
        assert token == [-1, 74, 0, int(plain[row])][row % 4]


@pytest.mark.parametrize("width", [31, 32, 100])
def test_a_mask_that_allows_all_changes_no_token(sample: Sample, width: int) -> None:
    logits, given = random_logits(width, 9), mixed()
    everything = naive.packed_mask(torch.ones(1, width, dtype=torch.bool))
    drawn = sample(logits, *given, masks=TokenMasks(everything, torch.zeros(ROWS, dtype=torch.int32)))
    assert torch.equal(drawn, sample(logits, *given))


def test_tokens_past_the_mask_are_never_taken(sample: Sample) -> None:
    """The logits are wider than the vocabulary of the mask; unused bits of its last word are ignored."""
    logits, given = random_logits(100, 11), mixed()
    logits[:, 64:] += 50.0
    everything = torch.full((1, 2), -1, dtype=torch.int32)
    drawn = sample(logits, *given, masks=TokenMasks(everything, torch.zeros(ROWS, dtype=torch.int32)))
    assert int(drawn.max()) < 64 and int(drawn.min()) >= 0
    whole = torch.full((1, 4), -1, dtype=torch.int32)
    drawn = sample(logits, *given, masks=TokenMasks(whole, torch.zeros(ROWS, dtype=torch.int32)))
    assert torch.equal(drawn, sample(logits, *given))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_allowed_logits_decide_whether_a_row_is_a_number(sample: Sample, temperature: float) -> None:
    """Nothing finite among the allowed tokens, or NaN: no token. What the mask forbids does not matter."""
    width = 40
    logits = torch.zeros(6, width)
    masks = torch.zeros(1, width, dtype=torch.bool)
    masks[0, [3, 9, 36]] = True
    allowed = masks[0].nonzero().squeeze(1)
    logits[0, allowed] = -torch.inf
    logits[1, allowed] = NAN
    logits[2, 9] = NAN
    logits[3, 5] = NAN
    logits[4, 5] = torch.inf
    logits[5, [9, 36]] = -torch.inf
    drawn = sample(
        logits,
        *parameters(6, temperature=temperature),
        masks=TokenMasks(naive.packed_mask(masks), torch.zeros(6, dtype=torch.int32)),
    ).tolist()
    assert drawn[:3] == [-1, -1, -1]
    assert drawn[3] in (3, 9, 36) and drawn[4] in (3, 9, 36)
    assert drawn[5] == 3


def test_limits_count_allowed_tokens_alone(sample: Sample) -> None:
    """top_k, top_p and min_p are over what the mask leaves: the most likely tokens are forbidden here."""
    width, draws = 50, 32
    logits = torch.arange(width, 0, -1).float().repeat(draws, 1)
    masks = torch.zeros(1, width, dtype=torch.bool)
    masks[0, 20:30] = True
    rows = torch.zeros(draws, dtype=torch.int32)
    for limits, kept in (
        ({"top_k": 3}, {20, 21, 22}),
        ({"top_p": 0.8}, {20, 21}),
        ({"min_p": 0.2}, {20, 21}),
    ):
        given = parameters(draws, seeds=torch.arange(draws), **limits)
        drawn = sample(logits, *given, masks=TokenMasks(naive.packed_mask(masks), rows))
        assert set(drawn.tolist()) == kept


def test_the_public_function_passes_masks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without masks the implementation is called as it was before there were any."""
    calls = []
    plain = reference.sample_tokens
    monkeypatch.setattr(
        reference,
        "sample_tokens",
        lambda *given, **named: calls.append(sorted(named)) or plain(*given, **named),
    )
    logits, given = random_logits(40, 1), mixed()
    assert kernels.sample_tokens(logits, *given).shape == (ROWS,)
    only = naive.packed_mask(torch.arange(40).unsqueeze(0) == 7)
    rows = torch.zeros(ROWS, dtype=torch.int32)
    assert set(kernels.sample_tokens(logits, *given, masks=TokenMasks(only, rows)).tolist()) == {7}
    assert calls == [["greedy"], ["greedy", "masks"]]
