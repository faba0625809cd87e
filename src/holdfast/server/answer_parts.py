"""The parts of an answer that dialects share: tool calls in OpenAI's form, and why a turn ended.

`wire.End.answer` has them if the turn's answer was read for reasoning and calls. Used by the service and by
the formats of all routes.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from holdfast.server.link import wire

__all__ = [
    "CallOutcome",
    "calls_of",
    "complete_calls",
    "finish_reason",
    "plain_text",
    "reasoning_tokens",
    "shown_calls",
]


class CallOutcome(StrEnum):
    """How a call ended; see `engine.tools.events.Outcome`."""

    COMPLETE = "complete"
    BROKEN = "broken"
    CUT = "cut"


def calls_of(end: wire.End) -> list[wire.CallFields]:
    """All calls of a turn, however they ended."""
    return [] if end.answer is None else end.answer.calls


def complete_calls(calls: Iterable[wire.CallFields]) -> list[wire.CallFields]:
    """The calls whose arguments are whole and valid."""
    return [call for call in calls if call.outcome == CallOutcome.COMPLETE]


def reasoning_tokens(end: wire.End) -> int:
    """How many of a turn's tokens were generated while the model reasoned."""
    return 0 if end.answer is None else end.answer.reasoning_tokens


def finish_reason(end: wire.End) -> str:
    """Why a turn ended: `stop`, `length` or `tool_calls`; `abort` if it was aborted.

    `tool_calls` if it has a complete call, unless its limit of tokens cut another one.
    """
    if end.outcome != "finished":
        return "abort"
    calls = calls_of(end)
    if end.reason == "length" and any(call.outcome == CallOutcome.CUT for call in calls):
        return end.reason
    return "tool_calls" if complete_calls(calls) else end.reason


def plain_text(delta: wire.Delta) -> str | None:
    """The text of a delta that has nothing but text; None for any other."""
    if delta.logprobs is not None:
        return None
    events = delta.events
    if events is None:
        return delta.text or None
    if len(events) == 1 and events[0].part is wire.Part.TEXT:
        return events[0].text or None
    return None


def shown_calls(calls: Iterable[wire.CallFields]) -> list[dict[str, Any]]:
    """Calls in OpenAI's form."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
