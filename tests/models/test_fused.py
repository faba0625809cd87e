"""Packed weights and the pass over all layers in one call: close to the dense model, equal to the blocks."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM

from holdfast.kernels.cpu.matrix import available
from holdfast.models.checkpoint import load_model, open_checkpoint
from holdfast.models.linear import PackedLinear
from holdfast.models.model import Model
from holdfast.models.weights import Placement
from tests.models.gguf_files import write_gguf
from tests.models.paged import PagedRunner, Sequence
from tests.models.test_gguf import SIZES, build, spread, tokens_of

pytestmark = pytest.mark.skipif(not available(), reason="this machine has no C kernels")

QUANTISED = Placement(torch.device("cpu"), torch.float32, quantised=True)


def quantised_model(path: Path, kind: Kind, tied: bool = True) -> tuple[Model, LlamaForCausalLM]:
    """A small model with weights of one format, and transformers' with the same weights dequantised."""
    reference = build(LlamaConfig, LlamaForCausalLM, tie_word_embeddings=tied)
    write_gguf(reference, path, kind)
    return load_model(open_checkpoint(path), QUANTISED), reference


FOUR_BIT = (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.MXFP4, Kind.IQ4_NL, Kind.IQ4_XS)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", [*FOUR_BIT, Kind.Q6_K, Kind.Q8_0], ids=lambda k: k.name)
def test_packed_formats_are_close(tmp_path: Path, kind: Kind, tied: bool) -> None:
    model, reference = quantised_model(tmp_path / "model.gguf", kind, tied)
    assert model._fused is not None
    assert isinstance(model._head, PackedLinear)
    four_bit = kind in FOUR_BIT
    assert model._head.bytes <= SIZES["vocab_size"] * SIZES["hidden_size"] * (0.7 if four_bit else 1.2)
    tokens = tokens_of(50)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    found = PagedRunner(model, 16).run([(Sequence(), tokens)])[0]
    assert spread(found, expected) <= 0.03


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_the_fused_pass_is_that_of_the_blocks(tmp_path: Path, page_size: int) -> None:
    model, _ = quantised_model(tmp_path / "model.gguf", Kind.Q4_1)
    results = []
    for fused in (True, False):
        if not fused:
            model._fused = None
        runner, sequences, logits = PagedRunner(model, page_size), [Sequence(), Sequence()], []
        for chunks in (([1, 2, 3], tokens_of(30)), ([4], [5]), (tokens_of(9), [6])):
            logits += runner.run(list(zip(sequences, chunks, strict=True)))
        results.append(torch.cat(logits))
    assert spread(*results) <= 0.005
    assert results[0].isfinite().all()


def test_a_model_with_dense_weights_is_not_fused(tmp_path: Path) -> None:
    model, _ = quantised_model(tmp_path / "model.gguf", Kind.F16)
    assert model._fused is None
