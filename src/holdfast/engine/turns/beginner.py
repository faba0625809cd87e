"""Begins turns: the request to the core, and the stream that reads the turn's tokens.

A refused turn changes nothing. Used by `submission` and `steering`.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.layout import Component
from holdfast.core.session import Session
from holdfast.core.turn import KEEP_ALL, TurnRequest
from holdfast.engine.constraints.compiler import Compilation
from holdfast.engine.constraints.errors import GrammarError
from holdfast.engine.constraints.turn import TurnConstraint
from holdfast.engine.durable.session_log import require_text
from holdfast.engine.grammars import GrammarRefused
from holdfast.engine.listeners import TurnListener
from holdfast.engine.loop import EngineLoop
from holdfast.engine.sampling import Sampling
from holdfast.engine.step.speculation import is_penalised
from holdfast.engine.text.answer_reader import AnswerReader
from holdfast.engine.text.stream import Kept, TurnStream
from holdfast.engine.tools.answer import AnswerSpec
from holdfast.engine.turns.listening import Ahead
from holdfast.engine.turns.spec import NotesTooLarge, TurnSpec

__all__ = ["TurnBeginner"]

NOTES_MIN = 4 << 20
NOTE_CHARACTERS_PER_TOKEN = 32
"""The notes of a session's turns may have as many characters for each token of the context, and `NOTES_MIN`
in any case: more would not come from a conversation that fits."""


class TurnBeginner:
    """Begins the turns of one engine."""

    __slots__ = ("_ahead", "_loop")

    def __init__(self, loop: EngineLoop, ahead: Ahead) -> None:
        self._loop = loop
        self._ahead = ahead

    def begin(
        self,
        listener: TurnListener,
        spec: TurnSpec,
        session: Session | None,
        compilation: Compilation | None,
    ) -> None:
        """Queue a turn on a session, or a request of its own; its listener hears that it has begun."""
        setup, scheduler = self._loop.setup, self._loop.scheduler
        require_text(turn_id=spec.turn_id, fingerprint=spec.fingerprint, note=spec.note)
        sampling = spec.sampling.with_defaults(setup.defaults)
        known = 0 if session is None else session.history
        if spec.keep is not None:
            known = spec.keep
        priority = 0 if session is None else session.retention.priority
        request = self.request(spec, sampling, known, priority)
        chosen = sampling.choice(spec.choice)
        chosen.check_vocabulary(setup.model.config.vocabulary)
        constraint = _constraint(spec, chosen, compilation)
        reader = None if spec.answer is None else AnswerReader(_seeded(spec, spec.answer), setup.tokenizer)
        if session is None:
            turn = scheduler.request(spec.tenant, request, self._loop.now())
        elif session.volatile:
            turn = scheduler.submit(session.id, request, self._loop.now(), spec.keep)
        else:
            self._loop.session_log.require_writable()
            self._require_room(session.id, spec.note)
            turn = self._ahead.begin(session, request)
            if spec.tools is not None:
                self._loop.dispatcher.note_opened(session)
                self._loop.session_log.retooled(session.id, spec.tools)
        tokens = scheduler.registry.sessions[turn.session_id].sequence.tokens
        stream = TurnStream(
            setup.tokenizer,
            chosen,
            setup.end_tokens,
            # A running turn's history is never cut, so that it can be read at any time until the turn ends.
            read_prompt=lambda: [*tokens.slice(0, known), *request.tokens],
            input_first=known,
            kept=Kept(spec.fingerprint, spec.grammar, spec.note, self._keeps_reasoning(spec, session)),
            constraint=constraint,
            reader=reader,
        )
        self._loop.dispatcher.listen(turn, stream, listener)
        listener.begun(turn, stream)

    def _keeps_reasoning(self, spec: TurnSpec, session: Session | None) -> bool:
        """Whether the history keeps what a turn thinks.

        A conversation that its client sends whole keeps it: what the client sends next decides.
        """
        if session is None or session.volatile:
            return True
        if spec.keep_reasoning is not None:
            return spec.keep_reasoning
        entry = self._loop.session_log.sessions.get(session.id)
        return entry is None or entry.settings.keep_reasoning

    def _require_room(self, session_id: str, note: str | None) -> None:
        """Refuse a note if the session's notes are too large together."""
        entry = self._loop.session_log.sessions.get(session_id)
        if note is None or entry is None:
            return
        most = max(NOTES_MIN, NOTE_CHARACTERS_PER_TOKEN * self._loop.setup.model.context_length)
        if len(note) + entry.note_characters > most:
            raise NotesTooLarge(f"the session may keep {most} characters about its turns")

    def request(self, spec: TurnSpec, sampling: Sampling, known: int, priority: int = 0) -> TurnRequest:
        """The request to the core. Without a limit, a turn may fill the rest of the context."""
        room = self.tokens_max(spec.tenant) - known - len(spec.tokens)
        limit = sampling.max_tokens if sampling.max_tokens is not None else max(1, room)
        if spec.fits and room >= 1:
            limit = min(limit, room)
        return TurnRequest(
            spec.turn_id,
            tuple(spec.tokens),
            limit,
            priority,
            goes_on=spec.goes_on,
            on_abort=KEEP_ALL if spec.keeps else None,
            deadline=None if spec.timeout is None else self._loop.now() + spec.timeout,
            computes_from=spec.computes_from,
            expect_return=spec.expect_return,
        )

    def tokens_max(self, tenant: str) -> int:
        """The longest sequence that a tenant may have: within the context, and within its quota."""
        ledger, context_length = self._loop.scheduler.registry.ledger, self._loop.setup.model.context_length
        if not ledger.layout.full:
            return context_length
        pages = ledger.account(tenant).limits[ledger.pool(Component.FULL).index]
        return min(context_length, pages * ledger.layout.page_size)


def _constraint(spec: TurnSpec, sampling: Sampling, compilation: Compilation | None) -> TurnConstraint | None:
    """What constrains a turn: its grammar, its thinking budget, or nothing. Raises `GrammarRefused`."""
    has_budget = spec.answer is not None and spec.answer.thinking_tokens is not None
    if compilation is None:
        return TurnConstraint(None, takes_runs=_takes_runs(sampling)) if has_budget else None
    try:
        compiled = compilation.result()
    except GrammarError as error:
        raise GrammarRefused(error) from error
    return TurnConstraint(compiled.matcher(), takes_runs=_takes_runs(sampling))


def _takes_runs(sampling: Sampling) -> bool:
    """Whether forced tokens need no logits of their own: nothing is reported of them, or depends on them."""
    return sampling.logprobs is None and not is_penalised(sampling)


def _seeded(spec: TurnSpec, answer: AnswerSpec) -> AnswerSpec:
    """How the answer is read, with a seed for the ids of its calls: the same for a turn that is repeated."""
    if answer.seed:
        return answer
    return replace(answer, seed=f"{spec.session_id} {spec.turn_id} {spec.choice}")
