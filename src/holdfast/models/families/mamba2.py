"""Mamba2: a state in every layer and no attention, so a session has the same size at any length."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.models.blocks import Block, Builder, Family
from holdfast.models.config import LayerConfig, Mamba2Config, ModelConfig, base_config
from holdfast.models.fields import Fields


def configure(fields: Fields, architecture: str) -> ModelConfig:
    low, high = fields.numbers("time_step_limit", (0.0, float("inf")))
    mixer = Mamba2Config(
        heads=fields.integer("num_heads"),
        head_dim=fields.integer("head_dim"),
        state_dim=fields.integer("state_size"),
        groups=fields.integer("n_groups"),
        kernel=fields.integer("conv_kernel"),
        convolution_bias=fields.flag("use_conv_bias", True),
        input_bias=fields.flag("use_bias"),
        output_bias=fields.flag("use_bias"),
        time_step_limit=(low, high),
    )
    layers = (LayerConfig((mixer,)),) * fields.integer("num_hidden_layers")
    return base_config(fields, architecture, layers, norm_epsilon=fields.number("layer_norm_epsilon", 1e-5))


def blocks(builder: Builder) -> Iterator[Block]:
    for index, layer in enumerate(builder.config.layers):
        at = f"backbone.layers.{index}."
        (mixer,) = layer.mixers
        assert isinstance(mixer, Mamba2Config)
        yield Block(builder.mamba2(f"{at}mixer.", mixer), before=builder.norm(f"{at}norm"))


FAMILY = Family(
    ("Mamba2ForCausalLM",), configure, blocks, embedding="backbone.embeddings", norm="backbone.norm_f"
)
