"""How loaded an engine is, by its heartbeat: in the device pool that is fullest."""

from __future__ import annotations

from holdfast.cluster.placement import Load
from holdfast.server.link import wire

__all__ = ["load_of"]

EVICTABLE = ("FREE", "TREE")


def load_of(life: int, pulse: wire.Pulse) -> Load:
    """An engine's load; what only the prefix tree keeps counts as free."""
    sizes: dict[str, int] = {}
    spare: dict[str, int] = {}
    for component, tier, kind, units in pulse.holders:
        if tier == "device":
            sizes[component] = sizes.get(component, 0) + units
            spare[component] = spare.get(component, 0) + (units if kind in EVICTABLE else 0)
    present = [name for name in sizes if sizes[name]]
    fullest = min(present, key=lambda name: spare[name] / sizes[name])
    return Load(life, sizes[fullest] - spare[fullest], sizes[fullest], pulse.running + pulse.queued)
