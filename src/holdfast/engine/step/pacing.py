"""When the next plan is due: as late as possible without leaving the device idle.

With overlap a step is planned and launched while the previous one runs. If that is done at once, a command
that comes a moment later misses two steps: the running one, and the one behind it. A caller with
commands to read may wait for them during `slack` instead, and misses one.

The slack is the expected time of the step in flight, less the host's time for a plan and a launch. The
time of a step is estimated per power of two of its tokens: an estimate falls at once and rises slowly, and
falls further after a step that had ended before the host asked for it. Used by the loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

__all__ = ["Arriving", "Pacing"]

MARGIN_SECONDS = 0.0003
"""What is left of the slack for wake-ups that come late."""

RISE = 0.2
"""The part of a difference by which an estimate rises."""

FALL = 0.7
"""The factor for an estimate that was too long: the device may have waited."""


class Arriving(Protocol):
    """The tokens of a step on their way to the host."""

    @property
    def arrived(self) -> bool:
        """Whether they have come."""

    def synchronize(self) -> None:
        """Wait until they have come."""


class Pacing:
    """The durations of steps on one device."""

    __slots__ = ("_clock", "_flights", "_freed", "_host", "_planning", "_seconds")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._planning = 0.0
        self._host = 0.0
        self._freed: float | None = None
        """When the device ended the step before those in flight; None if that is unknown."""
        self._flights: deque[tuple[int, float]] = deque()
        """The kind of each step in flight, and when it was launched."""
        self._seconds: dict[int, float] = {}

    def plan(self) -> None:
        """A plan is about to be made."""
        self._planning = self._clock()

    def launch(self, tokens: int) -> None:
        """The plan was launched: a step of so many tokens."""
        now = self._clock()
        self._host = _rising(now - self._planning, self._host)
        self._flights.append((tokens.bit_length(), now))

    def settle(self, tokens: Arriving | None) -> None:
        """Wait for the oldest step in flight; one without tokens ends unseen."""
        kind, launched = self._flights.popleft()
        if tokens is None:
            self._freed = None
            return
        late = tokens.arrived
        tokens.synchronize()
        now, began, known = self._clock(), self._freed, self._seconds.get(kind)
        self._freed = now
        if late:
            if known is not None:
                self._seconds[kind] = FALL * known
        elif began is not None:
            self._seconds[kind] = _falling(now - max(began, launched), known)

    @property
    def slack(self) -> float:
        """Seconds for which the next plan may wait; not more than 0 if it is due, or that is unknown."""
        if len(self._flights) != 1 or self._freed is None:
            return 0.0
        kind, launched = self._flights[0]
        # A step takes no less than a smaller one.
        known = max((each for each in self._seconds if each <= kind), default=None)
        if known is None:
            return 0.0
        seconds = self._seconds[known]
        return max(launched, self._freed) + seconds - self._host - MARGIN_SECONDS - self._clock()


def _rising(value: float, known: float) -> float:
    """An estimate that must not be too small."""
    return value if value > known else known + RISE * (value - known)


def _falling(value: float, known: float | None) -> float:
    """An estimate that must not be too large."""
    return value if known is None or value < known else known + RISE * (value - known)
