"""What a measurement returns: figures with their targets.

A `Figure` is one line of the JSON output; a `Check` is one line of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from holdfast.bench.figures import OURS, Progress

Parameter = str | int | float | bool

BASELINE = "sglang"


def plain(value: float) -> str:
    """A number without an exponent, with five significant digits."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.5g}"


@dataclass(frozen=True, slots=True)
class Settings:
    """Repetitions of each measurement, and the page sizes to measure."""

    repeats: int = 3
    page_sizes: tuple[int, ...] = (1, 64)


@dataclass(frozen=True, slots=True)
class Check:
    """A quantity with the baseline's value and its limits, where it has any."""

    quantity: str
    value: float
    unit: str
    baseline: float | None = None
    at_most: float | None = None
    at_least: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the quantity is within its limits; None without limits."""
        if self.at_most is None and self.at_least is None:
            return None
        below = self.at_most is None or self.value <= self.at_most
        return below and (self.at_least is None or self.value >= self.at_least)

    @property
    def ratio(self) -> float | None:
        """Our value over the baseline's."""
        return self.value / self.baseline if self.baseline else None

    @property
    def target(self) -> str:
        """The limits in words."""
        words = []
        if self.at_least is not None:
            words.append(f">= {plain(self.at_least)}")
        if self.at_most is not None:
            words.append(f"<= {plain(self.at_most)}")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value with its parameters and its checks."""

    name: str
    value: float
    unit: str
    parameters: dict[str, Parameter]
    checks: tuple[Check, ...] = ()
    system: str = OURS
    observed: dict[str, Parameter] = field(default_factory=dict)

    def as_json(self) -> dict[str, Parameter]:
        """The flat object of the JSON output: parameters and observations are keys of their own."""
        flat: dict[str, Parameter] = {"name": self.name, "value": _rounded(self.value), "unit": self.unit}
        for key, value in (self.parameters | self.observed).items():
            assert key not in flat, f"two meanings for {key}"
            flat[key] = _rounded(value) if isinstance(value, float) else value
        flat["system"] = self.system
        judged = [check for check in self.checks if check.met is not None]
        if judged:
            flat["target"] = "; ".join(f"{check.quantity} {check.target}" for check in judged)
            flat["met"] = all(check.met for check in judged)
        return flat


Measurement = Callable[[Settings, Progress], Iterator[Figure]]


def _rounded(value: float) -> float:
    """Four decimals: more than the clocks resolve."""
    return round(value, 4)
