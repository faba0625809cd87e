"""Quantised checkpoints as others publish them: what they mean, and which are refused."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from holdfast.kernels.quantised import QuantisedWeight
from holdfast.kernels.torch import quantised as reference_products
from holdfast.models.checkpoint import choose_placement, load_model, open_checkpoint
from holdfast.models.fields import ConfigurationError, Fields
from holdfast.models.model import Model
from holdfast.models.quantised import products
from holdfast.models.quantised.forms import read_quantisation
from holdfast.models.quantised.reading import read_module
from holdfast.models.weights import Placement
from tests.models.paged import generate
from tests.models.published import FORMS, MXFP4_CONFIG, compressed, publish, publish_gpt_oss, save
from tests.models.small_published import build, prompt

CPU = Placement(torch.device("cpu"), torch.float32)
GENERATED = 12


def answer(model: PreTrainedModel) -> tuple[torch.Tensor, list[int]]:
    """Logits of every position and greedy tokens, by transformers."""
    inputs = torch.tensor([prompt()])
    with torch.inference_mode():
        made = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=GENERATED,
            do_sample=False,
            pad_token_id=0,
        )[0]
        return model(made[None, :-1], use_cache=False).logits[0], made[len(prompt()) :].tolist()


def ours(model: Model) -> tuple[torch.Tensor, list[int]]:
    logits, tokens = generate(model, [prompt()], page_size=16, chunk=7, count=GENERATED)
    return logits[0], tokens[0]


def agree(directory: Path, reference: PreTrainedModel) -> None:
    """In float32 all is equal; with weights as they are stored, the logits of the prompt are near."""
    expected, tokens = answer(reference)
    assert len(set(tokens)) >= 4
    checkpoint = open_checkpoint(directory)
    logits, found = ours(load_model(checkpoint, CPU))
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-4
    assert found == tokens
    kept = load_model(checkpoint, choose_placement(checkpoint, torch.device("cpu")))
    near, _ = ours(kept)
    count = len(prompt())
    difference = float((near[:count] - expected[:count]).norm() / expected[:count].norm())
    assert difference < NEAR


NEAR = 0.1
"""How far the C kernels' 8-bit activations may move the logits of these models, relative to their norm."""


@pytest.mark.parametrize("form", FORMS)
def test_a_dense_model_means_what_its_format_says(tmp_path: Path, form: str) -> None:
    reference = build("llama")
    publish(reference, tmp_path, form)
    agree(tmp_path, reference)


@pytest.mark.parametrize("form", ["w4a16", "gptq-act-order", "nvfp4", "fp8-block"])
def test_experts_stored_one_by_one(tmp_path: Path, form: str) -> None:
    reference = build("qwen3-moe")
    publish(reference, tmp_path, form)
    agree(tmp_path, reference)


def test_gpt_oss_as_published(tmp_path: Path) -> None:
    reference = build("gpt-oss")
    publish_gpt_oss(reference, tmp_path)
    agree(tmp_path, reference)


def test_modules_that_stay_dense_and_tied_heads(tmp_path: Path) -> None:
    """A layer that the quantiser ignored, and parts of a fused projection that it ignored."""
    reference = build("qwen3")
    publish(reference, tmp_path, "w4a16-act-order", dense=("layers.0", "k_proj"))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["ignore"] += ["re:.*layers.0.*", "re:.*k_proj"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    agree(tmp_path, reference)


@pytest.mark.parametrize("form", ["gptq-act-order", "nvfp4"])
def test_without_c_kernels_products_dequantise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Piece by piece, with the weights kept in their codes: exact, and a fraction of the dense bytes."""
    monkeypatch.setattr(products, "available", lambda: False)
    monkeypatch.setattr(reference_products, "PIECE", 3000)
    reference = build("qwen3-moe")
    publish(reference, tmp_path, form)
    checkpoint = open_checkpoint(tmp_path)
    model = load_model(checkpoint, choose_placement(checkpoint, torch.device("cpu")))
    parts = [vars(block.part) for block in model._blocks]
    linears = [each for part in parts for each in part.values() if isinstance(each, products.QuantisedLinear)]
    assert len(linears) == 4
    assert all(4 * each.bytes < 2.1 * each.weight.outputs * each.weight.inputs * 4 for each in linears)
    experts = [part["_weights"] for part in parts if "_weights" in part]
    assert len(experts) == 2 and all(isinstance(each.inner, QuantisedWeight) for each in experts)
    logits, tokens = ours(model)
    expected, wanted = answer(reference)
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-4
    assert tokens == wanted


@pytest.mark.parametrize("form", ["w4a16", "gptq-act-order", "w8a8", "mxfp4"])
def test_packed_weights_are_those_of_the_checkpoint(form: str) -> None:
    """The C kernels' matrices hold the same numbers: scales of 8 significant bits fit half precision."""
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(4)) * 0.1
    read = stored(form, weight)
    matrix = products.packed(read, None)
    assert matrix is not None
    order = torch.arange(96) if read.permutation is None else read.permutation.long()
    expected = reference_products.dequantise(read, torch.float32)[:, order]
    found = matrix.rows(torch.arange(24))
    step = (expected.max() - expected.min()) / 15
    # Zero points times scales have more bits than half precision; all else is exact.
    assert float((found - expected).abs().max()) <= (0.005 * step if read.zeros is not None else 0.0)


def stored(form: str, weight: torch.Tensor) -> QuantisedWeight:
    """A weight as it is read from a module in a form."""
    config, write = FORMS[form]
    written, _ = write(weight)
    tensors = {f"a.{ending}": tensor for ending, tensor in written.items()}
    quantisation = read_quantisation(Fields({"quantization_config": config}, "config.json"), Path("x"))
    assert quantisation is not None
    form_of = quantisation.form("a")
    assert form_of is not None
    found = read_module(Kept(tensors), "a", form_of, *weight.shape)
    assert found is not None
    return found


class Kept:
    """Tensors in memory; nothing may be missing."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def has(self, name: str) -> bool:
        return name in self._tensors

    def part(
        self, name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]
    ) -> torch.Tensor | None:
        tensor = self._tensors[name]
        assert tensor.shape in shapes and tensor.dtype in dtypes
        return tensor

    def reject(self, problem: str) -> None:
        raise AssertionError(problem)


def test_biases_that_a_quantiser_added(tmp_path: Path) -> None:
    """GPTQ checkpoints may have biases where the family has none; they are added."""
    reference = build("llama")
    tensors = publish(reference, tmp_path, "gptq")
    name = "model.layers.1.self_attn.v_proj"
    bias = torch.linspace(-1, 1, 32)
    save_file({**tensors, f"{name}.bias": bias}, tmp_path / "model.safetensors")
    module = reference.get_submodule(name)
    module.bias = torch.nn.Parameter(bias)
    agree(tmp_path, reference)


def test_scales_of_the_kv_cache_are_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = build("llama")
    tensors = publish(reference, tmp_path, "fp8-tensor")
    more = {
        f"model.layers.{layer}.self_attn.{part}_scale": torch.ones(1) for layer in range(2) for part in "kv"
    }
    save_file({**tensors, **more}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.INFO, "holdfast.models"):
        load_model(open_checkpoint(tmp_path), CPU)
    assert "scales of a quantised KV cache" in caplog.text


@pytest.mark.parametrize("form", ["w4a16-zeros", "w8a8", "fp8-block", "gpt-oss"])
def test_dummy_weights_have_the_form_of_the_checkpoint(tmp_path: Path, form: str) -> None:
    model = build("gpt-oss" if form == "gpt-oss" else "qwen3-moe")
    save(model, tmp_path, {}, MXFP4_CONFIG if form == "gpt-oss" else FORMS[form][0])
    checkpoint = open_checkpoint(tmp_path)
    placement = Placement(torch.device("cpu"), torch.float32, quantised=True)
    made = load_model(checkpoint, placement, load_format="dummy")
    logits, tokens = ours(made)
    assert torch.isfinite(logits).all() and 0.01 < float(logits.std()) < 100 and len(set(tokens)) > 1
    experts = [vars(block.part)["_weights"] for block in made._blocks if "_weights" in vars(block.part)]
    assert experts and not any(isinstance(each.inner, torch.Tensor) for each in experts)


def refused(directory: Path, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        load_model(open_checkpoint(directory), CPU)
    kept = Placement(torch.device("cpu"), torch.float32, quantised=True)
    with pytest.raises(ConfigurationError, match=match):
        load_model(open_checkpoint(directory), kept)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("form", "ending"),
    [
        ("w4a16", "weight_packed"),
        ("w4a16", "weight_scale"),
        ("w4a16-zeros", "weight_zero_point"),
        ("w4a16-act-order", "weight_g_idx"),
        ("w8a8", "weight_scale"),
        ("fp8-channel", "weight_scale"),
        ("nvfp4", "weight_global_scale"),
        ("modelopt", "weight_scale_2"),
        ("gptq", "qzeros"),
        ("gptq-act-order", "g_idx"),
        ("awq", "scales"),
    ],
)
def test_a_missing_part_is_refused_by_its_name(tmp_path: Path, form: str, ending: str) -> None:
    tensors = publish(build("llama"), tmp_path, form)
    del tensors[f"{Q}.{ending}"]
    save_file(tensors, tmp_path / "model.safetensors")
    refused(
        tmp_path, rf"missing \(\d+\): {Q}.weight_scale" if form == "fp8-channel" else f"missing.*{Q}.{ending}"
    )


@pytest.mark.parametrize("form", ["w4a16", "w8a8", "nvfp4", "gptq", "awq", "fp8-channel", "mxfp4"])
def test_a_truncated_part_is_refused_by_its_name(tmp_path: Path, form: str) -> None:
    tensors = publish(build("llama"), tmp_path, form)
    scale = next(name for name in tensors if name.startswith(Q) and name.endswith(("scale", "scales")))
    tensors[scale] = tensors[scale][:-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, f"of another shape.*{scale}")


@pytest.mark.parametrize(
    ("form", "name", "value", "match"),
    [
        ("w4a16", "weight_packed", torch.zeros(64, 8, dtype=torch.int64), "is int64, not int32"),
        ("w4a16", "weight_scale", torch.zeros(64, 2, dtype=torch.int32), "is int32, not float16"),
        ("w4a16", "weight_shape", torch.tensor([64, 32]), r"says \[64, 32\], not \[64, 64\]"),
        ("gptq-act-order", "g_idx", torch.zeros(64, dtype=torch.int32), "does not give 32 inputs"),
        ("mxfp4", "weight_scale", torch.full((64, 2), 255, dtype=torch.uint8), "has exponents of 255"),
        ("nvfp4", "weight_global_scale", torch.zeros(1), "is 0.0, not a number above zero"),
    ],
)
def test_a_wrong_part_is_refused_by_its_name(
    tmp_path: Path, form: str, name: str, value: torch.Tensor, match: str
) -> None:
    tensors = publish(build("llama"), tmp_path, form)
    save_file({**tensors, f"{Q}.{name}": value}, tmp_path / "model.safetensors")
    refused(tmp_path, f"{Q}.{name} {match}")


@pytest.mark.parametrize(
    ("group", "match"), [(64, f"of another shape.*{Q}.weight_scale"), (48, "groups of 48 do not divide")]
)
def test_a_wrong_group_size_is_refused(tmp_path: Path, group: int, match: str) -> None:
    publish(build("llama"), tmp_path, "w4a16")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = group
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, match)


def test_blocks_of_experts_are_refused_by_their_names(tmp_path: Path) -> None:
    tensors = publish_gpt_oss(build("gpt-oss"), tmp_path)
    name = "model.layers.1.mlp.experts.down_proj"
    save_file({**tensors, f"{name}_blocks": tensors[f"{name}_blocks"][:3]}, tmp_path / "model.safetensors")
    refused(tmp_path, f"of another shape.*{name}_blocks")
    del tensors[f"{name}_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, f"missing.*{name}_scales")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes, which is not supported; it is made while"),
        ({"quant_method": "aqlm"}, "aqlm, which is not supported; give a checkpoint in 16 bits"),
        ({}, "unknown, which is not supported"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "'bits' of 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, "is not a regular expression"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 33}, "an odd number"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "'zero_point' of false"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "'weight_block_size'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'quant_algo' of W4A8_AWQ"),
        (compressed("marlin-24", num_bits=4, type="int", strategy="group", group_size=32), "marlin-24 with"),
        (
            compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
            "asymmetric",
        ),
        (
            {**compressed("pack-quantized"), "sparsity_config": {"format": "sparse-24-bitmask"}},
            "a sparse checkpoint",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_methods_are_refused_by_name(tmp_path: Path, config: dict[str, object], match: str) -> None:
    save(build("llama"), tmp_path, {}, config)
    refused(tmp_path, match)
