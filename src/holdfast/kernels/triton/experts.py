# mypy: allow-untyped-defs, allow-incomplete-defs
"""Mixture of experts as Triton kernels: sort the picks by expert, two grouped products, one sum.

The grid is an upper bound from host-side counts: each expert's picks are padded to whole blocks, and unused
blocks exit at once. There are no atomic additions, so results are deterministic. Same function and results as
`kernels/torch/experts.py`. Called through `holdfast.kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.kernels.torch.activation import PLAIN_EXPERTS, ExpertForm
from holdfast.kernels.triton.activation import activation_value
from holdfast.kernels.triton.launch import (
    ceiling,
    launch_next,
    overlap,
    power_of_two,
    precision,
    processors,
    roomy,
    wait_for_inputs,
)

SCAN = 1024  # picks per iteration of a program


@triton.jit(do_not_specialize=["picks", "block_count"])
def _sort_picks(
    ids, order, block_expert, picks, block_count,
    EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, SCAN: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The picks of one expert, in order, from its first block on; the rest of its last block is -1."""
    launch_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    expert = tl.program_id(0)
    names = tl.arange(0, BLOCK_EXPERTS)
    counts = tl.zeros([BLOCK_EXPERTS], tl.int32)
    for begin in tl.range(0, picks, SCAN):
        at = begin + tl.arange(0, SCAN)
        inside = at < picks
        chosen = tl.load(ids + at, mask=inside, other=0).to(tl.int32)
        counts += tl.histogram(chosen, BLOCK_EXPERTS, mask=inside)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(names < expert, blocks, 0), axis=0)
    mine = tl.sum(tl.where(names == expert, blocks, 0), axis=0)
    count = tl.sum(tl.where(names == expert, counts, 0), axis=0)
    for block in tl.range(0, mine):
        tl.store(block_expert + first + block, expert)
    if expert == EXPERTS - 1:
        for block in tl.range(first + mine, block_count):
            tl.store(block_expert + block, -1)
    filled = 0
    for begin in tl.range(0, picks, SCAN):
        at = begin + tl.arange(0, SCAN)
        match = tl.load(ids + at, mask=at < picks, other=-1).to(tl.int32) == expert
        rank = filled + tl.cumsum(match.to(tl.int32), axis=0) - 1
        tl.store(order + first * BLOCK_M + rank, at, mask=match)
        filled += tl.sum(match.to(tl.int32), axis=0)
    tail = count + tl.arange(0, BLOCK_M)
    tl.store(order + first * BLOCK_M + tail, -1, mask=tail < mine * BLOCK_M)


@triton.jit
def store_picks(
    gate, up, shares, out, picks, columns, rows_out, alpha, limit,
    SHARED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The end of a product: the activation of gate and up, or gate times the share of its pick."""
    real = picks >= 0
    if SHARED:
        result = gate * tl.load(shares + picks, mask=real, other=0.0).to(tl.float32)[:, None]
    else:
        result = activation_value(gate, up, alpha, limit, ACTIVATION)
    places = out + tl.where(real, picks, 0).to(tl.int64)[:, None] * rows_out + columns[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=real[:, None] & (columns < rows_out)[None, :])


@triton.jit(do_not_specialize=["rows_out", "first", "end"])
def _expert_product(
    x, weight, bias, shares, out, order, block_expert, x_stride, weight_expert, weight_row, rows_out, depth,
    alpha, limit, first, end,
    DIVIDE: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One block of picks of one expert by one block of output columns.

    A pick reads row `pick // DIVIDE` of x. The first product applies the activation to gate (row n of the
    weight) and up (row n + rows_out); the second multiplies by the pick's share. The weight has the experts
    from `first` to before `end`; blocks of others are left alone.
    """
    launch_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    block = tl.program_id(1)
    expert = tl.load(block_expert + block)
    if (expert < first) | (expert >= end):
        return
    picks = tl.load(order + block * BLOCK_M + tl.arange(0, BLOCK_M))
    real = picks >= 0
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < rows_out
    steps = tl.arange(0, BLOCK_K)
    lines = x + (tl.where(real, picks, 0) // DIVIDE).to(tl.int64) * x_stride
    weight += (expert - first).to(tl.int64) * weight_expert
    gate_rows = weight + columns.to(tl.int64) * weight_row
    up_rows = gate_rows + rows_out.to(tl.int64) * weight_row
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in tl.range(0, depth, BLOCK_K):
        deep = begin + steps < depth
        left = tl.load(
            lines[:, None] + (begin + steps)[None, :], mask=real[:, None] & deep[None, :], other=0.0
        )
        taken = deep[:, None] & inside[None, :]
        right = tl.load(gate_rows[None, :] + (begin + steps)[:, None], mask=taken, other=0.0)
        gate = tl.dot(left, right, gate, input_precision=PRECISION)
        if GATED:
            right = tl.load(up_rows[None, :] + (begin + steps)[:, None], mask=taken, other=0.0)
            up = tl.dot(left, right, up, input_precision=PRECISION)
    if HAS_BIAS:
        bias += expert * (rows_out * 2 if GATED else rows_out)
        gate += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + rows_out + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    store_picks(gate, up, shares, out, picks, columns, rows_out, alpha, limit, SHARED, ACTIVATION)


@triton.jit
def _sum_picks(parts, out, width, PICKS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """The results of one token's picks, added in order."""
    launch_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for pick in tl.static_range(PICKS):
        total += tl.load(parts + (token * PICKS + pick) * width + columns, mask=inside, other=0.0)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


def sort_picks(
    ids: torch.Tensor, count: int, block_m: int | None = None
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The picks [tokens, picks] sorted by expert: the size of blocks, the picks, each block's expert."""
    picks = ids.numel()
    if block_m is None:
        # Blocks as tall as an expert's average share of the picks, within the tensor core sizes.
        block_m = min(128, power_of_two(ceiling(picks, count), 16))
    block_count = picks // block_m + min(count, picks)
    order = torch.empty(block_count * block_m, dtype=torch.int32, device=ids.device)
    block_expert = torch.empty(block_count, dtype=torch.int32, device=ids.device)
    _sort_picks[(count,)](
        ids, order, block_expert, picks, block_count, EXPERTS=count, BLOCK_EXPERTS=power_of_two(count),
        BLOCK_M=block_m, SCAN=min(SCAN, power_of_two(picks, 16)), num_warps=4, **overlap(ids),
    )  # fmt: skip
    return block_m, order, block_expert


def sum_picks(parts: torch.Tensor, picks: int, dtype: torch.dtype) -> torch.Tensor:
    """The results [tokens * picks, hidden] of each token's picks, added."""
    tokens, hidden = parts.shape[0] // picks, parts.shape[1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=parts.device)
    block = min(1024, power_of_two(hidden))
    _sum_picks[(tokens, ceiling(hidden, block))](parts, out, hidden, PICKS=picks, BLOCK=block, **overlap(out))
    return out


class Picks(NamedTuple):
    """Picks sorted by expert, with the shared arguments of the experts' products."""

    block: int
    order: torch.Tensor
    block_expert: torch.Tensor
    of_token: int
    shares: torch.Tensor


def add_experts(
    x: torch.Tensor,
    picks: Picks,
    w13: torch.Tensor,
    w2: torch.Tensor,
    form: ExpertForm,
    middle: torch.Tensor,
    parts: torch.Tensor,
    first: int = 0,
) -> None:
    """Both products of the experts from `first` on, those with weights, by way of `middle` into `parts`."""
    inner, hidden, end = w2.shape[2], w2.shape[1], first + w13.shape[0]
    gated = form.activation != "relu_squared"
    bias13, bias2, blocks = form.bias13, form.bias2, picks.block_expert.shape[0]
    flags = {"PRECISION": precision(x.dtype), **overlap(x)}
    tiling = _tiling(x, picks.block, blocks, inner, gated=gated)
    _expert_product[(ceiling(inner, tiling["BLOCK_N"]), blocks)](
        x, w13, x if bias13 is None else bias13, picks.shares, middle, picks.order, picks.block_expert,
        x.stride(0), w13.stride(0), w13.stride(1), inner, w13.shape[2], *form.clamp, first, end,
        DIVIDE=picks.of_token, GATED=gated, ACTIVATION=form.activation, HAS_BIAS=bias13 is not None,
        SHARED=False, **tiling, **flags,
    )  # fmt: skip
    tiling = _tiling(x, picks.block, blocks, hidden, gated=False)
    _expert_product[(ceiling(hidden, tiling["BLOCK_N"]), blocks)](
        middle, w2, x if bias2 is None else bias2, picks.shares, parts, picks.order, picks.block_expert,
        middle.stride(0), w2.stride(0), w2.stride(1), hidden, inner, 0.0, 0.0, first, end,
        DIVIDE=1, GATED=False, ACTIVATION=form.activation, HAS_BIAS=bias2 is not None, SHARED=True,
        **tiling, **flags,
    )  # fmt: skip


def _tiling(x: torch.Tensor, block: int, blocks: int, width: int, *, gated: bool) -> dict[str, int]:
    """The tile of a program, its warps and stages.

    Few programs have low tiles, two to a multiprocessor, and load far ahead: their time is that of memory.
    """
    most = 64 if block <= 64 or gated else 128
    tiling = {
        "BLOCK_M": block, "BLOCK_N": most, "BLOCK_K": 64, "num_warps": 8 if block >= 128 else 4,
        "num_stages": 3,
    }  # fmt: skip
    if x.dtype == torch.float32:
        return tiling | {"BLOCK_K": 32, "num_stages": 2}
    index = x.device.index
    at_once = 2 * processors(index)
    if block > 16 or ceiling(width, most) * blocks > 2 * at_once or not roomy(index):
        return tiling
    columns = next((each for each in (most, 32) if ceiling(width, each) * blocks >= at_once), 16)
    return tiling | {"BLOCK_N": columns, "BLOCK_K": 128, "num_stages": 4 if columns > 32 else 6}


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    form: ExpertForm = PLAIN_EXPERTS,
) -> torch.Tensor:
    tokens, hidden = x.shape
    if not tokens:
        return torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    for tensor in (x, w13, w2):
        assert tensor.stride(-1) == 1
    picks = Picks(*sort_picks(ids.contiguous(), w13.shape[0]), ids.shape[1], weights.contiguous())
    middle = torch.empty(ids.numel(), w2.shape[2], dtype=x.dtype, device=x.device)
    parts = torch.empty(ids.numel(), hidden, dtype=torch.float32, device=x.device)
    add_experts(x, picks, w13, w2, form, middle, parts)
    return sum_picks(parts, ids.shape[1], x.dtype)
