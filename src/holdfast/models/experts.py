"""Mixtures of experts: the router, which picks a few experts per token, and the experts.

Routing is small and done in float32. Checkpoints store expert weights one by one or stacked, gate and up
separate, joined or interleaved: `read_experts` and `read_stacks` convert all of them to the kernel's layout
(gate rows, then up rows). Built by `blocks`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast import kernels
from holdfast.kernels import Batch, Clamp, ExpertForm, ExpertWeight, RouterForm
from holdfast.kernels.cpu.experts import PackedExperts
from holdfast.kernels.cpu.matrix import PackedMatrix
from holdfast.kernels.cpu.packing import pack_matrix
from holdfast.kernels.quantised import QuantisedWeight
from holdfast.models.config import ExpertsConfig
from holdfast.models.layers import Part
from holdfast.models.linear import DenseLinear, Linear, PackedLinear
from holdfast.models.memory import Memory
from holdfast.models.weights import WeightReader

_NO_CLAMP = Clamp(1.0, math.inf)
"""For gates that are not clamped; never read."""


ExpertMatrices = ExpertWeight | tuple[PackedMatrix, ...]
"""One weight of all experts; a tuple is packed for the C kernels."""


class ExpertWeights(NamedTuple):
    """Stacked: `inner` [experts, inner, width] with gate rows first, `outer` [experts, width, inner]."""

    inner: ExpertMatrices
    outer: ExpertMatrices
    inner_bias: Tensor | None = None
    outer_bias: Tensor | None = None


class Stack(NamedTuple):
    """A tensor with one weight of all experts, [experts, outputs, inputs].

    `swapped` stacks are [experts, inputs, outputs]; the outputs are reordered by `order`.
    """

    name: str
    outputs: int
    inputs: int
    swapped: bool = False
    order: Tensor | None = None

    def shape(self, experts: int) -> tuple[int, int, int]:
        """The shape of the tensor."""
        sides = (self.inputs, self.outputs) if self.swapped else (self.outputs, self.inputs)
        return (experts, *sides)

    def straight(self, weights: Tensor) -> Tensor:
        """Weights [..., outputs, inputs] of the tensor, or of some experts in it."""
        weights = weights.transpose(-2, -1) if self.swapped else weights
        return (weights if self.order is None else weights[..., self.order, :]).contiguous()


class Latent(NamedTuple):
    """Projections to a narrower width before the experts, and back."""

    into: Linear
    back: Linear


class Router:
    """Picks the experts of a token and their shares."""

    def __init__(self, config: ExpertsConfig, weight: Tensor | PackedMatrix, bias: Tensor | None) -> None:
        """`bias` is added to the logits, or for sigmoid routers to the scores that choose."""
        self._weight = weight
        self._bias = bias
        self._form = RouterForm(
            config.router,
            config.experts_per_token,
            config.normalise,
            config.scale,
            config.router_groups,
            config.router_groups_kept,
        )

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(expert ids, shares), each [tokens, experts per token]."""
        if isinstance(self._weight, PackedMatrix):
            return kernels.choose_experts(self._weight(x.float()), self._bias, self._form)
        return kernels.route(x, self._weight, self._bias, self._form)


class Experts:
    """A router, its experts, and the projections around them where experts have a narrower width."""

    def __init__(
        self,
        config: ExpertsConfig,
        router: Router,
        weights: ExpertWeights,
        dtype: torch.dtype,
        latent: Latent | None = None,
    ) -> None:
        """`dtype` is that of the activations."""
        self._router = router
        self._latent = latent
        self._activation: kernels.Activation
        self._clamp = _NO_CLAMP if config.clamp is None else config.clamp
        if config.clamp is not None:
            self._activation = "swiglu_clamped"
        elif config.gated:
            self._activation = "geglu" if config.activation == "gelu_tanh" else "swiglu"
        else:
            self._activation = "relu_squared"
        self._weights = weights
        if dtype == torch.bfloat16 and config.clamp in (None, Clamp()):
            self._weights = _packed(weights, gated=self._activation != "relu_squared")
        self._form = ExpertForm(self._activation, self._clamp, weights.inner_bias, weights.outer_bias)
        inner, outer = weights.inner, weights.outer
        self._pass: PackedExperts | None = None
        if isinstance(inner, tuple) and isinstance(outer, tuple):
            self._pass = PackedExperts(inner, outer, self._form)

    def __call__(self, x: Tensor, batch: Batch, memory: Memory) -> Tensor:  # noqa: ARG002
        ids, weights = self._router(x)
        inputs = x if self._latent is None else self._latent.into(x)
        out = self._products(inputs, ids, weights)
        return out if self._latent is None else self._latent.back(out)

    def _products(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """The weighted sum of the chosen experts, by the kernel for their weights' form."""
        if self._pass is not None:
            return self._pass(x, ids, shares)
        inner, outer = self._weights.inner, self._weights.outer
        assert not isinstance(inner, tuple) and not isinstance(outer, tuple), "both have the same form"
        return kernels.experts(x, ids, shares, inner, outer, self._form)


def _packed(weights: ExpertWeights, *, gated: bool) -> ExpertWeights:
    """Quantised weights in the order of the device's kernels, where it has some."""
    inner, outer = weights.inner, weights.outer
    if not isinstance(inner, QuantisedWeight) or not isinstance(outer, QuantisedWeight):
        return weights
    if inner.permutation is not None or outer.permutation is not None:
        return weights
    packed = [kernels.pack_codes(inner, gated=gated), kernels.pack_codes(outer)]
    if packed[0] is None or packed[1] is None:
        return weights
    return weights._replace(inner=packed[0], outer=packed[1])


class GatedPart:
    """A part whose output is scaled by a scalar sigmoid gate of the input."""

    def __init__(self, part: Part, gate: DenseLinear | PackedLinear) -> None:
        self._part = part
        self._gate = gate

    def __call__(self, x: Tensor, batch: Batch, memory: Memory) -> Tensor:
        return self._part(x, batch, memory) * torch.sigmoid(self._gate(x))


def read_router(
    config: ExpertsConfig, reader: WeightReader, name: str, width: int, bias: str | None
) -> Router:
    """The router whose weight is `name`.weight, with the bias called `bias` if it has one."""
    weight = reader.matrix(f"{name}.weight", (config.experts, width), torch.float32)
    if isinstance(weight, Tensor) and weight.is_cuda:
        narrow = weight.to(reader.placement.dtype)
        if reader.dummy or torch.equal(narrow.float(), weight):
            weight = narrow  # as most checkpoints have it: products with inputs of that type are exact
    offset = None if bias is None else reader.tensor(bias, (config.experts,), torch.float32)
    return Router(config, weight, offset)


def read_experts(config: ExpertsConfig, reader: WeightReader, prefix: str, width: int) -> ExpertWeights:
    """Stack expert weights stored one by one under `prefix`0., `prefix`1. and so on."""
    parts = ["gate_proj", "up_proj"] if config.gated else ["up_proj"]
    kept = _quantised_experts(config, reader, prefix, width, parts)
    if kept is not None:
        return kept
    inner = torch.empty(
        config.experts,
        config.width * len(parts),
        width,
        dtype=reader.placement.dtype,
        device=reader.placement.device,
    )
    outer = inner.new_empty(config.experts, width, config.width)
    for expert in range(config.experts):
        for index, part in enumerate(parts):
            rows = slice(index * config.width, (index + 1) * config.width)
            inner[expert, rows] = reader.tensor(f"{prefix}{expert}.{part}.weight", (config.width, width))
        outer[expert] = reader.tensor(f"{prefix}{expert}.down_proj.weight", (width, config.width))
    return ExpertWeights(inner, outer)


def read_stacks(reader: WeightReader, experts: int, inner: Stack, outer: Stack) -> ExpertWeights:
    """Experts of which one tensor has the weights of all; both are packed as stored, or neither."""
    if all(reader.keeps_numbers([stack.name], stack.inputs) for stack in (inner, outer)):
        return ExpertWeights(_packed_stack(reader, experts, inner), _packed_stack(reader, experts, outer))
    dense = [stack.straight(reader.tensor(stack.name, stack.shape(experts))) for stack in (inner, outer)]
    return ExpertWeights(dense[0], dense[1])


def _packed_stack(reader: WeightReader, experts: int, stack: Stack) -> tuple[PackedMatrix, ...]:
    stored = reader.stored(stack.name, stack.shape(experts))
    return tuple(pack_matrix([stack.straight(weight)]) for weight in stored)


def _quantised_experts(
    config: ExpertsConfig, reader: WeightReader, prefix: str, width: int, parts: list[str]
) -> ExpertWeights | None:
    """Experts that keep their codes; None where they are dense, or of different forms."""
    outer = reader.experts(
        [[f"{prefix}{expert}.down_proj"] for expert in range(config.experts)], config.width, width
    )
    if outer is None:
        return None
    names = [[f"{prefix}{expert}.{part}" for part in parts] for expert in range(config.experts)]
    inner = reader.experts(names, width, config.width * len(parts))
    return None if type(inner) is not type(outer) else ExpertWeights(inner, outer)
