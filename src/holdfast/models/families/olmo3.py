"""Olmo 3: sliding windows with full attention in every fourth layer, norms only after a part.

Queries and keys are normed over the whole projection, not head by head.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.models.blocks import Block, Builder, Family
from holdfast.models.config import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, base_config
from holdfast.models.families import decoder
from holdfast.models.fields import Fields

_THETA = 500_000.0


def _attention(fields: Fields, window: int | None) -> AttentionConfig:
    bias = fields.flag("attention_bias")
    rope = decoder.rope_of_window(
        fields, window, full_theta=_THETA, window_theta=fields.number("rope_theta", _THETA)
    )
    return decoder.attention(
        fields, window=window, rope=rope, input_bias=bias, output_bias=bias, projection_norm=True
    )


def configure(fields: Fields, architecture: str) -> ModelConfig:
    default = tuple(
        "sliding_attention" if (index + 1) % 4 else "full_attention"
        for index in range(fields.integer("num_hidden_layers"))
    )
    layers = tuple(
        LayerConfig((_attention(fields, window),), decoder.gated_mlp(fields))
        for window in decoder.windows(fields, default)
    )
    return base_config(fields, architecture, layers, norm_epsilon=fields.number("rms_norm_eps", 1e-5))


def blocks(builder: Builder) -> Iterator[Block]:
    for index, layer in enumerate(builder.config.layers):
        at = f"model.layers.{index}."
        (mixer,) = layer.mixers
        assert isinstance(mixer, AttentionConfig)
        assert isinstance(layer.mlp, MlpConfig)
        yield Block(
            builder.attention(f"{at}self_attn.", mixer), after=builder.norm(f"{at}post_attention_layernorm")
        )
        yield Block(
            builder.mlp(f"{at}mlp.", layer.mlp), after=builder.norm(f"{at}post_feedforward_layernorm")
        )


FAMILY = Family(("Olmo3ForCausalLM",), configure, blocks)
