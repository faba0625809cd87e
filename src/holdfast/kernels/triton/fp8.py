# mypy: allow-untyped-defs, allow-incomplete-defs
"""Projections with an fp8 weight.

A step of a few tokens is bound by reading weights, which fp8 halves. One token: a program walks along some
rows of the weight, as in `linear`. A few tokens: the weight is the left operand; where its rows do not fill
the device the depth is split (split-K), and the last program of a tile to arrive adds up the parts in order.
Many tokens: cuBLAS.

Where the device multiplies fp8, activations of more than one token are quantised to it, with a scale per
group of a token (or per token, where the weight has no blocks), as fp8 checkpoints expect. Elsewhere the
weight is converted to the activations' dtype, inside the product or, for many tokens, as a whole. Same
function as in `kernels/torch/fp8.py`. Called through `holdfast.kernels`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn.functional import ScalingType, scaled_mm

from holdfast.kernels.triton.launch import (
    ceiling,
    launch_next,
    overlap,
    power_of_two,
    precision,
    wait_for_inputs,
)
from holdfast.kernels.triton.splits import add_splits, counters, split_depth


class Blocks(NamedTuple):
    """Weight rows per program, elements per iteration, warps, stages, programs per multiprocessor."""

    rows: int
    depth: int
    warps: int
    stages: int
    filling: int = 1


GROUP = 128
"""Elements of a row that share a scale, in weights and in activations."""
LARGEST = 448.0
"""The largest fp8 number."""
FEW_TOKENS = 64

# As measured on an H200; for a few tokens by the next power of two.
ONE = Blocks(8, 1024, 4, 4)
FEW = {
    16: Blocks(64, GROUP, 4, 5, 4),
    32: Blocks(64, GROUP, 4, 5, 3),
    64: Blocks(64, GROUP, 4, 4, 3),
}
FLOAT32 = Blocks(32, GROUP, 4, 2)


@triton.jit
def _scaled(
    x, scales, begin, depth, block_depth,
    WHOLE: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Activations of one token, times the scales of their weights."""
    place = begin + tl.arange(0, DEPTH)
    if EVEN:
        value = tl.load(x + place).to(tl.float32)
    else:
        value = tl.load(x + place, mask=place < depth, other=0.0).to(tl.float32)
    if not WHOLE:
        group = begin + tl.arange(0, DEPTH // GROUP) * GROUP
        scale = tl.load(scales + group // block_depth, mask=group < depth, other=0.0)
        value = tl.reshape(tl.reshape(value, [DEPTH // GROUP, GROUP]) * scale[:, None], [DEPTH])
    return value[None, :]


@triton.jit(do_not_specialize=["rows_out"])
def _one_product(
    x, codes, scales, bias, out, rows_out, depth, scale_row, block_rows, block_depth,
    HAS_BIAS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some outputs of one token, whose rows lie in one block; `WHOLE`: one scale per row."""
    launch_next(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows_out
    steps = tl.arange(0, DEPTH)
    lines = codes + row.to(tl.int64)[:, None] * depth + steps[None, :]
    block_scales = scales + (tl.program_id(0) * ROWS // block_rows) * scale_row
    taken = inside[:, None]
    if not EVEN:
        taken = taken & (steps < depth)[None, :]
    # Weights do not depend on the preceding kernel.
    part = tl.load(lines, mask=taken, other=0.0)
    wait_for_inputs(OVERLAP)
    total = part.to(tl.float32) * _scaled(x, block_scales, 0, depth, block_depth, WHOLE, EVEN, GROUP, DEPTH)
    for begin in tl.range(DEPTH, depth, DEPTH, num_stages=STAGES):
        if not EVEN:
            taken = inside[:, None] & (begin + steps < depth)[None, :]
        part = tl.load(lines + begin, mask=taken, other=0.0)
        value = _scaled(x, block_scales, begin, depth, block_depth, WHOLE, EVEN, GROUP, DEPTH)
        total += part.to(tl.float32) * value
    result = tl.sum(total, axis=1)
    if WHOLE:
        result *= tl.load(scales + row // block_rows * scale_row, mask=inside, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "splits"])
def _few_product(
    x, x_scales, codes, scales, bias, out, partial, arrived, tokens, rows_out, depth, x_stride, x_scale_group,
    x_group, scale_row, block_rows, block_depth, splits,
    HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr, SPLIT: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some outputs of a few tokens, or one split's partial sums."""
    launch_next(OVERLAP)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    steps = tl.arange(0, DEPTH)
    inside = row < rows_out
    real = token < tokens
    lines = codes + row.to(tl.int64)[:, None] * depth + steps[None, :]
    values = x + token.to(tl.int64)[None, :] * x_stride + steps[:, None]
    scale_lines = scales + (row // block_rows) * scale_row
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    length = tl.cdiv(tl.cdiv(depth, splits), DEPTH) * DEPTH
    first = split * length
    end = tl.minimum(first + length, depth)
    wait_for_inputs(OVERLAP)
    scale = tl.load(scale_lines + first // block_depth, mask=inside & (first < end), other=0.0)
    of_tokens = x_scales + token
    x_scale = tl.full([TOKENS], 1.0, tl.float32)
    if ROUNDED:
        x_scale = tl.load(of_tokens + first // x_group * x_scale_group, mask=real & (first < end), other=0.0)
    for begin in tl.range(first, end, DEPTH):
        deep = begin + steps < depth
        right = tl.load(values + begin, mask=deep[:, None] & real[None, :], other=0.0)
        left = tl.load(lines + begin, mask=inside[:, None] & deep[None, :], other=0.0).to(right.dtype)
        # The next scales arrive while this product is computed.
        after = begin + DEPTH
        next_scale = tl.load(scale_lines + after // block_depth, mask=inside & (after < end), other=0.0)
        product = tl.dot(left, right, input_precision=PRECISION) * scale[:, None]
        if ROUNDED:
            next_x_scale = tl.load(
                of_tokens + after // x_group * x_scale_group, mask=real & (after < end), other=0.0
            )
            product *= x_scale[None, :]
            x_scale = next_x_scale
        total += product
        scale = next_scale
    stored = inside[:, None] & real[None, :]
    last = True
    if SPLIT:
        total, last = add_splits(total, partial, arrived, tile, split, splits, token, ROWS, TOKENS)
    if last:
        if HAS_BIAS:
            total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
        places = out + token.to(tl.int64)[None, :] * rows_out + row[:, None]
        tl.store(places, total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _round(
    x,
    codes,
    scales,
    depth,
    x_stride,
    scale_token,
    scale_group,
    largest,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Quantise some groups of one token, with their scales."""
    launch_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, BLOCK)[None, :]
    inside = (tl.arange(0, BLOCK) < GROUP)[None, :] & (column < depth)
    value = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    # The scale of a group of zeros is arbitrary.
    scale = tl.maximum(tl.max(tl.abs(value), axis=1), 1e-10) / largest
    tl.store(codes + token * depth + column, (value / scale[:, None]).to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + token * scale_token + group * scale_group, scale, mask=group * GROUP < depth)


@triton.jit
def _convert(codes, scales, out, depth, scale_row, block_rows, block_depth, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < depth
    scale = tl.load(scales + row // block_rows * scale_row + column // block_depth, mask=inside, other=0.0)
    value = tl.load(codes + row * depth + column, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + row * depth + column, value.to(out.dtype.element_ty), mask=inside)


class _Weight(NamedTuple):
    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    @property
    def whole(self) -> bool:
        """Whether there is one scale per row."""
        return self.block[1] >= self.codes.shape[1]


def _one(x: torch.Tensor, weight: _Weight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    rows_out, depth = weight.codes.shape
    _one_product[(ceiling(rows_out, ONE.rows),)](
        x, weight.codes, weight.scales, x if bias is None else bias, out, rows_out, depth,
        weight.scales.stride(0), *weight.block, HAS_BIAS=bias is not None, WHOLE=weight.whole,
        EVEN=depth % ONE.depth == 0, GROUP=GROUP, ROWS=ONE.rows, DEPTH=ONE.depth, STAGES=ONE.stages,
        num_warps=ONE.warps, **overlap(x),
    )  # fmt: skip


class _Rounded(NamedTuple):
    """Quantised activations: codes [tokens, depth], scales [groups, tokens] of `group` elements each."""

    codes: torch.Tensor
    scales: torch.Tensor
    group: int


def _few(
    x: torch.Tensor, rounded: _Rounded | None, weight: _Weight, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    tokens, (rows_out, depth) = x.shape[0], weight.codes.shape
    height = power_of_two(tokens, 16)
    blocks = FLOAT32 if x.dtype == torch.float32 else FEW[height]
    tiles = ceiling(rows_out, blocks.rows)
    splits, partial = split_depth(x, tiles, blocks.rows * height, depth // blocks.depth, blocks.filling)
    values, value_scales, group = (x, x, depth) if rounded is None else rounded
    _few_product[(tiles, splits)](
        values, value_scales, weight.codes, weight.scales, x if bias is None else bias, out, partial,
        counters(x.device), tokens, rows_out, depth, values.stride(0), value_scales.stride(0), group,
        weight.scales.stride(0), *weight.block, splits,
        HAS_BIAS=bias is not None, ROUNDED=rounded is not None, SPLIT=splits > 1, TOKENS=height,
        ROWS=blocks.rows, DEPTH=blocks.depth, PRECISION=precision(x.dtype),
        num_warps=blocks.warps, num_stages=blocks.stages, **overlap(x),
    )  # fmt: skip


def _converted(x: torch.Tensor, weight: _Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product with the whole weight in the activations' dtype."""
    rows_out, depth = weight.codes.shape
    dense = torch.empty(rows_out, depth, dtype=x.dtype, device=x.device)
    _convert[(rows_out, ceiling(depth, 2048))](
        weight.codes, weight.scales, dense, depth, weight.scales.stride(0), *weight.block, BLOCK=2048,
        num_warps=4,
    )  # fmt: skip
    return torch.nn.functional.linear(x, dense, bias)


def _in_eight_bits(x: torch.Tensor, weight: _Weight) -> _Rounded:
    """Activations quantised like the weight: per group of a token, or per token."""
    tokens, depth = x.shape
    group, groups = (depth, 1) if weight.whole else (GROUP, 8)
    # cuBLAS needs contiguous rows of scales.
    padded = ceiling(tokens, 16) * 16
    codes = torch.empty(padded, depth, dtype=weight.codes.dtype, device=x.device)
    scales = torch.empty(depth // group, padded, dtype=torch.float32, device=x.device)
    _round[(tokens, ceiling(depth, group * groups))](
        x, codes, scales, depth, x.stride(0), 1, padded, LARGEST, GROUPS=groups, GROUP=group,
        BLOCK=power_of_two(group), num_warps=4, **overlap(x),
    )  # fmt: skip
    return _Rounded(codes, scales, group)


def _many(x: torch.Tensor, rounded: _Rounded, weight: _Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """cuBLAS's product of fp8 operands."""
    scales, recipe, weight_recipe = weight.scales, ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    if weight.whole:
        scales = scales.expand(weight.codes.shape[0], 1).contiguous()
        recipe = weight_recipe = ScalingType.RowWise
    product = scaled_mm(
        rounded.codes,
        weight.codes.t(),
        rounded.scales.t(),
        recipe,
        scales.t(),
        weight_recipe,
        bias=bias,
        output_dtype=x.dtype,
    )
    return product[: x.shape[0]]


def rounds(x: torch.Tensor, codes: torch.Tensor) -> bool:
    """Whether activations are quantised to fp8."""
    if x.shape[0] <= 1 or x.dtype != torch.bfloat16:
        return False
    return codes.shape[0] % GROUP == codes.shape[1] % GROUP == 0 and _multiplies(x.device.index)


@cache
def _multiplies(index: int | None) -> bool:
    """Whether the device multiplies fp8, and cuBLAS supports group scales."""
    return index is not None and torch.cuda.get_device_capability(index) == (9, 0)


def linear_fp8(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    tokens, depth = x.shape[0], codes.shape[1]
    assert codes.is_contiguous() and scales.is_contiguous() and x.stride(1) == 1
    assert block[1] >= depth or block[1] % GROUP == 0, "a block of products has one scale along its depth"
    weight = _Weight(codes, scales, block)
    rounded = _in_eight_bits(x, weight) if rounds(x, codes) else None
    if tokens > FEW_TOKENS:
        return _converted(x, weight, bias) if rounded is None else _many(x, rounded, weight, bias)
    out = torch.empty(tokens, codes.shape[0], dtype=x.dtype, device=x.device)
    if tokens == 1 and (weight.whole or block[0] % ONE.rows == 0):
        _one(x, weight, bias, out)
    elif tokens:
        _few(x, rounded, weight, bias, out)
    return out
