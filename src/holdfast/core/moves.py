"""Memory on its way between tiers: sessions that move, moves to be planned, and tiers with room."""

from __future__ import annotations

from holdfast.core.in_flight import Plan
from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import Kind, Ledger
from holdfast.core.plan import TierMove
from holdfast.core.prefix import PrefixTree
from holdfast.core.session import Place, PlaceEvent, Session

SPILL_TIERS = (Tier.HOST, Tier.DISK)


class Moves:
    """Spills and restores: `transits` has the session of each, `pending` goes with the next plan.

    `copied` are sessions at home that the host may have a copy of, the one that came back last at the end.
    """

    __slots__ = ("copied", "ledger", "pending", "transits", "tree")

    def __init__(self, ledger: Ledger, tree: PrefixTree) -> None:
        self.ledger = ledger
        self.tree = tree
        self.transits: dict[int, Session] = {}
        self.pending: list[TierMove] = []
        self.copied: dict[Session, None] = {}

    def begin(self, session: Session, event: PlaceEvent, moves: list[TierMove]) -> None:
        """Start the moves of a session's parcel with the next plan."""
        assert session.parcel is not None
        session.moved(event)
        self.transits[session.parcel.transit] = session
        self.pending += moves

    def load(self, plan: Plan) -> None:
        """Move what waits for the next plan into it."""
        plan.moves, self.pending = self.pending, []
        for move in plan.moves:
            self.transits[move.number].sequence.fence = plan.step

    def discard(self, session: Session) -> None:
        """Give up a session's parcel on another tier, whatever is in flight for it. No effect without one."""
        if session.parcel is not None:
            transit = session.parcel.transit
            self.transits.pop(transit, None)
            self.pending = [move for move in self.pending if move.number != transit]
            session.parcel.discard(self.ledger.step)
            session.parcel = None
            session.moved(PlaceEvent.DROP)

    def cancel_restore(self, session: Session) -> None:
        """Cancel the restore of a parcel: it stays where it is, and its device units retire."""
        parcel = session.parcel
        assert parcel is not None
        del self.transits[parcel.transit]
        self.pending = [move for move in self.pending if move.number != parcel.transit]
        for hold in parcel.home.values():
            hold.release(self.ledger.step)
        parcel.home = {}
        session.moved(PlaceEvent.CANCEL)

    def parcel_units(self, session: Session) -> dict[Component, int]:
        """Units that a session's parcel would hold: its own, and those that the tree keeps for it alone."""
        sequence, lease = session.sequence, session.sequence.lease
        if lease is None:
            return {}
        layout, run = self.ledger.layout, sequence.window
        shared = self.tree.alone_from(lease) // layout.page_size
        units = {
            Component.FULL: lease.pages - shared + len(sequence.full) if sequence.full is not None else 0,
            Component.WINDOW: len(run.hold) if run is not None else 0,
            Component.STATE: 1 if sequence.state is not None else 0,
        }
        if run is not None and run.first <= lease.pages:
            first = max(shared, layout.window_first_page(sequence.computed))
            units[Component.WINDOW] += max(0, run.first - first)
        if lease.length > shared * layout.page_size and lease.state_unit(sequence.computed) is not None:
            units[Component.STATE] = 1
        return {component: count for component, count in units.items() if count}

    def new_units(self, session: Session, tier: Tier) -> dict[Component, int]:
        """Units that a spill to a tier would take there: less on the host, where it has a copy."""
        units, sequence = self.parcel_units(session), session.sequence
        copy = sequence.copy if tier is Tier.HOST else None
        if copy is None:
            return units
        for component, count in units.items():
            if component is Component.STATE:
                units[component] -= copy.has_state(sequence.computed)
            else:
                begin, end = copy.span(component, sequence.pages - count, sequence.computed)
                units[component] -= end - begin
        return units

    def came_back(self, session: Session) -> None:
        """Note that the host may have a copy of a session's memory."""
        self.copied.pop(session, None)
        if session.sequence.copy is not None:
            self.copied[session] = None

    def drop_copy(self, session: Session) -> bool:
        """Give up the host's copy of a session; False if there is none, or the session leaves with it."""
        copied = session.sequence.copy is not None
        if copied and session.place is not Place.HOME:
            return False
        del self.copied[session]
        session.sequence.drop_copy()
        return copied

    def spill_tier(self, session: Session, tiers: tuple[Tier, ...] = SPILL_TIERS) -> Tier | None:
        """The first of some tiers with room for a session's parcel, or None; a volatile one has no files."""
        account = session.holder.account
        for tier in tiers:
            if session.volatile and tier is Tier.DISK:
                continue
            needs = self.new_units(session, tier)
            pools = [(self.ledger.pools.get((component, tier)), need) for component, need in needs.items()]
            if pools and all(pool is not None and pool.available(account) >= need for pool, need in pools):
                return tier
        return None

    def leaving_units(self, component: Component, tenant: str | None = None) -> int:
        """Units of a component that are free once everything in flight has settled: of all, or of a tenant.

        Units that retire are on no tenant's account already.
        """
        pool = self.ledger.pool(component)
        leaving = pool.by_kind[Kind.RETIRING] if tenant is None else 0
        for session in self.transits.values():
            if session.place is Place.LEAVING and tenant in (None, session.tenant):
                leaving += session.holder.held[pool.index]
        return leaving
