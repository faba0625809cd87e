"""What most families share: a decoder layer of attention, then a feed-forward part, each after a norm.

The keys of such a configuration and the names of such a checkpoint are nearly the same everywhere; a
family's file says where it differs. Not a family itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.models.blocks import Block, Builder
from holdfast.models.config import AttentionConfig, MlpConfig, Rope, activation, rope_from
from holdfast.models.fields import ConfigurationError, Fields


def head_dim(fields: Fields) -> int:
    """The size of a head: as stated, or the width over the heads."""
    return fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))


def attention(fields: Fields, **changes: object) -> AttentionConfig:
    """Attention as most configurations spell it, with a family's changes."""
    size = head_dim(fields)
    heads = fields.integer("num_attention_heads")
    values: dict[str, object] = {
        "heads": heads,
        "kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": size,
        "scale": size**-0.5,
        "rope": rope_from(fields, size),
    }
    return AttentionConfig(**{**values, **changes})  # type: ignore[arg-type]


def gated_mlp(fields: Fields, width: int | None = None) -> MlpConfig:
    """The gated feed-forward part that `intermediate_size` and `hidden_act` describe."""
    size = fields.integer("intermediate_size") if width is None else width
    return MlpConfig(size, activation(fields.text("hidden_act", "silu")), bias=fields.flag("mlp_bias"))


def windows(fields: Fields, default: tuple[str, ...]) -> tuple[int | None, ...]:
    """The sliding window of each layer, None for full attention, from `layer_types` or a default of it."""
    kinds = fields.texts("layer_types") if fields.has("layer_types") else default
    found: list[int | None] = []
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigurationError(f"{fields.where}: layer type {kind!r} is not known to this family")
        found.append(fields.integer("sliding_window") if kind == "sliding_attention" else None)
    return tuple(found)


def rope_of_window(fields: Fields, size: int, window: int | None, theta: float) -> Rope:
    """Rotary settings where sliding and full layers may have different ones."""
    kind = "full_attention" if window is None else "sliding_attention"
    return rope_from(fields, size, theta, kind)


def blocks(builder: Builder) -> Iterator[Block]:
    """Attention and a feed-forward part in every layer, each after a norm."""
    for index, layer in enumerate(builder.config.layers):
        at = f"model.layers.{index}."
        (mixer,) = layer.mixers
        assert isinstance(mixer, AttentionConfig)
        assert isinstance(layer.mlp, MlpConfig)
        yield Block(builder.attention(f"{at}self_attn.", mixer), before=builder.norm(f"{at}input_layernorm"))
        yield Block(builder.mlp(f"{at}mlp.", layer.mlp), before=builder.norm(f"{at}post_attention_layernorm"))
