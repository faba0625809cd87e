"""A step's inputs from block tables and what was sampled before: what the model reads, in plain torch.

Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch

from holdfast.kernels.batch import Batch, Pages
from holdfast.kernels.parameters import StepTables


def prepare_step(tokens: torch.Tensor, row_table: torch.Tensor, tables: StepTables, batch: Batch) -> None:
    places = torch.arange(batch.tokens.shape[0], device=tokens.device, dtype=torch.int32)
    row = torch.searchsorted(batch.row_start[1:], places, right=True).clamp(max=batch.rows - 1)
    owner = row_table[row]
    real = (places < batch.row_start[-1]) & (owner >= 0)
    owner = owner.clamp(min=0).long()
    position = torch.where(real, batch.context[row] - batch.row_start[row + 1] + places, 0).long()
    token = torch.where(tokens >= 0, tokens.long(), tables.sampled[owner])
    batch.tokens.copy_(torch.where(real, token, 0))
    batch.positions.copy_(position)
    for pages, table, reserved in (
        (batch.full, tables.full, tables.reserved_full),
        (batch.window, tables.window, tables.reserved_window),
    ):
        if pages is not None and table is not None:
            _gather(pages, table, row_table)
            _slots(pages, table, owner, position, real, reserved)
            pages.table[row_table < 0] = reserved


def _gather(pages: Pages, table: torch.Tensor, row_table: torch.Tensor) -> None:
    width = min(pages.table.shape[1], table.shape[1])
    pages.table[:, :width] = table[row_table.clamp(min=0).long(), :width]


def _slots(
    pages: Pages,
    table: torch.Tensor,
    owner: torch.Tensor,
    position: torch.Tensor,
    real: torch.Tensor,
    reserved: int,
) -> None:
    unit = torch.where(real, table[owner, position // pages.page_size], reserved).long()
    pages.slots.copy_(unit * pages.page_size + position % pages.page_size)


def change_tables(changes: torch.Tensor, table: torch.Tensor) -> None:
    table.view(-1)[changes[0].long()] = changes[1]


def note_sampled(sampled: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    sampled[rows.long()] = tokens.clamp(min=0)
