"""Where a new session, or a request without one, is computed: at the engine with most room.

Room is counted in the device pool that is fullest: units that are free or only cached by the prefix tree,
less what was placed there since the engine's last pulse, at the size of its average session. Engines that
are draining take nothing. Pure functions of pulses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from holdfast.server.link import wire

__all__ = ["Candidate", "room", "roomiest"]

EVICTABLE = ("FREE", "TREE")


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
    sizes: dict[str, int] = {}
    spare: dict[str, int] = {}
    for component, tier, kind, units in pulse.holders:
        if tier == "device":
            sizes[component] = sizes.get(component, 0) + units
            spare[component] = spare.get(component, 0) + (units if kind in EVICTABLE else 0)
    if not any(sizes.values()):
        return 0.0
    fullest = min((name for name in sizes if sizes[name]), key=lambda name: spare[name] / sizes[name])
    each = max(1.0, (sizes[fullest] - spare[fullest]) / max(1, pulse.sessions + pulse.running))
    return spare[fullest] - placed * each


def roomiest(engines: Iterable[C]) -> C | None:
    """The engine with most room; among equals, the one with the fewest turns. None if none takes anything."""

    def key(engine: C) -> tuple[float, int]:
        pulse = engine.last_pulse
        if pulse is None:
            return float("-inf"), -engine.placed
        return room(pulse, engine.placed), -(pulse.running + pulse.queued + engine.placed)

    return max((engine for engine in engines if not engine.draining), key=key, default=None)
