"""GGUF files mean what they say: every format, dense and kept quantised, and broken files are refused."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from holdfast.models.checkpoint import load_model, open_checkpoint
from holdfast.models.fields import ConfigurationError
from holdfast.models.gguf import GgufFile
from holdfast.models.linear import INT4_DENSE_FROM, Int4Linear, Int8Linear, RefinedHead, quantise_int8
from holdfast.models.weights import Placement, WeightMismatch
from tests.models.gguf_files import finish, write_gguf
from tests.models.paged import PagedRunner, Sequence

DENSE = Placement(torch.device("cpu"), torch.float32)
QUANTISED = Placement(torch.device("cpu"), torch.float32, quantised=True)
LEAN = Placement(torch.device("cpu"), torch.float32, quantised=True, dense_copies=False)

SIZES = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
}
KINDS = [
    *(Kind.F32, Kind.F16, Kind.BF16),
    *(Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1),
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
    *(Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4),
]


def build(config: type, model: type, **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = model(config(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape)
    return made


def tokens_of(count: int) -> list[int]:
    return torch.randint(SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(1)).tolist()


def our_logits(path: Path, placement: Placement, tokens: list[int]) -> torch.Tensor:
    runner = PagedRunner(load_model(open_checkpoint(path), placement), 16)
    return runner.run([(Sequence(), tokens)])[0]


def spread(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, as a share of that of the expected values."""
    return float((ours - expected).norm() / expected.norm())


@pytest.fixture
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a C compiler."""
    monkeypatch.setattr("holdfast.models.linear.available", lambda: False)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_formats(tmp_path: Path, kind: Kind, tied: bool, torch_kernels: None) -> None:
    """Dequantised: exact. Kept quantised: close, for few tokens (its kernels) and many (dense copies)."""
    model = build(LlamaConfig, LlamaForCausalLM, tie_word_embeddings=tied)
    path = tmp_path / "model.gguf"
    write_gguf(model, path, kind)
    tokens = tokens_of(INT4_DENSE_FROM + 10)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    scale = expected.abs().max()
    dense = our_logits(path, DENSE, tokens)
    assert (dense - expected).abs().max() / scale <= 1e-4
    few = our_logits(path, QUANTISED, tokens[:20])
    assert spread(few, expected[:20]) <= 0.02
    many = our_logits(path, QUANTISED, tokens)
    assert (many - expected).abs().max() / scale <= 1e-4
    lean = our_logits(path, LEAN, tokens)
    assert spread(lean, expected) <= 0.03
    if kind not in (Kind.F32, Kind.F16, Kind.BF16):
        assert not torch.equal(few, expected[:20]), "the quantised kernels were not used"


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (Kind.Q4_0, Int4Linear),
        (Kind.Q4_1, Int4Linear),
        (Kind.Q4_K, Int4Linear),
        (Kind.Q8_0, Int8Linear),
        (Kind.Q6_K, Int8Linear),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else value.__name__,
)
def test_quantised_projections_stay_small(
    tmp_path: Path, kind: Kind, form: type, torch_kernels: None
) -> None:
    model = build(LlamaConfig, LlamaForCausalLM, tie_word_embeddings=False)
    write_gguf(model, tmp_path / "model.gguf", kind)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    lean, copies = load_model(checkpoint, LEAN), load_model(checkpoint, QUANTISED)
    head, with_copy = lean._head, copies._head
    assert isinstance(head, RefinedHead)
    assert isinstance(head._coarse, form)
    elements = SIZES["vocab_size"] * SIZES["hidden_size"]
    assert head.bytes <= elements * (0.7 if form is Int4Linear else 1.1)
    assert with_copy.bytes == head.bytes + 4 * elements


def test_the_largest_logits_are_exact() -> None:
    """A few nearly equal ones tie when rounded to bfloat16; the best must win all the same."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4096, 256, generator=generator)
    weight[100:116] = weight[100] + 0.001 * torch.randn(16, 256, generator=generator)
    x = torch.randn(3, 256, generator=generator) + weight[100]
    coarse = Int8Linear(*quantise_int8(weight), None, weight)
    refined = RefinedHead(coarse)(x)
    exact = x @ weight.T
    assert torch.allclose(refined.topk(16).values, exact.topk(16).values, rtol=1e-5)
    assert torch.equal(refined.argmax(dim=-1), exact.argmax(dim=-1))
    assert not torch.equal(coarse(x).argmax(dim=-1), exact.argmax(dim=-1))


@pytest.mark.parametrize(
    ("architecture", "config", "model"),
    [("qwen2", Qwen2Config, Qwen2ForCausalLM), ("qwen3", Qwen3Config, Qwen3ForCausalLM)],
)
def test_other_architectures(tmp_path: Path, architecture: str, config: type, model: type) -> None:
    """Biases, head norms, and rows that are not interleaved."""
    made = build(config, model)
    write_gguf(made, tmp_path / "model.gguf", Kind.Q4_1, architecture=architecture)
    tokens = tokens_of(30)
    with torch.inference_mode():
        expected = made(torch.tensor([tokens])).logits[0]
    logits = our_logits(tmp_path / "model.gguf", DENSE, tokens)
    assert (logits - expected).abs().max() / expected.abs().max() <= 1e-4
    few = our_logits(tmp_path / "model.gguf", QUANTISED, tokens)
    assert spread(few, expected) <= 0.02


def test_broken_files_are_refused(tmp_path: Path) -> None:
    model = build(LlamaConfig, LlamaForCausalLM)
    whole = tmp_path / "whole.gguf"
    write_gguf(model, whole, Kind.Q4_1)
    data = whole.read_bytes()
    cases = {
        "empty": b"",
        "short": data[:3],
        "other": b"PK\x03\x04" + data[4:],
        "version": data[:4] + b"\x09\x00\x00\x00" + data[8:],
        "header": data[:200],
        "tensors": data[: len(data) // 2],
        "counts": data[:8] + b"\xff" * 16 + data[24:],
    }
    for name, content in cases.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match=f"{name}.gguf"):
            open_checkpoint(path)


def test_a_tensor_without_dimensions_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "flat.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros(32, np.float32))
    finish(writer)
    content = (tmp_path / "flat.gguf").read_bytes()
    name = b"token_embd.weight"
    one, none = name + struct.pack("<IQ", 1, 32), name + struct.pack("<I", 0)
    assert content.count(one) == 1
    (tmp_path / "flat.gguf").write_bytes(content.replace(one, none))
    with pytest.raises(ConfigurationError, match=r"flat\.gguf.*token_embd\.weight has no dimensions"):
        open_checkpoint(tmp_path / "flat.gguf")


def test_rows_that_super_blocks_do_not_divide_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "narrow.gguf"
    write_gguf(build(LlamaConfig, LlamaForCausalLM), path, Kind.Q4_K)
    content, name = path.read_bytes(), b"blk.1.ffn_up.weight"
    shape = struct.pack("<IQQ", 2, SIZES["hidden_size"], SIZES["intermediate_size"])
    assert content.count(name + shape) == 1
    path.write_bytes(content.replace(name + shape, name + struct.pack("<IQQ", 2, 288, 128)))
    refusal = r"narrow\.gguf.*blk\.1\.ffn_up\.weight has rows of 288, not a multiple of 256"
    with pytest.raises(ConfigurationError, match=refusal):
        open_checkpoint(path)


def test_a_matrix_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    """Also where its codes are kept, and nothing is dequantised."""
    path = tmp_path / "turned.gguf"
    write_gguf(build(LlamaConfig, LlamaForCausalLM, intermediate_size=512), path, Kind.Q6_K)
    content, name = path.read_bytes(), b"blk.1.ffn_up.weight"
    shape = struct.pack("<IQQ", 2, 256, 512)
    assert content.count(name + shape) == 1
    path.write_bytes(content.replace(name + shape, name + struct.pack("<IQQ", 2, 512, 256)))
    with pytest.raises(
        WeightMismatch, match=r"layers\.1\.mlp\.up_proj\.weight is \[256, 512\], not \[512, 256\]"
    ):
        load_model(open_checkpoint(path), QUANTISED)


def test_header_equals_the_packages_own_reader(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(build(LlamaConfig, LlamaForCausalLM), path, Kind.Q4_1)
    compare_headers(path)


@pytest.mark.soak
def test_header_of_the_default_model_equals_the_packages_own_reader(smollm2: Path) -> None:
    assert len(GgufFile(smollm2).tensors) == 272
    compare_headers(smollm2)


def compare_headers(path: Path) -> None:
    """Metadata and tensor locations are those that the gguf package finds."""
    ours, theirs = GgufFile(path), GGUFReader(path)
    assert theirs.fields and theirs.tensors
    for key, value in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == value.contents(), key
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert (entry.kind, entry.offset, entry.bytes) == (
            tensor.tensor_type,
            tensor.data_offset,
            tensor.n_bytes,
        )


def test_missing_and_unexpected_names_are_listed(tmp_path: Path) -> None:
    model = build(LlamaConfig, LlamaForCausalLM)
    path = tmp_path / "model.gguf"
    write_gguf(model, path, Kind.F32)
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(WeightMismatch) as caught:
        load_model(open_checkpoint(path), DENSE)
    assert "missing (1): model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "unexpected (1): blk.1.ffn_xx.weight" in str(caught.value)
