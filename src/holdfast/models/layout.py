"""The memory that a model's sequences need, derived from its configuration.

`memory_shape` says which components a model has (full KV, window KV, state), how many layers share a unit of
each, and the bytes of a page or slot. The engine builds the core's memory layout and the storage tensors from
it. No tensors here.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.models.config import AttentionConfig, DeltaConfig, Mamba2Config, MixerConfig, ModelConfig
from holdfast.models.fields import ConfigurationError

STATE_ELEMENT_BYTES = 4
"""Recurrent states are float32 whatever the model's dtype: they accumulate over the whole session."""
SCALE_BYTES = 4
"""Bytes of the scale of a row of a state at rest in eight bits."""


@dataclass(frozen=True, slots=True)
class PageShape:
    """One KV component: all its layers have keys and values of the same shape."""

    layers: int
    kv_heads: int
    head_dim: int

    def bytes_per_page(self, page_size: int, element_bytes: int, scale_bytes: int = 0) -> int:
        """Bytes of one page: keys and values of all the component's layers, and a scale of each head."""
        return self.layers * 2 * page_size * self.kv_heads * (self.head_dim * element_bytes + scale_bytes)


@dataclass(frozen=True, slots=True)
class StateShape:
    """One recurrent state: the last inputs of the convolutions, and the matrices of the scans."""

    layers: int
    convolution_channels: int
    convolution_width: int
    heads: int
    head_dim: int
    state_dim: int

    def bytes_per_slot(self, element_bytes: int) -> int:
        """Bytes of one slot; the convolution part is in the model's dtype, the rest in float32."""
        convolution = self.convolution_channels * self.convolution_width * element_bytes
        recurrent = self.heads * self.head_dim * self.state_dim * STATE_ELEMENT_BYTES
        return self.layers * (convolution + recurrent)

    def bytes_per_rested_slot(self, element_bytes: int) -> int:
        """Bytes of one slot at rest: a byte for each element of the recurrent part, a scale for each row."""
        convolution = self.convolution_channels * self.convolution_width * element_bytes
        recurrent = self.heads * self.head_dim * (self.state_dim + SCALE_BYTES)
        return self.layers * (convolution + recurrent)


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """The memory components of a model. `window` is the longest of its sliding windows, in tokens."""

    full: PageShape | None
    window: PageShape | None
    window_tokens: int
    state: StateShape | None

    @property
    def components(self) -> tuple[str, ...]:
        """The names of the components that exist, in a fixed order."""
        present = (("full", self.full), ("window", self.window), ("state", self.state))
        return tuple(name for name, shape in present if shape is not None)


def memory_shape(config: ModelConfig) -> MemoryShape:
    """The components of a model and the shape of their units."""
    mixers = [mixer for layer in config.layers for mixer in layer.mixers]
    attention = [mixer for mixer in mixers if isinstance(mixer, AttentionConfig)]
    windows = [mixer.window for mixer in attention if mixer.window is not None]
    return MemoryShape(
        full=_page_shape("full-attention", [mixer for mixer in attention if mixer.window is None]),
        window=_page_shape("sliding-window", [mixer for mixer in attention if mixer.window is not None]),
        window_tokens=max(windows, default=0),
        state=_state_shape(mixers),
    )


def _page_shape(kind: str, layers: list[AttentionConfig]) -> PageShape | None:
    shapes = {(layer.kv_heads, layer.head_dim) for layer in layers}
    if len(shapes) > 1:
        raise ConfigurationError(
            f"{kind} layers with different KV shapes are not supported: {sorted(shapes)}"
        )
    return PageShape(len(layers), *shapes.pop()) if shapes else None


def _state_shape(mixers: list[MixerConfig]) -> StateShape | None:
    shapes: list[tuple[int, int, int, int, int]] = []
    for mixer in mixers:
        if isinstance(mixer, Mamba2Config):
            recurrent = (mixer.heads, mixer.head_dim, mixer.state_dim)
        elif isinstance(mixer, DeltaConfig):
            recurrent = (mixer.value_heads, mixer.value_dim, mixer.key_dim)
        else:
            continue
        shapes.append((mixer.convolution_channels, mixer.kernel - 1, *recurrent))
    if len(set(shapes)) > 1:
        raise ConfigurationError(f"state layers of different shapes are not supported: {sorted(set(shapes))}")
    return StateShape(len(shapes), *shapes[0]) if shapes else None
