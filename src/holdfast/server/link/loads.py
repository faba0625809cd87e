"""How loaded an engine is, by its heartbeat: the fullest of its device pools says it.

Placement of new sessions, hand-overs of old ones, the cluster's report and autoscaling read the same figures
here. Pure functions of pulses.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.cluster.placement import Load
from holdfast.server.link import wire

__all__ = ["Fullest", "fullest_pool", "load_of"]

EVICTABLE = ("FREE", "TREE")


@dataclass(frozen=True, slots=True)
class Fullest:
    """The device pool with the smallest free share. An engine without device pools has zero units of both."""

    free: int
    units: int

    @property
    def free_share(self) -> float:
        """The free share of its units; 1 for an engine without device pools, where memory is never short."""
        return self.free / self.units if self.units else 1.0


def fullest_pool(pulse: wire.Pulse) -> Fullest:
    """The fullest device pool in a heartbeat; what the prefix tree could give up counts as free."""
    units: dict[str, int] = {}
    free: dict[str, int] = {}
    for component, tier, kind, count in pulse.holders:
        if tier == "device":
            units[component] = units.get(component, 0) + count
            free[component] = free.get(component, 0) + (count if kind in EVICTABLE else 0)
    for component in free:
        free[component] -= pulse.leased.get(component, 0)
    pools = (Fullest(free[name], units[name]) for name in units if units[name])
    return min(pools, key=lambda pool: pool.free_share, default=Fullest(0, 0))


def load_of(life: int, pulse: wire.Pulse) -> Load:
    """An engine's load as `cluster.placement` compares it."""
    pool = fullest_pool(pulse)
    return Load(life, pool.units - pool.free, pool.units, pulse.running + pulse.queued)
