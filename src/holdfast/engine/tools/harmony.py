"""Harmony, the format of gpt-oss: messages with a header, on channels.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

The prompt ends with <|start|>assistant, so the answer begins inside a header. The channel "analysis" is
reasoning; a message with a recipient is a call; everything else is text.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from holdfast.engine.tools.emitter import Emitter
from holdfast.engine.tools.events import Outcome
from holdfast.engine.tools.machine import OfferedTools, StepMachine
from holdfast.engine.tools.markers import MARK, MarkerLexer
from holdfast.engine.tools.values import Notation, ValueReader
from holdfast.engine.tools.values import State as ValueState

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

HEADER_MAX = 1024
_RECIPIENT = re.compile(r"to=([^\s\ud800-\udfff]+)")
_HEADER_START = re.compile(r"\s*(?:t|to|to=\S*\s*)?")
NAMESPACE = "functions."


class State(Enum):
    """Which part of a message is being read."""

    TEXT = auto()
    HEADER = auto()
    REASONING = auto()
    ARGUMENTS = auto()
    BETWEEN = auto()


class HarmonyCalls(StepMachine):
    """The machine of one answer in this format; it also separates the reasoning."""

    __slots__ = ("_header", "_header_marks", "_marks", "_stops", "_values")

    def __init__(self, emitter: Emitter, lexer: MarkerLexer, offered: OfferedTools | None) -> None:
        super().__init__(emitter, lexer, offered, State.TEXT)
        self._marks = lexer.marks
        self._stops = frozenset(lexer.marks[marker] for marker in (END, CALL, RETURN, START))
        self._header_marks = frozenset(lexer.marks[marker] for marker in (CHANNEL, CONSTRAIN))
        self._header = ""
        self._values = self._reader()
        self._state = State.HEADER
        self._closed_states = frozenset({State.HEADER, State.REASONING, State.BETWEEN})
        self._steps = {
            State.TEXT: self._text,
            State.HEADER: self._read_header,
            State.REASONING: self._reasoning,
            State.ARGUMENTS: self._arguments,
            State.BETWEEN: self._between,
        }

    @property
    def reasons(self) -> bool:
        """Whether the last character read was reasoning."""
        return self._state is State.REASONING

    def _reader(self) -> ValueReader:
        return ValueReader(Notation.JSON, self._lexer.expand, self._lexer.literal)

    def _read_header(self, chunk: str, place: int) -> int:
        found = MARK.search(chunk, place)
        end = len(chunk) if found is None else found.start()
        if end > place:
            end = min(end, place + HEADER_MAX + 1 - len(self._header))
            self._header += chunk[place:end]
            self._hold(chunk[place:end])
            return end if self._plausible else self._fail(end)
        mark = chunk[place]
        if mark == self._marks[MESSAGE]:
            self._hold(mark)
            self._open_message()
            return place + 1
        if mark in self._header_marks or (mark == self._marks[START] and not self._header.strip()):
            self._header += mark
            self._hold(mark)
            return place + 1
        return self._fail(place)

    @property
    def _plausible(self) -> bool:
        """Whether the header may still be one: an answer in plain text is not held back for its marker."""
        if len(self._header) > HEADER_MAX:
            return False
        return bool(MARK.search(self._header) or _HEADER_START.fullmatch(self._header))

    def _open_message(self) -> None:
        header = self._header
        recipient = _RECIPIENT.search(header)
        channel = header.partition(self._marks[CHANNEL])[2].split()[:1]
        if recipient is not None and recipient.group(1) != "assistant":
            self._emitter.begin(recipient.group(1).removeprefix(NAMESPACE), self._take_held())
            self._values = self._reader()
            self._state = State.ARGUMENTS
            return
        self._emitter.turn(self._take_held())
        self._state = State.REASONING if channel == ["analysis"] else State.TEXT

    def _text(self, chunk: str, place: int) -> int:
        if chunk[place] in self._stops:
            return self._end_message(chunk, place)
        return self._say(chunk, place)

    def _reasoning(self, chunk: str, place: int) -> int:
        if chunk[place] in self._stops:
            return self._end_message(chunk, place)
        found = MARK.search(chunk, place)
        end = len(chunk) if found is None else max(found.start(), place + 1)
        self._emitter.reasoning(self._lexer.expand(chunk[place:end]))
        return end

    def _end_message(self, chunk: str, place: int) -> int:
        """A marker ends the message; <|start|> also begins the next one."""
        self._state = State.BETWEEN
        if chunk[place] == self._marks[START]:
            return place
        self._emitter.turn(self._lexer.expand(chunk[place]))
        return place + 1

    def _arguments(self, chunk: str, place: int) -> int:
        """A call is complete with its arguments: <|call|> ends the turn and need not be part of the text."""
        if chunk[place] in self._stops:
            self._emitter.end(Outcome.BROKEN)
            return self._end_message(chunk, place)
        if self._values.untouched and chunk[place] not in "{ \t\r\n":
            self._values.state = ValueState.BROKEN  # Code for another kind of tool, say: passed on as it is.
        end = self._values.read(chunk, place)
        self._values.take()
        if end == place:
            found = MARK.search(chunk, place)
            end = len(chunk) if found is None else max(found.start(), place + 1)
        wire = self._lexer.expand(chunk[place:end])
        self._emitter.arguments(wire, wire)
        if self._values.state is ValueState.DONE:
            self._emitter.end(Outcome.COMPLETE)
            self._state = State.TEXT
        return end

    def _between(self, chunk: str, place: int) -> int:
        character = chunk[place]
        if character == self._marks[START]:
            self._hold(character)
            self._header = character
            self._state = State.HEADER
            return place + 1
        if character == self._marks[CHANNEL]:
            self._header = ""
            self._state = State.HEADER
            return place
        self._state = State.TEXT
        return place
