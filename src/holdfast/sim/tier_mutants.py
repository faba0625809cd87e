"""Planted bugs of moves between tiers: adoption by a new process, sinking to a file, checkpoints that stay.

Each function replaces one site by a version that differs in the effect of about one statement, and never
raises of itself: the audit or the device of a simulation must notice it. See planting.py.
"""

from __future__ import annotations

from holdfast.core import tiers
from holdfast.core.layout import Component, Tier
from holdfast.core.lease import Lease
from holdfast.core.ledger import Hold, Holder, Kind, Ledger, OutOfUnits
from holdfast.core.points import thin
from holdfast.core.pressure import Pressure
from holdfast.core.queues import Queues
from holdfast.core.scheduler import Scheduler
from holdfast.core.sequence import Sequence
from holdfast.core.session import Place, Session
from holdfast.core.tiers import Parcel
from holdfast.sim.planting import Mutant, Patcher

# --- adoption -----------------------------------------------------------------------------------------


def failed_adoption_keeps_its_lease(patcher: Patcher) -> None:
    """A file for which there is no room leaves a lease of the tree's root behind."""
    original = Scheduler.adopt
    release = Lease.release

    def faulty(self: Scheduler, session_id: str, length: int) -> bool:
        def keep(lease: Lease, fence: int = 0) -> None:
            patcher.reach()
            patcher.park((lease, fence))

        setattr(Lease, "release", keep)  # noqa: B010 - for the time of the call
        try:
            return original(self, session_id, length)
        finally:
            setattr(Lease, "release", release)  # noqa: B010

    patcher.replace(Scheduler, "adopt", faulty)


def failed_adoption_keeps_its_pages(patcher: Patcher) -> None:
    """A file for which one component has no room keeps what the others have taken on disk."""
    original = tiers._take_all

    def faulty(
        ledger: Ledger, tier: Tier, sizes: dict[Component, int], holder: Holder
    ) -> dict[Component, Hold]:
        if ledger.purpose != "adopt":
            return original(ledger, tier, sizes, holder)
        taken: dict[Component, Hold] = {}
        try:
            for component, count in sizes.items():
                taken[component] = ledger.take(ledger.pool(component, tier), count, holder)
        except OutOfUnits:
            if taken:
                patcher.reach()
                patcher.park(taken)
            raise
        return taken

    patcher.replace(tiers, "_take_all", faulty)


def adopted_session_does_not_rest(patcher: Patcher) -> None:
    """A session with an adopted file is not in the list of those that can give way."""
    original = Queues.rest

    def faulty(self: Queues, session: Session) -> None:
        parcel = session.parcel
        adopted = session.place is Place.AWAY and parcel is not None and parcel.tier is Tier.DISK
        if adopted and session not in self.resting:
            patcher.reach()
            return
        original(self, session)

    patcher.replace(Queues, "rest", faulty)


# --- sinking ------------------------------------------------------------------------------------------


def sunk_parcel_keeps_its_host_memory(patcher: Patcher) -> None:
    """A parcel that counts on disk alone still takes room on the host."""
    original, discard = tiers.sink, Parcel.discard

    def forget(self: Parcel, _fence: int) -> None:
        patcher.reach()
        patcher.park(self.away)
        self.away = {}

    def faulty(sequence: Sequence, parcel: Parcel) -> None:
        setattr(Parcel, "discard", forget)  # noqa: B010 - for the time of the call
        try:
            original(sequence, parcel)
        finally:
            setattr(Parcel, "discard", discard)  # noqa: B010

    patcher.replace(tiers, "sink", faulty)


def sunk_parcel_is_read_from_the_host(patcher: Patcher) -> None:
    """A parcel that counts on disk is restored from host pages of the same numbers."""
    original = tiers.sink

    def faulty(sequence: Sequence, parcel: Parcel) -> None:
        original(sequence, parcel)
        patcher.reach()
        parcel.tier = Tier.HOST

    patcher.replace(tiers, "sink", faulty)


def failed_sink_loses_the_parcel(patcher: Patcher) -> None:
    """A parcel gives up its host pages before it is known whether there is room on disk."""
    original = tiers.sink

    def faulty(sequence: Sequence, parcel: Parcel) -> None:
        try:
            original(sequence, parcel)
        except OutOfUnits:
            patcher.reach()
            parcel.discard(sequence.fence)
            parcel.away = {}
            raise

    patcher.replace(tiers, "sink", faulty)


# --- checkpoints of spilled sessions --------------------------------------------------------------------


def spilled_checkpoints_stay_pinned(patcher: Patcher) -> None:
    """A session that is spilled keeps checkpoints on the device that nothing can evict."""
    original = Pressure._begin_spill

    def faulty(self: Pressure, session: Session, tier: Tier) -> bool:
        pinned = [point for point in session.sequence.points if point.pinned]
        begun = original(self, session, tier)
        for point in pinned:
            patcher.reach()
            point.pinned = True
        return begun

    patcher.replace(Pressure, "_begin_spill", faulty)


def spilled_checkpoints_are_forgotten(patcher: Patcher) -> None:
    """A session that is spilled forgets its checkpoints instead of giving them up."""
    original = tiers.finish_spill

    def faulty(sequence: Sequence, parcel: Parcel) -> None:
        original(sequence, parcel)
        if sequence.points:
            patcher.reach()
            patcher.park(list(sequence.points))
            sequence.points.clear()

    patcher.replace(tiers, "finish_spill", faulty)


def spilled_session_is_not_listed_for_its_checkpoints(patcher: Patcher) -> None:
    """Memory pressure passes the checkpoints of a spilled session over."""
    original = Pressure._begin_spill

    def faulty(self: Pressure, session: Session, tier: Tier) -> bool:
        begun = original(self, session, tier)
        if begun and self.registry.queues.checkpointed.pop(session, session) is None:
            patcher.reach()
        return begun

    patcher.replace(Pressure, "_begin_spill", faulty)


def checkpoint_that_is_given_up_keeps_its_slot(patcher: Patcher) -> None:
    """Memory pressure strikes a checkpoint off the list of its session without freeing its memory."""

    def faulty(_self: Pressure, session: Session) -> bool:
        sequence = session.sequence
        points = [point for point in sequence.points if point.holder.kind is Kind.CHECKPOINT]
        index = thin(points, sequence.computed)
        if index is None:
            return False
        patcher.reach()
        patcher.park(points[index])
        sequence.points.remove(points[index])
        return True

    patcher.replace(Pressure, "_drop_checkpoint", faulty)


TIER_MUTANTS = tuple(
    Mutant(name, story, "scheduler", True, plant)
    for name, story, plant in (
        ("failed-adoption-keeps-its-lease", "B15", failed_adoption_keeps_its_lease),
        ("failed-adoption-keeps-its-pages", "B15", failed_adoption_keeps_its_pages),
        ("adopted-session-does-not-rest", "B15", adopted_session_does_not_rest),
        ("sunk-parcel-keeps-its-host-memory", "B9", sunk_parcel_keeps_its_host_memory),
        ("sunk-parcel-is-read-from-the-host", "B9", sunk_parcel_is_read_from_the_host),
        ("failed-sink-loses-the-parcel", "B9", failed_sink_loses_the_parcel),
        ("spilled-checkpoints-stay-pinned", "B9", spilled_checkpoints_stay_pinned),
        ("spilled-checkpoints-are-forgotten", "B9", spilled_checkpoints_are_forgotten),
        (
            "spilled-session-is-not-listed-for-its-checkpoints",
            "B9",
            spilled_session_is_not_listed_for_its_checkpoints,
        ),
        ("checkpoint-that-is-given-up-keeps-its-slot", "B9", checkpoint_that_is_given_up_keeps_its_slot),
    )
)
