"""Copies between sessions' units and tensors of a file, a portion between two steps.

A session of 32k tokens has gigabytes: copied at once, they would hold all answers up. `advance` copies one
portion of a transfer and returns; on a GPU the portion goes through pinned memory on a stream of its own, and
the next one is under way while this one is unpacked. Used by `SessionMemory`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from holdfast.engine.tiers.host import Copier, CopyEvent, StorageCopy

PORTION_BYTES = 16 << 20
"""Bytes that are copied between two steps for a file."""
RETURN_BYTES = 64 << 20
"""The same from a file to a GPU, which copies beside the steps: a turn waits for them."""


class Piece:
    """Units of one storage, and their rows in a tensor of a file."""

    __slots__ = ("rows", "storage", "units")

    def __init__(self, storage: Tensor, units: list[int], rows: Tensor) -> None:
        self.storage = storage
        self.units = units
        self.rows = rows


class Flight:
    """A piece that a copier works on."""

    __slots__ = ("event", "piece", "pinned")

    def __init__(self, piece: Piece, pinned: Tensor, event: CopyEvent) -> None:
        self.piece = piece
        self.pinned = pinned
        self.event = event


class Transfer:
    """The copies of one session, to a file's tensors (`outward`) or from them."""

    __slots__ = ("_copier", "_flights", "_outward", "_pieces")

    def __init__(self, pieces: Iterator[Piece], copier: Copier, outward: bool) -> None:
        self._pieces = deque(pieces)
        self._copier = copier
        self._outward = outward
        self._flights: list[Flight] = []
        """The pieces of the portion that is under way."""

    @torch.inference_mode()
    def advance(self) -> bool:
        """Copy the next portion; whether all is copied. Raises if a copy has failed."""
        if not all(flight.event.query() for flight in self._flights):
            return False
        done, self._flights = self._flights, []
        left = self._portion()
        while self._pieces and left > 0:
            piece = self._pieces.popleft()
            left -= piece.rows.nbytes
            if piece.storage.is_cuda:
                self._flights.append(self._launch(piece))
            else:
                self._copy(piece)
        if self._outward:
            for flight in done:
                flight.piece.rows.copy_(flight.pinned)
        return not self._pieces and not self._flights

    def _portion(self) -> int:
        """Bytes of the next portion; in main memory the loop itself copies them."""
        beside = bool(self._pieces) and self._pieces[0].storage.is_cuda
        return RETURN_BYTES if beside and not self._outward else PORTION_BYTES

    def _copy(self, piece: Piece) -> None:
        """Copy a piece in main memory."""
        index = torch.tensor(piece.units, dtype=torch.int64)
        if self._outward:
            torch.index_select(piece.storage, 0, index, out=piece.rows)
        else:
            piece.storage.index_copy_(0, index, piece.rows)

    def _launch(self, piece: Piece) -> Flight:
        """Begin to copy a piece from or to the device."""
        pinned = torch.empty_like(piece.rows, pin_memory=True)
        rows = list(range(len(piece.units)))
        if self._outward:
            copy = StorageCopy(piece.storage, piece.units, pinned, rows)
        else:
            pinned.copy_(piece.rows)
            copy = StorageCopy(pinned, rows, piece.storage, piece.units)
        return Flight(piece, pinned, self._copier.copy([copy]))

    def abandon(self) -> None:
        """Copy no more, and wait for the portion under way: its pinned memory is used again at once."""
        self._pieces.clear()
        for flight in self._flights:
            with suppress(Exception):  # Its result is not needed.
                flight.event.synchronize()
        self._flights = []


def pieces_of(storage: Tensor, units: list[int], rows: Tensor) -> Iterator[Piece]:
    """Units and their rows in pieces of at most a portion."""
    most = max(1, PORTION_BYTES // max(1, storage[0].nbytes))
    for begin in range(0, len(units), most):
        some = units[begin : begin + most]
        yield Piece(storage, some, rows[begin : begin + len(some)])
