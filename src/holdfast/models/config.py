"""The configuration of a model: every size that layers, memory and the engine are built from.

A family's file turns its config.json (or GGUF metadata in the same shape) into a `ModelConfig`: complete,
immutable and per layer, so that no later code reads a family's keys. Helpers for keys that families share are
here too. Called by the families, by `layout`, and by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from holdfast.models.fields import ConfigurationError, Fields

if TYPE_CHECKING:  # a configuration is read without torch
    from holdfast.kernels import Clamp, RouterKind

RopeKind: TypeAlias = Literal["default", "linear", "llama3", "yarn", "factors"]
Activation: TypeAlias = Literal["silu", "gelu_tanh", "relu_squared"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu_squared",
}
_ROPE_SCALINGS = ("linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of the first `dimensions` of a head, in the half-split layout."""

    theta: float
    dimensions: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dimensions: float = 0.0
    truncate: bool = True
    factors: tuple[float, ...] = ()
    """Divisors of the frequencies, for the kind `factors`."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Grouped-query attention over KV pages, optionally with a sliding window."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    window: int | None = None
    input_width: int | None = None
    """Width of the input of the projections; None: the model's."""
    input_bias: bool = False
    output_bias: bool = False
    head_norm: bool = False
    """RMS norm of each head's query and key."""
    projection_norm: bool = False
    """RMS norm over the whole query and key projections."""
    sinks: bool = False
    output_gate: bool = False
    """Whether the query projection carries a per-head sigmoid gate for the output."""
    input_multiplier: float = 1.0
    key_multiplier: float = 1.0
    output_multiplier: float = 1.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigurationError(f"{self.heads} query heads do not divide over {self.kv_heads} KV heads")
        if self.window is not None and self.window < 1:
            raise ConfigurationError(f"sliding window must be at least 1 token, not {self.window}")


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """A Mamba2 mixer: causal convolution, selective scan, gated norm."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    kernel: int
    convolution_bias: bool
    input_bias: bool
    output_bias: bool
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    norm: Literal["gate_then_norm", "norm_then_gate", "gate_only"] = "gate_then_norm"
    norm_groups: int = 1
    input_multiplier: float = 1.0
    output_multiplier: float = 1.0
    projection_multipliers: tuple[float, ...] | None = None
    """Multipliers of gate, x, B, C and time step; None where all are one."""

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ConfigurationError(f"{self.heads} heads of a state do not divide over {self.groups} groups")

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def convolution_channels(self) -> int:
        return self.width + 2 * self.groups * self.state_dim


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """A gated-delta-rule mixer: causal convolution, delta rule with decay, gated norm."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ConfigurationError(
                f"{self.value_heads} value heads do not divide over {self.key_heads} key heads"
            )

    @property
    def convolution_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """An MLP: gated (two inputs, one output) or plain (one in, one out)."""

    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    gate_multiplier: float = 1.0
    output_multiplier: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts with a router, and optionally a `shared` expert."""

    experts: int
    experts_per_token: int
    width: int
    router: RouterKind
    activation: Activation = "silu"
    gated: bool = True
    normalise: bool = False
    bias: bool = False
    clamp: Clamp | None = None
    """The clamp of gpt-oss, whose gate and up columns are interleaved; None: no clamp."""
    router_groups: int = 1
    router_groups_kept: int = 1
    scale: float = 1.0
    shared: MlpConfig | None = None
    shared_gate: bool = False
    latent: int | None = None
    """Width that tokens are projected to before the experts, and back after them."""

    def __post_init__(self) -> None:
        if self.experts_per_token > self.experts:
            raise ConfigurationError(
                f"{self.experts_per_token} experts per token exceed the {self.experts} experts"
            )
        if self.experts % self.router_groups or self.router_groups_kept > self.router_groups:
            raise ConfigurationError(
                f"a router cannot keep {self.router_groups_kept} of {self.router_groups} groups of "
                f"{self.experts} experts"
            )


MixerConfig: TypeAlias = AttentionConfig | Mamba2Config | DeltaConfig


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer: mixers with the same input, added up, and an MLP or none."""

    mixers: tuple[MixerConfig, ...]
    mlp: MlpConfig | ExpertsConfig | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A whole model. `dtype` is the checkpoint's own, if it names one."""

    architecture: str
    vocabulary: int
    width: int
    context_length: int
    layers: tuple[LayerConfig, ...]
    norm_epsilon: float
    norm_offset: float = 0.0
    """Added to stored norm weights: 1 for families that store the difference from one."""
    tied_embeddings: bool = False
    embedding_multiplier: float = 1.0
    round_embedding_multiplier: bool = False
    """Whether the multiplier is first rounded to the model's dtype, as in training."""
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None
    dtype: str | None = None
    eos_tokens: tuple[int, ...] = ()

    @property
    def context_reach(self) -> int | None:
        """The largest usable context: past `context_length` with rotary scaling; None without positions."""
        mixers = [mixer for layer in self.layers for mixer in layer.mixers]
        ropes = [mixer.rope for mixer in mixers if isinstance(mixer, AttentionConfig) and mixer.rope]
        if not ropes:
            return None
        return max(self.context_length, *(int(rope.original_context * rope.factor) for rope in ropes))


def base_config(
    fields: Fields, architecture: str, layers: tuple[LayerConfig, ...], *, norm_epsilon: float
) -> ModelConfig:
    """A `ModelConfig` from the keys that families share; `dataclasses.replace` adds the rest."""
    return ModelConfig(
        architecture=architecture,
        vocabulary=fields.integer("vocab_size"),
        width=fields.integer("hidden_size"),
        context_length=fields.integer("max_position_embeddings", 1 << 20),
        layers=layers,
        norm_epsilon=norm_epsilon,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=checkpoint_dtype(fields),
        eos_tokens=fields.integers("eos_token_id"),
    )


def checkpoint_dtype(fields: Fields) -> str | None:
    """The dtype in config.json, under either key."""
    for key in ("dtype", "torch_dtype"):
        if fields.has(key):
            return fields.text(key).removeprefix("torch.")
    return None


def activation(name: str) -> Activation:
    """The activation that a configuration names; an unknown one is an error that lists the known ones."""
    if name not in _ACTIVATIONS:
        raise ConfigurationError(
            f"activation {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def rope_from(
    fields: Fields,
    head_dim: int,
    theta: float = 10_000.0,
    layer_type: str | None = None,
    rotated_share: float = 1.0,
) -> Rope:
    """The rotary settings, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`.

    `layer_type` selects the settings where they differ by layer type. `rotated_share` is the default share of
    a head to rotate.
    """
    parameters = fields.inner("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    if layer_type is not None and parameters.has(layer_type):
        parameters = parameters.inner(layer_type)
    base = (
        parameters.positive("rope_theta")
        if parameters.has("rope_theta")
        else fields.positive("rope_theta", theta)
    )
    holder = parameters if parameters.has("partial_rotary_factor") else fields
    dimensions = int(head_dim * holder.positive("partial_rotary_factor", rotated_share))
    if dimensions % 2 or not 0 < dimensions <= head_dim:
        raise ConfigurationError(f"{fields.where}: {dimensions} of {head_dim} dimensions cannot be rotated")
    if base <= 1.0:
        raise ConfigurationError(f"{fields.where}: 'rope_theta' must be above 1, not {base}")
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if kind in ("default", "mrope"):
        return Rope(base, dimensions)
    if kind == "factors":
        factors = parameters.numbers("factors", ())
        if len(factors) != dimensions // 2:
            raise ConfigurationError(
                f"{fields.where}: {len(factors)} rotary factors do not fit {dimensions // 2} frequencies"
            )
        return Rope(base, dimensions, "factors", factors=factors)
    if kind not in _ROPE_SCALINGS:
        raise ConfigurationError(
            f"rotary scaling {kind!r} is not supported; supported are {', '.join(_ROPE_SCALINGS)}"
        )
    factor = parameters.positive("factor")
    if kind == "linear":
        return Rope(base, dimensions, "linear", factor)
    original = parameters.integer(
        "original_max_position_embeddings", fields.optional_integer("max_position_embeddings")
    )
    if kind == "llama3":
        return Rope(
            base,
            dimensions,
            "llama3",
            factor,
            original,
            low_frequency_factor=parameters.number("low_freq_factor"),
            high_frequency_factor=parameters.number("high_freq_factor"),
        )
    return Rope(
        base,
        dimensions,
        "yarn",
        factor,
        original,
        beta_fast=parameters.positive("beta_fast", 32.0),
        beta_slow=parameters.positive("beta_slow", 1.0),
        attention_factor=parameters.optional_number("attention_factor"),
        mscale=parameters.number("mscale", 0.0),
        mscale_all_dimensions=parameters.number("mscale_all_dim", 0.0),
        truncate=parameters.flag("truncate", True),
    )
