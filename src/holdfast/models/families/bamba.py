"""Bamba: Mamba2 layers with full attention in a few of them, and a gated MLP in each."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.models.blocks import Block, Builder, Family
from holdfast.models.config import (
    AttentionConfig,
    LayerConfig,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
    base_config,
    rope_from,
)
from holdfast.models.families import decoder
from holdfast.models.fields import Fields

_ROTATED_SHARE = 0.5
"""Bamba's default share of rotated dimensions."""


def mamba2(fields: Fields, *, width: int | None = None) -> Mamba2Config:
    """A Mamba2 mixer as Bamba's relatives spell it; `width` is that of the scan."""
    heads = fields.integer("mamba_n_heads")
    if width is None:
        width = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    stated = fields.raw("mamba_d_head")
    low, high = fields.numbers("time_step_limit", (0.0, float("inf")))
    return Mamba2Config(
        heads=heads,
        head_dim=width // heads if stated in (None, "auto") else fields.integer("mamba_d_head"),
        state_dim=fields.integer("mamba_d_state"),
        groups=fields.integer("mamba_n_groups", 1),
        kernel=fields.integer("mamba_d_conv", 4),
        convolution_bias=fields.flag("mamba_conv_bias", True),
        input_bias=fields.flag("mamba_proj_bias"),
        output_bias=fields.flag("mamba_proj_bias"),
        time_step_limit=(low, high),
    )


def configure(fields: Fields, architecture: str) -> ModelConfig:
    rope = rope_from(fields, decoder.head_dim(fields), rotated_share=_ROTATED_SHARE)
    bias = fields.flag("attention_bias")
    attention = decoder.attention(fields, rope=rope, input_bias=bias, output_bias=bias)
    scan, feed_forward = mamba2(fields), decoder.gated_mlp(fields)
    with_attention = set(fields.integers("attn_layer_indices"))
    layers = tuple(
        LayerConfig((attention if index in with_attention else scan,), feed_forward)
        for index in range(fields.integer("num_hidden_layers"))
    )
    return base_config(fields, architecture, layers, norm_epsilon=fields.number("rms_norm_eps", 1e-5))


def blocks(builder: Builder) -> Iterator[Block]:
    for index, layer in enumerate(builder.config.layers):
        at = f"model.layers.{index}."
        (mixer,) = layer.mixers
        assert isinstance(layer.mlp, MlpConfig)
        before = builder.norm(f"{at}input_layernorm")
        if isinstance(mixer, AttentionConfig):
            yield Block(builder.attention(f"{at}self_attn.", mixer), before=before)
        else:
            assert isinstance(mixer, Mamba2Config)
            yield Block(builder.mamba2(f"{at}mamba.", mixer), before=before)
        yield Block(
            builder.mlp(f"{at}feed_forward.", layer.mlp), before=builder.norm(f"{at}pre_ff_layernorm")
        )


FAMILY = Family(("BambaForCausalLM",), configure, blocks, norm="model.final_layernorm")
