"""A set of names from which one can be drawn: constant time for all of it, and the same draw for a seed."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random


class Roster:
    """Names in an order that depends only on additions and removals."""

    __slots__ = ("_at", "_names")

    def __init__(self) -> None:
        self._names: list[str] = []
        self._at: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._at

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def add(self, name: str) -> None:
        """Enter a name; no effect on one that is there."""
        if name not in self._at:
            self._at[name] = len(self._names)
            self._names.append(name)

    def discard(self, name: str) -> None:
        """Strike a name off; the last one takes its place."""
        at = self._at.pop(name, None)
        if at is not None:
            last = self._names.pop()
            if last != name:
                self._names[at] = last
                self._at[last] = at

    def choose(self, rng: Random) -> str | None:
        """One of the names, or None if there is none."""
        return self._names[rng.randrange(len(self._names))] if self._names else None
