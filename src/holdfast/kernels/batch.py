"""The tensors that describe one step of the model to the kernels.

A step is a ragged, mixed batch: each row is a run of new tokens of one sequence, a prefill chunk of many
tokens or a decode row of one. The tokens of all rows are concatenated; `row_start` has the offset of each
row. Sizes that a kernel launch depends on (row and token counts, the longest context) are plain integers
beside the tensors, so no launch synchronises with the device.

The executor builds a `Batch` (from persistent buffers, or with `build_batch`); models and kernels only read
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


@dataclass(slots=True)
class Pages:
    """The block table of one paged component (full or sliding-window KV) of the batch.

    `table[r, j]` is the unit that holds tokens `[j * page_size, (j + 1) * page_size)` of row r, by absolute
    page number. Entries past the context, and below the window of a window component, are undefined and never
    read. `slots[t]` is the slot that new token t is written to: `unit * page_size + offset`.
    """

    table: torch.Tensor  # int32 [rows, pages_max]
    slots: torch.Tensor  # int64 [tokens]
    page_size: int


@dataclass(slots=True)
class Pieces:
    """Split-K work items of attention, one per program, listed by the device.

    Rows of more than `above` and at most `most` tokens are cut into tiles of at most `queries` tokens, and
    the keys of a tile into pieces of about equal length: about `wanted` pieces over all tiles, at least one
    per tile. `listed` has a line per piece: the number of pieces of its tile (0: padding), the row, the
    tile's first token and its number of tokens, that token's position, the first and the end key, and the
    line of the tile's first piece. `arrived` counts finished pieces by that line and key head; it is zero
    between launches.
    """

    listed: torch.Tensor  # int32 [lines, PIECE_FIELDS]
    arrived: torch.Tensor  # int32 [lines * kv_heads], or more
    queries: int
    wanted: int
    above: int = 0
    most: int = 1 << 30


PIECE_FIELDS = 8

KEY_BLOCK = 64
"""Keys of a block; pieces are whole blocks."""

QUEUE_FIELDS = 12
WIDE_PIECES, LARGE_PIECES, SMALL_PIECES = 3, 3, 8
"""Pieces of a `PieceQueue` per program, if all pieces were of one kind.

The kinds: tiles of rows of several tokens; of one-token rows, within the first EARLY percent of all keys;
after that.
"""

EARLY = 70


@dataclass(slots=True)
class PieceQueue:
    """A work queue of split-K attention, listed by the device: persistent programs take pieces in turn.

    Each row is cut into tiles of at most `queries` tokens, and the keys of a tile into pieces of whole
    blocks. Rows of several tokens come first, then one-token rows in long pieces and finally in short ones,
    so that all programs finish at about the same time. `listed` has a line per piece: the row, the tile's
    first token and its number of tokens, that token's position, the number of the row's keys written by
    earlier steps, the first and the end key, the number of pieces of the tile and the index of this one, and
    the offset (in tokens) of the tile's results in `partial`. Lines with zero tokens end the list. `arrived`
    counts finished pieces by the line of the tile's first one, key head and warp group; `taken` counts pieces
    taken and programs that found none. Both are zero between launches. `queue_lines` and `queue_room` compute
    the sizes. The kernel that lists is compiled for `tiles` tiles; 0 is as many as the step may have.
    """

    listed: torch.Tensor  # int32 [lines, QUEUE_FIELDS]
    arrived: torch.Tensor  # int32 [lines * kv_heads * groups], or more
    partial: torch.Tensor  # float32 [room, heads, dim + 2]
    taken: torch.Tensor  # int32 [2]
    queries: int
    kv_heads: int
    programs: int  # persistent programs that take pieces
    tiles: int = 0

    def for_step(self, tokens: int, rows: int) -> PieceQueue | None:
        """The queue cut to the lines that a step of this size needs; None where the queue is too small."""
        work = (self.queries, self.kv_heads, self.programs)
        lines = queue_lines(tokens, rows, *work)
        if lines > self.listed.shape[0] or queue_room(tokens, *work) > self.partial.shape[0]:
            return None
        return replace(self, listed=self.listed[:lines])

    def for_long_step(self, tokens: int, rows: int) -> PieceQueue | None:
        """The whole queue, which one kernel lists whatever the size of a step; None where it is too small."""
        if self.for_step(tokens, rows) is None:
            return None
        return replace(self, tiles=self.listed.shape[0])


def tile_count(tokens: int, rows: int, queries: int) -> int:
    """Upper bound on the tiles of a batch; a list has `wanted` lines more."""
    return tokens // queries + rows


def queue_lines(tokens: int, rows: int, queries: int, kv_heads: int, programs: int) -> int:
    """Lines that a queue's list needs: one per piece, and one that ends it.

    A program's share is at least `total * kv_heads / programs` blocks. A tile of `blocks` is cut into at most
    `ceil(blocks / least)` pieces, where `least` is at least the share over `kind` (the pieces per program
    above): fewer than `1 + blocks / total * kind * programs / kv_heads`. Over all tiles `blocks / total` sums
    to one.
    """
    kind = max(WIDE_PIECES, LARGE_PIECES, SMALL_PIECES)
    return tile_count(tokens, rows, queries) + -(-kind * programs // kv_heads) + 1


def queue_room(tokens: int, queries: int, kv_heads: int, programs: int) -> int:
    """Tokens that a queue's `partial` needs room for: the tokens of every piece of a split tile.

    Each kind has fewer than `kind * programs / kv_heads` pieces that are not the first of their tile (see
    `queue_lines`): wide ones of at most `queries` tokens, others of one. The first pieces of split tiles have
    no more tokens than these, and at most `tokens`.
    """
    more = -(-(queries * WIDE_PIECES + max(LARGE_PIECES, SMALL_PIECES)) * programs // kv_heads)
    return min(tokens, more) + more


class Least(NamedTuple):
    """The fewest tokens and rows that a captured batch may hold; zeros for other batches."""

    tokens: int = 0
    rows: int = 0


NO_LEAST = Least()


@dataclass(slots=True)
class Batch:
    """The rows of one step. A row without tokens is padding and touches nothing.

    `state_source[r]` is the slot that a row's recurrent state is read from (-1: the zero state),
    `state_destination[r]` the slot it is written to. They may be equal; otherwise the source is unchanged. A
    destination is a valid slot that no other row reads or writes.
    """

    tokens: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    row_start: torch.Tensor  # int32 [rows + 1]: row r owns tokens [row_start[r], row_start[r + 1])
    context: torch.Tensor  # int32 [rows]: tokens that the row's last token sees, itself included
    state_source: torch.Tensor  # int32 [rows]
    state_destination: torch.Tensor  # int32 [rows]
    full: Pages | None
    window: Pages | None
    rows: int
    count_max: int  # most new tokens of any row
    context_max: int  # longest context of any row (an upper bound is enough)
    rows_of_one: int  # rows with exactly one new token; of a captured batch: all, or an upper bound
    least: Least = NO_LEAST
    pieces: tuple[Pieces, ...] = ()  # split-K of full attention, where the device lists the pieces
    queue: PieceQueue | None = None  # the same, for the kernel with persistent programs

    @property
    def one_token_rows(self) -> bool:
        """Whether every row has exactly one new token, so that token t is row t."""
        return self.rows_of_one == self.rows

    def token_rows(self) -> torch.Tensor:
        """The row of each token, int64 [tokens]; padding tokens count as the last row's."""
        tokens = torch.arange(self.positions.shape[0], device=self.row_start.device, dtype=torch.int32)
        return torch.searchsorted(self.row_start[1:], tokens, right=True).clamp(max=self.rows - 1)


def build_pages(
    units: Sequence[Sequence[int]],
    starts: Sequence[int],
    counts: Sequence[int],
    page_size: int,
    device: torch.device | str = "cpu",
) -> Pages:
    """Pages from lists: `units[r]` are row r's units by absolute page number (any value below the window)."""
    width = max((len(row) for row in units), default=0)
    table = torch.zeros(len(units), max(width, 1), dtype=torch.int32)
    slots: list[int] = []
    for row, (row_units, start, count) in enumerate(zip(units, starts, counts, strict=True)):
        assert len(row_units) * page_size >= start + count, "a row's pages must hold its context"
        table[row, : len(row_units)] = torch.tensor(row_units, dtype=torch.int32)
        slots.extend(
            row_units[p // page_size] * page_size + p % page_size for p in range(start, start + count)
        )
    return Pages(table.to(device), torch.tensor(slots, dtype=torch.int64, device=device), page_size)


def build_batch(
    tokens: Sequence[Sequence[int]],
    starts: Sequence[int],
    *,
    full_units: Sequence[Sequence[int]] | None = None,
    full_page_size: int = 16,
    window_units: Sequence[Sequence[int]] | None = None,
    window_page_size: int = 16,
    state_source: Sequence[int] | None = None,
    state_destination: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Batch:
    """A batch from lists: row r computes `tokens[r]` at positions `starts[r]` and up."""
    counts = [len(row) for row in tokens]
    assert len(starts) == len(counts)
    contexts = [start + count for start, count in zip(starts, counts, strict=True)]
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    positions = [p for start, end in zip(starts, contexts, strict=True) for p in range(start, end)]

    def integers(values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)

    def paged(units: Sequence[Sequence[int]] | None, page_size: int) -> Pages | None:
        return None if units is None else build_pages(units, starts, counts, page_size, device)

    return Batch(
        tokens=integers([token for row in tokens for token in row], torch.int64),
        positions=integers(positions, torch.int64),
        row_start=integers(offsets),
        context=integers(contexts),
        state_source=integers(state_source if state_source is not None else [-1] * len(counts)),
        state_destination=integers(
            state_destination if state_destination is not None else list(range(len(counts)))
        ),
        full=paged(full_units, full_page_size),
        window=paged(window_units, window_page_size),
        rows=len(counts),
        count_max=max(counts, default=0),
        context_max=max(contexts, default=0),
        rows_of_one=sum(count == 1 for count in counts),
    )
