"""How `/v1/sessions` and `/v1/realtime` write a turn: events, the whole turn, log-probabilities, failures.

A turn whose answer is read for reasoning and tool calls has events besides `delta`. The first of the events
that come of one delta has its tokens and log-probabilities; and `settled_tokens` if some of the turn's tokens
belong to a tool call that has not ended, which an interrupt should not keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import msgspec

from holdfast.server.answer_parts import complete_calls, finish_reason, shown_calls
from holdfast.server.http.answers import event
from holdfast.server.http.problems import Problem, turn_failed
from holdfast.server.link import wire
from holdfast.server.link.engine_client import TurnFeed

__all__ = ["TurnEvent", "TurnEvents", "TurnStreamForm", "failed", "shown_turn"]

_encode = msgspec.json.Encoder().encode


class TurnEvent(StrEnum):
    """The events of a turn while it is generated."""

    DELTA = "delta"
    REASONING = "reasoning.delta"
    CALL = "tool_call"
    ARGUMENTS = "tool_call.delta"
    CALL_DONE = "tool_call.done"


EVENT_OF_PART = {
    wire.Part.TEXT: TurnEvent.DELTA,
    wire.Part.REASONING: TurnEvent.REASONING,
    wire.Part.CALL: TurnEvent.CALL,
    wire.Part.ARGUMENTS: TurnEvent.ARGUMENTS,
    wire.Part.CALL_END: TurnEvent.CALL_DONE,
}


def failed(name: str, problem: Problem) -> bytes:
    """The error event of a turn."""
    return event({"turn_id": name, **problem.body()}, "error")


class TurnEvents:
    """The events of one turn, from its deltas in order."""

    __slots__ = ("_arguments", "_call", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._call: dict[str, Any] = {}
        """The open call: its index, id and name."""
        self._arguments: list[str] = []

    def of(self, delta: wire.Delta) -> Iterator[tuple[TurnEvent, dict[str, Any]]]:
        """The events of the next delta, each with its kind."""
        carried: dict[str, Any] = {"token_ids": delta.tokens}
        if delta.logprobs is not None:
            carried["logprobs"] = shown_logprobs(delta.logprobs)
        heard = delta.index + len(delta.tokens)
        if delta.settled is not None and delta.settled < heard:
            carried["settled_tokens"] = delta.settled
        if not delta.events:
            # Without `events` all is text; an empty list has tokens whose text is still held.
            shown = {"turn_id": self._name, "index": delta.index, "text": delta.text}
            yield TurnEvent.DELTA, shown | carried
            return
        index = delta.index
        for each in delta.events:
            shown = {"turn_id": self._name, **self._shown(each)}
            if each.part in (wire.Part.TEXT, wire.Part.REASONING):
                shown["index"] = index
            yield EVENT_OF_PART[each.part], shown | carried
            index = heard
            carried = {"token_ids": []}

    def _shown(self, said: wire.AnswerEvent) -> dict[str, Any]:
        """The fields of an event."""
        match said.part:
            case wire.Part.CALL:
                self._call = {"index": said.index, "id": said.id, "name": said.text}
                self._arguments = []
                return self._call
            case wire.Part.ARGUMENTS:
                self._arguments.append(said.text)
                return {"index": said.index, "arguments": said.text}
            case wire.Part.CALL_END:
                return {**self._call, "arguments": "".join(self._arguments), "outcome": said.text}
            case _:
                return {"text": said.text}


class TurnStreamForm:
    """A turn as server-sent events: deltas, reasoning and tool calls, then `done` or `error`.

    The event of plain text, as most are, is put together from parts that are encoded once.
    """

    __slots__ = ("_events", "_feed", "_head")

    def __init__(self, feed: TurnFeed) -> None:
        self._feed = feed
        self._events = TurnEvents(feed.name)
        self._head = b'event: delta\ndata: {"turn_id":' + _encode(feed.name) + b',"index":'

    def opening(self) -> bytes:
        """Nothing."""
        return b""

    def delta(self, _place: int, delta: wire.Delta) -> bytes:
        """The events of a delta."""
        if delta.events is None and delta.logprobs is None and delta.settled is None:
            parts = (self._head, delta.index, _encode(delta.text), _encode(delta.tokens))
            return b'%b%d,"text":%b,"token_ids":%b}\n\n' % parts
        return b"".join([event(shown, kind) for kind, shown in self._events.of(delta)])

    def end(self, _place: int, end: wire.End) -> bytes:
        """The whole turn, or why it failed."""
        name = self._feed.name
        if end.outcome == "failed":
            return failed(name, turn_failed(end.reason))
        return event(shown_turn(name, self._feed), "done")

    def closing(self) -> bytes:
        """Nothing."""
        return b""


def shown_logprobs(logprobs: list[wire.Logprob]) -> list[dict[str, Any]]:
    """Log-probabilities by token id."""
    return [
        {
            "token_id": entry.token,
            "logprob": entry.logprob,
            "top": [{"token_id": top.token, "logprob": top.logprob} for top in entry.top],
        }
        for entry in logprobs
    ]


def standing(feed: TurnFeed) -> wire.End:
    """A turn's end with the text that was kept: none if the turn was rolled back or its session closed.

    A replayed turn is shown as it ended.
    """
    end = feed.end
    assert end is not None, "the turn is over"
    gone = end.view is None or end.view.known < end.prompt_tokens
    if end.outcome == "aborted" and gone and not feed.replayed:
        return msgspec.structs.replace(end, text="", tokens=[], logprobs=None, answer=None)
    return end


def shown_turn(name: str, feed: TurnFeed) -> dict[str, Any]:
    """A whole turn: the text that was kept, which may be less than was streamed."""
    end = standing(feed)
    shown: dict[str, Any] = {
        "turn_id": name,
        "text": end.text,
        "token_ids": end.tokens,
        "finish_reason": finish_reason(end),
        "usage": {
            "prompt_tokens": end.prompt_tokens,
            "cached_tokens": end.cached_tokens,
            "computed_tokens": min(end.computed_tokens, end.prompt_tokens - end.cached_tokens),
            "completion_tokens": len(end.tokens),
        },
        "timing": {
            "queue_ms": round(end.queue_seconds * 1000, 2),
            "ttft_ms": None if end.first_seconds is None else round(end.first_seconds * 1000, 2),
            "total_ms": round(end.total_seconds * 1000, 2),
        },
    }
    if end.ahead_tokens:
        shown["usage"]["ahead_tokens"] = min(end.ahead_tokens, shown["usage"]["computed_tokens"])
    if end.recomputed_tokens is not None:
        shown["usage"]["recomputed_tokens"] = end.recomputed_tokens
    if end.answer is not None:
        shown["usage"]["reasoning_tokens"] = end.answer.reasoning_tokens
        shown |= shown_answer(end.answer)
    if end.outcome == "aborted":
        shown["abort_reason"] = end.reason
    if end.logprobs is not None:
        shown["logprobs"] = shown_logprobs(end.logprobs)
    return shown


def shown_answer(answer: wire.AnswerParts) -> dict[str, Any]:
    """Reasoning and complete calls; calls that are broken or cut are listed apart, if there are any."""
    complete = complete_calls(answer.calls)
    shown: dict[str, Any] = {"reasoning": answer.reasoning or None, "tool_calls": shown_calls(complete)}
    failed_calls = [call for call in answer.calls if call not in complete]
    if failed_calls:
        shown["incomplete_tool_calls"] = [
            {**called, "outcome": call.outcome}
            for called, call in zip(shown_calls(failed_calls), failed_calls, strict=True)
        ]
    return shown
