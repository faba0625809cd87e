"""A session's units as tensors: gathered for a snapshot file, and scattered back from one.

Units are copied a portion at a time, because a GPU has no room for a second copy of a long session. Called by
the disk tier between steps; the disk's thread never touches the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.core.session import Session
from holdfast.core.tiers import whole_units
from holdfast.models.memory import Memory

PORTION_BYTES = 256 << 20
"""Bytes that are copied from or to the device at a time."""


class GatheredUnits(NamedTuple):
    """Units of a component: on the device those that are leased, there or on the host the session's own."""

    name: str
    on_host: bool
    leased: list[int]
    own: list[int]


class SessionMemory:
    """The memory of sessions on the device and, where there is a host tier, on the host."""

    __slots__ = ("_device", "_host")

    def __init__(self, device: Memory, host: Memory | None) -> None:
        self._device = device
        self._host = host

    def size(self, session: Session) -> int:
        """How many bytes a session's tensors have, without gathering them."""
        size = 0
        for component, (leased, own) in whole_units(session.sequence, session.parcel).items():
            storages = self._device.storage(component.name.lower())
            size += (len(leased) + len(own)) * sum(storage[0].nbytes for storage in storages)
        return size

    def gather(self, session: Session) -> dict[str, Tensor]:
        """Copies of all units that hold what a session has computed, leased ones first, by storage name."""
        return self.gather_units(self.units(session))

    def units(self, session: Session) -> list[GatheredUnits]:
        """The units that hold what a session has computed, ready to be copied."""
        parcel = session.parcel
        on_host = session.sequence.away and parcel is not None and self._host is not None
        found = []
        for component, (leased, own) in whole_units(session.sequence, parcel).items():
            name = component.name.lower()
            self._device.settle(name, leased)
            if not on_host:
                self._device.settle(name, own)
            found.append(GatheredUnits(name, on_host, leased, own))
        return found

    @torch.inference_mode()
    def gather_units(self, units: Sequence[GatheredUnits]) -> dict[str, Tensor]:
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

    def scatter(self, session: Session, tensors: dict[str, Tensor]) -> None:
        """Copy a file's tensors into the units that the core has taken for a session."""
        for name, units in self.homes(session).items():
            self.scatter_units(name, units, tensors)

    def homes(self, session: Session) -> dict[str, list[int]]:
        """The units that the core has taken for a session, ready to be overwritten."""
        assert session.parcel is not None
        homes = {component.name.lower(): list(hold.units) for component, hold in session.parcel.home.items()}
        for name, units in homes.items():
            self._device.overwritten(name, units)
        return homes

    def scatter_units(self, name: str, units: list[int], tensors: Mapping[str, Tensor]) -> None:
        """Copy a file's tensors of a component into units."""
        for index, storage in enumerate(self._device.storage(name)):
            copy_in(storage, units, tensors[f"{name}.{index}"])

    def rows(self, name: str, count: int) -> dict[str, Tensor]:
        """Room on the host for copies of so many units of a component, by storage name."""
        return {
            f"{name}.{index}": torch.empty((count, *storage.shape[1:]), dtype=storage.dtype)
            for index, storage in enumerate(self._device.storage(name))
        }


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
    """Copy the last rows of a file's tensor into units; the rows before them are leased."""
    own = content[len(content) - len(units) :]
    for places, index in portions(storage, units):
        storage.index_copy_(0, index, own[places].to(storage.device))
