"""GGUF files of models with one part per layer: metadata and tensor names of `mamba2` and `nemotron_h`.

Called by `gguf_metadata`.
"""

from __future__ import annotations

import re

from holdfast.models.fields import ConfigurationError, Fields, Json
from holdfast.models.gguf import GgufFile, GgufSource, Stored
from holdfast.models.gguf_common import change_of, common_values

ARCHITECTURES = {"mamba2": "Mamba2ForCausalLM", "nemotron_h": "NemotronHForCausalLM"}

_TENSORS = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}

_LAYER_TENSORS = {
    "attn_norm.weight": "norm.weight",
    "ssm_in.weight": "mixer.in_proj.weight",
    "ssm_in.bias": "mixer.in_proj.bias",
    "ssm_conv1d.weight": "mixer.conv1d.weight",
    "ssm_conv1d.bias": "mixer.conv1d.bias",
    "ssm_dt.bias": "mixer.dt_bias",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_norm.weight": "mixer.norm.weight",
    "ssm_out.weight": "mixer.out_proj.weight",
    "ssm_out.bias": "mixer.out_proj.bias",
    "attn_q.weight": "mixer.q_proj.weight",
    "attn_k.weight": "mixer.k_proj.weight",
    "attn_v.weight": "mixer.v_proj.weight",
    "attn_output.weight": "mixer.o_proj.weight",
    "ffn_up.weight": "mixer.up_proj.weight",
    "ffn_up.bias": "mixer.up_proj.bias",
    "ffn_down.weight": "mixer.down_proj.weight",
    "ffn_down.bias": "mixer.down_proj.bias",
}

_LAYER = re.compile(r"blk\.(\d+)\.([a-z0-9_.]+)")


def describe(file: GgufFile, metadata: Fields, kind: str) -> Fields:
    """The configuration of the model in a file, with the keys of config.json."""
    rank = metadata.integer(f"{kind}.ssm.time_step_rank")
    head_dim = metadata.integer(f"{kind}.ssm.inner_size") // rank
    names = set(file.tensors)
    values = common_values(file, metadata, kind) | {
        "architectures": [ARCHITECTURES[kind]],
        "layer_norm_epsilon": metadata.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        "n_groups": metadata.integer(f"{kind}.ssm.group_count"),
        "conv_kernel": metadata.integer(f"{kind}.ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in names),
        "use_bias": any(name.endswith(".ssm_in.bias") for name in names),
    }
    state = metadata.integer(f"{kind}.ssm.state_size")
    if kind == "mamba2":
        values |= {"num_heads": rank, "head_dim": head_dim, "state_size": state}
    else:
        values |= {"mamba_num_heads": rank, "mamba_head_dim": head_dim, "ssm_state_size": state}
        values |= _layers(metadata, kind, names)
    return Fields(values, file.path.name)


def _layers(metadata: Fields, kind: str, names: set[str]) -> dict[str, Json]:
    """The kinds of the layers of Nemotron-H, and the sizes of attention and MLPs."""
    count = metadata.integer(f"{kind}.block_count")
    kv_heads = metadata.integers(f"{kind}.attention.head_count_kv")
    widths = metadata.integers(f"{kind}.feed_forward_length")
    if not len(kv_heads) == len(widths) == count:
        raise ConfigurationError(
            f"{metadata.where}: head counts and MLP widths do not describe {count} layers"
        )
    if any(name.endswith("_exps.weight") for name in names):
        raise ConfigurationError("GGUF files of Nemotron-H with experts are not supported")
    kinds: list[Json] = [
        "full_attention" if heads else "mlp" if width else "linear_attention"
        for heads, width in zip(kv_heads, widths, strict=True)
    ]
    heads = max(1, *metadata.integers(f"{kind}.attention.head_count"), 1)
    width = metadata.integer(f"{kind}.embedding_length")
    return {
        "layers_block_type": kinds,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, *kv_heads, 1),
        "head_dim": metadata.integer(f"{kind}.attention.key_length", max(1, width // heads)),
        "intermediate_size": max(1, *widths, 1),
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in names),
    }


def open_source(file: GgufFile) -> GgufSource:
    """The file's tensors under the names of the family's checkpoints."""
    tensors: dict[str, Stored] = {}
    for name, entry in file.tensors.items():
        layer = _LAYER.fullmatch(name)
        if layer is None or layer[2] not in _LAYER_TENSORS:
            tensors[_TENSORS.get(name, name)] = Stored((name,))
            continue
        part = _LAYER_TENSORS[layer[2]]
        tensors[f"backbone.layers.{layer[1]}.{part}"] = Stored((name,), change=change_of(layer[2], entry))
    return GgufSource(file, tensors)
