"""Qwen3-MoE: Qwen3 attention, and experts in place of most MLPs.

With `use_sliding_window` every layer has a window, whatever `max_window_layers` says.
"""

from __future__ import annotations

from holdfast.models.blocks import Family
from holdfast.models.config import ExpertsConfig, LayerConfig, ModelConfig, activation, base_config
from holdfast.models.families import decoder, qwen
from holdfast.models.fields import Fields


def experts(fields: Fields) -> ExpertsConfig:
    """Experts with Qwen's configuration keys; `num_experts` under either of its names."""
    return ExpertsConfig(
        experts=fields.integer("num_experts", fields.optional_integer("num_local_experts")),
        experts_per_token=fields.integer("num_experts_per_tok"),
        width=fields.integer("moe_intermediate_size"),
        router="softmax_then_top",
        activation=activation(fields.text("hidden_act", "silu")),
        normalise=fields.flag("norm_topk_prob"),
    )


def configure(fields: Fields, architecture: str) -> ModelConfig:
    attention = qwen.qwen3_attention(fields, qwen.window_of(fields))
    layers = tuple(
        LayerConfig((attention,), experts(fields) if sparse else decoder.gated_mlp(fields))
        for sparse in decoder.sparse_layers(fields)
    )
    return base_config(fields, architecture, layers, norm_epsilon=fields.number("rms_norm_eps", 1e-6))


FAMILY = Family(("Qwen3MoeForCausalLM",), configure, decoder.blocks)
