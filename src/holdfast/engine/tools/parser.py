"""The parser of one answer: streamed text and marker tokens in, events out.

    parser = AnswerParser(call_format("hermes"), reasoning_format("think"), tokens, ...)
    for each token: events = parser.mark(token) if parser.is_marker(token) else parser.feed(text)
    events = parser.finish()

Joining `wire` of all events gives back the input, however it was cut into pieces. Time is linear in the input
and memory is bounded, whatever the input: at most `machine.HELD_MAX` characters are held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.engine.tools.emitter import Emitter
from holdfast.engine.tools.events import Event
from holdfast.engine.tools.formats import CallFormat
from holdfast.engine.tools.machine import Machine, OfferedTools, PlainText
from holdfast.engine.tools.markers import MarkerLexer
from holdfast.engine.tools.reasoning import ReasoningFormat, ReasoningSplitter

SLICE = 4096
"""Machines read long texts in slices: some steps copy the rest of theirs."""


class AnswerParser:
    """Parses one answer.

    `calls` is None where the request offers no tools, `reasoning` where the model does not reason. `tokens`
    maps the ids of tokens of the vocabulary to their text; those that are markers of the formats must be
    given to `mark`. `reasoning_is_open`: the prompt ends inside the reasoning. `offered` describes the
    request's tools.
    """

    __slots__ = ("_emitter", "_lexer", "_reader")

    def __init__(
        self,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None,
        tokens: Mapping[int, str],
        *,
        call_id: Callable[[int], str],
        offered: OfferedTools | None = None,
        reasoning_is_open: bool = False,
    ) -> None:
        if calls is not None and calls.reasons:
            reasoning = None
        markers = (calls.markers if calls is not None else ()) + (
            reasoning.markers if reasoning is not None else ()
        )
        self._lexer = MarkerLexer(markers, tokens)
        self._emitter = Emitter(call_id)
        machine: Machine = PlainText(self._emitter, self._lexer)
        if calls is not None:
            machine = calls.build(self._emitter, self._lexer, offered)
        self._reader: Machine | ReasoningSplitter = machine
        if reasoning is not None:
            self._reader = ReasoningSplitter(
                reasoning, self._emitter, self._lexer, machine, is_open=reasoning_is_open
            )

    def is_marker(self, token: int) -> bool:
        """Whether a token must be given to `mark`."""
        return self._lexer.is_marker(token)

    def feed(self, text: str) -> list[Event]:
        """Text of ordinary tokens."""
        return self._read(self._lexer.feed(text))

    def mark(self, token: int) -> list[Event]:
        """A token that is a marker."""
        return self._read(self._lexer.mark(token))

    def finish(self) -> list[Event]:
        """The answer is over: all that was held goes out."""
        self._read_chunk(self._lexer.finish())
        self._reader.finish()
        self._emitter.finish()
        return self._emitter.take()

    def interrupt(self) -> list[Event]:
        """The answer was cut off: an open call ends as CUT; held text, which may begin a call, is dropped.

        `Transcript.settled` of the events so far is what an interrupted turn may keep: no half a call.
        """
        self._emitter.interrupt()
        return self._emitter.take()

    def _read(self, chunk: str) -> list[Event]:
        if not chunk:
            return []
        self._read_chunk(chunk)
        return self._emitter.take()

    def _read_chunk(self, chunk: str) -> None:
        if len(chunk) <= SLICE:
            self._reader.feed(chunk)
            return
        for place in range(0, len(chunk), SLICE):
            self._reader.feed(chunk[place : place + SLICE])

    def marker_of(self, token: int) -> str:
        """The text of a token that must be given to `mark`; empty for others."""
        return self._lexer.marker_of(token)

    @property
    def settled(self) -> bool:
        """Whether an answer that is cut here has no half a call, nor text that may begin one."""
        return not self._emitter.in_call and not self._lexer.holds and self._reader.settled

    @property
    def reasons(self) -> bool:
        """Whether the model is reasoning."""
        return self._reader.reasons

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._emitter.in_call
