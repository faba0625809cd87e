"""Block tables on the device: one row per sequence, updated with each plan's changes.

A sequence keeps its row while it exists, idle or not, so a turn on a long history sends only its new entries.
Changes are collected, sent with a step's words, and applied in one launch per table. Rows and columns grow by
doubling. The last sampled token of each sequence is kept here too, for a row that was planned before it was
known; that tensor never moves, so that graphs can write to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast import kernels
from holdfast.core.plan import TableChange
from holdfast.kernels import StepTables

ROWS_MAX = 1 << 17
UNUSED_ROW = ROWS_MAX
"""The index of sampled tokens that are never read."""

_Change = tuple[int, int, list[int]]


class TableForm(NamedTuple):
    """The sizes of the tables, and how many entries the changes packed last have in each."""

    rows: int
    widths: tuple[int, int]
    counts: tuple[int, int]


class BlockTables:
    """The tables of one model's sequences, by the number that plans use for them."""

    __slots__ = ("_changes", "_counts", "_device", "_free", "_rows", "_sampled", "_tables", "_used")

    def __init__(self, device: torch.device, full_used: bool, window_used: bool) -> None:
        self._device = device
        self._used = (full_used, window_used)
        self._rows: dict[int, int] = {}
        self._free = list(range(15, -1, -1))
        self._tables = [torch.zeros((16, 16), dtype=torch.int32, device=device) for _ in range(2)]
        self._changes: tuple[list[_Change], list[_Change]] = ([], [])
        self._counts = (0, 0)
        self._sampled = torch.zeros(ROWS_MAX + 1, dtype=torch.int64, device=device)

    def row(self, number: int) -> int:
        """The row of a sequence, assigned on first use."""
        row = self._rows.get(number)
        if row is None:
            if not self._free:
                self._grow_rows()
            row = self._rows[number] = self._free.pop()
        return row

    def forget(self, numbers: Iterable[int]) -> None:
        """Free the rows of closed sequences."""
        for number in numbers:
            row = self._rows.pop(number, None)
            if row is not None:
                self._free.append(row)

    def change(self, number: int, change: TableChange) -> None:
        """Record a plan's changes to a sequence's tables; `apply` writes them."""
        row = self.row(number)
        if self._used[0] and change.full:
            self._changes[0].append((row, change.first, change.full))
        if self._used[1] and change.window:
            self._changes[1].append((row, change.window_first, change.window))

    def discard(self) -> None:
        """Discard recorded changes: their step failed, and the core sends them again."""
        for changes in self._changes:
            changes.clear()

    def pack(self) -> NDArray[np.int32]:
        """All recorded changes as words for `apply`: per table the indices, then the units."""
        words: list[NDArray[np.int32]] = []
        for component, changes in enumerate(self._changes):
            end = max((first + len(units) for _, first, units in changes), default=0)
            if end > self._tables[component].shape[1]:
                self._widen(component, max(end, 2 * self._tables[component].shape[1]))
            width = self._tables[component].shape[1]
            for row, first, units in changes:
                begin = row * width + first
                words.append(np.arange(begin, begin + len(units), dtype=np.int32))
            words += [np.array(units, dtype=np.int32) for _, _, units in changes]
        full, window = (sum(len(units) for _, _, units in changes) for changes in self._changes)
        self._counts = (full, window)
        return np.concatenate(words) if words else np.empty(0, dtype=np.int32)

    def apply(self, words: Tensor) -> None:
        """Write the changes packed last, each index once: a GPU writes in no particular order."""
        for table, changes, count in zip(self._tables, self._changes, self._counts, strict=True):
            mine, words = words[: 2 * count], words[2 * count :]
            if count:
                kernels.change_tables(mine.view(2, count), table)
            changes.clear()
        assert not words.numel(), "words of another pack"

    @property
    def form(self) -> TableForm:
        """The form of the tables for the changes packed last, for other ranks."""
        full, window = self._tables
        return TableForm(full.shape[0], (full.shape[1], window.shape[1]), self._counts)

    def follow(self, form: TableForm) -> None:
        """Bring the tables into the form of another rank's, whose changes `apply` gets."""
        while self._tables[0].shape[0] < form.rows:
            self._grow_rows()
        for component, width in enumerate(form.widths):
            if self._tables[component].shape[1] < width:
                self._widen(component, width)
        self._counts = form.counts

    def step_tables(self, reserved_full: int, reserved_window: int) -> StepTables:
        """The tables for the kernels, with all changes applied."""
        assert not self._changes[0] and not self._changes[1], "changes must be applied first"
        full, window = (table if used else None for table, used in zip(self._tables, self._used, strict=True))
        return StepTables(self._sampled, full, window, reserved_full, reserved_window)

    @property
    def sampled(self) -> Tensor:
        """The last sampled token of each row's sequence, int64; the last index is unused."""
        return self._sampled

    def _widen(self, component: int, end: int) -> None:
        """Give a table `end` columns."""
        table = self._tables[component]
        wider = torch.zeros((table.shape[0], end), dtype=torch.int32, device=self._device)
        wider[:, : table.shape[1]] = table
        self._tables[component] = wider

    def _grow_rows(self) -> None:
        count = self._tables[0].shape[0]
        if count >= ROWS_MAX:
            raise RuntimeError(f"more than {ROWS_MAX} sequences exist")
        # Grow first: the device may run out of memory.
        self._tables = [torch.cat((table, torch.zeros_like(table))) for table in self._tables]
        self._free = list(range(2 * count - 1, count - 1, -1))
