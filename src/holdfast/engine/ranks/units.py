"""A rank's units as tensors, copied at once, a portion at a time where they are on a GPU.

A GPU has no room for a second copy of a long session. Used by `exchange` and by the processes of other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.models.memory import Memory

PORTION_BYTES = 256 << 20
"""Bytes that are copied from or to the device at a time."""


class GatheredUnits(NamedTuple):
    """Units of a component: on the device those that are leased, there or on the host the session's own."""

    name: str
    on_host: bool
    leased: list[int]
    own: list[int]


class RankUnits:
    """The units of one rank, on the device and, where there is a host tier, on the host."""

    __slots__ = ("_device", "_host")

    def __init__(self, device: Memory, host: Memory | None) -> None:
        self._device = device
        self._host = host

    @torch.inference_mode()
    def gather(self, units: Sequence[GatheredUnits]) -> dict[str, Tensor]:
        """Copies of some units by storage name."""
        tensors: dict[str, Tensor] = {}
        for name, on_host, leased, own in units:
            memory = self._host if on_host else self._device
            assert memory is not None
            for index, (device, there) in enumerate(
                zip(self._device.storage(name), memory.storage(name), strict=True)
            ):
                parts = [
                    copy_out(storage, units) for storage, units in ((device, leased), (there, own)) if units
                ]
                tensors[f"{name}.{index}"] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return tensors

    def scatter(self, name: str, units: list[int], rows: Sequence[Tensor]) -> None:
        """Copy the rows of each storage of a component into units."""
        for storage, content in zip(self._device.storage(name), rows, strict=True):
            copy_in(storage, units, content)

    def rows(self, name: str, count: int) -> list[Tensor]:
        """Room on the host for copies of so many units, for each storage of a component."""
        return [
            torch.empty((count, *storage.shape[1:]), dtype=storage.dtype)
            for storage in self._device.storage(name)
        ]


def portions(storage: Tensor, units: list[int]) -> Iterator[tuple[slice, Tensor]]:
    """Units in portions: the slice of the list, and the units as an index."""
    most = max(1, PORTION_BYTES // max(1, storage[0].nbytes))
    for begin in range(0, len(units), most):
        some = units[begin : begin + most]
        index = torch.tensor(some, dtype=torch.int64, device=storage.device)
        yield slice(begin, begin + len(some)), index


def copy_out(storage: Tensor, units: list[int]) -> Tensor:
    """Copies of some units on the host."""
    copies = torch.empty((len(units), *storage.shape[1:]), dtype=storage.dtype)
    for places, index in portions(storage, units):
        if storage.device == copies.device:
            torch.index_select(storage, 0, index, out=copies[places])
        else:
            copies[places] = storage.index_select(0, index)
    return copies


@torch.inference_mode()
def copy_in(storage: Tensor, units: list[int], content: Tensor) -> None:
    """Copy rows into units."""
    for places, index in portions(storage, units):
        storage.index_copy_(0, index, content[places].to(storage.device))
