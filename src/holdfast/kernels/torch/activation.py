"""Gated and plain activations of MLPs, in torch. The gate is the first half of the last dimension.

Called through `holdfast.kernels`; experts call `activate` between their two products.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch.nn import functional

Activation = Literal["swiglu", "geglu", "swiglu_clamped", "relu_squared"]


class Clamp(NamedTuple):
    """The parameters of `swiglu_clamped`."""

    alpha: float = 1.702
    limit: float = 7.0


DEFAULT_CLAMP = Clamp()


class ExpertForm(NamedTuple):
    """What experts have beside their two weights: the activation between both products, and biases."""

    activation: Activation = "swiglu"
    clamp: Clamp = DEFAULT_CLAMP
    bias13: torch.Tensor | None = None
    bias2: torch.Tensor | None = None


PLAIN_EXPERTS = ExpertForm()


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (functional.silu(gate.float()) * up.float()).to(gate_up.dtype)


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (functional.gelu(gate.float(), approximate="tanh") * up.float()).to(gate_up.dtype)


def swiglu_clamped(
    gate_up: torch.Tensor, *, alpha: float = DEFAULT_CLAMP.alpha, limit: float = DEFAULT_CLAMP.limit
) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.float().clamp(max=limit)
    up = up.float().clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1.0)).to(gate_up.dtype)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x.float()).square().to(x.dtype)


def activate(x: torch.Tensor, activation: Activation, clamp: Clamp = DEFAULT_CLAMP) -> torch.Tensor:
    """An activation by name; `clamp` is for `swiglu_clamped` alone."""
    match activation:
        case "swiglu":
            return swiglu(x)
        case "geglu":
            return geglu(x)
        case "swiglu_clamped":
            return swiglu_clamped(x, alpha=clamp.alpha, limit=clamp.limit)
        case "relu_squared":
            return relu_squared(x)
