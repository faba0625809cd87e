# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="possibly-undefined"
"""A step's inputs (tokens, positions, slots, tables) in one launch; the split-K pieces of its contexts.

The first launch has two kinds of programs: blocks of tokens and blocks of a row's table. Only pages below a
row's context are copied. Same functions and results as `kernels/torch/step.py`. Called through
`holdfast.kernels`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.kernels.batch import (
    EARLY,
    KEY_BLOCK,
    LARGE_PIECES,
    SMALL_PIECES,
    WIDE_PIECES,
    Batch,
    PieceQueue,
    Pieces,
    queue_lines,
    tile_count,
)
from holdfast.kernels.parameters import StepTables
from holdfast.kernels.triton.launch import ceiling, power_of_two
from holdfast.kernels.triton.pieces import PIECE_LEAST, PIECE_STEP

TOKENS = 128
ENTRIES = 1024
STRIDES = ["full_stride", "window_stride", "full_out_stride", "window_out_stride"]
"""Table widths vary with the context; Triton must not specialise on them."""


@triton.jit
def _slot(table, owner, position, real, stride, reserved, PAGE: tl.constexpr):
    """The slot of a token: in its page's unit, or in the reserved one."""
    unit = tl.load(table + owner * stride + position // PAGE, mask=real, other=0)
    return tl.where(real, unit, reserved).to(tl.int64) * PAGE + position % PAGE


@triton.jit
def _copy_entries(table, out, owner, pages, reserved, stride, out_stride, row, ENTRIES: tl.constexpr):
    """One block of one row's table, up to its context."""
    columns = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    inside = columns < pages
    known = inside & (owner >= 0)
    unit = tl.load(table + tl.maximum(owner, 0) * stride + columns, mask=known, other=0)
    tl.store(out + row * out_stride + columns, tl.where(known, unit, reserved), mask=inside)


@triton.jit
def _last_at(start, place, rows, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, SIZE: tl.constexpr):
    """For each place, the last row whose tokens (or tiles of BLOCK tokens) begin at or before it."""
    low = tl.zeros([SIZE], tl.int32)
    high = tl.zeros([SIZE], tl.int32) + rows
    for _ in tl.static_range(ROUNDS):
        middle = (low + high) // 2
        begin = tl.load(start + middle)
        if BLOCK:
            begin = begin // BLOCK + middle
        begins = begin <= place
        low = tl.where(begins & (high - low > 1), middle, low)
        high = tl.where(begins, high, tl.maximum(middle, low + 1))
    return low


@triton.jit
def _tiles_of(
    row_start, context, rows, QUERIES: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_TILES: tl.constexpr
):
    """Per tile: row, the row's tokens and older keys, first token, its position, number of tokens."""
    tile = tl.arange(0, BLOCK_TILES)
    row = _last_at(row_start, tile, rows, QUERIES, ROUNDS, BLOCK_TILES)
    begins = tl.load(row_start + row)
    count = tl.load(row_start + row + 1) - begins
    passed = (tile - (begins // QUERIES + row)) * QUERIES
    queries = tl.minimum(count - passed, QUERIES)
    history = tl.load(context + row) - count
    return row, count, history, begins + passed, history + passed, queries


@triton.jit(do_not_specialize=["rows", "tiles", "lines", "wanted", "above", "most"])
def _list_pieces(
    row_start, context, listed, rows, tiles, lines, wanted, above, most,
    QUERIES: tl.constexpr, FIELDS: tl.constexpr, LEAST: tl.constexpr, STEP: tl.constexpr,
    ROUNDS: tl.constexpr, BLOCK_TILES: tl.constexpr, BLOCK_LINES: tl.constexpr,
):  # fmt: skip
    """List `Pieces`: one program over all tiles."""
    row, count, _history, token, first, queries = _tiles_of(
        row_start, context, rows, QUERIES, ROUNDS, BLOCK_TILES
    )
    mine = (tl.arange(0, BLOCK_TILES) < tiles) & (queries > 0) & (count > above) & (count <= most)
    keys = tl.where(mine, first + queries, 0)
    size = tl.maximum(LEAST, tl.cdiv(tl.sum(keys, axis=0), wanted))
    # Rounded to nearest, so that rows of about equal length are not all split for a few keys.
    pieces = tl.where(mine, tl.maximum(1, (keys + size // 2) // size), 1)
    length = tl.maximum(1, tl.cdiv(tl.cdiv(keys, pieces), STEP)) * STEP
    pieces = tl.cdiv(keys, length)
    line = tl.cumsum(pieces, axis=0) - pieces
    for piece in tl.range(0, tl.max(pieces, axis=0)):
        at = listed + (line + piece) * FIELDS
        has = piece < pieces
        tl.store(at, pieces, mask=has)
        tl.store(at + 1, row, mask=has)
        tl.store(at + 2, token, mask=has)
        tl.store(at + 3, queries, mask=has)
        tl.store(at + 4, first, mask=has)
        tl.store(at + 5, piece * length, mask=has)
        tl.store(at + 6, tl.minimum(piece * length + length, keys), mask=has)
        tl.store(at + 7, line, mask=has)
    rest = tl.arange(0, BLOCK_LINES)
    spare = (rest >= tl.sum(pieces, axis=0)) & (rest < lines)
    tl.store(listed + rest * FIELDS, 0, mask=spare)


@triton.jit(do_not_specialize=["rows", "tiles", "lines", "kv_heads", "programs"])
def _list_queue(
    row_start, context, listed, rows, tiles, lines, kv_heads, programs,
    QUERIES: tl.constexpr, FIELDS: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr, LARGE: tl.constexpr,
    SMALL: tl.constexpr, EARLY: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_TILES: tl.constexpr,
    BLOCK_LINES: tl.constexpr,
):  # fmt: skip
    """List a `PieceQueue`: one program over all tiles."""
    row, count, history, token, first, queries = _tiles_of(
        row_start, context, rows, QUERIES, ROUNDS, BLOCK_TILES
    )
    real = (tl.arange(0, BLOCK_TILES) < tiles) & (queries > 0)
    keys = tl.where(real, first + queries, 0)
    blocks = tl.cdiv(keys, STEP)
    # Rows of several tokens come first: their blocks take longest. All tiles of such a row see about the
    # same keys, which are read from memory once if programs take them at the same time. The last tile sees
    # the most, so it is the first.
    several = count > 1
    ones = tl.where(several, 0, blocks)
    total = tl.sum(blocks, axis=0)
    before = total - tl.sum(ones, axis=0) + tl.cumsum(ones, axis=0) - ones
    share = tl.cdiv(total * kv_heads, programs)
    least = tl.where(before * 100 < total * EARLY, tl.cdiv(share, LARGE), tl.cdiv(share, SMALL))
    least = tl.where(several, tl.cdiv(share, WIDE), least)
    # A tile that all programs work on has a piece for each of them.
    least = tl.maximum(tl.maximum(1, least), tl.cdiv(blocks * kv_heads, programs))
    length = tl.maximum(1, tl.cdiv(blocks, tl.maximum(1, tl.cdiv(blocks, least))))
    parts = tl.cdiv(blocks, length)
    wide_parts = tl.where(several, parts, 0)
    one_parts = parts - wide_parts
    line = tl.where(
        several,
        tl.sum(wide_parts, axis=0) - tl.cumsum(wide_parts, axis=0),
        tl.sum(wide_parts, axis=0) + tl.cumsum(one_parts, axis=0) - one_parts,
    )
    stored = tl.where(parts > 1, parts * queries, 0)
    room = tl.cumsum(stored, axis=0) - stored
    for part in tl.range(0, tl.max(parts, axis=0)):
        at = listed + (line + part) * FIELDS
        has = part < parts
        begin = part * length * STEP
        tl.store(at, row, mask=has)
        tl.store(at + 1, token, mask=has)
        tl.store(at + 2, queries, mask=has)
        tl.store(at + 3, first, mask=has)
        tl.store(at + 4, history, mask=has)
        tl.store(at + 5, begin, mask=has)
        tl.store(at + 6, tl.minimum(begin + length * STEP, keys), mask=has)
        tl.store(at + 7, parts, mask=has)
        tl.store(at + 8, tl.zeros_like(parts) + part, mask=has)
        tl.store(at + 9, room, mask=has)
    rest = tl.arange(0, BLOCK_LINES)
    spare = (rest >= tl.sum(parts, axis=0)) & (rest < lines)
    tl.store(listed + rest * FIELDS + 2, tl.zeros([BLOCK_LINES], tl.int32), mask=spare)


@triton.jit(do_not_specialize=["rows", "token_count", "token_blocks", *STRIDES])
def _prepare(
    tokens, row_table, row_start, context, sampled, full, window, tokens_out, positions,
    full_slots, window_slots, full_out, window_out,
    rows, token_count, token_blocks, full_stride, window_stride, full_out_stride, window_out_stride,
    full_reserved, window_reserved,
    PAGE: tl.constexpr, FULL: tl.constexpr, WINDOW: tl.constexpr, ROUNDS: tl.constexpr, TOKENS: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < token_blocks:
        if tl.program_id(1) == 0:
            place = program * TOKENS + tl.arange(0, TOKENS)
            inside = place < token_count
            # Empty rows lie before the row of a token.
            low = _last_at(row_start, place, rows, 0, ROUNDS, TOKENS)
            owner = tl.load(row_table + low)
            real = inside & (owner >= 0) & (place < tl.load(row_start + rows))
            owner = tl.maximum(owner, 0).to(tl.int64)
            position = tl.load(context + low) - tl.load(row_start + low + 1) + place
            position = tl.where(real, position, 0).to(tl.int64)
            token = tl.load(tokens + place, mask=inside, other=0).to(tl.int64)
            fed = tl.load(sampled + owner, mask=real & (token < 0), other=0)
            token = tl.where(real, tl.where(token < 0, fed, token), 0)
            tl.store(tokens_out + place, token, mask=inside)
            tl.store(positions + place, position, mask=inside)
            if FULL:
                slot = _slot(full, owner, position, real, full_stride, full_reserved, PAGE)
                tl.store(full_slots + place, slot, mask=inside)
            if WINDOW:
                slot = _slot(window, owner, position, real, window_stride, window_reserved, PAGE)
                tl.store(window_slots + place, slot, mask=inside)
    else:
        row = (program - token_blocks).to(tl.int64)
        owner = tl.load(row_table + row).to(tl.int64)
        pages = tl.cdiv(tl.load(context + row), PAGE)
        if FULL:
            _copy_entries(
                full, full_out, owner, pages, full_reserved, full_stride, full_out_stride, row, ENTRIES
            )
        if WINDOW:
            _copy_entries(
                window, window_out, owner, pages, window_reserved, window_stride, window_out_stride, row,
                ENTRIES,
            )  # fmt: skip


def prepare_step(tokens: torch.Tensor, row_table: torch.Tensor, tables: StepTables, batch: Batch) -> None:
    full, window = batch.full, batch.window
    pages = full or window
    page_size = 1 if pages is None else pages.page_size
    count = batch.tokens.shape[0]
    blocks = ceiling(count, TOKENS)
    nothing = batch.tokens
    full_table = nothing if tables.full is None else tables.full
    window_table = nothing if tables.window is None else tables.window
    entries = ceiling(batch.context_max, page_size) if pages is not None else 1
    rounds = max(1, batch.rows.bit_length())
    _prepare[(blocks + batch.rows, ceiling(max(entries, 1), ENTRIES))](
        tokens, row_table, batch.row_start, batch.context, tables.sampled, full_table, window_table,
        batch.tokens, batch.positions,
        nothing if full is None else full.slots, nothing if window is None else window.slots,
        nothing if full is None else full.table, nothing if window is None else window.table,
        batch.rows, count, blocks,
        full_table.stride(0), window_table.stride(0),
        0 if full is None else full.table.stride(0), 0 if window is None else window.table.stride(0),
        tables.reserved_full, tables.reserved_window,
        PAGE=page_size, FULL=full is not None, WINDOW=window is not None, ROUNDS=rounds, TOKENS=TOKENS,
        ENTRIES=ENTRIES, num_warps=4,
    )  # fmt: skip


def list_pieces(batch: Batch) -> None:
    assert batch.queue is None or not batch.pieces, "a batch has pieces or a queue, not both"
    if batch.queue is not None:
        _fill_queue(batch, batch.queue)
    for pieces in batch.pieces:
        _fill_pieces(batch, pieces)


def _fill_queue(batch: Batch, queue: PieceQueue) -> None:
    tokens = batch.tokens.shape[0]
    tiles = tile_count(tokens, batch.rows, queue.queries)
    lines, fields = queue.listed.shape
    assert queue.listed.is_contiguous()
    assert lines >= queue_lines(tokens, batch.rows, queue.queries, queue.kv_heads, queue.programs)
    block_tiles = power_of_two(max(tiles, queue.tiles))
    _list_queue[(1,)](
        batch.row_start, batch.context, queue.listed, batch.rows, tiles, lines, queue.kv_heads,
        queue.programs, QUERIES=queue.queries, FIELDS=fields, STEP=KEY_BLOCK, WIDE=WIDE_PIECES,
        LARGE=LARGE_PIECES, SMALL=SMALL_PIECES, EARLY=EARLY, ROUNDS=block_tiles.bit_length(),
        BLOCK_TILES=block_tiles, BLOCK_LINES=power_of_two(lines), num_warps=4,
    )  # fmt: skip


def _fill_pieces(batch: Batch, pieces: Pieces) -> None:
    tiles = tile_count(batch.tokens.shape[0], batch.rows, pieces.queries)
    lines, fields = pieces.listed.shape
    _list_pieces[(1,)](
        batch.row_start, batch.context, pieces.listed, batch.rows, tiles, lines, pieces.wanted,
        pieces.above, pieces.most, QUERIES=pieces.queries, FIELDS=fields, LEAST=PIECE_LEAST,
        STEP=PIECE_STEP, ROUNDS=max(1, batch.rows.bit_length()), BLOCK_TILES=power_of_two(tiles),
        BLOCK_LINES=power_of_two(lines), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["changes"])
def _change(changes, table, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    at = tl.load(changes + place, mask=inside, other=0)
    tl.store(table + at, tl.load(changes + count + place, mask=inside, other=0), mask=inside)


def change_tables(changes: torch.Tensor, table: torch.Tensor) -> None:
    assert changes.is_contiguous() and table.is_contiguous()
    count = changes.shape[1]
    if count:
        _change[(ceiling(count, ENTRIES),)](changes, table, count, BLOCK=ENTRIES, num_warps=4)


@triton.jit
def _note(sampled, rows, tokens, count, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    inside = place < count
    token = tl.load(tokens + place, mask=inside, other=0)
    tl.store(sampled + tl.load(rows + place, mask=inside, other=0), tl.maximum(token, 0), mask=inside)


def note_sampled(sampled: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    count = tokens.shape[0]
    if count:
        _note[(1,)](sampled, rows, tokens, count, BLOCK=power_of_two(count, 16), num_warps=4)
