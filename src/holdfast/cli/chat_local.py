"""The chat's conversations with a model in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.cli.answer_options import AnswerAsked
from holdfast.cli.progress import StartProgress
from holdfast.cli.sampling_options import CHAT_DEFAULTS, SUGGESTIONS
from holdfast.cli.terminal import Chat, Cost, Speech, Talk
from holdfast.client.values import ToolCall, TurnEvent, TurnEventKind
from holdfast.core.errors import Refused
from holdfast.engine.constraints.errors import GrammarError
from holdfast.engine.constraints.grammar import Grammar
from holdfast.engine.engine import Engine, Session, Turn, TurnFailed
from holdfast.engine.sampling import Sampling, SamplingError
from holdfast.engine.start.pull import PullError
from holdfast.engine.text.chat_template import ChatTemplateError
from holdfast.engine.tools.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    Reasoning,
    Text,
)
from holdfast.engine.tools.request import ToolsRefused
from holdfast.models.fields import ConfigurationError
from holdfast.models.generation import GenerationDefaults
from holdfast.server.dialects.answer_options import AnswerOptions
from holdfast.server.dialects.constraints import response_format

__all__ = ["Unusable", "run"]


class Unusable(ValueError):
    """The model cannot be loaded; the message is for the user."""


class LocalFields:
    """The fields of every turn: `said` for user input, `results` for tool results."""

    def __init__(self, sampling: Sampling, asked: AnswerAsked) -> None:
        self.tools = asked.tools
        self.said = {"sampling": sampling, **_turn_fields(asked.said)}
        self.results = {"sampling": sampling, **_turn_fields(asked.results)}


def _turn_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request as the engine takes them."""
    made = {name: fields[name] for name in ("tool_choice", "thinking_tokens") if name in fields}
    constraint = response_format(fields["response_format"]) if "response_format" in fields else None
    if constraint is not None:
        made["grammar"] = Grammar.of(constraint.kind, constraint.value)
    if "thinking" in fields:
        made["template_kwargs"] = AnswerOptions(thinking=fields["thinking"]).template_kwargs
    return made


class LocalSpeech:
    """A turn of the local engine."""

    def __init__(self, engine: Engine, session: Session, turn: Turn) -> None:
        self._engine = engine
        self._session = session
        self._turn = turn
        self._taken = 0

    def take(self) -> Sequence[TurnEvent] | None:
        """Run a step and return the new output."""
        running = not self._turn.done
        if running:
            self._engine.drive()
        text = self._turn.take()
        read = self._turn.events[self._taken :]
        self._taken += len(read)
        events = [self._told(event) for event in read]
        if text and not self._taken:
            events = [TurnEvent(TurnEventKind.TEXT, text)]
        return events if events or running else None

    def _told(self, event: Event) -> TurnEvent:
        """An event of the engine, as a server tells it."""
        match event:
            case Text():
                return TurnEvent(TurnEventKind.TEXT, event.text)
            case Reasoning():
                return TurnEvent(TurnEventKind.REASONING, event.text)
            case CallBegin():
                call = ToolCall(event.id, event.name, "")
                return TurnEvent(TurnEventKind.CALL, call=call, index=event.index)
            case CallArguments():
                return TurnEvent(TurnEventKind.ARGUMENTS, event.text, index=event.index)
            case CallEnd():
                return TurnEvent(TurnEventKind.CALL_DONE, index=event.index, outcome=event.outcome.value)

    def cut(self) -> None:
        """Interrupt; keep the output taken so far, without half a call."""
        self._session.interrupt(keep=self._turn.tokens_settled)

    @property
    def usage(self) -> Cost:
        """The cost of the turn."""
        return self._turn.usage

    @property
    def tool_calls(self) -> Sequence[ToolCall]:
        """The complete calls that the turn ended in."""
        return [ToolCall(call.id, call.name, call.arguments) for call in self._turn.calls]


class LocalTalk:
    """A session of the engine."""

    def __init__(self, engine: Engine, session: Session, fields: LocalFields) -> None:
        self._engine = engine
        self._session = session
        self._fields = fields

    @property
    def turns(self) -> int:
        """How many turns it has."""
        return self._session.turns

    def say(self, words: str) -> Speech:
        """Begin a turn."""
        return LocalSpeech(self._engine, self._session, self._session.say(words, **self._fields.said))

    def tool_results(self, results: Mapping[str, str]) -> Speech:
        """Begin a turn with the results of tool calls, by their ids."""
        messages = [
            {"role": "tool", "tool_call_id": call, "content": result} for call, result in results.items()
        ]
        return LocalSpeech(self._engine, self._session, self._session.say(messages, **self._fields.results))

    def rewind(self, turns: int) -> None:
        """Rewind so that `turns` turns remain."""
        self._session.rewind(turns)

    def fork(self) -> Talk:
        """A second conversation that continues from here."""
        return LocalTalk(self._engine, self._session.fork(), self._fields)


class LocalHost:
    """The engine."""

    refusals = (
        Refused,
        TurnFailed,
        SamplingError,
        ChatTemplateError,
        ToolsRefused,
        GrammarError,
    )

    def __init__(self, engine: Engine, system: str | None, fields: LocalFields) -> None:
        self._engine = engine
        self._system = system
        self._fields = fields

    def open(self) -> Talk:
        """Begin a conversation."""
        session = self._engine.session(self._system, tools=self._fields.tools)
        return LocalTalk(self._engine, session, self._fields)

    def memory(self) -> dict[str, Any]:
        """Who holds the memory."""
        return self._engine.memory()


def run(
    model: str,
    system: str | None,
    stated: dict[str, Any],
    asked: AnswerAsked,
    engine_options: dict[str, object],
) -> None:
    """Load a model and talk; `stated` are the sampling options given, `asked` is what is asked of answers."""
    sampling = Sampling(**stated)
    try:
        with StartProgress(model) as progress:
            engine = Engine(model, progress=progress, **engine_options)
    except (PullError, ConfigurationError) as error:
        raise Unusable(str(error)) from error
    with engine:
        fields = LocalFields(chat_sampling(sampling, engine.loop.setup.defaults), asked)
        Chat(LocalHost(engine, system, fields), shows_thinking=asked.shows_thinking).run()


def chat_sampling(sampling: Sampling, defaults: GenerationDefaults) -> Sampling:
    """Sampling with the defaults of the chat, where the checkpoint has none of its own."""
    if any(getattr(defaults, name) is not None for name in SUGGESTIONS):
        return sampling
    open_fields = {name: value for name, value in CHAT_DEFAULTS.items() if getattr(sampling, name) is None}
    return replace(sampling, **open_fields)
