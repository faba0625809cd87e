"""A turn as its caller in the same process sees it: text as it comes, and the result once it is done.

Iterating over a turn drives the engine, and so all turns in flight. Made by `Session.say`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from holdfast.core.events import Event, EventKind
from holdfast.core.turn import Turn as CoreTurn
from holdfast.engine.listeners import Refusal, TurnListener
from holdfast.engine.text.stream import TokenLogprob, TurnStream
from holdfast.engine.tools.answer import Answer as TurnAnswer
from holdfast.engine.tools.events import Call
from holdfast.engine.tools.events import Event as AnswerEvent
from holdfast.engine.turns.spec import TurnSpec
from holdfast.engine.verbs import Verbs

__all__ = ["Driver", "Turn", "TurnFailed", "Usage"]


class Driver(Protocol):
    """The engine that a turn runs on."""

    verbs: Verbs

    def drive(self) -> None:
        """Make one step for all turns in flight."""


class TurnFailed(RuntimeError):
    """A turn failed; the session is as it was before the turn."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a turn: `prompt` includes the history, `cached` is the part of it that was in memory.

    `computed` is everything that the model computed for the turn, with generated tokens and recomputation;
    over HTTP it counts the prompt alone.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int


class Hearing(TurnListener):
    """Hears one turn of this process."""

    __slots__ = ("end", "refusal", "stream", "turn")

    def __init__(self) -> None:
        self.turn: CoreTurn | None = None
        self.stream: TurnStream | None = None
        self.refusal: Refusal | None = None
        self.end: Event | None = None

    def begun(self, turn: CoreTurn, stream: TurnStream) -> None:
        """The turn is queued."""
        self.turn, self.stream = turn, stream

    def refused(self, refusal: Refusal) -> None:
        """The turn was refused."""
        self.refusal = refusal

    def hear(self, event: Event) -> None:
        """The turn has more tokens, or has ended."""
        if event.kind is not EventKind.TOKENS and self.stream is not None:
            self.end = event
            self.stream.end(cut=event.kind is EventKind.ABORTED)


class Turn:
    """A turn as its caller sees it: an iterator of text, and the result once it is done."""

    __slots__ = ("_engine", "_hearing", "_said", "_stream", "_turn")

    def __init__(self, engine: Driver, spec: TurnSpec) -> None:
        """Submit a turn, and drive the engine until it is queued; raises if it is refused."""
        hearing = Hearing()
        engine.verbs.submit(hearing, spec)
        while hearing.turn is None or hearing.stream is None:
            if hearing.refusal is not None:
                raise hearing.refusal
            engine.drive()
        self._engine = engine
        self._hearing = hearing
        self._turn = hearing.turn
        self._stream = hearing.stream
        self._said = 0

    @property
    def id(self) -> str:
        """The id of the turn."""
        return self._turn.request.turn_id

    @property
    def done(self) -> bool:
        """Whether the turn has ended."""
        return self._hearing.end is not None

    def __iter__(self) -> Iterator[str]:
        while True:
            if text := self.take():
                yield text
            if self.done:
                break
            self._engine.drive()
        self._raise_failure()

    def take(self) -> str:
        """The text since the last call, for callers who drive the engine themselves."""
        pieces = self._stream.pieces
        text = "".join(pieces[self._said :])
        self._said = len(pieces)
        return text

    def wait(self) -> Turn:
        """Drive the engine until the turn is done."""
        while not self.done:
            self._engine.drive()
        self._raise_failure()
        return self

    def _raise_failure(self) -> None:
        end = self._hearing.end
        if end is not None and end.kind is EventKind.FAILED:
            raise TurnFailed(f"turn {self.id} failed: {end.reason}")

    @property
    def text(self) -> str:
        """The text of the turn that stays in the history; waits for the end."""
        self.wait()
        return self._stream.text_of(self._turn.generated)

    @property
    def tokens_shown(self) -> int:
        """How many generated tokens lie wholly inside the text that was taken so far."""
        stream = self._stream
        return stream.tokens_of(sum(map(len, stream.pieces[: self._said])))

    @property
    def tokens_settled(self) -> int:
        """How many of the tokens so far lie outside half a call, where calls are read; else those shown."""
        return self.tokens_shown if self._stream.reader is None else self._stream.settled_tokens

    @property
    def answer(self) -> TurnAnswer:
        """The answer that stays in the history, in its parts; waits for the end."""
        self.wait()
        return self._stream.answer(self._turn.generated)

    @property
    def reasoning(self) -> str:
        """The reasoning, if the model marks it; waits for the end."""
        return self.answer.reasoning

    @property
    def calls(self) -> tuple[Call, ...]:
        """The complete tool calls of the turn; waits for the end."""
        return self.answer.complete_calls

    @property
    def events(self) -> list[AnswerEvent]:
        """The parts of the answer so far, in order, if it is read for reasoning and tool calls."""
        return self._stream.events

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens that stay in the history; waits for the end."""
        self.wait()
        return self._stream.tokens[: self._turn.generated]

    @property
    def finish_reason(self) -> str:
        """`stop`, `length`, `tool_calls` or `abort`; waits for the end."""
        end = self.wait()._hearing.end
        assert end is not None, "a turn that is done has its end"
        if end.kind is EventKind.ABORTED:
            return "abort"
        return "tool_calls" if end.reason == "stop" and self.calls else end.reason

    @property
    def usage(self) -> Usage:
        """The token counts of the turn; waits for the end."""
        turn = self.wait()._turn
        return Usage(turn.input_end, turn.cached, turn.computed, turn.generated)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of `token_ids`, if they were requested; waits for the end."""
        self.wait()
        return self._stream.logprobs[: self._turn.generated]

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the input from its second token on, if they were requested."""
        return self.wait()._stream.prompt_logprobs
