"""Checkpoints quantised by the rules of each published format, and the weights that they mean.

`publish(model, directory, form)` writes a model of transformers as others publish it: `config.json` with the
format's `quantization_config`, and safetensors with the format's tensors. Codes are packed here with plain
loops and shifts, independently of the code under test. The model's own weights are set to what was written,
in float32, so that it is the reference of what the checkpoint means.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]
"""The tensors of a module under their endings, and its weight."""

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def packed_words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unsigned codes along the last dimension as int32 words; `order` is which code each place holds."""
    count = 32 // bits
    places = order or tuple(range(count))
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // count, dtype=torch.int64)
    for place, which in enumerate(places):
        words |= codes[..., which::count].long() << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def grouped(weight: torch.Tensor, group: int | None) -> torch.Tensor:
    return weight.unflatten(-1, (-1, group or weight.shape[-1]))


def symmetric(weight: torch.Tensor, group: int | None, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Signed codes and bfloat16 scales [out, groups]."""
    parts = grouped(weight, group)
    scale = (parts.abs().amax(-1) / most).clamp(min=1e-6).to(torch.bfloat16)
    codes = (parts / scale.float()[..., None]).round().clamp(-most - 1, most)
    return codes.flatten(-2), scale


def asymmetric(weight: torch.Tensor, group: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes 0..15, float16 scales and zero points 1..15, [out, groups]."""
    parts = grouped(weight, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-6).to(torch.float16)
    zero = (-low / scale.float()).round().clamp(1, 15)
    codes = (parts / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    return codes.flatten(-2), scale, zero


def spread(values: torch.Tensor, inputs: int) -> torch.Tensor:
    return values.float().repeat_interleave(inputs // values.shape[-1], dim=-1)


def pack_quantized(
    weight: torch.Tensor, *, bits: int = 4, group: int | None = 32, zeros: bool = False, act: bool = False
) -> Written:
    outputs, inputs = weight.shape
    g_idx = shuffled_groups(inputs, group or inputs) if act else torch.arange(inputs) // (group or inputs)
    order = torch.argsort(g_idx, stable=True)
    ordered = weight[:, order]
    tensors = {"weight_shape": torch.tensor([outputs, inputs])}
    if zeros:
        codes, scale, zero = asymmetric(ordered, group)
        padded = torch.cat((zero, torch.zeros(-outputs % 8, zero.shape[1])))
        tensors["weight_zero_point"] = packed_words(padded.T, 4).T.contiguous()
        meant = (codes - spread(zero, inputs)) * spread(scale, inputs)
    else:
        half = 1 << (bits - 1)
        codes, scale = symmetric(ordered, group, half - 1)
        meant = codes * spread(scale, inputs)
        codes = codes + half
    back = torch.argsort(order)
    tensors |= {"weight_packed": packed_words(codes[:, back], bits), "weight_scale": scale}
    if act:
        tensors["weight_g_idx"] = g_idx.to(torch.int32)
    return tensors, meant[:, back]


def shuffled_groups(inputs: int, group: int) -> torch.Tensor:
    """The group of each input under act-order: as many inputs each, in an order that is not their own."""
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    return (torch.argsort(order) // group).contiguous()


def int_quantized(weight: torch.Tensor, *, whole: bool = False) -> Written:
    codes, scale = symmetric(weight.reshape(1, -1) if whole else weight, None, 127)
    codes = codes.reshape(weight.shape)
    meant = codes * scale.float()
    return {"weight": codes.to(torch.int8), "weight_scale": scale.reshape(-1) if whole else scale}, meant


def float_quantized(weight: torch.Tensor, *, block: int | None, whole: bool = False) -> Written:
    outputs, inputs = weight.shape
    rows, depth = (outputs, inputs) if whole else (1, inputs) if block is None else (block, block)
    scale = torch.zeros(-(-outputs // rows), -(-inputs // depth))
    each = torch.zeros(outputs, inputs)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            at = slice(row * rows, (row + 1) * rows), slice(column * depth, (column + 1) * depth)
            scale[row, column] = weight[at].abs().max() / 448
            each[at] = scale[row, column]
    codes = (weight / each).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale[0] if whole else scale}, codes.float() * each


def gptq(weight: torch.Tensor, *, group: int | None = 32, act: bool = False, version: int = 1) -> Written:
    inputs = weight.shape[1]
    g_idx = shuffled_groups(inputs, group or inputs) if act else torch.arange(inputs) // (group or inputs)
    order = torch.argsort(g_idx, stable=True)
    codes, scale, zero = asymmetric(weight[:, order], group)
    meant = (codes - spread(zero, inputs)) * spread(scale, inputs)
    back = torch.argsort(order)
    tensors = {
        "qweight": packed_words(codes[:, back], 4).T.contiguous(),
        "qzeros": packed_words((zero - (2 - version)).T, 4),
        "scales": scale.T.contiguous(),
        "g_idx": g_idx.to(torch.int32),
    }
    return tensors, meant[:, back]


def awq(weight: torch.Tensor, *, group: int | None = 32) -> Written:
    inputs = weight.shape[1]
    codes, scale, zero = asymmetric(weight, group)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": packed_words(codes.T, 4, order),
        "qzeros": packed_words(zero.T, 4, order),
        "scales": scale.T.contiguous(),
    }
    return tensors, (codes - spread(zero, inputs)) * spread(scale, inputs)


def nearest_e2m1(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and values of the nearest 4-bit floats."""
    index = (values.abs()[..., None] - E2M1).abs().argmin(-1)
    sign = values < 0
    return index + 8 * sign, torch.where(sign, -E2M1[index], E2M1[index])


def packed_nibbles(codes: torch.Tensor) -> torch.Tensor:
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed codes, exponents, values) along the last dimension."""
    parts = grouped(weight, 32)
    exponent = torch.floor(torch.log2(parts.abs().amax(-1))) - 2
    codes, values = nearest_e2m1(parts / torch.exp2(exponent)[..., None])
    meant = (values * torch.exp2(exponent)[..., None]).flatten(-2)
    return packed_nibbles(codes.flatten(-2)), (exponent + 127).to(torch.uint8), meant


def mxfp4_pack(weight: torch.Tensor) -> Written:
    codes, scale, meant = mxfp4(weight)
    return {"weight_packed": codes, "weight_scale": scale}, meant


def nvfp4(weight: torch.Tensor, *, modelopt: bool = False) -> Written:
    parts = grouped(weight, 16)
    factor = weight.abs().max() / (6 * 448)
    scale = (parts.abs().amax(-1) / 6 / factor).clamp(min=2**-6).to(torch.float8_e4m3fn)
    each = (scale.float() * factor)[..., None]
    codes, values = nearest_e2m1(parts / each)
    packed, meant = packed_nibbles(codes.flatten(-2)), (values * each).flatten(-2)
    if modelopt:
        tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": factor}
        return tensors | {"input_scale": torch.ones(())}, meant
    tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": (1 / factor).reshape(1)}
    return tensors | {"input_global_scale": torch.ones(1)}, meant


def compressed(layout: str, ignore: tuple[str, ...] = ("lm_head",), **weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": [*ignore, "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_GPTQ: dict[str, object] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_E2M1 = {"num_bits": 4, "type": "float", "strategy": "tensor_group"}

FORMS: dict[str, tuple[dict[str, object], Callable[[torch.Tensor], Written]]] = {
    "w4a16": (compressed("pack-quantized", symmetric=True, **_INT4), pack_quantized),
    "w4a16-zeros": (
        compressed("pack-quantized", symmetric=False, **_INT4),
        lambda weight: pack_quantized(weight, zeros=True),
    ),
    "w4a16-act-order": (
        compressed("pack-quantized", symmetric=True, actorder="group", **_INT4),
        lambda weight: pack_quantized(weight, act=True),
    ),
    "w4a16-channel": (
        compressed("pack-quantized", num_bits=4, type="int", strategy="channel", symmetric=True),
        lambda weight: pack_quantized(weight, group=None),
    ),
    "w8a16": (
        compressed("pack-quantized", num_bits=8, type="int", strategy="group", group_size=32, symmetric=True),
        lambda weight: pack_quantized(weight, bits=8),
    ),
    "w8a8": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
        int_quantized,
    ),
    "w8a8-tensor": (
        compressed("int-quantized", num_bits=8, type="int", strategy="tensor", symmetric=True),
        lambda weight: int_quantized(weight, whole=True),
    ),
    "fp8-channel": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
        lambda weight: float_quantized(weight, block=None),
    ),
    "fp8-tensor": (
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor", symmetric=True),
        lambda weight: float_quantized(weight, block=None, whole=True),
    ),
    "fp8-block": (
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        lambda weight: float_quantized(weight, block=128),
    ),
    "mxfp4": (compressed("mxfp4-pack-quantized", group_size=32, **_E2M1), mxfp4_pack),
    "nvfp4": (compressed("nvfp4-pack-quantized", group_size=16, **_E2M1), nvfp4),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.*.mlp.gate"]},
        lambda weight: nvfp4(weight, modelopt=True),
    ),
    "gptq": ({**_GPTQ, "desc_act": False}, gptq),
    "gptq-v2": (
        {**_GPTQ, "desc_act": False, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, version=2),
    ),
    "gptq-act-order": (
        {**_GPTQ, "desc_act": True, "checkpoint_format": "gptq"},
        lambda weight: gptq(weight, act=True),
    ),
    "gptq-channel": ({**_GPTQ, "group_size": -1}, lambda weight: gptq(weight, group=None)),
    "awq": (dict(_AWQ), awq),
    "awq-channel": ({**_AWQ, "group_size": -1}, lambda weight: awq(weight, group=None)),
}
"""By name: the `quantization_config`, and the function that writes one module."""

MXFP4_CONFIG: dict[str, object] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def is_linear(name: str) -> bool:
    """Whether a parameter is one of a linear module that quantisers convert."""
    return name.endswith("_proj.weight")


def experts_apart(state: Tensors) -> Tensors:
    """Stacked experts under the names of their modules, one by one; other tensors as they are."""
    apart: Tensors = {}
    for name, tensor in state.items():
        stem, _, part = name.rpartition(".")
        if not stem.endswith(".experts"):
            apart[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            if part == "gate_up_proj":
                gate, up = weight.chunk(2)
                apart[f"{stem}.{expert}.gate_proj.weight"] = gate
                apart[f"{stem}.{expert}.up_proj.weight"] = up
            else:
                apart[f"{stem}.{expert}.down_proj.weight"] = weight
    return apart


def publish(
    model: PreTrainedModel, directory: Path, form: str, dense: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """Writes a model in a form, all linear modules but those with a part of `dense` in their names.

    The model's weights become those that were written. Answers the tensors in the files.
    """
    config, write = FORMS[form]
    tensors: Tensors = {}
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    with torch.no_grad():
        for name, tensor in experts_apart(state).items():
            if not is_linear(name) or any(part in name for part in dense):
                tensors[name] = tensor.clone().contiguous()
                continue
            written, meant = write(tensor)
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{ending}": part.contiguous() for ending, part in written.items()}
            tensor.copy_(meant)
    save(model, directory, tensors, config)
    return tensors


def publish_gpt_oss(model: PreTrainedModel, directory: Path) -> Tensors:
    """Writes gpt-oss as published: the experts in MXFP4, as blocks [experts, out, in / 32, 16] and scales."""
    tensors: Tensors = {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors[name] = tensor.clone()
                continue
            codes, scales, meant = mxfp4(tensor.transpose(1, 2))
            tensors[f"{name}_blocks"] = codes.unflatten(-1, (-1, 16)).contiguous()
            tensors[f"{name}_scales"] = scales
            tensor.copy_(meant.transpose(1, 2))
    save(model, directory, tensors, MXFP4_CONFIG)
    return tensors


def save(model: PreTrainedModel, directory: Path, tensors: Tensors, config: dict[str, object]) -> None:
    save_file(tensors, directory / "model.safetensors")
    described = json.loads(model.config.to_json_string())
    described["architectures"] = [type(model).__name__]
    (directory / "config.json").write_text(json.dumps({**described, "quantization_config": config}))
