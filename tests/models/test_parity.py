"""Logits and greedy tokens equal those of transformers, for every family, page size and chunk size."""

from collections.abc import Callable

import pytest
import torch

from holdfast.models.checkpoint import load_model, open_checkpoint
from holdfast.models.model import Model
from holdfast.models.weights import Placement
from tests.models.paged import generate
from tests.models.reference import GENERATED, VARIANTS, Reference

SETTINGS = ((1, 7), (1, 64), (16, 1), (16, 7), (16, 64), (64, 1), (64, 7))
CPU = Placement(torch.device("cpu"), torch.float32)


def load(reference: Reference) -> Model:
    return load_model(open_checkpoint(reference.path), CPU)


@pytest.mark.parametrize("name", VARIANTS)
def test_reference_is_not_trivial(reference_of: Callable[[str], Reference], name: str) -> None:
    """A model that repeats one token would agree with almost anything."""
    for generated in reference_of(name).generated:
        assert len(generated) == GENERATED
        assert len(set(generated)) >= 20


@pytest.mark.parametrize("name", VARIANTS)
def test_parity(reference_of: Callable[[str], Reference], name: str) -> None:
    """A ragged batch of prompts, decoding while others prefill, for all page and chunk sizes."""
    reference = reference_of(name)
    model = load(reference)
    for page_size, chunk in SETTINGS:
        logits, generated = generate(
            model, reference.prompts, page_size=page_size, chunk=chunk, count=GENERATED
        )
        for ours, theirs in zip(logits, reference.logits, strict=True):
            error = (ours - theirs).abs().max() / theirs.abs().max()
            assert error <= 1e-4, f"page size {page_size}, chunk {chunk}: {error:.2e}"
        assert generated == reference.generated, f"page size {page_size}, chunk {chunk}"
