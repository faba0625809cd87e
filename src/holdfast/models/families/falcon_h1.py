"""Falcon-H1: attention and Mamba2 side by side in every layer, and a multiplier on nearly every path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holdfast.models.blocks import Block, Builder, Family
from holdfast.models.config import (
    AttentionConfig,
    LayerConfig,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
    base_config,
)
from holdfast.models.families import bamba, decoder
from holdfast.models.fields import Fields
from holdfast.models.layers import Together


def _scan(fields: Fields) -> Mamba2Config:
    plain = bamba.mamba2(fields, width=fields.optional_integer("mamba_d_ssm"))
    multipliers = fields.numbers("ssm_multipliers", (1.0,) * 5)
    after = "norm_then_gate" if fields.flag("mamba_norm_before_gate", True) else "gate_then_norm"
    return replace(
        plain,
        norm=after if fields.flag("mamba_rms_norm") else "gate_only",  # type: ignore[arg-type]
        norm_groups=plain.groups,
        output_bias=fields.flag("projectors_bias"),
        input_multiplier=fields.number("ssm_in_multiplier", 1.0),
        output_multiplier=fields.number("ssm_out_multiplier", 1.0),
        projection_multipliers=None if set(multipliers) == {1.0} else multipliers,
    )


def configure(fields: Fields, architecture: str) -> ModelConfig:
    bias = fields.flag("attention_bias")
    attention = decoder.attention(
        fields,
        input_bias=bias,
        output_bias=bias,
        input_multiplier=fields.number("attention_in_multiplier", 1.0),
        key_multiplier=fields.number("key_multiplier", 1.0),
        output_multiplier=fields.number("attention_out_multiplier", 1.0),
    )
    gate, down = fields.numbers("mlp_multipliers", (1.0, 1.0))
    mlp = replace(decoder.gated_mlp(fields), gate_multiplier=gate, output_multiplier=down)
    layers = (LayerConfig((_scan(fields), attention), mlp),) * fields.integer("num_hidden_layers")
    config = base_config(fields, architecture, layers, norm_epsilon=fields.number("rms_norm_eps", 1e-5))
    return replace(
        config,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_multiplier=fields.number("lm_head_multiplier", 1.0),
    )


def blocks(builder: Builder) -> Iterator[Block]:
    for index, layer in enumerate(builder.config.layers):
        at = f"model.layers.{index}."
        scan, attention = layer.mixers
        assert isinstance(scan, Mamba2Config)
        assert isinstance(attention, AttentionConfig)
        assert isinstance(layer.mlp, MlpConfig)
        yield Block(
            Together(builder.mamba2(f"{at}mamba.", scan), builder.attention(f"{at}self_attn.", attention)),
            before=builder.norm(f"{at}input_layernorm"),
        )
        yield Block(
            builder.mlp(f"{at}feed_forward.", layer.mlp), before=builder.norm(f"{at}pre_ff_layernorm")
        )


FAMILY = Family(("FalconH1ForCausalLM",), configure, blocks, norm="model.final_layernorm")
