"""Calls with one tag for each parameter: Qwen3-Coder, Qwen 3.5, Nemotron 3.

    <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

Values are plain text, and the tool's schema gives their types: strings are streamed, other values are
buffered until they are complete and written as JSON. A value of a wrong type is passed on as a string.
"""

from __future__ import annotations

import json
from enum import Enum, auto

from holdfast.engine.tools.emitter import Emitter
from holdfast.engine.tools.events import Outcome
from holdfast.engine.tools.machine import HELD_MAX, NAME_MAX, OfferedTools, StepMachine
from holdfast.engine.tools.markers import MARK, MarkerLexer
from holdfast.engine.tools.values import quoted

OPENS, CLOSES = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MARKERS = (OPENS, CLOSES, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)

_WORDS = {"true": True, "True": True, "false": False, "False": False}
_NULLS = ("null", "None")


class State(Enum):
    """The expected next character."""

    TEXT = auto()
    BODY = auto()
    NAME = auto()
    PARAMETERS = auto()
    KEY = auto()
    VALUE = auto()
    AFTER = auto()


class XmlCalls(StepMachine):
    """The machine of one answer in this format."""

    __slots__ = (
        "_any",
        "_begins_value",
        "_key",
        "_marks",
        "_name",
        "_newline",
        "_raw",
        "_raw_size",
        "_types",
    )

    def __init__(self, emitter: Emitter, lexer: MarkerLexer, offered: OfferedTools | None) -> None:
        super().__init__(emitter, lexer, offered, State.TEXT)
        self._marks = lexer.marks
        self._name = ""
        self._key = ""
        self._any = False
        """Whether the call has a parameter already."""
        self._types: tuple[str, ...] = ()
        self._raw: list[str] | None = None
        """The value so far; None while it is streamed as a string."""
        self._raw_size = 0
        self._begins_value = False
        self._newline = False
        """Whether a line break was read that may be the last of the value."""
        self._steps = {
            State.TEXT: self._text,
            State.BODY: self._body,
            State.NAME: self._read_name,
            State.PARAMETERS: self._parameters,
            State.KEY: self._read_key,
            State.VALUE: self._value,
            State.AFTER: self._after,
        }

    def _text(self, chunk: str, place: int) -> int:
        character = chunk[place]
        if character == self._marks[OPENS]:
            self._hold(character)
            self._state = State.BODY
            return place + 1
        if character == self._marks[FUNCTION]:
            return self._open_name(character, place)
        return self._say(chunk, place)

    def _body(self, chunk: str, place: int) -> int:
        place = self._hold_space(chunk, place)
        if self._too_long:
            return self._fail(place)
        if place == len(chunk):
            return place
        if chunk[place] != self._marks[FUNCTION]:
            return self._fail(place)
        return self._open_name(chunk[place], place)

    def _open_name(self, character: str, place: int) -> int:
        self._hold(character)
        self._name = ""
        self._state = State.NAME
        return place + 1

    def _read_name(self, chunk: str, place: int) -> int:
        end = self._tag_end(chunk, place, len(self._name))
        self._name += chunk[place:end]
        self._hold(chunk[place:end])
        if len(self._name) > NAME_MAX:
            return self._fail(end)
        if end == len(chunk):
            return end
        if chunk[end] != ">" or not self._name.strip():
            return self._fail(end)
        self._hold(">")
        self._name = self._name.strip()
        self._emitter.begin(self._name, self._take_held())
        self._any = False
        self._state = State.PARAMETERS
        return end + 1

    def _tag_end(self, chunk: str, place: int, size: int) -> int:
        """The place of the first character that does not belong to a tag's name, of which `size` are read."""
        limit = min(len(chunk), place + NAME_MAX + 1 - size)
        while place < limit and chunk[place] not in "<>\n" and not MARK.match(chunk[place]):
            place += 1
        return place

    def _parameters(self, chunk: str, place: int) -> int:
        character = chunk[place]
        if character in " \t\r\n":
            self._emitter.arguments("", character)
            return place + 1
        if character == self._marks[PARAMETER]:
            self._emitter.arguments("", PARAMETER)
            self._key = ""
            self._state = State.KEY
            return place + 1
        if character in (self._marks[FUNCTION_END], self._marks[CLOSES]):
            wire = self._lexer.expand(character)
            self._emitter.arguments("}" if self._any else "{}", "")
            self._emitter.end(Outcome.COMPLETE, wire)
            self._state = State.AFTER if wire == FUNCTION_END else State.TEXT
            return place + 1
        return self._break(place)

    def _read_key(self, chunk: str, place: int) -> int:
        end = self._tag_end(chunk, place, len(self._key))
        self._key += chunk[place:end]
        self._emitter.arguments("", chunk[place:end])
        if len(self._key) > NAME_MAX:
            return self._break(end)
        if end == len(chunk):
            return end
        if chunk[end] != ">" or not self._key.strip():
            return self._break(end)
        self._open_value(self._key.strip())
        return end + 1

    def _open_value(self, key: str) -> None:
        types = self._offered.types_of(self._name, key) if self._offered is not None else ()
        self._types = types
        streams = all(kind == "string" for kind in types)
        self._raw, self._raw_size = (None, 0) if streams else ([], 0)
        self._begins_value, self._newline = True, False
        opening = ", " if self._any else "{"
        self._any = True
        self._emitter.arguments(f'{opening}"{quoted(key)}": ' + ('"' if streams else ""), ">")
        self._state = State.VALUE

    def _value(self, chunk: str, place: int) -> int:
        found = MARK.search(chunk, place)
        end = len(chunk) if found is None else found.start()
        if end > place:
            self._add(chunk[place:end], chunk[place:end])
            return end
        mark = chunk[place]
        if mark == self._marks[PARAMETER_END]:
            self._end_value()
            return place + 1
        if mark not in self._lexer.literal:
            return self._break(place)
        text = self._lexer.expand(mark)
        self._add(text, text)
        return place + 1

    def _add(self, text: str, wire: str) -> None:
        """More of the value; the line breaks after the tag and before the next one are not part of it."""
        if self._begins_value:
            self._begins_value = False
            text = text.removeprefix("\n")
        if self._newline and text:
            text, self._newline = "\n" + text, False
        if text.endswith("\n"):
            text, self._newline = text[:-1], True
        if self._raw is None:
            self._emitter.arguments(quoted(text), wire)
            return
        self._raw.append(text)
        self._raw_size += len(text)
        self._emitter.arguments("", wire)
        if self._raw_size > HELD_MAX:
            self._emitter.arguments('"' + quoted("".join(self._raw)), "")
            self._raw = None

    def _end_value(self) -> None:
        if self._raw is None:
            self._emitter.arguments('"', PARAMETER_END)
        else:
            self._emitter.arguments(typed("".join(self._raw), self._types), PARAMETER_END)
        self._raw = None
        self._state = State.PARAMETERS

    def _after(self, chunk: str, place: int) -> int:
        character = chunk[place]
        if character in " \t\r\n":
            self._emitter.markup(character)
            return place + 1
        self._state = State.TEXT
        if character == self._marks[CLOSES]:
            self._emitter.markup(CLOSES)
            return place + 1
        return place


def typed(raw: str, types: tuple[str, ...]) -> str:
    """JSON text of a value that is one of `types`; a JSON string if it is none of them."""
    for kind in types:
        if kind == "string":
            break
        value = _converted(raw.strip(), kind)
        if value is not None:
            return value
    return json.dumps(raw, ensure_ascii=False)


def _converted(raw: str, kind: str) -> str | None:
    """JSON text of a value of one type; None if it has another."""
    if kind == "null":
        return "null" if raw in _NULLS else None
    if kind == "boolean":
        return json.dumps(_WORDS[raw]) if raw in _WORDS else None
    try:
        value = json.loads(raw, parse_constant=_reject)
    except (ValueError, RecursionError):
        return None
    fits = {
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
    }
    return raw if fits.get(kind, False) else None


def _reject(word: str) -> object:
    raise ValueError(f"{word} is not JSON")
