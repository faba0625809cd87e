"""Block tables that stay on the device: one row a sequence, changed by what a plan says changed.

A sequence's row lives as long as the sequence, idle or not, so a turn on a long history sends only its new
entries. Rows and columns grow by doubling. A step's tables are gathered from here in one operation.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from holdfast.core.plan import TableChange


class BlockTables:
    """The tables of one model's sequences, by the number that plans name them with."""

    __slots__ = ("_device", "_free", "_full", "_rows", "_sampled", "_window", "full_used", "window_used")

    def __init__(self, device: torch.device, full_used: bool, window_used: bool) -> None:
        self._device = device
        self.full_used = full_used
        self.window_used = window_used
        self._rows: dict[int, int] = {}
        self._free = list(range(15, -1, -1))
        self._full = torch.zeros((16, 16), dtype=torch.int32, device=device)
        self._window = torch.zeros((16, 16), dtype=torch.int32, device=device)
        self._sampled = torch.zeros(16, dtype=torch.int64, device=device)

    def row(self, number: int) -> int:
        """The row of a sequence, given to it at the first asking."""
        row = self._rows.get(number)
        if row is None:
            if not self._free:
                self._grow_rows()
            row = self._rows[number] = self._free.pop()
        return row

    def forget(self, numbers: Iterable[int]) -> None:
        """Sequences are gone: their rows are free."""
        for number in numbers:
            row = self._rows.pop(number, None)
            if row is not None:
                self._free.append(row)

    def change(self, number: int, change: TableChange) -> None:
        """Apply what a plan says changed in a sequence's tables."""
        row = self.row(number)
        if self.full_used:
            self._full = self._put(self._full, row, change.first, change.full)
        if self.window_used:
            self._window = self._put(self._window, row, change.window_first, change.window)

    def full(self, rows: Tensor, width: int) -> Tensor:
        """The full-attention tables of a step's rows, int32 [rows, width]."""
        return self._full[rows, :width]

    def window(self, rows: Tensor, width: int) -> Tensor:
        """The sliding-window tables of a step's rows, int32 [rows, width]."""
        return self._window[rows, :width]

    def sampled(self, rows: Tensor) -> Tensor:
        """The token that each row's sequence sampled last."""
        return self._sampled[rows]

    def note_sampled(self, rows: Tensor, tokens: Tensor) -> None:
        """Keep sampled tokens on the device, for rows planned before they are known."""
        self._sampled[rows] = tokens

    def _put(self, table: Tensor, row: int, first: int, units: list[int]) -> Tensor:
        end = first + len(units)
        if end > table.shape[1]:
            wider = torch.zeros(
                (table.shape[0], max(end, 2 * table.shape[1])), dtype=torch.int32, device=self._device
            )
            wider[:, : table.shape[1]] = table
            table = wider
        if units:
            table[row, first:end] = torch.tensor(units, dtype=torch.int32)
        return table

    def _grow_rows(self) -> None:
        count = self._full.shape[0]
        self._free = list(range(2 * count - 1, count - 1, -1))
        self._full = torch.cat((self._full, torch.zeros_like(self._full)))
        self._window = torch.cat((self._window, torch.zeros_like(self._window)))
        self._sampled = torch.cat((self._sampled, torch.zeros_like(self._sampled)))
