"""Calls whose arguments are one object: Hermes, Qwen, Granite, Nemotron, Llama 3 JSON, Mistral, Gemma.

A call is a JSON object with a name and arguments, alone or in an array, or a name with the arguments after
it:

    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>         Hermes, Qwen 2.5 and 3, Granite 4
    <TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>         Nemotron Nano 2
    {"name": "f", "parameters": {"a": 1}}                               Llama 3, perhaps after <|python_tag|>
    [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "…"}]       Mistral, first generation
    [TOOL_CALLS]f[CALL_ID]…[ARGS]{"a": 1}                               Mistral, second generation
    <|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>                Gemma; FunctionGemma has other markers
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from holdfast.engine.tools.call_object import CallObject, ObjectState
from holdfast.engine.tools.emitter import Emitter
from holdfast.engine.tools.events import Outcome
from holdfast.engine.tools.machine import NAME, NAME_MAX, OfferedTools, StepMachine
from holdfast.engine.tools.markers import MARK, MarkerLexer
from holdfast.engine.tools.values import Notation, ValueReader
from holdfast.engine.tools.values import State as ValueState


@dataclass(frozen=True, slots=True)
class JsonCallFormat:
    """The markers of one family. Without `opens` a call may stand only where the answer begins."""

    opens: str | None = None
    closes: str | None = None
    at_start: bool = False
    """Whether the answer may begin with a call that no marker announces."""
    named: bool = False
    """Whether a name may stand before the arguments instead of inside an object."""
    prefix: str = ""
    """What stands before such a name."""
    call_id: str | None = None
    arguments: str | None = None
    """Markers before a named call's id and its arguments."""
    notation: Notation = Notation.JSON
    quote: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers of the format."""
        every = (self.opens, self.closes, self.call_id, self.arguments, self.quote)
        return tuple(marker for marker in every if marker)


class State(Enum):
    """The expected next character."""

    TEXT = auto()
    BODY = auto()
    OBJECT = auto()
    NAME = auto()
    CALL_ID = auto()
    ARGUMENTS = auto()
    RAW = auto()
    BETWEEN = auto()


class JsonCalls(StepMachine):
    """The machine of one answer in such a format."""

    __slots__ = ("_call_id", "_format", "_listed", "_marked", "_marks", "_name", "_object", "_values")

    def __init__(
        self,
        call_format: JsonCallFormat,
        emitter: Emitter,
        lexer: MarkerLexer,
        offered: OfferedTools | None,
    ) -> None:
        super().__init__(emitter, lexer, offered, State.TEXT)
        self._format = call_format
        self._marks = lexer.marks
        self._object: CallObject | None = None
        self._values: ValueReader | None = None
        self._name = ""
        self._call_id = ""
        self._marked = False
        """Whether a marker announced the calls; others must name an offered tool."""
        self._listed = False
        """Whether an array of calls is open."""
        if call_format.closes is None:
            self._closed_states = frozenset({State.BETWEEN})
        self._steps = {
            State.TEXT: self._text,
            State.BODY: self._body,
            State.OBJECT: self._read_object,
            State.NAME: self._read_name,
            State.CALL_ID: self._read_id,
            State.ARGUMENTS: self._read_arguments,
            State.RAW: self._raw,
            State.BETWEEN: self._between,
        }

    def _is(self, character: str, marker: str | None) -> bool:
        """Whether a character is the mark of a marker of the format."""
        return marker is not None and self._marks[marker] == character

    def _text(self, chunk: str, place: int) -> int:
        if self._is(chunk[place], self._format.opens):
            self._hold(chunk[place])
            self._marked, self._listed = True, False
            self._state = State.BODY
            return place + 1
        if self._at_start and self._format.at_start:
            end = self._hold_space(chunk, place)
            if self._too_long:
                return self._fail(end)
            if end == len(chunk):
                return end
            if chunk[end] in "{[":
                self._marked = self._listed = False
                self._state = State.BODY
                return end
            if self._is(chunk[end], self._format.opens):
                return end
            return self._fail(end)
        return self._say(chunk, place)

    def _body(self, chunk: str, place: int) -> int:
        place = self._hold_space(chunk, place)
        if self._too_long:
            return self._fail(place)
        if place == len(chunk):
            return place
        character = chunk[place]
        if character == "[" and not self._listed and self._format.notation is Notation.JSON:
            self._listed = True
            self._hold(character)
            return place + 1
        if character == "{" and self._format.notation is Notation.JSON:
            return self._open_object(place)
        if self._format.named and not self._listed and NAME.fullmatch(character):
            self._name = self._call_id = ""
            self._state = State.NAME
            return place
        return self._fail(place)

    def _open_object(self, place: int) -> int:
        offered = None if self._marked else self._offered
        self._object = CallObject(self._emitter, self._lexer, offered, self._take_object_held())
        self._state = State.OBJECT
        return place

    def _take_object_held(self) -> list[str]:
        """The held text, for the object to hold on."""
        held, self._held, self._held_size = self._held, [], 0
        return held

    def _read_object(self, chunk: str, place: int) -> int:
        reader = self._object
        assert reader is not None
        place = reader.read(chunk, place)
        if reader.state is ObjectState.DONE:
            self._at_start = False
            self._state = State.BETWEEN
        elif reader.state is ObjectState.NO_CALL:
            self._held = reader.held
            return self._fail(place)
        elif reader.state is ObjectState.BROKEN:
            self._at_start = False
            if self._format.closes is None:
                return self._break(place)
            self._state = State.RAW
        return place

    def _read_name(self, chunk: str, place: int) -> int:
        name = self._name_so_far(self._name, chunk, place)
        self._hold(name[len(self._name) :])
        place += len(name) - len(self._name)
        self._name = name
        if len(name) > NAME_MAX:
            return self._fail(place)
        if place == len(chunk):
            return place
        character = chunk[place]
        if not name.startswith(self._format.prefix) or name == self._format.prefix:
            return self._fail(place)
        if self._is(character, self._format.call_id):
            self._hold(character)
            self._state = State.CALL_ID
            return place + 1
        return self._begin_named(character, place)

    def _begin_named(self, character: str, place: int) -> int:
        """The call begins where its arguments do."""
        marked = self._format.arguments is not None
        if not (self._is(character, self._format.arguments) if marked else character == "{"):
            return self._fail(place)
        if marked:
            self._hold(character)
        self._emitter.begin(self._name.removeprefix(self._format.prefix), self._take_held(), self._call_id)
        self._values = self._value_reader()
        self._state = State.ARGUMENTS
        return place + 1 if marked else place

    def _value_reader(self) -> ValueReader:
        quote = self._marks[self._format.quote] if self._format.quote else ""
        return ValueReader(self._format.notation, self._lexer.expand, self._lexer.literal, quote)

    def _read_id(self, chunk: str, place: int) -> int:
        call_id = self._name_so_far(self._call_id, chunk, place)
        self._hold(call_id[len(self._call_id) :])
        place += len(call_id) - len(self._call_id)
        self._call_id = call_id
        if len(call_id) > NAME_MAX:
            return self._fail(place)
        return place if place == len(chunk) else self._begin_named(chunk[place], place)

    def _read_arguments(self, chunk: str, place: int) -> int:
        values = self._values
        assert values is not None
        if values.untouched and chunk[place] not in "{ \t\r\n":
            return self._break_arguments(place)
        end = values.read(chunk, place)
        self._emitter.arguments(values.take(), self._lexer.expand(chunk[place:end]))
        if values.state is ValueState.DONE:
            self._emitter.end(Outcome.COMPLETE)
            self._state = State.BETWEEN
        elif values.state is ValueState.BROKEN:
            return self._break_arguments(end)
        return end

    def _break_arguments(self, place: int) -> int:
        if self._format.closes is None or self._format.notation is not Notation.JSON:
            return self._break(place)
        self._state = State.RAW
        return place

    def _raw(self, chunk: str, place: int) -> int:
        """Broken arguments are passed on as they are, up to the marker that closes the call."""
        found = MARK.search(chunk, place)
        end = len(chunk) if found is None else found.start()
        if found is not None and self._is(found.group(), self._format.closes):
            if end > place:
                self._emitter.arguments(chunk[place:end], chunk[place:end])
            self._emitter.end(Outcome.BROKEN, self._lexer.expand(found.group()))
            self._state = State.TEXT
            return end + 1
        end = max(end, place + 1)
        wire = self._lexer.expand(chunk[place:end])
        self._emitter.arguments(wire, wire)
        return end

    def _between(self, chunk: str, place: int) -> int:
        """After a call: separators, the closing marker, or the next call."""
        character = chunk[place]
        if character in " \t\r\n,;]":
            self._emitter.markup(character)
            return place + 1
        if character == "{" and self._format.notation is Notation.JSON:
            return self._open_object(place)
        self._state = State.TEXT
        if self._is(character, self._format.closes):
            self._emitter.markup(self._lexer.expand(character))
            return place + 1
        return place

    def finish(self) -> None:
        """The answer is over: the held characters are text."""
        if self._state is State.OBJECT and self._object is not None:
            self._held = self._object.held
        super().finish()
