"""Reports about the whole engine, made a portion at a time between steps; and flushes of its prefix cache.

`memory` and `picture` walk everything: one walk answers all questions that came before it began; later ones
wait for the next walk. `sessions` is a page for one caller, `flush` a walk that evicts. Walks run
round-robin, a portion each. Used by `commands` alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from holdfast.engine.loop import EngineLoop
from holdfast.engine.portions import Portions
from holdfast.engine.reports.memory_map import MemoryPicture
from holdfast.engine.reports.report import memory_reports, session_reports
from holdfast.server.link import wire
from holdfast.server.link.rounds import Spent
from holdfast.server.link.wire import Question

__all__ = ["SURVEYS", "Surveys"]

SURVEYS = frozenset({Question.MEMORY, Question.PICTURE, Question.SESSIONS, Question.FLUSH})
"""The questions that are answered after a walk."""

FLUSH_UNITS = 16
"""Units of the prefix cache that a portion of a flush evicts, or the last run that has more."""

Answers = list[tuple[int, object]]
"""Calls with their answers."""


class Surveys:
    """The reports that are being made, and the calls that wait for them."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._picture = MemoryPicture(loop)
        self._shared: dict[Question, list[wire.Ask]] = {Question.MEMORY: [], Question.PICTURE: []}
        self._walking: set[Question] = set()
        self._walks: deque[Portions[Answers]] = deque()

    def __bool__(self) -> bool:
        return bool(self._walks)

    def ask(self, command: wire.Ask) -> None:
        """Start a report (`memory` of one tenant or all, the `picture`, a page of `sessions`), or a flush."""
        if command.what == Question.SESSIONS:
            self._walks.append(self._page(command))
            return
        if command.what == Question.FLUSH:
            self._walks.append(self._flush(command))
            return
        self._shared[command.what].append(command)
        if command.what not in self._walking:
            self._walking.add(command.what)
            self._walks.append(self._walk(command.what))

    def work(self, spent: Spent) -> Iterator[tuple[int, object]]:
        """Make portions, one at least, until `spent`; yields the calls that are answered."""
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

    def _walk(self, what: Question) -> Portions[Answers]:
        """Walk once for all questions so far, and again if there are new ones after it."""
        asked, self._shared[what] = self._shared[what], []
        answers: Answers
        if what == Question.MEMORY:
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

    def _flush(self, command: wire.Ask) -> Portions[Answers]:
        yield from self._loop.scheduler.registry.tree.flushing(FLUSH_UNITS)
        return [(command.call, None)]
