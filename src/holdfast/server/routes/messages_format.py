"""Answers as Anthropic writes them: content blocks in the order of generation, and the events of a stream.

`Answer` reads the deltas of a turn. Each becomes events of a stream; the whole message is made of the same
blocks, so both forms agree. The input of a call is sent in one piece when the call has ended, since clients
parse it as it comes: input that is not valid JSON, or was cut, is left out and reads as `{}`. Tools with
`eager_input_streaming` get it as it is generated.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from holdfast.server.answer_parts import CallOutcome, finish_reason, plain_text, reasoning_tokens
from holdfast.server.http.answers import event
from holdfast.server.http.problems import Problem, turn_failed
from holdfast.server.link import wire
from holdfast.server.routes.messages_input import SIGNATURE, sealed

__all__ = ["PING", "Answer", "MessageStream", "model_entry", "model_page", "require_answer", "stop_string"]

PING: dict[str, Any] = {"type": "ping"}

TEXT_DELTA = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":%b}}\n\n'
)
encode_text = msgspec.json.Encoder().encode

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

Event = dict[str, Any]


class Answer:
    """One answer while it is generated."""

    def __init__(
        self,
        name: str,
        model: str,
        *,
        max_tokens: int,
        stop: Callable[[list[int]], str | None],
        eager: frozenset[str] = frozenset(),
        shows_thinking: bool = True,
    ) -> None:
        """`stop` finds the stop string that ended an answer of these tokens."""
        self.name = name
        self.model = model
        self.blocks: list[dict[str, Any]] = []
        self._max_tokens = max_tokens
        self._stop = stop
        self._eager = eager
        self._shows_thinking = shows_thinking
        self._began = False
        self._open = False
        self._pieces: list[str] = []
        """Pieces of the open block: its text, or the JSON of its input."""

    # --- the parts of a stream ----------------------------------------------------------------------

    def read(self, delta: wire.Delta) -> list[Event]:
        """The events of a delta."""
        events = [] if self._began else self._first(delta.prompt or (0, 0))
        parts = delta.events
        if parts is None:
            parts = [wire.AnswerEvent(wire.Part.TEXT, delta.text)]
        for part in parts:
            events += self._part(part)
        return events

    def extend(self, text: str) -> int | None:
        """Add to the open block of text; its number, or None if no such block is open."""
        if not self._open or self.blocks[-1]["type"] != "text":
            return None
        self._pieces.append(text)
        return len(self.blocks) - 1

    def last(self, end: wire.End) -> list[Event]:
        """The events at the end of a stream."""
        events = [] if self._began else self._first((end.prompt_tokens, end.cached_tokens))
        events += self._close()
        ending = {"type": "message_delta", "delta": self._ending(end), "usage": _usage(end)}
        return [*events, ending, {"type": "message_stop"}]

    def whole(self, end: wire.End) -> dict[str, Any]:
        """The whole message, of which all deltas have been read."""
        self._close()
        return self._message(self.blocks, self._ending(end), _usage(end))

    def _first(self, prompt: tuple[int, int]) -> list[Event]:
        self._began = True
        ending = {"stop_reason": None, "stop_sequence": None}
        return [
            {"type": "message_start", "message": self._message([], ending, _counts(*prompt, 0))},
            PING,
        ]

    def _message(
        self, content: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **ending,
            "usage": {**usage, "service_tier": "standard"},
        }

    def _ending(self, end: wire.End) -> dict[str, Any]:
        """Why the answer ended."""
        reason = finish_reason(end)
        stop = self._stop(end.tokens) if reason == "stop" else None
        if stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        if reason == "length" and len(end.tokens) < self._max_tokens:
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        return {"stop_reason": STOP_REASONS[reason], "stop_sequence": None}

    # --- blocks -------------------------------------------------------------------------------------

    def _part(self, part: wire.AnswerEvent) -> list[Event]:
        match part.part:
            case wire.Part.TEXT:
                return self._piece("text", part.text)
            case wire.Part.REASONING:
                return self._piece("thinking", part.text)
            case wire.Part.CALL:
                block = {"type": "tool_use", "id": part.id, "name": part.text, "input": {}}
                return [*self._close(), self._start(block)]
            case wire.Part.ARGUMENTS:
                self._pieces.append(part.text)
                eager = self.blocks[-1]["name"] in self._eager
                return [self._delta("input_json_delta", partial_json=part.text)] if eager else []
            case wire.Part.CALL_END:
                return self._end_call(part.text)

    def _piece(self, kind: str, text: str) -> list[Event]:
        """A piece of text or thinking, which may begin a block."""
        if not text:
            return []
        events: list[Event] = []
        if not self._open or self.blocks[-1]["type"] != kind:
            block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            events = [*self._close(), self._start(block)]
        self._pieces.append(text)
        if kind == "thinking" and not self._shows_thinking:
            return events
        return [*events, self._delta(f"{kind}_delta", **{kind: text})]

    def _end_call(self, outcome: str) -> list[Event]:
        written, block = "".join(self._pieces), self.blocks[-1]
        events: list[Event] = []
        if outcome == CallOutcome.COMPLETE:
            block["input"] = msgspec.json.decode(written) if written else {}
            if block["name"] not in self._eager and written:
                events = [self._delta("input_json_delta", partial_json=written)]
        return [*events, *self._close()]

    def _start(self, block: dict[str, Any]) -> Event:
        self.blocks.append(block)
        self._open, self._pieces = True, []
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, kind: str, **fields: str) -> Event:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _close(self) -> list[Event]:
        """End the open block, if there is one."""
        if not self._open:
            return []
        self._open = False
        block, events = self.blocks[-1], list[Event]()
        said = "".join(self._pieces)
        if block["type"] == "text":
            block["text"] = said
        elif block["type"] == "thinking":
            block["thinking"] = said if self._shows_thinking else ""
            block["signature"] = SIGNATURE if self._shows_thinking else sealed(said)
            events = [self._delta("signature_delta", signature=block["signature"])]
        return [*events, {"type": "content_block_stop", "index": len(self.blocks) - 1}]


class MessageStream:
    """An answer as server-sent events."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def opening(self) -> bytes:
        """Nothing: the first event has counts that come with the first output."""
        return b""

    def delta(self, _place: int, delta: wire.Delta) -> bytes:
        """The events of a delta; most have more text of the open block, and are put together here."""
        text = plain_text(delta)
        index = None if text is None else self._answer.extend(text)
        if index is not None:
            return TEXT_DELTA % (index, encode_text(text))
        return _written(self._answer.read(delta))

    def end(self, _place: int, end: wire.End) -> bytes:
        """The last events; raises if the turn failed or was aborted."""
        return _written(self._answer.last(require_answer(end)))

    def closing(self) -> bytes:
        """Nothing."""
        return b""


def require_answer(end: wire.End) -> wire.End:
    """The end of a turn; raises if it failed or was aborted."""
    if end.outcome == "failed":
        raise turn_failed(end.reason)
    if end.outcome == "aborted":
        raise Problem(503, "aborted", "the answer was aborted")
    return end


def _written(events: list[Event]) -> bytes:
    return b"".join([event(each, each["type"]) for each in events])


def _counts(prompt: int, cached: int, output: int) -> dict[str, Any]:
    """Tokens as Anthropic counts them: those read from the cache are not part of the input."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def _usage(end: wire.End) -> dict[str, Any]:
    counts = _counts(end.prompt_tokens, end.cached_tokens, len(end.tokens))
    if end.answer is not None:
        counts["output_tokens_details"] = {"thinking_tokens": reasoning_tokens(end)}
    return counts


def stop_string(
    tokens: list[int], stops: tuple[str, ...], ends: frozenset[int], decode: Callable[[list[int]], str]
) -> str | None:
    """The stop string that ended an answer: one that the last token completes.

    None if it ended with a token of `ends`, or because its grammar allows nothing more.
    """
    if not stops or not tokens or tokens[-1] in ends:
        return None
    said, before = decode(tokens), len(decode(tokens[:-1]))
    found = [(said.rfind(stop), -len(stop), stop) for stop in stops]
    completed = [each for each in found if each[0] >= 0 and each[0] + len(each[2]) > before]
    return min(completed)[2] if completed else None


def model_entry(name: str, created: int, context_length: int) -> dict[str, Any]:
    """A model as Anthropic describes it; `created` is a Unix time."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": context_length,
        "max_tokens": context_length,
    }


def model_page(name: str, created: int, context_length: int) -> dict[str, Any]:
    """The list of models, of which there is one."""
    entry = model_entry(name, created, context_length)
    return {"data": [entry], "has_more": False, "first_id": name, "last_id": name}
