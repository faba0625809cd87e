"""Which step shapes are captured as graphs, which are not yet, and which is next.

A server captures the few shapes that cover most steps before it is ready, and the others while it serves. A
step whose best shape is not captured takes a larger one, or none; that is a miss. The next shape is the one
with most misses; among equals the smallest, since a server that has just started has little to do. Numbers
only; used by `StepGraphs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.engine.step.inputs import Shape

__all__ = ["GraphCounts", "ShapeOrder", "first_shapes"]

COMMON_ROWS = 64
"""Rows that the first shapes have room for: more are rare right after a start."""

SHORT_INPUT = 64
"""Tokens of the first shape for a turn that is alone: its input, in most conversations."""


class GraphCounts(NamedTuple):
    """How many graphs are captured, how many there are to be, and how many are still to be captured.

    Where capturing was given up none are left, and fewer are captured than there were to be. `missed` counts
    steps that lacked one of those that are left.
    """

    captured: int
    total: int
    remaining: int
    missed: int = 0


def _smallest(shapes: Sequence[Shape], tokens: int, rows: int, decode: bool) -> Shape | None:
    """The smallest shape of a kind with room for a step."""
    fitting = [s for s in shapes if s.decode is decode and s.tokens >= tokens and s.rows >= rows]
    return min(fitting, key=lambda shape: (shape.tokens, shape.rows), default=None)


def first_shapes(wanted: Sequence[Shape], small_step: int) -> list[Shape]:
    """The shapes to capture before a server is ready, in order.

    The largest mixed shape comes first: it has room for every step of its size, and later graphs reuse its
    memory. Then decode steps of many rows and of one, and a small mixed step of many rows and of one.
    """
    largest = max(wanted, key=lambda shape: (not shape.decode, shape.tokens, shape.rows))
    rows = min(COMMON_ROWS, max(shape.rows for shape in wanted))
    found = [
        largest,
        _smallest(wanted, rows, rows, decode=True),
        _smallest(wanted, max(rows, small_step), rows, decode=False),
        _smallest(wanted, 1, 1, decode=True),
        _smallest(wanted, SHORT_INPUT, 1, decode=False),
    ]
    return list(dict.fromkeys(shape for shape in found if shape is not None))


class ShapeOrder:
    """The wanted shapes of one executor: captured ones, and the misses of the others."""

    __slots__ = ("_captured", "_decode", "_missed", "_misses", "_mixed", "_total")

    def __init__(self, wanted: Sequence[Shape]) -> None:
        ordered = sorted(wanted, key=lambda shape: (shape.tokens, shape.rows))
        self._total = len(ordered)
        self._captured: set[Shape] = set()
        self._decode = [shape for shape in ordered if shape.decode]
        self._mixed = [shape for shape in ordered if not shape.decode]
        self._missed: dict[Shape, int] = dict.fromkeys(ordered, 0)
        self._misses = 0

    @property
    def counts(self) -> GraphCounts:
        """How many shapes are captured, of how many."""
        return GraphCounts(len(self._captured), self._total, len(self._missed), self._misses)

    def find(self, rows: int, tokens: int, decode: bool) -> Shape | None:
        """The smallest captured shape with room for a step, or None. A better one that lacks is missed."""
        best = True
        for shape in self._decode if decode else self._mixed:
            if shape.rows < rows or shape.tokens < tokens:
                continue
            if shape in self._captured:
                return shape
            if best and shape in self._missed:
                self._missed[shape] += 1
                self._misses += 1
            best = False
        return None

    def next(self, missed: bool) -> Shape | None:
        """The shape to capture next, or None; with `missed` one that a step has lacked."""
        shape = max(self._missed, key=lambda each: self._missed[each], default=None)
        return None if shape is None or (missed and not self._missed[shape]) else shape

    def done(self, shape: Shape) -> None:
        """A shape was captured."""
        self._misses -= self._missed.pop(shape, 0)
        self._captured.add(shape)

    def abandon(self) -> None:
        """Capture no more: steps without a shape are launched kernel by kernel."""
        self._missed.clear()
        self._misses = 0
