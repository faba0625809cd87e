"""The session's part of a conversation, and the changes before the next response.

The client's list of items may differ from the session's history: items were appended, inserted,
deleted or cut. `plan` compares both and keeps the common turns. If the last turn differs only by a
shorter answer, the turn is cut at a token; otherwise the session is rewound to the common turns, and the
later items are sent again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.server.routes.realtime_openai.items import Item, ItemKind, standing

__all__ = ["Cut", "Marks", "Plan", "Turn", "plan"]


def _spell_nothing(_tokens: Sequence[int]) -> str:
    return ""


class Marks:
    """Where pieces of an answer end: in characters of its last message, and in tokens of its turn.

    A piece has several tokens where the reader is slower than the model. A cut within a piece is found by
    spelling its tokens; where that is not the piece's text (markup, half a character), the piece is left out.
    """

    __slots__ = ("_characters", "_ids", "_spell", "_tokens")

    def __init__(self, spell: Callable[[Sequence[int]], str] = _spell_nothing) -> None:
        self._characters = array("Q", [0])
        self._tokens = array("Q", [0])
        self._ids = array("Q")
        """The tokens of the turn."""
        self._spell = spell

    def hear(self, tokens: Sequence[int]) -> None:
        """More tokens of the turn, whatever they are."""
        self._ids.extend(tokens)

    def add(self, characters: int, tokens: int) -> None:
        """A piece was sent. A piece without text moves no mark: its tokens were not heard."""
        if characters > self._characters[-1]:
            self._characters.append(characters)
            self._tokens.append(tokens)

    def begin(self, tokens: int) -> None:
        """A message begins after so many tokens; marks of earlier ones are of no use."""
        self._characters, self._tokens = array("Q", [0]), array("Q", [tokens])

    def before_character(self, end: int, text: str) -> tuple[int, int]:
        """Characters and tokens of the longest beginning of `text` that has at most `end` characters."""
        place = bisect_right(self._characters, end) - 1
        start, first = self._characters[place], self._tokens[place]
        if place + 1 == len(self._characters):
            return start, first
        # The longest beginning of the piece's tokens whose spelling is not too long.
        within = range(first, self._tokens[place + 1])
        last = bisect_right(within, end - start, key=lambda token: len(self._spelled(first, token)))
        return self._fine(start, first, within[last - 1] if last else first, text)

    def before_token(self, end: int, text: str) -> tuple[int, int]:
        """Characters and tokens of the longest beginning that has at most `end` tokens of the turn."""
        place = max(0, bisect_right(self._tokens, end) - 1)
        start, first = self._characters[place], self._tokens[place]
        if place + 1 == len(self._tokens) or end <= first:
            return start, first
        return self._fine(start, first, end, text)

    def _spelled(self, first: int, end: int) -> str:
        return self._spell(self._ids[first:end])

    def _fine(self, start: int, first: int, end: int, text: str) -> tuple[int, int]:
        """A cut within a piece, if its tokens spell its text."""
        spelled = self._spelled(first, end)
        return (start + len(spelled), end) if spelled and text.startswith(spelled, start) else (start, first)


@dataclass(slots=True)
class Turn:
    """One turn of the session: the items that it was given, and those that came of it."""

    name: str
    given: list[tuple[str, ...]]
    instructions: str
    """The session's instructions that are in effect after it."""
    answer: list[tuple[str, ...]] = field(default_factory=list)
    marks: Marks = field(default_factory=Marks)
    """Of the last message of its answer."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut of the last turn: so many of its tokens and so many characters of `item`, its last one, stay."""

    turn: Turn
    item: Item
    tokens: int
    characters: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of the session: `turns` stay, the last of them may be cut, and `rest` is sent."""

    turns: int
    rest: list[Item]
    cut: Cut | None = None


def plan(turns: Sequence[Turn], items: Sequence[Item]) -> Plan:
    """How the session comes to have these items."""
    wanted = standing(items)
    at = 0
    for number, turn in enumerate(turns):
        has = turn.given + turn.answer
        segment = wanted[at : at + len(has)]
        if [item.said for item in segment] != has:
            cut = _cut(turn, segment) if number == len(turns) - 1 else None
            if cut is None:
                return Plan(number, wanted[at:])
            return Plan(number + 1, wanted[at + len(has) :], cut)
        at += len(has)
    return Plan(len(turns), wanted[at:])


def _cut(turn: Turn, segment: Sequence[Item]) -> Cut | None:
    """The cut that makes a turn what is wanted: if its last message alone differs, and is a beginning."""
    has = turn.given + turn.answer
    if not turn.answer or len(segment) != len(has):
        return None
    last, wanted = has[-1], segment[-1]
    same = [item.said for item in segment[:-1]] == has[:-1] and wanted.said[:-1] == last[:-1]
    if not same or wanted.kind is not ItemKind.MESSAGE or not last[-1].startswith(wanted.text):
        return None
    characters, tokens = turn.marks.before_character(len(wanted.text), last[-1])
    return Cut(turn, wanted, tokens, characters)
