"""The clients of a simulated server, and adversaries: their actions.

An action either succeeds and its conversation follows it, or is refused and must have changed nothing.
hearing.py handles the events that clients receive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from holdfast.core import errors
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Session
from holdfast.core.turn import KEEP_ALL, Turn, TurnRequest
from holdfast.sim.constraint import MatcherOf
from holdfast.sim.content import extend, next_token
from holdfast.sim.faults import Faults
from holdfast.sim.found import Check, Found
from holdfast.sim.hearing import Audience
from holdfast.sim.reference import Conversation
from holdfast.sim.workloads import Workload

VOCABULARY = 50
TENANTS = ("red", "blue")
COMPUTE_ONLY_EVERY = 8
"""Every so many requests ask for no tokens: their input is computed, and nothing is sampled."""
EXPECTED = (None, None, 0.5, 20.0)
"""When turns in a row say that their client will be back."""


class Clients(Audience):
    """All clients of one scheduler."""

    def __init__(
        self, workload: Workload, scheduler: Scheduler, rng: Random, faults: Faults, matcher_of: MatcherOf
    ) -> None:
        super().__init__(scheduler, lambda: faults.total > 0, matcher_of)
        self.workload = workload
        self.rng = rng
        self.faults = faults
        self.names = list(workload.actions)
        self.weights = list(workload.actions.values())
        self.now = 0.0
        self.turns = 0
        self.serial = 0
        self.whom = "nobody"
        self.forked = "nobody"
        self.before = self._books()

    # --- acting -----------------------------------------------------------------------------------

    def act(self) -> None:
        """One action of one client, drawn by the weights of the workload."""
        self.scheduler.tick(self.now)
        self.hear(self.scheduler.take_events())
        name = self.rng.choices(self.names, self.weights)[0]
        self.accepted()
        try:
            self.perform(name)
        except errors.Refused as refused:
            if isinstance(refused, errors.TooManySessions):
                self._check_limit(name)
            self.trace = extend(self.trace, len(refused.code))
            if self._books() != self.before:
                what = f"{name} was refused with {refused.code}, but changed memory"
                raise Found(Check.REFUSAL, what, self.whom) from refused
        self.hear(self.scheduler.take_events())

    def accepted(self) -> None:
        """Note what a refusal from here on must leave as it is: an action may consist of several acts."""
        self.before = self._books()

    def perform(self, name: str) -> None:
        """Carry out an action by its name."""
        ACTIONS[name](self)

    def _check_limit(self, action: str) -> None:
        """Only sessions that count towards the limit of sessions may reach it."""
        counted = sum(not conversation.volatile for conversation in self.conversations.values())
        if action == "chat" or counted < self.scheduler.registry.policy.sessions_max:
            raise Found(Check.REFUSAL, f"{action} was refused with {counted} sessions of clients", self.whom)

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
        """Any open session."""
        name = self.sessions.choose(self.rng)
        self.whom = name or "nobody"
        return self.scheduler.registry.sessions[name] if name is not None else None

    def _input(self, first: bool, tenant: str) -> tuple[int, ...]:
        """Inputs of first turns share prompts or repeat whole conversations, so that prefixes are found."""
        rng = self.rng
        count = rng.randint(*self.workload.input_tokens)
        fresh = tuple(rng.randrange(VOCABULARY) for _ in range(count))
        if not first or rng.random() < 0.3:
            return fresh
        if tenant in self.remembered and rng.random() < 0.3:
            return (*rng.choice(self.remembered[tenant]), *fresh[:3])
        shared = Random(rng.randrange(self.workload.shared_prompts))
        length = shared.randrange(1, 40)
        return (*(shared.randrange(VOCABULARY) for _ in range(length)), *fresh)

    def _request(self, known: int, tenant: str, goes_on: bool = False) -> TurnRequest:
        rng = self.rng
        room = self.scheduler.registry.policy.context_length - known
        tokens = () if goes_on else self._input(known == 0, tenant)[: max(1, room - 2)]
        limit = min(rng.randint(*self.workload.output_tokens), max(1, room - len(tokens)))
        if not self.serial % COMPUTE_ONLY_EVERY and not goes_on:
            limit = 0
        deadline = self.now + rng.random() * 3 if rng.random() < 0.05 else None
        keep = rng.choice((None, 0, 2))
        name = self.name("t")
        return TurnRequest(
            name,
            tokens,
            limit,
            rng.randrange(3),
            goes_on,
            on_abort=keep,
            deadline=deadline,
            expect_return=EXPECTED[self.serial % len(EXPECTED)],
        )

    def _submit(self, session: Session, request: TurnRequest) -> None:
        self.scheduler.submit(session.id, request, self.now)
        self.begin(session.id, request)
        self.turns += 1

    def open(self) -> None:
        """Open a session."""
        name, tenant = self.name("s"), self.rng.choice(TENANTS)
        self.scheduler.open(name, tenant, self.now)
        self.welcome(name, Conversation(name, VOCABULARY, tenant))

    def turn(self) -> None:
        """Submit a turn."""
        session = self.some()
        if session is not None:
            self._submit(session, self._request(session.sequence.known, session.tenant))

    # --- inputs that are computed while they are said ---------------------------------------------

    def _some_tokens(self, most: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(VOCABULARY) for _ in range(self.rng.randint(0, most)))

    def listen(self) -> None:
        """Begin to say something."""
        session = self.some()
        if session is None:
            return
        tokens = self._request(session.sequence.known, session.tenant).tokens
        deadline = self.now + self.rng.random() * 6 if self.rng.random() < 0.1 else None
        said = tokens[: self.rng.randint(0, len(tokens))]
        request = TurnRequest(self.name("t"), said, 1, deadline=deadline, on_abort=0)
        self.scheduler.listen(session.id, request, self.now)
        self.conversations[session.id].listening = request.turn_id
        self.listeners.add(session.id)

    def _open_turn(self) -> Turn | None:
        """The turn of a client that is speaking."""
        name = self.listeners.choose(self.rng)
        self.whom = name or "nobody"
        return self.scheduler.registry.sessions[name].turn if name is not None else None

    def say(self) -> None:
        """Say more, or something else from some word on."""
        turn = self._open_turn()
        if turn is not None:
            known = len(turn.request.tokens)
            start = known if self.rng.random() < 0.6 else self.rng.randint(max(0, known - 9), known + 1)
            tokens = self._some_tokens(12)
            self.scheduler.hear(turn.session_id, turn.request.turn_id, start, tokens, self.now)

    def commit(self) -> None:
        """Have said everything: perhaps a little more, or else, than was heard."""
        turn = self._open_turn()
        if turn is None:
            return
        tokens = turn.request.tokens
        tokens = tokens[: self.rng.choice((len(tokens), len(tokens), self.rng.randint(0, len(tokens)))) :]
        request = self._request(turn.known_before, "")
        request = replace(request, tokens=(*tokens, *self._some_tokens(4)))
        session = self.scheduler.registry.sessions[turn.session_id]
        self.scheduler.commit(session.id, turn.request.turn_id, request, self.now)
        self.conversations[session.id].listening = None
        self.listeners.discard(session.id)
        self.begin(session.id, request)
        self.turns += 1
        if turn.admitted is not None:
            mark = session.sequence.mark
            self.conversations[session.id].planned(mark.point.length if mark else 0, turn.retracts)

    def abandon(self) -> None:
        """Break off: nothing was said."""
        turn = self._open_turn()
        if turn is not None:
            keep = self.rng.choice((None, 0, KEEP_ALL))
            self.scheduler.abort(turn.session_id, turn.request.turn_id, self.now, keep)
            self.ending.setdefault(turn.session_id, self.step)

    def go_on(self) -> None:
        """Submit a turn without input: generation continues."""
        session = self.some()
        if session is not None:
            self._submit(session, self._request(session.sequence.known, session.tenant, goes_on=True))

    def request(self) -> None:
        """Submit a one-shot request."""
        tenant = self.rng.choice(TENANTS)
        request = self._request(0, tenant)
        name = "r" + request.turn_id
        request = TurnRequest(name, request.tokens, request.max_tokens, request.priority)
        self.scheduler.request(tenant, request, self.now)
        self.conversations[name] = Conversation(name, VOCABULARY, tenant)
        self.begin(name, request)
        self.turns += 1

    def interrupt(self) -> None:
        """Interrupt a turn, or lose its client."""
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
        self.ask_to_end(name, keep)

    def cut_last(self) -> None:
        """Cut the last finished turn to the tokens that its client has heard."""
        session = self.some()
        if session is None or session.turn is not None:
            return
        conversation = self.conversations[session.id]
        keep = self.rng.choice((None, self.rng.randrange(conversation.said + 1)))
        self.scheduler.interrupt(session.id, self.now, keep)
        conversation.cut_last(keep)
        self.compare(session)

    def rewind(self) -> None:
        """Rewind to an earlier turn, or to one that does not exist."""
        session = self.some()
        if self.forked in self.conversations and self.rng.random() < 0.5:
            session = self.scheduler.registry.sessions[self.forked]
        if session is not None:
            turns = self.rng.randrange(len(session.boundaries) + 2)
            self.scheduler.rewind(session.id, turns, self.now)
            self.conversations[session.id].rewind(turns)
            self.compare(session)

    def compact(self) -> None:
        """Replace some turns by a few tokens, or turns that do not exist."""
        session = self.some()
        if session is not None:
            turns = len(session.boundaries)
            first = self.rng.randrange(turns + 2)
            last = self.rng.randrange(first, turns + 2)
            tokens = tuple(self.rng.randrange(VOCABULARY) for _ in range(self.rng.randint(1, 9)))
            left = self.scheduler.compact(session.id, first, last, tokens, self.now)
            self.conversations[session.id].compact(first, last, tokens)
            self.compare(session)
            sequence = session.sequence
            if left != sequence.known - sequence.computed or left < len(tokens):
                raise Found(Check.RECOMPUTATION, f"{left} tokens are said to be computed again", session.id)

    def fork(self) -> None:
        """Fork a session."""
        session = self.some()
        if session is not None:
            turns = self.rng.choice(
                (len(session.boundaries), self.rng.randrange(len(session.boundaries) + 1))
            )
            name = self.name("s")
            child = self.scheduler.fork(session.id, name, self.now, turns)
            self.welcome(name, self.conversations[session.id].fork(name, turns))
            self.forked = session.id
            self.compare(child)

    def spill(self) -> None:
        """Spill a session to another tier."""
        session = self.some()
        if session is not None:
            self.scheduler.spill(session.id, self.now)

    def expect(self) -> None:
        """Say that a turn will come soon, or come back to a connection."""
        session = self.some()
        if session is not None:
            seconds = EXPECTED[-1] if self.serial % 2 else 1.0
            self.scheduler.planner.prefetch.expect(session, seconds)

    def close(self) -> None:
        """Close a session."""
        session = self.some()
        if session is not None:
            self._close(session)

    def _close(self, session: Session) -> None:
        self.closing.setdefault(session.id, self.step)
        self.scheduler.close(session.id, self.now)

    def durable(self) -> None:
        """Report a turn as durable."""
        session = self.some()
        if session is not None:
            self.scheduler.durable(session.id)

    def flush(self) -> None:
        """Flush the prefix cache."""
        self.scheduler.flush()

    # --- what adversaries do: each must be refused, and change nothing ------------------------------

    def busy_turn(self) -> None:
        """Submit a second turn while one is in flight."""
        name = self.busy.choose(self.rng)
        if name is not None and not name.startswith("r"):
            self._refuse(name, TurnRequest(self.name("t"), (1, 2), 3))

    def too_long(self) -> None:
        """Submit a turn that exceeds the context length."""
        session = self.some()
        if session is not None:
            length = self.scheduler.registry.policy.context_length
            self._refuse(session.id, TurnRequest(self.name("t"), (1,) * length, 3))

    def empty(self) -> None:
        """Submit a turn without tokens."""
        session = self.some()
        if session is not None:
            self._refuse(session.id, TurnRequest(self.name("t"), (), 3))

    def unknown(self) -> None:
        """Submit a turn on an unknown session."""
        self._refuse("s0", TurnRequest(self.name("t"), (1,), 3))

    def _refuse(self, session_id: str, request: TurnRequest, keep: int | None = None) -> None:
        before = self._session_books(session_id)
        try:
            self.scheduler.submit(session_id, request, self.now, keep)
        except errors.Refused as refused:
            if self._session_books(session_id) != before:
                what = f"{request.turn_id} was refused with {refused.code}, but changed {session_id}"
                raise Found(Check.REFUSAL, what, session_id) from refused
            return
        raise Found(Check.REFUSAL, f"{request.turn_id} was accepted on {session_id}", session_id)

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
        """Abort a turn that has ended."""
        session = self.some()
        if session is not None:
            before = self._session_books(session.id)
            try:
                self.scheduler.abort(session.id, "t0", self.now)
            except errors.UnknownTurn as refused:
                if self._session_books(session.id) != before:
                    raise Found(Check.REFUSAL, f"a stale abort changed {session.id}", session.id) from refused
                return
            raise Found(Check.REFUSAL, f"a stale abort was accepted on {session.id}", session.id)

    def double_close(self) -> None:
        """Close a session twice."""
        session = self.some()
        if session is not None:
            self._close(session)
            if session.id in self.scheduler.registry.sessions:
                self.scheduler.close(session.id, self.now)

    def propose(self, session: Session, _turn: Turn) -> list[int]:
        """Guesses of what a turn says next that are right more often than not."""
        conversation = self.conversations[session.id]
        content = conversation.contents[-1]
        matcher = conversation.matcher.copy() if conversation.matcher is not None else None
        guesses: list[int] = []
        for _ in range(self.rng.randrange(4)):
            token = next_token(content, VOCABULARY)
            if matcher is not None:
                token = matcher.mask(token)
                matcher.accept([token])
            if self.rng.random() >= 0.7:
                token = self.rng.randrange(VOCABULARY)
            guesses.append(token)
            content = extend(content, token)
        return guesses


ACTIONS: dict[str, Callable[[Clients], None]] = {
    "open": Clients.open,
    "turn": Clients.turn,
    "listen": Clients.listen,
    "say": Clients.say,
    "commit": Clients.commit,
    "abandon": Clients.abandon,
    "goes on": Clients.go_on,
    "request": Clients.request,
    "interrupt": Clients.interrupt,
    "cut last": Clients.cut_last,
    "rewind": Clients.rewind,
    "compact": Clients.compact,
    "fork": Clients.fork,
    "spill": Clients.spill,
    "expect": Clients.expect,
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
