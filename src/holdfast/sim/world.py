"""A seeded world around the real core.

Clients act, plans are made and run, possibly one ahead of the other, results come back, faults strike, and
after every step the audit counts and each transcript is compared with what a model without memory says. The
same seed gives the same trace and the same state hash; whatever is found names the step and can be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from holdfast.core import errors
from holdfast.core.layout import Component, Tier, named_layout
from holdfast.core.ledger import Ledger
from holdfast.core.plan import RowResult, StepResult
from holdfast.core.policy import Policy
from holdfast.core.registry import Event, Plan
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Session
from holdfast.core.turn import KEEP_ALL, Turn, TurnRequest
from holdfast.sim.content import extend, next_token
from holdfast.sim.device import SimDevice, WrongContent
from holdfast.sim.faults import Faults
from holdfast.sim.reference import Conversation, Mismatch
from holdfast.sim.workloads import WORKLOADS, Workload

VOCABULARY = 50
STALL_STEPS = 200


@dataclass(frozen=True, slots=True)
class Setup:
    """What a world is made of; with the seed it fixes everything that happens."""

    seed: int
    layout: str
    page_size: int
    workload: str = "mix"
    faults: float = 0.05


class Found(Exception):
    """The world has found something that must not be."""

    def __init__(self, kind: str, detail: str, holder: str, step: int) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
        self.holder = holder
        self.step = step


class World:
    """Clients, core and device of one simulation."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.rng = Random(f"{setup.seed}/{setup.layout}/{setup.page_size}/{setup.workload}")
        self.workload: Workload = WORKLOADS[setup.workload]
        self.layout = named_layout(setup.layout, setup.page_size, window=self.rng.choice((3, 8, 20)))
        self.ledger = Ledger(self.layout, self._sizes())
        self.overlap = self.rng.random() < 0.6
        drafting = self.rng.random() < 0.4
        self.policy = Policy(
            context_length=self.rng.choice((120, 200)),
            vocabulary=VOCABULARY,
            chunk_tokens=self.rng.choice((3, 7, 16, 64)),
            running_max=self.rng.choice((2, 4, 16)),
            queue_max=64,
            sessions_max=self.workload.sessions,
            session_ttl=self.rng.choice((30.0, 400.0)),
            checkpoints=self.rng.choice((0, 1, 4)),
            leave_history=self.rng.random() < 0.5,
            durable_turns=self.rng.random() < 0.3,
        )
        self.scheduler = Scheduler(
            self.ledger,
            self.policy,
            propose=self._propose if drafting else None,
            strict=self.workload.strict,
            state_budget=self.rng.choice((1, 3, 1000)),
        )
        self.device = SimDevice(self.layout, VOCABULARY, self._log)
        self.faults = Faults(Random(f"faults {setup.seed}"), setup.faults)
        self.faults.guard(self.ledger)
        self.conversations: dict[str, Conversation] = {}
        self.numbers: dict[int, str] = {}
        self.now = 0.0
        self.step = 0
        self.turns = 0
        self.serial = 0
        self.stalled = 0
        self.trace = 0
        self.launched = True

    def _sizes(self) -> dict[tuple[Component, Tier], int]:
        """Pools small enough that memory is short most of the time, but any one turn fits."""
        pages = self.layout.pages_for(200) + self.rng.choice((4, 40, 120))
        if not self.workload.strict:
            pages *= 8
        slots = self.rng.choice((3, 8, 40))
        sizes: dict[tuple[Component, Tier], int] = {}
        host, disk = self.rng.random() < 0.6, self.rng.random() < 0.3
        for component in self.layout.components:
            units = slots if component is Component.STATE else pages
            sizes[component, Tier.DEVICE] = units
            if host:
                sizes[component, Tier.HOST] = self.rng.choice((2, units, 4 * units))
            if disk:
                sizes[component, Tier.DISK] = 4 * units
        return sizes

    def _log(self, number: int) -> list[int]:
        tokens = self.scheduler.registry.sessions[self.numbers[number]].sequence.tokens
        return tokens.slice(0, len(tokens))

    def _propose(self, session: Session, turn: Turn) -> list[int]:
        """Guesses that are right more often than not."""
        conversation = self.conversations[session.id]
        content = conversation.contents[-1]
        guesses: list[int] = []
        for _ in range(self.rng.randrange(4)):
            token = (
                next_token(content, VOCABULARY) if self.rng.random() < 0.7 else self.rng.randrange(VOCABULARY)
            )
            guesses.append(token)
            content = extend(content, token)
        return guesses

    # --- running ----------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """Live for a number of steps; raises `Found` at the first thing that must not be."""
        for _ in range(steps):
            self.advance()

    def advance(self) -> None:
        """One step: clients act, a plan is made, an earlier one settles."""
        self.step += 1
        self.now += self.rng.random() * 0.2
        if self.faults.strike("clock jump", 0.1):
            self.now += self.rng.choice((-50.0, 5.0, 35.0))
        actions = self.workload.actions_per_step
        while self.rng.random() < actions:
            self._act()
            actions -= 1
        flights = self.scheduler.registry.flights
        if len(flights) < 2:
            self._plan()
        while flights and (len(flights) == 2 or not self.overlap or self.rng.random() < 0.1):
            self._settle()
        self._watch_progress()

    def _plan(self) -> None:
        plan = self.scheduler.plan(self.rng.choice((4, 16, 64)), self.now)
        if plan:
            self.stalled = 0
        for row in plan.rows:
            self.numbers[row.number] = row.turn.session_id
        try:
            self.device.announce(plan, self.scheduler.registry.transits)
        except WrongContent as wrong:
            raise self._found("fence", str(wrong), self.numbers.get(wrong.number, "plan")) from wrong

    def _settle(self) -> None:
        plan = self.scheduler.registry.flights[0]
        result = self._execute(plan)
        events = self.scheduler.settle(plan, result, self.now)
        self.device.settled(plan)
        self._hear(events)

    def _execute(self, plan: Plan) -> StepResult:
        """Run a plan on the device, or let it go wrong."""
        if plan.void:
            if self.launched and self.rng.random() < 0.5:
                self.device.spoil(plan)
            return StepResult([], error="discarded")
        self.launched = True
        if plan.rows and self.faults.strike("step raises before writing", 0.1):
            # The executor knows at once: it does not launch what was planned on top of this.
            self.launched = False
            return StepResult([], error="the executor raised")
        if plan.rows and self.faults.strike("step raises after writing", 0.1):
            self.device.spoil(plan)
            return StepResult([], error="the executor raised")
        try:
            rows, moved = self.device.run(plan)
        except WrongContent as wrong:
            raise self._found("content", str(wrong), "device") from wrong
        moved = [arrived and not self.faults.strike("move lost") for arrived in moved]
        return StepResult(self._spoil_rows(rows), moved)

    def _spoil_rows(self, rows: list[RowResult]) -> list[RowResult]:
        if rows and self.faults.strike("rows missing", 0.1):
            return rows[1:]
        for row in rows:
            if row.tokens and self.faults.strike("token count wrong", 0.02):
                row.tokens = row.tokens * 7
            elif row.tokens and self.faults.strike("token out of vocabulary", 0.02):
                row.tokens = [VOCABULARY + 3]
            elif row.tokens and self.faults.strike("row error", 0.02):
                row.error = "numeric_error"
        return rows

    def _watch_progress(self) -> None:
        """Something must always move: a row, a spill, an end."""
        registry = self.scheduler.registry
        if not registry.running and not registry.queue:
            self.stalled = 0
            return
        self.stalled += 1
        if self.stalled > STALL_STEPS:
            waiting = ", ".join(turn.request.turn_id for turn in registry.queue.values())
            raise self._found(
                "stall", f"nothing moved for {STALL_STEPS} steps; waiting: {waiting}", "scheduler"
            )

    # --- what clients do --------------------------------------------------------------------------

    def _act(self) -> None:
        self.scheduler.tick(self.now)
        self._hear(self.scheduler.take_events())
        names = list(self.workload.actions)
        name = self.rng.choices(names, list(self.workload.actions.values()))[0]
        try:
            getattr(self, "_do_" + name.replace(" ", "_"))()
        except errors.Refused as refused:
            self.trace = extend(self.trace, len(refused.code))
        self._hear(self.scheduler.take_events())

    def _name(self, prefix: str) -> str:
        self.serial += 1
        return f"{prefix}{self.serial}"

    def _some(self) -> Session | None:
        """A session of a conversation, whatever it is doing."""
        names = [name for name in self.conversations if not name.startswith("r")]
        if not names:
            return None
        return self.scheduler.registry.sessions[self.rng.choice(names)]

    def _input(self, first: bool) -> tuple[int, ...]:
        """Inputs of first turns share prompts, so that prefixes are found and computed together."""
        count = self.rng.randint(*self.workload.input_tokens)
        fresh = tuple(self.rng.randrange(VOCABULARY) for _ in range(count))
        if not first or self.rng.random() < 0.3:
            return fresh
        shared = Random(self.rng.randrange(self.workload.shared_prompts))
        length = shared.randrange(1, 40)
        return (*(shared.randrange(VOCABULARY) for _ in range(length)), *fresh)

    def _request(self, known: int, goes_on: bool = False) -> TurnRequest:
        room = self.policy.context_length - known
        tokens = () if goes_on else self._input(known == 0)[: max(1, room - 2)]
        limit = min(self.rng.randint(*self.workload.output_tokens), max(1, room - len(tokens)))
        deadline = self.now + self.rng.random() * 3 if self.rng.random() < 0.05 else None
        keep = self.rng.choice((None, 0, 2))
        return TurnRequest(
            self._name("t"), tokens, limit, self.rng.randrange(3), goes_on, on_abort=keep, deadline=deadline
        )

    def _do_open(self) -> None:
        name = self._name("s")
        self.scheduler.open(name, self.rng.choice(("red", "blue")), self.now)
        self.conversations[name] = Conversation(name, VOCABULARY)

    def _do_turn(self) -> None:
        session = self._some()
        if session is not None:
            self._submit(session, self._request(session.sequence.known))

    def _do_goes_on(self) -> None:
        session = self._some()
        if session is not None:
            self._submit(session, self._request(session.sequence.known, goes_on=True))

    def _submit(self, session: Session, request: TurnRequest) -> None:
        self.scheduler.submit(session.id, request, self.now)
        self.conversations[session.id].begin(request.turn_id, request.tokens)
        self.turns += 1

    def _do_request(self) -> None:
        request = self._request(0)
        name = "r" + request.turn_id
        request = TurnRequest(name, request.tokens, request.max_tokens, request.priority)
        self.scheduler.request(self.rng.choice(("red", "blue")), request, self.now)
        self.conversations[name] = Conversation(name, VOCABULARY)
        self.conversations[name].begin(name, request.tokens)
        self.turns += 1

    def _do_interrupt(self) -> None:
        names = [
            name for name, conversation in self.conversations.items() if conversation.turn_id is not None
        ]
        if not names:
            return
        conversation = self.conversations[self.rng.choice(names)]
        assert conversation.turn_id is not None
        keep = self.rng.choice((None, KEEP_ALL, self.rng.randrange(conversation.said + 1)))
        if self.faults.strike("client lost"):
            keep = self.rng.choice((None, 0))
        self.scheduler.abort(conversation.session_id, conversation.turn_id, self.now, keep)

    def _do_cut_last(self) -> None:
        session = self._some()
        if session is None or session.turn is not None:
            return
        conversation = self.conversations[session.id]
        keep = self.rng.choice((None, self.rng.randrange(conversation.said + 1)))
        self.scheduler.interrupt(session.id, self.now, keep)
        conversation.cut_last(keep)
        self._compare(session)

    def _do_rewind(self) -> None:
        session = self._some()
        if session is not None:
            turns = self.rng.randrange(len(session.boundaries) + 2)
            self.scheduler.rewind(session.id, turns, self.now)
            self.conversations[session.id].rewind(turns)
            self._compare(session)

    def _do_fork(self) -> None:
        session = self._some()
        if session is not None:
            turns = self.rng.choice(
                (len(session.boundaries), self.rng.randrange(len(session.boundaries) + 1))
            )
            name = self._name("s")
            child = self.scheduler.fork(session.id, name, self.now, turns)
            self.conversations[name] = self.conversations[session.id].fork(name, turns)
            self._compare(child)

    def _do_spill(self) -> None:
        session = self._some()
        if session is not None:
            self.scheduler.spill(session.id, self.now)

    def _do_close(self) -> None:
        session = self._some()
        if session is not None:
            self.scheduler.close(session.id, self.now)

    def _do_durable(self) -> None:
        session = self._some()
        if session is not None:
            self.scheduler.durable(session.id)

    def _do_flush(self) -> None:
        self.scheduler.flush()

    # --- what adversaries do: each must be refused, and change nothing ----------------------------

    def _do_busy_turn(self) -> None:
        busy = [s for s in self.scheduler.registry.sessions.values() if s.turn is not None and not s.one_shot]
        if busy:
            self._refuse(self.rng.choice(busy).id, TurnRequest(self._name("t"), (1, 2), 3))

    def _do_too_long(self) -> None:
        session = self._some()
        if session is not None:
            self._refuse(session.id, TurnRequest(self._name("t"), (1,) * self.policy.context_length, 3))

    def _do_empty(self) -> None:
        session = self._some()
        if session is not None:
            self._refuse(session.id, TurnRequest(self._name("t"), (), 3))

    def _do_unknown(self) -> None:
        self._refuse("s0", TurnRequest(self._name("t"), (1,), 3))

    def _refuse(self, session_id: str, request: TurnRequest) -> None:
        try:
            self.scheduler.submit(session_id, request, self.now)
        except errors.Refused:
            return
        raise self._found("refusal", f"{request.turn_id} was accepted on {session_id}", session_id)

    def _do_stale_abort(self) -> None:
        session = self._some()
        if session is not None:
            try:
                self.scheduler.abort(session.id, "t0", self.now)
            except errors.UnknownTurn:
                return
            raise self._found("refusal", f"a stale abort was accepted on {session.id}", session.id)

    def _do_double_close(self) -> None:
        session = self._some()
        if session is not None:
            self.scheduler.close(session.id, self.now)
            if session.id in self.scheduler.registry.sessions:
                self.scheduler.close(session.id, self.now)

    # --- what clients hear ------------------------------------------------------------------------

    def _hear(self, events: list[Event]) -> None:
        for event in events:
            self.trace = extend(self.trace, len(event.kind) * 131 + sum(event.tokens))
            if event.kind == "finding":
                finding = self.scheduler.audit.findings[-1]
                raise self._found(finding.kind, event.reason, finding.holder)
            conversation = self.conversations.get(event.session_id)
            if conversation is None:
                raise self._found("event", f"{event.kind} for unknown {event.session_id}", event.session_id)
            try:
                self._tell(conversation, event)
            except Mismatch as mismatch:
                raise self._found("transcript", str(mismatch), event.session_id) from mismatch

    def _tell(self, conversation: Conversation, event: Event) -> None:
        session = self.scheduler.registry.sessions.get(event.session_id)
        if event.kind == "closed":
            del self.conversations[event.session_id]
            return
        turn = event.turn
        if turn is None:
            return
        if turn.request.turn_id != conversation.turn_id:
            raise Mismatch(f"{event.kind} of {turn.request.turn_id}, but {conversation.turn_id} is in flight")
        if event.kind == "tokens":
            conversation.hear(event.tokens)
            return
        if event.kind == "finished":
            conversation.finish(event.reason)
        else:
            kept = session is not None and len(session.boundaries) > len(conversation.boundaries)
            if session is not None and not kept and session.last is not None:
                conversation.withdraw()
            else:
                conversation.end(turn.generated if kept else None)
        if session is not None:
            self._compare(session)

    def _compare(self, session: Session) -> None:
        """A session's log must be its conversation, whenever no turn is in flight on it."""
        conversation = self.conversations[session.id]
        if session.turn is None and conversation.turn_id is None:
            tokens = session.sequence.tokens
            if (
                tokens.slice(0, len(tokens)) != conversation.tokens
                or session.boundaries != conversation.boundaries
            ):
                raise self._found("transcript", f"the log of {session.id} is not what was said", session.id)

    # --- the end ----------------------------------------------------------------------------------

    def close_down(self) -> None:
        """Close everything: every pool must be exactly full and the tree unlocked and empty."""
        self.faults.rate = 0.0
        for name in list(self.conversations):
            if name in self.scheduler.registry.sessions:
                self.scheduler.close(name, self.now)
        for _ in range(4):
            flights = self.scheduler.registry.flights
            if len(flights) < 2:
                self._plan()
            while flights:
                self._settle()
        self.scheduler.flush()
        found = self.scheduler.audit.census()
        if found:
            raise self._found(found[0].kind, str(found[0]), found[0].holder)
        for pool in self.ledger.pools.values():
            if len(pool.free) != pool.size:
                raise self._found("left over", f"{pool.name}: {pool.counts()}", "nobody")
        if self.scheduler.registry.tree.roots or self.conversations:
            raise self._found("left over", "the tree or a conversation is still there", "tree")

    def _found(self, kind: str, detail: str, holder: str) -> Found:
        return Found(kind, detail, holder, self.step)
