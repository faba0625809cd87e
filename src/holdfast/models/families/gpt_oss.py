"""gpt-oss: windows in every other layer, attention sinks, clamped experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from holdfast.kernels import Clamp
from holdfast.models.blocks import Block, Builder, Family
from holdfast.models.config import AttentionConfig, ExpertsConfig, LayerConfig, ModelConfig, base_config
from holdfast.models.experts import Experts, ExpertWeights, Stack, read_experts, read_router, read_stacks
from holdfast.models.families import decoder
from holdfast.models.fields import Fields
from holdfast.models.sharding import Sharding


def configure(fields: Fields, architecture: str) -> ModelConfig:
    default = tuple(
        "full_attention" if index % 2 else "sliding_attention"
        for index in range(fields.integer("num_hidden_layers"))
    )
    bias = fields.flag("attention_bias", True)
    experts = ExpertsConfig(
        experts=fields.integer("num_local_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        width=fields.integer("intermediate_size"),
        router="top_then_softmax",
        bias=True,
        clamp=Clamp(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)),
    )
    layers = tuple(
        LayerConfig(
            (decoder.attention(fields, window=window, input_bias=bias, output_bias=bias, sinks=True),),
            experts,
        )
        for window in decoder.windows(fields, default)
    )
    return base_config(fields, architecture, layers, norm_epsilon=fields.number("rms_norm_eps", 1e-5))


def _experts(builder: Builder, prefix: str, config: ExpertsConfig) -> Experts:
    """Gate and up are interleaved; dense weights are stored as [experts, in, out]."""
    if builder.team is not None:
        config = _local_experts(builder.team.sharding, f"{prefix}experts.", config)
    reader, width, count, inner = builder.reader, builder.config.width, config.experts, config.width
    router = read_router(config, reader, f"{prefix}router", width, f"{prefix}router.bias")
    if reader.has(f"{prefix}experts.gate_proj.bias"):
        return Experts(config, router, _separate_experts(builder, prefix, config), reader.placement.dtype)
    bias = reader.tensor(f"{prefix}experts.gate_up_proj_bias", (count, 2 * inner))
    halves = torch.arange(2 * inner, device=bias.device).view(inner, 2).T.reshape(-1)
    gate_up = reader.stacked_experts(f"{prefix}experts.gate_up_proj", count, 2 * inner, width, halves)
    down = reader.stacked_experts(f"{prefix}experts.down_proj", count, width, inner)
    if gate_up is None or down is None:
        weights = read_stacks(
            reader,
            count,
            Stack(f"{prefix}experts.gate_up_proj", 2 * inner, width, swapped=True, order=halves),
            Stack(f"{prefix}experts.down_proj", width, inner, swapped=True),
        )
    else:
        weights = ExpertWeights(gate_up, down)
    outer_bias = reader.tensor(f"{prefix}experts.down_proj_bias", (count, width))
    weights = weights._replace(
        inner_bias=bias[:, halves].contiguous(), outer_bias=outer_bias if builder.leads else None
    )
    return Experts(config, router, weights, reader.placement.dtype)


def _local_experts(sharding: Sharding, prefix: str, config: ExpertsConfig) -> ExpertsConfig:
    """This rank's part of the experts, stacked or, as in GGUF files, one by one."""
    inner = sharding.inner(config.width)
    pairs, cuts = inner.times(2), sharding.cuts
    sharding.experts(prefix, config)
    for part in ("gate", "up"):
        cuts.tensor(f"{prefix}{part}_proj.bias", None, inner)
    cuts.module(f"{prefix}gate_up_proj", rows=pairs)
    cuts.tensor(f"{prefix}gate_up_proj", None, None, pairs)
    cuts.module(f"{prefix}down_proj", columns=inner)
    cuts.tensor(f"{prefix}down_proj", None, inner, None)
    return sharding.local_experts(config)


def _separate_experts(builder: Builder, prefix: str, config: ExpertsConfig) -> ExpertWeights:
    """Experts as in GGUF files: gate, up and down apart."""
    reader, width, count, inner = builder.reader, builder.config.width, config.experts, config.width
    weights = read_experts(config, reader, f"{prefix}experts.", width)
    biases = [reader.tensor(f"{prefix}experts.{part}_proj.bias", (count, inner)) for part in ("gate", "up")]
    down = reader.tensor(f"{prefix}experts.down_proj.bias", (count, width))
    return weights._replace(inner_bias=torch.cat(biases, dim=1), outer_bias=down if builder.leads else None)


def blocks(builder: Builder) -> Iterator[Block]:
    for index, layer in enumerate(builder.config.layers):
        at = f"model.layers.{index}."
        (mixer,) = layer.mixers
        assert isinstance(mixer, AttentionConfig)
        assert isinstance(layer.mlp, ExpertsConfig)
        yield Block(builder.attention(f"{at}self_attn.", mixer), before=builder.norm(f"{at}input_layernorm"))
        yield Block(
            _experts(builder, f"{at}mlp.", layer.mlp), before=builder.norm(f"{at}post_attention_layernorm")
        )


FAMILY = Family(("GptOssForCausalLM",), configure, blocks)
