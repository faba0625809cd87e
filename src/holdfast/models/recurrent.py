"""Recurrent mixers: Mamba2 and the gated delta rule.

Both convolve their inputs over the last few tokens, run a recurrence and apply a gated norm to its output.
The state is read from the batch's source slot and written to its destination slot, so that a turn never
changes the state it began from. Built by `blocks`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from holdfast import kernels
from holdfast.kernels import Batch, Mamba2Weights
from holdfast.models.config import DeltaConfig, Mamba2Config
from holdfast.models.layers import Spread
from holdfast.models.memory import Memory
from holdfast.models.ranks import SpreadNorm
from holdfast.models.weights import WeightReader


class Mamba2:
    """A Mamba2 mixer; `layer` counts the model's state layers.

    Names under `prefix`: in_proj (gate, x, B, C and time step in one), conv1d, A_log, D, dt_bias, norm,
    out_proj.
    """

    def __init__(
        self,
        config: Mamba2Config,
        reader: WeightReader,
        prefix: str,
        *,
        width: int,
        layer: int,
        epsilon: float,
        spread: Spread | None = None,
    ) -> None:
        """`spread`: the gated norm, of which this rank has a part of a group."""
        self._config = config
        self._layer = layer
        self._epsilon = epsilon
        channels, heads = config.convolution_channels, config.heads
        self._splits = [config.width, channels, heads]
        self._input = reader.linear(
            [f"{prefix}in_proj"], width, [config.width + channels + heads], bias=config.input_bias
        )
        self._kernel = reader.tensor(f"{prefix}conv1d.weight", (channels, 1, config.kernel)).squeeze(1)
        self._kernel_bias = (
            reader.tensor(f"{prefix}conv1d.bias", (channels,)) if config.convolution_bias else None
        )
        self._weights = Mamba2Weights(
            A=-reader.tensor(f"{prefix}A_log", (heads,), torch.float32).exp(),
            D=reader.tensor(f"{prefix}D", (heads,), torch.float32),
            dt_bias=reader.tensor(f"{prefix}dt_bias", (heads,), torch.float32),
            dt_limit=config.time_step_limit,
        )
        self._norm = None if config.norm == "gate_only" else reader.norm(f"{prefix}norm", config.width)
        self._spread_norm = None if spread is None or self._norm is None else spread(self._norm)
        self._output = reader.linear(
            [f"{prefix}out_proj"], config.width, [width], bias=config.output_bias, summed=True
        )
        self._multipliers = self._projection_multipliers(reader)

    def _projection_multipliers(self, reader: WeightReader) -> Tensor | None:
        """One multiplier per output of the input projection, or None where all are one."""
        config = self._config
        if config.projection_multipliers is None:
            return None
        grouped = config.groups * config.state_dim
        sizes = torch.tensor([config.width, config.width, grouped, grouped, config.heads])
        factors = torch.tensor(config.projection_multipliers).repeat_interleave(sizes)
        return factors.to(device=reader.placement.device, dtype=reader.placement.dtype)

    def __call__(self, x: Tensor, batch: Batch, memory: Memory) -> Tensor:
        config = self._config
        state = memory.state_layers[self._layer]
        projected = self._input(x if config.input_multiplier == 1.0 else x * config.input_multiplier)
        if self._multipliers is not None:
            projected = projected * self._multipliers
        gate, mixed, step = projected.split(self._splits, dim=-1)
        mixed = kernels.causal_conv(mixed, self._kernel, self._kernel_bias, state.convolution, batch)
        grouped = config.groups * config.state_dim
        inputs, writes, reads = mixed.split([config.width, grouped, grouped], dim=-1)
        scanned = kernels.mamba2_scan(
            inputs.unflatten(-1, (config.heads, config.head_dim)),
            step,
            writes.unflatten(-1, (config.groups, config.state_dim)),
            reads.unflatten(-1, (config.groups, config.state_dim)),
            self._weights,
            state.recurrent,
            batch,
        ).flatten(1)
        if self._norm is None:
            gated = scanned * silu(gate)
        elif self._spread_norm is not None:
            gated = self._gated_over_ranks(scanned, gate, self._spread_norm)
        else:
            gated = kernels.rms_norm_gated(
                scanned,
                gate,
                self._norm,
                self._epsilon,
                group_size=config.width // config.norm_groups,
                norm_before_gate=config.norm == "norm_then_gate",
            )
        out = self._output(gated)
        return out if config.output_multiplier == 1.0 else out * config.output_multiplier

    def _gated_over_ranks(self, scanned: Tensor, gate: Tensor, norm: SpreadNorm) -> Tensor:
        """As `kernels.rms_norm_gated`, over channels of several ranks."""
        activated = silu(gate.float())
        if self._config.norm == "norm_then_gate":
            return (norm(scanned) * activated).to(scanned.dtype)
        return norm(scanned.float() * activated).to(scanned.dtype)


class GatedDelta:
    """A gated-delta-rule mixer; `layer` counts the model's state layers.

    Names under `prefix`: conv1d, A_log, dt_bias, norm, out_proj, and the input projections `projections`
    with their sizes, which `order` brings into query, key, value, gate, rate, decay.
    """

    def __init__(
        self,
        config: DeltaConfig,
        reader: WeightReader,
        prefix: str,
        projections: dict[str, int],
        *,
        order: Tensor | None,
        width: int,
        layer: int,
        epsilon: float,
    ) -> None:
        self._config = config
        self._layer = layer
        self._epsilon = epsilon
        channels, values = config.convolution_channels, config.value_heads * config.value_dim
        self._splits = [channels, values, config.value_heads, config.value_heads]
        assert sum(projections.values()) == sum(self._splits)
        self._input = reader.linear(
            [prefix + name for name in projections], width, list(projections.values()), order=order
        )
        self._kernel = reader.tensor(f"{prefix}conv1d.weight", (channels, 1, config.kernel)).squeeze(1)
        self._decay = -reader.tensor(f"{prefix}A_log", (config.value_heads,), torch.float32).exp()
        self._decay_bias = reader.tensor(f"{prefix}dt_bias", (config.value_heads,), torch.float32)
        self._norm = reader.norm(f"{prefix}norm", config.value_dim)
        self._output = reader.linear([f"{prefix}out_proj"], values, [width], summed=True)

    def __call__(self, x: Tensor, batch: Batch, memory: Memory) -> Tensor:
        config = self._config
        state = memory.state_layers[self._layer]
        mixed, gate, rate, decay = self._input(x).split(self._splits, dim=-1)
        mixed = kernels.causal_conv(mixed, self._kernel, None, state.convolution, batch)
        keys = config.key_heads * config.key_dim
        query, key, value = mixed.split([keys, keys, config.value_heads * config.value_dim], dim=-1)
        out = kernels.gated_delta(
            query.unflatten(-1, (config.key_heads, config.key_dim)),
            key.unflatten(-1, (config.key_heads, config.key_dim)),
            value.unflatten(-1, (config.value_heads, config.value_dim)),
            self._decay * softplus(decay.float() + self._decay_bias),
            rate.sigmoid(),
            state.recurrent,
            batch,
            normalise=True,
        )
        gates = gate.unflatten(-1, (config.value_heads, config.value_dim))
        normed = kernels.rms_norm_gated(out, gates, self._norm, self._epsilon, norm_before_gate=True)
        return self._output(normed.flatten(1))
