"""The OpenAPI document: bodies are described from the structs that decode them."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["components", "documented"]

REFERENCE = "#/components/schemas/{name}"

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": "string"},
                "param": {"type": ["string", "null"]},
            },
        }
    },
}

_described: list[type] = []

STATUSES = (400, 401, 403, 404, 409, 410, 413, 415, 429, 503)


def documented(
    body: Any, summary: str, *, status: int = 200, stream: bool = False, required: bool = True
) -> dict[str, Any]:
    """Arguments of a route's decorator that describe it in the OpenAPI document."""
    extra: dict[str, Any] = {}
    if body is not None:
        _described.append(body)
        schema = {"$ref": REFERENCE.format(name=body.__name__)}
        extra["requestBody"] = {"required": required, "content": {"application/json": {"schema": schema}}}
    error = {"content": {"application/json": {"schema": {"$ref": REFERENCE.format(name="Error")}}}}
    content: dict[str, Any] = {"application/json": {}}
    if stream:
        content["text/event-stream"] = {}
    responses: dict[str, Any] = {str(code): {"description": "Refused.", **error} for code in STATUSES}
    responses[str(status)] = {"description": "Done.", "content": content}
    extra["responses"] = responses
    return {"summary": summary, "openapi_extra": extra, "status_code": status, "response_model": None}


def components() -> dict[str, Any]:
    """The schemas of all bodies."""
    _, schemas = msgspec.json.schema_components(_described, ref_template=REFERENCE)
    return {**schemas, "Error": ERROR_SCHEMA}
