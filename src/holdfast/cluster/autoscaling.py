"""How many engines a cluster should have, by their free memory and their waiting turns.

One engine more is wanted while turns wait, or while little memory is free; one less while nothing waits and
the others would have plenty of free memory after taking over what it holds. The two thresholds are apart, and
each wish must last for a time before it is acted on, so the number does not swing. It changes by one at a
time, and not while an engine that was asked for last has not reported yet. A pure function; time is an
argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["Bounds", "Load", "Mood", "Wish", "decide"]


@dataclass(frozen=True, slots=True)
class Load:
    """What one engine reports: the free share of its fullest pool, waiting turns and running turns."""

    free: float
    waiting: float = 0.0
    running: float = 0.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits and thresholds.

    Turns wait if there are more than `waiting` of them for each engine. `scarce` is the free share below
    which memory is short, `plenty` the one that must be left after an engine is removed. A wish must last for
    `rise_seconds` or `fall_seconds`.
    """

    least: int
    most: int
    waiting: float = 1.0
    scarce: float = 0.1
    plenty: float = 0.4
    rise_seconds: float = 10.0
    fall_seconds: float = 300.0

    def __post_init__(self) -> None:
        assert 1 <= self.least <= self.most, "there is an engine, and not more at least than at most"
        assert 0.0 <= self.scarce < self.plenty <= 1.0, "the thresholds are apart"


class Wish(Enum):
    """What the loads ask for."""

    NONE = 0
    MORE = 1
    FEWER = -1


@dataclass(frozen=True, slots=True)
class Mood:
    """The wish of the last decision, and since when it lasts."""

    wish: Wish = Wish.NONE
    since: float = 0.0


def wanted(loads: Sequence[Load], bounds: Bounds) -> Wish:
    """What the loads of all engines ask for, whatever was asked before."""
    count = len(loads)
    if not count:
        return Wish.NONE
    free = sum(load.free for load in loads) / count
    if sum(load.waiting for load in loads) > bounds.waiting * count or free < bounds.scarce:
        return Wish.MORE
    if count > 1 and not any(load.waiting for load in loads):
        held = count * (1.0 - free)
        if held / (count - 1) <= 1.0 - bounds.plenty:
            return Wish.FEWER
    return Wish.NONE


def decide(loads: Sequence[Load], target: int, bounds: Bounds, mood: Mood, now: float) -> tuple[int, Mood]:
    """The number of engines to have from now on, and what to remember until the next decision.

    `target` is the number that was decided last, `loads` what the engines that serve report.
    """
    inside = min(max(target, bounds.least), bounds.most)
    if inside != target or len(loads) != target:
        return inside, Mood()
    wish = wanted(loads, bounds)
    if wish is not mood.wish:
        mood = Mood(wish, now)
    lasted = now - mood.since
    if wish is Wish.MORE and target < bounds.most and lasted >= bounds.rise_seconds:
        return target + 1, Mood()
    if wish is Wish.FEWER and target > bounds.least and lasted >= bounds.fall_seconds:
        return target - 1, Mood()
    return target, mood
