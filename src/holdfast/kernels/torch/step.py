"""A step's inputs from block tables and the last sampled tokens, on the host.

Steps are small and these are indices, so NumPy computes them in the tensors' memory. Called through
`holdfast.kernels`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.kernels.batch import Batch, Pages
from holdfast.kernels.parameters import StepTables

_Places = NDArray[np.int64]


def prepare_step(tokens: torch.Tensor, row_table: torch.Tensor, tables: StepTables, batch: Batch) -> None:
    starts, contexts = batch.row_start.numpy(), batch.context.numpy()
    rows = row_table.numpy()
    counts = starts[1:] - starts[:-1]
    total = int(starts[-1])
    # Padding rows use table row 0 here; the result is replaced below.
    owner = np.repeat(np.maximum(rows, 0), counts)
    position = np.arange(total) + np.repeat(contexts - starts[1:], counts)
    given = tokens.numpy()[:total].astype(np.int64)
    fed = given < 0
    if fed.any():
        given[fed] = tables.sampled.numpy()[owner[fed]]
    idle = np.repeat(rows < 0, counts) if rows.min(initial=0) < 0 else None
    if idle is not None:
        given[idle] = 0
        position[idle] = 0
    for out, values in ((batch.tokens, given), (batch.positions, position)):
        filled = out.numpy()
        filled[:total] = values
        filled[total:] = 0
    for pages, table, reserved in (
        (batch.full, tables.full, tables.reserved_full),
        (batch.window, tables.window, tables.reserved_window),
    ):
        if pages is not None and table is not None:
            _place(pages, table.numpy(), rows, (owner, position, idle), reserved)


def _place(
    pages: Pages,
    table: NDArray[np.int32],
    rows: NDArray[np.int32],
    tokens: tuple[_Places, _Places, NDArray[np.bool_] | None],
    reserved: int,
) -> None:
    """The tables of a step's rows, and the slots that its tokens are written to."""
    owner, position, idle = tokens
    size = pages.page_size
    width = min(pages.table.shape[1], table.shape[1])
    out = pages.table.numpy()
    out[:, :width] = table[np.maximum(rows, 0), :width]
    unit = table[owner, position // size].astype(np.int64)
    if idle is not None:
        out[rows < 0] = reserved
        unit[idle] = reserved
    slots = pages.slots.numpy()
    slots[: len(position)] = unit * size + position % size
    slots[len(position) :] = reserved * size


def list_pieces(batch: Batch) -> None:
    assert not batch.pieces and batch.queue is None, "attention on the host has no split-K"


def change_tables(changes: torch.Tensor, table: torch.Tensor) -> None:
    table.view(-1)[changes[0].long()] = changes[1]


def note_sampled(sampled: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    sampled[rows.long()] = tokens.clamp(min=0)
