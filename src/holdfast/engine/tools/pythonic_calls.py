"""Calls written as Python: Llama 3.2 and 4 ([f(a=1), g(b="x")]), LFM2 between markers of its own.

Without a marker a call may stand only where the answer begins, and must name an offered tool, so that a list
or a link in Markdown is not taken for one. Arguments are keywords with literal values, written as JSON.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from holdfast.engine.tools.emitter import Emitter
from holdfast.engine.tools.events import Outcome
from holdfast.engine.tools.machine import NAME_MAX, OfferedTools, StepMachine
from holdfast.engine.tools.markers import MarkerLexer
from holdfast.engine.tools.values import Notation, ValueReader, quoted
from holdfast.engine.tools.values import State as ValueState

_WORD = re.compile(r"[A-Za-z0-9_.]*")
_KEYWORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class PythonicFormat:
    """The markers of one family; a call without markers may begin the answer if `at_start`."""

    opens: str
    closes: str
    at_start: bool

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers of the format."""
        return (self.opens, self.closes)


class State(Enum):
    """The expected next character."""

    TEXT = auto()
    BODY = auto()
    NAME = auto()
    KEY = auto()
    EQUALS = auto()
    VALUE = auto()
    AFTER_VALUE = auto()
    BETWEEN = auto()
    AFTER = auto()


class PythonicCalls(StepMachine):
    """The machine of one answer in this format."""

    __slots__ = ("_format", "_marked", "_marks", "_values", "_word", "_written")

    def __init__(
        self, call_format: PythonicFormat, emitter: Emitter, lexer: MarkerLexer, offered: OfferedTools | None
    ) -> None:
        super().__init__(emitter, lexer, offered, State.TEXT)
        self._format = call_format
        self._marks = lexer.marks
        self._values = self._reader()
        self._word = ""
        self._written = 0
        """How many arguments of the call were read."""
        self._marked = False
        if call_format.at_start:
            self._closed_states = frozenset({State.AFTER})  # The closing marker may be missing.
        self._steps = {
            State.TEXT: self._text,
            State.BODY: self._body,
            State.NAME: self._read_name,
            State.KEY: self._read_key,
            State.EQUALS: self._equals,
            State.VALUE: self._value,
            State.AFTER_VALUE: self._after_value,
            State.BETWEEN: self._between,
            State.AFTER: self._after,
        }

    def _reader(self) -> ValueReader:
        return ValueReader(Notation.PYTHON, self._lexer.expand, self._lexer.literal)

    def _text(self, chunk: str, place: int) -> int:
        if chunk[place] == self._marks[self._format.opens]:
            self._hold(chunk[place])
            self._marked = True
            self._state = State.BODY
            return place + 1
        if self._at_start and self._format.at_start:
            end = self._hold_space(chunk, place)
            if self._too_long:
                return self._fail(end)
            if end == len(chunk):
                return end
            if chunk[end] == "[":
                self._marked = False
                self._state = State.BODY
                return end
            if chunk[end] == self._marks[self._format.opens]:
                return end
            return self._fail(end)
        return self._say(chunk, place)

    def _body(self, chunk: str, place: int) -> int:
        place = self._hold_space(chunk, place)
        if self._too_long:
            return self._fail(place)
        if place == len(chunk):
            return place
        if chunk[place] != "[":
            return self._fail(place)
        self._hold("[")
        self._word = ""
        self._state = State.NAME
        return place + 1

    def _grow(self, chunk: str, place: int) -> int:
        """Read more of a name or a keyword; returns the place after it."""
        found = _WORD.match(chunk, place, place + NAME_MAX + 1 - len(self._word))
        assert found is not None, "matches at least the empty text"
        self._word += found.group()
        return found.end()

    def _read_name(self, chunk: str, place: int) -> int:
        """The name up to its parenthesis: text until then, also after an earlier call."""
        if not self._word:
            place = self._hold_space(chunk, place)
        end = self._grow(chunk, place)
        self._hold(chunk[place:end])
        if len(self._word) > NAME_MAX or self._too_long:
            return self._fail(end)
        if end == len(chunk):
            return end
        known = self._marked or self._offered is None or self._offered.knows(self._word)
        if chunk[end] != "(" or not self._word or not known:
            return self._fail(end)
        self._hold("(")
        self._emitter.begin(self._word, self._take_held())
        self._word, self._written = "", 0
        self._state = State.KEY
        return end + 1

    def _read_key(self, chunk: str, place: int) -> int:
        character = chunk[place]
        if not self._word and character in " \t\r\n":
            self._emitter.arguments("", character)
            return place + 1
        if not self._word and character == ")":
            return self._close(place)
        end = self._grow(chunk, place)
        self._emitter.arguments("", chunk[place:end])
        if len(self._word) > NAME_MAX:
            return self._break(end)
        if end < len(chunk):
            if not _KEYWORD.fullmatch(self._word):
                return self._break(end)
            self._state = State.EQUALS
        return end

    def _equals(self, chunk: str, place: int) -> int:
        character = chunk[place]
        if character in " \t\r\n":
            self._emitter.arguments("", character)
            return place + 1
        if character != "=":
            return self._break(place)
        opening = ", " if self._written else "{"
        self._written += 1
        self._emitter.arguments(f'{opening}"{quoted(self._word)}": ', character)
        self._values = self._reader()
        self._state = State.VALUE
        return place + 1

    def _value(self, chunk: str, place: int) -> int:
        end = self._values.read(chunk, place)
        self._emitter.arguments(self._values.take(), self._lexer.expand(chunk[place:end]))
        if self._values.state is ValueState.BROKEN:
            return self._break(end)
        if self._values.state is ValueState.DONE:
            self._state = State.AFTER_VALUE
        return end

    def _after_value(self, chunk: str, place: int) -> int:
        character = chunk[place]
        if character == ")":
            return self._close(place)
        if character not in " \t\r\n,":
            return self._break(place)
        self._emitter.arguments("", character)
        if character == ",":
            self._word = ""
            self._state = State.KEY
        return place + 1

    def _close(self, place: int) -> int:
        self._emitter.arguments("}" if self._written else "{}", "")
        self._emitter.end(Outcome.COMPLETE, ")")
        self._state = State.BETWEEN
        return place + 1

    def _between(self, chunk: str, place: int) -> int:
        character = chunk[place]
        if character in " \t\r\n":
            self._emitter.markup(character)
            return place + 1
        if character == ",":
            self._emitter.markup(character)
            self._word = ""
            self._state = State.NAME
            return place + 1
        if character != "]":
            return self._fail(place)
        self._emitter.markup(character)
        self._state = State.AFTER
        return place + 1

    def _after(self, chunk: str, place: int) -> int:
        character = chunk[place]
        if character in " \t\r\n":
            self._emitter.markup(character)
            return place + 1
        self._state = State.TEXT
        if character == self._marks[self._format.closes]:
            self._emitter.markup(self._lexer.expand(character))
            return place + 1
        return place
