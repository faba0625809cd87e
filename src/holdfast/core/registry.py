"""What the parts of the scheduler share: sessions, who runs, who waits, who rests, what is in flight.

One table, changed through few verbs, so that a session is always in the lists that its state says it is in.
Every list is ordered: the oldest running turn first, the longest resting session first.
"""

from __future__ import annotations

from collections import deque

from holdfast.core.deadlines import Deadlines
from holdfast.core.errors import SessionExpired, UnknownSession
from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import Kind, Ledger
from holdfast.core.plan import StepPlan, TierMove, UnitCopy
from holdfast.core.policy import Policy
from holdfast.core.prefix import PrefixTree
from holdfast.core.session import Life, Place, Session
from holdfast.core.turn import Turn
from holdfast.core.waiting import Waiting

EXPIRED_KEPT = 4096
SPILL_TIERS = (Tier.HOST, Tier.DISK)

Plan = StepPlan[Turn, Session]


class Event:
    """Something a client or an operator should hear of."""

    __slots__ = ("kind", "reason", "session_id", "tokens", "turn")

    def __init__(self, kind: str, session_id: str, turn: Turn | None, tokens: list[int], reason: str) -> None:
        self.kind = kind
        self.session_id = session_id
        self.turn = turn
        self.tokens = tokens
        self.reason = reason


class Counters:
    """Running totals for metrics."""

    __slots__ = (
        "admitted",
        "cached_tokens",
        "computed_tokens",
        "dropped",
        "generated_tokens",
        "retracts",
        "spills",
    )

    def __init__(self) -> None:
        self.admitted = 0
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.generated_tokens = 0
        self.retracts = 0
        self.spills = 0
        self.dropped = 0


class Registry:
    """The scheduler's shared state."""

    __slots__ = (
        "checkpointed",
        "copies",
        "counters",
        "deadlines",
        "events",
        "expired",
        "flights",
        "forgotten",
        "ledger",
        "moves",
        "now",
        "numbers",
        "policy",
        "queue",
        "resting",
        "running",
        "seals",
        "sessions",
        "tainted",
        "tenants",
        "transits",
        "tree",
        "uncopied",
        "waiting",
    )

    def __init__(self, ledger: Ledger, tree: PrefixTree, policy: Policy) -> None:
        self.ledger = ledger
        self.tree = tree
        self.policy = policy
        self.now = 0.0
        self.numbers = 0
        self.sessions: dict[str, Session] = {}
        self.tenants: dict[str, int] = {}
        self.queue: dict[int, Turn] = {}
        self.waiting = Waiting()
        self.running: list[Session] = []
        self.resting: dict[Session, None] = {}
        self.checkpointed: dict[Session, None] = {}
        self.seals: dict[Session, None] = {}
        self.tainted: dict[Session, None] = {}
        self.transits: dict[int, Session] = {}
        self.flights: deque[Plan] = deque()
        self.copies: list[tuple[UnitCopy, Session]] = []
        self.uncopied: dict[Session, None] = {}
        self.moves: list[TierMove] = []
        self.forgotten: list[int] = []
        self.events: list[Event] = []
        self.deadlines = Deadlines()
        self.expired: dict[str, None] = {}
        self.counters = Counters()

    def number(self) -> int:
        """A fresh number, in order of asking."""
        self.numbers += 1
        return self.numbers

    def find(self, session_id: str) -> Session:
        """The session of that name, or the refusal that says why there is none."""
        session = self.sessions.get(session_id)
        if session is not None:
            return session
        if session_id in self.expired:
            raise SessionExpired(f"session {session_id} was closed after its time to live")
        raise UnknownSession(f"no session {session_id}")

    def emit(self, kind: str, session: Session, turn: Turn | None, reason: str = "") -> None:
        """Note an event for the next settle or plan to report."""
        self.events.append(Event(kind, session.id, turn, [], reason))

    def enter(self, session: Session) -> None:
        """A new session, at rest."""
        self.sessions[session.id] = session
        self.tenants[session.tenant] = self.tenants.get(session.tenant, 0) + 1
        self.rest(session)
        if session.ttl is not None:
            self.watch(session, self.now + session.ttl)

    def rest(self, session: Session) -> None:
        """A session's memory is at rest from now on: it may be spilled. One without memory is not listed."""
        self.resting.pop(session, None)
        if session.sequence.lease is not None:
            self.resting[session] = None
        if session.sequence.points:
            self.checkpointed[session] = None

    def wait(self, session: Session, turn: Turn) -> None:
        """A turn waits to be admitted."""
        self.queue[turn.number] = turn
        self.waiting.add(turn, session.tenant)

    def wait_no_more(self, session: Session, turn: Turn) -> None:
        """A turn is admitted, or over before it was."""
        del self.queue[turn.number]
        self.waiting.remove(turn, session.tenant)

    def over(self, session: Session) -> None:
        """A session's turn is over: it has no deadline, and the session's time to live counts from now on."""
        assert session.turn is not None
        self.deadlines.drop(-session.turn.number)
        session.turn = None
        session.idle_since = self.now

    def watch(self, session: Session, when: float) -> None:
        """Look at a session's idle time at `when`: one such entry each, however many its turns."""
        self.deadlines.add(session.number, when, session.id)

    def watch_turn(self, session: Session, turn: Turn) -> None:
        """Look at a turn when it is due, if ever: before sessions that are due at the same time."""
        if turn.request.deadline is not None:
            self.deadlines.add(-turn.number, turn.request.deadline, session.id)

    def leave(self, session: Session) -> None:
        """Strike a closed session off every list. An executor that never heard of it need not forget it."""
        del self.sessions[session.id]
        self.deadlines.drop(session.number)
        self.tenants[session.tenant] -= 1
        if not self.tenants[session.tenant]:
            del self.tenants[session.tenant]
        for table in (self.resting, self.checkpointed, self.seals, self.tainted):
            table.pop(session, None)
        if session.sequence.fence:
            self.forgotten.append(session.number)

    def copying(self, session: Session) -> bool:
        """Whether a copy that completes a session's memory is to be planned, is in flight, or was lost."""
        if session in self.uncopied or any(owner is session for _, owner in self.copies):
            return True
        return any(owner is session for plan in self.flights for owner in plan.copied)

    def purge_copies(self, session: Session) -> None:
        """Forget copies that were to complete a session's memory and have not been planned."""
        self.copies = [(copy, owner) for copy, owner in self.copies if owner is not session]

    def drop_memory(self, session: Session) -> None:
        """Give up all of a resting session's memory; its tokens stay."""
        fence = self.ledger.step
        self.seals.pop(session, None)
        self.checkpointed.pop(session, None)
        self.resting.pop(session, None)
        self.purge_copies(session)
        self.discard_parcel(session, fence)
        session.sequence.drop_memory()
        if session.life is Life.SEALING and not session.unsettled:
            session.on("end")

    def give_up(self, session: Session) -> None:
        """Memory is short: a resting session's goes, and what it held is computed again."""
        self.counters.dropped += session.sequence.computed > 0
        self.drop_memory(session)

    def discard_parcel(self, session: Session, fence: int) -> None:
        """Give up a session's parcel on another tier, whatever is in flight for it."""
        if session.parcel is not None:
            transit = session.parcel.transit
            self.transits.pop(transit, None)
            self.moves = [move for move in self.moves if move.number != transit]
            session.parcel.discard(fence)
            session.parcel = None
            session.moved("drop")

    def parcel_units(self, session: Session) -> dict[Component, int]:
        """What a session's parcel would hold: its own memory, and what the tree keeps for it alone."""
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

    def spill_tier(self, session: Session, tiers: tuple[Tier, ...] = SPILL_TIERS) -> Tier | None:
        """The first of some tiers with room for what a session takes along, or None."""
        needs = self.parcel_units(session)
        account = session.holder.account
        for tier in tiers:
            pools = [(self.ledger.pools.get((component, tier)), need) for component, need in needs.items()]
            if pools and all(pool is not None and pool.available(account) >= need for pool, need in pools):
                return tier
        return None

    def leaving_units(self, component: Component, tenant: str | None = None) -> int:
        """Units of a component that will be free when what is in flight has settled: of all, or of a tenant.

        What retires is on no tenant's account already.
        """
        pool = self.ledger.pool(component)
        leaving = pool.by_kind[Kind.RETIRING] if tenant is None else 0
        for session in self.transits.values():
            if session.place is Place.LEAVING and tenant in (None, session.tenant):
                leaving += session.holder.held[pool.index]
        return leaving
