"""Live memory maps: snapshots of all pools ten times a second while there are viewers, sent as differences.

One object in the API process polls the engine while there are viewers, and takes a report and health figures
once a second. A viewer gets the difference to its last map, so a slow one gets fewer maps.

Only the admin sees other tenants. A tenant's map has its own units first, in memory order; then a rounded
number of units of others (`coarse`), without owner and place; the rest is shown as free.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.core.ledger import Kind
from holdfast.engine.reports.coarse import coarse
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem
from holdfast.server.service import Service
from holdfast.server.telemetry.figures import Figures

__all__ = ["LiveMemory", "Picture", "difference", "seen_by", "shown_holders"]

PICTURE_SECONDS = 0.1
REPORT_SECONDS = 1.0

OTHERS = (1 << 16) - 1
"""The holder number of other tenants' units in a tenant's map."""

Cells = npt.NDArray[np.uint16]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """The holder of each unit at a step. Pictures of two engine processes (`life`) are not compared."""

    life: int
    step: int
    pools: tuple[tuple[str, str, int], ...]
    """(component, tier, units)."""
    cells: tuple[Cells, ...]
    holders: dict[int, tuple[int, str, str]]
    """Kind, session and turn of the holders that have a number of their own."""
    own: tuple[Mask, ...] | None = None
    """In a tenant's map: which units of the whole map are its own, at the beginning."""

    def place_of(self, pool: int, unit: int) -> int | None:
        """The place of a unit of the whole map in this one; None if it is hidden."""
        if self.own is None:
            return unit
        mask = self.own[pool]
        return int(np.count_nonzero(mask[:unit])) if mask[unit] else None


def picture_of(answer: dict[str, Any], life: int) -> Picture:
    """The engine's answer as a picture."""
    cells = tuple(np.frombuffer(held, dtype=np.uint16) for _, _, held in answer["pools"])
    return Picture(
        life,
        answer["step"],
        tuple(
            (component, tier, len(each))
            for (component, tier, _), each in zip(answer["pools"], cells, strict=True)
        ),
        cells,
        {number: (kind, session, turn) for number, kind, session, turn in answer["holders"]},
    )


def seen_by(picture: Picture, caller: Caller) -> Picture:
    """A picture as a caller may see it: the admin all of it, a tenant its own units."""
    trees = [number for number, (kind, _, _) in picture.holders.items() if kind == Kind.TREE]
    shown = np.arange(1 << 16, dtype=np.uint16)
    shown[trees] = Kind.TREE
    named = {number: each for number, each in picture.holders.items() if each[0] != Kind.TREE}
    if caller.admin:
        return replace(picture, cells=tuple(shown[cells] for cells in picture.cells), holders=named)
    mine = np.zeros(1 << 16, dtype=np.bool_)
    mine[[number for number, (_, name, _) in picture.holders.items() if _is_own(name, caller.tenant)]] = True
    kept = {number: each for number, each in named.items() if mine[number]}
    masks = tuple(mine[cells] for cells in picture.cells)
    maps: list[Cells] = []
    for cells, mask in zip(picture.cells, masks, strict=True):
        own = shown[cells[mask]]
        held = np.count_nonzero((cells != Kind.FREE) & (cells != Kind.RETIRING) & ~mask)
        others = coarse(int(held), len(cells))
        if others:
            kept[OTHERS] = (int(Kind.SESSION), "", "")
        rest = len(cells) - len(own) - others
        parts = (own, np.full(others, OTHERS, np.uint16), np.full(rest, Kind.FREE, np.uint16))
        maps.append(np.concatenate(parts))
    return replace(picture, cells=tuple(maps), holders=kept, own=masks)


def _is_own(name: str, tenant: str) -> bool:
    """Whether a holder is a tenant's: its prefix tree, a session or a one-shot request."""
    return name == tenant or name.startswith((f"{tenant}/", f"{tenant}#"))


def difference(before: Picture | None, after: Picture) -> bytes:
    """The difference of two maps as 32-bit little-endian integers; without `before`, to an empty map.

    The step; then for each changed pool its index and number of runs, and for each run its first unit, its
    length and its holder's number.
    """
    parts: list[npt.NDArray[np.uint32]] = [np.array([after.step & 0xFFFFFFFF], dtype="<u4")]
    for place, now in enumerate(after.cells):
        was = before.cells[place] if before is not None else np.full_like(now, Kind.FREE)
        changed = np.flatnonzero(was != now)
        if not changed.size:
            continue
        values = now[changed]
        breaks = np.flatnonzero((np.diff(changed) != 1) | (np.diff(values.astype(np.int32)) != 0)) + 1
        first = np.concatenate(([0], breaks))
        lengths = np.diff(np.concatenate((first, [changed.size])))
        runs = np.stack((changed[first], lengths, values[first]), axis=1).astype("<u4")
        parts += [np.array([place, len(runs)], dtype="<u4"), runs.ravel()]
    return b"".join(part.tobytes() for part in parts)


def shown_holders(holders: dict[int, tuple[int, str, str]], caller: Caller) -> dict[int, list[Any]]:
    """Holders as a caller may see them: kind, session and turn, without the names of other tenants'."""
    shown: dict[int, list[Any]] = {}
    own = len(caller.tenant) + 1
    for number, (kind, session, turn) in holders.items():
        if session != caller.tenant and _is_own(session, caller.tenant):
            shown[number] = [kind, session[own:], turn]
        elif caller.admin:
            shown[number] = [kind, session, turn]
        else:
            shown[number] = [kind, "", ""]
    return shown


class LiveMemory:
    """The state that all viewers share."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.figures = Figures(service)
        self.picture: Picture | None = None
        self.reports: dict[str | None, dict[str, Any]] = {}
        """The answers of `GET /v1/memory` for the admin (None) and each tenant with viewers."""
        self.up = False
        self._viewers: Counter[str | None] = Counter()
        self._seen: dict[str | None, Picture] = {}
        self._news = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._answered: dict[str, Any] | None = None

    def enter(self, whose: str | None) -> None:
        """Add a viewer of a tenant's memory, or (None) of all."""
        self._viewers[whose] += 1
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())

    def leave(self, whose: str | None) -> None:
        """Remove a viewer; without viewers the polling stops."""
        self._viewers[whose] -= 1
        if not self._viewers[whose]:
            del self._viewers[whose]
            self.reports.pop(whose, None)

    def seen(self, caller: Caller, whose: str | None) -> Picture | None:
        """The last picture as a caller may see it."""
        if self.picture is None:
            return None
        if whose not in self._seen:
            self._seen[whose] = seen_by(self.picture, caller)
        return self._seen[whose]

    async def news(self) -> None:
        """Wait for the next picture or report."""
        await self._news.wait()

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        due = 0.0
        try:
            while self._viewers:
                begun = loop.time()
                try:
                    await self._take(report=begun >= due)
                except Problem:
                    self.up, self.picture, self._seen = False, None, {}
                    self.reports.clear()
                if begun >= due:
                    due = begun + REPORT_SECONDS
                news, self._news = self._news, asyncio.Event()
                news.set()
                await asyncio.sleep(max(0.0, begun + PICTURE_SECONDS - loop.time()))
        finally:
            self._looking = None

    async def _take(self, report: bool) -> None:
        answer = await self.service.ask("picture")
        if self.picture is None or answer != self._answered:
            self.picture = picture_of(answer, self.service.supervisor.restarts)
            self._seen = {}
            self._answered = answer
        if report:
            # The engine answers all of these with one walk.
            whose = list(self._viewers)
            answers = await asyncio.gather(*(self.service.ask("memory", each) for each in whose))
            self.reports.update(
                (each, answer) for each, answer in zip(whose, answers, strict=True) if each in self._viewers
            )
            self.figures.note()
        self.up = True
