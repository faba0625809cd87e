"""Which protocol a connection to `/v1/realtime` speaks, and the errors for messages that cannot be read.

OpenAI's clients connect with a model in the URL, the subprotocol `realtime` or the header `OpenAI-Beta`, and
wait for `session.created`. Others are told apart by the type of their first message. A message that cannot be
decoded gets an `error` in OpenAI's form in either protocol: with an `event_id` of its own, and in the error
the `event_id` of the message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.websockets import WebSocket

from holdfast.server.http.problems import Problem
from holdfast.server.limits import EVENT_ID_CHARACTERS_MAX
from holdfast.server.sessions import new_name

__all__ = [
    "HOLDFAST_MESSAGES",
    "OPENAI_EVENTS",
    "Misunderstood",
    "chosen_subprotocol",
    "comes_from_openai",
    "is_beta",
    "kind_of",
    "misunderstood",
    "query_of",
    "speaks_holdfast",
]

SUBPROTOCOL = "holdfast"
OPENAI_SUBPROTOCOL = "realtime"
OPENAI_PREFIX = "openai-"
OPENAI_QUERY = ("model", "call_id", "intent")
BETA_SUBPROTOCOL = "openai-beta.realtime-v1"
BETA_HEADER = "realtime=v1"

HOLDFAST_MESSAGES = (
    "session.open",
    "input.append",
    "input.replace",
    "input.commit",
    "response.interrupt",
    "session.rewind",
    "session.fork",
    "session.change",
    "session.close",
)
"""The message types of Holdfast's own protocol."""

OPENAI_EVENTS = (
    "session.update",
    "conversation.item.create",
    "conversation.item.retrieve",
    "conversation.item.delete",
    "conversation.item.truncate",
    "response.create",
    "response.cancel",
    "input_audio_buffer.clear",
    "input_audio_buffer.append",
    "input_audio_buffer.commit",
    "output_audio_buffer.clear",
    "transcription_session.update",
)
"""The event types of OpenAI's clients."""


class Misunderstood(Problem):
    """A problem in the form of OpenAI's errors: with ids of the error and of the message that caused it."""

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


def kind_of(text: str) -> str | None:
    """The type of a message; None if it has none that can be read."""
    return _head(text)[0]


def misunderstood(text: str, problem: Problem) -> Misunderstood:
    """The problem with a message, in the form that its sender reads."""
    kind, event_id = _head(text)
    if problem.param == "type" and kind not in HOLDFAST_MESSAGES and kind not in OPENAI_EVENTS:
        said = (
            f"type: unknown message type; must be one of {', '.join(HOLDFAST_MESSAGES)}, or, from OpenAI's "
            f"clients, of {', '.join(OPENAI_EVENTS)}"
        )
        problem = Problem(400, "invalid_value", said, "type")
    elif problem.param == "type":
        said = "type: is a message of the other protocol; see docs/realtime.md for how a connection chooses"
        problem = Problem(400, "unsupported_protocol", said, "type")
    return Misunderstood(problem, event_id)


def _head(text: str) -> tuple[str | None, str | None]:
    """The type and the id of a message, where they are short texts."""
    try:
        head = msgspec.json.decode(text.encode("utf-8", "surrogatepass"), type=_Head)
        return _text(head.type), _text(head.event_id)
    except (msgspec.DecodeError, RecursionError):
        return None, None


def _text(raw: msgspec.Raw) -> str | None:
    """A short text; None for anything else."""
    written = bytes(raw)
    if len(written) > 6 * EVENT_ID_CHARACTERS_MAX + 2:
        return None
    value: Any = msgspec.json.decode(written)
    return value if isinstance(value, str) and 0 < len(value) <= EVENT_ID_CHARACTERS_MAX else None


def _offered(websocket: WebSocket) -> list[str]:
    return list(websocket.scope.get("subprotocols", []))


def speaks_holdfast(websocket: WebSocket) -> bool:
    """Whether a connection asks for Holdfast's own protocol."""
    return SUBPROTOCOL in _offered(websocket)


def query_of(websocket: WebSocket) -> QueryParams:
    """The fields of a connection's address. Some clients append `?model=` to one that has a query already, so
    a second question mark separates fields too: neither names of sessions nor of models have one."""
    return QueryParams(websocket.scope["query_string"].replace(b"?", b"&"))


def comes_from_openai(websocket: WebSocket) -> bool:
    """Whether a connection looks like OpenAI's client, which waits for a first message."""
    query = query_of(websocket)
    return (
        "openai-beta" in websocket.headers
        or any(name in query for name in OPENAI_QUERY)
        or any(name == OPENAI_SUBPROTOCOL or name.startswith(OPENAI_PREFIX) for name in _offered(websocket))
    )


def is_beta(websocket: WebSocket) -> bool:
    """Whether a client expects the names of the beta."""
    return BETA_HEADER in websocket.headers.get("openai-beta", "") or BETA_SUBPROTOCOL in _offered(websocket)


def chosen_subprotocol(offered: Iterable[str]) -> str | None:
    """The subprotocol of a connection. Browsers drop a connection that accepts none of theirs."""
    names = set(offered)
    return next((name for name in (SUBPROTOCOL, OPENAI_SUBPROTOCOL) if name in names), None)
