"""Llama, and what shares its architecture: SmolLM2 and many others."""

from __future__ import annotations

from holdfast.models.blocks import Family
from holdfast.models.config import LayerConfig, ModelConfig, base_config
from holdfast.models.families import decoder
from holdfast.models.fields import Fields


def configure(fields: Fields, architecture: str) -> ModelConfig:
    bias = fields.flag("attention_bias")
    layer = LayerConfig(
        (decoder.attention(fields, input_bias=bias, output_bias=bias),), decoder.gated_mlp(fields)
    )
    layers = (layer,) * fields.integer("num_hidden_layers")
    return base_config(fields, architecture, layers, norm_epsilon=fields.number("rms_norm_eps", 1e-6))


FAMILY = Family(("LlamaForCausalLM",), configure, decoder.blocks)
