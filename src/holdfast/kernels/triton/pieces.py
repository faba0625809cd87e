# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="possibly-undefined"
"""Split-K attention over pieces that the device has listed: one launch for any mix of contexts.

A program takes one piece of one tile's keys (`Pieces`) for one key head. The grid follows from host-side
counts, so that one CUDA graph serves every mix of contexts, and a long context among short ones is still
spread over the device. The only piece of a tile is written directly. Otherwise the last program of a tile to
arrive merges the partial results in the order of the pieces, so the result is deterministic. Called by
`attention`; the kernel that makes the list is in `step`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.kernels.batch import Pages, Pieces
from holdfast.kernels.scaled import KvCache
from holdfast.kernels.triton.attention_block import attend_block
from holdfast.kernels.triton.launch import (
    launch_next,
    overlap,
    power_of_two,
    precision,
    roomy,
    wait_for_inputs,
)
from holdfast.kernels.triton.scaled import launched, prepare_queries

PIECE_LEAST = 256  # fewest keys of a piece
PIECE_STEP = 64  # pieces are multiples of this, whatever the block size
MERGED = 32  # pieces merged per iteration
# Keys per block, warps and pipeline stages, by the bytes of one head of one token (at most 512): for low
# tiles, which are bound by reading keys, and for high ones, which are bound by products.
_Blocks = dict[int, tuple[int, int, int]]
LOW_BLOCKS: _Blocks = {32: (64, 4, 3), 64: (64, 4, 3), 128: (64, 4, 3), 256: (64, 4, 2), 512: (64, 4, 3)}
HIGH_BLOCKS: _Blocks = {32: (64, 4, 3), 64: (64, 4, 3), 128: (64, 4, 3), 256: (64, 4, 2), 512: (64, 8, 2)}
FLOAT32_BLOCKS = (32, 4, 2)
WIDE, SMALL_BLOCKS = 512, (32, 2)  # heads whose blocks do not fit every GPU; keys per block and stages there
LOW_ROWS = 16
"""Rows of the lowest tile that the tensor cores support."""


@triton.jit
def _merge_members(
    partial, logs, sinks, out, first, pieces, token, members, kv_head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of a low tile, row by row."""
    columns = tl.arange(0, BLOCK_D)
    for member in tl.range(0, members):
        head = kv_head * GROUP + member % GROUP
        peak = float("-inf")
        if SUNK:
            peak = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total = 1.0 if SUNK else 0.0
        result = tl.zeros([BLOCK_D], tl.float32)
        for begin in tl.range(0, pieces, MERGED):
            piece = begin + tl.arange(0, MERGED)
            at = ((first + piece).to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M + member
            # Written by other programs of this launch: bypass the L1 cache.
            log = tl.load(logs + at, mask=piece < pieces, other=float("-inf"), cache_modifier=".cg")
            loaded = (piece < pieces)[:, None] & (columns < DIM)[None, :]
            parts = tl.load(
                partial + at[:, None] * DIM + columns[None, :], mask=loaded, other=0.0, cache_modifier=".cg"
            )
            higher = tl.maximum(peak, tl.max(log, axis=0))
            shrink = tl.exp2(peak - higher)
            share = tl.exp2(log - higher)
            total = total * shrink + tl.sum(share, axis=0)
            result = result * shrink + tl.sum(parts * share[:, None], axis=0)
            peak = higher
        places = out + ((token + member // GROUP).to(tl.int64) * KV_HEADS * GROUP + head) * DIM
        tl.store(places + columns, (result / total).to(out.dtype.element_ty), mask=columns < DIM)


@triton.jit
def _merge_tile(
    partial, logs, sinks, first, pieces, kv_head, head, real,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, SUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of a high tile, piece by piece."""
    packed = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SUNK:
        peak = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    loaded = real[:, None] & (columns < DIM)[None, :]
    for piece in tl.range(0, pieces):
        at = ((first + piece).to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M + packed
        # Written by other programs of this launch: bypass the L1 cache.
        log = tl.load(logs + at, mask=real, other=0.0, cache_modifier=".cg")
        parts = tl.load(
            partial + at[:, None] * DIM + columns[None, :], mask=loaded, other=0.0, cache_modifier=".cg"
        )
        # Every query sees keys of the first piece, and none of a piece past its position.
        higher = tl.maximum(peak, log)
        shrink = tl.exp2(peak - higher)
        share = tl.exp2(log - higher)
        total = total * shrink + share
        result = result * shrink[:, None] + parts * share[:, None]
        peak = higher
    return result / total[:, None]


@triton.jit
def _rest_of_line(item):
    """Row, first token, tokens, position of the first, first and end key, and line of the first piece."""
    row, token, wanted = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    first, begin, finish = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    return row, token, wanted, first, begin, finish, tl.load(item + 7)


@triton.jit(do_not_specialize=["table_stride"])
def _attend_pieces(
    query, key, value, key_scales, value_scales, out, partial, logs, sinks, table, listed, arrived,
    query_token, query_head, key_unit, key_token, key_head, value_unit, value_token, value_head,
    scale_unit, scale_head, table_stride, scale, softcap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, FIELDS: tl.constexpr,
    HIGH: tl.constexpr, CAPPED: tl.constexpr, SUNK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MERGED: tl.constexpr, EIGHT: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One piece of one tile's keys, for the query heads of one key head."""
    launch_next(OVERLAP)
    work = tl.program_id(0)
    kv_head = tl.program_id(1)
    item = listed + work * FIELDS
    pieces = tl.load(item)
    # A program without a piece need not wait, as long as the first program does.
    if (pieces == 0) & (work > 0):
        return
    row, token, wanted, first, begin, finish, earliest = _rest_of_line(item)
    packed = tl.arange(0, BLOCK_M)
    local = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    real = local < wanted
    places = first + local
    columns = tl.arange(0, BLOCK_D)
    stored = real[:, None] & (columns < DIM)[None, :]
    # The list is older than the model's first kernel; queries and keys need the preceding kernel.
    wait_for_inputs(OVERLAP)
    if pieces == 0:
        return
    query_rows = query + (token + local).to(tl.int64) * query_token + head * query_head
    queries = tl.load(query_rows[:, None] + columns[None, :], mask=stored, other=0.0)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    table += row.to(tl.int64) * table_stride
    key += kv_head * key_head
    value += kv_head * value_head
    query_factor = 1.0
    if EIGHT:
        queries, query_factor = prepare_queries(queries)
        key_scales += kv_head * scale_head
        value_scales += kv_head * scale_head
    WHOLE: tl.constexpr = PAGE % BLOCK_N == 0
    # Blocks that every query of the tile sees in full need no mask.
    clear = tl.maximum(begin, tl.minimum(finish, first + 1) // BLOCK_N * BLOCK_N)
    for start in tl.range(begin, clear, BLOCK_N):
        accumulator, weight_sum, peak = attend_block(
            accumulator, weight_sum, peak, queries, query_factor, key, value, key_scales, value_scales, table,
            key_unit, key_token, value_unit, value_token, scale_unit,
            start, 0, finish, places, scale, softcap, 0,
            PAGE, DIM, BLOCK_D, BLOCK_N, False, False, CAPPED, WHOLE, EIGHT, PRECISION,
        )  # fmt: skip
    for start in tl.range(clear, finish, BLOCK_N, num_stages=1):
        accumulator, weight_sum, peak = attend_block(
            accumulator, weight_sum, peak, queries, query_factor, key, value, key_scales, value_scales, table,
            key_unit, key_token, value_unit, value_token, scale_unit,
            start, 0, finish, places, scale, softcap, 0,
            PAGE, DIM, BLOCK_D, BLOCK_N, True, False, CAPPED, WHOLE, EIGHT, PRECISION,
        )  # fmt: skip
    outputs = out + ((token + local).to(tl.int64) * KV_HEADS * GROUP + head) * DIM
    outputs = outputs[:, None] + columns[None, :]
    if pieces == 1:
        if SUNK:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
            weight_sum += tl.exp2(sink - peak)
        result = accumulator / tl.where(real, weight_sum, 1.0)[:, None]
        tl.store(outputs, result.to(out.dtype.element_ty), mask=stored)
    else:
        at = (work.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M + packed
        nothing = weight_sum == 0.0
        result = accumulator / tl.where(nothing, 1.0, weight_sum)[:, None]
        tl.store(logs + at, tl.where(nothing, float("-inf"), peak + tl.log2(weight_sum)), mask=real)
        tl.store(partial + at[:, None] * DIM + columns[None, :], result, mask=stored)
        # All threads have stored before one of them signals it.
        tl.debug_barrier()
        counter = arrived + earliest * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1) == pieces - 1:
            tl.store(counter, 0)
            if HIGH:
                result = _merge_tile(
                    partial, logs, sinks, earliest, pieces, kv_head, head, real,
                    KV_HEADS, DIM, SUNK, BLOCK_M, BLOCK_D,
                )  # fmt: skip
                tl.store(outputs, result.to(out.dtype.element_ty), mask=stored)
            else:
                _merge_members(
                    partial, logs, sinks, out, earliest, pieces, token, wanted * GROUP, kv_head,
                    GROUP, KV_HEADS, DIM, SUNK, BLOCK_M, BLOCK_D, MERGED,
                )  # fmt: skip


def attend_pieces(
    query: torch.Tensor,
    key_cache: KvCache,
    value_cache: KvCache,
    out: torch.Tensor,
    pages: Pages,
    pieces: Pieces,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> None:
    """Attention of the rows whose pieces are listed, into `out`; other rows are unchanged."""
    _, heads, dim = query.shape
    given = launched(key_cache, value_cache)
    kv_heads = given.key.shape[2]
    group = heads // kv_heads
    items = pieces.listed.shape[0]
    block_m = power_of_two(pieces.queries * group, LOW_ROWS)
    partial = torch.empty(items * kv_heads * block_m * dim, dtype=torch.float32, device=query.device)
    logs = torch.empty(items * kv_heads * block_m, dtype=torch.float32, device=query.device)
    row_bytes = min(512, power_of_two(dim, 16) * max(query.element_size(), given.element_size))
    high = block_m > LOW_ROWS
    block_n, warps, stages = (HIGH_BLOCKS if high else LOW_BLOCKS)[row_bytes]
    if query.dtype == torch.float32:
        block_n, warps, stages = FLOAT32_BLOCKS
    elif row_bytes == WIDE and not roomy(query.device.index):
        block_n, stages = SMALL_BLOCKS
    _attend_pieces[(items, kv_heads)](
        query, *given[:4], out, partial, logs, query if sinks is None else sinks, pages.table,
        pieces.listed, pieces.arrived,
        query.stride(0), query.stride(1), *given.strides, pages.table.stride(0), scale, softcap or 0.0,
        GROUP=group, KV_HEADS=kv_heads, PAGE=pages.page_size, DIM=dim, FIELDS=pieces.listed.shape[1],
        HIGH=high, CAPPED=softcap is not None, SUNK=sinks is not None, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_D=power_of_two(dim, 16), MERGED=MERGED, EIGHT=given.scaled, PRECISION=precision(query.dtype),
        num_warps=warps, num_stages=stages, **overlap(query),
    )  # fmt: skip
