"""Rounds that measure every system side by side, and the figures that they give.

A round measures each system once, starting with another one each time, so that load on the machine affects
all of them. Figures are medians over the rounds, ratios are medians of the rounds' ratios. The first round is
a warm-up. An error or an interruption keeps the figures of complete measurements.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from holdfast.bench.beside.cases import Case
from holdfast.bench.beside.http import BenchError
from holdfast.bench.beside.systems import System
from holdfast.bench.figures import OURS, Progress, Spread, Values
from holdfast.bench.machine import ForeignLoad
from holdfast.bench.timing import in_turn, paired_ratio

__all__ = ["INTERRUPTED", "Measured", "run"]

INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures, Holdfast's with their ratios; `ended` says why the run stopped early, if it did."""

    figures: list[dict[str, Any]]
    ended: str | None = None
    failed: bool = False


@dataclass(slots=True)
class _Taken:
    """The values of one quantity over the rounds, and the foreign load of each, by system."""

    unit: str
    values: dict[str, list[float]] = field(default_factory=dict)
    foreign: dict[str, list[float]] = field(default_factory=dict)


async def run(
    cases: Sequence[Case],
    systems: Sequence[System],
    rounds: int,
    progress: Progress,
    seconds: float = float("inf"),
) -> Measured:
    """Measure all cases in `rounds` rounds, or as many as fit into `seconds`.

    Cancelling the task returns the figures of the measurements that were complete.
    """
    taken: list[dict[str, _Taken]] = [{} for _ in cases]
    deadline, longest = time.perf_counter() + seconds, 0.0
    ended, failed = None, False
    try:
        for number in range(rounds + 1):
            began = time.perf_counter()
            if began + longest > deadline:
                ended = f"no time for more than {max(0, number - 1)} rounds"
                break
            await _round(number, cases, systems, taken, progress)
            if number:
                longest = max(longest, time.perf_counter() - began)
    except asyncio.CancelledError:
        ended = INTERRUPTED
    except BenchError as error:
        ended, failed = str(error), True
    names = [system.name for system in systems]
    figures = [
        figure
        for case, found in zip(cases, taken, strict=True)
        for name, quantity in found.items()
        for figure in _figures(case, name, quantity, names)
    ]
    return Measured(figures, ended, failed)


async def _round(
    number: int,
    cases: Sequence[Case],
    systems: Sequence[System],
    taken: list[dict[str, _Taken]],
    progress: Progress,
) -> None:
    """Measure every case with every system that takes part; round 0 is the warm-up."""
    for index, case in enumerate(cases):
        for system in in_turn(systems, number):
            if not case.fits(system):
                continue
            what = f"round {number}" if number else "warming up"
            progress(f"{what}: {system.name}, {case.parameters}")
            load = ForeignLoad()
            values = await case.measure(system, 1 + number * 1000 + index, not number)
            if number:
                _note(taken[index], system.name, values, load.cores())


def _note(taken: dict[str, _Taken], system: str, values: Values, foreign: float) -> None:
    for name, (value, unit) in values.items():
        quantity = taken.setdefault(name, _Taken(unit))
        quantity.values.setdefault(system, []).append(value)
        quantity.foreign.setdefault(system, []).append(foreign)


def _figures(case: Case, name: str, taken: _Taken, systems: Sequence[str]) -> list[dict[str, Any]]:
    figures = []
    for system in systems:
        values = taken.values.get(system, [])
        if not values:
            continue
        spread = Spread.of(values)
        figure: dict[str, Any] = {
            "name": name,
            "value": spread.median,
            "unit": taken.unit,
            **case.parameters,
            "system": system,
            "min": spread.least,
            "max": spread.most,
            "rounds": len(values),
            "foreign_load": round(median(taken.foreign[system]), 2),
        }
        if system == OURS:
            for other, theirs in taken.values.items():
                if other != OURS:
                    figure[f"ratio_to_{other}"] = round(paired_ratio(values, theirs), 3)
        figures.append(figure)
    return figures
