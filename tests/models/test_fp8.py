"""fp8 weights are codes times scales; weights without scales are rejected."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from holdfast.models import weights
from holdfast.models.checkpoint import load_model, open_checkpoint
from holdfast.models.fields import Fields
from holdfast.models.fp8 import BLOCK, Fp8Linear, Fp8Weight, joined, stays
from holdfast.models.linear import DenseLinear
from holdfast.models.quantised.forms import read_quantisation
from holdfast.models.sources import SafetensorsSource
from holdfast.models.weights import Placement, WeightMismatch, WeightReader

CPU = Placement(torch.device("cpu"), torch.float32)
INPUTS, OUTPUTS = 300, 256


def codes(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(OUTPUTS, INPUTS, generator=generator).to(torch.float8_e4m3fn)


def scales(form: str) -> torch.Tensor:
    shape = {"tensor": (), "row": (OUTPUTS, 1), "block": (2, 3)}[form]
    return torch.rand(shape, generator=torch.Generator().manual_seed(9)) + 0.5


def spread(scale: torch.Tensor) -> torch.Tensor:
    if scale.shape == (2, 3):
        scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:, :INPUTS]
    return scale.expand(OUTPUTS, INPUTS)


def reader(directory: Path, tensors: dict[str, torch.Tensor]) -> WeightReader:
    save_file(tensors, directory / "model.safetensors")
    return WeightReader(SafetensorsSource(directory), CPU)


@pytest.mark.parametrize("form", ["tensor", "row", "block"])
def test_a_projection_is_codes_times_scales(tmp_path: Path, form: str) -> None:
    suffix = "_scale_inv" if form == "block" else "_scale"
    weight, scale = codes(1), scales(form)
    made = reader(tmp_path, {"a.weight": weight, f"a.weight{suffix}": scale, "a.input_scale": torch.ones(1)})
    linear = made.linear(["a"], INPUTS, [OUTPUTS])
    made.finish()
    assert isinstance(linear, DenseLinear)
    assert torch.equal(linear.weight, weight.float() * spread(scale))


@pytest.mark.parametrize("form", ["tensor", "row", "block"])
def test_joined_weights_multiply_like_their_parts(form: str) -> None:
    parts = [Fp8Weight.of(codes(seed), scales(form) * (seed + 1)) for seed in range(2)]
    whole = joined(parts)
    assert whole is not None
    assert torch.equal(whole.dense(), torch.cat([part.dense() for part in parts]))
    x = torch.randn(3, INPUTS)
    linear = Fp8Linear(whole, None, torch.device("cpu"))
    assert linear.out_features == 2 * OUTPUTS
    assert linear.bytes < whole.codes.numel() * 1.1 + 4 * 2 * OUTPUTS + 1
    assert torch.allclose(linear(x), x @ whole.dense().T, atol=1e-4)


@pytest.mark.parametrize(
    ("capability", "kept"),
    [((7, 5), False), ((8, 0), False), ((8, 6), False), ((8, 9), True), ((10, 0), True)],
)
def test_a_gpu_that_does_not_know_such_numbers_is_not_given_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kept: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert stays(torch.device("cuda", 0)) is kept
    assert not stays(torch.device("cpu"))
    save_file({"a.weight": codes(1), "a.weight_scale_inv": scales("block")}, tmp_path / "model.safetensors")
    gpu = Placement(torch.device("cuda", 0), torch.bfloat16)
    made: list[torch.device] = []
    monkeypatch.setattr(weights, "Fp8Linear", lambda weight, bias, device: made.append(device))
    WeightReader(SafetensorsSource(tmp_path), gpu)._fp8_linear(["a.weight"], INPUTS, [OUTPUTS], None)
    assert made == ([gpu.device] if kept else [])


def test_dummy_weights_are_in_fp8_where_the_configuration_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    quantisation = read_quantisation(Fields({"quantization_config": given}, Path("config.json")), Path())
    plain = WeightReader(None, CPU, None, quantisation).linear(["a", "b"], INPUTS, [OUTPUTS, OUTPUTS])
    assert isinstance(plain, DenseLinear), "on a device without such numbers"
    monkeypatch.setattr(weights, "stays", lambda _: True)
    made = WeightReader(None, CPU, None, quantisation)
    linear = made.linear(["a", "b"], INPUTS, [OUTPUTS, OUTPUTS])
    assert isinstance(linear, Fp8Linear) and linear.out_features == 2 * OUTPUTS
    assert linear.bytes == 2 * (OUTPUTS * INPUTS + 2 * 3 * 4), "a scale for each block"
    x = torch.randn(3, INPUTS)
    assert torch.allclose(linear(x), plain(x), atol=0.2), "the same numbers, but for rounding"
    assert isinstance(made.linear(["lm_head"], INPUTS, [OUTPUTS]), DenseLinear)


def test_parts_of_different_forms_are_not_joined() -> None:
    assert joined([Fp8Weight.of(codes(1), scales("block")), Fp8Weight.of(codes(2), scales("row"))]) is None


def test_a_weight_without_its_scales_is_refused(tmp_path: Path) -> None:
    made = reader(tmp_path, {"a.weight": codes(1)})
    made.linear(["a"], INPUTS, [OUTPUTS])
    with pytest.raises(WeightMismatch, match="weight_scale_inv"):
        made.finish()


def test_scales_of_another_shape_are_refused(tmp_path: Path) -> None:
    made = reader(tmp_path, {"a.weight": codes(1), "a.weight_scale_inv": torch.ones(4, 4)})
    made.linear(["a"], INPUTS, [OUTPUTS])
    with pytest.raises(WeightMismatch, match="no scales of"):
        made.finish()


@pytest.mark.parametrize("experts", [False, True])
def test_a_model_knows_what_its_weights_are(tmp_path: Path, experts: bool) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(open_checkpoint(tmp_path), CPU, load_format="dummy")
    assert model.has_experts is experts
    assert not model.in_eight_bits
    part = next(
        block.part for block in model._blocks if isinstance(vars(block.part).get("_input"), DenseLinear)
    )
    weight = Fp8Weight.of(codes(1), scales("block"))
    vars(part)["_input"] = Fp8Linear(weight, None, torch.device("cpu"))
    assert model.in_eight_bits
