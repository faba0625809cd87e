"""Projections with an fp8 weight, in torch.

Called through `holdfast.kernels`; weight loading calls `dequantise` too.
"""

from __future__ import annotations

import torch


def dequantise(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The weight in float32: each block of the codes times its scale."""
    rows, depth = codes.shape
    each = scales.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :depth]
    return codes.float() * each


def linear_fp8(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    weight = dequantise(codes, scales, block).to(x.dtype)
    return torch.nn.functional.linear(x, weight, bias)
