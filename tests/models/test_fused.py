"""Packed weights and the pass over all layers in one call: close to the dense model, equal to the blocks."""

from pathlib import Path

import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from holdfast.kernels.cpu.matrix import PackedMatrix, available
from holdfast.models.checkpoint import choose_placement, load_model, open_checkpoint
from holdfast.models.linear import DenseLinear, Embedding, PackedLinear
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


K_QUANTS = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS)
NUMBER_TYPES = {Kind.BF16: torch.bfloat16, Kind.F16: torch.float16, Kind.F32: torch.float32}
Q4_K_M = {"v_proj": Kind.Q6_K, "down_proj": Kind.Q6_K, "embed_tokens": Kind.Q6_K, "up_proj": Kind.Q5_K}
"""A mixture such as llama.cpp writes: more bits for some matrices, within joined ones too."""


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", [*K_QUANTS, Kind.Q4_0, Kind.MXFP4, Kind.Q8_0], ids=lambda k: k.name)
def test_packed_formats_are_close(tmp_path: Path, kind: Kind, tied: bool) -> None:
    model, reference = quantised_model(tmp_path / "model.gguf", kind, tied)
    assert model._fused is not None
    assert isinstance(model._head, PackedLinear)
    block, size = GGML_QUANT_SIZES[kind]
    stored = SIZES["vocab_size"] * SIZES["hidden_size"] // block * size
    assert model._head.bytes <= (1.06 if kind is Kind.MXFP4 else 1.04) * stored
    tokens = tokens_of(50)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    found = PagedRunner(model, 16).run([(Sequence(), tokens)])[0]
    assert spread(found, expected) <= 0.03


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_mixture_of_formats_stays_packed(tmp_path: Path, tied: bool) -> None:
    """Joined projections keep the form of each; greedy tokens are transformers' where they are not close."""
    reference = build(LlamaConfig, LlamaForCausalLM, tie_word_embeddings=tied)
    path = tmp_path / "model.gguf"
    write_gguf(reference, path, Kind.Q4_K, others=Q4_K_M)
    model = load_model(open_checkpoint(path), QUANTISED)
    assert model._fused is not None
    embedding = model._embedding
    assert isinstance(embedding, Embedding) and isinstance(embedding._table, PackedMatrix)
    layer = model._fused._pass._keep[0][0]
    assert [[part.form.name for part in each.parts] for each in (layer.qkv, layer.gate_up, layer.down)] == [
        ["Q4_K", "Q6_K"],
        ["Q4_K", "Q5_K"],
        ["Q6_K"],
    ]
    prompt = tokens_of(16)
    with torch.inference_mode():
        said = reference.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False)[0].tolist()
        expected = reference(torch.tensor([said[:-1]])).logits[0, 15:]
    found = PagedRunner(model, 16).run([(Sequence(), said[:-1])])[0][15:]
    assert spread(found, expected) <= 0.03
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > 0.2 * expected.std()
    assert int(clear.sum()) >= 20
    assert torch.equal(found.argmax(-1)[clear], torch.tensor(said[16:])[clear])


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


@pytest.mark.parametrize(
    ("kind", "tied"),
    [(Kind.BF16, True), (Kind.F16, False), (Kind.F32, True), (Kind.F32, False)],
    ids=["BF16", "F16-untied", "F32", "F32-untied"],
)
def test_weights_that_are_not_quantised_are_multiplied_as_they_are(
    tmp_path: Path, kind: Kind, tied: bool
) -> None:
    """Results are those of float32 but for the order of additions, and the same in every batch."""
    model, reference = quantised_model(tmp_path / "model.gguf", kind, tied)
    assert model._fused is not None
    assert isinstance(model._head, PackedLinear)
    assert model._head.bytes == NUMBER_TYPES[kind].itemsize * SIZES["vocab_size"] * SIZES["hidden_size"]
    layer = model._fused._pass._keep[0][0]
    assert {part.form.name for each in (layer.qkv, layer.output, layer.down) for part in each.parts} == {
        kind.name
    }
    embedding = model._embedding
    assert isinstance(embedding, Embedding)
    assert isinstance(embedding._table, PackedMatrix) or embedding._table.dtype is NUMBER_TYPES[kind]
    assert isinstance(embedding._table, PackedMatrix) is tied
    tokens = tokens_of(50)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    alone = PagedRunner(model, 16).run([(Sequence(), tokens)])[0]
    assert spread(alone, expected) <= 2e-6
    runner, sequence, other = PagedRunner(model, 16), Sequence(), Sequence()
    parts = [runner.run([(other, tokens_of(23)), (sequence, tokens[:30])])[1]]
    parts += [runner.run([(sequence, [token]), (other, [1, 2])])[0] for token in tokens[30:]]
    assert torch.equal(torch.cat(parts), alone)
    model._fused = None
    assert spread(PagedRunner(model, 16).run([(Sequence(), tokens)])[0], expected) <= 2e-6


def test_weights_of_16_bits_stay_packed_beside_quantised_ones(tmp_path: Path) -> None:
    reference = build(LlamaConfig, LlamaForCausalLM)
    path = tmp_path / "model.gguf"
    write_gguf(
        reference, path, Kind.Q8_0, others={"v_proj": Kind.BF16, "up_proj": Kind.F16, "k_proj": Kind.F32}
    )
    model = load_model(open_checkpoint(path), QUANTISED)
    assert model._fused is not None
    layer = model._fused._pass._keep[0][0]
    assert [[part.form.name for part in each.parts] for each in (layer.qkv, layer.gate_up)] == [
        ["Q8_0", "F32", "BF16"],
        ["Q8_0", "F16"],
    ]
    tokens = tokens_of(40)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    assert spread(PagedRunner(model, 16).run([(Sequence(), tokens)])[0], expected) <= 0.02


def test_experts_of_16_bits_are_packed(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 72}
    build(Qwen3MoeConfig, Qwen3MoeForCausalLM, **experts).bfloat16().save_pretrained(tmp_path)
    reference = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    checkpoint = open_checkpoint(tmp_path)
    placement = choose_placement(checkpoint, torch.device("cpu"))
    model = load_model(checkpoint, placement)
    packed = [vars(block.part)["_weights"] for block in model._blocks if "_weights" in vars(block.part)]
    assert len(packed) == 2 and all(len(each.inner) == len(each.outer) == 4 for each in packed)
    assert packed[0].inner[0].bytes == 2 * 144 * SIZES["hidden_size"]
    tokens = tokens_of(40)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    assert spread(PagedRunner(model, 16).run([(Sequence(), tokens)])[0], expected) <= 2e-6


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.F32], ids=lambda kind: kind.name)
def test_weights_are_those_of_torch_where_no_kernel_multiplies_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    monkeypatch.setattr("holdfast.models.weights.widens", lambda: False)
    model, reference = quantised_model(tmp_path / "model.gguf", kind)
    assert model._fused is None and isinstance(model._head, DenseLinear)
    tokens = tokens_of(20)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    assert spread(PagedRunner(model, 16).run([(Sequence(), tokens)])[0], expected) <= 2e-6
