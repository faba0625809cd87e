"""The client's exceptions: one tree, each with the server's own error fields.

`HoldfastError` is the root. A `RequestFailed` carries the server's `status`, `code`, `type` and `param`, the
id of the request and, if the server sent one, `retry_after` in seconds. Its subclasses follow the status of
an answer, or the `type` of an error inside a stream, which has no status.
Used by everything in this package and by its callers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = [
    "AnswerChanged",
    "BadArgument",
    "BadRequest",
    "Conflict",
    "ConnectionFailed",
    "Expired",
    "Forbidden",
    "HoldfastError",
    "NotFound",
    "ProtocolError",
    "RequestFailed",
    "ServerFault",
    "TooManyRequests",
    "TurnFailed",
    "Unauthorized",
    "Unavailable",
    "error_from_body",
    "error_from_response",
    "lost_connection",
]

MESSAGE_CHARACTERS_MAX = 500


class HoldfastError(Exception):
    """Everything that this package raises."""


class BadArgument(HoldfastError, ValueError, TypeError):
    """An invalid argument; nothing was sent."""


class ConnectionFailed(HoldfastError):
    """The server could not be reached, or the connection broke before the end of the answer."""


class ProtocolError(HoldfastError):
    """The answer is not a Holdfast server's: the URL may be another service's."""


class AnswerChanged(HoldfastError):
    """A turn was retried after its connection broke, and its text differs from the text already shown."""


class RequestFailed(HoldfastError):
    """The server answered with an error."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        type: str | None = None,  # noqa: A002
        param: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.type = type
        self.param = param
        self.request_id = request_id
        self.retry_after = retry_after


class BadRequest(RequestFailed):
    """The request is invalid: `param` names the field."""


class Unauthorized(RequestFailed):
    """No key, or an invalid one."""


class Forbidden(RequestFailed):
    """The key is valid, but does not allow this."""


class NotFound(RequestFailed):
    """There is no such session, turn or model."""


class Conflict(RequestFailed):
    """The session is busy, or the id is taken."""


class Expired(RequestFailed):
    """The session was closed because it was idle for too long."""


class TooManyRequests(RequestFailed):
    """A queue or a quota is full."""


class ServerFault(RequestFailed):
    """The server failed."""


class Unavailable(ServerFault):
    """The server is starting, draining, or without its engine for the moment."""


class TurnFailed(RequestFailed):
    """A turn failed on the engine; its session was rolled back to the state before it."""


BY_STATUS: dict[int, type[RequestFailed]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Expired,
    429: TooManyRequests,
    503: Unavailable,
}

BY_TYPE: dict[str, type[RequestFailed]] = {
    "invalid_request_error": BadRequest,
    "authentication_error": Unauthorized,
    "permission_error": Forbidden,
    "not_found_error": NotFound,
    "conflict_error": Conflict,
    "gone_error": Expired,
    "rate_limit_error": TooManyRequests,
    "unavailable_error": Unavailable,
}
"""Exceptions for errors inside a stream; any other type is TurnFailed, or ServerFault."""

INTERNAL_CODE = "internal_error"


def error_from_response(status: int, body: bytes, headers: Mapping[str, str]) -> RequestFailed:
    """The exception for an error answer."""
    fallback = ServerFault if status >= 500 else BadRequest
    said = _error_object(body)
    message = said.get("message") or f"the server answered with status {status}"
    return BY_STATUS.get(status, fallback)(
        str(message),
        status=status,
        code=_text(said, "code"),
        type=_text(said, "type"),
        param=_text(said, "param"),
        request_id=headers.get("x-request-id"),
        retry_after=_seconds(headers.get("retry-after")),
    )


def error_from_body(said: Mapping[str, Any]) -> RequestFailed:
    """The exception for an error inside a stream, which has no status."""
    fallback = ServerFault if said.get("code") == INTERNAL_CODE else TurnFailed
    return BY_TYPE.get(str(said.get("type")), fallback)(
        str(said.get("message") or "the turn failed"),
        code=_text(said, "code"),
        type=_text(said, "type"),
        param=_text(said, "param"),
    )


def _error_object(body: bytes) -> Mapping[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError:
        return {"message": body.decode(errors="replace").strip()[:MESSAGE_CHARACTERS_MAX]}
    said = answer.get("error") if isinstance(answer, dict) else None
    return said if isinstance(said, dict) else {}


def _text(said: Mapping[str, Any], name: str) -> str | None:
    value = said.get(name)
    return None if value is None else str(value)


def _seconds(text: str | None) -> float | None:
    """Retry-After in seconds; the form with a date is not used by Holdfast and counts as none."""
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None


def lost_connection(url: str, error: Exception) -> ConnectionFailed:
    """The exception for a connection that could not be made, or broke."""
    return ConnectionFailed(f"{url}: {str(error) or type(error).__name__}")
