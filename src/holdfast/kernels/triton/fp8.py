# mypy: allow-untyped-defs, allow-incomplete-defs
"""Projections whose weight is kept in 8-bit floating point: read so, multiplied in the activations' type.

A step of a few tokens is bound by the bytes of its weights, of which there are half as many. One token: a
program walks along some rows of the weight, as in `linear`. A few tokens: the weight is the left factor, so
that it goes from memory through the conversion into the product without a stop; each block of products is
multiplied by its scale before it is added. Many tokens: the weight is converted as a whole and the library
multiplies. Same function and promises as `kernels/torch/fp8.py`. Called through `holdfast.kernels`.
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
FEW_TOKENS = 64
# One token: rows of the weight a program, elements along them at a time, warps; as measured on an H200.
ONE_ROWS, ONE_DEPTH, ONE_WARPS = 16, 1024, 8
# A few tokens: rows of the weight a program, warps, stages of loads: up to 16 tokens, more, in float32.
SIXTEEN_BLOCKS, FEW_BLOCKS, FLOAT32_BLOCKS = (32, 2, 5), (64, 4, 3), (32, 4, 2)


@triton.jit
def _one_product(
    x, codes, scales, bias, out, rows_out, depth, scale_row, block_rows, block_depth,
    HAS_BIAS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some outputs of one token, whose rows lie in one block; `WHOLE`: a row has one scale."""
    launch_next(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows_out
    steps = tl.arange(0, DEPTH)
    lines = codes + row.to(tl.int64)[:, None] * depth + steps[None, :]
    block_scales = scales + (tl.program_id(0) * ROWS // block_rows) * scale_row
    total = tl.zeros([ROWS, DEPTH], tl.float32)
    wait_for_inputs(OVERLAP)
    for begin in tl.range(0, depth, DEPTH, num_stages=3):
        deep = begin + steps < depth
        value = tl.load(x + begin + steps, mask=deep, other=0.0).to(tl.float32)
        if not WHOLE:
            value *= tl.load(block_scales + (begin + steps) // block_depth, mask=deep, other=0.0)
        part = tl.load(lines + begin, mask=inside[:, None] & deep[None, :], other=0.0)
        total += part.to(tl.float32) * value[None, :]
    result = tl.sum(total, axis=1)
    if WHOLE:
        result *= tl.load(scales + row // block_rows * scale_row, mask=inside, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _few_product(
    x, codes, scales, bias, out, tokens, rows_out, depth, x_stride, scale_row, block_rows, block_depth,
    HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some outputs of a few tokens."""
    launch_next(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    steps = tl.arange(0, DEPTH)
    inside = row < rows_out
    real = token < tokens
    lines = codes + row.to(tl.int64)[:, None] * depth + steps[None, :]
    values = x + token.to(tl.int64)[None, :] * x_stride + steps[:, None]
    scale_lines = scales + (row // block_rows) * scale_row
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    wait_for_inputs(OVERLAP)
    for begin in tl.range(0, depth, DEPTH):
        deep = begin + steps < depth
        right = tl.load(values + begin, mask=deep[:, None] & real[None, :], other=0.0)
        left = tl.load(lines + begin, mask=inside[:, None] & deep[None, :], other=0.0).to(right.dtype)
        scale = tl.load(scale_lines + begin // block_depth, mask=inside, other=0.0)
        total += tl.dot(left, right, input_precision=PRECISION) * scale[:, None]
    if HAS_BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    places = out + token.to(tl.int64)[None, :] * rows_out + row[:, None]
    tl.store(places, total.to(out.dtype.element_ty), mask=inside[:, None] & real[None, :])


@triton.jit
def _convert(codes, scales, out, depth, scale_row, block_rows, block_depth, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < depth
    scale = tl.load(scales + row // block_rows * scale_row + column // block_depth, mask=inside, other=0.0)
    value = tl.load(codes + row * depth + column, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + row * depth + column, value.to(out.dtype.element_ty), mask=inside)


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
    if tokens > FEW_TOKENS:
        weight = torch.empty(rows_out, depth, dtype=x.dtype, device=x.device)
        _convert[(rows_out, ceiling(depth, 2048))](
            codes, scales, weight, depth, scales.stride(0), *block, BLOCK=2048, num_warps=4
        )
        return torch.nn.functional.linear(x, weight, bias)
    out = torch.empty(tokens, rows_out, dtype=x.dtype, device=x.device)
    offset = x if bias is None else bias
    whole = block[1] >= depth
    if tokens == 1 and (whole or block[0] % ONE_ROWS == 0):
        _one_product[(ceiling(rows_out, ONE_ROWS),)](
            x, codes, scales, offset, out, rows_out, depth, scales.stride(0), *block,
            HAS_BIAS=bias is not None, WHOLE=whole, ROWS=ONE_ROWS, DEPTH=ONE_DEPTH,
            num_warps=ONE_WARPS, **overlap(x),
        )  # fmt: skip
    elif tokens:
        rows, warps, stages = SIXTEEN_BLOCKS if tokens <= 16 else FEW_BLOCKS
        if x.dtype == torch.float32:
            rows, warps, stages = FLOAT32_BLOCKS
        _few_product[(ceiling(rows_out, rows),)](
            x, codes, scales, offset, out, tokens, rows_out, depth, x.stride(0), scales.stride(0), *block,
            HAS_BIAS=bias is not None, TOKENS=power_of_two(tokens, 16), ROWS=rows, DEPTH=DEPTH,
            PRECISION=precision(x.dtype), num_warps=warps, num_stages=stages, **overlap(x),
        )  # fmt: skip
    return out
