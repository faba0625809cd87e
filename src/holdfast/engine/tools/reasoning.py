"""Separates reasoning from the answer.

    <think>…</think>                          DeepSeek, Qwen, Nemotron, SmolLM3; the prompt often opens it
    [THINK]…[/THINK]                          Mistral
    <|channel>thought…<channel|>              Gemma 4

A marker that is a token opens reasoning anywhere in the answer; one that is text only where the answer
begins. The text after the reasoning goes to the machine of the calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from holdfast.engine.tools.emitter import SPACE_HELD_MAX, Emitter
from holdfast.engine.tools.machine import Machine
from holdfast.engine.tools.markers import MARK, MarkerLexer


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers of one family; `label` is what stands after the first one."""

    opens: str
    closes: str
    label: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers of the format."""
        return (self.opens, self.closes)

    def is_open_in(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with the marker, so that the answer begins inside the reasoning."""
        return prompt.rstrip().endswith(self.opens + self.label)


class State(Enum):
    """Which part of the answer is being read."""

    BEFORE = auto()
    LABEL = auto()
    REASONING = auto()
    ANSWER = auto()


class ReasoningSplitter:
    """Reads one answer. `is_open`: the prompt has opened the reasoning."""

    __slots__ = ("_closes", "_emitter", "_held", "_label", "_lexer", "_machine", "_opens", "_state")

    def __init__(
        self,
        reasoning: ReasoningFormat,
        emitter: Emitter,
        lexer: MarkerLexer,
        machine: Machine,
        *,
        is_open: bool,
    ) -> None:
        self._emitter = emitter
        self._lexer = lexer
        self._machine = machine
        self._opens = lexer.marks[reasoning.opens]
        self._closes = lexer.marks[reasoning.closes]
        self._label = reasoning.label
        self._held = ""
        """White space before the marker, or the part of the label that was read."""
        self._state = State.BEFORE
        if is_open:
            self._emitter.turn("")
            self._state = State.REASONING

    @property
    def settled(self) -> bool:
        """Whether an answer that is cut here has no half a call."""
        return self._state is not State.ANSWER or self._machine.settled

    @property
    def reasons(self) -> bool:
        """Whether the last character read was reasoning."""
        return self._state in (State.LABEL, State.REASONING)

    def feed(self, chunk: str) -> None:
        """Read more text with marks."""
        place = 0
        while place < len(chunk):
            if self._state is State.ANSWER:
                place = self._answer(chunk, place)
            elif self._state is State.BEFORE:
                place = self._before(chunk, place)
            elif self._state is State.LABEL:
                place = self._read_label(chunk, place)
            else:
                place = self._reasoning(chunk, place)

    def finish(self) -> None:
        """The answer is over."""
        if self._state is State.LABEL:
            self._emitter.reasoning(self._take_held())
        elif self._held:
            self._machine.feed(self._take_held())
        self._machine.finish()

    def _open(self, place: int) -> int:
        self._emitter.turn(self._lexer.expand(self._opens))
        self._state = State.LABEL if self._label else State.REASONING
        return place + 1

    def _before(self, chunk: str, place: int) -> int:
        """White space may stand before the marker."""
        end = place
        while end < len(chunk) and chunk[end].isspace() and len(self._held) + end - place < SPACE_HELD_MAX:
            end += 1
        self._held += chunk[place:end]
        if end == len(chunk):
            return end
        if chunk[end] == self._opens:
            self._emitter.turn(self._take_held())
            return self._open(end)
        self._state = State.ANSWER
        if self._held:
            self._machine.feed(self._take_held())
        return end

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held

    def _read_label(self, chunk: str, place: int) -> int:
        """The label after the marker; where another text stands, it is part of the reasoning."""
        if chunk[place] == self._label[len(self._held)]:
            self._held += chunk[place]
            if self._held == self._label:
                self._emitter.turn(self._take_held())
                self._state = State.REASONING
            return place + 1
        self._emitter.reasoning(self._take_held())
        self._state = State.REASONING
        return place

    def _reasoning(self, chunk: str, place: int) -> int:
        if chunk[place] == self._closes:
            self._emitter.turn(self._lexer.expand(self._closes))
            self._state = State.ANSWER
            return place + 1
        found = MARK.search(chunk, place)
        end = len(chunk) if found is None else max(found.start(), place + 1)
        said = chunk[place:end]
        self._emitter.reasoning(said if found is None else self._lexer.expand(said))
        return end

    def _answer(self, chunk: str, place: int) -> int:
        end = -1 if self._opens in self._lexer.literal else chunk.find(self._opens, place)
        if end == place and self._machine.idle:
            self._machine.release()
            return self._open(place)
        if end == place:
            end += 1
        if end < 0:
            end = len(chunk)
        self._machine.feed(chunk[place:end] if end - place < len(chunk) else chunk)
        return end
