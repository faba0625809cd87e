# mypy: allow-untyped-defs, allow-incomplete-defs
"""Products with quantised weights as Triton kernels: codes are read, and become numbers in registers.

A few tokens: the weight is the left operand. A byte of two 4-bit codes belongs to an even and an odd input,
so a tile of bytes is multiplied twice, with the even and with the odd inputs. Where a tile lies within a
group, its scale is applied to the product, else to the numbers. Where the rows do not fill the device the
depth is split (split-K), and the last program of a tile to arrive adds up the parts in order. Many tokens:
the weight is dequantised, some rows at a time, and multiplied by cuBLAS. Experts are in `quantised_experts`.
Same functions as in `kernels/torch/quantised.py`. Called through `holdfast.kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.kernels.quantised import Codes, QuantisedWeight
from holdfast.kernels.triton.launch import (
    ceiling,
    launch_next,
    overlap,
    power_of_two,
    precision,
    wait_for_inputs,
)
from holdfast.kernels.triton.splits import add_splits, counters, split_depth

FEW_TOKENS = 64
DEPTH = 128
"""Inputs of a tile."""
ROWS = {16: 64, 32: 64, 64: 64}
FILLING = 4
"""Programs for each multiprocessor."""
PIECE = 1 << 26
"""Most elements of a weight that are dequantised at once, for many tokens."""


class Flags(NamedTuple):
    """The compile-time parameters of a kernel: the codes, and the layout of scales along a tile."""

    kind: str
    halves: int
    exponents: bool
    has_zeros: bool
    spread: str
    group: int

    @property
    def named(self) -> dict[str, object]:
        """As arguments of a kernel."""
        return {
            "KIND": self.kind,
            "HALVES": self.halves,
            "EXPONENTS": self.exponents,
            "HAS_ZEROS": self.has_zeros,
            "SPREAD": self.spread,
            "GROUP": self.group,
        }


def flags_of(weight: QuantisedWeight) -> Flags:
    """`spread` is "tile" for one scale a row of a tile, "groups" for a few, "each" for any group."""
    group, spread = weight.group, "each"
    if group % DEPTH == 0 or group == weight.inputs:
        spread = "tile"
    elif DEPTH % group == 0:
        spread = "groups"
    return Flags(
        weight.kind.value,
        8 // weight.kind.bits,
        weight.scales.dtype == torch.uint8,
        weight.zeros is not None,
        spread,
        group if spread == "groups" else 1,
    )


@triton.jit
def numbers(taken, HALF: tl.constexpr, KIND: tl.constexpr):
    """The numbers of bytes, in float32; of 4-bit codes, one half of each byte."""
    if KIND == "int8":
        return taken.to(tl.float32)
    code = taken.to(tl.int32)
    if KIND == "e4m3":
        magnitude = code & 127
        normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
        return tl.where(code > 127, -value, value)
    code = (code >> (4 * HALF)) & 15
    if KIND == "int4":
        return code.to(tl.float32)
    magnitude = code & 7
    large = (2 | (magnitude & 1)) << (tl.maximum(magnitude >> 1, 1) - 1)
    value = tl.where(magnitude < 4, magnitude, large).to(tl.float32) * 0.5
    return tl.where(code > 7, -value, value)


@triton.jit
def scale_values(at, mask, EXPONENTS: tl.constexpr):
    """Scales in float32; exponents by their bits."""
    if EXPONENTS:
        return (tl.load(at, mask=mask, other=0).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def zero_values(at, mask, HAS_ZEROS: tl.constexpr):
    """Zero points of 4-bit integers."""
    if HAS_ZEROS:
        return tl.load(at, mask=mask, other=0).to(tl.float32)
    return tl.full(mask.shape, 8.0, tl.float32)


@triton.jit
def tile_values(
    taken, scales, zeros, line, inside, begin, depth, group,
    HALF: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr, EXPONENTS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, SPREAD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """One half of a tile [ROWS, DEPTH / HALVES]: numbers less zero points, times scales unless one a row.

    `line` is the place of each row's first scale.
    """
    value = numbers(taken, HALF, KIND)
    if SPREAD == "tile":
        if KIND == "int4":
            value -= zero_values(zeros + line + begin // group, inside, HAS_ZEROS)[:, None]
    elif SPREAD == "groups":
        COUNT: tl.constexpr = DEPTH // GROUP
        column = tl.arange(0, COUNT)
        at = line[:, None] + begin // GROUP + column[None, :]
        mask = inside[:, None] & (begin + column * GROUP < depth)[None, :]
        grouped = tl.reshape(value, [ROWS, COUNT, GROUP // HALVES])
        if KIND == "int4":
            grouped -= zero_values(zeros + at, mask, HAS_ZEROS)[:, :, None]
        grouped *= scale_values(scales + at, mask, EXPONENTS)[:, :, None]
        value = tl.reshape(grouped, [ROWS, DEPTH // HALVES])
    else:
        place = begin + tl.arange(0, DEPTH // HALVES) * HALVES + HALF
        at = line[:, None] + place[None, :] // group
        mask = inside[:, None] & (place < depth)[None, :]
        if KIND == "int4":
            value -= zero_values(zeros + at, mask, HAS_ZEROS)
        value *= scale_values(scales + at, mask, EXPONENTS)
    return value


@triton.jit(do_not_specialize=["tokens", "splits"])
def _few_product(
    x, permutation, codes, scales, zeros, factors, bias, out, partial, arrived, tokens, rows_out, depth,
    x_stride, group, splits,
    HAS_BIAS: tl.constexpr, HAS_FACTORS: tl.constexpr, PERMUTED: tl.constexpr, SPLIT: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr,
    EXPONENTS: tl.constexpr, HAS_ZEROS: tl.constexpr, SPREAD: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some outputs of a few tokens, or one split's partial sums."""
    launch_next(OVERLAP)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = row < rows_out
    token = tl.arange(0, TOKENS)
    real = token < tokens
    steps = tl.arange(0, DEPTH // HALVES)
    lines = codes + row.to(tl.int64)[:, None] * (depth // HALVES) + steps[None, :]
    line = row.to(tl.int64) * (depth // group)
    values = x + token.to(tl.int64)[None, :] * x_stride
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    length = tl.cdiv(tl.cdiv(depth, splits), DEPTH) * DEPTH
    first = split * length
    wait_for_inputs(OVERLAP)
    for begin in tl.range(first, tl.minimum(first + length, depth), DEPTH):
        deep = begin // HALVES + steps < depth // HALVES
        taken = tl.load(lines + begin // HALVES, mask=inside[:, None] & deep[None, :], other=0)
        part = tl.zeros([ROWS, TOKENS], tl.float32)
        for half in tl.static_range(HALVES):
            place = begin + steps * HALVES + half
            if PERMUTED:
                place = tl.load(permutation + place, mask=deep, other=0)
            right = tl.load(values + place[:, None], mask=deep[:, None] & real[None, :], other=0.0)
            left = tile_values(
                taken, scales, zeros, line, inside, begin, depth, group,
                half, KIND, HALVES, EXPONENTS, HAS_ZEROS, SPREAD, GROUP, ROWS, DEPTH,
            )  # fmt: skip
            part = tl.dot(left.to(right.dtype), right, part, input_precision=PRECISION)
        if SPREAD == "tile":
            part *= scale_values(scales + line + begin // group, inside, EXPONENTS)[:, None]
        total += part
    last = True
    if SPLIT:
        total, last = add_splits(total, partial, arrived, tile, split, splits, token, ROWS, TOKENS)
    if last:
        if HAS_FACTORS:
            total *= tl.load(factors + row, mask=inside, other=0.0)[:, None]
        if HAS_BIAS:
            total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
        places = out + token.to(tl.int64)[None, :] * rows_out + row[:, None]
        tl.store(places, total.to(out.dtype.element_ty), mask=inside[:, None] & real[None, :])


@triton.jit
def _dequantise(
    codes, scales, zeros, factors, out, rows_out, depth, group,
    HAS_FACTORS: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr, EXPONENTS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A block of a weight, its columns in the order of the codes."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows_out
    begin = tl.program_id(1) * DEPTH
    steps = begin // HALVES + tl.arange(0, DEPTH // HALVES)
    mask = inside[:, None] & (steps < depth // HALVES)[None, :]
    line = row.to(tl.int64) * (depth // group)
    taken = tl.load(
        codes + row.to(tl.int64)[:, None] * (depth // HALVES) + steps[None, :], mask=mask, other=0
    )
    for half in tl.static_range(HALVES):
        value = tile_values(
            taken, scales, zeros, line, inside, begin, depth, group,
            half, KIND, HALVES, EXPONENTS, HAS_ZEROS, "each", 1, ROWS, DEPTH,
        )  # fmt: skip
        if HAS_FACTORS:
            value *= tl.load(factors + row, mask=inside, other=0.0)[:, None]
        at = out + row.to(tl.int64)[:, None] * depth + (steps * HALVES + half)[None, :]
        tl.store(at, value.to(out.dtype.element_ty), mask=mask)


def _given(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """An optional argument: some tensor stands for one that is not read."""
    return other if tensor is None else tensor


def _few(x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    tokens, rows_out, depth = x.shape[0], weight.outputs, weight.inputs
    height = power_of_two(tokens, 16)
    rows = 32 if x.dtype == torch.float32 else ROWS[height]
    tiles = ceiling(rows_out, rows)
    splits, partial = split_depth(x, tiles, rows * height, depth // DEPTH, FILLING)
    out = torch.empty(tokens, rows_out, dtype=x.dtype, device=x.device)
    _few_product[(tiles, splits)](
        x, _given(weight.permutation, x), weight.codes, weight.scales, _given(weight.zeros, x),
        _given(weight.factors, x), _given(bias, x), out, partial, counters(x.device), tokens, rows_out,
        depth, x.stride(0), weight.group, splits,
        HAS_BIAS=bias is not None, HAS_FACTORS=weight.factors is not None,
        PERMUTED=weight.permutation is not None, SPLIT=splits > 1, TOKENS=height, ROWS=rows, DEPTH=DEPTH,
        PRECISION=precision(x.dtype), num_warps=4, num_stages=2 if x.dtype == torch.float32 else 4,
        **flags_of(weight).named, **overlap(x),
    )  # fmt: skip
    return out


def dequantised(weight: QuantisedWeight, dtype: torch.dtype) -> torch.Tensor:
    """A dense weight [outputs, inputs], its columns in the order of the codes."""
    rows_out, depth = weight.outputs, weight.inputs
    out = torch.empty(rows_out, depth, dtype=dtype, device=weight.codes.device)
    flags = flags_of(weight)
    _dequantise[(ceiling(rows_out, 16), ceiling(depth, 256))](
        weight.codes, weight.scales, _given(weight.zeros, out), _given(weight.factors, out), out, rows_out,
        depth, weight.group, HAS_FACTORS=weight.factors is not None, KIND=flags.kind, HALVES=flags.halves,
        EXPONENTS=flags.exponents, HAS_ZEROS=flags.has_zeros, ROWS=16, DEPTH=256, num_warps=4,
    )  # fmt: skip
    return out


def linear_quantised(x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    assert x.stride(1) == 1 and weight.codes.is_contiguous() and weight.scales.is_contiguous()
    assert weight.kind is not Codes.INT4 or weight.group % 2 == 0
    tokens, rows_out = x.shape[0], weight.outputs
    if not tokens:
        return torch.empty(0, rows_out, dtype=x.dtype, device=x.device)
    if tokens <= FEW_TOKENS:
        return _few(x, weight, bias)
    if weight.permutation is not None:
        x = x[:, weight.permutation]
    step = max(1, PIECE // weight.inputs)
    parts = [
        torch.nn.functional.linear(x, dequantised(weight.rows(slice(begin, begin + step)), x.dtype))
        for begin in range(0, rows_out, step)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return out if bias is None else out + bias
