"""Gemma 3 (text): sliding windows with full attention in every sixth layer, norms before and after each part.

Norm weights are stored as their difference from one, embeddings are scaled by the root of the width, and the
two layer types have different rotary bases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from holdfast.models.blocks import Block, Builder, Family
from holdfast.models.config import (
    AttentionConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    activation,
    base_config,
)
from holdfast.models.families import decoder
from holdfast.models.fields import ConfigurationError, Fields

_DEFAULTS = Fields(
    {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "Gemma 3",
)
"""Defaults that checkpoints of the family omit."""


def _attention(fields: Fields, window: int | None) -> AttentionConfig:
    bias = fields.flag("attention_bias")
    rope = decoder.rope_of_window(
        fields, window, full_theta=1_000_000.0, window_theta=fields.number("rope_local_base_freq", 10_000.0)
    )
    scale = fields.positive("query_pre_attn_scalar", 256.0) ** -0.5
    return decoder.attention(
        fields, window=window, rope=rope, scale=scale, input_bias=bias, output_bias=bias, head_norm=True
    )


def configure(fields: Fields, architecture: str) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS)
    if fields.flag("use_bidirectional_attention"):
        raise ConfigurationError("bidirectional attention is not supported: a session only appends")
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    default = tuple(
        "sliding_attention" if (index + 1) % pattern else "full_attention"
        for index in range(fields.integer("num_hidden_layers"))
    )
    mlp = MlpConfig(
        fields.integer("intermediate_size"), activation(fields.text("hidden_activation", "gelu_pytorch_tanh"))
    )
    layers = tuple(
        LayerConfig((_attention(fields, window),), mlp) for window in decoder.windows(fields, default)
    )
    config = base_config(fields, architecture, layers, norm_epsilon=fields.number("rms_norm_eps", 1e-6))
    return replace(
        config,
        norm_offset=1.0,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        embedding_multiplier=config.width**0.5,
        round_embedding_multiplier=True,
        logits_softcap=fields.optional_number("final_logit_softcapping"),
    )


def _blocks(prefix: str) -> Callable[[Builder], Iterator[Block]]:
    """The blocks of a model whose layers lie under `prefix`."""

    def blocks(builder: Builder) -> Iterator[Block]:
        for index, layer in enumerate(builder.config.layers):
            at = f"{prefix}layers.{index}."
            (mixer,) = layer.mixers
            assert isinstance(mixer, AttentionConfig)
            assert isinstance(layer.mlp, MlpConfig)
            yield Block(
                builder.attention(f"{at}self_attn.", mixer),
                before=builder.norm(f"{at}input_layernorm"),
                after=builder.norm(f"{at}post_attention_layernorm"),
            )
            yield Block(
                builder.mlp(f"{at}mlp.", layer.mlp),
                before=builder.norm(f"{at}pre_feedforward_layernorm"),
                after=builder.norm(f"{at}post_feedforward_layernorm"),
            )

    return blocks


TEXT = Family(("Gemma3ForCausalLM",), configure, _blocks("model."))
MULTIMODAL = Family(
    ("Gemma3ForConditionalGeneration",),
    configure,
    _blocks("language_model.model."),
    embedding="language_model.model.embed_tokens",
    norm="language_model.model.norm",
    head="language_model.lm_head",
    ignored=(r"^vision_tower\.", r"^multi_modal_projector\."),
    text_config=True,
)
