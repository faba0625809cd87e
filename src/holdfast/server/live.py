"""The memory as it changes: pictures of all pools, ten a second while somebody looks, and what differs.

One object in the API process. It asks the engine for pictures while there are viewers, and a report and
figures of health once a second. A viewer waits for news and is sent the difference to what it saw last, so a
slow one sees fewer pictures and never holds anyone up. Names of other tenants' sessions are the admin's to
know.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.core.ledger import Kind
from holdfast.server.figures import Figures
from holdfast.server.keys import Caller
from holdfast.server.problems import Problem
from holdfast.server.service import Service

__all__ = ["LiveMemory", "Picture", "difference", "shown_holders"]

PICTURE_SECONDS = 0.1
REPORT_SECONDS = 1.0

Cells = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """Who held each unit at a step. Pictures of two engine processes (`life`) are not compared."""

    life: int
    step: int
    pools: tuple[tuple[str, str, int], ...]
    """(component, tier, units)."""
    cells: tuple[Cells, ...]
    holders: dict[int, tuple[int, str, str]]
    """Kind, session and turn of the holders that have a number of their own."""


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


def difference(before: Picture | None, after: Picture) -> bytes:
    """What changed, as 32-bit numbers in little-endian order; against nothing, all that is not free.

    The step; then for each pool that changed its place, how many runs follow, and for each run where it
    begins, how long it is and the number of its holder.
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
        if session.startswith((f"{caller.tenant}/", f"{caller.tenant}#")):
            shown[number] = [kind, session[own:], turn]
        elif caller.admin:
            shown[number] = [kind, session, turn]
        else:
            shown[number] = [kind, "", ""]
    return shown


class LiveMemory:
    """What all viewers look at."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.figures = Figures(service)
        self.picture: Picture | None = None
        self.report: dict[str, Any] | None = None
        self.up = False
        self.viewers = 0
        self._news = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._answered: dict[str, Any] | None = None

    def enter(self) -> None:
        """Somebody looks."""
        self.viewers += 1
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())

    def leave(self) -> None:
        """Somebody looks no more; without viewers nobody asks the engine."""
        self.viewers -= 1

    async def news(self) -> None:
        """Wait until something is new."""
        await self._news.wait()

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        due = 0.0
        try:
            while self.viewers:
                begun = loop.time()
                try:
                    await self._take(report=begun >= due)
                except Problem:
                    self.up, self.picture, self.report = False, None, None
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
            self._answered = answer
        if report:
            self.report = await self.service.ask("memory")
            self.figures.note()
        self.up = True
