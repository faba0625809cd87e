"""Resume points: lengths from which every component of a sequence can resume.

A point at length b needs the state slot at exactly b and the window pages that cover [b - W, b);
full pages below b are there anyway. Points of one sequence lie on a line, and several may need the
same window page. Since a page has one holder, it belongs to the newest that needs it: first to the
sequence's own current window, then to the newest point, and so on down:

       checkpoint a        mark m              computed c
    ──────────┬───────────────┬────────────────────┬──── positions
      [a-W, a)         [m-W, m)             [c-W, c)
      ├── a's run ──┤├── m's run ──┤  freed  ├─ current run ─┤

Both ends of these intervals grow with the length, so each point owns one contiguous run, and passing
pages to an older point splits the end of a run.
"""

from __future__ import annotations

from collections.abc import Sequence as ReadOnly

from holdfast.core.layout import MemoryLayout
from holdfast.core.ledger import Hold, Holder


class Run:
    """Consecutive pages of one component; `first` is the number of the first one."""

    __slots__ = ("first", "hold")

    def __init__(self, hold: Hold, first: int) -> None:
        self.hold = hold
        self.first = first

    @property
    def end(self) -> int:
        """The page after the last."""
        return self.first + len(self.hold)


class ResumePoint:
    """A length to resume from. `pinned` points are not evicted: their turn may still be rolled back."""

    __slots__ = ("holder", "length", "pinned", "state", "window")

    def __init__(self, length: int, state: Hold | None, holder: Holder) -> None:
        self.length = length
        self.state = state
        self.holder = holder
        self.window: Run | None = None
        self.pinned = False

    def receive(self, hold: Hold, first: int) -> None:
        """Take window pages that a newer point gives up; they follow those that the point has."""
        moved = hold.move_to(self.holder)
        if self.window is None:
            self.window = Run(moved, first)
        else:
            assert self.window.end == first, "a point's window pages are one run"
            self.window.hold.join(moved)

    def move_to(self, holder: Holder) -> None:
        """Transfer the point's units to another holder."""
        self.holder = holder
        if self.state is not None:
            self.state = self.state.move_to(holder)
        if self.window is not None:
            self.window.hold = self.window.hold.move_to(holder)


class Mark:
    """The start of a turn: its known length, and the point that a rollback returns to.

    `cuts` are lengths at which a chunk should end so that a point can be left there, ascending.
    """

    __slots__ = ("cuts", "known", "point", "successor")

    def __init__(self, known: int, point: ResumePoint) -> None:
        self.known = known
        self.point = point
        self.successor: ResumePoint | None = None
        self.cuts: list[int] = []


def give_down(
    layout: MemoryLayout, hold: Hold, first: int, points: ReadOnly[ResumePoint], fence: int
) -> None:
    """Hand window pages to the newest of `points` that need them, and free the rest."""
    stop = first + len(hold)
    for point in reversed(points):
        if stop == first:
            break
        needed_end = layout.pages_for(point.length)
        if stop > needed_end:
            keep = max(needed_end, first)
            hold.split(keep - first).release(fence)
            stop = keep
        needed_first = max(layout.window_first_page(point.length), first)
        if stop > needed_first:
            point.receive(hold.split(needed_first - first), needed_first)
            stop = needed_first
    hold.release(fence)


def thin(points: ReadOnly[ResumePoint], computed: int) -> int | None:
    """Which point to drop so that the rest stay spread exponentially with age; None if all are pinned.

    The point whose neighbours lie closest together, measured against its distance from the end, is
    missed least.
    """
    best: tuple[float, int] | None = None
    for index, point in enumerate(points):
        if point.pinned:
            continue
        before = points[index - 1].length if index else 0
        after = points[index + 1].length if index + 1 < len(points) else computed
        cost = (after - before) / (computed - point.length + 1)
        if best is None or cost < best[0]:
            best = (cost, index)
    return None if best is None else best[1]
