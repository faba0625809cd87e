"""What all benchmarks share about figures: the values of a round, and their spread over the rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["OURS", "Progress", "Spread", "Values"]

OURS = "holdfast"
"""The name of Holdfast among the systems of a figure."""

Progress = Callable[[str], None]
"""Called with one line about what a benchmark does now."""

Values = dict[str, tuple[float, str]]
"""The values of one round, by name: a value and its unit."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of the values of some rounds, with the smallest and the largest."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Rounded to three decimals."""
        return cls(round(median(values), 3), round(min(values), 3), round(max(values), 3))
