"""Planted bugs of prefetches: memory that comes back before its turn, and is cancelled under pressure.

Each function replaces one site by a version that differs in the effect of about one statement, and never
raises of itself: the audit, the device or the world of a simulation must notice it. See planting.py.
"""

from __future__ import annotations

from collections.abc import Container

from holdfast.core.hold import Hold
from holdfast.core.moves import Moves
from holdfast.core.prefetch import Prefetch
from holdfast.core.registry import Registry
from holdfast.core.session import Session
from holdfast.core.waiting import Waiting
from holdfast.sim.planting import Mutant, Patcher


def cancelled_prefetch_keeps_its_pages(patcher: Patcher) -> None:
    """A prefetch that is cancelled forgets what it has taken on the device."""
    original = Moves.cancel_restore

    def faulty(self: Moves, session: Session) -> None:
        assert session.parcel is not None
        patcher.reach()
        patcher.park(session.parcel.home)
        session.parcel.home = {}
        original(self, session)

    patcher.replace(Moves, "cancel_restore", faulty)


def cancelled_prefetch_frees_its_pages_at_once(patcher: Patcher) -> None:
    """Pages of a cancelled prefetch are free while the copy still writes to them."""
    original, release = Moves.cancel_restore, Hold.release

    def at_once(self: Hold, _fence: int = 0) -> None:
        self.grant.fence = 0
        release(self)

    def faulty(self: Moves, session: Session) -> None:
        patcher.reach()
        setattr(Hold, "release", at_once)  # noqa: B010 - for the time of the call
        try:
            original(self, session)
        finally:
            setattr(Hold, "release", release)  # noqa: B010

    patcher.replace(Moves, "cancel_restore", faulty)


def prefetch_begins_while_a_turn_waits(patcher: Patcher) -> None:
    """Memory comes back ahead although a turn waits, which may need the room."""
    original = Prefetch.fetch

    def faulty(self: Prefetch, short: bool, full: Container[str]) -> None:
        waiting = self.registry.queues.waiting
        if not waiting.turns or not self.registry.queues.expected:
            original(self, short, full)
            return
        patcher.reach()
        self.registry.queues.waiting = Waiting()
        try:
            original(self, False, ())
        finally:
            self.registry.queues.waiting = waiting

    patcher.replace(Prefetch, "fetch", faulty)


def turn_leaves_its_session_expected(patcher: Patcher) -> None:
    """A turn that was expected is there, and pressure may still cancel what brings its memory back."""

    def faulty(self: Registry, session: Session) -> None:
        if session in self.queues.expected:
            patcher.reach()
        session.expected = 0.0
        self.returns.drop(session.number)

    patcher.replace(Registry, "has_returned", faulty)


PREFETCH_MUTANTS = tuple(
    Mutant(name, "B9", "scheduler", True, plant)
    for name, plant in (
        ("cancelled-prefetch-keeps-its-pages", cancelled_prefetch_keeps_its_pages),
        ("cancelled-prefetch-frees-its-pages-at-once", cancelled_prefetch_frees_its_pages_at_once),
        ("prefetch-begins-while-a-turn-waits", prefetch_begins_while_a_turn_waits),
        ("turn-leaves-its-session-expected", turn_leaves_its_session_expected),
    )
)
