"""When a server captures the graphs that it was not ready with: one at a time, between steps.

In an idle moment it captures one, and looks for commands before the next: a turn that comes waits for one
capture at most. A server that is never idle captures only shapes that its steps lacked, and spends at most a
tenth of its time on that: after each capture it serves for ten times as long as the capture took. Tokens are
the same with and without a graph.

A capture that fails is the last one: the server goes on without the graphs that are missing. Used by the
loop and by the engine process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.engine.step.runner import PlanRunner

__all__ = ["Capturing"]

log = logging.getLogger("holdfast.engine")

BUSY_SHARE = 0.1
"""The part of its time that a busy server spends on captures."""


class Capturing:
    """The captures of one engine while it serves."""

    __slots__ = ("_clock", "_due", "_executor")

    def __init__(self, executor: PlanRunner, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._executor = executor
        self._clock = clock
        self._due = 0.0

    @property
    def remaining(self) -> bool:
        """Whether graphs are still to be captured."""
        graphs = self._executor.graphs
        return graphs is not None and graphs.remaining > 0

    @property
    def due(self) -> bool:
        """Whether a busy server captures a graph now: steps have lacked one, and it is time."""
        graphs = self._executor.graphs
        return graphs is not None and graphs.missed > 0 and self._clock() >= self._due

    def when_idle(self) -> bool:
        """Capture one graph; False if none is left."""
        return self._capture(missed=False)

    def when_busy(self) -> bool:
        """Capture one graph that steps have lacked; False if there is none."""
        return self._capture(missed=True)

    def _capture(self, missed: bool) -> bool:
        if not self.remaining:
            return False
        begun = self._clock()
        try:
            captured = self._executor.capture_next(missed)
        except Exception as error:
            self._executor.abandon_graphs()
            log.warning("a CUDA graph could not be captured; going on without the others", exc_info=error)
            self._executor.guard.require()
            return False
        if captured:
            self._due = self._clock() + (self._clock() - begun) / BUSY_SHARE
            graphs = self._executor.graphs
            if graphs is not None and not graphs.remaining:
                log.info("all %d CUDA graphs are captured", graphs.total)
        return captured
