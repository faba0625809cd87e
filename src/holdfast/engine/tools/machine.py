"""The base of the state machines of all call formats.

A machine reads text with marks (see `markers`), one character or run at a time, and reports to the emitter.
Each of its states has one step, which reads on from a place and returns the next; a step either
advances or changes the state. Text from a trigger on is buffered until the name is complete and it is
certain to be a call; otherwise it is text, and reading continues after it. So no character is read
twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from holdfast.engine.tools.emitter import Emitter
from holdfast.engine.tools.events import Outcome
from holdfast.engine.tools.markers import MARK, MarkerLexer

HELD_MAX = 1 << 16
"""Longest text that is held while it is not certain to be a call."""
NAME_MAX = 256
NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The parser's view of a request's tools: their names, and the JSON types of their parameters.

    `types` maps a tool's name to its parameters' names to types in the order in which the schema lists them.
    """

    types: Mapping[str, Mapping[str, tuple[str, ...]]]

    def knows(self, name: str) -> bool:
        """Whether the request offers a tool of that name."""
        return name in self.types

    def types_of(self, name: str, parameter: str) -> tuple[str, ...]:
        """The JSON types that a parameter may have; none if its schema names none."""
        return self.types.get(name, {}).get(parameter, ())


class Machine(Protocol):
    """Reads an answer without its reasoning."""

    def feed(self, chunk: str) -> None:
        """Read more text with marks."""

    def finish(self) -> None:
        """The answer is over: the held characters are text."""

    def release(self) -> None:
        """What is held is text."""

    @property
    def idle(self) -> bool:
        """Whether the last character read was ordinary text."""

    @property
    def settled(self) -> bool:
        """Whether an answer that is cut here has no half a call: nothing is held, and no call is open."""

    @property
    def reasons(self) -> bool:
        """Whether the last character read was reasoning."""


class PlainText:
    """The machine of answers without calls."""

    __slots__ = ("_emitter", "_lexer")

    def __init__(self, emitter: Emitter, lexer: MarkerLexer) -> None:
        self._emitter = emitter
        self._lexer = lexer

    def feed(self, chunk: str) -> None:
        """All of it is text."""
        self._emitter.text(self._lexer.expand(chunk))

    def finish(self) -> None:
        """Nothing is held."""

    def release(self) -> None:
        """Nothing is held."""

    @property
    def idle(self) -> bool:
        """Always: there are no calls."""
        return True

    @property
    def settled(self) -> bool:
        """Always: there are no calls."""
        return True

    @property
    def reasons(self) -> bool:
        """Never: reasoning is read by others."""
        return False


class StepMachine:
    """A machine whose states have one step each; subclasses add theirs to `_steps`."""

    __slots__ = (
        "_at_start",
        "_closed_states",
        "_emitter",
        "_held",
        "_held_size",
        "_lexer",
        "_offered",
        "_state",
        "_steps",
        "_text_state",
    )

    def __init__(
        self, emitter: Emitter, lexer: MarkerLexer, offered: OfferedTools | None, text_state: Enum
    ) -> None:
        self._emitter = emitter
        self._lexer = lexer
        self._offered = offered
        self._text_state = text_state
        self._state = text_state
        self._closed_states: frozenset[Enum] = frozenset()
        """States besides the text's in which every call is closed; subclasses name theirs."""
        self._steps: Mapping[Enum, Callable[[str, int], int]] = {}
        self._held: list[str] = []
        self._held_size = 0
        self._at_start = True

    @property
    def idle(self) -> bool:
        """Whether the last character read was ordinary text."""
        return self._state is self._text_state

    @property
    def settled(self) -> bool:
        """Whether an answer that is cut here has no half a call."""
        return not self._held and (self._state is self._text_state or self._state in self._closed_states)

    @property
    def reasons(self) -> bool:
        """Whether the last character read was reasoning."""
        return False

    def feed(self, chunk: str) -> None:
        """Read more text with marks."""
        place = 0
        while place < len(chunk):
            place = self._steps[self._state](chunk, place)

    def finish(self) -> None:
        """The answer is over: the held characters are text."""
        self.release()

    def _say(self, chunk: str, place: int) -> int:
        """Ordinary text up to the next mark; where there is none before `place`, the mark itself."""
        found = MARK.search(chunk, place)
        end = len(chunk) if found is None else max(found.start(), place + 1)
        said = chunk[place:end]
        if found is not None and found.start() == place:
            said = self._lexer.expand(said)
        self._at_start = self._at_start and said.isspace()
        self._emitter.text(said)
        return end

    def _hold(self, text: str) -> None:
        """Keep text until it is known to be a call or not."""
        if text:
            self._held.append(text)
            self._held_size += len(text)

    @property
    def _too_long(self) -> bool:
        return self._held_size > HELD_MAX

    def _take_held(self) -> str:
        """The held text, which is part of a call."""
        held = self._lexer.expand("".join(self._held))
        self._held.clear()
        self._held_size = 0
        self._at_start = False
        return held

    def release(self) -> None:
        """The held text is no call."""
        if self._held:
            at_start = self._at_start
            text = self._take_held()
            self._at_start = at_start and text.isspace()
            self._emitter.text(text)

    def _fail(self, place: int) -> int:
        """No call after all: what was held is text, and the character at `place` is read as text."""
        self.release()
        self._at_start = False
        self._state = self._text_state
        return place

    def _break(self, place: int) -> int:
        """The open call is broken; what follows is text."""
        self._emitter.end(Outcome.BROKEN)
        self._state = self._text_state
        return place

    def _hold_space(self, chunk: str, place: int) -> int:
        """Hold white space, at most one character too much; returns the place after it."""
        found = SPACE.match(chunk, place, place + HELD_MAX + 1 - self._held_size)
        assert found is not None, "matches at least the empty text"
        self._hold(found.group())
        return found.end()

    def _name_so_far(self, name: str, chunk: str, place: int) -> str:
        """More of a name, which is at most one character too long."""
        found = NAME.match(chunk, place, place + NAME_MAX + 1 - len(name))
        assert found is not None, "matches at least the empty text"
        return name + found.group()
