"""Prefetch: spilled memory is restored before the turn that needs it.

    expect    input begins to arrive, or a client connects: the session is listed as expected
    due       the time of an announced turn is near: likewise
    fetch     a plan has memory to spare: the restore begins, one at a time, the session needed first

No turn waits for a prefetch. It begins only while no turn waits and no other restore is in flight. It takes
free memory, or makes room by evicting unleased prefixes and idle sessions that are expected to stay idle
longer, if the host has room for them; running turns keep a reserve. Memory pressure cancels it right after
evicting unleased prefixes; the source is still valid. The expected turn adopts a restore in flight. Called
by planner, scheduler and the engine's verbs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from operator import attrgetter

from holdfast.core.layout import Component
from holdfast.core.ledger import Kind, OutOfUnits, OverQuota
from holdfast.core.pressure import SPARE_SHARE, Pressure
from holdfast.core.registry import Registry
from holdfast.core.session import Place, Session

GROWTH_PAGES = 2
"""Pages that a running turn may need while memory comes back."""
EXPECTED_MAX = 64
"""Sessions that are listed as expected, as evenly of all tenants as their hints allow. Hints beyond them are
dropped: a plan looks at a bounded number.
"""
ATTEMPTS_MAX = 4
"""Sessions for which one plan looks for room."""


class Prefetch:
    """Brings memory back ahead. The sessions that are expected are in `Queues.expected`."""

    __slots__ = ("pressure", "registry")

    def __init__(self, registry: Registry, pressure: Pressure) -> None:
        self.registry = registry
        self.pressure = pressure

    def expect(self, session: Session, seconds: float) -> None:
        """Bring memory back now: a turn is expected within `seconds`. No effect while the session has one."""
        if session.turn is None:
            session.expected = self.registry.now + seconds
            self._list(session)

    def due(self) -> None:
        """List the sessions whose turn is near."""
        registry = self.registry
        for _, session_id in registry.returns.due(registry.now):
            self._list(registry.sessions[session_id])

    def _list(self, session: Session) -> None:
        """List a session whose memory is not here, if there is a place on the list for its tenant."""
        queues = self.registry.queues
        if session.place is not Place.HOME and (
            len(queues.expected) < EXPECTED_MAX or self._displaces(session)
        ):
            queues.expect(session)

    def _displaces(self, session: Session) -> bool:
        """Whether a full list has the session, or takes it for one of a tenant that has more of the list."""
        expected = self.registry.queues.expected
        if session in expected:
            return True
        listed = Counter(each.tenant for each in expected)
        tenant, most = listed.most_common(1)[0]
        if listed[session.tenant] + 1 >= most:
            return False
        last = max((each for each in expected if each.tenant == tenant), key=attrgetter("expected"))
        del expected[last]
        return True

    def fetch(self, short: bool, full: Container[str]) -> None:
        """Begin to bring the memory of the session back that is needed first, if nobody else needs the room.

        `short` says that a turn lacks memory in this plan; tenants that are `full` are at their quota.
        """
        registry, queues = self.registry, self.registry.queues
        for session in list(queues.expected):
            passed = session.expected <= registry.now and session.place is not Place.RETURNING
            if passed or session.place is Place.HOME:
                del queues.expected[session]
        away = [session for session in queues.expected if session.place is Place.AWAY]
        returning = any(each.place is Place.RETURNING for each in registry.moves.transits.values())
        if not (short or returning or registry.queue):
            for session in sorted(away, key=lambda each: each.expected)[:ATTEMPTS_MAX]:
                if session.tenant not in full and self._begin(session):
                    break
        # Memory that is on its way out may make room: another plan looks again.
        pools = [registry.ledger.pool(component) for component in registry.ledger.layout.components]
        leaving = registry.moves.transits or any(pool.by_kind[Kind.RETIRING] for pool in pools)
        queues.unfetched = bool(queues.expected and leaving)

    def _begin(self, session: Session) -> bool:
        """Begin to bring one session back; False without room."""
        registry, parcel = self.registry, session.parcel
        assert parcel is not None, "memory that is away is in a parcel"
        for component, hold in parcel.away.items():
            pool = registry.ledger.pool(component)
            need = len(hold) + self._reserve(component) + max(1, pool.size // SPARE_SHARE)
            if need > pool.size - self._taken(component):
                return False  # What others gave up would be given up in vain.
            quota = OverQuota(pool, len(hold), session.holder.account)
            for shortfall in (quota, OutOfUnits(pool, need, len(pool.free))):
                if not self.pressure.make_room_ahead(shortfall, session):
                    return False
        try:
            self.pressure.begin_restore(session)
        except OutOfUnits:
            return False
        return True

    def _taken(self, component: Component) -> int:
        """Units that running turns have at least: their own, and the longest prefix that one leases."""
        registry = self.registry
        leased = [session.sequence.leased_pages for session in registry.queues.running]
        held = registry.ledger.pool(component).by_kind[Kind.TURN]
        return held + max(leased, default=0) * (component is Component.FULL)

    def _reserve(self, component: Component) -> int:
        """Units that running turns may need while the memory comes back."""
        queues, layout = self.registry.queues, self.registry.ledger.layout
        if component is Component.STATE:
            return 0
        return sum(
            max(0, layout.pages_for(session.sequence.known) + GROWTH_PAGES - session.sequence.pages)
            for session in (*queues.running, *queues.listening)
        )
