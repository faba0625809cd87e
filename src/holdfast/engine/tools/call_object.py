"""One call written as a JSON object: {"name": "f", "arguments": {...}}, keys in any order.

The call begins when its name is known and its arguments begin, so that they can be streamed. Arguments that
come before the name are held, up to a limit. Other keys ("id", "type") are skipped.
"""

from __future__ import annotations

import json
from enum import Enum, auto

from holdfast.engine.tools.emitter import Emitter
from holdfast.engine.tools.events import Outcome
from holdfast.engine.tools.machine import HELD_MAX, NAME_MAX, OfferedTools
from holdfast.engine.tools.markers import MarkerLexer
from holdfast.engine.tools.values import Notation, ValueReader
from holdfast.engine.tools.values import State as ValueState

ARGUMENT_KEYS = ("arguments", "parameters")


class ObjectState(Enum):
    """The expected next character, and how the object ended."""

    OPEN = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    AFTER = auto()
    DONE = auto()
    NO_CALL = auto()
    BROKEN = auto()


_ENDED = (ObjectState.DONE, ObjectState.NO_CALL, ObjectState.BROKEN)


class CallObject:
    """Reads one object. `held` is its text while it is not certain to be a call.

    With `offered` an object that names no offered tool is no call.
    """

    __slots__ = ("_arguments", "_begun", "_emitter", "_key", "_lexer", "_name", "_offered", "_raw", "_size",
                 "_streams", "_values", "held", "state")  # fmt: skip

    def __init__(
        self, emitter: Emitter, lexer: MarkerLexer, offered: OfferedTools | None, held: list[str]
    ) -> None:
        self._emitter = emitter
        self._lexer = lexer
        self._offered = offered
        self.held = held
        self.state = ObjectState.OPEN
        self._size = sum(map(len, held))
        self._begun = False
        self._key: str | None = None
        self._name: str | None = None
        self._arguments: str | None = None
        self._values = self._reader()
        self._raw: list[str] = []
        self._streams = False
        """Whether the value that is read now goes out as it comes."""

    def _reader(self) -> ValueReader:
        return ValueReader(Notation.JSON, self._lexer.expand, self._lexer.literal)

    def read(self, chunk: str, place: int) -> int:
        """Read on; returns the place of the first character that was not read."""
        while place < len(chunk) and self.state not in _ENDED:
            if self.state in (ObjectState.KEY, ObjectState.VALUE):
                place = self._read_value(chunk, place)
            else:
                place = self._read_sign(chunk, place)
        return place

    def _read_sign(self, chunk: str, place: int) -> int:
        character = chunk[place]
        if character in " \t\r\n":
            self._pass(character)
        elif self.state is ObjectState.OPEN and character == "{":
            self._pass(character)
            self.state = ObjectState.KEY_OR_END
        elif self.state is ObjectState.KEY_OR_END and character == '"':
            self._open_value(ObjectState.KEY)
            return place
        elif self.state is ObjectState.COLON and character == ":":
            self._pass(character)
            self._open_value(ObjectState.VALUE)
        elif self.state is ObjectState.AFTER and character == ",":
            self._pass(character)
            self.state = ObjectState.KEY_OR_END
        elif character == "}" and self.state is ObjectState.AFTER:
            return self._close(character, place)
        else:
            self._break()
            return place
        return place + 1

    def _pass(self, text: str) -> None:
        """Text that is no part of the arguments."""
        if self._begun:
            self._emitter.arguments("", self._lexer.expand(text))
            return
        self.held.append(text)
        self._size += len(text)
        if self._size > HELD_MAX:
            self.state = ObjectState.NO_CALL

    def _break(self) -> None:
        self.state = ObjectState.BROKEN if self._begun else ObjectState.NO_CALL

    def _open_value(self, state: ObjectState) -> None:
        self._values = self._reader()
        self._raw.clear()
        self._streams = False
        self.state = state

    def _read_value(self, chunk: str, place: int) -> int:
        if self._values.untouched:
            if chunk[place] in " \t\r\n":
                self._pass(chunk[place])
                return place + 1
            self._streams = self._begins_arguments(chunk[place])
        if not self._begun:
            chunk = chunk[: place + HELD_MAX + 1 - self._size]
        end = self._values.read(chunk, place)
        piece = self._values.take()
        if self._streams:
            self._emitter.arguments(piece, piece)
        else:
            if not self._begun:
                self._raw.append(piece)
            self._pass(chunk[place:end])
        if self._values.state is ValueState.BROKEN:
            self._break()
        elif self._values.state is ValueState.DONE and self.state not in _ENDED:
            self._end_value()
        return end

    def _begins_arguments(self, character: str) -> bool:
        """Whether the value that begins now can be streamed: the arguments, after the name."""
        is_arguments = self.state is ObjectState.VALUE and self._key in ARGUMENT_KEYS and not self._begun
        if not is_arguments or self._name is None or self._arguments is not None or character != "{":
            return False
        self._begin()
        return True

    def _begin(self) -> None:
        assert self._name is not None
        self._emitter.begin(self._name, self._lexer.expand("".join(self.held)))
        self.held.clear()
        self._begun = True

    def _end_value(self) -> None:
        raw = "".join(self._raw)
        if self.state is ObjectState.KEY:
            self._key = json.loads(raw) if not self._begun else ""
            self.state = ObjectState.COLON
            return
        self.state = ObjectState.AFTER
        if self._begun:
            return
        if self._key == "name" and self._name is None:
            self._take_name(json.loads(raw))
        elif self._key in ARGUMENT_KEYS and self._arguments is None:
            self._arguments = raw

    def _take_name(self, name: object) -> None:
        usable = isinstance(name, str) and 0 < len(name) <= NAME_MAX
        if not usable or (self._offered is not None and not self._offered.knows(str(name))):
            self.state = ObjectState.NO_CALL
            return
        self._name = str(name)

    def _close(self, character: str, place: int) -> int:
        """The object is complete: a call, if it has a name."""
        if not self._begun:
            if self._name is None:
                self.state = ObjectState.NO_CALL
                return place
            self.held.append(character)
            self._begin()
            arguments, outcome = plain_arguments(self._arguments)
            self._emitter.arguments(arguments, "")
            self._emitter.end(outcome)
        else:
            self._emitter.end(Outcome.COMPLETE, character)
        self.state = ObjectState.DONE
        return place + 1


def plain_arguments(raw: str | None) -> tuple[str, Outcome]:
    """Arguments that could not be streamed, as one JSON object: missing, null, or quoted as a string."""
    if raw is None or raw == "null":
        return "{}", Outcome.COMPLETE
    value = json.loads(raw)
    if isinstance(value, str):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return value, Outcome.BROKEN
        return value, Outcome.COMPLETE if isinstance(inner, dict) else Outcome.BROKEN
    return raw, Outcome.COMPLETE if isinstance(value, dict) else Outcome.BROKEN
