"""Reads the answer of one turn as its text comes, and knows which tokens its parts come from.

`AnswerReader` feeds the parser of the turn's formats and collects its events. Every place of an answer is
counted in characters of its wire form, which is the detokenised text with all markers; so a number of
tokens, a number of characters of the content, and the end of a call can be compared. Used by `stream`, for
turns whose `TurnSpec` has an `AnswerSpec`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from holdfast.core.errors import Refused
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.engine.tools.answer import Answer, AnswerSpec
from holdfast.engine.tools.events import Call, CallEnd, Event, Outcome, Reasoning, Text, Transcript, call_ids
from holdfast.engine.tools.formats import RESPONSE_TEMPLATE, CallFormat, call_format, reasoning_format
from holdfast.engine.tools.machine import OfferedTools
from holdfast.engine.tools.parser import AnswerParser
from holdfast.engine.tools.reasoning import ReasoningFormat
from holdfast.engine.tools.template_calls import template_format

__all__ = ["AnswerReader", "UnknownFormat"]


class UnknownFormat(Refused):
    """A turn names a format of calls or reasoning that does not exist."""

    code = "unknown_format"
    param = "answer"


class Places:
    """Where the characters of one part of an answer lie in its wire form, as runs."""

    __slots__ = ("_firsts", "_starts", "length")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._firsts: list[int] = []
        self.length = 0

    def add(self, start: int, size: int) -> None:
        """So many characters begin at a place of the wire form."""
        if not self._starts or self._starts[-1] + self.length - self._firsts[-1] != start:
            self._starts.append(start)
            self._firsts.append(self.length)
        self.length += size

    def before(self, place: int) -> int:
        """How many characters lie before a place of the wire form."""
        run = bisect_right(self._starts, place) - 1
        if run < 0:
            return 0
        end = self._firsts[run + 1] if run + 1 < len(self._firsts) else self.length
        return min(self._firsts[run] + place - self._starts[run], end)

    def end_of(self, characters: int) -> int:
        """The place in the wire form after so many characters."""
        characters = min(characters, self.length)
        if characters <= 0:
            return 0
        run = bisect_left(self._firsts, characters) - 1
        return self._starts[run] + characters - self._firsts[run]


class AnswerReader:
    """The parser of one answer and its results.

    `content` locates the text without reasoning and calls. `start_marker` are the tokens that open
    the reasoning, if it can be distinguished from calls; `end_marker` those that end it.
    """

    __slots__ = (
        "_budget",
        "_call_ends",
        "_closing",
        "_cut",
        "_ended",
        "_opens",
        "_parser",
        "_reasoned",
        "_reasoning",
        "_thought",
        "_transcript",
        "_wire",
        "content",
        "end_marker",
        "events",
        "reads_calls",
        "reads_special_tokens",
        "spec",
        "start_marker",
    )

    def __init__(self, spec: AnswerSpec, tokenizer: Tokenizer) -> None:
        calls, reasoning = _formats(spec, tokenizer)
        self.spec = spec
        offered = OfferedTools(
            {
                name: {parameter: tuple(types) for parameter, types in parameters.items()}
                for name, parameters in spec.tools.items()
            }
        )
        self._parser = AnswerParser(
            calls,
            reasoning,
            tokenizer.added_tokens,
            call_id=call_ids(spec.seed),
            offered=offered,
            reasoning_is_open=spec.reasoning_is_open,
        )
        self.reads_calls = calls is not None
        self.reads_special_tokens = calls is not None and calls.reads_special_tokens
        self.end_marker = _spelled(_reasoning_end(calls, reasoning), tokenizer)
        self._opens = "" if reasoning is None else reasoning.opens
        self.start_marker = _spelled(self._opens, tokenizer)
        self.events: list[Event] = []
        self.content = Places()
        self._reasoning = Places()
        self._transcript = Transcript()
        self._wire = 0
        self._call_ends: list[int] = []
        self._reasoned: list[int] = []
        """The numbers of the tokens that are reasoning."""
        self._thought: list[int] = []
        """These, and those of the markers and the white space around them."""
        self._budget = spec.thinking_tokens if self.end_marker else None
        self._closing = 0
        """Tokens of the end marker that are still to come."""
        self._ended = False
        self._cut = False

    def marker_of(self, token: int) -> str:
        """The text of a token that must be given to `mark`; empty for others."""
        return self._parser.marker_of(token)

    @property
    def reasons(self) -> bool:
        """Whether the model is reasoning."""
        return self._parser.reasons

    @property
    def settled(self) -> bool:
        """Whether an answer that is cut here has no half a call."""
        return self._parser.settled

    def feed(self, text: str) -> str:
        """Text of ordinary tokens; returns the content that it completes."""
        return self._note(self._parser.feed(text)) if text and not self._ended else ""

    def mark(self, token: int) -> str:
        """A token that is a marker."""
        return self._note(self._parser.mark(token))

    def end(self, *, cut: bool) -> str:
        """The answer is over, or was `cut` off: a call that it was cut in the middle of is dropped."""
        if self._ended:
            return ""
        self._ended, self._cut = True, cut
        cut = cut and not self._parser.settled
        return self._note(self._parser.interrupt() if cut else self._parser.finish())

    def count(self, number: int, reasoned: bool, text: str) -> None:
        """Token `number`, of this `text`, was read; `reasoned` if the model was reasoning before it."""
        if self._closing:
            self._closing -= 1
        if reasoned and self._parser.reasons:
            self._reasoned.append(number)
        after = text.isspace() and self._thought[-1:] == [number - 1]
        if reasoned or self._parser.reasons or after:
            self._thought.append(number)

    def take_spent(self) -> bool:
        """Whether the budget of the reasoning is spent, so that `end_marker` comes next; once a marker."""
        spent = self._budget is not None and not self._closing and self._parser.reasons
        if not spent or self._budget is None or len(self._reasoned) < self._budget:
            return False
        self._closing = len(self.end_marker)
        return True

    def _note(self, events: list[Event]) -> str:
        said: list[str] = []
        for event in events:
            self._wire += len(event.wire)
            self._transcript.add(event)
            match event:
                case Text(text=text):
                    self.content.add(self._wire - len(text), len(text))
                    said.append(text)
                case Reasoning(text=text):
                    self._reasoning.add(self._wire - len(text), len(text))
                case CallEnd():
                    self._call_ends.append(self._wire)
        self.events += events
        return "".join(said)

    def thought(self, lengths: Sequence[int]) -> Sequence[int]:
        """The numbers of the tokens that are reasoning, with its markers; none where they have other text.

        `lengths` are the ends of all tokens in the wire form.
        """
        numbers: list[int] = []
        for number in self._thought if self.start_marker else ():
            if number and number - 1 not in numbers[-1:]:
                # A marker that is text has more tokens than the one that completes it.
                first = bisect_right(lengths, lengths[number] - len(self._opens), hi=number)
                numbers += range(first, number)
            numbers.append(number)
        for number in numbers:
            before = lengths[number - 1] if number else 0
            if self.content.before(before) != self.content.before(lengths[number]):
                return ()
        return numbers

    def answer(self, text: str, count: int, lengths: Sequence[int]) -> Answer:
        """The parts of the answer in its first `count` tokens; `lengths` are their ends in the wire form.

        Of an answer that was cut, only complete calls remain.
        """
        whole = count >= len(lengths)
        end = self._wire if whole else (lengths[count - 1] if count else 0)
        calls: list[Call] = []
        ends: list[int] = []
        for call, place in zip(self._transcript.calls, self._call_ends, strict=True):
            if place <= end and ((whole and not self._cut) or call.outcome is Outcome.COMPLETE):
                calls.append(call)
                ends.append(min(bisect_left(lengths, place) + 1, len(lengths)))
        return Answer(
            text,
            self._transcript.reasoning[: self._reasoning.before(end)],
            tuple(calls),
            bisect_left(self._reasoned, count),
            tuple(ends),
        )


def _formats(spec: AnswerSpec, tokenizer: Tokenizer) -> tuple[CallFormat | None, ReasoningFormat | None]:
    try:
        calls = None if spec.calls is None else call_format(spec.calls)
        reasoning = None if spec.reasoning is None else reasoning_format(spec.reasoning)
    except ValueError as error:
        raise UnknownFormat(str(error)) from error
    if spec.calls == RESPONSE_TEMPLATE:
        if tokenizer.response_template is None:
            raise UnknownFormat("the model has no response template")
        calls = template_format(tokenizer.response_template, spec.prompt_end)
    return calls, reasoning


def _reasoning_end(calls: CallFormat | None, reasoning: ReasoningFormat | None) -> str:
    if calls is not None and calls.reasons:
        return calls.reasoning_end
    return "" if reasoning is None else reasoning.closes


def _spelled(marker: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a marker, which is a token itself in most vocabularies."""
    return tokenizer.encode(marker, add_special_tokens=False) if marker else []
