"""Qwen3-Next and Qwen3.5 (text): gated delta rule in most layers, gated full attention in every fourth.

They differ in the layout of the delta rule's input projections and in the MLP: Qwen3-Next has experts with a
gated shared one, Qwen3.5 a dense MLP. Norm weights are stored as their difference from one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from holdfast.models.blocks import Block, Builder, Family
from holdfast.models.config import (
    AttentionConfig,
    DeltaConfig,
    ExpertsConfig,
    LayerConfig,
    MixerConfig,
    MlpConfig,
    ModelConfig,
    base_config,
    rope_from,
)
from holdfast.models.cuts import Cut, beside
from holdfast.models.families import decoder, qwen3_moe
from holdfast.models.fields import ConfigurationError, Fields
from holdfast.models.recurrent import GatedDelta
from holdfast.models.sharding import Sharding

_ROTATED_SHARE = 0.25
"""Default share of rotated dimensions."""

DeltaReader = Callable[[Builder, str, DeltaConfig], GatedDelta]


def _mixers(fields: Fields) -> tuple[MixerConfig, ...]:
    bias = fields.flag("attention_bias")
    attention = decoder.attention(
        fields,
        rope=rope_from(fields, decoder.head_dim(fields), rotated_share=_ROTATED_SHARE),
        input_bias=bias,
        output_bias=bias,
        head_norm=True,
        output_gate=True,
    )
    delta = DeltaConfig(
        key_heads=fields.integer("linear_num_key_heads"),
        value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        kernel=fields.integer("linear_conv_kernel_dim", 4),
    )
    interval = fields.integer("full_attention_interval", 4)
    count = fields.integer("num_hidden_layers")
    default = tuple(
        "linear_attention" if (index + 1) % interval else "full_attention" for index in range(count)
    )
    kinds = decoder.layer_types(fields, default)
    known: dict[str, MixerConfig] = {"linear_attention": delta, "full_attention": attention}
    unknown = set(kinds) - set(known)
    if unknown:
        raise ConfigurationError(f"{fields.where}: layer types {sorted(unknown)} are unknown to this family")
    return tuple(known[kind] for kind in kinds)


def _configured(
    fields: Fields, architecture: str, parts: tuple[MlpConfig | ExpertsConfig, ...]
) -> ModelConfig:
    layers = tuple(LayerConfig((mixer,), part) for mixer, part in zip(_mixers(fields), parts, strict=True))
    config = base_config(fields, architecture, layers, norm_epsilon=fields.number("rms_norm_eps", 1e-6))
    return replace(config, norm_offset=1.0)


def configure_next(fields: Fields, architecture: str) -> ModelConfig:
    sparse = _experts_with_shared(fields) if fields.integer("num_experts", 0, least=0) else None
    dense = decoder.gated_mlp(fields)
    parts = tuple(
        sparse if chosen and sparse is not None else dense for chosen in decoder.sparse_layers(fields)
    )
    return _configured(fields, architecture, parts)


def _experts_with_shared(fields: Fields) -> ExpertsConfig:
    shared = decoder.gated_mlp(fields, fields.integer("shared_expert_intermediate_size"))
    return replace(qwen3_moe.experts(fields), shared=shared, shared_gate=True)


def configure_dense(fields: Fields, architecture: str) -> ModelConfig:
    parts = (decoder.gated_mlp(fields),) * fields.integer("num_hidden_layers")
    return _configured(fields, architecture, parts)


def _delta_by_head(builder: Builder, prefix: str, config: DeltaConfig) -> GatedDelta:
    """Qwen3-Next stores query, key, value and gate interleaved by key head, and likewise rate and decay."""
    if builder.team is not None:
        config = _local_by_head(builder.team.sharding, prefix, config)
    repeat = config.value_heads // config.key_heads
    values = repeat * config.value_dim

    def apart(start: int, sizes: list[int]) -> list[Tensor]:
        rows = torch.arange(start, start + config.key_heads * sum(sizes)).view(config.key_heads, -1)
        return [part.reshape(-1) for part in rows.split(sizes, dim=1)]

    wide = config.key_heads * (2 * config.key_dim + 2 * values)
    order = [*apart(0, [config.key_dim, config.key_dim, values, values]), *apart(wide, [repeat, repeat])]
    projections = {"in_proj_qkvz": wide, "in_proj_ba": 2 * config.value_heads}
    return builder.gated_delta(prefix, config, projections, torch.cat(order))


def _local_by_head(sharding: Sharding, prefix: str, config: DeltaConfig) -> DeltaConfig:
    """This rank's part of Qwen3-Next's projections: its key heads, each with the value heads it has there."""
    shared, repeat = sharding.deltas(config), config.value_heads // config.key_heads
    keys, values = 2 * config.key_dim, repeat * config.value_dim
    wide, narrow = keys + 2 * values, 2 * repeat
    rows: list[tuple[int, int]] = []
    scalars: list[tuple[int, int]] = []
    for index, key in enumerate(shared.items):
        before = shared.heads.runs[0][0] + index * shared.each - key * repeat
        query, rate = key * wide, key * narrow + before
        value, size = query + keys + before * config.value_dim, shared.each * config.value_dim
        rows += [(query, query + keys), (value, value + size), (value + values, value + values + size)]
        scalars += [(rate, rate + shared.each), (rate + repeat, rate + repeat + shared.each)]
    sharding.cuts.module(f"{prefix}in_proj_qkvz", rows=Cut(config.key_heads * wide, tuple(rows)))
    sharding.cuts.module(f"{prefix}in_proj_ba", rows=Cut(config.key_heads * narrow, tuple(scalars)))
    return sharding.delta(prefix, config)


def _local_by_part(sharding: Sharding, prefix: str, config: DeltaConfig) -> DeltaConfig:
    """This rank's part of Qwen3.5's projections."""
    shared = sharding.deltas(config)
    keys, values = shared.groups.times(config.key_dim), shared.heads.times(config.value_dim)
    sharding.cuts.module(f"{prefix}in_proj_qkv", rows=beside(keys, keys, values))
    sharding.cuts.module(f"{prefix}in_proj_z", rows=values)
    for name in ("in_proj_b", "in_proj_a"):
        sharding.cuts.module(f"{prefix}{name}", rows=shared.heads)
    return sharding.delta(prefix, config)


def _delta_by_part(builder: Builder, prefix: str, config: DeltaConfig) -> GatedDelta:
    """Qwen3.5 stores its projections separately, in the mixer's order."""
    if builder.team is not None:
        config = _local_by_part(builder.team.sharding, prefix, config)
    projections = {
        "in_proj_qkv": config.convolution_channels,
        "in_proj_z": config.value_heads * config.value_dim,
        "in_proj_b": config.value_heads,
        "in_proj_a": config.value_heads,
    }
    return builder.gated_delta(prefix, config, projections)


def _blocks(prefix: str, read_delta: DeltaReader) -> Callable[[Builder], Iterator[Block]]:
    """The blocks of a model whose layers lie under `prefix`."""

    def blocks(builder: Builder) -> Iterator[Block]:
        for index, layer in enumerate(builder.config.layers):
            at = f"{prefix}layers.{index}."
            (mixer,) = layer.mixers
            before = builder.norm(f"{at}input_layernorm")
            if isinstance(mixer, AttentionConfig):
                yield Block(builder.attention(f"{at}self_attn.", mixer), before=before)
            else:
                assert isinstance(mixer, DeltaConfig)
                yield Block(read_delta(builder, f"{at}linear_attn.", mixer), before=before)
            yield Block(
                decoder.feed_forward(builder, f"{at}mlp.", layer.mlp),
                before=builder.norm(f"{at}post_attention_layernorm"),
            )

    return blocks


QWEN3_NEXT = Family(
    ("Qwen3NextForCausalLM",),
    configure_next,
    _blocks("model.", _delta_by_head),
    ignored=(r"^mtp\.",),
    mtp="mtp.",
)
QWEN3_5 = Family(
    ("Qwen3_5ForCausalLM",),
    configure_dense,
    _blocks("model.", _delta_by_part),
    ignored=(r"^mtp\.",),
    mtp="mtp.",
)
QWEN3_5_MULTIMODAL = Family(
    ("Qwen3_5ForConditionalGeneration",),
    configure_dense,
    _blocks("model.language_model.", _delta_by_part),
    embedding="model.language_model.embed_tokens",
    norm="model.language_model.norm",
    ignored=(r"^mtp\.", r"^model\.visual\."),
    text_config=True,
    mtp="mtp.",
)
