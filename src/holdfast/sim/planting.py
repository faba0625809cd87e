"""Planted bugs: their definition, and how they are put into the core and removed.

A `Mutant` replaces attributes of core classes and modules while it is planted; no file changes. The faulty
version reports when it differs from the original, which distinguishes an undetected bug
from a bug that never happened. Used by mutants.py and by the modules that define mutants.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

CORE = "holdfast.core."


class Patcher:
    """Puts faulty attributes in place, remembers the originals, and counts how often a fault took effect."""

    __slots__ = ("_originals", "_parked", "reached")

    def __init__(self) -> None:
        self._originals: list[tuple[object, str, object]] = []
        self._parked: list[object] = []
        self.reached = 0

    def replace(self, owner: object, name: str, faulty: object) -> None:
        """Let `owner.name` be `faulty` until `restore`; a module's function in every module of the core."""
        original = vars(owner)[name]
        owners = [owner]
        if isinstance(owner, ModuleType):
            modules = [module for path, module in sys.modules.items() if path.startswith(CORE)]
            owners += [m for m in modules if m is not owner and vars(m).get(name) is original]
        for one in owners:
            self._originals.append((one, name, original))
            setattr(one, name, faulty)

    def reach(self) -> None:
        """Note that the fault took effect."""
        self.reached += 1

    def park(self, forgotten: object) -> None:
        """Keep something alive that the faulty code forgot, as a global or a stale list would."""
        self._parked.append(forgotten)

    def restore(self) -> None:
        """Put every original back, the last replaced first, and let go of what was parked."""
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)
        self._parked.clear()


@dataclass(frozen=True, slots=True)
class Mutant:
    """A known bug to plant: `story` is its row in the failure catalogue, `level` where it lives."""

    name: str
    story: str
    level: str
    changes_one_statement: bool
    plant: Callable[[Patcher], None]

    @property
    def what(self) -> str:
        """What goes wrong, in a sentence."""
        return (self.plant.__doc__ or "").strip()


@contextmanager
def planted_of(mutants: Mapping[str, Mutant], name: str) -> Iterator[Patcher]:
    """Plant one of some mutants; the patcher that is yielded counts how often the faulty site was reached."""
    if name not in mutants:
        raise ValueError(f"unknown mutant {name!r}; known: {', '.join(mutants)}")
    patcher = Patcher()
    try:
        mutants[name].plant(patcher)
        yield patcher
    finally:
        patcher.restore()
