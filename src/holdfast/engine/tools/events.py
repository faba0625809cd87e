"""The events of an answer's parser: text, reasoning, and tool calls that begin, grow and end.

Every event carries `wire`, the exact text of the answer that it accounts for. Joined in order, the wire form
is the answer: markers, separators and trimmed white space belong to the event that follows them. Dialects
render `text`, `name`, `id` and the arguments; they never look at `wire`. `Transcript` collects events.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """How a call ended."""

    COMPLETE = "complete"
    BROKEN = "broken"
    """Its arguments are not valid in the format; those that arrived are passed on as they are."""
    CUT = "cut"
    """The answer ended inside the call."""


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer."""

    text: str
    wire: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str
    wire: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins: its name is known. `index` counts the calls of the answer from zero."""

    index: int
    name: str
    id: str
    wire: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, which are one JSON object when joined."""

    index: int
    text: str
    wire: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call ends."""

    index: int
    outcome: Outcome
    wire: str


Event = Text | Reasoning | CallBegin | CallArguments | CallEnd


def wire_form(events: Iterable[Event]) -> str:
    """The answer that the events were made from."""
    return "".join(event.wire for event in events)


def call_ids(seed: str) -> Callable[[int], str]:
    """Ids of the calls of one answer by index.

    The same seed gives the same ids, so a replayed answer keeps its.
    """

    def call_id(index: int) -> str:
        return "call_" + hashlib.sha256(f"{seed}:{index}".encode()).hexdigest()[:24]

    return call_id


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call: `arguments` is JSON text, valid if `outcome` is COMPLETE."""

    id: str
    name: str
    arguments: str
    outcome: Outcome


class Transcript:
    """Collects the events of one answer.

    `calls` are the calls that ended. `settled` is the length of the wire form up to the last place outside a
    call: an interrupted turn that keeps so many characters keeps no half a call.
    """

    __slots__ = ("_arguments", "_began", "_reasoning", "_text", "_wire", "calls", "settled")

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.calls: list[Call] = []
        self.settled = 0
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: list[str] = []
        self._began: CallBegin | None = None
        self._wire = 0
        for event in events:
            self.add(event)

    @property
    def text(self) -> str:
        """The answer without reasoning and calls."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The reasoning."""
        return "".join(self._reasoning)

    @property
    def complete_calls(self) -> list[Call]:
        """The calls whose arguments are whole and valid."""
        return [call for call in self.calls if call.outcome is Outcome.COMPLETE]

    def add(self, event: Event) -> None:
        """Take the next event."""
        self._wire += len(event.wire)
        match event:
            case Text(text=text):
                self._text.append(text)
            case Reasoning(text=text):
                self._reasoning.append(text)
            case CallBegin():
                self._began = event
                self._arguments = []
            case CallArguments(text=text):
                self._arguments.append(text)
            case CallEnd(outcome=outcome):
                assert self._began is not None, "a call ends that did not begin"
                call = Call(self._began.id, self._began.name, "".join(self._arguments), outcome)
                self.calls.append(call)
                self._began = None
                if outcome is Outcome.CUT:
                    return
        if self._began is None:
            self.settled = self._wire
