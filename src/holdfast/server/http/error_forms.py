"""The JSON bodies of errors: OpenAI's form on most routes, Anthropic's below `/v1/messages`.

Anthropic's clients choose their exception by status and by `error.type`, and show `request_id`. Both forms
have the same `code`, `message` and `param`.
"""

from __future__ import annotations

from holdfast.server.http.problems import Problem

__all__ = ["anthropic_error", "error_body", "is_anthropic"]

ANTHROPIC_PATH = "/v1/messages"

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Anthropic's error types by status; all others are `invalid_request_error`."""

DETAILED = frozenset({"thread_unsupported_request"})
"""Codes that Anthropic has, too. Its clients read them from `details`, and act by them."""


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's dialect."""
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def error_body(problem: Problem, path: str, request_id: str) -> dict[str, object]:
    """The body of an error answer to a request for `path`."""
    return anthropic_error(problem, request_id) if is_anthropic(path) else problem.body()


def anthropic_error(problem: Problem, request_id: str) -> dict[str, object]:
    """An error as Anthropic writes it, in a body or in an event of a stream."""
    error: dict[str, object] = {
        "type": ANTHROPIC_TYPES.get(problem.status, "invalid_request_error"),
        "message": problem.message,
        "code": problem.code,
        "param": problem.param,
    }
    if problem.code in DETAILED:
        error["details"] = {"error_code": problem.code}
    return {"type": "error", "error": error, "request_id": request_id}
