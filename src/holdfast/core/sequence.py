"""A sequence: a token log and its computed memory.

    0            leased          computed    planned      known
    ├── the tree's ─┼──── own full pages ────────┤
                    │  holder: session or turn   │ free past the last page
    ├───────────────┴────────────┬───────────┬───┴──────────┤
      computed                     in flight    to be computed

A sequence has two operations: compute more of its known tokens, or fall back to a length from which
every component can continue. It owns its pages and slots through Holds, reads the tree's through a Lease,
and keeps resume points (see points.py). Work is proportional to the new tokens: block tables are reported
from the lowest page that changed, holders change in constant time, nothing walks the history.

Rows in flight. `extend` reserves memory for a row and `advance` settles it. Methods that release memory
are called with no row of this sequence in flight, except `commit`, which a sealing row may outlive.
"""

from __future__ import annotations

from holdfast.core.copies import HostCopy
from holdfast.core.layout import Component
from holdfast.core.lease import Lease
from holdfast.core.ledger import Grant, Hold, Holder, Ledger, OutOfUnits
from holdfast.core.plan import TableChange
from holdfast.core.points import Mark, ResumePoint, Run, give_down, thin
from holdfast.core.tokens import TokenLog

UNPAGED = 1 << 62


class Sequence:
    """Tokens and their memory. `computed` tokens are in memory; rows up to `planned` are in flight.

    `copy` is its host copy (copies.py), while its memory is on the device.
    """

    __slots__ = (
        "away",
        "capacity",
        "changed",
        "computed",
        "copy",
        "fence",
        "full",
        "holder",
        "lease",
        "ledger",
        "mark",
        "pages",
        "planned",
        "points",
        "spare",
        "state",
        "tokens",
        "window",
    )

    def __init__(self, ledger: Ledger, holder: Holder) -> None:
        layout = ledger.layout
        self.ledger = ledger
        self.holder = holder
        self.tokens = TokenLog()
        self.computed = 0
        self.planned = 0
        self.pages = 0
        self.capacity = 0 if layout.paged else UNPAGED
        self.changed = 0
        self.full = ledger.take(ledger.pool(Component.FULL), 0, holder) if layout.full else None
        self.window = Run(ledger.take(ledger.pool(Component.WINDOW), 0, holder), 0) if layout.window else None
        self.state: Hold | None = None
        self.spare: Hold | None = None
        self.points: list[ResumePoint] = []
        self.mark: Mark | None = None
        self.lease: Lease | None = None
        self.fence = 0
        self.away = False
        self.copy: HostCopy | None = None

    @property
    def known(self) -> int:
        """Tokens in the log."""
        return len(self.tokens)

    @property
    def leased_pages(self) -> int:
        """Pages at the front that belong to the tree."""
        return self.lease.record.pages if self.lease is not None else 0

    # --- computing more ---------------------------------------------------------------------------

    def extend(self, count: int) -> None:
        """Reserve what `count` more tokens need in every component, or raise and change nothing."""
        planned = self.planned + count
        if planned > self.capacity or (self.state is None and self.ledger.layout.state):
            self._reserve(planned)
        self.planned = planned

    def _reserve(self, planned: int) -> None:
        ledger = self.ledger
        layout = ledger.layout
        pages = -(-planned // layout.page_size) - self.pages if planned > self.capacity else 0
        grown: list[Hold] = []
        try:
            if pages:
                for hold in self._page_holds():
                    hold.grow(pages)
                    grown.append(hold)
            if layout.state and self.state is None:
                self.state = ledger.take(ledger.pool(Component.STATE), 1, self.holder)
        except OutOfUnits:
            for hold in grown:
                hold.ungrow(pages)
            raise
        if pages:
            self.pages += pages
            self.capacity = self.pages * layout.page_size

    def _page_holds(self) -> tuple[Hold, ...]:
        if self.window is None:
            return () if self.full is None else (self.full,)
        return (self.window.hold,) if self.full is None else (self.full, self.window.hold)

    def advance(self, count: int) -> None:
        """A row of `count` tokens has settled: they are in memory now."""
        self.computed = computed = self.computed + count
        assert computed <= self.planned, "more was settled than planned"
        if self.window is not None:
            layout = self.ledger.layout
            unread, page_size = computed - layout.window, layout.page_size
            if unread // page_size > (unread - count) // page_size:
                self.slide()
        mark = self.mark
        if mark is not None and mark.successor is not None and self.computed >= mark.successor.length:
            self._promote(mark)

    def extend_drafts(self, count: int) -> None:
        """As `extend`, for a row whose last tokens are drafts: the state before them is kept as well."""
        if not self.ledger.layout.state:
            self.extend(count)
            return
        spare = self.ledger.take(self.ledger.pool(Component.STATE), 1, self.holder)
        try:
            self.extend(count)
        except OutOfUnits:
            spare.release()
            raise
        self.spare = spare

    def settle_drafts(self, count: int, accepted: int) -> None:
        """A drafted row has settled: `accepted` of its `count` tokens stand, the rest are trimmed.

        A recurrent state cannot be trimmed: unless the whole row stands, the state before it is the
        state again, and the accepted tokens are computed once more with the next row.
        """
        assert 0 < accepted <= count, "the first token of a drafted row always stands"
        whole = accepted == count
        if self.spare is not None:
            if whole:
                self.state, self.spare = self.spare, self.state
            assert self.spare is not None, "a drafted row has two slots"
            self.spare.release(self.fence)
            self.spare = None
        if whole or not self.ledger.layout.state:
            self.advance(accepted)
        self.planned = self.computed
        self.give_back()

    def give_back(self) -> None:
        """Free whole pages past the planned length, rounded up: never part of a page."""
        layout = self.ledger.layout
        keep = max(layout.pages_for(self.planned), self.leased_pages)
        if keep < self.pages:
            if self.full is not None:
                self.full.shrink(self.pages - keep, self.fence)
            if self.window is not None:
                run = self.window
                run.hold.shrink(min(max(0, run.end - keep), len(run.hold)), self.fence)
                run.first = min(run.first, keep)
            self.pages = keep
            self.capacity = keep * layout.page_size
            self.changed = min(self.changed, keep)

    def state_source(self) -> int | None:
        """The slot that the next row reads: None for the zero state. Ask before `extend`."""
        start = self.planned
        last = self.points[-1] if self.points else None
        if last is None or start > last.length:
            return self.state.grant.units[0] if self.state is not None else None
        if last.state is not None:
            return last.state.grant.units[0]
        return self.lease.state_unit(start) if self.lease is not None else None

    def table_changes(self) -> TableChange | None:
        """Block-table entries that changed since this was last asked; None if none did."""
        first = self.changed
        if first >= self.pages:
            return None
        self.changed = self.pages
        leased = self.leased_pages
        full: list[int] = []
        if self.full is not None:
            full = self.full.grant.units[first - leased if first > leased else 0 :]
            if first < leased and self.lease is not None:
                full = self.lease.full_units(first) + full
        if self.window is None:
            return TableChange(first, full, first, [])
        run = self.window
        window_first = max(first, run.first)
        window = run.hold.grant.units[window_first - run.first :]
        if first < run.first <= leased and self.lease is not None and self.lease.window_first < leased:
            window_first = max(first, self.lease.window_first)
            window = self.lease.window_units(window_first)[: run.first - window_first] + window
        return TableChange(first, full, window_first, window)

    # --- windows and resume points ----------------------------------------------------------------

    def slide(self) -> None:
        """Give up the window pages that nothing at or past `computed` reads, to the points that need them."""
        run = self.window
        assert run is not None
        layout = self.ledger.layout
        first = max(0, self.computed - layout.window) // layout.page_size
        if first > run.first:
            newest = self.points[-1] if self.points else None
            if newest is None or layout.pages_for(newest.length) <= run.first:
                run.hold.shrink_front(first - run.first, self.fence)
            elif newest.window is not None and layout.pages_for(newest.length) >= first:
                run.hold.pass_front(first - run.first, newest.window.hold)
            else:
                leaving = run.hold.split_front(first - run.first)
                give_down(layout, leaving, run.first, self.points, self.fence)
            run.first = first
        lease = self.lease
        if (
            lease is not None
            and lease.record.window_first < first
            and lease.record.window_first < lease.pages
        ):
            self._raise_lease_window(lease, first)

    def _raise_lease_window(self, lease: Lease, first: int) -> None:
        """Unlock the tree's window pages below `first`, but none that going on from a point reads."""
        layout = self.ledger.layout
        first = min(first, lease.record.pages)
        for point in self.points:
            need = max(0, point.length - layout.window) // layout.page_size
            if point.length and need < first and self._window_keeper(point, need) is None:
                first = need
        lease.raise_window(first, self.fence)

    def leans_for_window(self, point: ResumePoint) -> bool:
        """Whether going on from a point reads window pages that the tree holds."""
        need = self.ledger.layout.window_first_page(point.length)
        return point.length > 0 and need < self.leased_pages and self._window_keeper(point, need) is None

    def window_keeper(self, point: ResumePoint) -> ResumePoint | None:
        """The point, this one or a newer one, that has the lowest window page which this one needs."""
        return self._window_keeper(point, self.ledger.layout.window_first_page(point.length))

    def _window_keeper(self, point: ResumePoint, need: int) -> ResumePoint | None:
        index = len(self.points)
        while True:
            index -= 1
            newer = self.points[index]
            run = newer.window
            if run is not None and run.first <= need < run.first + len(run.hold.grant.units):
                return newer
            if newer is point:
                return None

    def leave_point(self) -> bool:
        """Keep the state and window at `planned` as a resume point; False if no slot is free for it."""
        layout = self.ledger.layout
        fresh: Hold | None = None
        if layout.state:
            self.ledger.purpose = "resume point"
            try:
                fresh = self.ledger.take(self.ledger.pool(Component.STATE), 1, self.holder)
            except OutOfUnits:
                return False
        point = ResumePoint(self.planned, self.state, self.holder)
        self.state = fresh
        self.points.append(point)
        if self.mark is not None and point.length == self.mark.known:
            self.mark.successor = point
        return True

    def _promote(self, mark: Mark) -> None:
        """The catch-up has passed the mark's length: a rollback now returns to the point there."""
        assert mark.successor is not None
        self.drop_point(mark.point)
        mark.point, mark.successor = mark.successor, None

    def _drop_point(self, index: int) -> None:
        point = self.points.pop(index)
        if point.state is not None:
            point.state.release(self.fence)
        if point.window is not None:
            give_down(
                self.ledger.layout, point.window.hold, point.window.first, self.points[:index], self.fence
            )

    def drop_point(self, point: ResumePoint) -> None:
        """Give up one resume point."""
        self._drop_point(self.points.index(point))

    def drop_points(self) -> None:
        """Give up all resume points, the newest first."""
        while self.points:
            self._drop_point(len(self.points) - 1)

    def drop_spare_points(self) -> None:
        """Give up the points that a running turn has left on its way; it can do without them."""
        mark = self.mark
        assert mark is not None, "only a running turn leaves points"
        for point in [point for point in self.points if point.holder is self.holder]:
            if point is not mark.point and point is not mark.successor and point.length < self.computed:
                self.drop_point(point)

    def thin_points(self, budget: int) -> None:
        """Drop checkpoints until at most `budget` are left, thinned exponentially with age."""
        while len(self.points) > budget:
            index = thin(self.points, self.computed)
            if index is None:
                return
            self._drop_point(index)

    def gather_window(self, first: int) -> None:
        """Take window pages from `first` on back from the points, as far as they adjoin the current run."""
        run = self.window
        assert run is not None
        for point in reversed(self.points):
            owned = point.window
            if owned is None:
                continue
            if run.first <= first or owned.end != run.first:
                return
            start = max(first, owned.first)
            taken = owned.hold.split(start - owned.first).move_to(self.holder)
            if not len(owned.hold):
                owned.hold.release()
                point.window = None
            taken.join(run.hold)
            run.hold, run.first = taken, start

    def become(self, point: ResumePoint) -> None:
        """Go on from a point that was taken off the list: its state is the state again."""
        if self.state is not None:
            self.state.release(self.fence)
        self.state = point.state.move_to(self.holder) if point.state is not None else None
        if point.window is not None:
            # What the current window could not take back lies apart from it: it is the window now.
            assert self.window is not None
            self.window.hold.release(self.fence)
            self.window = Run(point.window.hold.move_to(self.holder), point.window.first)

    def window_covers(self, length: int) -> bool:
        """Whether all window pages that going on from `length` needs are here, without a resume point."""
        run = self.window
        if run is None:
            return True
        need = self.ledger.layout.window_first_page(length)
        first = run.first
        for point in reversed(self.points):
            if first <= need or (point.window is not None and point.window.end != first):
                break
            first = point.window.first if point.window is not None else first
        if first <= need:
            return True
        record = self.lease.record if self.lease is not None else None
        return record is not None and first <= record.pages and record.window_first <= need

    # --- turns ------------------------------------------------------------------------------------

    def begin(self, holder: Holder, known: int | None = None) -> None:
        """A turn takes the sequence and sets its mark; `known` is where it began, if that was before."""
        assert self.mark is None and self.planned == self.computed, "a turn begins on a sequence at rest"
        for earlier in self.points:
            earlier.pinned = False
        point = ResumePoint(self.computed, self.state, self.holder)
        self.state = None
        self.points.append(point)
        self.mark = Mark(self.known if known is None else known, point)
        self._hand_to(holder)
        point.move_to(holder)
        if self.mark.known > self.computed + 1 and not self.ledger.layout.cuts_anywhere:
            self.mark.cuts.append(self.mark.known)

    def cut_chunk_at(self, length: int) -> None:
        """Ask for a chunk to end at `length`, so that a resume point is left there."""
        assert self.mark is not None
        if length > self.planned and length not in self.mark.cuts and not self.ledger.layout.cuts_anywhere:
            self.mark.cuts.append(length)
            self.mark.cuts.sort()

    def next_cut(self) -> int | None:
        """Where the next row must end at the latest, if a point is to be left there."""
        return self.mark.cuts[0] if self.mark is not None and self.mark.cuts else None

    def pass_cut(self) -> None:
        """A row that ends at the next cut has been planned: leave a point there if a slot is free."""
        assert self.mark is not None
        cut = self.mark.cuts.pop(0)
        assert cut == self.planned, "no cut here"
        self.leave_point()

    def commit(self, holder: Holder, checkpoints: Holder) -> None:
        """The turn succeeded: the sequence returns to its session, the turn's points become checkpoints."""
        mark = self.mark
        assert mark is not None, "no turn to end"
        self.mark = None
        if self.points and self.points[-1].length == self.planned:
            self.become(self.points.pop())
        for index in range(len(self.points) - 1, -1, -1):
            point = self.points[index]
            if point.holder is not self.holder:
                break
            leased = point.state is None and self.ledger.layout.state
            if point.length == 0 or leased or self.ledger.layout.cuts_anywhere:
                self._drop_point(index)
            else:
                point.pinned = True
                point.move_to(checkpoints)
        if self.lease is not None and self.state is not None:
            self.lease.unlock_state(self.fence)
        self.trim_copy()
        self._hand_to(holder)

    def trim_copy(self) -> None:
        """Give up what is not, or no longer, what the sequence has computed of the host's copy."""
        copy = self.copy
        if copy is not None:
            copy.follow(self.computed)
            if copy.is_empty:
                self.copy = None

    def drop_copy(self) -> None:
        """Give up the host's copy; the memory itself stays."""
        if self.copy is not None:
            self.copy.discard()
            self.copy = None

    def _hand_to(self, holder: Holder) -> None:
        """Move what the sequence itself holds, points aside, to another holder. Constant time."""
        self.holder = holder
        if self.full is not None:
            self.full = self.full.move_to(holder)
        if self.window is not None:
            self.window.hold = self.window.hold.move_to(holder)
        if self.state is not None:
            self.state = self.state.move_to(holder)

    # --- the end, and the audit ---------------------------------------------------------------------

    def stand_at(self, length: int) -> None:
        """Account for exactly `length` tokens, all computed, in pages that are there already."""
        layout = self.ledger.layout
        self.computed = self.planned = length
        self.pages = layout.pages_for(length) if layout.paged else 0
        self.capacity = self.pages * layout.page_size if layout.paged else UNPAGED
        self.changed = 0

    def close(self) -> None:
        """Give everything back. The sequence is empty afterwards and must not be used again."""
        self.drop_memory()
        for hold in self._page_holds():
            hold.release()
        self.full = self.window = None

    def drop_memory(self) -> None:
        """Give up all memory, but no token: everything known is to be computed again."""
        assert self.mark is None, "end the turn first"
        self.drop_points()
        if self.state is not None:
            self.state.release(self.fence)
            self.state = None
        for hold in self._page_holds():
            hold.shrink(len(hold), self.fence)
        if self.lease is not None:
            self.lease.release(self.fence)
            self.lease = None
        self.drop_copy()
        self.away = False
        self.stand_at(0)

    def claim(self, into: list[Grant]) -> None:
        """Name everything the sequence holds, points included, for the census."""
        if self.full is not None:
            into.append(self.full.grant)
        if self.window is not None:
            into.append(self.window.hold.grant)
        if self.state is not None:
            into.append(self.state.grant)
        if self.spare is not None:
            into.append(self.spare.grant)
        for point in self.points:
            if point.state is not None:
                into.append(point.state.grant)
            if point.window is not None:
                into.append(point.window.hold.grant)
        if self.copy is not None:
            self.copy.claim(into)

    def faults(self) -> list[str]:
        """Inconsistencies of the sequence's own records, in words; empty in a healthy state."""
        layout, planned, pages = self.ledger.layout, self.planned, self.pages
        found: list[str] = []
        if not 0 <= self.computed <= planned:
            found.append(f"computed {self.computed} lies past planned {planned}")
        mark = self.mark
        if mark is not None and 0 < mark.known < mark.point.length:
            found.append(f"the mark lies at {mark.point.length}, but the turn began at {mark.known}")
        if self.away:
            return found
        leased = self.lease.record.pages if self.lease is not None else 0
        need = max(-(-planned // layout.page_size), leased)
        if pages != need and layout.paged:
            found.append(f"{pages} pages are held where {planned} tokens need {need}")
        if self.full is not None and len(self.full.grant.units) != pages - leased:
            found.append(f"{len(self.full)} own full pages, but {pages - leased} are accounted for")
        if self.window is not None:
            self._window_faults(self.window, found)
        stateless = layout.state and self.state is None and self.mark is None
        if (
            stateless
            and self.computed
            and (self.lease is None or self.lease.state_unit(self.computed) is None)
        ):
            found.append(f"no state at {self.computed} computed tokens")
        return found

    def _window_faults(self, run: Run, found: list[str]) -> None:
        length = len(run.hold.grant.units)
        if length and run.first + length != self.pages:
            found.append(f"window pages end at {run.end}, but {self.pages} pages are accounted for")
        layout = self.ledger.layout
        need = max(0, self.computed - layout.window) // layout.page_size
        if run.first > need and self.computed and not self.window_covers(self.computed):
            found.append(f"window pages below {run.first} are gone, but {need} is needed")
        if length and run.first < need:
            found.append(f"window page {run.first} is kept, but nothing below {need} is read")
