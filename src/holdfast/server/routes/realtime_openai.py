"""Errors for clients of OpenAI's realtime protocol on `/v1/realtime`.

OpenAI's clients connect with a model in the URL, wait for `session.created`, and send `session.update`,
`response.create` and the like. They get an `error` at once in OpenAI's form: with an `event_id` of its own,
and in the error the `event_id` of the message that caused it. So does every message that cannot be decoded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.websockets import WebSocket

from holdfast.server.http.problems import Problem
from holdfast.server.sessions import new_name

__all__ = ["Misunderstood", "chosen_subprotocol", "comes_from_openai", "misunderstood", "wrong_protocol"]

SUBPROTOCOL = "holdfast"
OPENAI_SUBPROTOCOL = "realtime"
OPENAI_PREFIX = "openai-"
OPENAI_QUERY = ("model", "call_id", "intent")
OPENAI_TYPES = (
    "conversation.",
    "input_audio_buffer.",
    "output_audio_buffer.",
    "response.cancel",
    "response.create",
    "session.input_audio_buffer.",
    "session.update",
    "transcription_session.",
)
"""Prefixes of OpenAI's message types, without those that both protocols have."""

MESSAGES = (
    "session.open",
    "input.append",
    "input.commit",
    "response.interrupt",
    "session.rewind",
    "session.fork",
    "session.close",
)
"""The message types of this protocol."""

EVENT_ID_CHARACTERS_MAX = 512


class Misunderstood(Problem):
    """The problem with a message of another protocol, or a malformed one."""

    def __init__(self, problem: Problem, event_id: str | None = None) -> None:
        super().__init__(problem.status, problem.code, problem.message, problem.param, problem.retry_after)
        self.event_id = event_id
        """The sender's id of the message."""

    def body(self) -> dict[str, object]:
        """The body of every problem, with the ids that OpenAI's clients read."""
        shown = super().body()
        error = shown["error"]
        assert isinstance(error, dict)
        return {"event_id": new_name("event"), "error": {**error, "event_id": self.event_id}}


class _Head(msgspec.Struct):
    """The fields that are read of a message that cannot be decoded."""

    type: msgspec.Raw = msgspec.Raw(b"null")
    event_id: msgspec.Raw = msgspec.Raw(b"null")


def wrong_protocol() -> Problem:
    """A client uses OpenAI's protocol."""
    message = (
        "this server does not speak OpenAI's realtime protocol; /v1/realtime has its own, with the messages "
        f"{', '.join(MESSAGES)}: see docs/realtime.md"
    )
    return Problem(400, "unsupported_protocol", message, "type")


def misunderstood(text: str, problem: Problem) -> Misunderstood:
    """The problem with a message, in the form that its sender reads."""
    try:
        head = msgspec.json.decode(text.encode("utf-8", "surrogatepass"), type=_Head)
        kind, event_id = _text(head.type), _text(head.event_id)
    except (msgspec.DecodeError, RecursionError):
        return Misunderstood(problem)
    if problem.param == "type":
        known = kind is not None and kind.startswith(OPENAI_TYPES)
        said = f"type: unknown message type; must be one of {', '.join(MESSAGES)}"
        problem = wrong_protocol() if known else Problem(400, "invalid_value", said, "type")
    return Misunderstood(problem, event_id)


def _text(raw: msgspec.Raw) -> str | None:
    """A short text; None for anything else."""
    written = bytes(raw)
    if len(written) > 6 * EVENT_ID_CHARACTERS_MAX + 2:
        return None
    value: Any = msgspec.json.decode(written)
    return value if isinstance(value, str) and 0 < len(value) <= EVENT_ID_CHARACTERS_MAX else None


def comes_from_openai(websocket: WebSocket) -> bool:
    """Whether a connection looks like OpenAI's client, which waits for a first message."""
    return (
        "openai-beta" in websocket.headers
        or any(name in websocket.query_params for name in OPENAI_QUERY)
        or any(
            name == OPENAI_SUBPROTOCOL or name.startswith(OPENAI_PREFIX)
            for name in websocket.scope.get("subprotocols", [])
        )
    )


def chosen_subprotocol(offered: Iterable[str]) -> str | None:
    """The subprotocol of a connection. Browsers drop a connection that accepts none of theirs, and would not
    get the error."""
    names = set(offered)
    return next((name for name in (SUBPROTOCOL, OPENAI_SUBPROTOCOL) if name in names), None)
