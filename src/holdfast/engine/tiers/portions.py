"""Copies between sessions' units and tensors of a file, a portion between two steps.

A session of 32k tokens has gigabytes: copied by the loop, they would hold all answers up. `advance` begins
one portion of a transfer and returns; a copier copies it beside the steps. In main memory that is a thread.
On a GPU it is a stream: the portion goes through pinned memory, and the next one is under way while this one
is unpacked. Used by `SessionMemory`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.engine.tiers.host import POLL_SECONDS, Copier, CopyEvent, StorageCopy

PORTION_BYTES = 16 << 20
"""Bytes that are copied beside one step for a file; who cancels a copy waits for as many."""
RETURN_BYTES = 64 << 20
"""The same from a file to a GPU, which copies much faster: a turn waits for them."""


class Piece:
    """Units of one storage, and their rows in a tensor of a file."""

    __slots__ = ("rows", "storage", "units")

    def __init__(self, storage: Tensor, units: list[int], rows: Tensor) -> None:
        self.storage = storage
        self.units = units
        self.rows = rows


class Flight:
    """Pieces that a copier works on."""

    __slots__ = ("event", "piece", "pinned")

    def __init__(self, event: CopyEvent, piece: Piece | None = None, pinned: Tensor | None = None) -> None:
        """`pinned`: what has to be unpacked into the rows of a piece, once it is copied."""
        self.event = event
        self.piece = piece
        self.pinned = pinned

    def unpack(self) -> None:
        """Copy what came from a device into the rows of its file."""
        if self.piece is not None and self.pinned is not None:
            self.piece.rows.copy_(self.pinned)


class Copiers(NamedTuple):
    """The copier of units on the device, and that of units in main memory: on a CPU both are the same."""

    device: Copier
    main: Copier


class Transfer:
    """The copies of one session, to a file's tensors (`outward`) or from them."""

    __slots__ = ("_copiers", "_flights", "_outward", "_pieces")

    def __init__(self, pieces: Iterator[Piece], copiers: Copiers, outward: bool) -> None:
        self._pieces = deque(pieces)
        self._copiers = copiers
        self._outward = outward
        self._flights: list[Flight] = []
        """The pieces of the portion that is under way."""

    @torch.inference_mode()
    def advance(self) -> bool:
        """Begin to copy the next portion; whether all is copied. Raises if a copy has failed."""
        if not all(flight.event.query() for flight in self._flights):
            return False
        done, self._flights = self._flights, []
        self._begin()
        if self._outward:
            for flight in done:
                flight.unpack()
        return not self._pieces and not self._flights

    def wait(self, seconds: float) -> None:
        """Wait until the portion under way is copied, or time is up."""
        end = time.monotonic() + seconds
        with suppress(Exception):  # `advance` raises it.
            while not all(flight.event.query() for flight in self._flights) and time.monotonic() < end:
                time.sleep(POLL_SECONDS)

    def _begin(self) -> None:
        """Begin to copy the next portion. Copies in main memory go to the copier together."""
        left = self._portion()
        copies: list[StorageCopy] = []
        while self._pieces and left > 0:
            piece = self._pieces.popleft()
            left -= piece.rows.nbytes
            if piece.storage.is_cuda:
                self._flights.append(self._launch(piece))
            else:
                copies.append(self._copy(piece, piece.rows))
        if copies:
            event = self._copiers.main.copy(copies)
            if not event.query():  # Small ones are copied at once.
                self._flights.append(Flight(event))

    def _portion(self) -> int:
        """Bytes of the next portion."""
        on_gpu = bool(self._pieces) and self._pieces[0].storage.is_cuda
        return RETURN_BYTES if on_gpu and not self._outward else PORTION_BYTES

    def _copy(self, piece: Piece, rows: Tensor) -> StorageCopy:
        """The copy between a piece's units and these rows."""
        numbers = list(range(len(piece.units)))
        if self._outward:
            return StorageCopy(piece.storage, piece.units, rows, numbers)
        return StorageCopy(rows, numbers, piece.storage, piece.units)

    def _launch(self, piece: Piece) -> Flight:
        """Begin to copy a piece from or to the device."""
        pinned = torch.empty_like(piece.rows, pin_memory=True)
        if not self._outward:
            pinned.copy_(piece.rows)
        return Flight(self._copiers.device.copy([self._copy(piece, pinned)]), piece, pinned)

    def abandon(self) -> None:
        """Copy no more, and wait for the portion under way: its units and pinned memory are used again."""
        self._pieces.clear()
        for flight in self._flights:
            with suppress(Exception):  # Its result is not needed.
                flight.event.synchronize()
        self._flights = []


def pieces_of(storage: Tensor, units: list[int], rows: Tensor) -> Iterator[Piece]:
    """Units and their rows in pieces of at most a portion; none where units have no bytes."""
    if not rows.nbytes:
        return
    most = max(1, PORTION_BYTES // storage[0].nbytes)
    for begin in range(0, len(units), most):
        some = units[begin : begin + most]
        yield Piece(storage, some, rows[begin : begin + len(some)])
