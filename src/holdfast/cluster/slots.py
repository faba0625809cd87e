"""Names of engines in a cluster: an engine that replaces another takes its name, and with it its sessions.

A slot is a name such as `engine-0`. It is held by one engine, which says again and again that it lives; a
holder of which nothing was heard for a time has lost its slot. A new engine takes the lowest slot that is
free. If none is, and there are as many as engines are expected, it waits for one: that of an engine that
drains, or of one that is dead and not yet known to be. After the table was lost, slots are handed out when
every holder has had time to say what it holds. Pure; time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Slot", "Slots"]

SILENCE_SECONDS = 5.0
"""Silence after which a holder has lost its slot."""

SETTLE_SECONDS = 3.0
"""How long a new table listens before it hands out slots."""


@dataclass(slots=True)
class Slot:
    """One name: who holds it, where that engine is or was, and when it was heard of last."""

    number: int
    holder: str | None
    address: str = ""
    heard: float = 0.0

    @property
    def name(self) -> str:
        """The name of the engine in this slot."""
        return f"engine-{self.number}"


class Slots:
    """All slots of a cluster."""

    def __init__(self, now: float, settle: float = SETTLE_SECONDS) -> None:
        """`settle` is 0 for a table that was never lost."""
        self._slots: dict[int, Slot] = {}
        self._opens = now + settle
        self.expected = 0
        """How many engines there should be; 0 if nobody has said so yet."""

    def settled(self, now: float) -> bool:
        """Whether every holder has had time to say what it holds."""
        return now >= self._opens

    def expire(self, now: float) -> list[str]:
        """Take the slots of silent holders back; returns who they were."""
        lost = [
            slot
            for slot in self._slots.values()
            if slot.holder is not None and now - slot.heard > SILENCE_SECONDS
        ]
        gone = [slot.holder or "" for slot in lost]
        for slot in lost:
            slot.holder = None
        return gone

    def take(self, holder: str, now: float) -> int | None:
        """A slot for a new engine; None if it must ask again later."""
        self.expire(now)
        mine = self._of(holder)
        if mine is not None:
            mine.heard = now
            return mine.number
        if not self.settled(now):
            return None
        free = sorted(slot.number for slot in self._slots.values() if slot.holder is None)
        if not free and len(self._slots) >= self.expected:
            return None
        number = free[0] if free else max(self._slots, default=-1) + 1
        self.hold(holder, number, "", now)
        return number

    def hold(self, holder: str, number: int, address: str, now: float) -> bool:
        """A holder says that it lives, and where it serves; False if the slot is another's."""
        slot = self._slots.setdefault(number, Slot(number, None))
        if slot.holder not in (None, holder):
            return False
        slot.holder, slot.heard = holder, now
        slot.address = address or slot.address
        return True

    def release(self, holder: str) -> None:
        """An engine has ended; its slot is free."""
        slot = self._of(holder)
        if slot is not None:
            slot.holder = None

    def expect(self, count: int) -> None:
        """There should be `count` engines: forget free slots beyond them, the highest first."""
        self.expected = count
        for number in sorted(self._slots, reverse=True):
            if len(self._slots) <= count:
                return
            if self._slots[number].holder is None:
                del self._slots[number]

    def addresses(self) -> dict[str, str]:
        """Where the engine of each slot serves, or did last; slots that never served are left out."""
        found = sorted(self._slots.values(), key=lambda slot: slot.number)
        return {slot.name: slot.address for slot in found if slot.address}

    def _of(self, holder: str) -> Slot | None:
        return next((slot for slot in self._slots.values() if slot.holder == holder), None)
