"""Reading request bodies: sizes first, then JSON, then types. Errors name the field, never repeat the value.

A body is read no further than its limit. Decoding is strict: no NaN, no boolean for a number, no float for an
integer, no lone surrogate, nothing after the end. `limits` bounds every field. A body that would block the
event loop for long is parsed by a text process first, and checked in portions.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import inspect
from starlette.requests import ClientDisconnect, Request

from holdfast.engine.portions import in_turns
from holdfast.server import limits
from holdfast.server.dialects.tables import why_unknown
from holdfast.server.http.problems import Problem
from holdfast.server.limits import Room

__all__ = ["Reading", "brings_body", "decode_json", "decode_large", "read_json"]

T = TypeVar("T")

LARGE_BYTES = 1 << 16
"""A JSON text up to this size is decoded on the event loop, in a millisecond at most."""
NAME_CHARACTERS_MAX = 64
PATH_CHARACTERS_MAX = 256

_PLACE = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_INDEX = re.compile(r"\[[^\]]*\]")
_VALUE = re.compile(r"Invalid (enum )?value ")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")


@dataclass(frozen=True, slots=True)
class Reading:
    """How a body is read: the limit in bytes, the model's room, and the parser for large bodies."""

    limit: int
    room: Room | None
    read_large: Callable[[memoryview], Awaitable[memoryview]]


async def read_json(request: Request, kind: type[T], reading: Reading) -> T:
    """The body of a request as a value of `kind`."""
    limit = reading.limit
    # A cross-site page can send a body without a content type, but not JSON with one.
    default = "" if "origin" in request.headers else "application/json"
    form = request.headers.get("content-type", default).partition(";")[0].strip().lower()
    if form != "application/json" and not form.endswith("+json"):
        raise Problem(415, "unsupported_media_type", "the body must be JSON, sent as application/json")
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise too_large(limit)
    except ClientDisconnect as error:
        raise Problem(400, "client_disconnected", "the body was not sent to its end") from error
    return await decode_large(body, kind, reading)


async def decode_large(body: bytes | bytearray, kind: type[T], reading: Reading) -> T:
    """A JSON text of any size as a value of `kind`, within the limits."""
    value = await parse_large(body, kind, reading)
    assert isinstance(value, msgspec.Struct), "bodies are structs"
    await in_turns(limits.checking(value, reading.room))
    return value


async def parse_large(body: bytes | bytearray, kind: type[T], reading: Reading) -> T:
    """A JSON text of any size as a value of `kind`; the caller applies the limits."""
    if len(body) <= LARGE_BYTES:
        return _parsed(body, kind)
    content = await reading.read_large(memoryview(body))
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error), kind) from None


def brings_body(request: Request) -> bool:
    """Whether a request has a body, possibly empty."""
    headers = request.headers
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def too_large(limit: int) -> Problem:
    """A body over the size limit."""
    return Problem(413, "body_too_large", f"the body is longer than {limit} bytes")


def decode_json(body: bytes, kind: type[T], room: Room | None) -> T:
    """A JSON text as a value of `kind`, within the limits."""
    value = _parsed(body, kind)
    assert isinstance(value, msgspec.Struct), "bodies are structs"
    limits.check(value, room)
    return value


def _parsed(body: bytes | bytearray, kind: type[T]) -> T:
    """A JSON text as a value of `kind`; every error is a `Problem` that names the field."""
    if not body.strip():
        raise Problem(400, "invalid_json", "the body is empty")
    try:
        body.decode("utf-8")
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error), kind) from None
    except UnicodeDecodeError:
        raise Problem(400, "invalid_json", "the body is not valid UTF-8") from None
    except RecursionError:
        raise Problem(400, "invalid_json", "the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise Problem(400, "invalid_json", f"the body is not valid JSON: {_reason(str(error))}") from None


def _reason(text: str) -> str:
    return text.removeprefix("JSON is malformed: ").lower()


def _wrong_field(text: str, kind: Any) -> Problem:
    """The decoder's error, with the field's name as the client wrote it.

    The decoder quotes invalid enum values, and a value may look like anything: only the ends of its message
    are parsed.
    """
    place = _PLACE.search(text)
    path = place["path"].lstrip(".").replace("[...]", "")[:PATH_CHARACTERS_MAX] if place is not None else ""
    problem = _PLACE.sub("", text)
    for pattern in (_UNKNOWN, _MISSING):
        found = pattern.match(problem)
        if found is not None:
            inner = found["name"][:NAME_CHARACTERS_MAX]
            path = f"{path}.{inner}" if path else inner
            problem = why_unknown(path) if pattern is _UNKNOWN else "this field is required"
    if _VALUE.match(problem):
        allowed = ", ".join(map(str, _allowed(kind, path)))
        problem = f"must be one of {allowed}" if allowed else "this value is not allowed"
    problem = problem.replace("`", "")
    return Problem(
        400, "invalid_value", f"{path or 'body'}: {problem[:1].lower()}{problem[1:]}", path or None
    )


def _allowed(kind: Any, path: str) -> list[object]:
    """The allowed values of a field that is an enum."""
    places: list[inspect.Type] = [inspect.type_info(kind)]
    for name in _INDEX.sub("", path).split("."):
        places = [
            field.type
            for place in _alternatives(places)
            if isinstance(place, inspect.StructType)
            for field in place.fields
            if field.encode_name == name
        ]
    literals = (place for place in _alternatives(places) if isinstance(place, inspect.LiteralType))
    return [value for literal in literals for value in literal.values]


def _alternatives(places: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    """The alternatives of types, with those of list items."""
    for place in places:
        if isinstance(place, inspect.UnionType):
            yield from _alternatives(place.types)
        elif isinstance(place, inspect.ListType):
            yield from _alternatives([place.item_type])
        elif isinstance(place, inspect.Metadata):
            yield from _alternatives([place.type])
        else:
            yield place
