"""Attention and MLP parts.

Each class holds its weights and is called as `part(x, batch, memory)` with x [tokens, width] of a ragged
batch; it returns a tensor of the same shape. Parts compose the kernels and are stateless: state that outlives
a step is in `memory`. Recurrent mixers are in `recurrent`, experts in `experts`. Built by `blocks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from holdfast import kernels
from holdfast.kernels import Batch, Rotation
from holdfast.models.config import AttentionConfig, MlpConfig
from holdfast.models.linear import DenseLinear, Linear
from holdfast.models.memory import Memory
from holdfast.models.quantised.products import QuantisedLinear
from holdfast.models.ranks import SpreadNorm
from holdfast.models.weights import WeightReader

Spread: TypeAlias = Callable[[Tensor], SpreadNorm]
"""Makes a norm over channels of several ranks from its weight."""


class Part(Protocol):
    """Anything that a block can run between its norms."""

    def __call__(self, x: Tensor, batch: Batch, memory: Memory) -> Tensor: ...


class Attention:
    """Grouped-query attention over the pages of one component.

    `layer` counts within the component (full or window). Names under `prefix`: q_proj, k_proj, v_proj,
    o_proj, and depending on the configuration q_norm, k_norm and sinks.
    """

    def __init__(
        self,
        config: AttentionConfig,
        reader: WeightReader,
        prefix: str,
        *,
        width: int,
        layer: int,
        rotary: Tensor | None,
        epsilon: float,
        norm_offset: float,
        spread: Spread | None = None,
    ) -> None:
        """`spread`: the norm over the whole projections, of which this rank has a part."""
        self.config = config
        self._layer = layer
        self._epsilon = epsilon
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        gates = queries if config.output_gate else 0
        self._splits = [queries, gates, keys, keys]
        self._input = reader.linear(
            [f"{prefix}q_proj", f"{prefix}k_proj", f"{prefix}v_proj"],
            width if config.input_width is None else config.input_width,
            [queries + gates, keys, keys],
            bias=config.input_bias,
            order=_queries_before_gates(config, keys) if gates else None,
        )
        self._output = reader.linear(
            [f"{prefix}o_proj"], queries, [width], bias=config.output_bias, summed=True
        )
        sizes = (config.head_dim, config.head_dim) if config.head_norm else (queries, keys)
        norms: tuple[Tensor, Tensor] | None = None
        if config.head_norm or config.projection_norm:
            norms = (
                reader.norm(f"{prefix}q_norm", sizes[0], norm_offset),
                reader.norm(f"{prefix}k_norm", sizes[1], norm_offset),
            )
        self._projection_norms = norms if config.projection_norm else None
        self._spread_norm = None if spread is None or norms is None else spread(torch.cat(norms))
        self.rotation = (
            Rotation(rotary, *norms, eps=epsilon)
            if norms is not None and config.head_norm
            else Rotation(rotary)
        )
        self._sinks = (
            reader.tensor(f"{prefix}sinks", (config.heads,), torch.float32) if config.sinks else None
        )

    @property
    def projections(self) -> tuple[Linear, Linear]:
        """The query, key, value and output projections."""
        return self._input, self._output

    def __call__(self, x: Tensor, batch: Batch, memory: Memory) -> Tensor:
        config = self.config
        if config.input_multiplier != 1.0:
            x = x * config.input_multiplier
        query, gate, key, value = self._input(x).split(self._splits, dim=-1)
        if config.key_multiplier != 1.0:
            key = key * config.key_multiplier
        if self._spread_norm is not None:
            normed = self._spread_norm(torch.cat((query, key), dim=-1)).to(x.dtype)
            query, key = normed.split([query.shape[-1], key.shape[-1]], dim=-1)
        elif self._projection_norms is not None:
            query = kernels.rms_norm(query, self._projection_norms[0], self._epsilon)
            key = kernels.rms_norm(key, self._projection_norms[1], self._epsilon)
        pages = batch.full if config.window is None else batch.window
        views = (memory.full_layers if config.window is None else memory.window_layers)[self._layer]
        assert pages is not None, "the batch lacks the pages of a component that the model has"
        query = kernels.rotate_and_write(
            query.unflatten(-1, (config.heads, config.head_dim)),
            key.unflatten(-1, (config.kv_heads, config.head_dim)),
            value.unflatten(-1, (config.kv_heads, config.head_dim)),
            views.key,
            views.value,
            pages.slots,
            batch.positions,
            self.rotation,
        )
        mixed = kernels.attend(
            query,
            views.key,
            views.value,
            pages,
            batch,
            scale=config.scale,
            window=config.window,
            sinks=self._sinks,
        ).flatten(1)
        if config.output_gate:
            mixed = mixed * torch.sigmoid(gate)
        out = self._output(mixed)
        return out if config.output_multiplier == 1.0 else out * config.output_multiplier


def _queries_before_gates(config: AttentionConfig, keys: int) -> Tensor:
    """Row order of a projection with query and gate interleaved by head: queries first, then gates."""
    pairs = torch.arange(2 * config.heads * config.head_dim).view(config.heads, 2, config.head_dim)
    rest = torch.arange(pairs.numel(), pairs.numel() + 2 * keys)
    return torch.cat((pairs.transpose(0, 1).reshape(-1), rest))


_ACTIVATIONS = {"swiglu": kernels.swiglu, "geglu": kernels.geglu, "relu_squared": kernels.relu_squared}
_NAMES: dict[tuple[str, bool], kernels.Activation] = {
    ("silu", True): "swiglu",
    ("gelu_tanh", True): "geglu",
    ("relu_squared", False): "relu_squared",
}


class Mlp:
    """An MLP: `down(activation(gate) * up)`, or `down(activation(up))` without a gate."""

    def __init__(self, config: MlpConfig, inputs: Linear, output: Linear) -> None:
        self.config = config
        self._input = inputs
        self._output = output
        self._activation = _NAMES[config.activation, config.gated]
        if isinstance(inputs, DenseLinear):
            inputs.gated = config.gated and config.gate_multiplier == 1.0

    @classmethod
    def read(cls, config: MlpConfig, reader: WeightReader, prefix: str, width: int) -> Mlp:
        """From the names gate_proj (where gated), up_proj and down_proj under `prefix`."""
        parts = ["gate_proj", "up_proj"] if config.gated else ["up_proj"]
        return cls(
            config,
            reader.linear(
                [f"{prefix}{part}" for part in parts],
                width,
                [config.width] * len(parts),
                bias=config.bias,
                gated=config.gated and config.gate_multiplier == 1.0,
            ),
            reader.linear([f"{prefix}down_proj"], config.width, [width], bias=config.bias, summed=True),
        )

    @property
    def projections(self) -> tuple[Linear, Linear]:
        """The up and down projections."""
        return self._input, self._output

    def __call__(self, x: Tensor, batch: Batch, memory: Memory) -> Tensor:  # noqa: ARG002
        config = self.config
        if isinstance(self._input, DenseLinear) and config.gate_multiplier == 1.0:
            given = self._input
            inner = kernels.linear_gated(x, given.weight, given.bias, self._activation, given.twelve)
        elif isinstance(self._input, QuantisedLinear) and self._input.activates:
            inner = self._input(x, self._activation)
        else:
            inner = self._input(x)
            if config.gate_multiplier != 1.0:
                inner[:, : config.width] *= config.gate_multiplier
            inner = _ACTIVATIONS[self._activation](inner)
        out = self._output(inner)
        return out if config.output_multiplier == 1.0 else out * config.output_multiplier


class Together:
    """Parts with the same input; their outputs are added."""

    def __init__(self, *parts: Part) -> None:
        assert parts
        self._parts = parts

    def __call__(self, x: Tensor, batch: Batch, memory: Memory) -> Tensor:
        total = self._parts[0](x, batch, memory)
        for part in self._parts[1:]:
            total = total + part(x, batch, memory)
        return total
