"""When memory is short: what gives way, in which order.

    the prefix tree's unleased leaves, least recently used
    checkpoints of sessions
    sessions at rest, longest idle first, of equals the cheapest: spilled to another tier, or dropped to
    recomputation; what is on disk as well leaves the host first
    running turns: the one that loses least is retracted; never the oldest

What is freed may still be named by a step in flight, and a spill takes a step: `make_room` then says that it
is on its way, and the asker tries again in a later plan. Nothing more is given up while enough is coming.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.fallback import retract
from holdfast.core.layout import Tier
from holdfast.core.ledger import Kind, OutOfUnits, Pool
from holdfast.core.policy import retraction_victim, spill_order
from holdfast.core.registry import SPILL_TIERS, Registry
from holdfast.core.session import Life, Place, Session
from holdfast.core.tiers import sink, start_spill
from holdfast.core.turn import Ending

OnDisk = Callable[[Session], bool]


class Pressure:
    """Makes room for whoever asks, at the cost of who can best spare it.

    `on_disk` says whether a session's memory, wherever it lies, is in a file as well.
    """

    __slots__ = ("on_disk", "registry")

    def __init__(self, registry: Registry, on_disk: OnDisk | None = None) -> None:
        self.registry = registry
        self.on_disk = on_disk

    def make_room(self, shortfall: OutOfUnits, asker: Session, may_retract: bool) -> bool:
        """True if the asker should try again at once; False if room is on its way, or cannot be had now."""
        pool, need = shortfall.pool, shortfall.asked
        if len(pool.free) >= need:
            return False
        self.registry.tree.evict(pool.component, need - len(pool.free))
        if self._enough(pool, need):
            return len(pool.free) >= need
        self._drop_checkpoints(pool, need)
        if not self._enough(pool, need):
            self._empty_sessions(pool, need, asker)
        if not self._enough(pool, need) and may_retract:
            self._retract(pool, need, asker)
        return len(pool.free) >= need

    def _enough(self, pool: Pool, need: int) -> bool:
        return len(pool.free) + self.registry.leaving_units(pool.component) >= need

    def _drop_checkpoints(self, pool: Pool, need: int) -> None:
        """Give up checkpoints that nobody pins, session by session."""
        registry = self.registry
        for session in list(registry.checkpointed):
            if self._enough(pool, need):
                return
            sequence = session.sequence
            for point in [point for point in sequence.points if not point.pinned]:
                if point.holder.kind is Kind.CHECKPOINT:
                    sequence.drop_point(point)
            if not sequence.points:
                del registry.checkpointed[session]
        for session in registry.running:
            if self._enough(pool, need):
                return
            session.sequence.drop_spare_points()

    def _empty_sessions(self, pool: Pool, need: int, asker: Session) -> None:
        """Take the memory of sessions at rest, in the order of the policy; evict what they alone leased."""
        registry = self.registry
        for session in spill_order(registry.resting, registry.now):
            if self._enough(pool, need):
                return
            if session is asker or session.place is not Place.HOME or not session.at_rest:
                continue
            lease = session.sequence.lease
            if not session.holder.held[pool.index] and (lease is None or not lease.length):
                continue
            if not (session.holder.held[pool.index] and self.spill(session)):
                registry.drop_memory(session)
                registry.counters.dropped += 1
                registry.tree.evict(pool.component, max(0, need - len(pool.free)))
        self._drop_parcels(pool, need, asker)

    def _drop_parcels(self, pool: Pool, need: int, asker: Session) -> None:
        """The last resort before running turns: sessions that are away still lease what the tree holds."""
        registry = self.registry
        for session in list(registry.resting):
            if self._enough(pool, need):
                return
            lease = session.sequence.lease
            if session is not asker and session.place is Place.AWAY and lease is not None and lease.length:
                registry.drop_memory(session)
                registry.counters.dropped += 1
                registry.tree.evict(pool.component, max(0, need - len(pool.free)))

    def spill(self, session: Session, tier: Tier | None = None) -> bool:
        """Start moving a resting session's memory to another tier, or to that one; False without room."""
        registry = self.registry
        tiers = SPILL_TIERS if tier is None else (tier,)
        if Tier.HOST in tiers:
            self._clear_host(session)
        tier = registry.spill_tier(session, tiers)
        if tier is None or any(owner is session for _, owner in registry.copies):
            return False
        transit = registry.ledger.holder(Kind.TRANSIT, session.id)
        registry.ledger.purpose = "spill"
        try:
            parcel, moves = start_spill(session.sequence, tier, transit, registry.number())
        except OutOfUnits:
            return False
        registry.seals.pop(session, None)
        registry.checkpointed.pop(session, None)
        if session.life is Life.SEALING:
            session.on("end")
        session.parcel = parcel
        session.moved("spill")
        session.sequence.fence = registry.ledger.step
        registry.transits[parcel.transit] = session
        registry.moves += moves
        registry.counters.spills += 1
        return True

    def _clear_host(self, session: Session) -> None:
        """Make room on the host for a session: parcels that are on disk as well stay there alone."""
        registry = self.registry
        if self.on_disk is None:
            return
        for older in list(registry.resting):
            if registry.spill_tier(session, (Tier.HOST,)) is not None:
                return
            parcel = older.parcel
            if older.place is not Place.AWAY or parcel is None or parcel.tier is not Tier.HOST:
                continue
            if self.on_disk(older):
                registry.ledger.purpose = "sink"
                try:
                    sink(older.sequence, parcel)
                except OutOfUnits:
                    return

    def _retract(self, pool: Pool, need: int, asker: Session) -> None:
        """Take back turns until enough is free or on its way; a turn with rows in flight ends after them."""
        registry = self.registry
        while not self._enough(pool, need):
            if any(
                session.turn is not None and session.turn.ending is not None for session in registry.running
            ):
                return
            victim = retraction_victim(registry.running)
            if victim is None:
                return
            turn = victim.turn
            assert turn is not None
            turn.ending = Ending("retract", "memory is short")
            if not victim.unsettled:
                take_back(registry, victim)
            if victim is asker:
                return


def take_back(registry: Registry, session: Session, certain: int | None = None) -> None:
    """Retract a running turn: its session has its memory again, and the turn waits once more."""
    turn = session.turn
    assert turn is not None and not session.unsettled, "rows in flight must settle first"
    turn.ending = None
    turn.awaiting = 0
    turn.retracts += 1
    turn.on("retract")
    session.on("retract")
    retract(session.sequence, session.holder, session.checkpoints, certain)
    registry.running.remove(session)
    registry.queue[turn.number] = turn
    registry.rest(session)
    registry.counters.retracts += 1
