"""Who holds each unit, as numbers that can be compared and sent cheaply: what a live map is drawn from.

One object beside an engine loop. A picture has a number for each unit of each pool: the value of a `Kind` for
units whose holder needs no name, and from `FIRST_NAMED` on a holder of the table that comes with it. A holder
keeps its number while it holds anything. Looking changes nothing; where nothing happened since the last look,
that picture is given again.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import Holder, Kind
from holdfast.engine.loop import EngineLoop

__all__ = ["FIRST_NAMED", "MemoryPicture", "leased_units"]

FIRST_NAMED = len(Kind)
NUMBERS_MAX = (1 << 16) - 1


class MemoryPicture:
    """Takes pictures of one ledger."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._numbers: dict[Holder, int] = {}
        self._free: list[int] = []
        self._next = FIRST_NAMED
        self._mark: tuple[object, ...] | None = None
        self._last: dict[str, Any] = {}

    def take(self) -> dict[str, Any]:
        """The step, the pools with two bytes for each unit, and the named holders."""
        ledger = self._loop.scheduler.registry.ledger
        # The last entry itself is kept, so that another one cannot take its place unnoticed.
        entry = ledger.recorder[-1] if ledger.recorder else None
        findings = len(self._loop.scheduler.audit.findings)
        mark = (ledger.step, ledger.settled, findings, entry)
        if self._mark is not None and mark[:3] == self._mark[:3] and entry is self._mark[3]:
            return self._last
        self._mark = mark
        self._last = self._look()
        return self._last

    def _look(self) -> dict[str, Any]:
        ledger = self._loop.scheduler.registry.ledger
        grants = [grant for grant in ledger.live.values() if grant.units]
        self._number({grant.holder for grant in grants if grant.holder.kind is not Kind.TREE})
        cells = {pool.index: np.full(pool.size, Kind.FREE, dtype=np.uint16) for pool in ledger.pools.values()}
        for grant in grants:
            number = self._numbers.get(grant.holder, int(grant.holder.kind))
            _fill(cells[grant.pool.index], grant.units, number)
        for pool in ledger.pools.values():
            for _, units in pool.retiring:
                _fill(cells[pool.index], units, Kind.RETIRING)
            _fill(cells[pool.index], pool.quarantine, Kind.QUARANTINE)
        return {
            "step": ledger.step,
            "pools": [
                (pool.component.name.lower(), pool.tier.name.lower(), cells[pool.index].tobytes())
                for pool in ledger.pools.values()
            ],
            "holders": [_named(number, holder) for holder, number in self._numbers.items()],
        }

    def _number(self, holders: set[Holder]) -> None:
        """Give new holders numbers, and take those of holders that are gone."""
        for holder in [holder for holder in self._numbers if holder not in holders]:
            heapq.heappush(self._free, self._numbers.pop(holder))
        for holder in sorted(holders - self._numbers.keys(), key=lambda each: (each.kind, each.name)):
            if self._free:
                self._numbers[holder] = heapq.heappop(self._free)
            elif self._next <= NUMBERS_MAX:
                self._numbers[holder] = self._next
                self._next += 1


def leased_units(loop: EngineLoop, name: str) -> dict[int, list[int]]:
    """What a session reads of the shared prefixes, by the place of the pool in a picture."""
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
