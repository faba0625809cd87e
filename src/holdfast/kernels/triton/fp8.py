# mypy: allow-untyped-defs, allow-incomplete-defs
"""Projections whose weight is kept in 8-bit floating point: read so, multiplied in the activations' type.

A step of a few tokens is bound by the bytes of its weights, of which there are half as many. Each block of
products is multiplied by the scale of its part of the weight before it is added, so that one scale for a
whole weight and one for each block of it are the same kernel. Same function and promises as
`kernels/torch/fp8.py`. Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.kernels.triton.launch import (
    ceiling,
    launch_next,
    overlap,
    power_of_two,
    precision,
    wait_for_inputs,
)

DEPTH = 128


@triton.jit
def _product(
    x, codes, scales, bias, out, tokens, rows_out, depth, x_stride, scale_row, block_rows, block_depth,
    HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some outputs of some tokens."""
    launch_next(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    steps = tl.arange(0, DEPTH)
    inside = row < rows_out
    real = token < tokens
    lines = codes + row.to(tl.int64)[None, :] * depth + steps[:, None]
    values = x + token.to(tl.int64)[:, None] * x_stride + steps[None, :]
    scale_lines = scales + (row // block_rows) * scale_row
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    wait_for_inputs(OVERLAP)
    for begin in tl.range(0, depth, DEPTH):
        deep = begin + steps < depth
        left = tl.load(values + begin, mask=real[:, None] & deep[None, :], other=0.0)
        right = tl.load(lines + begin, mask=deep[:, None] & inside[None, :], other=0.0).to(left.dtype)
        scale = tl.load(scale_lines + begin // block_depth, mask=inside, other=0.0)
        total += tl.dot(left, right, input_precision=PRECISION) * scale[None, :]
    if HAS_BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    places = out + token.to(tl.int64)[:, None] * rows_out + row[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


def linear_fp8(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    tokens, rows_out, depth = x.shape[0], codes.shape[0], codes.shape[1]
    assert codes.is_contiguous() and scales.is_contiguous() and x.stride(1) == 1
    assert block[1] >= depth or block[1] % DEPTH == 0, "a block of products has one scale along its depth"
    out = torch.empty(tokens, rows_out, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    exact = x.dtype == torch.float32
    height = min(32 if exact else 128, power_of_two(tokens, 16))
    rows, warps, stages = (32, 4, 4) if height == 16 else (64, 4, 4) if height <= 64 else (128, 8, 3)
    if exact:
        rows, warps, stages = 32, 4, 2
    _product[(ceiling(rows_out, rows), ceiling(tokens, height))](
        x, codes, scales, x if bias is None else bias, out, tokens, rows_out, depth, x.stride(0),
        scales.stride(0), *block, HAS_BIAS=bias is not None, TOKENS=height, ROWS=rows, DEPTH=DEPTH,
        PRECISION=precision(x.dtype), num_warps=warps, num_stages=stages, **overlap(x),
    )  # fmt: skip
    return out
