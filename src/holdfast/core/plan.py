"""Plans and results: all that passes between the core and an executor.

A `StepPlan` says what to compute in one step; a `StepResult` has the outcome. Both are plain
slotted values: rows are made by the hundred in every step, and nothing here may cost more than an
attribute. An executor runs plans in the order of their steps: copies and moves first, then the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from holdfast.core.layout import Component, Tier

T = TypeVar("T")
Owner = TypeVar("Owner")


class UnitCopy:
    """Copy one unit of a component, all layers, before the rows of the step are computed."""

    __slots__ = ("component", "destination", "source")

    def __init__(self, component: Component, source: int, destination: int) -> None:
        self.component = component
        self.source = source
        self.destination = destination

    def __repr__(self) -> str:
        return f"{self.component.name.lower()} {self.source} -> {self.destination}"


class TierMove:
    """Copy units of one component from a tier to another. The source stays valid until the step settles.

    `number` names the transit that the move is part of. A transit that is cancelled and begun again gets a
    new number.
    """

    __slots__ = ("component", "destination_tier", "destinations", "number", "source_tier", "sources")

    def __init__(
        self,
        number: int,
        component: Component,
        source_tier: Tier,
        sources: list[int],
        destination_tier: Tier,
        destinations: list[int],
    ) -> None:
        self.number = number
        self.component = component
        self.source_tier = source_tier
        self.sources = sources
        self.destination_tier = destination_tier
        self.destinations = destinations


class TableChange:
    """What changed in a sequence's block tables: units from page `first` on, per component."""

    __slots__ = ("first", "full", "window", "window_first")

    def __init__(self, first: int, full: list[int], window_first: int, window: list[int]) -> None:
        self.first = first
        self.full = full
        self.window_first = window_first
        self.window = window


class Row(Generic[T]):
    """Compute `count` tokens of one sequence from position `start` on.

    `number` names the sequence's block tables, which `table` changes first. `tokens` are the inputs; when
    it is one short, the last one is what this sequence sampled in the step before. The last `drafts` of
    them are guesses. `sample` asks for the next token; a row without it only fills memory.

    The core withdraws the sample of a row in flight when its position has become known: the row before it
    brought forced tokens. Executors read `sample` again when they build a row's result: no tokens without it.
    """

    __slots__ = ("count", "drafts", "number", "sample", "start", "state", "table", "tokens", "turn")

    def __init__(
        self,
        turn: T,
        number: int,
        start: int,
        count: int,
        tokens: list[int],
        sample: bool,
        table: TableChange | None,
    ) -> None:
        self.turn = turn
        self.number = number
        self.start = start
        self.count = count
        self.tokens = tokens
        self.sample = sample
        self.table = table
        self.drafts = 0
        self.state: tuple[int | None, int] | None = None


class StepPlan(Generic[T, Owner]):
    """One step. `copied` names, for each copy, whose memory it completes; `forgotten` are tables to drop."""

    __slots__ = ("copied", "copies", "forgotten", "moves", "rows", "step", "void")

    def __init__(self, step: int) -> None:
        self.step = step
        self.rows: list[Row[T]] = []
        self.copies: list[UnitCopy] = []
        self.copied: list[Owner] = []
        self.moves: list[TierMove] = []
        self.forgotten: list[int] = []
        self.void = False

    def __bool__(self) -> bool:
        return bool(self.rows or self.copies or self.moves or self.forgotten)


class RowResult:
    """The result of one row: the accepted drafts and the sampled token; why the turn ends, or an error.

    The last `forced` of the tokens were not sampled: the turn's constraint leaves no choice about them. At
    least one token was. With all of them the turn has generated no more than its request allows.
    """

    __slots__ = ("error", "finish", "forced", "tokens")

    def __init__(
        self, tokens: list[int], finish: str | None = None, error: str | None = None, forced: int = 0
    ) -> None:
        self.tokens = tokens
        self.finish = finish
        self.error = error
        self.forced = forced


class StepResult:
    """The result of a step: one for each row, one flag for each move; `error` if the whole step failed.

    A move whose flag is None is still under way: `Scheduler.arrive` reports its outcome later.
    """

    __slots__ = ("error", "moved", "rows")

    def __init__(
        self, rows: list[RowResult], moved: Sequence[bool | None] | None = None, error: str | None = None
    ) -> None:
        self.rows = rows
        self.moved: Sequence[bool | None] = moved if moved is not None else []
        self.error = error
