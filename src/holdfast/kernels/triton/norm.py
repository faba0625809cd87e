# mypy: allow-untyped-defs, allow-incomplete-defs
"""Root-mean-square norms as Triton kernels: one program per row (or group of a row).

Same functions and results as `kernels/torch/norm.py`. Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.kernels.triton.launch import as_rows, launch_next, overlap, power_of_two, wait_for_inputs


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    out,
    total,
    x_stride,
    residual_stride,
    width,
    eps,
    offset,
    multiplier,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    launch_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    wait_for_inputs(OVERLAP)
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        before = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        # The norm is of the sum as it is stored, so that both results agree.
        rounded = (before + multiplier * value).to(total.dtype.element_ty)
        tl.store(total + row * width + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    tl.store(out + row * width + columns, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> torch.Tensor:
    flat = as_rows(x)
    rows, width = flat.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        block = power_of_two(width)
        _rms_norm[(rows,)](
            flat, flat, weight, out, out, flat.stride(0), 0, width, eps, offset, 1.0,
            HAS_RESIDUAL=False, BLOCK=block, num_warps=_warps(block), **overlap(x),
        )  # fmt: skip
    return out


def rms_norm_residual(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    multiplier: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    flat, before = as_rows(x), as_rows(residual)
    rows, width = flat.shape
    total = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    out = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    if rows:
        block = power_of_two(width)
        _rms_norm[(rows,)](
            flat, before, weight, out, total, flat.stride(0), before.stride(0), width, eps, offset,
            multiplier, HAS_RESIDUAL=True, BLOCK=block, num_warps=_warps(block), **overlap(x),
        )  # fmt: skip
    return out, total


@triton.jit
def _rms_norm_gated(
    x,
    gate,
    weight,
    out,
    x_stride,
    gate_stride,
    width,
    eps,
    GROUP: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    launch_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    steps = tl.arange(0, BLOCK)
    inside = steps < GROUP
    columns = tl.program_id(1) * GROUP + steps
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    lever = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    lever = lever * tl.sigmoid(lever)
    if not NORM_FIRST:
        value = value * lever
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / GROUP + eps)
    value = value * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if NORM_FIRST:
        value = value * lever
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), mask=inside)


def rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = False,
) -> torch.Tensor:
    flat, lever = as_rows(x), as_rows(gate)
    rows, width = flat.shape
    group = width if group_size is None else group_size
    assert width % group == 0, "the groups of a norm must divide its width"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        block = power_of_two(group)
        _rms_norm_gated[(rows, width // group)](
            flat, lever, weight, out, flat.stride(0), lever.stride(0), width, eps,
            GROUP=group, NORM_FIRST=norm_before_gate, BLOCK=block, num_warps=_warps(block), **overlap(x),
        )  # fmt: skip
    return out
