"""Copies on disk of memory that lies on the host.

The engine writes the memory of idle sessions to files while it is still on the host. When the host is full,
the core accounts for such a session on disk alone, and no plan moves anything: its content is there already.
Called by the world.
"""

from __future__ import annotations

from random import Random

from holdfast.core.layout import Component, Tier
from holdfast.core.session import Session
from holdfast.core.tiers import Parcel
from holdfast.sim.device import SimDevice

HAVE_A_COPY = 0.5


class Files:
    """The copies on disk of one process."""

    def __init__(self, device: SimDevice, rng: Random) -> None:
        self.device = device
        self.rng = rng
        self._copies: list[tuple[Parcel, dict[Component, list[list[int]]]]] = []

    def on_disk(self, session: Session) -> bool:
        """Whether a session's memory on the host is in a file as well: its content then is."""
        parcel = session.parcel
        if parcel is None or session.volatile or self.rng.random() >= HAVE_A_COPY:
            return False
        contents = {
            component: [self.device.read_unit((component, parcel.tier), unit) for unit in hold.units]
            for component, hold in parcel.away.items()
        }
        self._copies.append((parcel, contents))
        return True

    def fill(self) -> None:
        """Let units on disk contain what the files do whose sessions have left the host since last asked."""
        for parcel, contents in self._copies:
            if parcel.tier is Tier.DISK:
                for component, hold in parcel.away.items():
                    for unit, cells in zip(hold.units, contents[component], strict=True):
                        self.device.write_unit((component, Tier.DISK), unit, cells)
        self._copies.clear()
