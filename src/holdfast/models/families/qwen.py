"""Qwen2 (biases on query, key and value) and Qwen3 (a norm on each head's query and key).

Both may give their upper layers a sliding window (`use_sliding_window`).
"""

from __future__ import annotations

from holdfast.models.blocks import Family
from holdfast.models.config import AttentionConfig, LayerConfig, ModelConfig, base_config
from holdfast.models.families import decoder
from holdfast.models.fields import Fields

_DEFAULTS = Fields({"sliding_window": 4096, "max_window_layers": 28}, "Qwen")
"""Default of a configuration with windows."""


def window_of(fields: Fields) -> int | None:
    """The window size; None where windows are switched off or null."""
    null = "sliding_window" in fields.names() and not fields.has("sliding_window")
    if null or not fields.flag("use_sliding_window"):
        return None
    return fields.with_defaults(_DEFAULTS).integer("sliding_window")


def _layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """Full attention in all layers, or a window from layer `max_window_layers` on."""
    count = fields.integer("num_hidden_layers")
    if window_of(fields) is None:
        return (None,) * count
    fields = fields.with_defaults(_DEFAULTS)
    full = fields.integer("max_window_layers", least=0)
    default = ("full_attention",) * min(full, count) + ("sliding_attention",) * max(count - full, 0)
    return decoder.windows(fields, default)


def qwen3_attention(fields: Fields, window: int | None) -> AttentionConfig:
    bias = fields.flag("attention_bias")
    return decoder.attention(fields, window=window, input_bias=bias, output_bias=bias, head_norm=True)


def configure_qwen2(fields: Fields, architecture: str) -> ModelConfig:
    layers = tuple(
        LayerConfig((decoder.attention(fields, window=window, input_bias=True),), decoder.gated_mlp(fields))
        for window in _layer_windows(fields)
    )
    return base_config(fields, architecture, layers, norm_epsilon=fields.number("rms_norm_eps", 1e-6))


def configure_qwen3(fields: Fields, architecture: str) -> ModelConfig:
    layers = tuple(
        LayerConfig((qwen3_attention(fields, window),), decoder.gated_mlp(fields))
        for window in _layer_windows(fields)
    )
    return base_config(fields, architecture, layers, norm_epsilon=fields.number("rms_norm_eps", 1e-6))


QWEN2 = Family(("Qwen2ForCausalLM",), configure_qwen2, decoder.blocks)
QWEN3 = Family(("Qwen3ForCausalLM",), configure_qwen3, decoder.blocks)
