"""Mistral: Llama with a sliding window in every layer, where the configuration has one."""

from __future__ import annotations

from holdfast.models.blocks import Family
from holdfast.models.config import LayerConfig, ModelConfig, base_config
from holdfast.models.families import decoder
from holdfast.models.fields import Fields


def configure(fields: Fields, architecture: str) -> ModelConfig:
    mixer = decoder.attention(fields, window=fields.optional_integer("sliding_window"))
    layers = (LayerConfig((mixer,), decoder.gated_mlp(fields)),) * fields.integer("num_hidden_layers")
    return base_config(fields, architecture, layers, norm_epsilon=fields.number("rms_norm_eps", 1e-6))


FAMILY = Family(("MistralForCausalLM",), configure, decoder.blocks)
