"""The scheduler: everything that may happen to a session, and the steps that carry it out.

    plan   = scheduler.plan(budget, now)         rows, copies and moves for an executor
    events = scheduler.settle(plan, result, now) what clients should hear

Between the two come the verbs of clients: open, submit, abort, interrupt, rewind, fork, spill, close. Each
either does what it says or raises a `Refused` and changes nothing. At most two plans are in flight. Time is
an argument everywhere; a clock that jumps back stands still here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.core import errors
from holdfast.core.audit import Audit, Finding, Owner
from holdfast.core.fallback import fall_back, resume_length
from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import Kind, Ledger, OutOfUnits
from holdfast.core.plan import StepResult
from holdfast.core.planner import Planner, Proposer
from holdfast.core.policy import Policy
from holdfast.core.prefix import PrefixTree
from holdfast.core.pressure import OnDisk, Pressure
from holdfast.core.registry import EXPIRED_KEPT, Event, Plan, Registry
from holdfast.core.session import Life, Place, Session
from holdfast.core.settler import Settler
from holdfast.core.sharing import fork
from holdfast.core.tiers import adopt
from holdfast.core.tokens import all_known
from holdfast.core.turn import KEEP_ALL, Ending, Turn, TurnRequest, TurnState

FLIGHTS_MAX = 2


class Scheduler:
    """The whole core behind a few verbs."""

    __slots__ = ("audit", "planner", "pressure", "registry", "settler", "strict")

    def __init__(
        self,
        ledger: Ledger,
        policy: Policy,
        propose: Proposer | None = None,
        strict: bool = False,
        state_budget: int = 1 << 30,
        on_disk: OnDisk | None = None,
    ) -> None:
        ledger.limit = policy.limit
        self.registry = Registry(ledger, PrefixTree(ledger, state_budget), policy)
        self.pressure = Pressure(self.registry, on_disk)
        self.planner = Planner(self.registry, self.pressure, propose)
        self.settler = Settler(self.registry)
        self.audit = Audit(ledger, self.registry.tree, self._owners)
        self.strict = strict

    # --- sessions ---------------------------------------------------------------------------------

    def open(self, session_id: str, tenant: str, now: float, ttl: float | None = None) -> Session:
        """Open a named session. `tenant` is who asked, and the root of the prefixes it may share."""
        self.tick(now)
        return self._open(session_id, tenant, ttl if ttl is not None else self.registry.policy.session_ttl)

    def _require_new(self, session_id: str, tenant: str) -> None:
        """Raise unless a session of this name may be opened."""
        registry, policy = self.registry, self.registry.policy
        if session_id in registry.sessions:
            raise errors.SessionExists(f"session {session_id} is open already")
        if len(registry.sessions) >= policy.sessions_max:
            raise errors.TooManySessions(f"{policy.sessions_max} sessions are open on this server")
        if registry.tenants.get(tenant, 0) >= policy.tenant_sessions_max:
            raise errors.TooManySessions(f"{policy.tenant_sessions_max} sessions of this tenant are open")

    def _open(self, session_id: str, tenant: str, ttl: float | None) -> Session:
        self._require_new(session_id, tenant)
        registry = self.registry
        session = Session(registry.ledger, session_id, tenant, registry.number(), registry.now, ttl)
        registry.expired.pop(session_id, None)
        registry.enter(session)
        return session

    def recover(
        self,
        session_id: str,
        tenant: str,
        now: float,
        ttl: float | None,
        history: list[tuple[TurnRequest, list[int]]],
    ) -> Session:
        """Open a session that has a history: its turns, each with what was generated. Nothing is computed."""
        for request, generated in history:
            self._require_known(request.turn_id, request.tokens)
            self._require_known(request.turn_id, generated)
        session = self.open(session_id, tenant, now, ttl)
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
        """The first `length` tokens of a revived session lie in a file; False if there is no room for it."""
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
        session.moved("adopt")
        registry.rest(session)
        return True

    def close(self, session_id: str, now: float) -> None:
        """Close a session. A turn in flight is rolled back first, as soon as its rows have settled."""
        self.tick(now)
        session = self.registry.find(session_id)
        if session.life is Life.CLOSING:
            return
        self._close(session, "closed")

    def _close(self, session: Session, reason: str) -> None:
        registry = self.registry
        turn = session.turn
        if turn is not None and session.life is Life.QUEUED:
            self._drop_waiting(session, turn, "abort", reason, None)
        if session.unsettled or session.life is Life.RUNNING:
            session.on("defer close")
            if turn is not None and not turn.over:
                turn.will_end("abort", reason)
                if not session.unsettled:
                    self.settler.end(session)
            return
        registry.seals.pop(session, None)
        self.settler.close(session, reason)

    # --- turns ------------------------------------------------------------------------------------

    def submit(self, session_id: str, request: TurnRequest, now: float) -> Turn:
        """Queue a turn on a session. Refusals change nothing."""
        self.tick(now)
        session = self.registry.find(session_id)
        if session.life not in (Life.IDLE, Life.SEALING):
            turn = session.turn.request.turn_id if session.turn is not None else "none"
            raise errors.SessionBusy(f"session {session_id} is {session.state}, with turn {turn}")
        first = request.computes_from
        if first is not None and first < session.sequence.computed:
            raise errors.AlreadyComputed(
                f"session {session_id} has computed {session.sequence.computed} tokens, past {first}"
            )
        self._require_fit(session.tenant, session.sequence.known, request)
        return self._enqueue(session, request)

    def request(self, tenant: str, request: TurnRequest, now: float) -> Turn:
        """Queue a request of its own: a session of one turn, named after it, that closes when it ends."""
        self.tick(now)
        if request.turn_id in self.registry.sessions:
            raise errors.TurnExists(f"a request or session {request.turn_id} is open already")
        self._require_fit(tenant, 0, request)
        return self._enqueue(self._open(request.turn_id, tenant, None), request)

    def _require_fit(self, tenant: str, known: int, request: TurnRequest) -> None:
        """Raise unless a turn may follow `known` tokens, and may wait."""
        registry, policy = self.registry, self.registry.policy
        if not request.tokens and not (request.goes_on and known):
            raise errors.EmptyTurn("the turn brings no tokens")
        if request.max_tokens < 1:
            raise errors.BadMaxTokens(f"max_tokens must be at least 1, not {request.max_tokens}")
        self._require_known(request.turn_id, request.tokens)
        total = known + len(request.tokens) + request.max_tokens
        if total > policy.context_length:
            raise errors.ContextExceeded(total, policy.context_length)
        self._require_room(tenant, total)
        if len(registry.queue) >= policy.queue_max:
            raise errors.QueueFull(f"{policy.queue_max} turns are waiting")

    def _require_known(self, turn_id: str, tokens: Sequence[int]) -> None:
        """Raise unless the tokens of a turn are in the vocabulary. Every token that comes from outside, of a
        client or of a journal, passes here before a row can carry it; the settler checks what is sampled."""
        vocabulary = self.registry.policy.vocabulary
        if not all_known(tokens, vocabulary):
            raise errors.UnknownToken(turn_id, vocabulary)

    def _enqueue(self, session: Session, request: TurnRequest) -> Turn:
        registry = self.registry
        holder = registry.ledger.holder(Kind.TURN, f"{request.turn_id} of {session.id}", session.tenant)
        turn = Turn(request, session.id, registry.number(), registry.now, holder)
        turn.known_before = session.sequence.known
        session.on("submit")
        session.turn = turn
        registry.seals.pop(session, None)
        registry.wait(session, turn)
        registry.watch_turn(session, turn)
        return turn

    def _require_room(self, tenant: str, total: int) -> None:
        """Refuse a turn that could not run even with all of memory, or of its tenant's part, to itself."""
        ledger = self.registry.ledger
        layout = ledger.layout
        window_pages = 2 * (layout.pages_for(layout.window) + 1) + 1
        needs = {
            Component.FULL: layout.pages_for(total),
            Component.WINDOW: min(layout.pages_for(total), window_pages),
            Component.STATE: 3 if self.planner.propose is not None else 2,
        }
        for component in layout.components:
            pool = ledger.pool(component)
            available = pool.size - len(pool.quarantine)
            if needs[component] > available:
                raise errors.TooLarge(component.name.lower(), needs[component], available)
            limit = ledger.account(tenant).limits[pool.index]
            if needs[component] > limit:
                raise errors.OverQuota(component.name.lower(), needs[component], limit)

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
        if keep is not None and keep != KEEP_ALL and not 0 <= keep <= turn.generated:
            raise errors.NothingToKeep(f"{keep} tokens are to be kept, {turn.generated} were generated")
        if session.life is Life.QUEUED:
            self._drop_waiting(session, turn, "abort", reason, keep)
            if session.one_shot:
                self.settler.close(session, reason)
            return
        if turn.ending is None or turn.ending.event == "retract":
            turn.will_end("abort", reason, keep)
            if not session.unsettled:
                self.settler.end(session)

    def _drop_waiting(self, session: Session, turn: Turn, event: str, reason: str, keep: int | None) -> None:
        """End a turn that is waiting. One that ran before and was retracted may keep what it generated."""
        registry, sequence = self.registry, session.sequence
        registry.wait_no_more(session, turn)
        self.planner.forget(turn)
        turn.on(event)
        session.on("end")
        registry.over(session)
        ran = sequence.known > turn.known_before
        if ran and keep is not None:
            known = sequence.known if keep == KEEP_ALL else turn.input_end + keep
            turn.generated = known - turn.input_end
            self._cut(session, known)
            session.boundaries.append(known)
            session.last = turn
        elif ran:
            self._cut(session, turn.known_before)
            session.last = None
        registry.emit("aborted" if event == "abort" else "failed", session, turn, reason)

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
        last = session.last
        if last is None or (turn_id is not None and last.request.turn_id != turn_id):
            raise errors.UnknownTurn(f"session {session_id} has no turn to interrupt")
        if keep is not None and keep != KEEP_ALL and not 0 <= keep <= last.generated:
            raise errors.NothingToKeep(f"{keep} tokens are to be kept, {last.generated} were generated")
        self._require_idle(session)
        if keep == KEEP_ALL:
            return
        known = last.known_before if keep is None else last.input_end + keep
        self._cut(session, known)
        session.boundaries.pop()
        if keep is None:
            session.last = None
        else:
            last.generated = keep
            session.boundaries.append(known)

    def rewind(self, session_id: str, turns: int, now: float) -> None:
        """Go back to the end of turn `turns`: that many turns remain."""
        self.tick(now)
        session = self.registry.find(session_id)
        if not 0 <= turns <= len(session.boundaries):
            raise errors.UnknownBoundary(f"session {session_id} has {len(session.boundaries)} turns")
        self._require_idle(session)
        if turns == len(session.boundaries):
            return  # Nothing changes: the last turn can still be cut.
        self._cut(session, session.boundaries[turns - 1] if turns else 0)
        del session.boundaries[turns:]
        session.last = None

    def fork(self, session_id: str, new_id: str, now: float, turns: int | None = None) -> Session:
        """A new session that goes on from the end of an earlier turn, or of the last; memory is shared."""
        self.tick(now)
        registry = self.registry
        parent = registry.find(session_id)
        turns = len(parent.boundaries) if turns is None else turns
        if not 0 <= turns <= len(parent.boundaries):
            raise errors.UnknownBoundary(f"session {session_id} has {len(parent.boundaries)} turns")
        self._require_new(new_id, parent.tenant)
        self._require_idle(parent)
        child = self._open(new_id, parent.tenant, parent.ttl)
        child.boundaries = parent.boundaries[:turns]
        known = child.boundaries[-1] if turns else 0
        child.sequence.tokens.extend(parent.sequence.tokens.slice(0, known))
        shareable = parent.sequence.lease is not None and parent.place is Place.HOME and known
        if shareable and not any(owner is parent for _, owner in registry.copies):
            self._share(parent, child, known)
        return child

    def _share(self, parent: Session, child: Session, known: int) -> None:
        """Let a forked session lean on its parent's memory; without room it starts with its tokens alone."""
        registry = self.registry
        registry.ledger.purpose = "fork copy"
        while True:
            try:
                copies = fork(registry.tree, parent.sequence, child.sequence, known)
            except OutOfUnits as shortfall:
                if (
                    self.pressure.make_room(shortfall, parent, may_retract=False)
                    and parent.sequence.lease is not None
                ):
                    continue
                return
            registry.copies += [(copy, child) for copy in copies]
            registry.rest(child)
            return

    def _require_idle(self, session: Session) -> None:
        """Raise unless nothing is happening on a session; a seal that has not been planned is given up."""
        if session.life is Life.SEALING and not session.unsettled:
            self.registry.seals.pop(session, None)
            session.on("end")
        if session.life is not Life.IDLE or session.unsettled:
            raise errors.SessionBusy(f"session {session.id} is {session.state}")

    def _cut(self, session: Session, known: int) -> None:
        """Cut a resting session's history, and its memory as far as it must."""
        registry, sequence = self.registry, session.sequence
        if session.place is Place.LEAVING:
            registry.discard_parcel(session, registry.ledger.step)
        pending = any(owner is session for _, owner in registry.copies)
        away = known < sequence.computed and (session.place is not Place.HOME or pending)
        # Where nothing of its own can be gone on from, the tree may have more.
        if away or (known and not resume_length(sequence, known)):
            registry.drop_memory(session)
        registry.ledger.purpose = "cut copy"
        for attempt in range(2):
            try:
                copies = fall_back(sequence, known)
            except OutOfUnits as shortfall:
                if attempt or not self.pressure.make_room(shortfall, session, may_retract=False):
                    registry.give_up(session)
                continue
            registry.copies += [(copy, session) for copy in copies]
            break
        sequence.tokens.cut(known)

    def spill(self, session_id: str, now: float, tier: Tier | None = None) -> bool:
        """Move an idle session's memory to another tier by hand, or to that one; False without room."""
        self.tick(now)
        session = self.registry.find(session_id)
        self._require_idle(session)
        return session.place is Place.HOME and self.pressure.spill(session, tier)

    def restore(self, session_id: str, now: float) -> bool:
        """Bring an idle session's memory back by hand; False if it is not away, or there is no room now."""
        self.tick(now)
        session = self.registry.find(session_id)
        self._require_idle(session)
        return session.place is Place.AWAY and self.planner.restore(session)

    def arrive(self, number: int, arrived: bool, now: float) -> None:
        """What came of a move that was still under way when its step settled."""
        self.tick(now)
        self.settler.arrive(number, arrived)

    def durable(self, session_id: str) -> None:
        """The last turn of a session is durable: its mark may go."""
        session = self.registry.sessions.get(session_id)
        if session is not None and session.turn is None:
            session.durable = True
            self.settler.let_go(session)

    def flush(self) -> None:
        """Evict what nobody leases. Sessions keep theirs."""
        self.registry.tree.flush()

    # --- steps ------------------------------------------------------------------------------------

    def plan(self, budget: int, now: float) -> Plan:
        """The next step, of at most `budget` tokens; empty if there is nothing to do or all must wait."""
        self.tick(now)
        registry = self.registry
        assert len(registry.flights) < FLIGHTS_MAX, "settle a plan first"
        registry.ledger.step += 1
        plan: Plan = Plan(registry.ledger.step)
        self.planner.fill(plan, budget)
        stuck = not plan and not registry.flights and not registry.transits
        if stuck and (registry.running or registry.queue):
            self._unblock()
            self.planner.fill(plan, budget)
        registry.flights.append(plan)
        return plan

    def _unblock(self) -> None:
        """Nothing could be planned, nothing is in flight: take back the youngest turn, or drop what rests."""
        registry = self.registry
        if len(registry.running) > 1:
            session = registry.running[-1]
            assert session.turn is not None
            session.turn.ending = Ending("retract", "memory is short")
            self.settler.end(session)
            return
        for session in list(registry.resting):
            registry.give_up(session)
        registry.tree.flush()

    def settle(self, plan: Plan, result: StepResult, now: float) -> list[Event]:
        """Apply what came of the oldest plan in flight; returns what happened since the last call."""
        self.tick(now)
        registry = self.registry
        if not registry.flights or registry.flights[0] is not plan:
            raise errors.IllegalTransition(f"step {plan.step} is not the oldest in flight")
        registry.flights.popleft()
        self.settler.settle(plan, result)
        for finding in self.audit.census() if self.strict else self.audit.tick(len(plan.rows)):
            self._suffer(finding)
        if registry.tainted:
            self._drop_tainted()
        return self.take_events()

    def take_events(self) -> list[Event]:
        """What happened since this was last asked: verbs of clients have events too."""
        events, self.registry.events = self.registry.events, []
        return events

    def tick(self, now: float) -> None:
        """Time has come: close what was idle for too long, abort what is overdue."""
        registry = self.registry
        registry.now = now = max(now, registry.now)
        again: list[tuple[Session, float]] = []
        for number, session_id in registry.deadlines.due(now):
            session = registry.sessions[session_id]
            turn = session.turn
            if session.number == number:
                assert session.ttl is not None, "only named sessions are watched"
                idle = session.life in (Life.IDLE, Life.SEALING)
                due = (session.idle_since if idle else now) + session.ttl
                if idle and due <= now:
                    self._expire(session)
                else:
                    again.append((session, due))
            elif session.life is not Life.CLOSING:
                assert turn is not None and turn.number == -number, "only a turn in flight has a deadline"
                keep = turn.request.on_abort
                self._abort(session, turn, keep if keep is None else min(keep, turn.generated), "deadline")
        for session, due in again:
            registry.watch(session, due)

    def _expire(self, session: Session) -> None:
        expired = self.registry.expired
        expired[session.id] = None
        if len(expired) > EXPIRED_KEPT:
            del expired[next(iter(expired))]
        self._close(session, "expired")

    # --- the audit --------------------------------------------------------------------------------

    def _owners(self) -> Iterator[Owner]:
        for session in self.registry.sessions.values():
            yield session.sequence
            if session.parcel is not None:
                yield session.parcel

    def recount(self) -> list[Finding]:
        """A whole census now, for an idle moment. Findings are healed; who is touched loses its memory."""
        found = self.audit.census()
        for finding in found:
            self._suffer(finding)
        self._drop_tainted()
        return found

    def recount_some(self, budget: int) -> bool:
        """About `budget` units' worth of a census, for an idle moment; whether that ended it."""
        for finding in self.audit.slice(budget):
            self._suffer(finding)
        self._drop_tainted()
        return self.audit.between_rounds

    def _suffer(self, finding: Finding) -> None:
        """A finding names owners whose memory cannot be trusted: their turns fail, their memory goes."""
        registry = self.registry
        registry.events.append(Event("finding", "", None, [], str(finding)))
        for owner in finding.owners:
            for session in [s for s in registry.sessions.values() if owner in (s.sequence, s.parcel)]:
                self._fail_memory(session, str(finding))

    def _fail_memory(self, session: Session, reason: str) -> None:
        """Fail a session's turn and give up its memory; its committed tokens stay."""
        turn = session.turn
        if turn is not None and session.life in (Life.RUNNING, Life.CLOSING):
            turn.ending = Ending("fail", reason, trusted=False)
            if not session.unsettled:
                self.settler.end(session)
        if session.id in self.registry.sessions:
            self.registry.tainted[session] = None

    def _drop_tainted(self) -> None:
        """Give up memory that cannot be trusted, as soon as no row in flight names it."""
        registry = self.registry
        for session in [session for session in registry.tainted if not session.unsettled]:
            del registry.tainted[session]
            registry.drop_memory(session)
