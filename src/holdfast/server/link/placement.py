"""Where a new session, or a request without one, is computed: at the engine with most room.

Room is counted in the device pool that is fullest: units that are free, or cached by the prefix tree
without a lease, less what was placed there since the engine's last pulse, at the size of its average
session. Engines that are draining take nothing. Pure functions of pulses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from holdfast.server.link import wire
from holdfast.server.link.loads import fullest_pool

__all__ = ["Candidate", "room", "roomiest"]


class Candidate(Protocol):
    """An engine that a session may be placed at."""

    placed: int

    @property
    def draining(self) -> bool:
        """Whether it takes nothing new."""

    @property
    def last_pulse(self) -> wire.Pulse | None:
        """Its last heartbeat; None if none has come yet."""


C = TypeVar("C", bound=Candidate)


def room(pulse: wire.Pulse, placed: int) -> float:
    """Units that an engine has room for in the fullest of its device pools."""
    pool = fullest_pool(pulse)
    if not pool.units:
        return 0.0
    each = max(1.0, (pool.units - pool.free) / max(1, pulse.sessions + pulse.running))
    return pool.free - placed * each


def roomiest(engines: Iterable[C]) -> C | None:
    """The engine with most room; among equals, the one with the fewest turns. None if none takes anything."""

    def key(engine: C) -> tuple[float, int]:
        pulse = engine.last_pulse
        if pulse is None:
            return float("-inf"), -engine.placed
        return room(pulse, engine.placed), -(pulse.running + pulse.queued + engine.placed)

    return max((engine for engine in engines if not engine.draining), key=key, default=None)
