"""Linear projections with a dense weight, in torch.

Called through `holdfast.kernels`. Packed 12-bit weights are for GPUs only and ignored here.
"""

from __future__ import annotations

import torch

from holdfast.kernels.torch.activation import Activation, geglu, relu_squared, swiglu, swiglu_clamped

_ACTIVATIONS = {
    "swiglu": swiglu,
    "geglu": geglu,
    "swiglu_clamped": swiglu_clamped,
    "relu_squared": relu_squared,
}


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    twelve: object = None,  # noqa: ARG001
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    made = torch.nn.functional.linear(x, weight, bias)
    return made if out is None else out.copy_(made)


def linear_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    twelve: object = None,
) -> torch.Tensor:
    return _ACTIVATIONS[activation](linear(x, weight, bias, twelve))
