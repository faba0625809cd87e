"""The tensors that describe one step of the model to the kernels.

A step is a ragged, mixed batch: every row is a run of new tokens of one sequence, a prefill chunk of
many tokens or a decode row of one. The tokens of all rows lie one after another; `row_start` says where
each row begins. What a kernel needs to size its work (row and token counts, the longest context) is kept
beside the tensors as plain integers, so that no kernel ever waits for the device to answer.

The executor builds a `Batch` (from persistent buffers, or with `build_batch`); models and kernels only
read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(slots=True)
class Pages:
    """Where one paged component (full or sliding-window KV) of the batch lies.

    `table[r, j]` is the unit that holds tokens `[j * page_size, (j + 1) * page_size)` of row r, by absolute
    page number. Only pages that hold a token which the row can see are meaningful: entries past the context,
    and below the window of a window component, may hold anything and are never read.
    `slots[t]` is where new token t is written: `unit * page_size + offset`.
    """

    table: torch.Tensor  # int32 [rows, pages_max]
    slots: torch.Tensor  # int64 [tokens]
    page_size: int


@dataclass(slots=True)
class Pieces:
    """The pieces of keys that the programs of attention take, listed by the device.

    Rows of more than `above` and at most `most` tokens are cut into tiles of at most `queries` tokens, and
    the keys that a tile sees into pieces of about one length: about `wanted` of them for all tiles together,
    and at least one for each. `listed` has a line for each piece: how many pieces its tile has (0: no
    piece), the row, the tile's first token and how many it has, that token's position, the first key and the
    end of the keys, and the line of the tile's first piece. `arrived` counts finished pieces by that line and
    by key head; it is zero between launches.
    """

    listed: torch.Tensor  # int32 [lines, PIECE_FIELDS]
    arrived: torch.Tensor  # int32 [lines * kv_heads], or more
    queries: int
    wanted: int
    above: int = 0
    most: int = 1 << 30


PIECE_FIELDS = 8

KEY_BLOCK = 64
"""Keys of a block, where pieces are whole blocks."""

QUEUE_FIELDS = 12
WIDE_PIECES, LARGE_PIECES, SMALL_PIECES = 3, 3, 8
"""Pieces of a `PieceQueue` that each program would take if all were of one kind.

Tiles of rows of several tokens; of rows of one, within the first EARLY percent of all keys; and after that.
"""

EARLY = 70


@dataclass(slots=True)
class PieceQueue:
    """The pieces of keys that the programs of attention take one after another, listed by the device.

    Every row is cut into tiles of at most `queries` tokens, and the keys that a tile sees into pieces of
    whole blocks: rows of several tokens first, then those of one in longer pieces and at last in shorter
    ones, so that all programs are done at about one time. `listed` has a line for each piece: the row, the
    tile's first token and how many it has, that token's position, how many of the row's keys earlier steps
    wrote, the first key and the end of the keys, how many pieces the tile has and which of them this is, and
    where in `partial` the results of the first one go, counted in tokens; those of the others follow. Lines
    of no tokens follow the last piece. `arrived` counts finished pieces by the line of the first one, key
    head and group of warps, `taken` those that were taken and the programs that found no more; they are zero
    between launches. `queue_lines` and `queue_room` say how large all this must be.
    """

    listed: torch.Tensor  # int32 [lines, QUEUE_FIELDS]
    arrived: torch.Tensor  # int32 [lines * kv_heads * groups], or more
    partial: torch.Tensor  # float32 [room, heads, dim + 2]
    taken: torch.Tensor  # int32 [2]
    queries: int
    kv_heads: int
    programs: int  # that take pieces

    def for_step(self, tokens: int, rows: int) -> PieceQueue | None:
        """The queue with the lines that a step of this size needs; None where it is too small for one."""
        work = (self.queries, self.kv_heads, self.programs)
        lines = queue_lines(tokens, rows, *work)
        if lines > self.listed.shape[0] or queue_room(tokens, *work) > self.partial.shape[0]:
            return None
        return replace(self, listed=self.listed[:lines])


def tile_count(tokens: int, rows: int, queries: int) -> int:
    """How many tiles of so many tokens a batch has room for; with `wanted` more there are lines enough."""
    return tokens // queries + rows


def queue_lines(tokens: int, rows: int, queries: int, kv_heads: int, programs: int) -> int:
    """How many lines a queue's list needs: one for each piece, and one that ends it.

    A program's share is at least `total * kv_heads / programs` blocks. A tile of `blocks` is cut into at most
    `ceil(blocks / least)` pieces, where `least` is at least the share over `kind`, the number of pieces above
    that is for the tile: into fewer than `1 + blocks / total * kind * programs / kv_heads`. Over all tiles
    `blocks / total` adds up to one.
    """
    kind = max(WIDE_PIECES, LARGE_PIECES, SMALL_PIECES)
    return tile_count(tokens, rows, queries) + -(-kind * programs // kv_heads) + 1


def queue_room(tokens: int, queries: int, kv_heads: int, programs: int) -> int:
    """How many tokens a queue's `partial` needs room for: of each piece of a tile that was cut, its tokens.

    One piece of every tile: `tokens` in all. Of each kind there are fewer than `kind * programs / kv_heads`
    pieces more (see `queue_lines`): wide ones of at most `queries` tokens, others of one.
    """
    more = queries * WIDE_PIECES + max(LARGE_PIECES, SMALL_PIECES)
    return tokens + -(-more * programs // kv_heads)


@dataclass(slots=True)
class Batch:
    """One step's rows. A row of no tokens is allowed (padding) and touches nothing.

    `state_source[r]` is the slot a row's recurrent state is read from (-1: the zero state) and
    `state_destination[r]` the slot it is written to. They may be equal; where they differ the source stays
    intact. A destination is a real slot, never -1, and no other row reads or writes it.
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
    rows_of_one: int  # how many rows have exactly one new token; of a captured batch, whether all or some may
    least: tuple[int, int] = (0, 0)  # of a captured batch: the fewest tokens and rows that it may hold
    pieces: tuple[Pieces, ...] = ()  # of full attention's keys, where the device lists them: of all rows
    queue: PieceQueue | None = None  # the same, where there is a kernel whose programs take one after another

    @property
    def one_token_rows(self) -> bool:
        """Whether every row has exactly one new token, so that token t is row t."""
        return self.rows_of_one == self.rows

    def token_rows(self) -> torch.Tensor:
        """The row of each token, int64 [tokens]; what lies past the last row's end counts as its."""
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
