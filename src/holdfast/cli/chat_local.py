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
from holdfast.engine.engine import Engine, Session, Turn, TurnFailed
from holdfast.engine.pull import PullError
from holdfast.engine.sampling import Sampling, SamplingError
from holdfast.engine.text.chat_template import ChatTemplateError
from holdfast.models.fields import ConfigurationError
from holdfast.models.generation import GenerationDefaults

__all__ = ["Unusable", "run"]


class Unusable(ValueError):
    """The model cannot be loaded; the message is for the user."""


class LocalSpeech:
    """A turn of the local engine."""

    def __init__(self, engine: Engine, session: Session, turn: Turn) -> None:
        self._engine = engine
        self._session = session
        self._turn = turn

    def take(self) -> Sequence[TurnEvent] | None:
        """Run a step and return what is new."""
        running = not self._turn.done
        if running:
            self._engine.drive()
        text = self._turn.take()
        if text:
            return (TurnEvent(TurnEventKind.TEXT, text),)
        return () if running else None

    def cut(self) -> None:
        """Interrupt; keep the text taken so far."""
        self._session.interrupt(keep=self._turn.tokens_shown)

    @property
    def usage(self) -> Cost:
        """What the turn cost."""
        return self._turn.usage

    @property
    def tool_calls(self) -> Sequence[ToolCall]:
        """The complete calls that the turn ended in."""
        return ()


class LocalTalk:
    """A session of the engine."""

    def __init__(self, engine: Engine, session: Session, sampling: Sampling) -> None:
        self._engine = engine
        self._session = session
        self._sampling = sampling

    @property
    def turns(self) -> int:
        """How many turns it has."""
        return self._session.turns

    def say(self, words: str) -> Speech:
        """Begin a turn."""
        return LocalSpeech(self._engine, self._session, self._session.say(words, self._sampling))

    def tool_results(self, results: Mapping[str, str]) -> Speech:
        """Begin a turn with the results of tool calls, by their ids."""
        raise NotImplementedError

    def rewind(self, turns: int) -> None:
        """Rewind so that `turns` turns remain."""
        self._session.rewind(turns)

    def fork(self) -> Talk:
        """A second conversation that continues from here."""
        return LocalTalk(self._engine, self._session.fork(), self._sampling)


class LocalHost:
    """The engine."""

    refusals = (Refused, TurnFailed, SamplingError, ChatTemplateError)

    def __init__(self, engine: Engine, system: str | None, sampling: Sampling) -> None:
        self._engine = engine
        self._system = system
        self._sampling = sampling

    def open(self) -> Talk:
        """Begin a conversation."""
        return LocalTalk(self._engine, self._engine.session(self._system), self._sampling)

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
    """Load a model and talk; `stated` are the sampling options given."""
    sampling = Sampling(**stated)
    try:
        with StartProgress(model) as progress:
            engine = Engine(model, progress=progress, **engine_options)
    except (PullError, ConfigurationError) as error:
        raise Unusable(str(error)) from error
    with engine:
        Chat(LocalHost(engine, system, chat_sampling(sampling, engine.loop.setup.defaults))).run()


def chat_sampling(sampling: Sampling, defaults: GenerationDefaults) -> Sampling:
    """Sampling with the defaults of the chat, where the checkpoint has none of its own."""
    if any(getattr(defaults, name) is not None for name in SUGGESTIONS):
        return sampling
    open_fields = {name: value for name, value in CHAT_DEFAULTS.items() if getattr(sampling, name) is None}
    return replace(sampling, **open_fields)
