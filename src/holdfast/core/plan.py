"""Plans and results: all that passes between the core and an executor.

A `StepPlan` says what to compute in one step; a `StepResult` says what came of it. Both are plain
slotted values: rows are made by the hundred in every step, and nothing here may cost more than an
attribute.
"""

from __future__ import annotations

from holdfast.core.layout import Component


class UnitCopy:
    """Copy one unit of a component, all layers, before the rows of the step are computed."""

    __slots__ = ("component", "destination", "source")

    def __init__(self, component: Component, source: int, destination: int) -> None:
        self.component = component
        self.source = source
        self.destination = destination

    def __repr__(self) -> str:
        return f"{self.component.name.lower()} {self.source} -> {self.destination}"
