"""A simulated device: pages and slots that remember exactly what was written to them.

It runs plans as a real executor would: table changes, copies, moves, then rows. Every row reads through its
block tables and its state slot and compares what it finds with what must be there, before it computes. A
stale table entry, a page used twice, a wrong rollback, a bleeding fork, a wrong state: all show as wrong
content. It also watches fences: a unit that a plan in flight names must not be handed to somebody else.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.layout import Component, MemoryLayout, Tier
from holdfast.core.plan import Row, RowResult, TierMove
from holdfast.core.registry import Plan
from holdfast.core.turn import Turn
from holdfast.sim.content import EMPTY, History, extend, next_token, stops

Place = tuple[Component, Tier, int]


class WrongContent(Exception):
    """A row found something else in memory than what its sequence wrote there."""


class SimDevice:
    """Memory with a perfect recollection."""

    __slots__ = ("_cells", "_histories", "_named", "_planned", "_sampled", "_tables", "layout", "log", "vocabulary")

    def __init__(self, layout: MemoryLayout, vocabulary: int, log: Callable[[int], list[int]]) -> None:
        self.layout = layout
        self.vocabulary = vocabulary
        self.log = log
        self._cells: dict[Place, dict[int, int]] = {}
        self._tables: dict[int, tuple[dict[int, int], dict[int, int]]] = {}
        self._planned: dict[int, tuple[dict[int, int], dict[int, int]]] = {}
        self._named: dict[int, dict[Place, int]] = {}
        self._sampled: dict[int, int] = {}
        self._histories: dict[int, History] = {}

    # --- plans ------------------------------------------------------------------------------------

    def announce(self, plan: Plan) -> str | None:
        """Hear of a plan before it runs; returns what is wrong if it hands out a unit in flight."""
        named: dict[Place, int] = {}
        fresh: dict[Place, int] = {}
        for row in plan.rows:
            self._change_tables(self._planned, row)
            full, window = self._planned.get(row.number, ({}, {}))
            first, last = row.start // self.layout.page_size, (row.start + row.count - 1) // self.layout.page_size
            for component, table in ((Component.FULL, full), (Component.WINDOW, window)):
                low = self.layout.window_first_page(row.start) if component is Component.WINDOW else 0
                for page in range(low, last + 1):
                    if page in table:
                        named[component, Tier.DEVICE, table[page]] = row.number
                        if page >= first:
                            fresh[component, Tier.DEVICE, table[page]] = row.number
            if row.state is not None:
                fresh[Component.STATE, Tier.DEVICE, row.state[1]] = row.number
                if row.state[0] is not None:
                    named[Component.STATE, Tier.DEVICE, row.state[0]] = row.number
        for copy, owner in zip(plan.copies, plan.copied, strict=True):
            fresh[copy.component, Tier.DEVICE, copy.destination] = owner.number
        for move in plan.moves:
            for unit in move.destinations:
                fresh[move.component, move.destination_tier, unit] = move.number
        wrong = next(
            (
                f"{place[0].name.lower()} unit {place[2]} is handed to {number} while step {step} still names it"
                for step, flight in self._named.items()
                for place, number in fresh.items()
                if flight.get(place, number) != number
            ),
            None,
        )
        self._named[plan.step] = named | fresh
        return wrong

    def run(self, plan: Plan) -> tuple[list[RowResult], list[bool]]:
        """Carry out a plan; raises `WrongContent` if memory is not what it must be."""
        for copy in plan.copies:
            source = self._cells.get((copy.component, Tier.DEVICE, copy.source), {})
            self._cells[copy.component, Tier.DEVICE, copy.destination] = dict(source)
        for move in plan.moves:
            self._move(move)
        return [self._run_row(row) for row in plan.rows], [True] * len(plan.moves)

    def spoil(self, plan: Plan) -> None:
        """Write nonsense wherever a plan would write: what a step that failed half-way leaves behind."""
        page_size = self.layout.page_size
        for row in plan.rows:
            self._change_tables(self._tables, row)
            for table, component in zip(self._tables[row.number], (Component.FULL, Component.WINDOW), strict=True):
                for position in range(row.start, row.start + row.count):
                    unit = table.get(position // page_size)
                    if unit is not None:
                        self._cells.setdefault((component, Tier.DEVICE, unit), {})[position % page_size] = -1
            if row.state is not None:
                self._cells[Component.STATE, Tier.DEVICE, row.state[1]] = {0: -1}

    def settled(self, plan: Plan) -> None:
        """A plan is over: it names nothing any more."""
        del self._named[plan.step]
        for number in plan.forgotten:
            for table in (self._tables, self._planned, self._sampled, self._histories):
                table.pop(number, None)

    # --- parts ------------------------------------------------------------------------------------

    def _change_tables(self, tables: dict[int, tuple[dict[int, int], dict[int, int]]], row: Row[Turn]) -> None:
        full, window = tables.setdefault(row.number, ({}, {}))
        change = row.table
        if change is not None:
            for page in [page for page in full if page >= change.first]:
                del full[page]
            for page in [page for page in window if page >= change.first]:
                del window[page]
            full.update(enumerate(change.full, change.first))
            window.update(enumerate(change.window, change.window_first))

    def _move(self, move: TierMove) -> None:
        for source, destination in zip(move.sources, move.destinations, strict=True):
            cells = self._cells.get((move.component, move.source_tier, source), {})
            self._cells[move.component, move.destination_tier, destination] = dict(cells)

    def _run_row(self, row: Row[Turn]) -> RowResult:
        self._change_tables(self._tables, row)
        history = self._histories.setdefault(row.number, History())
        contents = history.follow(self.log(row.number)[: row.start])
        if len(contents) != row.start + 1:
            raise WrongContent(f"a row starts at {row.start}, but only {len(contents) - 1} tokens are known")
        self._verify(row, contents)
        inputs = list(row.tokens)
        if len(inputs) < row.count:
            inputs.append(self._sampled[row.number])
        return self._compute(row, inputs, contents[-1])

    def _verify(self, row: Row[Turn], contents: list[int]) -> None:
        """Read everything that the row depends on."""
        full, window = self._tables[row.number]
        if self.layout.full:
            self._verify_pages(row, full, Component.FULL, 0, contents)
        if self.layout.window:
            first = max(0, row.start - self.layout.window)
            self._verify_pages(row, window, Component.WINDOW, first, contents)
        if row.state is not None:
            source = row.state[0]
            found = EMPTY
            if source is not None:
                found = self._cells.get((Component.STATE, Tier.DEVICE, source), {}).get(0, -1)
            if found != contents[-1]:
                raise WrongContent(f"state slot {source} is not the state at {row.start} tokens")

    def _verify_pages(
        self, row: Row[Turn], table: dict[int, int], component: Component, first: int, contents: list[int]
    ) -> None:
        page_size = self.layout.page_size
        for position in range(first, row.start):
            unit = table.get(position // page_size)
            cells = self._cells.get((component, Tier.DEVICE, unit), {}) if unit is not None else {}
            if cells.get(position % page_size) != contents[position + 1]:
                raise WrongContent(f"{component.name.lower()} unit {unit} is not what was written at {position}")

    def _compute(self, row: Row[Turn], inputs: list[int], content: int) -> RowResult:
        """Write what the row computes and say what the model says; drafts stand while the model agrees."""
        page_size = self.layout.page_size
        full, window = self._tables[row.number]
        certain = row.count - row.drafts
        said: list[int] = []
        finish: str | None = None
        for index, token in enumerate(inputs):
            agreed = index < certain or (len(said) == index - certain + 1 and said[-1] == token)
            content = extend(content, token)
            position = row.start + index
            for table, component in ((full, Component.FULL), (window, Component.WINDOW)):
                if component in self.layout.components:
                    place = (component, Tier.DEVICE, table[position // page_size])
                    self._cells.setdefault(place, {})[position % page_size] = content
            if row.sample and index >= certain - 1 and agreed and finish is None:
                said.append(next_token(content, self.vocabulary))
                if stops(extend(content, said[-1])):
                    finish = "stop"
        if row.state is not None:
            self._cells[Component.STATE, Tier.DEVICE, row.state[1]] = {0: content}
        if said:
            self._sampled[row.number] = said[-1]
        return RowResult(said, finish)
