"""A session's units as tensors: gathered for a snapshot file, and scattered back from one.

Units are copied a portion at a time, beside the steps (`portions`). Called by the disk tier; the disk's
thread never touches the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from holdfast.core.layout import Component, Tier
from holdfast.core.session import Session
from holdfast.core.tiers import whole_units
from holdfast.engine.tiers.files import BadFile
from holdfast.engine.tiers.host import Copier, ThreadCopier
from holdfast.engine.tiers.portions import Copiers, Piece, Transfer, pieces_of
from holdfast.models.memory import Memory

Units = dict[Component, tuple[list[int], list[int]]]


def units_from(session: Session, page: int) -> Units:
    """Where everything lies that a session has computed, less pages before `page`; states as a whole."""
    units, end = whole_units(session.sequence, session.parcel), session.sequence.pages
    for component, (leased, own) in units.items():
        if component is not Component.STATE:
            skipped = max(0, page - (end - len(leased) - len(own)))
            units[component] = (leased[skipped:], own[max(0, skipped - len(leased)) :])
    return units


def _where(session: Session) -> tuple[int, Tier, Units]:
    """How much a session at rest has computed, on which tier that is, and in which units."""
    sequence, layout = session.sequence, session.sequence.ledger.layout
    trimmed = not layout.paged or sequence.pages == layout.pages_for(sequence.computed)
    assert trimmed, "the pages of a part end with its last token"
    tier = session.parcel.tier if sequence.away and session.parcel is not None else Tier.DEVICE
    return sequence.computed, tier, whole_units(sequence, session.parcel)


class Gathering:
    """A transfer from a session's units to tensors, by storage name, and where its memory was then."""

    __slots__ = ("_where", "tensors", "transfer")

    def __init__(self, session: Session, tensors: dict[str, Tensor], transfer: Transfer) -> None:
        self._where = _where(session)
        self.tensors = tensors
        self.transfer = transfer

    def is_current(self, session: Session) -> bool:
        """Whether a session is at rest and its memory is what it was.

        A state is in its first unit again after two turns, and units of another tier have the same numbers.
        """
        sequence = session.sequence
        at_rest = sequence.lease is not None and sequence.mark is None and not session.unsettled
        return at_rest and _where(session) == self._where


class SessionMemory:
    """The memory of sessions on the device and, where there is a host tier, on the host."""

    __slots__ = ("_copiers", "_device", "_host")

    def __init__(self, device: Memory, host: Memory | None, copier: Copier) -> None:
        self._device = device
        self._host = host
        on_cpu = isinstance(copier, ThreadCopier)
        self._copiers = Copiers(copier, copier if on_cpu else ThreadCopier())

    def size(self, session: Session, page: int = 0) -> int:
        """How many bytes a session's tensors have from `page` on, without gathering them."""
        size = 0
        for component, (leased, own) in units_from(session, page).items():
            storages = self._device.storage(component.name.lower())
            size += (len(leased) + len(own)) * sum(storage[0].nbytes for storage in storages)
        return size

    @torch.inference_mode()
    def gather(self, session: Session, page: int = 0) -> Gathering:
        """Begin to copy a session's computed units, from `page` on, leased ones first."""
        memory = self._memory_of(session)
        tensors: dict[str, Tensor] = {}
        pieces: list[Piece] = []
        for component, (leased, own) in units_from(session, page).items():
            name = component.name.lower()
            self._device.settle(name, leased)
            if memory is self._device:
                self._device.settle(name, own)
            for index, (device, there) in enumerate(
                zip(self._device.storage(name), memory.storage(name), strict=True)
            ):
                rows = torch.empty((len(leased) + len(own), *device.shape[1:]), dtype=device.dtype)
                tensors[f"{name}.{index}"] = rows
                pieces += pieces_of(device, leased, rows[: len(leased)])
                pieces += pieces_of(there, own, rows[len(leased) :])
        transfer = Transfer(iter(pieces), self._copiers, outward=True)
        return Gathering(session, tensors, transfer)

    def _memory_of(self, session: Session) -> Memory:
        """Where a session's own units are."""
        away = session.sequence.away and session.parcel is not None
        return self._host if away and self._host is not None else self._device

    def scatter(self, session: Session, tensors: dict[str, list[Tensor]]) -> Transfer:
        """Begin to copy the rows of a file's tensors into the units that the core has taken for a session.

        Raises `BadFile`, and has copied nothing, where they do not fit.
        """
        return Transfer(self._scattered(session, tensors), self._copiers, outward=False)

    def _scattered(self, session: Session, tensors: dict[str, list[Tensor]]) -> Iterator[Piece]:
        assert session.parcel is not None
        for component, hold in session.parcel.home.items():
            name, units = component.name.lower(), list(hold.units)
            self._device.overwritten(name, units)
            for index, storage in enumerate(self._device.storage(name)):
                done = 0
                for rows in own_rows(tensors, f"{name}.{index}", storage, len(units)):
                    yield from pieces_of(storage, units[done : done + len(rows)], rows)
                    done += len(rows)


def own_rows(tensors: Mapping[str, Sequence[Tensor]], name: str, storage: Tensor, count: int) -> list[Tensor]:
    """The last `count` rows of a file's tensor: a session's own, after those that it leases.

    They are not joined: a copy of them would take as much memory again. Raises `BadFile` where a file, whose
    checksums say nothing about shapes, has no such rows for a storage.
    """
    if name not in tensors:
        raise BadFile(f"it has no tensor {name}")
    content = tensors[name]
    total = sum(len(rows) for rows in content)
    for rows in content:
        if rows.dtype != storage.dtype or rows.shape[1:] != storage.shape[1:] or total < count:
            found, wanted = _form(total, rows), _form(count, storage)
            raise BadFile(f"its tensor {name} is {found}, not {wanted}")
    skipped = total - count
    kept: list[Tensor] = []
    for rows in content:
        if len(rows) > skipped:
            kept.append(rows[skipped:])
        skipped = max(0, skipped - len(rows))
    return kept


def _form(count: int, rows: Tensor) -> str:
    """The shape of so many rows, and their type."""
    return f"{[count, *rows.shape[1:]]} of {rows.dtype}"
