"""GGUF files of hybrid models: `granite`, `granitehybrid`, `falcon-h1` and `qwen3next`.

Each architecture is a `Hybrid`: a function for its configuration, and one for where the file has the tensors.
Files of Falcon-H1 have the model's multipliers in the weights. Files of Granite have gate and up projections
apart that checkpoints join. Files of Qwen3-Next have the projections of the delta rule by part instead of by
head. Called by `gguf_metadata`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.models.fields import ConfigurationError, Fields, Json
from holdfast.models.gguf import Change, GgufFile, GgufSource, Stored, half_split
from holdfast.models.gguf_common import change_of, common_values, count_of_experts, split_experts

__all__ = ["ARCHITECTURES", "describe", "open_source"]

Values = dict[str, Json]
Tensors = dict[str, Stored]

_LAYER = re.compile(r"blk\.(\d+)\.([a-z0-9_.]+)")

_ATTENTION = {
    f"{theirs}.{ending}": f"self_attn.{ours}.{ending}"
    for theirs, ours in {
        "attn_q": "q_proj",
        "attn_k": "k_proj",
        "attn_v": "v_proj",
        "attn_output": "o_proj",
        "attn_q_norm": "q_norm",
        "attn_k_norm": "k_norm",
    }.items()
    for ending in ("weight", "bias")
}
_SCAN = {
    "ssm_in.weight": "in_proj.weight",
    "ssm_in.bias": "in_proj.bias",
    "ssm_conv1d.weight": "conv1d.weight",
    "ssm_conv1d.bias": "conv1d.bias",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm.weight": "norm.weight",
    "ssm_out.weight": "out_proj.weight",
    "ssm_out.bias": "out_proj.bias",
}
_MLP = {
    f"ffn_{part}.{ending}": f"{part}_proj.{ending}"
    for part in ("gate", "up", "down")
    for ending in ("weight", "bias")
}


def _below(prefix: str, names: dict[str, str]) -> dict[str, str]:
    return {theirs: f"{prefix}.{ours}" for theirs, ours in names.items()}


@dataclass(frozen=True)
class Hybrid:
    """An architecture: its name in config.json, its configuration, its names, and tensors that need more."""

    name: str
    configure: Callable[[GgufFile, Fields, str], Values]
    names: dict[str, str]
    """Tensors of a layer, in the file and in the checkpoint."""
    norm: str = "model.norm.weight"
    more: Callable[[GgufFile, Fields, str], Tensors] = lambda _file, _fields, _layer: {}
    """Tensors of one layer that are joined, split or reordered."""
    norms_plus_one: bool = False
    """Whether the file has one added to the weights of norms, apart from those inside of recurrent layers."""
    interleaved: bool = False
    """Whether queries and keys are in interleaved rotary order."""


def describe(file: GgufFile, metadata: Fields, kind: str) -> Fields:
    """The configuration of the model in a file, with the keys of config.json."""
    hybrid = ARCHITECTURES[kind]
    values = common_values(file, metadata, kind)
    heads = max(1, *metadata.integers(f"{kind}.attention.head_count"), 1)
    kv_heads = max(1, *metadata.integers(f"{kind}.attention.head_count_kv"), 1)
    width = metadata.integer(f"{kind}.embedding_length")
    values |= {
        "architectures": [hybrid.name],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": metadata.integer(f"{kind}.attention.key_length", max(1, width // heads)),
        "intermediate_size": metadata.optional_integer(f"{kind}.feed_forward_length"),
        "hidden_act": "silu",
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
    }
    return Fields(values | hybrid.configure(file, metadata, kind), file.path.name)


def open_source(file: GgufFile, fields: Fields, kind: str) -> GgufSource:
    """The file's tensors under the names of the family's checkpoints."""
    hybrid, layers = ARCHITECTURES[kind], fields.integer("num_hidden_layers")
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": hybrid.norm,
        "output.weight": "lm_head.weight",
    }
    heads = {"attn_q": fields.integer("num_attention_heads"), "attn_k": fields.integer("num_key_value_heads")}
    tensors: Tensors = {}
    for layer in range(layers):
        tensors |= hybrid.more(file, fields, str(layer))
    used = {part for stored in tensors.values() for part in stored.parts}
    for name, entry in file.tensors.items():
        found = _LAYER.fullmatch(name)
        if name in used or name == "rope_freqs.weight":
            continue
        if found is not None and int(found[1]) >= layers:
            tensors[f"mtp.{name}"] = Stored((name,))  # Multi-token prediction, which is not used.
            continue
        if found is None or found[2] not in hybrid.names:
            tensors[whole.get(name, name)] = Stored((name,), change=_norm_change(hybrid, name))
            continue
        count, rows = heads.get(found[2].partition(".")[0]), entry.shape[0]
        order: Tensor | None = None
        if hybrid.interleaved and count is not None and rows % (2 * count) == 0:
            order = half_split(rows, count)
        change = change_of(found[2], entry) if found[2].startswith("ssm_") else _norm_change(hybrid, name)
        tensors[f"model.layers.{found[1]}.{hybrid.names[found[2]]}"] = Stored((name,), None, order, change)
    return GgufSource(file, tensors)


def _norm_change(hybrid: Hybrid, name: str) -> Change:
    return Change(offset=-1.0) if hybrid.norms_plus_one and "norm" in name else Change()


def _rope(metadata: Fields, kind: str) -> Values:
    return {"rope_type": "default", "rope_theta": metadata.number(f"{kind}.rope.freq_base", 10_000.0)}


def _mamba2(file: GgufFile, metadata: Fields, kind: str) -> Values:
    """Sizes of Mamba2 layers as Bamba's relatives call them."""
    heads = metadata.integer(f"{kind}.ssm.time_step_rank")
    inner = metadata.integer(f"{kind}.ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": max(1, inner // heads),
        "mamba_expand": max(1, inner // metadata.integer(f"{kind}.embedding_length")),
        "mamba_d_state": metadata.integer(f"{kind}.ssm.state_size"),
        "mamba_n_groups": metadata.integer(f"{kind}.ssm.group_count"),
        "mamba_d_conv": metadata.integer(f"{kind}.ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in file.tensors),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in file.tensors),
    }


# --- Falcon-H1 ------------------------------------------------------------------------------------


def _falcon(file: GgufFile, metadata: Fields, kind: str) -> Values:
    return _mamba2(file, metadata, kind) | {
        "mamba_d_ssm": metadata.integer(f"{kind}.ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "mamba_norm_before_gate": False,
        "projectors_bias": "blk.0.ssm_out.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "rope_parameters": _rope(metadata, kind),
    }


# --- Granite --------------------------------------------------------------------------------------


def _granite(file: GgufFile, metadata: Fields, kind: str) -> Values:
    count = count_of_experts(metadata, kind)
    gate = file.tensors.get("blk.0.ffn_gate_shexp.weight" if count else "blk.0.ffn_gate.weight")
    if gate is None:
        raise ConfigurationError(
            f"{metadata.where}: models of Granite without a shared MLP are not supported"
        )
    layers, kv_heads = _granite_layers(metadata, kind)
    rotated = metadata.flag(f"{kind}.rope.scaling.finetuned", True)
    heads = max(1, *metadata.integers(f"{kind}.attention.head_count"), 1)
    head_dim = metadata.integer(f"{kind}.embedding_length") // heads
    scan = {} if "linear_attention" not in layers else _mamba2(file, metadata, kind)
    return {
        **scan,
        "layer_types": list(layers),
        "num_key_value_heads": kv_heads,
        "num_local_experts": count,
        "num_experts_per_tok": metadata.integer(f"{kind}.expert_used_count", 1, least=0) or 1,
        "shared_intermediate_size": gate.shape[0],
        "position_embedding_type": "rope" if rotated else "nope",
        "rope_parameters": _rope(metadata, kind),
        "attention_multiplier": metadata.number(f"{kind}.attention.scale", max(1, head_dim) ** -0.5),
        "embedding_multiplier": metadata.number(f"{kind}.embedding_scale", 1.0),
        "residual_multiplier": metadata.number(f"{kind}.residual_scale", 1.0),
        "logits_scaling": metadata.number(f"{kind}.logit_scale", 1.0),
    }


def _granite_layers(metadata: Fields, kind: str) -> tuple[list[str], int]:
    """The kinds of the layers, which have no key heads where they are recurrent, and the number of those."""
    count = metadata.integer(f"{kind}.block_count")
    kv_heads = metadata.integers(f"{kind}.attention.head_count_kv")
    if len(kv_heads) == 1:
        kv_heads *= count
    if len(kv_heads) != count:
        raise ConfigurationError(f"{metadata.where}: head counts do not describe {count} layers")
    kinds = ["full_attention" if heads else "linear_attention" for heads in kv_heads]
    return kinds, max(1, *kv_heads, 1)


def _granite_joined(file: GgufFile, fields: Fields, layer: str) -> Tensors:
    """Gate and up projections are one matrix in checkpoints; experts are read one by one."""
    at, blk = f"model.layers.{layer}.", f"blk.{layer}."
    count = fields.integer("num_local_experts", 0, least=0)
    ending = "_shexp" if count else ""
    wanted = {
        f"{at}shared_mlp.input_linear.weight": (f"ffn_gate{ending}", f"ffn_up{ending}"),
        f"{at}shared_mlp.output_linear.weight": (f"ffn_down{ending}",),
        f"{at}block_sparse_moe.router.layer.weight": ("ffn_gate_inp",),
    }
    named = {ours: tuple(f"{blk}{part}.weight" for part in parts) for ours, parts in wanted.items()}
    tensors = {
        ours: Stored(parts) for ours, parts in named.items() if all(part in file.tensors for part in parts)
    }
    for part in ("gate", "up", "down"):
        name = f"{blk}ffn_{part}_exps.weight"
        entry = file.tensors.get(name)
        if entry is not None:
            tensors |= split_experts(name, entry, count, f"{at}block_sparse_moe.experts", f"{part}_proj")
    return tensors


# --- Qwen3-Next -----------------------------------------------------------------------------------


def _qwen3_next(_file: GgufFile, metadata: Fields, kind: str) -> Values:
    heads = metadata.integer(f"{kind}.ssm.time_step_rank")
    head_dim = metadata.integer(f"{kind}.attention.key_length")
    rotated = metadata.integer(f"{kind}.rope.dimension_count", head_dim)
    ahead = metadata.integer(f"{kind}.nextn_predict_layers", 0, least=0)
    inner = metadata.integer(f"{kind}.expert_feed_forward_length")
    return {
        "num_hidden_layers": max(1, metadata.integer(f"{kind}.block_count") - ahead),
        "linear_num_key_heads": metadata.integer(f"{kind}.ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.integer(f"{kind}.ssm.state_size"),
        "linear_value_head_dim": max(1, metadata.integer(f"{kind}.ssm.inner_size") // heads),
        "linear_conv_kernel_dim": metadata.integer(f"{kind}.ssm.conv_kernel"),
        "full_attention_interval": metadata.integer(f"{kind}.full_attention_interval", 4),
        "rope_parameters": _rope(metadata, kind) | {"partial_rotary_factor": rotated / head_dim},
        "num_experts": count_of_experts(metadata, kind),
        "num_experts_per_tok": metadata.integer(f"{kind}.expert_used_count"),
        "moe_intermediate_size": inner,
        "intermediate_size": metadata.integer(f"{kind}.feed_forward_length", inner),
        "shared_expert_intermediate_size": metadata.integer(
            f"{kind}.expert_shared_feed_forward_length", inner
        ),
        "norm_topk_prob": True,
    }


def _qwen3_next_parts(file: GgufFile, fields: Fields, layer: str) -> Tensors:
    """Experts one by one, the shared expert's gate as a matrix, and the delta rule's rows by head."""
    at, blk = f"model.layers.{layer}.", f"blk.{layer}."
    count = fields.integer("num_experts", 0, least=0)
    tensors: Tensors = {}
    for part in ("gate", "up", "down"):
        if entry := file.tensors.get(f"{blk}ffn_{part}_exps.weight"):
            name = f"{blk}ffn_{part}_exps.weight"
            tensors |= split_experts(name, entry, count, f"{at}mlp.experts", f"{part}_proj")
    if entry := file.tensors.get(f"{blk}ffn_gate_inp_shexp.weight"):
        row = Change(shape=(1, entry.shape[-1]))
        tensors[f"{at}mlp.shared_expert_gate.weight"] = Stored(
            (f"{blk}ffn_gate_inp_shexp.weight",), change=row
        )
    parts = (f"{blk}attn_qkv.weight", f"{blk}attn_gate.weight")
    if all(part in file.tensors for part in parts):
        order = _rows_by_head(fields)
        if sum(file.tensors[part].shape[0] for part in parts) == len(order):
            tensors[f"{at}linear_attn.in_proj_qkvz.weight"] = Stored(parts, order=order)
    return tensors


def _rows_by_head(fields: Fields) -> Tensor:
    """The order of query, key, value and gate rows by key head, from their order by part."""
    heads = fields.integer("linear_num_key_heads")
    keys = heads * fields.integer("linear_key_head_dim")
    values = fields.integer("linear_num_value_heads") * fields.integer("linear_value_head_dim")
    rows = torch.arange(2 * keys + 2 * values).split([keys, keys, values, values])
    return torch.cat([part.view(heads, -1) for part in rows], dim=1).reshape(-1)


_GRANITE_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **_ATTENTION,
    **_below("mamba", _SCAN),
}
_GRANITE = Hybrid(
    "GraniteMoeHybridForCausalLM", _granite, _GRANITE_NAMES, more=_granite_joined, interleaved=True
)

ARCHITECTURES = {
    "granite": _GRANITE,
    "granitehybrid": _GRANITE,
    "falcon-h1": Hybrid(
        "FalconH1ForCausalLM",
        _falcon,
        {
            "attn_norm.weight": "input_layernorm.weight",
            "ffn_norm.weight": "pre_ff_layernorm.weight",
            **_ATTENTION,
            **_below("mamba", _SCAN),
            **_below("feed_forward", _MLP),
        },
        norm="model.final_layernorm.weight",
    ),
    "qwen3next": Hybrid(
        "Qwen3NextForCausalLM",
        _qwen3_next,
        {
            "attn_norm.weight": "input_layernorm.weight",
            "post_attention_norm.weight": "post_attention_layernorm.weight",
            **_ATTENTION,
            **_below("linear_attn", _SCAN),
            "ssm_in.weight": "linear_attn.in_proj_qkvz.weight",
            "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
            "ffn_gate_inp.weight": "mlp.gate.weight",
            **{
                f"ffn_{part}_shexp.weight": f"mlp.shared_expert.{part}_proj.weight"
                for part in ("gate", "up", "down")
            },
        },
        more=_qwen3_next_parts,
        norms_plus_one=True,
    ),
}
