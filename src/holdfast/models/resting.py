"""Recurrent states that rest in eight bits: which of them are awake, in a running slot of full precision.

The core's slots contain the int8 states. A step computes in running slots, of which there are two for each
turn that may run. A state is put to rest when its running slot is needed for another, or when its int8 form
is read: by a turn that begins from it, a copy, a tier. A turn always begins from the rested state, awake
or not, so that results do not depend on which states were awake. Within a turn the state stays in
full precision. Owned by `Memory`; called by the executor and the tiers between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Places", "RestingStates", "RowState"]

Places = list[tuple[int, int]]
"""Pairs of a running slot and the place where its state rests, or the other way round."""


class RowState(NamedTuple):
    """The states of a row: read from `source` (None: zeros), written to `destination`, by a turn."""

    source: int | None
    destination: int
    turn: int


@dataclass(slots=True)
class _Awake:
    """A state in a running slot: the turn that last wrote it, and whether it differs from what rests."""

    slot: int
    turn: int
    changed: bool


class RestingStates:
    """Running slots by the place where their state rests, least recently used first."""

    def __init__(self, slots: int, rest: Callable[[Places], None], wake: Callable[[Places], None]) -> None:
        """`rest` copies (running slot, place) pairs to where they rest, `wake` (place, running slot) back."""
        self._free = list(range(slots - 1, -1, -1))
        self._rest = rest
        self._wake = wake
        self._awake: dict[int, _Awake] = {}

    def settle(self, places: Iterable[int]) -> None:
        """Let these places hold what their running slots hold."""
        changed = [
            (place, awake)
            for place in dict.fromkeys(places)
            if (awake := self._awake.get(place)) is not None and awake.changed
        ]
        if changed:
            self._rest([(awake.slot, place) for place, awake in changed])
            for _, awake in changed:
                awake.changed = False

    def forget(self, places: Iterable[int]) -> None:
        """These places have been written by others: what is awake of them is void."""
        for place in places:
            awake = self._awake.pop(place, None)
            if awake is not None:
                self._free.append(awake.slot)

    def begin(self, rows: list[RowState | None]) -> list[tuple[int, int] | None]:
        """Wake the states of a step; returns the running slots that each row reads (-1: zeros) and writes."""
        given = [row for row in rows if row is not None]
        begun = [row.source for row in given if row.source is not None and not self._goes_on(row)]
        kept = [row.source for row in given if row.source is not None and self._goes_on(row)]
        self.settle(begun)
        self._make_room({*kept, *(row.destination for row in given)})
        waking: Places = []
        found = [None if row is None else self._begin_row(row, waking) for row in rows]
        if waking:
            self._wake(waking)
        return found

    def _goes_on(self, row: RowState) -> bool:
        """Whether a row continues from a state that its own turn has written and that is awake."""
        awake = None if row.source is None else self._awake.get(row.source)
        return awake is not None and awake.turn == row.turn

    def _begin_row(self, row: RowState, waking: Places) -> tuple[int, int]:
        source = self._awake[row.source].slot if row.source is not None and self._goes_on(row) else None
        before = self._awake.pop(row.destination, None)
        slot = self._free.pop() if before is None else before.slot
        self._awake[row.destination] = _Awake(slot, row.turn, changed=True)  # the most recently used
        if row.source is None:
            return -1, slot
        if source is not None:
            return source, slot
        waking.append((row.source, slot))
        return slot, slot

    def _make_room(self, used: Collection[int]) -> None:
        """Put states to rest until every state of a step has a running slot."""
        missing = sum(place not in self._awake for place in used) - len(self._free)
        if missing <= 0:
            return
        leaving = [place for place in self._awake if place not in used][:missing]
        assert len(leaving) == missing, "a step has more states than there are running slots"
        self.settle(leaving)
        self.forget(leaving)
