"""The registry: every open session by name, and the parts of the scheduler's state.

    queues      which sessions run, rest or are to be sealed, and which turns wait
    in_flight   plans that have not settled, copies for the next one
    moves       memory on its way between tiers
    deadlines   when to look at a session's idle time, or at a turn
    returns     when to bring memory back for a turn that is expected

The planner, the settler, the pressure and the scheduler change it. The engine and the server read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from holdfast.core.deadlines import Deadlines
from holdfast.core.errors import SessionExpired, UnknownSession
from holdfast.core.events import Counters, Event, EventKind
from holdfast.core.in_flight import InFlight, PendingCopy, Plan
from holdfast.core.ledger import Ledger
from holdfast.core.moves import Moves
from holdfast.core.policy import Policy
from holdfast.core.prefix import PrefixTree
from holdfast.core.queues import Queues
from holdfast.core.retention import Retention
from holdfast.core.session import Life, LifeEvent, PlaceEvent, Session
from holdfast.core.tiers import finish_spill
from holdfast.core.turn import Turn

__all__ = ["EXPIRED_KEPT", "Event", "Plan", "Registry"]

EXPIRED_KEPT = 4096


class Registry:
    """The scheduler's shared state.

    `tenants` counts open sessions of tenants, `volatile` those that count towards no limit; `expired` are
    names of closed ones.
    """

    __slots__ = (
        "counters",
        "deadlines",
        "events",
        "expired",
        "in_flight",
        "ledger",
        "moves",
        "now",
        "numbers",
        "policy",
        "queues",
        "returns",
        "sessions",
        "tenants",
        "tree",
        "volatile",
    )

    def __init__(self, ledger: Ledger, tree: PrefixTree, policy: Policy) -> None:
        self.ledger = ledger
        self.tree = tree
        self.policy = policy
        self.now = 0.0
        self.numbers = 0
        self.sessions: dict[str, Session] = {}
        self.tenants: dict[str, int] = {}
        self.volatile = 0
        self.expired: dict[str, None] = {}
        self.deadlines = Deadlines()
        self.returns = Deadlines()
        self.queues = Queues()
        self.in_flight = InFlight()
        self.moves = Moves(ledger, tree)
        self.events: list[Event] = []
        self.counters = Counters()

    # --- what the engine and the server read ------------------------------------------------------

    @property
    def queue(self) -> Mapping[int, Turn]:
        """Waiting turns by number."""
        return self.queues.waiting.turns

    @property
    def running(self) -> Sequence[Session]:
        """Sessions whose turn runs, the oldest first."""
        return self.queues.running

    @property
    def listening(self) -> Mapping[Session, None]:
        """Sessions whose turn is open, or was and is about to run."""
        return self.queues.listening

    @property
    def unheard(self) -> bool:
        """Whether a plan may find some input of an open turn to compute."""
        return self.queues.unheard

    @property
    def resting(self) -> Mapping[Session, None]:
        """Sessions whose memory may be spilled, the longest resting first."""
        return self.queues.resting

    @property
    def recalled(self) -> Mapping[Session, None]:
        """Sessions whose memory a verb waits for: it is away, or came back a moment ago."""
        return self.queues.recalled

    @property
    def unfetched(self) -> bool:
        """Whether a plan may find room for memory that is expected to be needed."""
        return self.queues.unfetched

    @property
    def seals(self) -> Mapping[Session, None]:
        """Sessions whose last token is yet to be computed."""
        return self.queues.seals

    @property
    def overdue(self) -> bool:
        """Whether sessions or turns are due that the last tick left to the next."""
        return self.deadlines.is_due(self.now)

    def seals_due(self, now: float) -> bool:
        """Whether the last token of a session is to be computed now, rather than left to its next turn."""
        oldest = next(iter(self.queues.seals), None)
        return oldest is not None and max(now, self.now) - oldest.idle_since >= self.policy.seal_seconds

    @property
    def flights(self) -> deque[Plan]:
        """Plans that have not settled, the oldest first."""
        return self.in_flight.plans

    @property
    def copies(self) -> Sequence[PendingCopy]:
        """Copies that are not in a plan yet."""
        return self.in_flight.copies

    @property
    def transits(self) -> Mapping[int, Session]:
        """Sessions whose memory is on its way between tiers, by the number of the transit."""
        return self.moves.transits

    def copying(self, session: Session) -> bool:
        """Whether a session's memory is incomplete until a copy has settled."""
        return self.in_flight.is_copying(session)

    # --- sessions ---------------------------------------------------------------------------------

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
            raise SessionExpired(f"session {session_id} has expired: it was idle for its time to live")
        raise UnknownSession(f"session {session_id} does not exist")

    def emit(self, kind: EventKind, session: Session, turn: Turn | None, reason: str = "") -> None:
        """Add an event for the next settle or plan to report."""
        self.events.append(Event(kind, session.id, turn, [], reason))

    def enter(self, session: Session) -> None:
        """Add a new session: it has no memory, so it is in no list."""
        self.sessions[session.id] = session
        if session.volatile:
            self.volatile += 1
        else:
            self.tenants[session.tenant] = self.tenants.get(session.tenant, 0) + 1
        if session.retention.ttl is not None:
            self.watch(session, self.now + session.retention.ttl)

    def retain(self, session: Session, retention: Retention) -> None:
        """Keep a session like this from now on; an idle one is used by that."""
        session.retention = retention
        if session.turn is None:
            session.idle_since = self.now
            if session in self.queues.resting:
                self.queues.rest(session)
        self.deadlines.drop(session.number)
        assert retention.ttl is not None, "a session has a time to live"
        self.watch(session, self.now + retention.ttl)

    def leave(self, session: Session) -> None:
        """Remove a closed session."""
        del self.sessions[session.id]
        self.deadlines.drop(session.number)
        self.returns.drop(session.number)
        if session.volatile:
            self.volatile -= 1
        else:
            self.tenants[session.tenant] -= 1
            if not self.tenants[session.tenant]:
                del self.tenants[session.tenant]
        self.queues.leave(session)
        self.moves.copied.pop(session, None)
        self.in_flight.forget(session)

    def expire(self, session: Session) -> None:
        """Remember the name of a session that is closed for being idle; the oldest names are forgotten."""
        self.expired[session.id] = None
        if len(self.expired) > EXPIRED_KEPT:
            del self.expired[next(iter(self.expired))]

    def over(self, session: Session) -> None:
        """End a session's turn: its deadline is dropped, and the session's idle time begins."""
        assert session.turn is not None
        self.deadlines.drop(-session.turn.number)
        session.turn = None
        session.idle_since = self.now

    def watch(self, session: Session, when: float) -> None:
        """Look at a session's idle time at `when`: one such entry each, however many its turns."""
        self.deadlines.add(session.number, when, session.id)

    def watch_turn(self, session: Session, turn: Turn) -> None:
        """Look at a turn at its deadline, if it has one: before sessions that are due at the same time."""
        if turn.request.deadline is not None:
            self.deadlines.add(-turn.number, turn.request.deadline, session.id)

    def watch_return(self, session: Session) -> None:
        """Bring a session's memory back a while before its turn is expected."""
        when = session.expected - self.policy.prefetch_seconds
        self.returns.add(session.number, when, session.id)

    def has_returned(self, session: Session) -> None:
        """The turn that was expected is there."""
        session.expected = 0.0
        self.returns.drop(session.number)
        self.queues.expected.pop(session, None)

    # --- memory -----------------------------------------------------------------------------------

    def has_left(self, session: Session) -> None:
        """A session's memory is on another tier: its units on the device are given up."""
        assert session.parcel is not None
        finish_spill(session.sequence, session.parcel)
        session.moved(PlaceEvent.SETTLE)
        self.counters.spills += 1
        self.emit(EventKind.SPILLED, session, None)

    def drop_memory(self, session: Session) -> None:
        """Give up all of a resting session's memory; its tokens stay."""
        self.queues.empty(session)
        self.in_flight.purge_copies(session)
        self.moves.discard(session)
        session.sequence.drop_memory()
        if session.life is Life.SEALING and not session.unsettled:
            session.on(LifeEvent.END)

    def give_up(self, session: Session) -> None:
        """Drop a resting session to recomputation because memory is short."""
        self.counters.dropped += session.sequence.computed > 0
        self.drop_memory(session)
