"""Reports that walk everything, made a portion at a time between steps.

`memory` and `picture` are of the whole engine: one walk at a time answers all who asked before it began, and
who asks meanwhile waits for the next. `sessions` is a page of one caller's. Walks take turns, a portion each.
Used by the desk alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from holdfast.engine.loop import EngineLoop
from holdfast.engine.memory_map import MemoryPicture
from holdfast.engine.report import Portions, memory_reports, session_reports
from holdfast.server.link import wire
from holdfast.server.link.rounds import Spent

__all__ = ["Surveys"]

Answers = list[tuple[int, object]]
"""Calls, and what each is answered."""


class Surveys:
    """The reports that are being made, and who waits for them."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._picture = MemoryPicture(loop)
        self._shared: dict[str, list[wire.Ask]] = {"memory": [], "picture": []}
        self._walking: set[str] = set()
        self._walks: deque[Portions[Answers]] = deque()

    def __bool__(self) -> bool:
        return bool(self._walks)

    def ask(self, command: wire.Ask) -> None:
        """Somebody asks for `memory` (of a tenant, or of all), the `picture`, or a page of `sessions`."""
        if command.what == "sessions":
            self._walks.append(self._page(command))
            return
        self._shared[command.what].append(command)
        if command.what not in self._walking:
            self._walking.add(command.what)
            self._walks.append(self._walk(command.what))

    def work(self, spent: Spent) -> Iterator[tuple[int, object]]:
        """Go on by one portion at least, until `spent`; what is answered meanwhile."""
        while self._walks:
            walk = self._walks.popleft()
            try:
                next(walk)
            except StopIteration as end:
                yield from end.value
            else:
                self._walks.append(walk)
            if spent():
                return

    def _walk(self, what: str) -> Portions[Answers]:
        """Walk for all who have asked, and once more while somebody asks meanwhile."""
        asked, self._shared[what] = self._shared[what], []
        answers: Answers
        if what == "memory":
            reports = yield from memory_reports(self._loop, {command.name for command in asked})
            answers = [(command.call, reports[command.name]) for command in asked]
        else:
            picture: dict[str, Any] = yield from self._picture.take()
            answers = [(command.call, picture) for command in asked]
        if self._shared[what]:
            self._walks.append(self._walk(what))
        else:
            self._walking.discard(what)
        return answers

    def _page(self, command: wire.Ask) -> Portions[Answers]:
        return [(command.call, (yield from session_reports(self._loop, command.names)))]
