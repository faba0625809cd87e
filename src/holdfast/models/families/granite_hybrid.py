"""Granite 4 hybrid: Mamba2 layers and a few of attention, each followed by experts and a shared MLP.

Residuals, embeddings, attention scores and logits have multipliers; most models of the family have no rotary
positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holdfast.models.blocks import Block, Builder, Family
from holdfast.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    Mamba2Config,
    MixerConfig,
    MlpConfig,
    ModelConfig,
    activation,
    base_config,
    rope_from,
)
from holdfast.models.cuts import beside
from holdfast.models.experts import Experts, ExpertWeights, Stack, read_experts, read_router, read_stacks
from holdfast.models.families import bamba, decoder
from holdfast.models.fields import ConfigurationError, Fields
from holdfast.models.layers import Mlp, Part, Together
from holdfast.models.sharding import Sharding
from holdfast.models.weights import WeightReader

_RECURRENT = frozenset(("linear_attention", "mamba"))


def _mixers(fields: Fields, recurrent: bool) -> dict[str, MixerConfig]:
    """The mixer of each layer type, under its new and its old name; some models have no recurrent layers."""
    bias = fields.flag("attention_bias")
    rotated = fields.has("position_embedding_type") and fields.text("position_embedding_type") == "rope"
    attention = decoder.attention(
        fields,
        rope=rope_from(fields, decoder.head_dim(fields)) if rotated else None,
        scale=fields.number("attention_multiplier", 1.0),
        input_bias=bias,
        output_bias=bias,
    )
    mixers: dict[str, MixerConfig] = dict.fromkeys(("full_attention", "attention"), attention)
    if recurrent:
        mixers |= dict.fromkeys(_RECURRENT, bamba.mamba2(fields))
    return mixers


def configure(fields: Fields, architecture: str) -> ModelConfig:
    act = activation(fields.text("hidden_act", "silu"))
    shared = MlpConfig(fields.integer("shared_intermediate_size"), act)
    count = fields.integer("num_local_experts", 0, least=0)
    feed_forward: MlpConfig | ExpertsConfig = shared
    if count:
        feed_forward = ExpertsConfig(
            experts=count,
            experts_per_token=fields.integer("num_experts_per_tok"),
            width=fields.integer("intermediate_size"),
            router="top_then_softmax",
            activation=act,
            shared=shared,
        )
    kinds = decoder.layer_types(fields, ("linear_attention",) * fields.integer("num_hidden_layers"))
    mixers = _mixers(fields, not _RECURRENT.isdisjoint(kinds))
    unknown = set(kinds) - set(mixers)
    if unknown:
        raise ConfigurationError(f"{fields.where}: layer types {sorted(unknown)} are unknown to this family")
    layers = tuple(LayerConfig((mixers[kind],), feed_forward) for kind in kinds)
    config = base_config(fields, architecture, layers, norm_epsilon=fields.number("rms_norm_eps", 1e-6))
    return replace(
        config,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_multiplier=1.0 / fields.positive("logits_scaling", 1.0),
    )


def _local_mlp(sharding: Sharding, prefix: str, config: MlpConfig) -> MlpConfig:
    """This rank's part of an MLP whose gate and up projections are one weight."""
    inner = sharding.inner(config.width)
    sharding.cuts.module(f"{prefix}input_linear", rows=beside(inner, inner))
    sharding.cuts.module(f"{prefix}output_linear", columns=inner)
    return sharding.local_mlp(config)


def _local_experts(sharding: Sharding, prefix: str, config: ExpertsConfig) -> ExpertsConfig:
    """This rank's part of experts: stacked, gate rows first, or one by one."""
    inner = sharding.inner(config.width)
    sharding.experts(f"{prefix}experts.", config)
    sharding.cuts.tensor(f"{prefix}input_linear.weight", None, beside(inner, inner), None)
    sharding.cuts.tensor(f"{prefix}output_linear.weight", None, None, inner)
    return sharding.local_experts(config)


def _feed_forward(builder: Builder, at: str, config: MlpConfig | ExpertsConfig) -> Part:
    reader, width = builder.reader, builder.config.width
    shared = config if isinstance(config, MlpConfig) else config.shared
    assert shared is not None
    if builder.team is not None:
        shared = _local_mlp(builder.team.sharding, f"{at}shared_mlp.", shared)
    dense = Mlp(
        shared,
        reader.linear([f"{at}shared_mlp.input_linear"], width, [2 * shared.width]),
        reader.linear([f"{at}shared_mlp.output_linear"], shared.width, [width], summed=True),
    )
    if isinstance(config, MlpConfig):
        return dense
    prefix = f"{at}block_sparse_moe."
    if builder.team is not None:
        config = _local_experts(builder.team.sharding, prefix, config)
    router = read_router(config, reader, f"{prefix}router.layer", width, None)
    weights = _expert_weights(reader, prefix, config, width)
    return Together(Experts(config, router, weights, reader.placement.dtype), dense)


def _expert_weights(reader: WeightReader, prefix: str, config: ExpertsConfig, width: int) -> ExpertWeights:
    """Stacked, gate rows first, or as in GGUF files one by one."""
    if reader.has(f"{prefix}experts.0.down_proj.weight"):
        return read_experts(config, reader, f"{prefix}experts.", width)
    inner = Stack(f"{prefix}input_linear.weight", 2 * config.width, width)
    return read_stacks(
        reader, config.experts, inner, Stack(f"{prefix}output_linear.weight", width, config.width)
    )


def blocks(builder: Builder) -> Iterator[Block]:
    for index, layer in enumerate(builder.config.layers):
        at = f"model.layers.{index}."
        (mixer,) = layer.mixers
        assert layer.mlp is not None
        before = builder.norm(f"{at}input_layernorm")
        if isinstance(mixer, AttentionConfig):
            yield Block(builder.attention(f"{at}self_attn.", mixer), before=before)
        else:
            assert isinstance(mixer, Mamba2Config)
            yield Block(builder.mamba2(f"{at}mamba.", mixer), before=before)
        yield Block(
            _feed_forward(builder, at, layer.mlp), before=builder.norm(f"{at}post_attention_layernorm")
        )


FAMILY = Family(("GraniteMoeHybridForCausalLM",), configure, blocks)
