"""Carries out the commands of the API process on an engine loop, and writes down what to tell it.

One object in the engine process. `receive` takes a command; what it causes is in `take_reports`, in order,
with one `Step` for all that a step brought. A verb that must wait for rows in flight, or for memory that is
away, waits here; whoever makes the steps has it tried again after each, when the commands that came meanwhile
have been received. Nothing here touches a socket or blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from holdfast.core.errors import Refused, UnknownSession
from holdfast.core.layout import Tier
from holdfast.core.registry import Event
from holdfast.core.session import Life, Session
from holdfast.core.turn import KEEP_ALL, Turn, TurnRequest
from holdfast.engine.loop import ENDS, EngineLoop
from holdfast.engine.memory_map import leased_units
from holdfast.engine.report import session_report
from holdfast.engine.sampling import Sampling, SamplingError
from holdfast.engine.text.stream import TokenLogprob, TurnStream
from holdfast.engine.waiting import Length, Wait, end_of_turn, kept_of_turn, no_memory
from holdfast.server.link import wire
from holdfast.server.link.reports import Surveys
from holdfast.server.link.rounds import Spent, never
from holdfast.server.link.session_queues import Lines

log = logging.getLogger("holdfast.engine")


class Conversation:
    """One turn in flight, as the API process knows it."""

    __slots__ = ("call", "said", "sent", "stream", "turn")

    def __init__(self, call: int, turn: Turn, stream: TurnStream) -> None:
        self.call = call
        self.turn = turn
        self.stream = stream
        self.said = 0
        """Pieces of text that were told."""
        self.sent = 0
        """Tokens that were told."""


class Desk:
    """The engine's side of the counter."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self.turns: dict[int, Conversation] = {}
        self.findings = 0
        self._surveys = Surveys(loop)
        self._lines = Lines(lambda name: self._turn_before(name) is not None)
        self._held: dict[int, wire.StartTurn] = {}
        """Turns that wait for their session, by their calls."""
        self._reports: list[wire.Report] = []
        self._deltas: list[wire.Delta] = []
        self._ends: list[wire.End] = []
        self._gone: list[tuple[str, str]] = []
        loop.observer = self.observe

    # --- commands ---------------------------------------------------------------------------------

    def receive(self, command: wire.Command) -> None:
        """Carry out one command, or answer why not."""
        match command:
            case wire.EndTurn():
                self._end_turn(command)
            case wire.StartTurn():
                self._start_when_ended(command)
            case wire.OpenSession():
                self._attempt(command.call, lambda: self._open(command))
            case wire.CloseSession():
                self._attempt(command.call, lambda: self._close(command))
            case wire.Interrupt():
                kept = kept_of_turn(command.keep, command.turn)
                self._when_ready(command, lambda: self._interrupt(command), kept)
            case wire.Rewind():
                self._when_ready(command, lambda: self._rewind(command), end_of_turn(command.turns))
            case wire.Fork():
                end = end_of_turn(command.turns)
                self._when_ready(command, lambda: self._fork(command), end, forks=True)
            case wire.MoveSession():
                self._when_ready(command, lambda: self._move(command))
            case wire.Ask():
                self._attempt(command.call, lambda: self._ask(command))
            case wire.Configure() | wire.Stop():
                raise AssertionError("these are the process's own")
        self.loop.tell(self.loop.scheduler.take_events())

    def _attempt(self, call: int, act: Callable[[], None]) -> None:
        """Carry something out; a refusal is reported, and has changed nothing."""
        try:
            act()
        except Refused as refusal:
            self._reports.append(wire.Declined(call, refusal.code, str(refusal), refusal.param))
        except SamplingError as error:
            self._reports.append(wire.Declined(call, "bad_sampling", str(error), error.param))

    def _attempt_on(
        self, name: str | None, meant: Session | None, call: int, act: Callable[[], None]
    ) -> None:
        """Carry something out on the session that it was meant for, on no other of its name."""

        def act_on_it() -> None:
            found = None if name is None else self.loop.scheduler.registry.sessions.get(name)
            if found is not None and found is not meant:
                raise UnknownSession(f"session {name} was closed, and another was opened since")
            act()

        self._attempt(call, act_on_it)

    def _when_ready(
        self,
        command: wire.Interrupt | wire.Rewind | wire.Fork | wire.MoveSession,
        act: Callable[[], None],
        length: Length = no_memory,
        forks: bool = False,
    ) -> None:
        """Carry a verb out now, or as soon as it gives up no memory that it could keep.

        Verbs are carried out in the order in which they came, and turns on the session that come later wait
        for them. A turn that waits for another to end is no reason to wait: the verb may be what ends it.
        """
        wait = Wait(self.loop.scheduler, command.session, length, forks)

        def attempt() -> bool:
            if not wait.over(self.loop.now()):
                return False
            self._attempt_on(command.session, wait.session, command.call, act)
            return True

        self._lines.try_verb(command.session, attempt)

    def try_waiting(self, spent: Spent = never) -> None:
        """Try some of what waits, once the commands of this round were received."""
        if self._lines:
            self._lines.try_some(spent)
            self.loop.tell(self.loop.scheduler.take_events())

    @property
    def waits(self) -> bool:
        """Whether something waits for a step to settle."""
        return bool(self._lines)

    # --- sessions ---------------------------------------------------------------------------------

    def _open(self, command: wire.OpenSession) -> None:
        self.loop.open_session(
            command.session,
            command.tenant,
            command.ttl,
            command.metadata,
            command.system,
            done=lambda: self._done(command.call, command.session),
        )

    def _close(self, command: wire.CloseSession) -> None:
        """Close; the answer comes when nothing is in flight any more, and that is written."""
        self.loop.close_session(command.session, done=lambda: self._done(command.call))

    def _interrupt(self, command: wire.Interrupt) -> None:
        self.loop.interrupt(
            command.session,
            command.keep,
            command.turn,
            command.request_id,
            done=lambda: self._done(command.call, command.session),
        )

    def _rewind(self, command: wire.Rewind) -> None:
        self.loop.rewind(
            command.session,
            command.turns,
            command.request_id,
            done=lambda: self._done(command.call, command.session),
        )

    def _fork(self, command: wire.Fork) -> None:
        # One that is asked for again answers the session that it made the first time.
        child = self.loop.fork(
            command.session, command.child, command.turns, command.request_id, anew=command.anew
        )
        self.loop.session_log.when_durable(lambda: self._done(command.call, child.id, child.id))

    def _move(self, command: wire.MoveSession) -> None:
        if command.to == "device":
            moved = self.loop.restore(command.session)
        else:
            tier = None if command.to is None else Tier[command.to.upper()]
            moved = self.loop.spill(command.session, tier)
        self._done(command.call, command.session, moved)

    def _done(self, call: int, session: str | None = None, answer: object = None) -> None:
        """A call was carried out: told after everything that came of it."""
        self._flush_step()
        found = None if session is None else self.loop.scheduler.registry.sessions.get(session)
        self._reports.append(wire.Done(call, None if found is None else view(found), answer))

    # --- turns ------------------------------------------------------------------------------------

    def _start_when_ended(self, command: wire.StartTurn) -> None:
        """Start a turn now, or when the one before it has let go of the session.

        A client that leaves a turn and asks for the next at once is heard in either order: its leaving is
        noticed on one connection, its request comes on another. So a turn on a session that speaks waits for
        one step, and is refused only if that brings no word that the turn before is to end. The step counts
        from when that turn is first seen: it may have begun while this one waited for something else.
        """
        registry = self.loop.scheduler.registry
        ledger = registry.ledger
        seen, settled_before = self._turn_before(command.session), ledger.settled
        meant = None if command.session is None else registry.sessions.get(command.session)

        def attempt() -> bool:
            nonlocal seen, settled_before
            if command.call not in self._held:
                return True  # It was ended while it waited.
            if self._is_being_written(command):
                return False
            before = self._turn_before(command.session)
            if before is not seen:
                seen, settled_before = before, ledger.settled
            if before is not None and (ledger.settled == settled_before or _is_ending(before)):
                return False
            del self._held[command.call]
            self._attempt_on(command.session, meant, command.call, lambda: self._start(command))
            return True

        self._held[command.call] = command
        if command.session is not None:
            self._lines.try_turn(command.session, attempt)
        elif not attempt():
            raise AssertionError("a request of its own has nothing to wait for")

    def _is_being_written(self, command: wire.StartTurn) -> bool:
        """Whether a turn that is asked for again has ended, and will be durable in a moment."""
        if command.session is None or command.fingerprint is None:
            return False
        return self.loop.session_log.is_being_written(command.session, command.name)

    def _turn_before(self, name: str | None) -> Turn | None:
        """The turn that a session is at, if there is one and the session stays open."""
        if name is None:
            return None
        session = self.loop.scheduler.registry.sessions.get(name)
        return None if session is None or session.life is Life.CLOSING else session.turn

    def _start(self, command: wire.StartTurn) -> None:
        loop = self.loop
        sampling = Sampling(**msgspec.structs.asdict(command.sampling)).with_defaults(loop.defaults)
        known = 0
        if command.session is not None:
            # A turn that is overdue ends now, and changes the history, rather than when this one is queued.
            loop.scheduler.tick(loop.now())
            session = loop.scheduler.registry.find(command.session)
            known = session.sequence.known
            if self._replay(command, session):
                return
            if command.opens and known and session.turn is None:
                repeated = wire.Declined(
                    command.call, "history_repeated", "the session has a history", "messages", view(session)
                )
                self._reports.append(repeated)
                return
            # A turn in flight has changed the history too; that the session is busy is said below.
            if command.known not in (None, known) and session.turn is None:
                self._reports.append(
                    wire.Declined(
                        command.call, "history_changed", "the history has changed", view=view(session)
                    )
                )
                return
        request = self._request(command, sampling, known)
        heard: list[Conversation] = []

        def hear(event: Event) -> None:
            self._hear(heard[0], event)

        chosen = sampling.choice(command.choice)
        if command.session is None:
            turn, stream = loop.request(command.tenant, request, chosen, hear)
        else:
            turn, stream = loop.submit(command.session, request, chosen, hear, command.fingerprint)
        conversation = Conversation(command.call, turn, stream)
        heard.append(conversation)
        self.turns[command.call] = conversation
        self._done(command.call, answer=request.max_tokens)

    def _request(self, command: wire.StartTurn, sampling: Sampling, known: int) -> TurnRequest:
        """What the core is asked for. Without a limit, a turn may fill what is left of the context."""
        loop = self.loop
        room = loop.tokens_max(command.tenant) - known - len(command.tokens)
        limit = sampling.max_tokens if sampling.max_tokens is not None else max(1, room)
        if command.cut and room >= 1:
            limit = min(limit, room)
        return TurnRequest(
            command.name,
            tuple(command.tokens),
            limit,
            goes_on=command.goes_on,
            on_abort=KEEP_ALL if command.keeps else None,
            deadline=None if command.timeout is None else loop.now() + command.timeout,
            computes_from=command.computes_from,
        )

    def _replay(self, command: wire.StartTurn, session: Session) -> bool:
        """Answer a turn that has been carried out before, word for word."""
        if command.fingerprint is None:
            return False
        finished = self.loop.replay(session.id, command.name, command.fingerprint)
        if finished is None:
            return False
        self._flush_step()
        self._reports.append(wire.Done(command.call, replayed=True))
        self._deltas.append(wire.Delta(command.call, 0, finished.text, finished.tokens))
        self._ends.append(
            wire.End(
                turn=command.call,
                outcome=finished.outcome,
                reason=finished.reason,
                text=finished.text,
                tokens=finished.tokens,
                prompt_tokens=finished.prompt_tokens,
                cached_tokens=finished.cached_tokens,
                computed_tokens=finished.computed_tokens,
                queue_seconds=0.0,
                first_seconds=0.0,
                total_seconds=0.0,
                view=view(session),
            )
        )
        return True

    def _end_turn(self, command: wire.EndTurn) -> None:
        """End a turn; one that is over already has told its end."""
        if command.turn in self._held:
            self._end_held(self._held.pop(command.turn), command.reason)
            return
        conversation = self.turns.get(command.turn)
        if conversation is None or conversation.turn.over:
            return
        turn = conversation.turn
        keep = command.keep
        if keep is not None and keep != KEEP_ALL:
            keep = min(keep, turn.generated)
        try:
            self.loop.scheduler.abort(
                turn.session_id, turn.request.turn_id, self.loop.now(), keep, command.reason
            )
        except Refused as refusal:
            log.info("turn %s is ending already: %s", turn.request.turn_id, refusal)

    def session_of(self, call: int) -> str | None:
        """The session of a turn that was begun or waits for it, by the call that started it."""
        conversation, held = self.turns.get(call), self._held.get(call)
        if conversation is not None:
            return conversation.turn.session_id
        return None if held is None else held.session

    def _end_held(self, command: wire.StartTurn, reason: str) -> None:
        """End a turn that waits for its session as one that waits for memory: accepted, and aborted."""
        asked = command.sampling
        self._done(command.call)
        self._ends.append(
            wire.End(
                turn=command.call,
                outcome="aborted",
                reason=reason,
                text="",
                tokens=[],
                prompt_tokens=(command.known or 0) + len(command.tokens),
                cached_tokens=0,
                computed_tokens=0,
                queue_seconds=0.0,
                first_seconds=None,
                total_seconds=0.0,
                logprobs=None if asked.logprobs is None else [],
                prompt_logprobs=None if asked.prompt_logprobs is None else [],
            )
        )

    # --- what happens -----------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """Events that are about no turn."""
        if event.kind == "finding":
            self.findings += 1
        elif event.kind == "closed" and event.reason != "finished":
            # One that expires while its last rows are in flight is closed after them, as if it were asked to;
            # one that is closed after a turn that was cut or failed tells why that turn ended.
            expired = event.session_id in self.loop.scheduler.registry.expired
            self._gone.append((event.session_id, "expired" if expired else "closed"))

    def _hear(self, conversation: Conversation, event: Event) -> None:
        if event.kind == "tokens":
            self._speak(conversation)
        elif event.kind in ENDS:
            conversation.stream.end()
            if event.kind == "finished":
                self._speak(conversation)
            del self.turns[conversation.call]
            self._ends.append(self._end(conversation, event))

    def _speak(self, conversation: Conversation) -> None:
        """Tell what a turn has said since it was last told."""
        stream, turn = conversation.stream, conversation.turn
        text = "".join(stream.pieces[conversation.said :])
        tokens = stream.tokens[conversation.sent :]
        if not text and not tokens:
            return
        wanted = stream.sampling.logprobs is not None
        logprobs = _wire_logprobs(stream.logprobs[conversation.sent :]) if wanted else None
        prompt = None if conversation.sent else (turn.input_end, turn.cached)
        self._deltas.append(wire.Delta(conversation.call, conversation.sent, text, tokens, logprobs, prompt))
        conversation.said = len(stream.pieces)
        conversation.sent = len(stream.tokens)

    def _end(self, conversation: Conversation, event: Event) -> wire.End:
        turn, stream, loop = conversation.turn, conversation.stream, self.loop
        kept = turn.generated if event.kind != "failed" else 0
        asked = stream.sampling
        session = loop.scheduler.registry.sessions.get(event.session_id)
        named = session is not None and not session.one_shot
        now = loop.now()
        return wire.End(
            turn=conversation.call,
            outcome=event.kind,
            reason=event.reason,
            text=stream.text_of(kept),
            tokens=stream.tokens[:kept],
            prompt_tokens=turn.input_end,
            cached_tokens=turn.cached,
            computed_tokens=turn.computed,
            queue_seconds=max(0.0, (turn.admitted if turn.admitted is not None else now) - turn.arrived),
            first_seconds=None if turn.first_token is None else turn.first_token - turn.arrived,
            total_seconds=now - turn.arrived,
            retracts=turn.retracts,
            logprobs=_wire_logprobs(stream.logprobs[:kept]) if asked.logprobs is not None else None,
            prompt_logprobs=(
                _wire_logprobs(stream.prompt_logprobs) if asked.prompt_logprobs is not None else None
            ),
            view=view(session) if session is not None and named else None,
        )

    # --- reports ----------------------------------------------------------------------------------

    def _flush_step(self) -> None:
        """Close the current `Step`, so that what follows is told after it."""
        if self._deltas or self._ends or self._gone:
            self._reports.append(wire.Step(self._deltas, self._ends, self._gone))
            self._deltas, self._ends, self._gone = [], [], []

    def take_reports(self) -> list[wire.Report]:
        """What is to be told, in order."""
        self._flush_step()
        reports, self._reports = self._reports, []
        return reports

    def pulse(self) -> wire.Pulse:
        """A sign of life."""
        registry = self.loop.scheduler.registry
        counters = registry.counters
        return wire.Pulse(
            step=registry.ledger.step,
            running=len(registry.running),
            queued=len(registry.queue),
            sessions=len(self.loop.session_log.sessions),
            counters={name: getattr(counters, name) for name in type(counters).__slots__},
            holders=[
                (pool.component.name.lower(), pool.tier.name.lower(), kind, units)
                for pool in registry.ledger.pools.values()
                for kind, units in pool.counts().items()
            ],
            findings=self.findings,
            loop_counts={work: list(counts) for work, counts in self.loop.times.counts.items()},
            loop_seconds=dict(self.loop.times.seconds),
        )

    def _ask(self, command: wire.Ask) -> None:
        loop = self.loop
        answer: object = None
        match command.what:
            case "memory" | "picture" | "sessions":
                self._surveys.ask(command)
                return
            case "leased":
                assert command.name is not None, "which session?"
                answer = leased_units(loop, command.name)
            case "session":
                assert command.name is not None, "which session?"
                answer = session_report(loop, loop.scheduler.registry.find(command.name))
            case "flush":
                loop.scheduler.flush()
            case _:
                raise AssertionError(f"nobody asks for {command.what}")
        self._done(command.call, answer=answer)

    @property
    def reporting(self) -> bool:
        """Whether a report is being made."""
        return bool(self._surveys)

    def report(self, spent: Spent = never) -> None:
        """Make portions of reports, one at least, until the round has no more time; tell what is done."""
        for call, answer in self._surveys.work(spent):
            self._done(call, answer=answer)


def _is_ending(turn: Turn) -> bool:
    """Whether a turn was told to end and waits only for its rows in flight."""
    return turn.ending is not None and turn.ending.event == "abort"


def view(session: Session) -> wire.SessionView:
    """What the next turn of a session has to know."""
    tokens = session.sequence.tokens
    last = tokens[len(tokens) - 1] if len(tokens) else None
    return wire.SessionView(session.id, session.sequence.known, last, len(session.boundaries))


def _wire_logprobs(logprobs: list[TokenLogprob]) -> list[wire.Logprob]:
    return [
        wire.Logprob(entry.token, entry.logprob, [wire.TopLogprob(*top) for top in entry.top])
        for entry in logprobs
    ]
