"""What the engine process reports to the API process: the encoding half of the boundary.

`Outbox` collects reports in order, with one `Step` message for all deltas and ends of a step. `CallReply` and
`TurnReply` are the replies that verbs are given, and write into it. `commands` is the decoding half.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.events import Event, EventKind
from holdfast.core.session import Session
from holdfast.core.turn import Turn
from holdfast.engine.dispatch import ENDS
from holdfast.engine.durable.answers import StoredAnswer, StoredCall, stored_answer
from holdfast.engine.durable.records import FinishedTurn
from holdfast.engine.durable.session_log import SessionLog
from holdfast.engine.listeners import Refusal, TurnListener
from holdfast.engine.loop import EngineLoop
from holdfast.engine.sampling import SamplingError
from holdfast.engine.text.stream import TokenLogprob, TurnStream
from holdfast.engine.tools.events import CallArguments, CallBegin, CallEnd, Reasoning, Text
from holdfast.engine.tools.events import Event as AnswerEvent
from holdfast.engine.turns.spec import HistoryRefused
from holdfast.server.link import wire

__all__ = ["CallReply", "Outbox", "TurnReply", "noted_turns", "stored_session", "view"]


class Outbox:
    """Reports that are to be sent, in order. Observes the sessions of the engine."""

    __slots__ = ("_deltas", "_ends", "_gone", "_reports", "findings")

    def __init__(self) -> None:
        self.findings = 0
        self._reports: list[wire.Report] = []
        self._deltas: list[wire.Delta] = []
        self._ends: list[wire.End] = []
        self._gone: list[tuple[str, str]] = []

    def take(self) -> list[wire.Report]:
        """The reports since the last call."""
        self._flush_step()
        reports, self._reports = self._reports, []
        return reports

    def answer(self, report: wire.Done | wire.Declined) -> None:
        """Answer a call, after everything that came before."""
        self._flush_step()
        self._reports.append(report)

    def add_delta(self, delta: wire.Delta) -> None:
        """Add output of a turn to the current step."""
        self._deltas.append(delta)

    def add_end(self, end: wire.End) -> None:
        """Add the end of a turn to the current step."""
        self._ends.append(end)

    def session_closed(self, session_id: str, reason: str, expired: bool, moved: bool) -> None:
        """Report a closed session; one that only a request of its own had is not reported."""
        # One that expires while its last rows are in flight is closed after them, as if by a verb; one that
        # is closed after a turn that was aborted or failed has that turn's reason.
        if reason != "finished":
            self._gone.append((session_id, "moved" if moved else "expired" if expired else "closed"))

    def finding(self) -> None:
        """Count a finding of the audit."""
        self.findings += 1

    def _flush_step(self) -> None:
        """Finish the current `Step`, so that later reports come after it."""
        if self._deltas or self._ends or self._gone:
            self._reports.append(wire.Step(self._deltas, self._ends, self._gone))
            self._deltas, self._ends, self._gone = [], [], []


def declined(call: int, refusal: Refusal, loop: EngineLoop) -> wire.Declined:
    """A refusal as it is sent; one about a session's history carries the view of the session."""
    if isinstance(refusal, SamplingError):
        return wire.Declined(call, "bad_sampling", str(refusal), refusal.param)
    shown = view(refusal.session, loop.session_log) if isinstance(refusal, HistoryRefused) else None
    return wire.Declined(call, refusal.code, str(refusal), refusal.param, shown)


class CallReply:
    """Answers one call with `Done` or `Declined`."""

    __slots__ = ("_loop", "_outbox", "call")

    def __init__(self, outbox: Outbox, loop: EngineLoop, call: int) -> None:
        self._outbox = outbox
        self._loop = loop
        self.call = call

    def done(self, session_id: str | None, answer: object = None) -> None:
        """The verb was carried out: answer with the session as it is now."""
        sessions = self._loop.scheduler.registry.sessions
        found = None if session_id is None else sessions.get(session_id)
        shown = None if found is None else view(found, self._loop.session_log)
        self._outbox.answer(wire.Done(self.call, shown, answer))

    def refused(self, refusal: Refusal) -> None:
        """The verb was refused."""
        self._outbox.answer(declined(self.call, refusal, self._loop))


class TurnReply(TurnListener):
    """Answers the call that started a turn, and reports its output and its end.

    It removes itself from `turns`, the turns that are not over, by call.
    """

    __slots__ = (
        "_command",
        "_events",
        "_loop",
        "_outbox",
        "_pieces",
        "_stream",
        "_tokens",
        "_turns",
        "turn",
    )

    def __init__(
        self, outbox: Outbox, loop: EngineLoop, turns: dict[int, TurnReply], command: wire.StartTurn
    ) -> None:
        self._outbox = outbox
        self._loop = loop
        self._turns = turns
        self._command = command
        self.turn: Turn | None = None
        self._stream: TurnStream | None = None
        self._pieces = 0
        """Pieces of text that were reported."""
        self._tokens = 0
        """Tokens that were reported."""
        self._events = 0
        """Events of the answer that were reported."""

    @property
    def session_id(self) -> str | None:
        """The session of the turn, or of the request of its own once it has begun."""
        return self._command.session if self.turn is None else self.turn.session_id

    def begun(self, turn: Turn, stream: TurnStream) -> None:
        """The turn is queued: answer with its limit of tokens."""
        self.turn, self._stream = turn, stream
        self._outbox.answer(wire.Done(self._command.call, answer=turn.request.max_tokens))

    def refused(self, refusal: Refusal) -> None:
        """The turn was refused."""
        del self._turns[self._command.call]
        self._outbox.answer(declined(self._command.call, refusal, self._loop))

    def dropped(self, reason: str) -> None:
        """The turn was aborted while it waited: report it as accepted and aborted."""
        command, asked = self._command, self._command.sampling
        del self._turns[command.call]
        self._outbox.answer(wire.Done(command.call))
        self._outbox.add_end(
            wire.End(
                turn=command.call,
                outcome=EventKind.ABORTED,
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
                answer=None if command.answer is None else wire.AnswerParts(),
            )
        )

    def replayed(self, finished: FinishedTurn, session: Session) -> None:
        """The turn has been carried out before: report its output again."""
        call = self._command.call
        del self._turns[call]
        self._outbox.answer(wire.Done(call, replayed=True))
        answer = finished.answer
        events = None if answer is None else replayed_events(finished.text, answer)
        self._outbox.add_delta(wire.Delta(call, 0, finished.text, finished.tokens, events=events))
        self._outbox.add_end(
            wire.End(
                turn=call,
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
                view=view(session, self._loop.session_log),
                answer=None if answer is None else answer_parts(answer),
            )
        )

    def hear(self, event: Event) -> None:
        """Report tokens, or the end."""
        turn, stream = self.turn, self._stream
        assert turn is not None and stream is not None, "a turn begins before it is heard of"
        if event.kind is EventKind.TOKENS:
            self._report(turn, stream)
        elif event.kind in ENDS:
            stream.end(cut=event.kind is EventKind.ABORTED)
            if event.kind is EventKind.FINISHED:
                self._report(turn, stream)
            del self._turns[self._command.call]
            self._outbox.add_end(self._end(turn, stream, event))

    def _report(self, turn: Turn, stream: TurnStream) -> None:
        """Report the output since the last report."""
        sent = self._tokens
        text = "".join(stream.pieces[self._pieces :])
        tokens = stream.tokens[sent:]
        events = settled = None
        if stream.reader is not None:
            events = wire_events(stream.events[self._events :])
            self._events = len(stream.events)
            settled = stream.settled_tokens if stream.reader.reads_calls else None
        if not text and not tokens and not events:
            return
        logprobs = wire_logprobs(stream.logprobs[sent:]) if stream.sampling.logprobs is not None else None
        prompt = None if sent else (turn.input_end, turn.cached)
        self._outbox.add_delta(
            wire.Delta(self._command.call, sent, text, tokens, logprobs, prompt, events, settled)
        )
        self._pieces = len(stream.pieces)
        self._tokens = len(stream.tokens)

    def _end(self, turn: Turn, stream: TurnStream, event: Event) -> wire.End:
        kept = turn.generated if event.kind is not EventKind.FAILED else 0
        asked = stream.sampling
        session = self._loop.scheduler.registry.sessions.get(event.session_id)
        now = self._loop.now()
        return wire.End(
            turn=self._command.call,
            outcome=event.kind,
            reason=event.reason,
            text=stream.text_of(kept),
            tokens=stream.tokens[:kept],
            prompt_tokens=turn.input_end,
            cached_tokens=turn.cached,
            computed_tokens=turn.computed,
            ahead_tokens=turn.computed_ahead,
            queue_seconds=max(0.0, (turn.admitted if turn.admitted is not None else now) - turn.arrived),
            first_seconds=None if turn.first_token is None else turn.first_token - turn.arrived,
            total_seconds=now - turn.arrived,
            retracts=turn.retracts,
            logprobs=wire_logprobs(stream.logprobs[:kept]) if asked.logprobs is not None else None,
            prompt_logprobs=(
                wire_logprobs(stream.prompt_logprobs) if asked.prompt_logprobs is not None else None
            ),
            view=(
                view(session, self._loop.session_log)
                if session is not None and not session.one_shot
                else None
            ),
            answer=None if stream.reader is None else answer_parts(stored_answer(stream.answer(kept))),
            recomputed_tokens=stream.recomputed,
            arrived=turn.arrived,
        )


def view(session: Session, session_log: SessionLog) -> wire.SessionView:
    """What the API process needs to write the session's next turn."""
    known, turns = session.history, len(session.boundaries)
    last = session.sequence.tokens[known - 1] if known else None
    calls = [_call_fields(call) for call in session_log.calls_of(session.id, turns)]
    return wire.SessionView(session.id, known, last, turns, calls)


def stored_session(loop: EngineLoop, name: str) -> wire.StoredSession | None:
    """An open session with all that API processes keep of it; None if there is none, or it is volatile."""
    session = loop.scheduler.registry.sessions.get(name)
    entry = loop.session_log.sessions.get(name)
    if session is None or entry is None:
        return None
    shown = view(session, loop.session_log)
    metadata = dict(entry.metadata)
    return wire.StoredSession(shown, entry.tenant, entry.system, metadata, entry.created, entry.tools)


def noted_turns(loop: EngineLoop, session: Session, names: Sequence[str]) -> list[wire.NotedTurn]:
    """The turns of a session that have notes, in order; only those in `names`, if there are any."""
    entry, turns = loop.session_log.sessions.get(session.id), len(session.boundaries)
    found = {} if entry is None else entry.noted
    return [
        wire.NotedTurn(
            number,
            noted.turn_id,
            noted.note,
            noted.outcome,
            noted.reason,
            noted.text,
            noted.prompt_tokens,
            noted.cached_tokens,
            noted.completion_tokens,
            None if noted.answer is None else answer_parts(noted.answer),
            is_last=number == turns,
        )
        for number, noted in sorted(found.items())
        if not names or noted.turn_id in names
    ]


def _call_fields(call: StoredCall) -> wire.CallFields:
    return wire.CallFields(call.id, call.name, call.arguments, call.outcome)


def answer_parts(answer: StoredAnswer) -> wire.AnswerParts:
    """The parts of an answer as they are sent."""
    calls = [_call_fields(call) for call in answer.calls]
    return wire.AnswerParts(answer.reasoning, calls, answer.reasoning_tokens)


def wire_events(events: list[AnswerEvent]) -> list[wire.AnswerEvent]:
    """Events of an answer as they are sent; those without text only account for markers."""
    sent: list[wire.AnswerEvent] = []
    for event in events:
        match event:
            case Text(text=text) if text:
                sent.append(wire.AnswerEvent(wire.Part.TEXT, text))
            case Reasoning(text=text) if text:
                sent.append(wire.AnswerEvent(wire.Part.REASONING, text))
            case CallBegin(index=index, name=name, id=call_id):
                sent.append(wire.AnswerEvent(wire.Part.CALL, name, index, call_id))
            case CallArguments(index=index, text=text) if text:
                sent.append(wire.AnswerEvent(wire.Part.ARGUMENTS, text, index))
            case CallEnd(index=index, outcome=outcome):
                sent.append(wire.AnswerEvent(wire.Part.CALL_END, outcome.value, index))
    return sent


def replayed_events(text: str, answer: StoredAnswer) -> list[wire.AnswerEvent]:
    """The events of an answer that is reported again: each part in one piece."""
    sent: list[wire.AnswerEvent] = []
    if answer.reasoning:
        sent.append(wire.AnswerEvent(wire.Part.REASONING, answer.reasoning))
    if text:
        sent.append(wire.AnswerEvent(wire.Part.TEXT, text))
    for index, call in enumerate(answer.calls):
        sent.append(wire.AnswerEvent(wire.Part.CALL, call.name, index, call.id))
        if call.arguments:
            sent.append(wire.AnswerEvent(wire.Part.ARGUMENTS, call.arguments, index))
        sent.append(wire.AnswerEvent(wire.Part.CALL_END, call.outcome, index))
    return sent


def wire_logprobs(logprobs: list[TokenLogprob]) -> list[wire.Logprob]:
    """Log-probabilities as they are sent."""
    return [
        wire.Logprob(entry.token, entry.logprob, [wire.TopLogprob(*top) for top in entry.top])
        for entry in logprobs
    ]
