"""Reading a turn's stream without I/O: bytes to events, events to the new parts of the turn.

`EventDecoder` parses `text/event-stream` from chunks of any size; only a newline ends a line, because text
may hold other characters that Python treats as line ends. The decoders of httpx-sse are private and tied to
one response (docs/decisions/0019). `TurnReader` extracts the new parts from the events of one turn, also
after a reconnect, when the stream starts again from its beginning. Used by both clients.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from holdfast.client.errors import AnswerChanged, ProtocolError, error_from_body
from holdfast.client.values import ToolCall, TurnEvent, TurnEventKind, TurnResult

__all__ = ["Event", "EventDecoder", "TurnReader"]

KINDS = frozenset(TurnEventKind)
COMPLETE = "complete"
"""The outcome of a call whose arguments are whole and valid."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream."""

    name: str
    text: str

    def body(self) -> dict[str, Any]:
        """The JSON object that the event carries."""
        try:
            body = json.loads(self.text)
        except ValueError as error:
            raise ProtocolError(f"the event {self.name!r} carries no JSON") from error
        if not isinstance(body, dict):
            raise ProtocolError(f"the event {self.name!r} carries no JSON object")
        return body


class EventDecoder:
    """Bytes in, whole events out."""

    __slots__ = ("_data", "_name", "_rest")

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        """The unfinished last line."""
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """The events that are whole with this chunk."""
        self._rest.append(chunk)
        if b"\n" not in chunk:
            return
        *lines, rest = b"".join(self._rest).split(b"\n")
        self._rest = [rest]
        for line in lines:
            event = self._take(line.removesuffix(b"\r").decode(errors="replace"))
            if event is not None:
                yield event

    def _take(self, line: str) -> Event | None:
        if not line:
            event = Event(self._name or "message", "\n".join(self._data)) if self._data else None
            self._name, self._data = "", []
            return event
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._name = value
        elif field == "data":
            self._data.append(value)
        return None


class _Part:
    """The text of one part of a turn that was handed out. A stream that begins again must repeat it."""

    __slots__ = ("at", "shown")

    def __init__(self) -> None:
        self.shown = ""
        self.at = 0
        """How far the current stream has come."""

    def advance(self, text: str) -> str:
        """The new text of the next piece."""
        before = self.shown[self.at : self.at + len(text)]
        if not text.startswith(before):
            raise AnswerChanged("the turn was retried and its text differs from what was shown")
        self.shown += text[len(before) :]
        self.at += len(text)
        return text[len(before) :]

    def rest(self, text: str) -> str:
        """The new part of the whole text; empty if its prefix is not the shown text."""
        if not text.startswith(self.shown):
            return ""
        new = text[len(self.shown) :]
        self.shown = text
        return new


class _Call(_Part):
    """One tool call: its arguments are the text."""

    __slots__ = ("call", "outcome")

    def __init__(self, call: ToolCall) -> None:
        super().__init__()
        self.call = call
        self.outcome = ""
        """How it ended, once it has."""


class _Mark(NamedTuple):
    """What had been said with so many tokens."""

    tokens: int
    text: int = 0
    reasoning: int = 0
    calls: int = 0
    """Complete calls."""


class TurnReader:
    """The parts of one turn that its caller has received: text, reasoning, tool calls and tokens.

    `shown` is the text handed out, `tokens_shown` how many tokens came with it, `tokens_settled` how many of
    these lie outside an unfinished call. A reopened stream is read from its beginning: the part already shown
    is skipped, and must be the same. A turn may be over at the server before its text is read: `cut` then
    shortens its result to the tokens that an interrupt has kept.
    """

    __slots__ = (
        "_again",
        "_at_tokens",
        "_calls",
        "_kept",
        "_marks",
        "_reasoning",
        "_text",
        "result",
        "token_ids",
        "tokens_settled",
    )

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.tokens_settled = 0
        self.result: TurnResult | None = None
        self._text = _Part()
        self._reasoning = _Part()
        self._calls: list[_Call] = []
        self._again = False
        self._at_tokens = 0
        self._kept: int | None = None
        self._marks = [_Mark(0)]

    @property
    def shown(self) -> str:
        """The text that was handed out."""
        return self._text.shown

    @property
    def tokens_shown(self) -> int:
        """How many generated tokens were handed out."""
        return len(self.token_ids)

    def reopen(self) -> None:
        """A new stream of the same turn begins."""
        self._again = True
        self._at_tokens = 0
        for part in (self._text, self._reasoning, *self._calls):
            part.at = 0

    def hear(self, event: Event) -> list[TurnEvent]:
        """The new part of an event; raises the server's error."""
        if event.name == "done":
            return self.settle(TurnResult.from_body(event.body()))
        if event.name == "error":
            raise error_from_body(event.body().get("error") or {})
        if event.name not in KINDS:
            return []
        body = event.body()
        told = self._told(TurnEventKind(event.name), body)
        self._count([int(token) for token in body.get("token_ids", ())], body.get("settled_tokens"))
        return [] if told is None else [told]

    def _told(self, kind: TurnEventKind, body: dict[str, Any]) -> TurnEvent | None:
        """An event without the part already handed out; None if nothing is left."""
        try:
            if kind is TurnEventKind.TEXT:
                text = self._text.advance(str(body.get("text", "")))
                return TurnEvent(kind, text) if text else None
            if kind is TurnEventKind.REASONING:
                text = self._reasoning.advance(str(body.get("text", "")))
                return TurnEvent(kind, text) if text else None
            index = int(body["index"])
            if kind is TurnEventKind.CALL:
                return self._begun(index, ToolCall.from_body(body))
            call = self._calls[index]
            if kind is TurnEventKind.ARGUMENTS:
                text = call.advance(str(body["arguments"]))
                return TurnEvent(kind, text, index=index) if text else None
            return self._ended(index, str(body["outcome"]))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ProtocolError(f"cannot read the event {kind.value!r}: {error!r}") from error

    def _begun(self, index: int, call: ToolCall) -> TurnEvent | None:
        call = replace(call, arguments="")
        if index < len(self._calls):
            if self._calls[index].call != call:
                raise AnswerChanged("the turn was retried and calls another tool")
            return None
        self._calls.append(_Call(call))
        return TurnEvent(TurnEventKind.CALL, call=call, index=index)

    def _ended(self, index: int, outcome: str) -> TurnEvent | None:
        call = self._calls[index]
        if call.outcome:
            return None
        call.outcome = outcome
        whole = replace(call.call, arguments=call.shown)
        return TurnEvent(TurnEventKind.CALL_DONE, call=whole, index=index, outcome=outcome)

    def _count(self, tokens: list[int], settled: int | None) -> None:
        """Tokens came with an event."""
        self.token_ids += tokens[max(0, len(self.token_ids) - self._at_tokens) :]
        self._at_tokens += len(tokens)
        if tokens and self._at_tokens >= len(self.token_ids):
            self.tokens_settled = len(self.token_ids) if settled is None else settled
        calls = sum(call.outcome == COMPLETE for call in self._calls)
        mark = _Mark(len(self.token_ids), len(self._text.shown), len(self._reasoning.shown), calls)
        self._marks.append(mark)

    def cut(self, kept: int) -> None:
        """An interruption has kept so many tokens of the turn."""
        self._kept = kept
        if self.result is not None:
            self.result = self._shortened(self.result)

    def settle(self, result: TurnResult) -> list[TurnEvent]:
        """The turn has ended with this result; the parts without an event are new."""
        if self._kept is not None and self._kept < len(result.token_ids):
            self.result = self._shortened(result)
            return []
        self.result = result
        text = self._text.shown
        if not result.text.startswith(text):
            if self._again and not text.startswith(result.text):
                raise AnswerChanged("the turn was retried and its text differs from what was shown")
            return []
        told = [
            TurnEvent(TurnEventKind.REASONING, self._reasoning.rest(result.reasoning)),
            TurnEvent(TurnEventKind.TEXT, self._text.rest(result.text)),
        ]
        self.token_ids = list(result.token_ids)
        self.tokens_settled = len(self.token_ids)
        return [event for event in told if event.text] + self._rest_of_calls(result.tool_calls)

    def _rest_of_calls(self, calls: tuple[ToolCall, ...]) -> list[TurnEvent]:
        """The result's calls without an event: a stored answer may come without events."""
        told: list[TurnEvent | None] = []
        places = {call.call.id: index for index, call in enumerate(self._calls)}
        for call in calls:
            index = places.get(call.id, len(self._calls))
            if index == len(self._calls):
                told.append(self._begun(index, call))
            arguments = self._calls[index].rest(call.arguments)
            if arguments:
                told.append(TurnEvent(TurnEventKind.ARGUMENTS, arguments, index=index))
            told.append(self._ended(index, COMPLETE))
        return [event for event in told if event is not None]

    def _shortened(self, result: TurnResult) -> TurnResult:
        """The result cut to the kept tokens, with the text up to them."""
        kept = self._kept
        if kept is None or kept >= len(result.token_ids):
            return result
        mark = max(mark for mark in self._marks if mark.tokens <= kept)
        return replace(
            result,
            text=result.text[: mark.text],
            token_ids=result.token_ids[:kept],
            finish_reason="abort",
            usage=replace(result.usage, completion_tokens=kept),
            reasoning=result.reasoning[: mark.reasoning],
            tool_calls=result.tool_calls[: mark.calls],
        )
