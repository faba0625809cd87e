"""Temperatures that are next to nothing: the most likely token, on every device, at once."""

import pytest
import torch

from holdfast.engine.sampling import Sampling
from holdfast.engine.step.sampler import COLDEST, BatchSampler
from holdfast.models.generation import GenerationDefaults

WIDTH = 500


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-20, 1e-9, COLDEST / 2])
def test_next_to_no_temperature_is_none(temperature: float, top_k: int) -> None:
    rows = 64
    logits = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(3)) * 8
    sampler = BatchSampler(rows, WIDTH, torch.device("cpu"))
    for row in range(rows):
        sampling = Sampling(temperature=temperature, top_k=top_k, seed=row)
        sampler.admit(row, sampling.with_defaults(GenerationDefaults(())), prompt=[1, 2])
    drawn = sampler.sample(logits.clone(), list(range(rows)), [2] * rows)
    assert torch.equal(drawn.tokens, logits.argmax(dim=1))


def test_a_little_temperature_is_some() -> None:
    """Two tokens that differ by less than the temperature are both drawn."""
    logits = torch.zeros(1, WIDTH)
    logits[0, 7] = logits[0, 9] = 5.0
    sampler = BatchSampler(1, WIDTH, torch.device("cpu"))
    sampler.admit(0, Sampling(temperature=COLDEST, seed=1).with_defaults(GenerationDefaults(())), prompt=[1])
    drawn = {int(sampler.sample(logits.clone(), [0], [place]).tokens) for place in range(40)}
    assert drawn == {7, 9}
