"""Planted bugs of the ledger and of sequences.

Each function replaces one site by a version that differs in the effect of about one statement, and never
raises of itself: the audit, or a row that reads the memory back, must notice it. See planting.py.
"""

from __future__ import annotations

from holdfast.core import fallback, sequence
from holdfast.core.hold import Books
from holdfast.core.layout import Component, MemoryLayout
from holdfast.core.ledger import Hold, Holder, OutOfUnits, Pool
from holdfast.core.points import ResumePoint
from holdfast.core.sequence import Sequence
from holdfast.sim.planting import Mutant, Patcher

# --- closing ------------------------------------------------------------------------------------------


def close_forgets_state_slot(patcher: Patcher) -> None:
    """The state slot is not released with the pages."""
    original = Sequence.drop_memory

    def faulty(self: Sequence) -> None:
        if self.state is not None:
            patcher.reach()
            self.state = None
        original(self)

    patcher.replace(Sequence, "drop_memory", faulty)


def close_forgets_checkpoints(patcher: Patcher) -> None:
    """The slots and window pages of resume points stay in a list that is never read."""
    original = Sequence.drop_memory

    def faulty(self: Sequence) -> None:
        if self.points:
            patcher.reach()
            patcher.park(self.points)
            self.points = []
        original(self)

    patcher.replace(Sequence, "drop_memory", faulty)


def close_keeps_its_lease(patcher: Patcher) -> None:
    """The lease of the prefix is not released."""
    original = Sequence.drop_memory

    def faulty(self: Sequence) -> None:
        if self.lease is not None:
            patcher.reach()
            patcher.park(self.lease)
            self.lease = None
        original(self)

    patcher.replace(Sequence, "drop_memory", faulty)


def close_frees_a_placeholder(patcher: Patcher) -> None:
    """The index that stands for "no slot" goes into the free list."""
    original = Sequence.close

    def faulty(self: Sequence) -> None:
        original(self)
        if self.ledger.layout.state:
            patcher.reach()
            self.ledger.pool(Component.STATE).free.append(-1)

    patcher.replace(Sequence, "close", faulty)


# --- the ledger ---------------------------------------------------------------------------------------


def release_frees_twice(patcher: Patcher) -> None:
    """Units go into the free list once for the release and once more for its retry."""
    original = Hold.release

    def faulty(self: Hold, fence: int = 0) -> None:
        books, pool, units = self.grant.books, self.pool, list(self.units)
        original(self, fence)
        if units:
            patcher.reach()
            books.let_go(pool, units, fence)

    patcher.replace(Hold, "release", faulty)


def move_leaves_the_old_hold_alive(patcher: Patcher) -> None:
    """After a move the old Hold still answers for the units; when it goes, they are taken back."""
    original = Hold.move_to

    def faulty(self: Hold, holder: Holder) -> Hold:
        grant = self.grant
        moved = original(self, holder)
        patcher.reach()
        self.grant = grant
        return moved

    patcher.replace(Hold, "move_to", faulty)


def fences_are_ignored(patcher: Patcher) -> None:
    """Units are free at once, though a plan in flight names them."""
    original = Books.let_go

    def faulty(self: Books, pool: Pool, units: list[int], fence: int) -> None:
        if fence > self.settled:
            patcher.reach()
        original(self, pool, units, 0)

    patcher.replace(Books, "let_go", faulty)


def counter_is_not_lowered(patcher: Patcher) -> None:
    """A gauge by kind goes up with every taking and never down."""
    original = Pool.count

    def faulty(self: Pool, holder: Holder, count: int) -> None:
        original(self, holder, count)
        if count < 0:
            patcher.reach()
            self.by_kind[holder.kind] -= count

    patcher.replace(Pool, "count", faulty)


# --- sequences ----------------------------------------------------------------------------------------


def turn_and_session_both_hold(patcher: Patcher) -> None:
    """The session's record still names the slot that the turn has taken."""
    original = Sequence.begin

    def faulty(self: Sequence, holder: Holder, known: int | None = None) -> None:
        original(self, holder, known)
        assert self.mark is not None
        if self.mark.point.state is not None:
            patcher.reach()
            self.spare = self.mark.point.state

    patcher.replace(Sequence, "begin", faulty)


def failed_extend_keeps_its_pages(patcher: Patcher) -> None:
    """A row that finds no state slot keeps the pages that it had taken before."""
    original = Sequence._reserve

    def faulty(self: Sequence, planned: int) -> None:
        try:
            original(self, planned)
        except OutOfUnits as short:
            pages = self.ledger.layout.pages_for(planned) - self.pages
            if self.full is not None and short.pool is not self.full.pool and pages > 0:
                patcher.reach()
                self.full.grow(pages)
            raise

    patcher.replace(Sequence, "_reserve", faulty)


def drafts_keep_their_spare_slot(patcher: Patcher) -> None:
    """The second slot of a drafted row is never given back."""
    original = Sequence.settle_drafts

    def faulty(self: Sequence, count: int, accepted: int) -> None:
        if self.spare is not None:
            patcher.reach()
            if accepted == count:
                self.state, self.spare = self.spare, self.state
            patcher.park(self.spare)
            self.spare = None
        original(self, count, accepted)

    patcher.replace(Sequence, "settle_drafts", faulty)


def drafts_are_not_trimmed(patcher: Patcher) -> None:
    """Pages past the accepted drafts stay, although no account has them."""
    original = Sequence.give_back

    def faulty(self: Sequence) -> None:
        if self.ledger.layout.paged and self.pages > self.ledger.layout.pages_for(self.planned):
            patcher.reach()
            return
        original(self)

    patcher.replace(Sequence, "give_back", faulty)


def trim_rounds_down(patcher: Patcher) -> None:
    """A cut inside a page frees that page too."""
    original = Sequence.give_back

    def faulty(self: Sequence) -> None:
        planned, page_size = self.planned, self.ledger.layout.page_size
        if planned % page_size:
            patcher.reach()
        self.planned = planned // page_size * page_size
        original(self)
        self.planned = planned

    patcher.replace(Sequence, "give_back", faulty)


def window_of_the_mark_is_freed(patcher: Patcher) -> None:
    """Window pages that a rollback would read are freed when the current window has passed them."""

    def faulty(layout: MemoryLayout, hold: Hold, first: int, points: list[ResumePoint], fence: int) -> None:
        if any(layout.pages_for(point.length) > first for point in points):
            patcher.reach()
        hold.release(fence)

    patcher.replace(sequence, "give_down", faulty)


def rollback_keeps_the_turns_slot(patcher: Patcher) -> None:
    """The slot that the turn wrote to is not released when the mark's is the state again."""
    original = Sequence.become

    def faulty(self: Sequence, point: ResumePoint) -> None:
        if self.state is not None:
            patcher.reach()
            patcher.park(self.state)
            self.state = None
        original(self, point)

    patcher.replace(Sequence, "become", faulty)


def rollback_keeps_the_turns_state(patcher: Patcher) -> None:
    """The mark's slot is released and the turn's kept: the aborted turn is in the state."""
    original = Sequence.become

    def faulty(self: Sequence, point: ResumePoint) -> None:
        if self.state is not None and point.state is not None:
            patcher.reach()
            self.state, point.state = point.state, self.state
        original(self, point)

    patcher.replace(Sequence, "become", faulty)


def cut_ignores_the_state(patcher: Patcher) -> None:
    """Computed falls to exactly the cut, where no state was ever kept."""
    original = fallback.resume_length

    def faulty(self: Sequence, limit: int) -> int:
        length = original(self, limit)
        if self.ledger.layout.state and 0 < length < limit <= self.computed:
            patcher.reach()
            return limit
        return length

    patcher.replace(fallback, "resume_length", faulty)


def retract_moves_the_mark(patcher: Patcher) -> None:
    """A retracted turn gives nothing up: where it stands becomes what it would roll back to."""
    original = fallback.fall_back

    def retract(self: Sequence, holder: Holder, checkpoints: Holder, certain: int | None = None) -> None:
        assert self.mark is not None
        if certain is None and self.computed > self.mark.known:
            patcher.reach()
        else:
            original(self, self.mark.known if certain is None else min(self.mark.known, certain))
        self.commit(holder, checkpoints)

    patcher.replace(fallback, "retract", retract)


MEMORY_MUTANTS = tuple(
    Mutant(name, story, "memory", one, plant)
    for name, story, one, plant in (
        ("close-forgets-state-slot", "A1", True, close_forgets_state_slot),
        ("close-forgets-checkpoints", "B1", True, close_forgets_checkpoints),
        ("close-keeps-its-lease", "B6", True, close_keeps_its_lease),
        ("close-frees-a-placeholder", "C5", True, close_frees_a_placeholder),
        ("release-frees-twice", "C3", True, release_frees_twice),
        ("move-leaves-the-old-hold-alive", "A3", True, move_leaves_the_old_hold_alive),
        ("fences-are-ignored", "A3", True, fences_are_ignored),
        ("counter-is-not-lowered", "B17", True, counter_is_not_lowered),
        ("turn-and-session-both-hold", "A3", True, turn_and_session_both_hold),
        ("failed-extend-keeps-its-pages", "A2", True, failed_extend_keeps_its_pages),
        ("drafts-keep-their-spare-slot", "B10", True, drafts_keep_their_spare_slot),
        ("drafts-are-not-trimmed", "A4", True, drafts_are_not_trimmed),
        ("trim-rounds-down", "A4", True, trim_rounds_down),
        ("window-of-the-mark-is-freed", "B10", True, window_of_the_mark_is_freed),
        ("rollback-keeps-the-turns-slot", "A5", True, rollback_keeps_the_turns_slot),
        ("rollback-keeps-the-turns-state", "A5", True, rollback_keeps_the_turns_state),
        ("cut-ignores-the-state", "A5", True, cut_ignores_the_state),
        ("retract-moves-the-mark", "B11", True, retract_moves_the_mark),
    )
)
