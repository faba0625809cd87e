"""What most families share: a decoder layer of attention, then an MLP, each after a norm.

Configuration keys and checkpoint names are nearly the same everywhere; a family's file has its differences.
Not a family itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from holdfast.models.blocks import Block, Builder
from holdfast.models.config import (
    AttentionConfig,
    ExpertsConfig,
    MlpConfig,
    Rope,
    activation,
    rope_from,
)
from holdfast.models.experts import Experts, GatedPart, read_experts, read_router
from holdfast.models.fields import ConfigurationError, Fields
from holdfast.models.layers import Part, Together
from holdfast.models.linear import DenseLinear, PackedLinear


def head_dim(fields: Fields) -> int:
    """The size of a head: stated, or the width over the heads."""
    return fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))


def attention(fields: Fields, **changes: object) -> AttentionConfig:
    """Attention with the common configuration keys, and a family's changes."""
    size = head_dim(fields)
    heads = fields.integer("num_attention_heads")
    values: dict[str, object] = {
        "heads": heads,
        "kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": size,
        "scale": size**-0.5,
        **changes,
    }
    if "rope" not in changes:
        values["rope"] = rope_from(fields, size)
    return AttentionConfig(**values)  # type: ignore[arg-type]


def gated_mlp(fields: Fields, width: int | None = None) -> MlpConfig:
    """The gated MLP of `intermediate_size` and `hidden_act`."""
    size = fields.integer("intermediate_size") if width is None else width
    return MlpConfig(size, activation(fields.text("hidden_act", "silu")), bias=fields.flag("mlp_bias"))


def layer_types(fields: Fields, default: tuple[str, ...]) -> tuple[str, ...]:
    """The layer types: `layer_types`, or a default of the same length."""
    kinds = fields.texts("layer_types") if fields.has("layer_types") else default
    if len(kinds) != len(default):
        raise ConfigurationError(f"{fields.where}: 'layer_types' names {len(kinds)} layers of {len(default)}")
    return kinds


def windows(fields: Fields, default: tuple[str, ...]) -> tuple[int | None, ...]:
    """The sliding window of each layer, None for full attention, from `layer_types` or a default."""
    found: list[int | None] = []
    for kind in layer_types(fields, default):
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigurationError(f"{fields.where}: layer type {kind!r} is unknown to this family")
        found.append(fields.integer("sliding_window") if kind == "sliding_attention" else None)
    return tuple(found)


def rope_of_window(fields: Fields, window: int | None, *, full_theta: float, window_theta: float) -> Rope:
    """Rotary settings that differ between sliding and full layers; scaling applies to full ones alone."""
    size = head_dim(fields)
    kind = "full_attention" if window is None else "sliding_attention"
    if fields.inner("rope_parameters").has(kind):
        return rope_from(fields, size, full_theta, kind)
    if window is None:
        return rope_from(fields, size, full_theta)
    return Rope(window_theta, size)


def sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """The layers with experts, from `mlp_only_layers` and `decoder_sparse_step`."""
    dense = set(fields.integers("mlp_only_layers"))
    step = fields.integer("decoder_sparse_step", 1)
    count = fields.integer("num_hidden_layers")
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(count))


def blocks(builder: Builder) -> Iterator[Block]:
    """Attention and an MLP, dense or of experts, in every layer, each after a norm."""
    for index, layer in enumerate(builder.config.layers):
        at = f"model.layers.{index}."
        (mixer,) = layer.mixers
        assert isinstance(mixer, AttentionConfig)
        yield Block(builder.attention(f"{at}self_attn.", mixer), before=builder.norm(f"{at}input_layernorm"))
        yield Block(
            feed_forward(builder, f"{at}mlp.", layer.mlp),
            before=builder.norm(f"{at}post_attention_layernorm"),
        )


def feed_forward(builder: Builder, prefix: str, config: MlpConfig | ExpertsConfig | None) -> Part:
    """A dense MLP, or experts with their router under the names of Qwen's mixtures."""
    if isinstance(config, MlpConfig):
        return builder.mlp(prefix, config)
    assert config is not None
    reader, width = builder.reader, builder.config.width
    routed = Experts(
        config,
        read_router(config, reader, f"{prefix}gate", width, None),
        read_experts(builder.local_experts(f"{prefix}experts.", config), reader, f"{prefix}experts.", width),
        reader.placement.dtype,
    )
    if config.shared is None:
        return routed
    shared: Part = builder.mlp(f"{prefix}shared_expert.", config.shared)
    if config.shared_gate:
        gate = reader.matrix(f"{prefix}shared_expert_gate.weight", (1, width))
        shared = GatedPart(shared, DenseLinear(gate) if isinstance(gate, Tensor) else PackedLinear(gate))
    return Together(routed, shared)
