# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="possibly-undefined"
"""Causal attention over paged KV for ragged, mixed batches as Triton kernels.

A tile is a run of queries of one row, with all query heads that share a key head packed into the rows of one
matrix (row m is token `m // group`, head `m % group`), so that keys and values are read once per tile and
even a single token uses the tensor cores. The keys of a tile may be split over several programs (split-K); a
second kernel merges the partial results and adds the sinks. The number of splits follows from host-side
counts; the keys of each split follow from the row's context, on the device.

One-token rows and longer rows of a mixed batch are two launches, each of which skips the other's rows, so
that the decode row of a long session is split regardless of the prefill tokens beside it. Where the device
has listed pieces (`Batch.pieces`) the kernel is in `pieces`, and for a queue (`Batch.queue`) in
`kernels/cuda/attention.py`.

Same function and results as `kernels/torch/attention.py`. Called through `holdfast.kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.kernels.batch import Batch, Pages
from holdfast.kernels.cuda.attention import attend_queue
from holdfast.kernels.cuda.scaled_attention import attend_scaled_queue
from holdfast.kernels.scaled import KvCache, ScaledCache, stored
from holdfast.kernels.triton.attention_block import attend_block
from holdfast.kernels.triton.launch import (
    ceiling,
    find_row,
    launch_next,
    overlap,
    power_of_two,
    precision,
    processors,
    roomy,
    tiles,
    wait_for_inputs,
)
from holdfast.kernels.triton.pieces import SMALL_BLOCKS, WIDE, attend_pieces
from holdfast.kernels.triton.scaled import launched, prepare_queries

SPLIT_LEAST = 256  # fewest keys of a split
SPLITS_MOST = 128

# Keys per block, warps and pipeline stages, by the bytes of one head of one token (at most 512), as
# measured on an H200: for single tokens, for tiles, for tiles over a short window, for split tiles.
_Blocks = dict[int, tuple[int, int, int]]
SINGLE_BLOCKS: _Blocks = {32: (64, 4, 3), 64: (64, 4, 3), 128: (64, 4, 3), 256: (64, 2, 3), 512: (64, 4, 3)}
TILE_BLOCKS: _Blocks = {32: (64, 4, 3), 64: (64, 4, 3), 128: (64, 4, 3), 256: (64, 4, 3), 512: (64, 8, 3)}
WINDOW_BLOCKS: _Blocks = {32: (32, 4, 2), 64: (32, 4, 2), 128: (32, 4, 2), 256: (64, 4, 3), 512: (64, 8, 3)}
SPLIT_BLOCKS: _Blocks = {32: (64, 8, 3), 64: (64, 8, 3), 128: (128, 8, 3), 256: (64, 4, 3), 512: (64, 8, 2)}
SHORT = 4096  # keys below which split tiles are kept small, so that there are more of them
FLOAT32_BLOCKS = (32, 4, 2)  # float32 products do not use tensor cores: large blocks would only spill


class Shape(NamedTuple):
    """The block sizes of a launch."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    splits: int


@triton.jit
def _tile_of(
    row_start, context, rows, tile, SINGLES: tl.constexpr, SKIP: tl.constexpr, QUERIES: tl.constexpr
):
    """(row, first token, tokens in the tile, position of the first one); zero tokens: padding."""
    if SINGLES and not SKIP:
        # Every row has one token, so tile, row and token are the same.
        return tile, tile, 1, tl.load(context + tile) - 1
    if SINGLES:
        row = tile
        local = 0
    else:
        row = find_row(row_start, rows, tile, QUERIES)
        local = tile - (tl.load(row_start + row) // QUERIES + row)
    start = tl.load(row_start + row)
    count = tl.load(row_start + row + 1) - start
    wanted = count - local * QUERIES
    if SKIP:
        # Rows of the other kind belong to the other launch.
        wanted = tl.where((count == 1) == SINGLES, wanted, 0)
    first = tl.load(context + row) - count + local * QUERIES
    return row, start + local * QUERIES, tl.minimum(wanted, QUERIES), first


@triton.jit(do_not_specialize=["rows", "tile_count", "splits", "window", "table_stride"])
def _attend(
    query, key, value, key_scales, value_scales, out, partial, logs, sinks, table, row_start, context,
    query_token, query_head, key_unit, key_token, key_head, value_unit, value_token, value_head,
    scale_unit, scale_head, table_stride, rows, tile_count, splits, scale, softcap, window,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr,
    SINGLES: tl.constexpr, SKIP: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    SUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EIGHT: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of one key head over one split of its keys."""
    launch_next(OVERLAP)
    # Late tiles see the most keys, so they start first.
    tile = tile_count - 1 - tl.program_id(0)
    # For one token, a key block within one page needs one table lookup. For tiles this measured slower.
    WHOLE: tl.constexpr = SINGLES and PAGE % BLOCK_N == 0
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    row, token, wanted, first = _tile_of(row_start, context, rows, tile, SINGLES, SKIP, QUERIES)
    # Rows and contexts are older than the model's first kernel; queries and keys need the preceding kernel.
    wait_for_inputs(OVERLAP)
    if wanted <= 0:
        return
    packed = tl.arange(0, BLOCK_M)
    local = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    real = (local < QUERIES) & (local < wanted)
    places = first + local
    columns = tl.arange(0, BLOCK_D)
    query_rows = query + (token + local).to(tl.int64) * query_token + head * query_head
    queries = tl.load(
        query_rows[:, None] + columns[None, :], mask=real[:, None] & (columns < DIM)[None, :], other=0.0
    )
    end = first + wanted
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(0, first - window + 1)
    base = lowest // BLOCK_N * BLOCK_N
    length = tl.cdiv(tl.cdiv(end - base, splits), BLOCK_N) * BLOCK_N
    begin = base + split * length
    finish = tl.minimum(begin + length, end)
    if SPLIT and begin >= finish:
        at = ((tile.to(tl.int64) * KV_HEADS + kv_head) * splits + split) * BLOCK_M + packed
        tl.store(logs + at, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=real)
        return
    # Blocks that every query of the tile sees in full need no mask.
    clear = begin
    if not WINDOWED:
        clear = tl.maximum(begin, tl.minimum(finish, first + 1) // BLOCK_N * BLOCK_N)
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
    for start in tl.range(begin, clear, BLOCK_N):
        accumulator, weight_sum, peak = attend_block(
            accumulator, weight_sum, peak, queries, query_factor, key, value, key_scales, value_scales, table,
            key_unit, key_token, value_unit, value_token, scale_unit,
            start, lowest, finish, places, scale, softcap, window,
            PAGE, DIM, BLOCK_D, BLOCK_N, False, WINDOWED, CAPPED, WHOLE, EIGHT, PRECISION,
        )  # fmt: skip
    for start in tl.range(clear, finish, BLOCK_N):
        accumulator, weight_sum, peak = attend_block(
            accumulator, weight_sum, peak, queries, query_factor, key, value, key_scales, value_scales, table,
            key_unit, key_token, value_unit, value_token, scale_unit,
            start, lowest, finish, places, scale, softcap, window,
            PAGE, DIM, BLOCK_D, BLOCK_N, True, WINDOWED, CAPPED, WHOLE, EIGHT, PRECISION,
        )  # fmt: skip
    stored = real[:, None] & (columns < DIM)[None, :]
    if not SPLIT:
        if SUNK:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
            weight_sum += tl.exp2(sink - peak)
        # Padding rows of the matrix have seen nothing.
        result = accumulator / tl.where(real, weight_sum, 1.0)[:, None]
        places_out = out + ((token + local).to(tl.int64) * KV_HEADS * GROUP + head) * DIM
        tl.store(places_out[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask=stored)
    else:
        empty = weight_sum == 0.0
        result = accumulator / tl.where(empty, 1.0, weight_sum)[:, None]
        at = ((tile.to(tl.int64) * KV_HEADS + kv_head) * splits + split) * BLOCK_M + packed
        tl.store(logs + at, tl.where(empty, float("-inf"), peak + tl.log2(weight_sum)), mask=real)
        tl.store(partial + at[:, None] * DIM + columns[None, :], result, mask=stored)


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge(
    partial, logs, sinks, out, row_start, context, rows, splits,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    SINGLES: tl.constexpr, SKIP: tl.constexpr, SUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge: the weighted mean of one query head's splits."""
    launch_next(OVERLAP)
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    packed = tl.program_id(2)
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    _row, token, wanted, _first = _tile_of(row_start, context, rows, tile, SINGLES, SKIP, QUERIES)
    local = packed // GROUP
    wait_for_inputs(OVERLAP)
    if (local >= wanted) | (local >= QUERIES):
        return
    head = kv_head * GROUP + packed % GROUP
    piece = tl.arange(0, BLOCK_SPLITS)
    columns = tl.arange(0, BLOCK_D)
    at = ((tile.to(tl.int64) * KV_HEADS + kv_head) * splits + piece) * BLOCK_M + packed
    log = tl.load(logs + at, mask=piece < splits, other=float("-inf"))
    peak = tl.max(log, axis=0)
    if SUNK:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        peak = tl.maximum(peak, sink)
    share = tl.exp2(log - peak)
    total = tl.sum(share, axis=0)
    if SUNK:
        total += tl.exp2(sink - peak)
    loaded = (share > 0.0)[:, None] & (columns < DIM)[None, :]
    pieces = tl.load(partial + at[:, None] * DIM + columns[None, :], mask=loaded, other=0.0)
    result = tl.sum(pieces * share[:, None], axis=0) / total
    places = out + ((token + local).to(tl.int64) * KV_HEADS * GROUP + head) * DIM
    tl.store(places + columns, result.to(out.dtype.element_ty), mask=columns < DIM)


def _splits(programs: int, keys: int, device: torch.device, waves: int) -> int:
    """Enough splits to fill the device `waves` times, none below the minimum length."""
    wanted = ceiling(processors(device.index) * waves, max(programs, 1))
    return max(1, min(wanted, ceiling(keys, SPLIT_LEAST), SPLITS_MOST))


def shape_for(
    batch: Batch, query: torch.Tensor, kv_heads: int, window: int | None, singles: bool, stored_bytes: int = 0
) -> Shape:
    """The block sizes of one launch, from host-side counts and the bytes of a stored number alone."""
    group = query.shape[1] // kv_heads
    least = power_of_two(group, 16)
    row_bytes = min(512, power_of_two(query.shape[-1], 16) * max(query.element_size(), stored_bytes))
    exact = query.dtype == torch.float32
    keys = batch.context_max if window is None else min(batch.context_max, window + batch.count_max)
    if singles:
        splits = _splits(batch.rows * kv_heads, keys, query.device, 8)
        return Shape(least, *(FLOAT32_BLOCKS if exact else SINGLE_BLOCKS[row_bytes]), splits)

    def plan(tallest: int) -> tuple[int, int]:
        block_m = max(least, min(tallest, power_of_two(batch.count_max * group, 16)))
        if batch.least.tokens:
            # Most tiles of a captured batch may be padding.
            filled = max(batch.least.rows, ceiling(batch.least.tokens, block_m // group))
        else:
            filled = tiles(query.shape[0], batch.rows, block_m // group)
        return block_m, _splits(filled * kv_heads, keys, query.device, 2)

    block_m, splits = plan(32 if exact else 128)
    if exact:
        return Shape(block_m, *FLOAT32_BLOCKS, splits)
    if splits == 1:
        block_n, warps, stages = (TILE_BLOCKS if window is None else WINDOW_BLOCKS)[row_bytes]
    else:
        block_n, warps, stages = SPLIT_BLOCKS[row_bytes]
        if keys < SHORT:
            block_m, splits = plan(64)
            block_n, stages = 64, 2
    if row_bytes == WIDE and not roomy(query.device.index):
        block_m, splits = plan(64)
        block_n, stages = SMALL_BLOCKS
    return Shape(block_m, block_n, warps if block_m >= 128 else 4, stages, splits)


def attend(
    query: torch.Tensor,
    key_cache: KvCache,
    value_cache: KvCache,
    pages: Pages,
    batch: Batch,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    tokens, heads, dim = query.shape
    key, value = stored(key_cache), stored(value_cache)
    for tensor in (query, key, value):
        assert tensor.stride(-1) == 1, "the elements of a head must be adjacent"
    assert value.shape[-1] == dim, "keys and values have the same width"
    out = torch.empty(tokens, heads, dim, dtype=query.dtype, device=query.device)
    if batch.queue is not None and window is None:
        assert softcap is None, "the CUDA kernel has no softcap"
        if isinstance(key_cache, ScaledCache):
            assert isinstance(value_cache, ScaledCache) and batch.one_token_rows
            attend_scaled_queue(query, key_cache, value_cache, out, pages, batch.queue, scale, sinks)
            return out
        assert not isinstance(value_cache, ScaledCache)
        attend_queue(query, key_cache, value_cache, out, pages, batch.queue, scale, sinks)
        return out
    if batch.pieces and window is None:
        for pieces in batch.pieces:
            attend_pieces(query, key_cache, value_cache, out, pages, pieces, scale, sinks, softcap)
        return out
    rule = _Rule(scale, window, sinks, softcap)
    mixed = 0 < batch.rows_of_one < batch.rows
    for singles in (True, False):
        if batch.rows_of_one if singles else not batch.one_token_rows:
            _launch(query, key_cache, value_cache, out, pages, batch, rule, singles, mixed)
    return out


class _Rule(NamedTuple):
    scale: float
    window: int | None
    sinks: torch.Tensor | None
    softcap: float | None


def _launch(
    query: torch.Tensor,
    key_cache: KvCache,
    value_cache: KvCache,
    out: torch.Tensor,
    pages: Pages,
    batch: Batch,
    rule: _Rule,
    singles: bool,
    mixed: bool,
) -> None:
    """Attention of the one-token rows, or of the others."""
    tokens, heads, dim = query.shape
    given = launched(key_cache, value_cache)
    kv_heads = given.key.shape[2]
    group = heads // kv_heads
    shape = shape_for(batch, query, kv_heads, rule.window, singles, given.element_size)
    tile_count = batch.rows if singles else tiles(tokens, batch.rows, shape.block_m // group)
    size = tile_count * kv_heads * shape.splits * shape.block_m if shape.splits > 1 else 0
    partial = torch.empty(size * dim, dtype=torch.float32, device=query.device) if size else query
    logs = torch.empty(size, dtype=torch.float32, device=query.device) if size else query
    sinks = query if rule.sinks is None else rule.sinks
    block_d = power_of_two(dim, 16)
    common: dict[str, object] = {
        "GROUP": group, "KV_HEADS": kv_heads, "DIM": dim, "SINGLES": singles,
        "SKIP": mixed, "SUNK": rule.sinks is not None, "BLOCK_M": shape.block_m, "BLOCK_D": block_d,
        **overlap(query),
    }  # fmt: skip
    _attend[(tile_count, kv_heads, shape.splits)](
        query, *given[:4], out, partial, logs, sinks, pages.table, batch.row_start, batch.context,
        query.stride(0), query.stride(1), *given.strides, pages.table.stride(0),
        batch.rows, tile_count, shape.splits,
        rule.scale, rule.softcap or 0.0, rule.window or 0,
        PAGE=pages.page_size, SPLIT=shape.splits > 1, WINDOWED=rule.window is not None,
        CAPPED=rule.softcap is not None,
        BLOCK_N=shape.block_n, EIGHT=given.scaled, PRECISION=precision(query.dtype),
        num_warps=shape.warps, num_stages=shape.stages, **common,
    )  # fmt: skip
    if shape.splits > 1:
        rows_used = group if singles else shape.block_m
        _merge[(tile_count, kv_heads, rows_used)](
            partial, logs, sinks, out, batch.row_start, batch.context, batch.rows, shape.splits,
            BLOCK_SPLITS=power_of_two(shape.splits), num_warps=4, **common,
        )  # fmt: skip
