"""Placement: which replica gets a session that has no owner, and which sessions leave a replica.

A first turn goes to the replica with most free memory among those that hold the prompt's beginning, unless
they are more than twice as loaded as the least loaded one; a prefix that nobody holds goes to the least
loaded. Sessions at rest are moved only under pressure, the longest idle first. Used by the simulation, and by
API processes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Load", "Move", "choose", "least_loaded", "plan_drain", "rebalance"]

OVERLOADED = 2.0
"""How many times the least load a replica may have and still get a turn for the sake of its prefix."""

PRESSED = 0.9
"""The share of used memory above which sessions are moved away."""

RELAXED = 0.75
"""The share of used memory up to which a replica takes sessions of others."""


@dataclass(slots=True)
class Load:
    """A replica as others see it: used and existing memory units, and turns that run or wait."""

    life: int
    used: int
    units: int
    turns: int = 0

    @property
    def share(self) -> float:
        """The share of its memory that is used; 0 if it has none."""
        return self.used / self.units if self.units else 0.0


@dataclass(frozen=True, slots=True)
class Move:
    """A session to be handed over."""

    session: str
    target: int


def least_loaded(loads: Iterable[Load]) -> Load:
    """The replica with most free units; of several the one with the fewest turns, then the oldest."""
    return min(loads, key=_order)


def _order(load: Load) -> tuple[int, int, int]:
    return (load.used - load.units, load.turns, load.life)


def choose(loads: Sequence[Load], holders: Collection[int]) -> int:
    """The life that gets a session whose prompt begins as something that `holders` have in memory."""
    least = least_loaded(loads)
    near = [load for load in loads if load.life in holders]
    if near:
        best = least_loaded(near)
        if best.used <= OVERLOADED * max(1, least.used) and best.used < best.units:
            return best.life
    return least.life


def rebalance(load: Load, idle: Sequence[tuple[str, int]], others: Sequence[Load]) -> list[Move]:
    """The sessions that a replica under pressure hands over, and to whom.

    `idle` are its sessions at rest with their units, the longest idle first.
    """
    moves: list[Move] = []
    excess = load.used - int(PRESSED * load.units)
    takers = [Load(each.life, each.used, each.units, each.turns) for each in others if each.share <= RELAXED]
    for name, units in idle:
        if excess <= 0 or not takers:
            break
        taker = least_loaded(takers)
        if taker.used + units > RELAXED * taker.units:
            break
        moves.append(Move(name, taker.life))
        taker.used += units
        excess -= units
    return moves


def plan_drain(idle: Iterable[tuple[str, int]], others: Sequence[Load], portion: int) -> list[Move]:
    """Where the next sessions of a draining replica go, at most `portion`; none without another replica."""
    takers = [Load(each.life, each.used, each.units, each.turns) for each in others]
    moves: list[Move] = []
    for name, units in idle:
        if len(moves) == portion or not takers:
            break
        taker = least_loaded(takers)
        taker.used += units
        moves.append(Move(name, taker.life))
    return moves
