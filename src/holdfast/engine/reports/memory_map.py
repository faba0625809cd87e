"""The holder of each unit, as numbers that are cheap to compare and to send: the data of the live map.

One object beside an engine loop. A picture has a number for each unit of each pool: the value of a `Kind` for
units without a holder, and from `FIRST_NAMED` on an index into the table of holders that comes with it; a
tenant's prefix tree is a holder with the tenant's name. A holder keeps its number while it holds anything.
Taking a picture changes nothing; if nothing has happened since the last one, that one is returned again. A
picture of many Holds is made in portions, with steps in between: each Hold is shown as of its own portion.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import Holder, Kind
from holdfast.engine.portions import Portions

if TYPE_CHECKING:
    from holdfast.engine.loop import EngineLoop

__all__ = ["FIRST_NAMED", "MemoryPicture", "leased_units"]

FIRST_NAMED = len(Kind)
NUMBERS_MAX = (1 << 16) - 2
"""The highest number of a holder: the server uses the next one for holders that a viewer may not see."""

PORTION = 128
"""Holds in one portion."""


class MemoryPicture:
    """Takes pictures of one ledger."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._numbers: dict[Holder, int] = {}
        self._free: list[int] = []
        self._next = FIRST_NAMED
        self._mark: tuple[object, ...] | None = None
        self._last: dict[str, Any] = {}

    def take(self) -> Portions[dict[str, Any]]:
        """The step, the pools with two bytes for each unit, and the named holders; in portions."""
        ledger = self._loop.scheduler.registry.ledger
        # The last entry itself is kept, so that no other one can have its identity.
        entry = ledger.recorder[-1] if ledger.recorder else None
        findings = len(self._loop.scheduler.audit.findings)
        mark = (ledger.step, ledger.settled, findings, entry)
        if self._mark is not None and mark[:3] == self._mark[:3] and entry is self._mark[3]:
            return self._last
        self._mark = mark
        self._last = yield from self._look()
        return self._last

    def _look(self) -> Portions[dict[str, Any]]:
        ledger = self._loop.scheduler.registry.ledger
        cells = {pool.index: np.full(pool.size, Kind.FREE, dtype=np.uint16) for pool in ledger.pools.values()}
        seen: dict[Holder, tuple[int, int, str, str]] = {}
        for place, grant in enumerate(list(ledger.live.values()), 1):
            # A Hold released since the walk began is not live any more, or has no units.
            if grant.units and ledger.live.get(grant.serial) is grant:
                number = self._number(grant.holder)
                if number is not None and grant.holder not in seen:
                    seen[grant.holder] = _named(number, grant.holder)
                _fill(cells[grant.pool.index], grant.units, number or int(grant.holder.kind))
            if not place % PORTION:
                yield
        for pool in ledger.pools.values():
            for _, units in pool.retiring:
                _fill(cells[pool.index], units, Kind.RETIRING)
            _fill(cells[pool.index], pool.quarantine, Kind.QUARANTINE)
        for place, holder in enumerate(list(self._numbers), 1):
            if holder not in seen:
                heapq.heappush(self._free, self._numbers.pop(holder))
            if not place % PORTION:
                yield
        return {
            "step": ledger.step,
            "pools": [
                (pool.component.name.lower(), pool.tier.name.lower(), cells[pool.index].tobytes())
                for pool in ledger.pools.values()
            ],
            "holders": list(seen.values()),
        }

    def _number(self, holder: Holder) -> int | None:
        """A holder's number, a new one if it has none; None if all are in use."""
        number = self._numbers.get(holder)
        if number is None and self._free:
            number = self._numbers[holder] = heapq.heappop(self._free)
        elif number is None and self._next <= NUMBERS_MAX:
            number = self._numbers[holder] = self._next
            self._next += 1
        return number


def leased_units(loop: EngineLoop, name: str) -> dict[int, list[int]]:
    """The units of shared prefixes that a session leases, by the index of the pool in a picture."""
    registry = loop.scheduler.registry
    lease = registry.find(name).sequence.lease
    if lease is None:
        return {}
    for place, pool in enumerate(registry.ledger.pools.values()):
        if pool.component is Component.FULL and pool.tier is Tier.DEVICE:
            return {place: lease.full_units(0)}
    return {}


def _fill(cells: npt.NDArray[np.uint16], units: list[int], number: int) -> None:
    if len(units) < 8:
        for unit in units:
            cells[unit] = number
    else:
        cells[np.array(units, dtype=np.intp)] = number


def _named(number: int, holder: Holder) -> tuple[int, int, str, str]:
    """A holder's number, kind, session, and (where it is a turn) the turn."""
    turn, of, session = holder.name.rpartition(" of ")
    return (number, int(holder.kind), session, turn if of else "")
