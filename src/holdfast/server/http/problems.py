"""Errors for clients: one exception with status, code, message and field.

Messages name fields and limits, never values that the client sent and never a raw exception. The engine's
refusals have stable codes; `from_refusal` maps each to its status.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = [
    "STATUS_OF_CODE",
    "Problem",
    "bad_field",
    "context_exceeded",
    "engine_lost",
    "engine_unavailable",
    "from_refusal",
    "internal_error",
    "link_lost",
    "told_as",
    "turn_failed",
]

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
    "unknown_token": 400,
    "unknown_position": 400,
    "invalid_value": 400,
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
    "bad_text": 400,
    "history_changed": 409,
    "history_repeated": 400,
    "history_differs": 409,
    "notes_too_large": 400,
    "journal_unavailable": 503,
    "session_moved": 503,
    "engine_draining": 503,
    "engine_not_found": 404,
    "invalid_grammar": 400,
    "unsupported_grammar": 400,
    "grammar_too_large": 400,
    "grammar_too_slow": 400,
    "grammars_unavailable": 400,
    "grammars_busy": 503,
    "unknown_format": 400,
}

WORDS_OF_CODE = {
    "session_not_found": "there is no such session",
    "session_expired": "the session was closed after its time to live",
    "session_exists": "a session with this id is already open, or is in the journal waiting for memory",
    "session_busy": "the session has a turn in flight or is being closed",
    "unknown_token": "input: a token id is out of range for the model's vocabulary",
    "turn_exists": "a turn or request with this id already exists",
    "turn_conflict": "a turn with this id has finished, and its body was different",
    "request_conflict": "a request with this id was different, or the session that it made is closed",
    "turn_not_found": "the session has no such turn, or the turn can no longer be interrupted",
    "nothing_to_keep": "keep_tokens is more than the number of generated tokens",
    "request_not_found": "the session has no such request",
    "request_not_finished": "the parent request has not finished",
    "bad_offset": "the offset is before the start of the session",
    "already_computed": "the session has already computed these tokens",
    "bad_max_tokens": "must be at least 0",
    "history_repeated": "the session already has its history: send only new messages, without assistant "
    "messages and without a leading system message, or set append_history to append them anyway",
    "engine_not_found": "there is no other engine of this name that takes sessions",
    "journal_unavailable": "the journal cannot be written; try again later",
    "session_moved": "the session belongs to another server now; send the request again",
}
"""Messages of refusals whose own text, which is for the log, repeats names or values of the client's. The
text of all other codes holds figures of the server's alone."""

TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "conflict_error",
    410: "gone_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "unavailable_error",
}

RETRY_SECONDS = 1


class Problem(Exception):
    """An error answer: a fault of a request, or of the server."""

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

    def renamed(self, names: Mapping[str, str]) -> Problem:
        """The same problem with the name that the client writes, of a field or of an entry of it."""
        if self.param is None:
            return self
        field = self.param if self.param in names else self.param.partition("[")[0]
        if field not in names:
            return self
        name, message = names[field] + self.param.removeprefix(field), self.message
        if message.startswith(self.param):
            message = name + message.removeprefix(self.param)
        return Problem(self.status, self.code, message, name, self.retry_after)

    def body(self) -> dict[str, object]:
        """The JSON body, the same in every dialect."""
        error = {
            "message": self.message,
            "type": TYPE_OF_STATUS.get(self.status, "server_error"),
            "code": self.code,
            "param": self.param,
        }
        return {"error": error}


@contextmanager
def told_as(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields of problems raised in the block: `names` maps declared names to the client's."""
    try:
        yield
    except Problem as problem:
        raise problem.renamed(names) from problem


def from_refusal(code: str, message: str, param: str | None) -> Problem:
    """The problem for a refusal of the engine."""
    return Problem(STATUS_OF_CODE.get(code, 400), code, WORDS_OF_CODE.get(code, message), param)


def bad_field(param: str, problem: str, code: str = "invalid_value") -> Problem:
    """A field has an invalid value."""
    return Problem(400, code, f"{param}: {problem}", param)


def context_exceeded(
    limit: int, said: int, completion: int, *, history: int = 0, field: str = "input"
) -> Problem:
    """A turn that exceeds the context length, in the words that clients parse.

    `field` is the client's name of the input. If the input alone leaves no room for a token, it is the field
    at fault, and `max_tokens` otherwise.
    """
    parts = [(history, "session"), (said, field), (completion, "completion")]
    counted = ", ".join(f"{tokens} in the {part}" for tokens, part in parts if tokens)
    message = (
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{history + said + completion} tokens ({counted}). "
        f"Please reduce the length of the {field} or completion"
    )
    if history:
        message += ", rewind the session, or open another"
    full = history + said >= limit
    return Problem(400, "context_length_exceeded", f"{message}.", "input" if full else "max_tokens")


def engine_unavailable() -> Problem:
    """No engine process is running."""
    return Problem(503, "engine_unavailable", "the engine is starting; try again shortly", retry_after=2)


def engine_lost() -> Problem:
    """The engine process ended while it worked on this."""
    return Problem(
        503, "engine_lost", "the engine was restarted while it worked on this; try again", retry_after=2
    )


def link_lost(turn: str) -> Problem:
    """The link to the engine broke while the engine worked on a turn."""
    return Problem(
        503,
        "engine_lost",
        f"the link to the engine was lost while it worked on turn {turn}; try again with the same id",
        retry_after=2,
    )


def internal_error() -> Problem:
    """An unexpected exception, without its text."""
    return Problem(500, "internal_error", "internal error; see the server log")


def turn_failed(reason: str) -> Problem:
    """A turn that failed on the engine; its session is rolled back to the state before it."""
    if reason == "numeric_error":
        return Problem(500, reason, "the model's output was not a number; the turn was rolled back")
    if reason == "session_moved":
        return from_refusal(reason, "", None)
    if reason.startswith("constraint:"):
        said = "the answer's grammar exceeded a limit, or allowed nothing more; the turn was rolled back"
        return Problem(400, "constraint_failed", said)
    return Problem(500, "turn_failed", "the turn failed and was rolled back; see the server log")
