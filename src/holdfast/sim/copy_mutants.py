"""Planted bugs of host copies: memory of sessions on the device that the host has as well.

Each function replaces one site by a version that differs in the effect of about one statement, and never
raises of itself: the audit or the device of a simulation must notice it. See planting.py.
"""

from __future__ import annotations

from holdfast.core import tiers
from holdfast.core.copies import HostCopy
from holdfast.core.layout import Component
from holdfast.core.ledger import Hold
from holdfast.core.sequence import Sequence
from holdfast.core.tiers import Parcel
from holdfast.sim.planting import Mutant, Patcher


def cut_keeps_the_stale_copy(patcher: Patcher) -> None:
    """A rewind or an interruption leaves pages in the copy that lie past the cut."""
    original = HostCopy.follow

    def faulty(self: HostCopy, computed: int) -> None:
        if computed < self.length:
            patcher.reach()
            return
        original(self, computed)

    patcher.replace(HostCopy, "follow", faulty)


def partial_page_of_the_copy_counts_as_whole(patcher: Patcher) -> None:
    """The last page of a copy is taken for a full one, although tokens were added to it since."""

    def faulty(self: HostCopy, length: int) -> int:
        pages = self.layout.pages_for(length)
        if length % self.layout.page_size:
            patcher.reach()
        return pages

    patcher.replace(HostCopy, "_whole_pages", faulty)


def state_of_the_copy_outlives_a_turn(patcher: Patcher) -> None:
    """A state on the host is taken for the present one, although a turn has gone on from it."""
    follow = HostCopy.follow

    def keeps(self: HostCopy, computed: int) -> None:
        state, self.state = self.state, None
        follow(self, computed)
        self.state = state

    def faulty(self: HostCopy, computed: int) -> bool:
        if self.state is not None and computed != self.length:
            patcher.reach()
        return self.state is not None

    patcher.replace(HostCopy, "follow", keeps)
    patcher.replace(HostCopy, "has_state", faulty)


def copy_is_freed_twice(patcher: Patcher) -> None:
    """A copy that is given up puts its pages on the free list, and gives them up again."""
    original = HostCopy.discard

    def faulty(self: HostCopy) -> None:
        for run in self.runs.values():
            patcher.reach()
            run.hold.pool.free.append(run.hold.units[0])
        original(self)

    patcher.replace(HostCopy, "discard", faulty)


def close_forgets_the_copy(patcher: Patcher) -> None:
    """A session whose memory goes leaves its copy on the host behind."""

    def faulty(self: Sequence) -> None:
        if self.copy is not None:
            patcher.reach()
            patcher.park(self.copy)
            self.copy = None

    patcher.replace(Sequence, "drop_copy", faulty)


def new_pages_precede_the_copy(patcher: Patcher) -> None:
    """A spill puts all new pages before those that the host has, wherever they belong."""
    original = tiers._joined

    def faulty(sequence: Sequence, parcel: Parcel, component: Component, copied: Hold | None) -> Hold:
        new = parcel.away.get(component)
        if copied is not None and new is not None and parcel.front[component] != len(new):
            patcher.reach()
            parcel.front[component] = len(new)
        return original(sequence, parcel, component, copied)

    patcher.replace(tiers, "_joined", faulty)


COPY_MUTANTS = tuple(
    Mutant(name, "B9", "scheduler", True, plant)
    for name, plant in (
        ("cut-keeps-the-stale-copy", cut_keeps_the_stale_copy),
        ("partial-page-of-the-copy-counts-as-whole", partial_page_of_the_copy_counts_as_whole),
        ("state-of-the-copy-outlives-a-turn", state_of_the_copy_outlives_a_turn),
        ("copy-is-freed-twice", copy_is_freed_twice),
        ("close-forgets-the-copy", close_forgets_the_copy),
        ("new-pages-precede-the-copy", new_pages_precede_the_copy),
    )
)
