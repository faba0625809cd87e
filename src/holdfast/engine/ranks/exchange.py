"""Sessions' memory on several ranks: one file holds the parts of all of them.

Rank 0 writes and reads the files. A rank copies its units to the host and sends them, or receives them and
copies them in. A file's header names the number of ranks with the layout of a rank's memory: a file written
by another number of ranks does not match, and its session is recomputed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.core.session import Session
from holdfast.engine.ranks import messages
from holdfast.engine.ranks.crew import Crew
from holdfast.engine.ranks.group import RankGroup
from holdfast.engine.ranks.messages import Kind
from holdfast.engine.ranks.units import GatheredUnits, RankUnits
from holdfast.engine.tiers.host import Copier
from holdfast.engine.tiers.portions import Transfer
from holdfast.engine.tiers.session_memory import Gathering, SessionMemory, own_rows, units_from
from holdfast.models.memory import Memory

__all__ = ["RankedMemory", "receive_part", "send_part"]

PIECE_BYTES = 256 << 20
"""Bytes that are sent at a time."""


def send_part(group: RankGroup, tensor: Tensor, rank: int) -> None:
    """Send a tensor in main memory to a rank."""
    for piece in _bytes(tensor.contiguous()).split(PIECE_BYTES):
        group.send(piece, rank)


def receive_part(group: RankGroup, tensor: Tensor, rank: int) -> None:
    """Overwrite a contiguous tensor in main memory with one that a rank sends."""
    for piece in _bytes(tensor).split(PIECE_BYTES):
        group.receive(piece, rank)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class RankedMemory(SessionMemory):
    """The memory of sessions on all ranks; tensors of other ranks have their number in front.

    The ranks copy and send a session at once, so a transfer has nothing left to copy.
    """

    __slots__ = ("_crew", "_units")

    def __init__(self, device: Memory, host: Memory | None, copier: Copier, crew: Crew) -> None:
        super().__init__(device, host, copier)
        self._crew = crew
        self._units = RankUnits(device, host)

    def size(self, session: Session, page: int = 0) -> int:
        """How many bytes a session's tensors have from `page` on, on all ranks."""
        return super().size(session, page) * self._crew.group.ranks.size

    def gather(self, session: Session, page: int = 0) -> Gathering:
        """Copies of the units of a session from `page` on, of every rank."""
        crew, units = self._crew, units_from(session, page)
        on_host = self._memory_of(session) is not self._device
        found = []
        for component, (leased, own) in units.items():
            name = component.name.lower()
            self._device.settle(name, leased)
            if not on_host:
                self._device.settle(name, own)
            found.append(GatheredUnits(name, on_host, leased, own))
        crew.begin(Kind.GATHER, messages.write_units(found))
        mine = self._units.gather(found)
        every = dict(mine)
        for rank in range(1, crew.group.ranks.size):
            for name, tensor in mine.items():
                every[f"{rank}.{name}"] = torch.empty_like(tensor)
                receive_part(crew.group, every[f"{rank}.{name}"], rank)
        crew.done()
        return Gathering(session, every, Transfer(iter(()), self._copiers, outward=True))

    def scatter(self, session: Session, tensors: dict[str, list[Tensor]]) -> Transfer:
        """Copy a file's tensors into the units of a session, on every rank."""
        assert session.parcel is not None
        crew = self._crew
        homes = {component.name.lower(): list(hold.units) for component, hold in session.parcel.home.items()}
        # Checked before any rank is told: a file that does not fit costs one session, not the engine.
        parts = {name: self._parts(name, len(units), tensors) for name, units in homes.items()}
        for name, units in homes.items():
            mine, *others = parts[name]
            self._device.overwritten(name, units)
            for rank, part in enumerate(others, 1):
                crew.begin(Kind.SCATTER, [rank, *messages.write_copy(name, units, [])])
                for rows in part:
                    send_part(crew.group, rows, rank)
                crew.done()
            self._units.scatter(name, units, mine)
        return Transfer(iter(()), self._copiers, outward=False)

    def _parts(self, name: str, count: int, tensors: dict[str, list[Tensor]]) -> list[list[Tensor]]:
        """The rows of each rank for each storage of a component; raises `BadFile` if one does not fit."""
        prefixes = ["", *(f"{rank}." for rank in range(1, self._crew.group.ranks.size))]
        storages = self._device.storage(name)
        return [
            [
                _joined(own_rows(tensors, f"{prefix}{name}.{index}", each, count), each)
                for index, each in enumerate(storages)
            ]
            for prefix in prefixes
        ]


def _joined(rows: list[Tensor], storage: Tensor) -> Tensor:
    """Rows for a storage in one tensor, as ranks exchange them."""
    if len(rows) == 1:
        return rows[0]
    return torch.cat([torch.empty((0, *storage.shape[1:]), dtype=storage.dtype), *rows])
