"""Root-mean-square norms, in torch: plain, with the residual sum in front, and gated.

All arithmetic is in float32 and rounded once, to the type of the input. Called through
`holdfast.kernels`; these are also the references that the Triton kernels are tested against.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def _normalise(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """The norm of float32 x over its last dimension, as float32."""
    scaled = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    gain = weight.float()
    return scaled * (gain + offset if offset else gain)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> torch.Tensor:
    if x.dtype == torch.float32 and weight.dtype == torch.float32 and not offset:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)
    return _normalise(x.float(), weight, eps, offset).to(x.dtype)


def rms_norm_residual(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    multiplier: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    if multiplier == 1.0:
        total = residual + x
    else:
        total = torch.add(residual.float(), x.float(), alpha=multiplier).to(residual.dtype)
    return rms_norm(total, weight, eps, offset=offset), total


def rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = False,
) -> torch.Tensor:
    width = x.shape[-1]
    group = width if group_size is None else group_size
    assert width % group == 0, "the groups of a norm must divide its width"
    activated = functional.silu(gate.float())
    value = x.float() if norm_before_gate else x.float() * activated
    grouped = value.reshape(*value.shape[:-1], width // group, group)
    scaled = grouped * torch.rsqrt(grouped.square().mean(dim=-1, keepdim=True) + eps)
    normed = scaled.flatten(-2) * weight.float()
    return (normed * activated if norm_before_gate else normed).to(x.dtype)
