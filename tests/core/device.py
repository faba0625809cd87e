"""Simulated device memory: what an executor would have written, so that reading it back can be judged.

A page remembers, for each of its positions, a digest of all tokens up to there; a state slot remembers the
digest of all tokens that it has consumed. A sequence that reads a stale, foreign or half-copied unit reads
another digest than its own tokens have, and `WrongContent` says whose row it was.
"""

from collections.abc import Iterable
from zlib import crc32

from holdfast.core.layout import Component, MemoryLayout
from holdfast.core.plan import UnitCopy

PAGED = (Component.FULL, Component.WINDOW)


class WrongContent(AssertionError):
    """A row read or wrote a unit that holds, or is needed for, something else."""

    def __init__(self, holder: str, what: str) -> None:
        super().__init__(f"{holder}: {what}")
        self.holder = holder
        self.what = what


def digests(tenant: str, tokens: Iterable[int]) -> list[int]:
    """The digest of every prefix of a tenant's tokens, the empty one first."""
    found = [crc32(tenant.encode())]
    for token in tokens:
        found.append(hash((found[-1], token)))
    return found


class Table:
    """A row of the device's block tables: entries are overwritten by changes and never cleared."""

    def __init__(self) -> None:
        self.pages: dict[Component, dict[int, int]] = {component: {} for component in PAGED}

    def read(self, sequence) -> None:
        """Apply what changed since the last row."""
        change = sequence.table_changes()
        if change is None:
            return
        for index, unit in enumerate(change.full):
            self.pages[Component.FULL][change.first + index] = unit
        for index, unit in enumerate(change.window):
            self.pages[Component.WINDOW][change.window_first + index] = unit


class Device:
    """Units and their content, and which units the steps in flight name."""

    def __init__(self, layout: MemoryLayout) -> None:
        self.layout = layout
        self.cells: dict[tuple[Component, int], dict[int, int]] = {}
        self.slots: dict[int, int] = {}
        self.named: dict[int, dict[tuple[Component, int], tuple[object, int]]] = {}

    def copy(self, step: int, reader: object, copies: Iterable[UnitCopy]) -> None:
        """Carry out unit copies, before the rows of the step."""
        for each in copies:
            if each.component is Component.STATE:
                self.slots[each.destination] = self.slots.get(each.source, -1)
            else:
                content = self.cells.get((each.component, each.source), {})
                self.cells[each.component, each.destination] = dict(content)
            self._name(step, each.component, each.destination, reader, -1)

    def hand_over(self, before: object, after: object, units: Iterable[tuple[Component, int]]) -> None:
        """Units went from one sequence to another without being freed: steps run in order, so it is safe."""
        for named in self.named.values():
            for unit in units:
                if unit in named and named[unit][0] is before:
                    named[unit] = (after, named[unit][1])

    def settle(self, step: int) -> None:
        """Steps up to `step` have run: nothing of theirs is in flight any more."""
        for past in [known for known in self.named if known <= step]:
            del self.named[past]

    def read(self, holder: str, table: Table, expected: list[int], length: int) -> None:
        """Check all that a row which starts at `length` reads through its block table."""
        for component in self.layout.components:
            if component is Component.STATE:
                continue
            lowest = 0 if component is Component.FULL else max(0, length - self.layout.window)
            for position in range(lowest, length):
                page, offset = divmod(position, self.layout.page_size)
                unit = table.pages[component].get(page)
                found = self.cells.get((component, unit), {}).get(offset)
                if found != expected[position + 1]:
                    raise WrongContent(holder, f"{component.name} position {position}, unit {unit} is stale")

    def write(self, step: int, owner: object, holder: str, table: Table, rows: tuple[int, list[int]]) -> None:
        """Fill the positions of a row, `rows` being its start and the digests of its whole sequence."""
        start, expected = rows
        for component in self.layout.components:
            if component is Component.STATE:
                continue
            for position in range(start, len(expected) - 1):
                page, offset = divmod(position, self.layout.page_size)
                unit = table.pages[component][page]
                self._refuse_foreign(component, unit, owner, holder, page)
                self.cells.setdefault((component, unit), {})[offset] = expected[position + 1]
            lowest = 0 if component is Component.FULL else max(0, start - self.layout.window)
            pages = range(lowest // self.layout.page_size, self.layout.pages_for(len(expected) - 1))
            for page in pages:
                self._name(step, component, table.pages[component][page], owner, page)

    def consume(self, step: int, owner: object, holder: str, slots: tuple[int | None, int], rows) -> None:
        """Carry the recurrent state over a row: from the source slot into the destination."""
        start, expected = rows
        source, destination = slots
        found = expected[0] if source is None else self.slots.get(source, -1)
        if found != expected[start]:
            raise WrongContent(holder, f"STATE at {start}, slot {source} is another sequence's or length's")
        self._refuse_foreign(Component.STATE, destination, owner, holder, 0)
        self.slots[destination] = expected[-1]
        for slot in slots:
            if slot is not None:
                self._name(step, Component.STATE, slot, owner, 0)

    def _name(self, step: int, component: Component, unit: int, owner: object, page: int) -> None:
        self.named.setdefault(step, {})[component, unit] = (owner, page)

    def _refuse_foreign(self, component: Component, unit: int, owner: object, holder: str, page: int) -> None:
        """Nobody may write what a step in flight reads or writes for another row or page."""
        for step, units in self.named.items():
            reader, read_as = units.get((component, unit), (owner, page))
            if reader is not owner or read_as not in (page, -1):
                raise WrongContent(holder, f"{component.name} unit {unit} is named by step {step} in flight")
