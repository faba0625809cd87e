"""The token masks of a step: filled on the host, copied to the device in one piece.

Samples of constrained turns have a mask each, others none. The masks lie in pinned memory behind the indices
that say which sample has which, so that one copy sends the used part of both. The buffers stay allocated and
grow when a step needs more. Room is made when a step is launched; a mask is filled as soon as the tokens
before it are known, in a thread where that hides its cost. Used by `ConstrainedRows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.engine.constraints.guidance import ParallelMatchers
from holdfast.engine.constraints.masks import MaskRows, words_for
from holdfast.engine.constraints.matcher import Fill, Matcher
from holdfast.engine.constraints.turn import TurnConstraint
from holdfast.engine.step.inputs import aligned
from holdfast.kernels import TokenMasks

__all__ = ["Ahead", "StepMasks", "Wanted"]

ROWS_FIRST = 16
"""Rows that the buffers have room for at first."""


class Wanted(NamedTuple):
    """The masks of one turn's samples: of sample `first`, and of one more after each draft."""

    first: int
    constraint: TurnConstraint
    drafts: Sequence[int] = ()


class Ahead(NamedTuple):
    """A mask that is filled before its step is sampled; good as long as the constraint stays there."""

    first: int
    constraint: TurnConstraint
    position: int


class StepMasks:
    """The masks of one step at a time: `open`, `fill_ahead`, `fill`, `forbid` where needed, `send`."""

    def __init__(self, vocabulary: int, device: torch.device, matchers: ParallelMatchers) -> None:
        self._words = words_for(vocabulary)
        self._device = device
        self._matchers = matchers
        self._pinned = device.type == "cuda"
        self._host = torch.zeros(0, dtype=torch.int32)
        self._target = self._host
        self._read: torch.cuda.Event | None = None
        self._samples = 0
        self._used = 0
        self._row_of: dict[int, int] = {}
        """The first row of a turn, by its first sample."""
        self._ahead: dict[int, Ahead] = {}

    def open(self, samples: int, places: Iterable[tuple[int, int]]) -> None:
        """Make room for a step with so many samples, and masks from the first to the end of each place."""
        self._row_of.clear()
        self._ahead.clear()
        used = 0
        for first, stop in places:
            self._row_of[first] = used
            used += stop - first
        self._reserve(samples, used)
        self._samples = samples
        self._used = used
        self._indices()[:] = -1

    def ahead(self, wanted: Iterable[Wanted]) -> list[Ahead]:
        """Those of the masks that can be filled now: without drafts, and not forced by a pending run."""
        return [
            Ahead(first, constraint, constraint.position)
            for first, constraint, drafts in wanted
            if not drafts and first in self._row_of and constraint.fillable
        ]

    def fill_ahead(self, several: Sequence[Ahead]) -> None:
        """Fill masks whose tokens are known. Called in a thread; the matchers must not change meanwhile."""
        fills = [Fill(each.constraint.grammar_matcher, self._row_of[each.first]) for each in several]
        self._matchers.fill(fills, self._rows())
        self._ahead.update((each.first, each) for each in several)

    def fill(self, wanted: Iterable[Wanted]) -> set[int]:
        """Fill the masks that are not filled yet; returns the samples that have one."""
        indices = self._indices()
        rows = self._rows()
        fills: list[Fill] = []
        forced: list[tuple[int, int]] = []
        masked: set[int] = set()
        for first, constraint, drafts in wanted:
            if constraint.free:
                continue
            row, count = self._row_of[first], 1 + len(drafts)
            for offset in range(count):
                masked.add(first + offset)
                indices[first + offset] = row + offset
            if constraint.fillable and self._is_ahead(first, constraint):
                continue
            run = constraint.forced()
            matcher = constraint.matcher
            if run or matcher is None or constraint.failed:
                # Drafts never follow a forced token (`TurnConstraint.cut`).
                for place in range(row, row + count):
                    rows.clear(place)
                forced += [(row, token) for token in run[:1]]
                continue
            fills.append(Fill(matcher, row, drafts))
            forced += [(row + len(drafts), token) for token in _forced_after(matcher, drafts)[:1]]
        if fills:
            self._matchers.fill(fills, rows)
        for row, token in forced:
            rows.clear(row)
            rows.allow(row, (token,))
        return masked

    def forbid(self, sample: int, tokens: Sequence[int]) -> None:
        """Take tokens from a sample's mask, unless nothing would be left of it."""
        row = int(self._indices()[sample])
        words = self._row(row)
        before = words.copy()
        self._rows().forbid(row, tokens)
        if not words.any():
            words[:] = before

    def send(self) -> TokenMasks:
        """Copy the masks to the device, without waiting for the copy."""
        head = aligned(self._samples)
        size = head + self._used * self._words
        if self._pinned:
            self._target[:size].copy_(self._host[:size], non_blocking=True)
            self._read = torch.cuda.Event()
            self._read.record()
        words = self._target[head:size].view(self._used, self._words)
        return TokenMasks(words, self._target[: self._samples])

    def _reserve(self, samples: int, rows: int) -> None:
        """Make room for a step. The device has read the step that was here before."""
        if self._read is not None:
            self._read.synchronize()
            self._read = None
        size = aligned(samples) + rows * self._words
        if size > self._host.numel():
            least = ROWS_FIRST * (1 + self._words)
            size = max(least, 1 << (size - 1).bit_length())
            self._host = torch.zeros(size, dtype=torch.int32, pin_memory=self._pinned)
            self._target = torch.zeros_like(self._host, device=self._device) if self._pinned else self._host

    def _indices(self) -> NDArray[np.int32]:
        array: NDArray[np.int32] = self._host.numpy()
        return array[: self._samples]

    def _is_ahead(self, first: int, constraint: TurnConstraint) -> bool:
        """Whether a sample's mask is filled for where the constraint stands now."""
        found = self._ahead.get(first)
        return found is not None and found.constraint is constraint and found.position == constraint.position

    def _row(self, row: int) -> NDArray[np.int32]:
        """The words of a used mask."""
        array: NDArray[np.int32] = self._host.numpy()
        begin = aligned(self._samples) + row * self._words
        return array[begin : begin + self._words]

    def _rows(self) -> MaskRows:
        """All rows that there is room for."""
        head = aligned(self._samples)
        room = (self._host.numel() - head) // self._words
        return MaskRows(self._host.data_ptr() + 4 * head, room, self._words)


def _forced_after(matcher: Matcher, drafts: Sequence[int]) -> list[int]:
    """The tokens that are forced after all drafts, where these can come."""
    if not drafts or matcher.validate(drafts) < len(drafts):
        return []
    matcher.accept(drafts)
    run = matcher.forced()
    matcher.rollback(len(drafts))
    return run
