"""GGUF metadata as a Hugging Face configuration.

`describe` turns the metadata and tensor list of a file into the `Fields` that the families read, and
`open_source` maps tensor names to those of the family's checkpoints. Both are tables: a new architecture is
new rows. Called by `checkpoint`.
"""

from __future__ import annotations

import re

from torch import Tensor

from holdfast.models import gguf_hybrids, gguf_recurrent
from holdfast.models.fields import ConfigurationError, Fields, Json
from holdfast.models.gguf import Change, GgufFile, GgufSource, Stored, half_split
from holdfast.models.gguf_common import common_values, count_of_experts, split_experts

__all__ = ["GgufFile", "describe", "open_source"]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "olmo2": "Olmo3ForCausalLM",
}

_INTERLEAVED = frozenset({"llama"})
"""Architectures whose files store query and key rows in interleaved rotary order."""

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}

_OTHER_LAYER_TENSORS = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "olmo2": {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
}
"""By architecture: names that differ from the others'."""

_EXPERT_TENSORS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""The weights of all experts of a layer as one tensor."""

_NORMS_PLUS_ONE = frozenset({"gemma3"})
"""Architectures whose files have one added to the weights of norms."""

_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_FREQUENCY_FACTORS = "rope_freqs.weight"

_GEMMA_27B_LAYERS = 62
"""The Gemma 3 size whose queries are scaled by the width over the heads; files do not state the scale."""


def describe(file: GgufFile) -> Fields:
    """The configuration of the model in a file, with the keys of config.json."""
    metadata = Fields(file.metadata, file.path.name)
    kind = metadata.text("general.architecture")
    if kind in gguf_recurrent.ARCHITECTURES:
        return gguf_recurrent.describe(file, metadata, kind)
    if kind in gguf_hybrids.ARCHITECTURES:
        return gguf_hybrids.describe(file, metadata, kind)
    if kind not in _ARCHITECTURES:
        known = sorted((*_ARCHITECTURES, *gguf_recurrent.ARCHITECTURES, *gguf_hybrids.ARCHITECTURES))
        raise ConfigurationError(
            f"GGUF architecture {kind!r} is not supported; supported are {', '.join(known)}"
        )
    heads = metadata.integer(f"{kind}.attention.head_count")
    width = metadata.integer(f"{kind}.embedding_length")
    head_dim = metadata.integer(f"{kind}.attention.key_length", width // heads)
    if metadata.integer(f"{kind}.attention.value_length", head_dim) != head_dim:
        raise ConfigurationError("keys and values of different sizes are not supported")
    values = common_values(file, metadata, kind) | {
        "architectures": [_ARCHITECTURES[kind]],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer(f"{kind}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": metadata.optional_integer(f"{kind}.feed_forward_length"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "sliding_window": metadata.optional_integer(f"{kind}.attention.sliding_window", least=0),
        "rope_parameters": _rope(file, metadata, kind, head_dim),
    }
    return Fields({**values, **_more(metadata, kind, values)}, file.path.name)


def _more(metadata: Fields, kind: str, values: dict[str, Json]) -> dict[str, Json]:
    """Keys that only some architectures have."""
    if kind == "gemma3":
        rope = values["rope_parameters"]
        local: dict[str, Json] = {
            "rope_type": "default",
            "rope_theta": metadata.number(f"{kind}.rope.freq_base_swa", 10_000.0),
        }
        large = metadata.integer(f"{kind}.block_count") == _GEMMA_27B_LAYERS
        width, heads = metadata.integer(f"{kind}.embedding_length"), values["num_attention_heads"]
        assert isinstance(heads, int)
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": width / heads if large else values["head_dim"],
            "rope_parameters": {"full_attention": rope, "sliding_attention": local},
            "final_logit_softcapping": metadata.optional_number(f"{kind}.final_logit_softcapping"),
        }
    if kind == "olmo2":
        return _olmo_layers(metadata, kind, values)
    if kind not in ("qwen3moe", "gpt-oss"):
        return {}
    dense = metadata.optional_integer(f"{kind}.feed_forward_length")
    inner = metadata.integer(f"{kind}.expert_feed_forward_length", dense)
    count = count_of_experts(metadata, kind)
    return {
        "num_experts": count,
        "num_local_experts": count,
        "num_experts_per_tok": metadata.integer(f"{kind}.expert_used_count"),
        "moe_intermediate_size": inner,
        "intermediate_size": inner if kind == "gpt-oss" else values["intermediate_size"] or inner,
        "norm_topk_prob": True,
    }


def _olmo_layers(metadata: Fields, kind: str, values: dict[str, Json]) -> dict[str, Json]:
    """Olmo 2 has full attention alone; files of Olmo 3 say which layers have a window."""
    count = metadata.integer(f"{kind}.block_count")
    sliding: list[bool] = [False] * count
    if values["sliding_window"]:
        pattern = metadata.raw(f"{kind}.attention.sliding_window_pattern")
        if isinstance(pattern, list) and len(pattern) == count:
            sliding = [bool(each) for each in pattern]
        elif pattern is None or isinstance(pattern, int):
            period = metadata.integer(f"{kind}.attention.sliding_window_pattern", 4)
            sliding = [(index + 1) % period != 0 for index in range(count)]
        else:
            raise ConfigurationError(
                f"{metadata.where}: the pattern of windows does not describe {count} layers"
            )
    kinds: list[Json] = ["sliding_attention" if each else "full_attention" for each in sliding]
    rope = values["rope_parameters"]
    assert isinstance(rope, dict)
    theta = metadata.number(f"{kind}.rope.freq_base_swa", metadata.number(f"{kind}.rope.freq_base", 10_000.0))
    local: dict[str, Json] = {"rope_type": "default", "rope_theta": theta}
    return {"layer_types": kinds, "rope_parameters": {"full_attention": rope, "sliding_attention": local}}


def _rope(file: GgufFile, metadata: Fields, kind: str, head_dim: int) -> dict[str, Json]:
    rotated = metadata.integer(f"{kind}.rope.dimension_count", head_dim)
    parameters: dict[str, Json] = {
        "rope_type": "default",
        "rope_theta": metadata.number(f"{kind}.rope.freq_base", 10_000.0),
        "partial_rotary_factor": rotated / head_dim,
    }
    scaling = metadata.text(f"{kind}.rope.scaling.type", "none")
    if _FREQUENCY_FACTORS in file.tensors:
        source = GgufSource(file, {_FREQUENCY_FACTORS: Stored((_FREQUENCY_FACTORS,))})
        factors: list[Json] = list(source.read(_FREQUENCY_FACTORS).tolist())
        parameters |= {"rope_type": "factors", "factors": factors}
    elif scaling != "none":
        parameters |= {
            "rope_type": scaling,
            "factor": metadata.number(f"{kind}.rope.scaling.factor", 1.0),
            "original_max_position_embeddings": metadata.optional_integer(
                f"{kind}.rope.scaling.original_context_length"
            ),
            "truncate": kind != "gpt-oss",
        }
    return parameters


def open_source(file: GgufFile, fields: Fields) -> GgufSource:
    """The file's tensors under the names of the family's checkpoints."""
    kind = Fields(file.metadata, file.path.name).text("general.architecture")
    if kind in gguf_recurrent.ARCHITECTURES:
        return gguf_recurrent.open_source(file)
    if kind in gguf_hybrids.ARCHITECTURES:
        return gguf_hybrids.open_source(file, fields, kind)
    heads = {
        "self_attn.q_proj": fields.integer("num_attention_heads"),
        "self_attn.k_proj": fields.integer("num_key_value_heads"),
    }
    parts = _LAYER_TENSORS | _OTHER_LAYER_TENSORS.get(kind, {})
    tensors: dict[str, Stored] = {}
    for name, entry in file.tensors.items():
        if name == _FREQUENCY_FACTORS:
            continue
        layer = _LAYER.fullmatch(name)
        if layer is not None and layer[2] in _EXPERT_TENSORS:
            at, part = f"model.layers.{layer[1]}.mlp.experts", _EXPERT_TENSORS[layer[2]]
            if layer[3] == "bias":
                tensors[f"{at}.{part}.bias"] = Stored((name,))
                continue
            tensors |= split_experts(name, entry, fields.integer("num_experts", 0, least=0), at, part)
            continue
        order: Tensor | None = None
        if layer is not None and layer[2] == "attn_sinks":
            ours = f"model.layers.{layer[1]}.self_attn.sinks"
        elif layer is not None and layer[2] in parts:
            part = parts[layer[2]]
            ours = f"model.layers.{layer[1]}.{part}.{layer[3]}"
            if kind in _INTERLEAVED and part in heads and entry.shape[0] % (2 * heads[part]) == 0:
                order = half_split(entry.shape[0], heads[part])
        else:
            stem, _, ending = name.rpartition(".")
            ours = f"{_TENSORS[stem]}.{ending}" if stem in _TENSORS else name
        change = Change(offset=-1.0) if kind in _NORMS_PLUS_ONE and "norm" in ours else Change()
        tensors[ours] = Stored((name,), order=order, change=change)
    return GgufSource(file, tensors)
