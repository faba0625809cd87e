"""How `/v1/sessions` and `/v1/realtime` write a turn: deltas, the whole turn, log-probabilities, failures."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.server.http.answers import event
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.link.engine_client import TurnFeed

__all__ = ["failed", "shown_delta", "shown_turn"]


def failed(name: str, problem: Problem) -> bytes:
    """The error event of a turn."""
    return event({"turn_id": name, **problem.body()}, "error")


def shown_delta(name: str, delta: wire.Delta) -> dict[str, Any]:
    """A delta of a turn."""
    shown: dict[str, Any] = {
        "turn_id": name,
        "index": delta.index,
        "text": delta.text,
        "token_ids": delta.tokens,
    }
    if delta.logprobs is not None:
        shown["logprobs"] = shown_logprobs(delta.logprobs)
    return shown


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
        return msgspec.structs.replace(end, text="", tokens=[], logprobs=None)
    return end


def shown_turn(name: str, feed: TurnFeed) -> dict[str, Any]:
    """A whole turn: the text that was kept, which may be less than was streamed."""
    end = standing(feed)
    shown: dict[str, Any] = {
        "turn_id": name,
        "text": end.text,
        "token_ids": end.tokens,
        "finish_reason": end.reason if end.outcome == "finished" else "abort",
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
    if end.outcome == "aborted":
        shown["abort_reason"] = end.reason
    if end.logprobs is not None:
        shown["logprobs"] = shown_logprobs(end.logprobs)
    return shown
