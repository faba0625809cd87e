"""Events as clients receive them, compared with the expected ones.

An `Audience` keeps a `Conversation` for every session: its expected text, computed without memory, its
client's requests, and since when it is idle. Every event of the core is compared with it. Ends of turns and
sessions must come within a few steps of the request. A difference is `Found`.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.registry import Event
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Life, Session
from holdfast.core.turn import Turn, TurnRequest
from holdfast.sim.constraint import MatcherOf, unconstrained
from holdfast.sim.content import extend
from holdfast.sim.found import Check, Found, found_by
from holdfast.sim.reference import Conversation, Mismatch
from holdfast.sim.roster import Roster

LATE_STEPS = 4
REMEMBERED = 6


class Audience:
    """Receives the events of one scheduler. `faulty` says whether a fault has struck so far."""

    def __init__(
        self, scheduler: Scheduler, faulty: Callable[[], bool], matcher_of: MatcherOf = unconstrained
    ) -> None:
        self.scheduler = scheduler
        self.faulty = faulty
        self.matcher_of = matcher_of
        self.conversations: dict[str, Conversation] = {}
        self.sessions = Roster()
        self.busy = Roster()
        self.listeners = Roster()
        self.ending: dict[str, int] = {}
        self.closing: dict[str, int] = {}
        self.remembered: dict[str, list[tuple[int, ...]]] = {}
        self.step = 0
        self.trace = 0
        self.doubtful = False

    def welcome(self, name: str, conversation: Conversation) -> None:
        """A session was opened."""
        conversation.rested_at = self.scheduler.registry.now
        self.conversations[name] = conversation
        self.sessions.add(name)

    def lose(self, name: str) -> None:
        """A session is gone with its process; its client may send the conversation again."""
        conversation = self.conversations.pop(name)
        self.sessions.discard(name)
        conversation.come_back()
        self._remember(conversation)

    def begin(self, name: str, request: TurnRequest) -> None:
        """A turn was accepted."""
        self.conversations[name].begin(request.turn_id, request.tokens, self.matcher_of(request.turn_id))
        self.busy.add(name)

    def ask_to_end(self, name: str, keep: int | None) -> None:
        """A client has interrupted its turn."""
        conversation = self.conversations.get(name)
        if conversation is not None:
            conversation.ask_to_end(keep)
            self.ending.setdefault(name, self.step)

    def hear(self, events: list[Event]) -> None:
        """Follow events; one that its conversation does not expect is a finding."""
        if any(event.kind == "finding" for event in events):
            audit = self.scheduler.audit
            raise found_by(audit, audit.findings[0])
        for event in events:
            self.trace = extend(self.trace, len(event.kind) * 131 + sum(event.tokens))
            conversation = self.conversations.get(event.session_id)
            if conversation is None:
                raise Found(Check.EVENT, f"{event.kind} for unknown {event.session_id}", event.session_id)
            try:
                self._tell(conversation, event)
            except Mismatch as mismatch:
                raise Found(Check.TRANSCRIPT, str(mismatch), event.session_id) from mismatch

    def _tell(self, conversation: Conversation, event: Event) -> None:
        name, turn = event.session_id, event.turn
        if event.kind == "closed":
            for turn_id in (conversation.turn_id, conversation.listening):
                if turn_id is not None:
                    raise Mismatch(f"{name} was closed, but {turn_id} never ended")
            if event.reason == "expired":
                self._check_expiry(conversation)
            del self.conversations[name]
            self._remember(conversation)
            self.closing.pop(name, None)
            self.sessions.discard(name)
            return
        if turn is None:
            return
        if turn.is_open:
            self._tell_listener(conversation, event, turn)
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
            if turn.generated != conversation.said:
                raise Mismatch(f"{turn.generated} tokens count as generated, {conversation.said} were said")
            if turn.generated > turn.request.max_tokens:
                raise Mismatch(f"{turn.generated} tokens were said, at most {turn.request.max_tokens} may be")
            conversation.finish(event.reason)
            if session is not None and not turn.request.max_tokens:
                self._check_computed(session, turn)
        elif event.kind == "failed" and not self.faulty():
            raise Mismatch(f"{turn.request.turn_id} failed, though nothing went wrong: {event.reason}")
        else:
            if session is not None and event.kind == "aborted":
                self._check_recomputation(conversation, session, turn)
            conversation.interrupted(event.kind, event.reason, turn)
        if session is not None:
            self.compare(session)

    def _tell_listener(self, conversation: Conversation, event: Event, turn: Turn) -> None:
        """An open turn may be aborted, and fail; it says nothing, and leaves nothing behind."""
        name = conversation.session_id
        if turn.request.turn_id != conversation.listening or event.kind not in ("aborted", "failed"):
            raise Mismatch(f"{event.kind} of {turn.request.turn_id}, which is open")
        if event.kind == "failed" and not self.faulty():
            raise Mismatch(f"{turn.request.turn_id} failed, though nothing went wrong: {event.reason}")
        conversation.listening = None
        conversation.rested_at = self.scheduler.registry.now
        self.listeners.discard(name)
        self.ending.pop(name, None)
        session = self.scheduler.registry.sessions.get(name)
        if session is not None:
            self.compare(session)

    def _remember(self, conversation: Conversation) -> None:
        """Keep the words of a few conversations that are over: clients without a session say them again."""
        if conversation.tokens:
            kept = self.remembered.setdefault(conversation.tenant, [])
            kept.append(tuple(conversation.tokens))
            del kept[:-REMEMBERED]

    def _check_expiry(self, conversation: Conversation) -> None:
        """A session may go when it has been idle for its time to live since the end of its last turn."""
        registry = self.scheduler.registry
        idle = registry.now - conversation.rested_at
        ttl = conversation.retention.with_default(registry.policy.session_ttl).ttl
        if ttl is None or idle < ttl:
            raise Mismatch(f"{conversation.session_id} expired after {idle:.1f} seconds of rest")

    def _check_recomputation(self, conversation: Conversation, session: Session, turn: Turn) -> None:
        """A turn that ends without a fault leaves as much in memory as it found."""
        running = conversation.planned_at == turn.retracts
        if running and not turn.failures and not self.doubtful:
            computed = session.sequence.computed
            found = min(conversation.began, turn.known_before)
            if computed < found:
                what = f"the turn found {found} computed tokens and left {computed}"
                raise Found(Check.RECOMPUTATION, what, f"{turn.request.turn_id} of {session.id}")

    def _check_computed(self, session: Session, turn: Turn) -> None:
        """A turn that samples nothing ends when its whole input is in memory."""
        sequence = session.sequence
        if sequence.computed < sequence.known:
            what = f"it ended with {sequence.computed} of {sequence.known} tokens computed"
            raise Found(Check.EVENT, what, f"{turn.request.turn_id} of {session.id}")

    def compare(self, session: Session) -> None:
        """A session's log must be its conversation, whenever no turn is in flight on it."""
        conversation = self.conversations[session.id]
        if session.turn is None and conversation.turn_id is None:
            tokens = session.sequence.tokens
            if (
                tokens.slice(0, len(tokens)) != conversation.tokens
                or session.boundaries != conversation.boundaries
            ):
                raise Found(Check.TRANSCRIPT, f"the log of {session.id} is not what was said", session.id)
            turn = session.last
            last = (turn.known_before, turn.input_end, turn.generated) if turn is not None else None
            said = (*conversation.last, conversation.said) if conversation.last is not None else None
            if last != said:
                what = f"the last turn of {session.id} is taken for {last}, not {said}"
                raise Found(Check.TRANSCRIPT, what, session.id)
            if session.life in {Life.QUEUED, Life.RUNNING}:
                what = f"{session.id} is {session.life.value}, but has no turn"
                raise Found(Check.REGISTRY, what, session.id)

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
                    raise Found(Check.LATE, f"the end of {what} {who} was asked for at step {step}", who)

    def _check_turn(self, name: str) -> None:
        registry = self.scheduler.registry
        session, turn_id = registry.sessions.get(name), self.conversations[name].turn_id
        turn = session.turn if session is not None else None
        if session is None or turn is None or turn.request.turn_id != turn_id:
            raise Found(Check.REGISTRY, f"{name} has lost its turn {turn_id}", f"{turn_id} of {name}")
        waits = registry.queue.get(turn.number) is turn
        idle = session.life in {Life.IDLE, Life.SEALING}
        runs = session in registry.running or session in registry.listening
        if idle or waits != (session.life is Life.QUEUED) or runs == waits:
            what = f"{turn_id} of {name}, {session.life.value}, is in the wrong list"
            raise Found(Check.REGISTRY, what, f"{turn_id} of {name}")
