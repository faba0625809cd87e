"""The scheduler: everything that may happen to a session, and the steps that carry it out.

    plan   = scheduler.plan(budget, now)         rows, copies and moves for an executor
    events = scheduler.settle(plan, result, now) events for clients

Between the two come the verbs of clients: open, submit, abort, interrupt, rewind, compact, fork, spill and
close; and listen, hear and commit, for open turns (listening.py). Each
either succeeds or raises a `Refused` and changes nothing. At most two plans are in flight. Time is
an argument everywhere; a clock that jumps back stands still here.
"""

from __future__ import annotations

from holdfast.core import errors
from holdfast.core.audit import Audit, Finding
from holdfast.core.cuts import Cuts
from holdfast.core.events import Event, EventKind
from holdfast.core.fallback import resume_length
from holdfast.core.healing import Healing
from holdfast.core.in_flight import Plan
from holdfast.core.layout import Tier
from holdfast.core.ledger import Kind, Ledger, OutOfUnits
from holdfast.core.listening import Listening
from holdfast.core.plan import StepResult
from holdfast.core.planner import Planner, Proposer
from holdfast.core.policy import Policy
from holdfast.core.prefix import PrefixTree
from holdfast.core.pressure import OnDisk, Pressure
from holdfast.core.recalls import Recalls
from holdfast.core.registry import Registry
from holdfast.core.requirements import (
    require_fit,
    require_free,
    require_history,
    require_known_tokens,
    require_length,
    require_new_session,
)
from holdfast.core.retention import DEFAULT, Retention
from holdfast.core.session import Life, LifeEvent, Place, PlaceEvent, Session
from holdfast.core.settler import Settler
from holdfast.core.sharing import publish
from holdfast.core.tiers import adopt
from holdfast.core.turn import KEEP_ALL, Ending, Turn, TurnEvent, TurnRequest, TurnState

FLIGHTS_MAX = 2


class Scheduler:
    """The whole core behind a few verbs."""

    __slots__ = (
        "cuts",
        "healing",
        "listening",
        "planner",
        "pressure",
        "recalls",
        "registry",
        "settler",
        "strict",
    )

    def __init__(
        self,
        ledger: Ledger,
        policy: Policy,
        propose: Proposer | None = None,
        strict: bool = False,
        state_budget: int = 1 << 30,
        on_disk: OnDisk | None = None,
    ) -> None:
        ledger.limit_tenants(policy.limit)
        self.registry = Registry(ledger, PrefixTree(ledger, state_budget), policy)
        self.pressure = Pressure(self.registry, on_disk)
        self.cuts = Cuts(self.registry, self.pressure)
        self.recalls = Recalls(self.registry, self.pressure)
        self.planner = Planner(self.registry, self.pressure, propose)
        self.listening = Listening(self.registry, self.planner.prompts)
        self.settler = Settler(self.registry)
        self.healing = Healing(self.registry, self.settler)
        self.strict = strict

    @property
    def _drafting(self) -> bool:
        """Whether rows may carry drafts, which need a state slot more."""
        return self.planner.propose is not None

    # --- sessions ---------------------------------------------------------------------------------

    def open(
        self,
        session_id: str,
        tenant: str,
        now: float,
        retention: Retention = DEFAULT,
        volatile: bool = False,
    ) -> Session:
        """Open a named session. It shares prefixes with sessions of its `tenant` alone."""
        self.tick(now)
        return self._open(
            session_id, tenant, retention.with_default(self.registry.policy.session_ttl), volatile
        )

    def _open(
        self, session_id: str, tenant: str, retention: Retention | None, volatile: bool = False
    ) -> Session:
        registry = self.registry
        require_new_session(registry, session_id, tenant, volatile)
        session = Session(
            registry.ledger, session_id, tenant, registry.number(), registry.now, retention, volatile
        )
        registry.expired.pop(session_id, None)
        registry.enter(session)
        return session

    def recover(
        self,
        session_id: str,
        tenant: str,
        now: float,
        retention: Retention,
        history: list[tuple[TurnRequest, list[int]]],
    ) -> Session:
        """Open a session that has a history: its turns, each with what was generated. Nothing is computed."""
        for request, generated in history:
            require_known_tokens(self.registry, request.turn_id, request.tokens)
            require_known_tokens(self.registry, request.turn_id, generated)
        session = self.open(session_id, tenant, now, retention)
        tokens = session.sequence.tokens
        for request, generated in history:
            turn = Turn(request, session_id, self.registry.number(), now, session.holder)
            turn.known_before = len(tokens)
            turn.generated = len(generated)
            turn.state = TurnState.FINISHED
            tokens.extend(request.tokens)
            tokens.extend(generated)
            session.boundaries.append(len(tokens))
            session.last = turn
        return session

    def adopt(self, session_id: str, length: int) -> bool:
        """Account for the first `length` tokens of a session, which are in a file; False without room."""
        registry = self.registry
        session = registry.find(session_id)
        if not registry.ledger.has(Tier.DISK):
            return False
        lease = registry.tree.lease(registry.tree.match(session.tenant, b"", 0), session_id)
        transit = registry.ledger.holder(Kind.TRANSIT, session_id, session.tenant)
        registry.ledger.purpose = "adopt"
        try:
            session.parcel = adopt(session.sequence, lease, length, transit, registry.number())
        except OutOfUnits:
            lease.release()
            return False
        session.moved(PlaceEvent.ADOPT)
        registry.queues.rest(session)
        return True

    def retain(self, session_id: str, retention: Retention, now: float) -> None:
        """Keep a session like this from now on. It counts as use: an idle session's idle time begins anew."""
        self.tick(now)
        registry = self.registry
        session = registry.find(session_id)
        if session.one_shot:
            raise errors.UnknownSession(f"{session_id} is a one-shot request, not a session")
        registry.retain(session, retention.with_default(registry.policy.session_ttl))

    def close(self, session_id: str, now: float) -> None:
        """Close a session. A turn in flight is rolled back first, as soon as its rows have settled."""
        self.tick(now)
        session = self.registry.find(session_id)
        if session.life is Life.CLOSING:
            return
        self._close(session, "closed")

    def _close(self, session: Session, reason: str) -> None:
        turn = session.turn
        if turn is not None and session.life is Life.QUEUED:
            self._drop_waiting(session, turn, reason, None)
        if session.unsettled or session.life is Life.RUNNING:
            session.on(LifeEvent.DEFER_CLOSE)
            if turn is not None and not turn.over:
                turn.will_end(TurnEvent.ABORT, reason)
                if not session.unsettled:
                    self.settler.end(session)
            return
        self.settler.close(session, reason)

    # --- turns ------------------------------------------------------------------------------------

    def submit(self, session_id: str, request: TurnRequest, now: float, keep: int | None = None) -> Turn:
        """Queue a turn on a session. Refusals change nothing.

        With `keep` the turn follows that many tokens of the history, and the rest of it is cut.
        """
        self.tick(now)
        session = require_free(self.registry.find(session_id))
        first = request.computes_from
        if first is not None and first < session.sequence.computed:
            raise errors.AlreadyComputed(
                f"session {session_id} has computed {session.sequence.computed} tokens, past {first}"
            )
        known = session.sequence.known if keep is None else keep
        require_fit(self.registry, session.tenant, known, request, self._drafting)
        if known != session.sequence.known:
            require_history(session, known)
            self.cuts.require_idle(session)
            self.cuts.cut(session, known)
            session.boundaries = session.boundaries_below(known)
            session.last = None
        if session.volatile:
            self._share_history(session)
        return self._enqueue(session, request)

    def listen(self, session_id: str, request: TurnRequest, now: float) -> Turn:
        """Begin an open turn: what is known of its input is computed ahead, until it is committed or over."""
        self.tick(now)
        registry = self.registry
        session = require_free(self.registry.find(session_id))
        require_length(registry, session.tenant, session.sequence.known, request, self._drafting)
        if len(registry.queues.listening) >= registry.policy.queue_max:
            raise errors.QueueFull(f"the queue is full: {registry.policy.queue_max} turns are open")
        return self._enqueue(session, request, is_open=True)

    def hear(self, session_id: str, turn_id: str, start: int, tokens: tuple[int, ...], now: float) -> None:
        """Let the input of an open turn be `tokens` from its token `start` on: more of it, or a revision."""
        self.tick(now)
        session = self.registry.find(session_id)
        turn = self.listening.find(session, turn_id)
        self.listening.hear(session, turn, start, tokens, self._drafting)

    def commit(self, session_id: str, turn_id: str, request: TurnRequest, now: float) -> Turn:
        """The input of an open turn is complete: it goes on as the turn that `request` describes."""
        self.tick(now)
        session = self.registry.find(session_id)
        turn = self.listening.find(session, turn_id)
        require_fit(self.registry, session.tenant, turn.known_before, request, self._drafting)
        self.listening.commit(session, turn, request)
        return turn

    def _share_history(self, session: Session) -> None:
        """Let requests that come during a turn of a volatile session lean on the history before it.

        A fork has to wait until the turn is over; the same conversation may be sent twice at once. Only where
        every length can be resumed: elsewhere this would cost checkpoints.
        """
        registry, sequence = self.registry, session.sequence
        at_home = sequence.lease is not None and session.place is Place.HOME and not session.unsettled
        copying = registry.in_flight.is_copying(session)
        if at_home and not copying and registry.ledger.layout.cuts_anywhere:
            publish(registry.tree, sequence, sequence.computed, rank=1)

    def request(self, tenant: str, request: TurnRequest, now: float) -> Turn:
        """Queue a request of its own: a session of one turn, named after it, that closes when it ends."""
        self.tick(now)
        if request.turn_id in self.registry.sessions:
            raise errors.TurnExists(f"a request or session {request.turn_id} is open already")
        require_fit(self.registry, tenant, 0, request, self._drafting)
        return self._enqueue(self._open(request.turn_id, tenant, None), request)

    def _enqueue(self, session: Session, request: TurnRequest, is_open: bool = False) -> Turn:
        registry = self.registry
        holder = registry.ledger.holder(Kind.TURN, f"{request.turn_id} of {session.id}", session.tenant)
        turn = Turn(request, session.id, registry.number(), registry.now, holder, is_open)
        turn.known_before = session.sequence.known
        session.on(LifeEvent.SUBMIT)
        session.turn = turn
        registry.has_returned(session)
        registry.queues.seals.pop(session, None)
        registry.queues.wait(session, turn)
        registry.watch_turn(session, turn)
        return turn

    def abort(
        self, session_id: str, turn_id: str, now: float, keep: int | None = None, reason: str = "abort"
    ) -> None:
        """End a turn in flight: rolled back, or with its first `keep` generated tokens (`KEEP_ALL`: all)."""
        self.tick(now)
        session = self.registry.find(session_id)
        turn = session.turn
        if turn is None or turn.request.turn_id != turn_id or session.life is Life.CLOSING:
            raise errors.UnknownTurn(f"turn {turn_id} is not in flight on session {session_id}")
        self._abort(session, turn, keep, reason)

    def _abort(self, session: Session, turn: Turn, keep: int | None, reason: str) -> None:
        if turn.is_open:
            keep = None  # What was not committed was not said.
        if keep == KEEP_ALL and turn.settled is not None:
            keep = min(turn.settled, turn.generated)
        if keep is not None and keep != KEEP_ALL and not 0 <= keep <= turn.generated:
            raise errors.NothingToKeep(f"{keep} tokens cannot be kept: {turn.generated} were generated")
        if session.life is Life.QUEUED:
            self._drop_waiting(session, turn, reason, keep)
            if session.one_shot:
                self.settler.close(session, reason)
            return
        if turn.ending is None or turn.ending.event is TurnEvent.RETRACT:
            turn.will_end(TurnEvent.ABORT, reason, keep)
            if not session.unsettled:
                self.settler.end(session)

    def _drop_waiting(self, session: Session, turn: Turn, reason: str, keep: int | None) -> None:
        """Abort a turn that is waiting. One that ran before and was retracted may keep what it generated."""
        registry, sequence = self.registry, session.sequence
        registry.queues.wait_no_more(session, turn)
        self.planner.prompts.forget(turn)
        turn.on(TurnEvent.ABORT)
        session.on(LifeEvent.END)
        registry.over(session)
        ran = sequence.known > turn.known_before
        if ran and keep is not None:
            known = sequence.known if keep == KEEP_ALL else turn.input_end + keep
            turn.generated = known - turn.input_end
            self.cuts.cut(session, known)
            session.boundaries.append(known)
            session.last = turn
        elif ran:
            self.cuts.cut(session, turn.known_before)
            if not turn.is_open:
                session.last = None
        registry.emit(EventKind.ABORTED, session, turn, reason)

    def interrupt(self, session_id: str, now: float, keep: int | None, turn_id: str | None = None) -> None:
        """Barge in: end the turn in flight, or cut the last finished one if no other has begun."""
        self.tick(now)
        session = self.registry.find(session_id)
        turn = session.turn
        if turn is not None:
            if turn_id is not None and turn.request.turn_id != turn_id:
                raise errors.UnknownTurn(f"turn {turn_id} is not the one in flight on session {session_id}")
            if session.life is Life.CLOSING:
                raise errors.SessionBusy(f"session {session_id} is being closed")
            self._abort(session, turn, keep, "interrupt")
            return
        self.cuts.interrupt(session, keep, turn_id)

    def rewind(self, session_id: str, turns: int, now: float) -> None:
        """Go back to the end of turn `turns`: that many turns remain."""
        self.tick(now)
        self.cuts.rewind(self.registry.find(session_id), turns)

    def compact(
        self,
        session_id: str,
        first: int,
        last: int,
        tokens: tuple[int, ...],
        now: float,
        keep: int | None = None,
    ) -> int:
        """Replace turns `first` to `last`, counted from 1, by one turn of `tokens` without an answer.

        With `keep` that many tokens of turn `first` stay before `tokens`, which are fewer than those that go.
        The turns after them stay, word for word. Their memory goes, because it depends on what was before:
        the next turn computes it again. Returns how many tokens that is.
        """
        self.tick(now)
        return self.cuts.compact(self.registry.find(session_id), first, last, tokens, keep)

    def fork(
        self, session_id: str, new_id: str, now: float, turns: int | None = None, known: int | None = None
    ) -> Session:
        """A new session that goes on from the end of an earlier turn, or of the last; memory is shared.

        With `known` it goes on from the first `known` tokens, wherever turns end.
        """
        self.tick(now)
        registry = self.registry
        parent = registry.find(session_id)
        turns = len(parent.boundaries) if turns is None else turns
        if not 0 <= turns <= len(parent.boundaries):
            raise errors.UnknownBoundary(f"session {session_id} has only {len(parent.boundaries)} turns")
        boundaries = parent.boundaries[:turns] if known is None else parent.boundaries_below(known)
        if known is None:
            known = boundaries[-1] if boundaries else 0
        require_history(parent, known)
        require_new_session(registry, new_id, parent.tenant, parent.volatile)
        self.cuts.require_idle(parent)
        child = self._open(new_id, parent.tenant, parent.retention, parent.volatile)
        child.boundaries = boundaries
        child.sequence.tokens.extend(parent.sequence.tokens.slice(0, known))
        # Where nothing of the parent's can be resumed from, the tree may have some.
        resumed = resume_length(parent.sequence, known)
        shareable = parent.sequence.lease is not None and parent.place is Place.HOME and resumed
        if shareable and not registry.in_flight.has_copies_of(parent):
            self.cuts.share(parent, child, known)
        return child

    def spill(self, session_id: str, now: float, tier: Tier | None = None) -> bool:
        """Move an idle session's memory to another tier by hand, or to that one; False without room."""
        self.tick(now)
        session = self.registry.find(session_id)
        self.cuts.require_idle(session)
        return session.place is Place.HOME and self.pressure.spill(session, tier)

    def restore(self, session_id: str, now: float) -> bool:
        """Bring an idle session's memory back by hand; False if it is not away, or there is no room now."""
        self.tick(now)
        session = self.registry.find(session_id)
        self.cuts.require_idle(session)
        if session.place is not Place.AWAY:
            return False
        try:
            return self.pressure.restore(session)
        except OutOfUnits:
            return False

    def ready(self, session_id: str, known: int, forks: bool, now: float) -> bool:
        """Whether a cut or a fork at `known` tokens can use a session's memory now, or never will."""
        self.tick(now)
        session = self.registry.sessions.get(session_id)
        return session is None or self.recalls.ready(session, known, forks)

    def arrive(self, number: int, arrived: bool, now: float) -> None:
        """Report the outcome of a move that was still under way when its step settled."""
        self.tick(now)
        self.settler.arrive(number, arrived)

    def durable(self, session_id: str) -> None:
        """The last turn of a session is durable: its mark may go."""
        session = self.registry.sessions.get(session_id)
        if session is not None and (session.turn is None or session.turn.is_open):
            session.durable = True
            self.settler.let_go(session)

    def flush(self) -> None:
        """Evict every prefix without a lease. Sessions keep their memory."""
        self.registry.tree.flush()

    # --- steps ------------------------------------------------------------------------------------

    def plan(self, budget: int, now: float) -> Plan:
        """The next step, of at most `budget` tokens; empty if there is nothing to do or all must wait."""
        self.tick(now)
        registry, plans = self.registry, self.registry.in_flight.plans
        assert len(plans) < FLIGHTS_MAX, "settle a plan first"
        registry.ledger.step += 1
        plan: Plan = Plan(registry.ledger.step)
        held = registry.queues.held
        self.planner.fill(plan, budget)
        stuck = not (plan or plans or registry.moves.transits or held)
        if stuck and (registry.queues.running or registry.queues.waiting.turns):
            self._unblock(plan, budget)
        plans.append(plan)
        return plan

    def _unblock(self, plan: Plan, budget: int) -> None:
        """Nothing could be planned, nothing is in flight: take back the youngest turn, and try again.

        As long as that does not help, sessions at rest lose their memory, one after the other.
        """
        running = self.registry.queues.running
        if len(running) > 1:
            session = running[-1]
            assert session.turn is not None
            session.turn.ending = Ending(TurnEvent.RETRACT, "memory is short")
            self.settler.end(session)
        self.planner.fill(plan, budget)
        for session in self.pressure.last_resorts():
            if plan:
                return
            self.registry.give_up(session)
            self.planner.fill(plan, budget)

    def settle(self, plan: Plan, result: StepResult, now: float) -> list[Event]:
        """Apply the result of the oldest plan in flight; returns the events since the last call."""
        self.tick(now)
        plans = self.registry.in_flight.plans
        if not plans or plans[0] is not plan:
            raise errors.IllegalTransition(f"step {plan.step} is not the oldest in flight")
        plans.popleft()
        self.settler.settle(plan, result)
        self.healing.suffer(self.audit.census() if self.strict else self.audit.tick(len(plan.rows)))
        return self.take_events()

    def take_events(self) -> list[Event]:
        """The events since the last call: verbs of clients have events too."""
        events, self.registry.events = self.registry.events, []
        return events

    def tick(self, now: float) -> None:
        """Advance the clock: close sessions that were idle for too long, abort turns past their deadline."""
        registry = self.registry
        registry.now = now = max(now, registry.now)
        again: list[tuple[Session, float]] = []
        for number, session_id in registry.deadlines.due(now):
            session = registry.sessions[session_id]
            turn = session.turn
            if session.number == number:
                ttl = session.retention.ttl
                assert ttl is not None, "only named sessions are watched"
                idle = session.life in (Life.IDLE, Life.SEALING)
                due = (session.idle_since if idle else now) + ttl
                if idle and due <= now:
                    registry.expire(session)
                    self._close(session, "expired")
                else:
                    again.append((session, due))
            elif session.life is not Life.CLOSING:
                assert turn is not None and turn.number == -number, "only a turn in flight has a deadline"
                keep = turn.request.on_abort
                self._abort(session, turn, keep if keep is None else min(keep, turn.generated), "deadline")
        for session, due in again:
            registry.watch(session, due)
        self.planner.prefetch.due()

    # --- the audit --------------------------------------------------------------------------------

    @property
    def audit(self) -> Audit:
        """Counts holders and units."""
        return self.healing.audit

    def recount(self) -> list[Finding]:
        """A whole census now, for an idle moment. Findings are healed; owners at fault lose their memory."""
        return self.healing.census()

    def recount_some(self, budget: int) -> bool:
        """A part of a census, about `budget` units, for an idle moment; whether that completed it."""
        self.healing.suffer(self.audit.slice(budget))
        return self.audit.between_rounds
