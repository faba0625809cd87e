"""Everything a client can be told is wrong: one exception, its status, its code, and what to do next.

Messages name fields and figures, never values that the client sent and never a raw exception. The engine's
refusals have stable codes; `from_refusal` gives each its status.
"""

from __future__ import annotations

__all__ = ["Problem", "bad_field", "engine_lost", "engine_unavailable", "from_refusal"]

STATUS_OF_CODE = {
    "session_not_found": 404,
    "session_expired": 410,
    "session_lost": 410,
    "session_exists": 409,
    "session_busy": 409,
    "too_many_sessions": 429,
    "queue_full": 429,
    "over_quota": 429,
    "empty_turn": 400,
    "turn_exists": 409,
    "turn_conflict": 409,
    "request_conflict": 409,
    "turn_not_found": 404,
    "nothing_to_keep": 400,
    "request_not_found": 400,
    "request_not_finished": 400,
    "bad_offset": 400,
    "session_full": 400,
    "already_computed": 400,
    "context_length_exceeded": 400,
    "insufficient_memory": 400,
    "bad_sampling": 400,
    "bad_max_tokens": 400,
    "history_changed": 409,
    "journal_unavailable": 503,
}

TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    410: "gone_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}

RETRY_SECONDS = 1


class Problem(Exception):
    """Something is wrong with a request, or with the server; carries what the client is told."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = (
            retry_after if retry_after is not None or status not in (429, 503) else RETRY_SECONDS
        )

    def body(self) -> dict[str, object]:
        """What is sent: the same shape on every door."""
        error = {
            "message": self.message,
            "type": TYPE_OF_STATUS.get(self.status, "server_error"),
            "code": self.code,
            "param": self.param,
        }
        return {"error": error}


def from_refusal(code: str, message: str, param: str | None) -> Problem:
    """The problem behind a refusal of the engine."""
    return Problem(STATUS_OF_CODE.get(code, 400), code, message, param)


def bad_field(param: str, problem: str, code: str = "invalid_value") -> Problem:
    """A field has a value that cannot be."""
    return Problem(400, code, f"{param}: {problem}", param)


def engine_unavailable() -> Problem:
    """No engine process is there to ask."""
    return Problem(503, "engine_unavailable", "the engine is starting; try again shortly", retry_after=2)


def engine_lost() -> Problem:
    """The engine process ended while it worked on this."""
    return Problem(
        503, "engine_lost", "the engine was restarted while it worked on this; try again", retry_after=2
    )
