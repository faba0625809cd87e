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
from dataclasses import dataclass

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


def tile_count(tokens: int, rows: int, queries: int) -> int:
    """How many tiles of so many tokens a batch has room for; with `wanted` more there are lines enough."""
    return tokens // queries + rows


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
