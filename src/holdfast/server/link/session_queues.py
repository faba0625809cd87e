"""Verbs and turns that wait for their session, one line a session, tried a bounded number at a time.

A line is in order of arrival. A turn waits for everything ahead of it. A verb waits for verbs ahead of it; it
passes turns that wait while another turn has the session, since the verb may be what ends that turn. So a
look at a line costs one failed attempt of each kind and one attempt for each entry that leaves, however long
the line is, and a round looks at `ATTEMPTS_MAX` entries at most. Lines take turns. Used by the desk alone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["ATTEMPTS_MAX", "Lines"]

ATTEMPTS_MAX = 64
"""How many attempts one round makes."""

Attempt = Callable[[], bool]
"""Carries something out if it is time; whether that is so."""


class Entry(NamedTuple):
    """Something that waits; `number` is its place in the order of arrival."""

    number: int
    attempt: Attempt


class Line:
    """What waits on one session."""

    __slots__ = ("turns", "verbs")

    def __init__(self) -> None:
        self.turns: deque[Entry] = deque()
        self.verbs: deque[Entry] = deque()

    def __bool__(self) -> bool:
        return bool(self.turns or self.verbs)


class Lines:
    """All that waits. `speaks` says whether a turn has a session, which stays open."""

    def __init__(self, speaks: Callable[[str], bool]) -> None:
        self._speaks = speaks
        self._lines: OrderedDict[str, Line] = OrderedDict()
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._lines)

    def try_turn(self, name: str, attempt: Attempt) -> None:
        """Try a turn that has come; it waits if something is ahead of it, or its time has not come."""
        if name in self._lines or not attempt():
            self._line(name).turns.append(self._entry(attempt))

    def try_verb(self, name: str, attempt: Attempt) -> None:
        """Try a verb that has come; what waits already is left alone."""
        ahead = self._lines.get(name)
        behind = ahead is not None and (bool(ahead.verbs) or not self._speaks(name))
        if behind or not attempt():
            self._line(name).verbs.append(self._entry(attempt))

    def _line(self, name: str) -> Line:
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = Line()
        return line

    def _entry(self, attempt: Attempt) -> Entry:
        self._number += 1
        return Entry(self._number, attempt)

    def try_some(self, spent: Callable[[], bool]) -> None:
        """Try what waits, each line at most once, until `spent` or `ATTEMPTS_MAX`; one attempt at least."""
        left = ATTEMPTS_MAX
        for _ in range(min(left, len(self._lines))):
            name, line = next(iter(self._lines.items()))
            self._lines.move_to_end(name)
            left = self._try_line(name, line, left)
            if not line:
                del self._lines[name]
            if left <= 0 or spent():
                return

    def _try_line(self, name: str, line: Line, left: int) -> int:
        """Try a line from its head; returns how many attempts are left."""
        turns, verbs = line.turns, line.verbs
        turn_waits = False
        while left > 0:
            if turns and not turn_waits and (not verbs or turns[0].number < verbs[0].number):
                left -= 1
                if turns[0].attempt():
                    turns.popleft()
                else:
                    turn_waits = True
            elif verbs and (not turn_waits or self._speaks(name)):
                left -= 1
                if not verbs[0].attempt():
                    break
                verbs.popleft()
            else:
                break
        return left
