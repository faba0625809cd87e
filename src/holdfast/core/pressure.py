"""Memory pressure: the order of eviction.

    the prefix tree's unleased leaves, least recently used
    prefetches in flight (`prefetch`)
    the memory of open turns, the youngest first
    checkpoints of sessions at home and away, one of each in turns; those of the asker last
    idle sessions, the lowest priority first, among equals those expected to stay idle longest, then those
    with a whole copy on the host, then the cheapest to restore, and last those whose turn waits: spilled to
    another tier, whole or as much of the end as the host has room for, or dropped; on the host copies are
    freed first, then memory that is on disk as well
    pinned sessions (`retention`), in the same order
    running turns: the one that loses least is retracted; never the oldest
    spilled sessions that lease prefixes: dropped, and only for a turn or a session that cannot get room
    otherwise

Tenants are evicted one after the other, the one that holds most first, so that no tenant loses memory to one
that has more. At a tenant's quota only that tenant is evicted.

Evicted units may still be named by a step in flight, and a spill takes a step: the asker then tries
again in a later plan. Nothing more is evicted while enough units are about to become free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from holdfast.core.fallback import retract
from holdfast.core.in_flight import Plan
from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import Account, Kind, OutOfUnits, OverQuota
from holdfast.core.moves import SPILL_TIERS
from holdfast.core.points import thin
from holdfast.core.policy import absence, retraction_victim, spill_order
from holdfast.core.registry import Registry
from holdfast.core.session import Life, LifeEvent, Place, PlaceEvent, Session
from holdfast.core.sharing import publish, reclaim
from holdfast.core.tiers import sink, start_restore, start_spill
from holdfast.core.turn import Ending, TurnEvent

OnDisk = Callable[[Session], bool]

SPARE_SHARE = 32
"""Prefetches and checkpoints leave one unit of so many free."""


class Shortage:
    """Units that a pool lacks: in all, or for a tenant at its quota (`account`)."""

    __slots__ = ("account", "need", "pool", "registry")

    def __init__(self, registry: Registry, shortfall: OutOfUnits) -> None:
        self.registry = registry
        self.pool = shortfall.pool
        self.account = shortfall.account if isinstance(shortfall, OverQuota) else None
        shortfall.give_back(self.room)
        self.need = shortfall.asked

    @property
    def room(self) -> int:
        """How many units are there: free, or left of the tenant's quota."""
        return len(self.pool.free) if self.account is None else self.pool.room(self.account)

    @property
    def missing(self) -> int:
        """How many more units must be given up before the need can be met at once."""
        return max(0, self.need - self.room)

    @property
    def lacking(self) -> int:
        """How many of the missing units are not on their way."""
        tenant = self.account.name if self.account is not None else None
        return self.missing - self.registry.moves.leaving_units(self.pool.component, tenant)

    @property
    def over(self) -> bool:
        """Whether enough is free or on its way."""
        return self.lacking <= 0

    def concerns(self, session: Session) -> bool:
        """Whether memory of a session counts: any, or only of the tenant at its quota."""
        return self.account in (None, session.holder.account)

    def givers(self) -> Iterator[Account]:
        """The accounts that give way: those that hold units, the largest first."""
        index = self.pool.index
        accounts = self.registry.ledger.accounts.values() if self.account is None else (self.account,)
        return iter(
            sorted((each for each in accounts if each.held[index]), key=lambda each: -each.held[index])
        )


class Pressure:
    """Makes room for a session, at the cost of those that can best spare it.

    `on_disk` says whether a session's memory, wherever it lies, is in a file as well.
    """

    __slots__ = ("on_disk", "registry")

    def __init__(self, registry: Registry, on_disk: OnDisk | None = None) -> None:
        self.registry = registry
        self.on_disk = on_disk

    def make_room(self, shortfall: OutOfUnits, asker: Session, may_retract: bool) -> bool:
        """True if the asker should try again at once; False if room is on its way, or there is none."""
        shortage = Shortage(self.registry, shortfall)
        if not shortage.missing:
            return False
        for account in shortage.givers():
            if not shortage.over:
                self._give_way(shortage, account, asker)
        self._empty_all(shortage, asker)
        if not shortage.over and may_retract:
            self._retract(shortage, asker)
            self._empty_all(shortage, asker)
        if not shortage.over and not self._gets_room(shortage, asker):
            self._drop_parcels(shortage, asker)
        return not shortage.missing

    def _gets_room(self, shortage: Shortage, asker: Session) -> bool:
        """Whether others may give memory back without being made to: those that run, are sealed or move.

        What a copy is to complete can be taken in the next plan.
        """
        registry = self.registry
        active = (each for each in registry.sessions.values() if each.unsettled)
        queues = registry.queues
        busy = (*queues.running, *queues.held, *registry.moves.transits.values(), *active)
        others = any(each is not asker and shortage.concerns(each) for each in busy)
        return others or bool(registry.in_flight.copies)

    def _empty_all(self, shortage: Shortage, asker: Session) -> None:
        """Take the memory of all sessions at rest, also of those that are pinned."""
        for account in shortage.givers():
            if not shortage.over:
                self._empty_sessions(shortage, account, asker, spare_pinned=False)

    def _give_way(self, shortage: Shortage, account: Account, asker: Session) -> None:
        """Evict memory of a tenant until there is enough."""
        self.registry.tree.evict(shortage.pool.component, shortage.missing, account.name)
        if not shortage.over:
            self._cancel_prefetches(shortage, account)
        if not shortage.over and not _is_listening(asker):
            self._stop_listening(shortage, account)
        if not shortage.over:
            self._drop_checkpoints(shortage, account, asker)
        if not shortage.over:
            self._empty_sessions(shortage, account, asker)

    def _cancel_prefetches(self, shortage: Shortage, account: Account) -> None:
        """Let memory of a tenant that comes back ahead stay where it is."""
        expected = self.registry.queues.expected
        for session in list(expected):
            if shortage.over:
                return
            if session.place is Place.RETURNING and session.holder.account is account:
                self.registry.moves.cancel_restore(session)
                del expected[session]

    def _stop_listening(self, shortage: Shortage, account: Account) -> None:
        """Free the memory of open turns, the youngest first; after their rows in flight."""
        for session in reversed(list(self.registry.queues.listening)):
            if shortage.over:
                return
            turn = session.turn
            assert turn is not None, "a session that listens has a turn"
            runs = session.life is Life.RUNNING and turn.is_open and turn.ending is None
            if runs and session.holder.account is account:
                if session.unsettled:
                    turn.ending = Ending(TurnEvent.RETRACT, "memory is short")
                else:
                    take_back(self.registry, session)

    def _drop_checkpoints(self, shortage: Shortage, account: Account, asker: Session) -> None:
        """Give up checkpoints that are not pinned, as many as it takes; they hold no pages of full layers."""
        if shortage.pool.component is Component.FULL:
            return
        self._thin(shortage, account, asker)
        while not shortage.over and asker.holder.account is account and self._drop_checkpoint(asker):
            pass
        for session in self.registry.queues.running:
            if shortage.over:
                return
            if session.holder.account is account:
                session.sequence.drop_spare_points()

    def _thin(self, shortage: Shortage, account: Account | None, asker: Session | None) -> None:
        """Let sessions give up a checkpoint each, in turns, until there is enough.

        The next is the one that came to rest, or gave one up, the longest time ago. The asker keeps its own.
        Points of a running turn become checkpoints when it ends; until then its session is not listed.
        """
        checkpointed = self.registry.queues.checkpointed
        passed = 0
        while passed < len(checkpointed) and not shortage.over:
            session = next(iter(checkpointed))
            del checkpointed[session]
            gives = account in (None, session.holder.account) and session is not asker
            dropped = gives and self._drop_checkpoint(session)
            if any(point.holder.kind is Kind.CHECKPOINT for point in session.sequence.points):
                checkpointed[session] = None
                passed = 0 if dropped else passed + 1

    def _drop_checkpoint(self, session: Session) -> bool:
        """Give up the checkpoint of a session that is missed least; False if there is none to be given up."""
        sequence = session.sequence
        points = [point for point in sequence.points if point.holder.kind is Kind.CHECKPOINT]
        index = thin(points, sequence.computed)
        if index is not None:
            sequence.drop_point(points[index])
        return index is not None

    def spare_units(self) -> None:
        """Let checkpoints give way before a pool is full.

        Rows that leave a checkpoint, seals and prefetches take free units only.
        """
        registry = self.registry
        for component in registry.ledger.layout.components:
            pool = registry.ledger.pool(component)
            spare = pool.size // SPARE_SHARE
            if component is not Component.FULL and len(pool.free) < spare:
                self._thin(Shortage(registry, OutOfUnits(pool, spare, len(pool.free))), None, None)

    def _empty_sessions(
        self, shortage: Shortage, account: Account, asker: Session, spare_pinned: bool = True
    ) -> None:
        """Evict idle sessions, in the order of the policy, and the prefixes that only they leased."""
        registry, pool = self.registry, shortage.pool
        resting = [session for session in registry.queues.resting if session.holder.account is account]
        pinned = self.pinned_sessions(account, resting) if spare_pinned else ()
        for session in spill_order([each for each in resting if each not in pinned], registry.now):
            if shortage.over:
                return
            if session is asker or session.place is not Place.HOME or not session.at_rest:
                continue
            if registry.in_flight.has_copies_of(session) or session in registry.queues.recalled:
                continue  # The next plan completes its memory, or a verb is about to use it.
            takes_along = pool.component in registry.moves.parcel_units(session)
            if takes_along and self.spill(session, asker=asker):
                if pool.component is not Component.FULL:
                    session.sequence.drop_points()  # They were pinned, or would have given way before.
                continue
            # Making room on another tier may have made some here.
            if shortage.lacking > 0 and not (takes_along and self._spill_end(session, shortage)):
                self._drop(session, shortage)

    def leave_ahead(self, waiting: Iterable[Session]) -> None:
        """Let sessions at rest leave for turns that wait for their own memory, as far as the host has room.

        Turns are admitted in order, and each would begin to make room when the one before it has its memory.
        Nobody loses anything: no session is dropped, no copy is given up, no waiting turn's memory leaves.
        """
        registry = self.registry
        parcels = [each.parcel for each in waiting if each.place is Place.AWAY and each.parcel is not None]
        for component in registry.ledger.layout.components:
            pool = registry.ledger.pool(component)
            wanted = sum(len(parcel.away[component]) for parcel in parcels if component in parcel.away)
            shortage = Shortage(registry, OutOfUnits(pool, wanted, len(pool.free)))
            for account in shortage.givers():
                self._leave_for_the_host(shortage, account)

    def make_room_ahead(self, shortfall: OutOfUnits, session: Session) -> bool:
        """Whether there is room for memory that nobody waits for; if not, some is made for a later plan.

        Prefixes that nobody leases give way, checkpoints of other sessions, and sessions that are expected
        later, as in `leave_ahead`.
        """
        shortage = Shortage(self.registry, shortfall)
        for account in shortage.givers():
            if not shortage.over:
                self.registry.tree.evict(shortage.pool.component, shortage.missing, account.name)
            if not shortage.over and shortage.pool.component is not Component.FULL:
                self._thin(shortage, account, session)
            if not shortage.over:
                self._leave_for_the_host(shortage, account, session)
        return not shortage.missing

    def _leave_for_the_host(
        self, shortage: Shortage, account: Account, expected: Session | None = None
    ) -> None:
        """Let idle sessions of a tenant leave in the order of the policy, up to one without room.

        For a session that is `expected` only those leave that stay away longer and are of no higher priority,
        neither than its own nor than that of one that stays.
        """
        registry = self.registry
        resting = [session for session in registry.queues.resting if session.holder.account is account]
        pinned = self.pinned_sessions(account, resting)
        idle = [each for each in resting if each.turn is None and each not in pinned]
        if expected is not None:
            soon = absence(expected, registry.now)
            times = {each: absence(each, registry.now) for each in idle}
            staying = [expected, *(each for each in idle if times[each] <= soon)]
            rank = min(each.retention.priority for each in staying)
            idle = [each for each in idle if times[each] > soon and each.retention.priority <= rank]
        for session in spill_order(idle, registry.now):
            if shortage.over:
                return
            if session.place is not Place.HOME or not session.at_rest or session in registry.queues.recalled:
                continue
            if registry.moves.spill_tier(session, (Tier.HOST,)) is None or not self.spill(session, Tier.HOST):
                return

    def pinned_sessions(self, account: Account, resting: Iterable[Session]) -> set[Session]:
        """The sessions at rest of a tenant whose pins count: those opened first, up to the tenant's limit."""
        registry, found = self.registry, set[Session]()
        pinned = [session for session in resting if session.retention.pinned]
        share, ledger = registry.policy.pinned_share, registry.ledger
        room = {
            component: int(account.limits[ledger.pool(component).index] * share)
            for component in ledger.layout.components
        }
        for session in sorted(pinned, key=attrgetter("number")):
            units = registry.moves.parcel_units(session)
            if all(count <= room[component] for component, count in units.items()):
                found.add(session)
                for component, count in units.items():
                    room[component] -= count
        return found

    def last_resorts(self) -> list[Session]:
        """Sessions at rest that have memory on the device, in the order of the policy, pinned ones last."""
        registry = self.registry
        order = spill_order(list(registry.queues.resting), registry.now)
        holding = [each for each in order if each.place is not Place.AWAY or _leans(each)]
        return sorted(holding, key=lambda session: session.retention.pinned)

    def _drop_parcels(self, shortage: Shortage, asker: Session) -> None:
        """The last resort: sessions that are away still lease what the tree has. First what no other does."""
        tree = self.registry.tree

        def order(session: Session) -> tuple[bool, bool, int]:
            lease = session.sequence.lease
            return lease is None or tree.alone_from(lease) == lease.length, *_rank(session)

        for session in sorted(self.registry.queues.resting, key=order):
            if shortage.over:
                return
            leans = session.place is Place.AWAY and _leans(session)
            if leans and session is not asker and shortage.concerns(session):
                self._drop(session, shortage)

    def _drop(self, session: Session, shortage: Shortage) -> None:
        """Drop a session's memory, and evict the prefixes that only it leased."""
        self.registry.give_up(session)
        self.registry.tree.evict(shortage.pool.component, shortage.missing, session.tenant)

    def spill(self, session: Session, tier: Tier | None = None, asker: Session | None = None) -> bool:
        """Start moving a resting session's memory to another tier, or to that one; False without room.

        The pages that the tree keeps for the session alone go along. `asker` is the session that needs room:
        nothing is taken from it.
        """
        registry = self.registry
        if registry.in_flight.has_copies_of(session):
            return False
        tiers = SPILL_TIERS if tier is None else (tier,)
        tier = next((each for each in tiers if self._has_room(each, session, asker)), None)
        if tier is None:
            return False
        reclaim(registry.tree, session.sequence)
        return self._begin_spill(session, tier)

    def _spill_end(self, session: Session, shortage: Shortage) -> bool:
        """Start moving the last pages of a session to the host, as many as fit there; False if too few do.

        So two sessions change places where the host has no room for the one before the other has left it. The
        first pages stay on the device, leased from the tree like a prefix that is shared.
        """
        registry, sequence = self.registry, session.sequence
        host = registry.ledger.pools.get((Component.FULL, Tier.HOST))
        if host is None or shortage.pool.component is not Component.FULL:
            return False
        copied = sequence.copy.size(Component.FULL) if sequence.copy is not None else 0
        room = host.available(session.holder.account) + copied  # The copy of what stays is given up.
        if room < shortage.lacking:
            return False
        reclaim(registry.tree, sequence)
        if sequence.window is not None:
            sequence.drop_points()  # What only they read is not to be kept.
        staying = (sequence.pages - room) * registry.ledger.layout.page_size
        publish(registry.tree, sequence, staying, rank=1, give_states=False)
        return self._begin_spill(session, Tier.HOST)

    def _begin_spill(self, session: Session, tier: Tier) -> bool:
        """Start moving what a resting session itself holds to a tier; False without room there."""
        registry = self.registry
        transit = registry.ledger.holder(Kind.TRANSIT, session.id, session.tenant)
        registry.ledger.purpose = "spill"
        try:
            parcel, moves = start_spill(session.sequence, tier, transit, registry.number())
        except OutOfUnits:
            return False
        registry.queues.seals.pop(session, None)
        if session.life is Life.SEALING:
            session.on(LifeEvent.END)
        session.parcel = parcel
        if moves:
            registry.moves.begin(session, PlaceEvent.SPILL, moves)
        else:
            # The host has all of it: nothing is in the way of giving the device's units up.
            session.moved(PlaceEvent.SPILL)
            registry.has_left(session)
        return True

    def restore(self, session: Session, plan: Plan | None = None) -> bool:
        """Start bringing a session's memory back; `plan` is the one in the making.

        Raises `OutOfUnits` if there is no room now. Where there never will be, the memory is given up, and
        this returns False.
        """
        while True:
            try:
                self.begin_restore(session)
            except OutOfUnits as shortfall:
                if self.make_room(shortfall, session, may_retract=False):
                    continue
                if not self.in_vain(shortfall, session, plan):
                    raise
                self.registry.give_up(session)
                return False
            return True

    def begin_restore(self, session: Session) -> None:
        """Take room for a session's memory and begin to bring it back, or raise and change nothing."""
        registry, parcel = self.registry, session.parcel
        assert parcel is not None
        transit = registry.ledger.holder(Kind.TRANSIT, session.id, session.tenant)
        registry.ledger.purpose = "restore"
        moves = start_restore(session.sequence, parcel, transit, registry.number())
        registry.moves.begin(session, PlaceEvent.RESTORE, moves)

    def in_vain(self, shortfall: OutOfUnits, session: Session, plan: Plan | None) -> bool:
        """Whether waiting would bring no room: nothing runs or moves that could give some back."""
        registry = self.registry
        running, transits = (*registry.queues.running, *registry.queues.held), registry.moves.transits
        plans = registry.in_flight.plans if plan is None else (*registry.in_flight.plans, plan)
        if not isinstance(shortfall, OverQuota):
            return not (running or transits or registry.in_flight.plans or plan)
        rows = (row.turn.session_id for each in plans for row in each.rows)
        computing = (registry.sessions[name] for name in rows if name in registry.sessions)
        return all(each.tenant != session.tenant for each in (*running, *transits.values(), *computing))

    def _has_room(self, tier: Tier, session: Session, asker: Session | None) -> bool:
        """Whether another tier has room for a session; where it has none, some is made, if that can be.

        Copies of sessions at home leave the host first, then parcels with a copy on disk. Where a tenant has
        more of the tier than the session's would have, its longest resting sessions make room and are dropped
        to recomputation.
        """
        registry, account = self.registry, session.holder.account
        if registry.moves.spill_tier(session, (tier,)) is not None:
            return True
        if session.volatile and tier is Tier.DISK:
            return False
        pools = [
            (pool, need)
            for component, need in registry.moves.new_units(session, tier).items()
            if (pool := registry.ledger.pools.get((component, tier))) is not None
        ]
        sinks = self.on_disk if tier is Tier.HOST else None
        quota = any(pool.room(account) < need for pool, need in pools)
        if tier is Tier.HOST and quota:
            if self._drop_copies(session, account):
                return True
            quota = any(pool.room(account) < need for pool, need in pools)
        if tier is Tier.HOST and not quota and self._drop_copies(session, None):
            return True
        heavier = {
            each
            for each in registry.ledger.accounts.values()
            if not quota
            and any(each.held[pool.index] > account.held[pool.index] + need for pool, need in pools)
        }
        there = [
            each
            for each in (registry.queues.resting if sinks is not None or heavier else ())
            if each is not asker
            and each.place is Place.AWAY
            and (each.parcel is not None and each.parcel.tier is tier)
            and (not quota or each.holder.account is account)
        ]
        for older in sorted(there, key=_rank):
            sunk = sinks is not None and sinks(older) and _sunk(registry, older)
            if not sunk and older.holder.account in heavier:
                registry.give_up(older)
            if registry.moves.spill_tier(session, (tier,)) is not None:
                return True
        return False

    def _drop_copies(self, session: Session, account: Account | None) -> bool:
        """Give up host copies of other sessions, or of one tenant's, until a session fits; whether it does.

        Those that came back last stay on the device longest: theirs go first.
        """
        moves = self.registry.moves
        for other in reversed(list(moves.copied)):
            if other is session or account not in (None, other.holder.account):
                continue
            if moves.drop_copy(other) and moves.spill_tier(session, (Tier.HOST,)) is not None:
                return True
        return False

    def _retract(self, shortage: Shortage, asker: Session) -> None:
        """Take back turns until enough is free or on its way; a turn with rows in flight ends after them."""
        registry = self.registry
        while not shortage.over:
            running = [session for session in registry.queues.running if shortage.concerns(session)]
            leaving = (*running, *(each for each in registry.queues.listening if shortage.concerns(each)))
            if any(session.turn is not None and session.turn.ending is not None for session in leaving):
                return
            victim = retraction_victim(running)
            if victim is None:
                return
            turn = victim.turn
            assert turn is not None
            if victim.unsettled:
                turn.ending = Ending(TurnEvent.RETRACT, "memory is short")
            else:
                take_back(registry, victim)
            if victim is asker:
                return


def _rank(session: Session) -> tuple[bool, int]:
    """Sessions away from the device give way in this order; of equals the longest resting first."""
    return session.retention.pinned, session.retention.priority


def _leans(session: Session) -> bool:
    """Whether a session leases nodes of the tree."""
    lease = session.sequence.lease
    return lease is not None and lease.length > 0


def _sunk(registry: Registry, session: Session) -> bool:
    """Account for a parcel that is on disk as well there alone; False if it has no room there."""
    assert session.parcel is not None
    if not registry.ledger.has(Tier.DISK):
        return False
    registry.ledger.purpose = "sink"
    try:
        sink(session.sequence, session.parcel)
    except OutOfUnits:
        return False
    return True


def take_back(registry: Registry, session: Session, certain: int | None = None) -> None:
    """Retract a running turn: its session has its memory again, and the turn waits once more."""
    assert session.turn is not None
    session.turn.retracts += 1
    registry.counters.retracts += 1
    requeue(registry, session, certain)


def requeue(registry: Registry, session: Session, certain: int | None = None) -> None:
    """Retract a running turn: it waits again, without its computed memory."""
    turn = session.turn
    assert turn is not None and not session.unsettled, "rows in flight must settle first"
    turn.on(TurnEvent.RETRACT)
    session.on(LifeEvent.RETRACT)
    retract(session.sequence, session.holder, session.checkpoints, certain)
    registry.queues.stop(session)
    registry.queues.wait(session, turn)
    registry.queues.rest(session)


def _is_listening(session: Session) -> bool:
    """Whether a session's turn is open."""
    return session.turn is not None and session.turn.is_open
