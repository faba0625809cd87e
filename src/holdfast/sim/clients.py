"""The clients of a simulated server: what they do, what they hear, and what adversaries try.

Every client keeps a `Conversation`, which knows what its session must say without any memory. An action
either succeeds, and then the conversation follows it, or is refused, and then nothing may have changed. Ends
of turns and sessions must come within a few steps of being asked for. What is not as it must be is `Found`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from holdfast.core import errors
from holdfast.core.registry import Event
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Life, Session
from holdfast.core.turn import KEEP_ALL, Turn, TurnRequest
from holdfast.sim.content import extend, next_token
from holdfast.sim.faults import Faults
from holdfast.sim.found import Found
from holdfast.sim.reference import Conversation, Mismatch
from holdfast.sim.roster import Roster
from holdfast.sim.workloads import Workload

VOCABULARY = 50
TENANTS = ("red", "blue")
LATE_STEPS = 4
REMEMBERED = 6


class Clients:
    """Everybody who talks to one scheduler."""

    def __init__(self, workload: Workload, scheduler: Scheduler, rng: Random, faults: Faults) -> None:
        self.workload = workload
        self.scheduler = scheduler
        self.rng = rng
        self.faults = faults
        self.names = list(workload.actions)
        self.weights = list(workload.actions.values())
        self.conversations: dict[str, Conversation] = {}
        self.sessions = Roster()
        self.busy = Roster()
        self.ending: dict[str, int] = {}
        self.remembered: list[tuple[int, ...]] = []
        self.closing: dict[str, int] = {}
        self.now = 0.0
        self.step = 0
        self.turns = 0
        self.serial = 0
        self.trace = 0
        self.doubtful = False
        self.whom = "nobody"
        self.forked = "nobody"

    # --- acting -----------------------------------------------------------------------------------

    def act(self) -> None:
        """One action of one client, drawn by the weights of the workload."""
        self.scheduler.tick(self.now)
        self.hear(self.scheduler.take_events())
        name = self.rng.choices(self.names, self.weights)[0]
        before = self._books()
        try:
            ACTIONS[name](self)
        except errors.Refused as refused:
            self.trace = extend(self.trace, len(refused.code))
            if self._books() != before:
                what = f"{name} was refused with {refused.code}, but changed memory"
                raise Found("refusal", what, self.whom) from refused
        self.hear(self.scheduler.take_events())

    def _books(self) -> tuple[int, int, list[tuple[int, ...]]]:
        """What a refusal must leave as it was."""
        registry = self.scheduler.registry
        pools = registry.ledger.pools.values()
        return len(registry.sessions), len(registry.queue), [tuple(pool.by_kind) for pool in pools]

    def name(self, prefix: str) -> str:
        """A name that was never used before."""
        self.serial += 1
        return f"{prefix}{self.serial}"

    def some(self) -> Session | None:
        """A session of a conversation, whatever it is doing."""
        name = self.sessions.choose(self.rng)
        self.whom = name or "nobody"
        return self.scheduler.registry.sessions[name] if name is not None else None

    def _input(self, first: bool) -> tuple[int, ...]:
        """Inputs of first turns share prompts or repeat whole conversations, so that prefixes are found."""
        rng = self.rng
        count = rng.randint(*self.workload.input_tokens)
        fresh = tuple(rng.randrange(VOCABULARY) for _ in range(count))
        if not first or rng.random() < 0.3:
            return fresh
        if self.remembered and rng.random() < 0.3:
            return (*rng.choice(self.remembered), *fresh[:3])
        shared = Random(rng.randrange(self.workload.shared_prompts))
        length = shared.randrange(1, 40)
        return (*(shared.randrange(VOCABULARY) for _ in range(length)), *fresh)

    def _request(self, known: int, goes_on: bool = False) -> TurnRequest:
        rng = self.rng
        room = self.scheduler.registry.policy.context_length - known
        tokens = () if goes_on else self._input(known == 0)[: max(1, room - 2)]
        limit = min(rng.randint(*self.workload.output_tokens), max(1, room - len(tokens)))
        deadline = self.now + rng.random() * 3 if rng.random() < 0.05 else None
        keep = rng.choice((None, 0, 2))
        return TurnRequest(
            self.name("t"), tokens, limit, rng.randrange(3), goes_on, on_abort=keep, deadline=deadline
        )

    def _submit(self, session: Session, request: TurnRequest) -> None:
        self.scheduler.submit(session.id, request, self.now)
        self._begin(session.id, request)

    def _begin(self, name: str, request: TurnRequest) -> None:
        self.conversations[name].begin(request.turn_id, request.tokens)
        self.busy.add(name)
        self.turns += 1

    def open(self) -> None:
        """A client comes."""
        name = self.name("s")
        self.scheduler.open(name, self.rng.choice(TENANTS), self.now)
        self._welcome(name, Conversation(name, VOCABULARY))

    def _welcome(self, name: str, conversation: Conversation) -> None:
        conversation.rested_at = self.scheduler.registry.now
        self.conversations[name] = conversation
        self.sessions.add(name)

    def turn(self) -> None:
        """A client says something."""
        session = self.some()
        if session is not None:
            self._submit(session, self._request(session.sequence.known))

    def go_on(self) -> None:
        """A client asks for more of the same."""
        session = self.some()
        if session is not None:
            self._submit(session, self._request(session.sequence.known, goes_on=True))

    def request(self) -> None:
        """Somebody asks one thing, once."""
        request = self._request(0)
        name = "r" + request.turn_id
        request = TurnRequest(name, request.tokens, request.max_tokens, request.priority)
        self.scheduler.request(self.rng.choice(TENANTS), request, self.now)
        self.conversations[name] = Conversation(name, VOCABULARY)
        self._begin(name, request)

    def interrupt(self) -> None:
        """A client barges in, or is lost."""
        name = self.busy.choose(self.rng)
        if name is None:
            return
        conversation = self.conversations[name]
        turn_id = conversation.turn_id
        assert turn_id is not None, "only conversations with a turn in flight are busy"
        keep = self.rng.choice((None, KEEP_ALL, self.rng.randrange(conversation.said + 1)))
        if self.faults.strike("client lost"):
            keep = self.rng.choice((None, 0))
        self.scheduler.abort(name, turn_id, self.now, keep)
        conversation.ask_to_end(keep)
        self.ending.setdefault(name, self.step)

    def cut_last(self) -> None:
        """A client has heard less of the last turn than was said."""
        session = self.some()
        if session is None or session.turn is not None:
            return
        conversation = self.conversations[session.id]
        keep = self.rng.choice((None, self.rng.randrange(conversation.said + 1)))
        self.scheduler.interrupt(session.id, self.now, keep)
        conversation.cut_last(keep)
        self.compare(session)

    def rewind(self) -> None:
        """A client goes back to an earlier turn, or to one that never was."""
        session = self.some()
        if self.forked in self.conversations and self.rng.random() < 0.5:
            session = self.scheduler.registry.sessions[self.forked]
        if session is not None:
            turns = self.rng.randrange(len(session.boundaries) + 2)
            self.scheduler.rewind(session.id, turns, self.now)
            self.conversations[session.id].rewind(turns)
            self.compare(session)

    def fork(self) -> None:
        """A client goes on in two ways."""
        session = self.some()
        if session is not None:
            turns = self.rng.choice(
                (len(session.boundaries), self.rng.randrange(len(session.boundaries) + 1))
            )
            name = self.name("s")
            child = self.scheduler.fork(session.id, name, self.now, turns)
            self._welcome(name, self.conversations[session.id].fork(name, turns))
            self.forked = session.id
            self.compare(child)

    def spill(self) -> None:
        """An operator moves a session to another tier."""
        session = self.some()
        if session is not None:
            self.scheduler.spill(session.id, self.now)

    def close(self) -> None:
        """A client leaves."""
        session = self.some()
        if session is not None:
            self._close(session)

    def _close(self, session: Session) -> None:
        self.closing.setdefault(session.id, self.step)
        self.scheduler.close(session.id, self.now)

    def durable(self) -> None:
        """A turn has been written down."""
        session = self.some()
        if session is not None:
            self.scheduler.durable(session.id)

    def flush(self) -> None:
        """An operator empties the prefix cache."""
        self.scheduler.flush()

    # --- what adversaries do: each must be refused, and change nothing ------------------------------

    def busy_turn(self) -> None:
        """A second turn while one is in flight."""
        name = self.busy.choose(self.rng)
        if name is not None and not name.startswith("r"):
            self._refuse(name, TurnRequest(self.name("t"), (1, 2), 3))

    def too_long(self) -> None:
        """A turn that no context could hold."""
        session = self.some()
        if session is not None:
            length = self.scheduler.registry.policy.context_length
            self._refuse(session.id, TurnRequest(self.name("t"), (1,) * length, 3))

    def empty(self) -> None:
        """A turn without tokens."""
        session = self.some()
        if session is not None:
            self._refuse(session.id, TurnRequest(self.name("t"), (), 3))

    def unknown(self) -> None:
        """A turn on a session that never was."""
        self._refuse("s0", TurnRequest(self.name("t"), (1,), 3))

    def _refuse(self, session_id: str, request: TurnRequest) -> None:
        before = self._session_books(session_id)
        try:
            self.scheduler.submit(session_id, request, self.now)
        except errors.Refused as refused:
            if self._session_books(session_id) != before:
                what = f"{request.turn_id} was refused with {refused.code}, but changed {session_id}"
                raise Found("refusal", what, session_id) from refused
            return
        raise Found("refusal", f"{request.turn_id} was accepted on {session_id}", session_id)

    def _session_books(self, session_id: str) -> tuple[object, ...]:
        session = self.scheduler.registry.sessions.get(session_id)
        if session is None:
            return ()
        sequence = session.sequence
        mark = sequence.mark
        where = (sequence.known, sequence.computed, sequence.planned, sequence.holder, len(sequence.points))
        marked = (mark.known, mark.point.length) if mark is not None else None
        return (
            session.life,
            session.place,
            session.turn,
            session.last,
            list(session.boundaries),
            where,
            marked,
        )

    def stale_abort(self) -> None:
        """The end of a turn that is over."""
        session = self.some()
        if session is not None:
            before = self._session_books(session.id)
            try:
                self.scheduler.abort(session.id, "t0", self.now)
            except errors.UnknownTurn as refused:
                if self._session_books(session.id) != before:
                    raise Found("refusal", f"a stale abort changed {session.id}", session.id) from refused
                return
            raise Found("refusal", f"a stale abort was accepted on {session.id}", session.id)

    def double_close(self) -> None:
        """A client leaves twice."""
        session = self.some()
        if session is not None:
            self._close(session)
            if session.id in self.scheduler.registry.sessions:
                self.scheduler.close(session.id, self.now)

    # --- hearing ----------------------------------------------------------------------------------

    def propose(self, session: Session, _turn: Turn) -> list[int]:
        """Guesses of what a turn says next that are right more often than not."""
        content = self.conversations[session.id].contents[-1]
        guesses: list[int] = []
        for _ in range(self.rng.randrange(4)):
            right = self.rng.random() < 0.7
            token = next_token(content, VOCABULARY) if right else self.rng.randrange(VOCABULARY)
            guesses.append(token)
            content = extend(content, token)
        return guesses

    def hear(self, events: list[Event]) -> None:
        """Follow what happened; whatever a conversation did not expect is found."""
        for event in events:
            self.trace = extend(self.trace, len(event.kind) * 131 + sum(event.tokens))
            if event.kind == "finding":
                finding = self.scheduler.audit.findings[0]
                raise Found(finding.kind, event.reason, finding.holder)
            conversation = self.conversations.get(event.session_id)
            if conversation is None:
                raise Found("event", f"{event.kind} for unknown {event.session_id}", event.session_id)
            try:
                self._tell(conversation, event)
            except Mismatch as mismatch:
                raise Found("transcript", str(mismatch), event.session_id) from mismatch

    def _tell(self, conversation: Conversation, event: Event) -> None:
        name, turn = event.session_id, event.turn
        if event.kind == "closed":
            if conversation.turn_id is not None:
                raise Mismatch(f"{name} was closed, but {conversation.turn_id} never ended")
            if event.reason == "expired":
                self._check_expiry(conversation)
            del self.conversations[name]
            self._remember(conversation)
            self.closing.pop(name, None)
            self.sessions.discard(name)
            return
        if turn is None:
            return
        if turn.request.turn_id != conversation.turn_id:
            raise Mismatch(f"{event.kind} of {turn.request.turn_id}, but {conversation.turn_id} is in flight")
        if event.kind == "tokens":
            conversation.hear(event.tokens)
            return
        self.busy.discard(name)
        self.ending.pop(name, None)
        conversation.rested_at = self.scheduler.registry.now
        session = self.scheduler.registry.sessions.get(name)
        if event.kind == "finished":
            conversation.finish(event.reason)
        elif event.kind == "failed" and not self.faults.total:
            raise Mismatch(f"{turn.request.turn_id} failed, though nothing went wrong: {event.reason}")
        else:
            if session is not None and event.kind == "aborted":
                self._check_recomputation(conversation, session, turn)
            conversation.interrupted(event.kind, event.reason, turn)
        if session is not None:
            self.compare(session)

    def _remember(self, conversation: Conversation) -> None:
        """Keep the words of a few conversations that are over: clients without a session say them again."""
        if conversation.tokens:
            self.remembered.append(tuple(conversation.tokens))
            del self.remembered[:-REMEMBERED]

    def _check_expiry(self, conversation: Conversation) -> None:
        """A session may go when it has been idle for its time to live since the end of its last turn."""
        registry = self.scheduler.registry
        idle = registry.now - conversation.rested_at
        if idle < registry.policy.session_ttl:
            raise Mismatch(f"{conversation.session_id} expired after {idle:.1f} seconds of rest")

    def _check_recomputation(self, conversation: Conversation, session: Session, turn: Turn) -> None:
        """An end that nobody's fault brought about leaves in memory what the turn found there."""
        running = conversation.planned_at == turn.retracts
        if running and not turn.failures and not self.doubtful:
            computed = session.sequence.computed
            found = min(conversation.began, turn.known_before)
            if computed < found:
                what = f"the turn found {found} computed tokens and left {computed}"
                raise Found("recomputation", what, f"{turn.request.turn_id} of {session.id}")

    def compare(self, session: Session) -> None:
        """A session's log must be its conversation, whenever no turn is in flight on it."""
        conversation = self.conversations[session.id]
        if session.turn is None and conversation.turn_id is None:
            tokens = session.sequence.tokens
            if (
                tokens.slice(0, len(tokens)) != conversation.tokens
                or session.boundaries != conversation.boundaries
            ):
                raise Found("transcript", f"the log of {session.id} is not what was said", session.id)
            if session.life in {Life.QUEUED, Life.RUNNING}:
                what = f"{session.id} is {session.life.value}, but has no turn"
                raise Found("registry", what, session.id)

    def watch(self) -> None:
        """What was asked to end must end soon, and what has not ended must be where it can go on."""
        for name in self.busy:
            self._check_turn(name)
        for asked, what in ((self.ending, "turn"), (self.closing, "session")):
            if asked:
                name, step = next(iter(asked.items()))
                if self.step - step > LATE_STEPS:
                    turn = self.conversations[name].turn_id
                    who = f"{turn} of {name}" if what == "turn" else name
                    raise Found("late", f"the end of {what} {who} was asked for at step {step}", who)

    def _check_turn(self, name: str) -> None:
        registry = self.scheduler.registry
        session, turn_id = registry.sessions.get(name), self.conversations[name].turn_id
        turn = session.turn if session is not None else None
        if session is None or turn is None or turn.request.turn_id != turn_id:
            raise Found("registry", f"{name} has lost its turn {turn_id}", f"{turn_id} of {name}")
        waits = registry.queue.get(turn.number) is turn
        idle = session.life in {Life.IDLE, Life.SEALING}
        if idle or waits != (session.life is Life.QUEUED) or (session in registry.running) == waits:
            what = f"{turn_id} of {name}, {session.life.value}, is in the wrong list"
            raise Found("registry", what, f"{turn_id} of {name}")


ACTIONS: dict[str, Callable[[Clients], None]] = {
    "open": Clients.open,
    "turn": Clients.turn,
    "goes on": Clients.go_on,
    "request": Clients.request,
    "interrupt": Clients.interrupt,
    "cut last": Clients.cut_last,
    "rewind": Clients.rewind,
    "fork": Clients.fork,
    "spill": Clients.spill,
    "close": Clients.close,
    "durable": Clients.durable,
    "flush": Clients.flush,
    "busy turn": Clients.busy_turn,
    "too long": Clients.too_long,
    "empty": Clients.empty,
    "unknown": Clients.unknown,
    "stale abort": Clients.stale_abort,
    "double close": Clients.double_close,
}
