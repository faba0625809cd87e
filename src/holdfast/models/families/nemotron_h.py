"""Nemotron-H: one part per layer: Mamba2, attention without positions, a plain MLP, or experts."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.models.blocks import Block, Builder, Family
from holdfast.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
    activation,
    base_config,
)
from holdfast.models.experts import Experts, Latent, read_experts, read_router
from holdfast.models.families import decoder
from holdfast.models.fields import ConfigurationError, Fields
from holdfast.models.layers import Part, Together

_PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


def _layer_kinds(fields: Fields) -> tuple[str, ...]:
    """The part of each layer, from a list of names or a pattern of letters."""
    if fields.has("layers_block_type"):
        kinds = tuple(_OLD_NAMES.get(kind, kind) for kind in fields.texts("layers_block_type"))
    else:
        kinds = tuple(_PATTERN.get(letter, letter) for letter in fields.text("hybrid_override_pattern"))
    unknown = set(kinds) - set(_PATTERN.values())
    if unknown:
        raise ConfigurationError(f"{fields.where}: layer types {sorted(unknown)} are unknown to this family")
    return kinds


def _scan(fields: Fields) -> Mamba2Config:
    groups = fields.integer("n_groups")
    return Mamba2Config(
        heads=fields.integer("mamba_num_heads"),
        head_dim=fields.integer("mamba_head_dim"),
        state_dim=fields.integer("ssm_state_size"),
        groups=groups,
        kernel=fields.integer("conv_kernel"),
        convolution_bias=fields.flag("use_conv_bias", True),
        input_bias=fields.flag("use_bias"),
        output_bias=fields.flag("use_bias"),
        time_step_limit=(fields.number("time_step_min", 0.001), float("inf")),
        norm_groups=groups,
    )


def _mlp(fields: Fields, width: int) -> MlpConfig:
    act = activation(fields.text("mlp_hidden_act", "relu2"))
    return MlpConfig(width, act, gated=False, bias=fields.flag("mlp_bias"))


def _experts(fields: Fields) -> ExpertsConfig:
    return ExpertsConfig(
        experts=fields.integer("n_routed_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        width=fields.integer("moe_intermediate_size"),
        router="sigmoid_in_groups",
        activation=activation(fields.text("mlp_hidden_act", "relu2")),
        gated=False,
        normalise=fields.flag("norm_topk_prob", True),
        router_groups=fields.integer("n_group", 1),
        router_groups_kept=fields.integer("topk_group", 1),
        scale=fields.number("routed_scaling_factor", 1.0),
        shared=_mlp(fields, fields.integer("moe_shared_expert_intermediate_size")),
        latent=fields.optional_integer("moe_latent_size"),
    )


def configure(fields: Fields, architecture: str) -> ModelConfig:
    kinds = _layer_kinds(fields)
    made = {
        "linear_attention": lambda: LayerConfig((_scan(fields),)),
        "full_attention": lambda: LayerConfig((decoder.attention(fields, rope=None),)),
        "mlp": lambda: LayerConfig((), _mlp(fields, fields.integer("intermediate_size"))),
        "moe": lambda: LayerConfig((), _experts(fields)),
    }
    layers = tuple(made[kind]() for kind in kinds)
    return base_config(fields, architecture, layers, norm_epsilon=fields.number("layer_norm_epsilon", 1e-5))


def _mixture(builder: Builder, prefix: str, config: ExpertsConfig) -> Part:
    reader, width = builder.reader, builder.config.width
    inner = width if config.latent is None else config.latent
    assert config.shared is not None
    latent = None
    if config.latent is not None:
        bias = config.shared.bias
        latent = Latent(
            reader.linear([f"{prefix}fc1_latent_proj"], width, [inner], bias=bias),
            reader.linear([f"{prefix}fc2_latent_proj"], inner, [width], bias=bias, summed=True),
        )
    correction = f"{prefix}gate.e_score_correction_bias"
    routed = Experts(
        config,
        read_router(config, reader, f"{prefix}gate", width, correction),
        read_experts(builder.local_experts(f"{prefix}experts.", config), reader, f"{prefix}experts.", inner),
        reader.placement.dtype,
        latent=latent,
    )
    return Together(routed, builder.mlp(f"{prefix}shared_experts.", config.shared))


def blocks(builder: Builder) -> Iterator[Block]:
    for index, layer in enumerate(builder.config.layers):
        at = f"backbone.layers.{index}."
        prefix = f"{at}mixer."
        part: Part
        match layer.mixers, layer.mlp:
            case (Mamba2Config() as scan,), None:
                part = builder.mamba2(prefix, scan)
            case (AttentionConfig() as attention,), None:
                part = builder.attention(prefix, attention)
            case (), MlpConfig() as mlp:
                part = builder.mlp(prefix, mlp)
            case (), ExpertsConfig() as experts:
                part = _mixture(builder, prefix, experts)
            case _:
                raise AssertionError("a layer of this family has exactly one part")
        yield Block(part, before=builder.norm(f"{at}norm"))


FAMILY = Family(
    ("NemotronHForCausalLM",),
    configure,
    blocks,
    embedding="backbone.embeddings",
    norm="backbone.norm_f",
    ignored=(r"^mtp\.",),
)
