# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="possibly-undefined"
"""Attention of one-token rows whose keys the device has shared out: one launch, whatever the contexts.

A program takes one piece of one row's keys (`Batch.splits`) for one key head. The grid follows from the
number of rows alone, so that one CUDA graph serves every mix of contexts, and a long context among short ones
is still spread over the device. Of a row's programs the last to arrive merges their results, in the order of
the pieces: the sum does not depend on who that is. Called by `attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.kernels.batch import Batch, Pages
from holdfast.kernels.triton.attention_block import attend_block
from holdfast.kernels.triton.launch import launch_next, overlap, power_of_two, precision, wait_for_inputs

PIECE_LEAST = 256  # keys below which a piece is not worth its merge
PIECE_STEP = 64  # pieces are whole blocks, whatever the block
MERGED = 32  # pieces that are merged in one go
# Keys a block, warps and stages of loads, by the bytes of one head of one token (at most 512).
PIECE_BLOCKS = {32: (64, 4, 3), 64: (64, 4, 3), 128: (64, 4, 3), 256: (64, 4, 2), 512: (64, 4, 3)}
PIECE_BLOCKS_FLOAT32 = (32, 4, 2)


@triton.jit
def _merge_pieces(
    partial, logs, sinks, out, first, pieces, row, kv_head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """The weighted mean of a row's pieces, one query head after another."""
    columns = tl.arange(0, BLOCK_D)
    for member in tl.range(0, GROUP):
        head = kv_head * GROUP + member
        peak = float("-inf")
        if SUNK:
            peak = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total = 1.0 if SUNK else 0.0
        result = tl.zeros([BLOCK_D], tl.float32)
        for begin in tl.range(0, pieces, MERGED):
            piece = begin + tl.arange(0, MERGED)
            at = ((first + piece).to(tl.int64) * KV_HEADS + kv_head) * GROUP + member
            # Written by other programs in this launch: not to be found in a cache of one's own.
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
        places = out + (row.to(tl.int64) * KV_HEADS * GROUP + head) * DIM
        tl.store(places + columns, (result / total).to(out.dtype.element_ty), mask=columns < DIM)


@triton.jit(do_not_specialize=["rows", "table_stride"])
def _attend_pieces(
    query, key, value, out, partial, logs, sinks, table, context, piece_start, arrived,
    query_token, query_head, key_unit, key_token, key_head, value_unit, value_token, value_head, table_stride,
    rows, scale, softcap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    CAPPED: tl.constexpr, SUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, MERGED: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One piece of one row's keys, for the query heads of one key head."""
    launch_next(OVERLAP)
    work = tl.program_id(0)
    kv_head = tl.program_id(1)
    # A program without a piece need not wait: the first row always has one, whose program does.
    if work >= tl.load(piece_start + rows):
        return
    row = work * 0
    high = rows
    while row + 1 < high:
        middle = (row + high) // 2
        begins = tl.load(piece_start + middle) <= work
        row = tl.where(begins, middle, row)
        high = tl.where(begins, high, middle)
    first = tl.load(piece_start + row)
    pieces = tl.load(piece_start + row + 1) - first
    end = tl.load(context + row)
    # A row's pieces are of one length, as near as whole blocks allow, so that none waits for another.
    length = tl.cdiv(tl.cdiv(end, pieces), BLOCK_N) * BLOCK_N
    begin = (work - first) * length
    finish = tl.minimum(begin + length, end)
    packed = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + packed
    real = packed < GROUP
    columns = tl.arange(0, BLOCK_D)
    stored = real[:, None] & (columns < DIM)[None, :]
    # Contexts and pieces were there before the model began; queries and keys come from the kernel before.
    wait_for_inputs(OVERLAP)
    query_rows = query + row.to(tl.int64) * query_token + head * query_head
    queries = tl.load(query_rows[:, None] + columns[None, :], mask=stored, other=0.0)
    places = tl.zeros([BLOCK_M], tl.int32) + end
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    table += row.to(tl.int64) * table_stride
    key += kv_head * key_head
    value += kv_head * value_head
    WHOLE: tl.constexpr = PAGE % BLOCK_N == 0
    clear = finish // BLOCK_N * BLOCK_N
    for start in tl.range(begin, clear, BLOCK_N):
        accumulator, weight_sum, peak = attend_block(
            accumulator, weight_sum, peak, queries, key, value, table, key_unit, key_token, value_unit,
            value_token, start, 0, finish, places, scale, softcap, 0,
            PAGE, DIM, BLOCK_D, BLOCK_N, False, False, CAPPED, WHOLE, PRECISION,
        )  # fmt: skip
    if clear < finish:
        accumulator, weight_sum, peak = attend_block(
            accumulator, weight_sum, peak, queries, key, value, table, key_unit, key_token, value_unit,
            value_token, clear, 0, finish, places, scale, softcap, 0,
            PAGE, DIM, BLOCK_D, BLOCK_N, True, False, CAPPED, WHOLE, PRECISION,
        )  # fmt: skip
    if pieces == 1:
        if SUNK:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
            weight_sum += tl.exp2(sink - peak)
        result = accumulator / tl.where(real, weight_sum, 1.0)[:, None]
        places_out = out + (row.to(tl.int64) * KV_HEADS * GROUP + head) * DIM
        tl.store(places_out[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask=stored)
    else:
        at = (work.to(tl.int64) * KV_HEADS + kv_head) * GROUP + packed
        tl.store(logs + at, peak + tl.log2(weight_sum), mask=real)
        result = accumulator / weight_sum[:, None]
        tl.store(partial + at[:, None] * DIM + columns[None, :], result, mask=stored)
        # All threads have stored before one of them says so.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + row * KV_HEADS + kv_head, 1)
        if before == pieces - 1:
            tl.store(arrived + row * KV_HEADS + kv_head, 0)
            _merge_pieces(
                partial, logs, sinks, out, first, pieces, row, kv_head,
                GROUP, KV_HEADS, DIM, SUNK, BLOCK_D, MERGED,
            )  # fmt: skip


def attend_pieces(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    pages: Pages,
    batch: Batch,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    splits = batch.splits
    assert splits is not None and batch.one_token_rows
    _, heads, dim = query.shape
    kv_heads = key_cache.shape[2]
    group = heads // kv_heads
    out = torch.empty(batch.rows, heads, dim, dtype=query.dtype, device=query.device)
    items = batch.rows + splits.extra
    partial = torch.empty(items * heads * dim, dtype=torch.float32, device=query.device)
    logs = torch.empty(items * heads, dtype=torch.float32, device=query.device)
    row_bytes = min(512, power_of_two(dim, 16) * query.element_size())
    exact = query.dtype == torch.float32
    block_n, warps, stages = PIECE_BLOCKS_FLOAT32 if exact else PIECE_BLOCKS[row_bytes]
    _attend_pieces[(items, kv_heads)](
        query, key_cache, value_cache, out, partial, logs, query if sinks is None else sinks, pages.table,
        batch.context, splits.start, splits.arrived,
        query.stride(0), query.stride(1), *key_cache.stride()[:3], *value_cache.stride()[:3],
        pages.table.stride(0), batch.rows, scale, softcap or 0.0,
        GROUP=group, KV_HEADS=kv_heads, PAGE=pages.page_size, DIM=dim, CAPPED=softcap is not None,
        SUNK=sinks is not None, BLOCK_M=power_of_two(group, 16), BLOCK_N=block_n,
        BLOCK_D=power_of_two(dim, 16), MERGED=MERGED, PRECISION=precision(query.dtype),
        num_warps=warps, num_stages=stages, **overlap(query),
    )  # fmt: skip
    return out
