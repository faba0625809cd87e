"""JSON schemas: bounds, checks with places, and a normal form for the compiler.

Checks need no compiler and are bounded by the schema's size: depth, number of values, keywords that cannot be
enforced, references. The normal form drops annotations, which change no output, and formats that JSON Schema
does not define, which it says to ignore. `locate` finds the place of an error that only the compiler can see.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any
from urllib.parse import unquote

from holdfast.engine.constraints.errors import Fault, GrammarError

__all__ = ["DEPTH_MAX", "VALUES_MAX", "Whitespace", "locate", "normalised", "require_bounded"]

DEPTH_MAX = 64
VALUES_MAX = 20_000
LOCATE_ATTEMPTS_MAX = 64


class Whitespace(Enum):
    """How the model lays out JSON. Only FLEXIBLE leaves it a choice, which costs forced tokens."""

    SPACED = "spaced"
    """One space after `:` and `,`, as Python's json.dumps and chat templates write."""
    COMPACT = "compact"
    FLEXIBLE = "flexible"
    """Any JSON whitespace, up to 16 characters at a place."""


_LAYOUTS: dict[Whitespace, dict[str, Any]] = {
    Whitespace.SPACED: {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    Whitespace.COMPACT: {"whitespace_flexible": False},
    Whitespace.FLEXIBLE: {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}"},
}

_UNSUPPORTED = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired",
    "dependentSchemas", "dependencies", "propertyNames", "unevaluatedProperties", "unevaluatedItems",
    "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "x-guidance",
})  # fmt: skip
_ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "$comment", "$schema", "deprecated",
    "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "discriminator",
    "externalDocs", "xml",
})  # fmt: skip
_FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4",
    "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer",
    "relative-json-pointer", "regex",
})  # fmt: skip
"""Formats that JSON Schema defines. Any other is an annotation."""

_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTED_SCHEMAS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SINGLE_SCHEMAS = ("items", "additionalProperties", "additionalItems")


def require_bounded(value: Any, *, bytes_max: int) -> None:
    """Raise for a value that is too deep or too large. The work is bounded by the limits."""
    values = size = 0
    waiting: list[tuple[Any, int]] = [(value, 1)]
    while waiting:
        inner, depth = waiting.pop()
        values += 1
        size += len(inner) if isinstance(inner, str) else 2
        if depth > DEPTH_MAX:
            raise GrammarError(Fault.TOO_LARGE, f"nested deeper than {DEPTH_MAX} levels")
        if values + len(waiting) > VALUES_MAX:
            raise GrammarError(Fault.TOO_LARGE, f"has more than {VALUES_MAX} values")
        if size > bytes_max:
            raise GrammarError(Fault.TOO_LARGE, f"has more than {bytes_max} bytes")
        if isinstance(inner, dict):
            if len(inner) > VALUES_MAX:
                raise GrammarError(Fault.TOO_LARGE, f"has more than {VALUES_MAX} values")
            if not all(isinstance(key, str) for key in inner):
                raise GrammarError(Fault.INVALID, "not JSON: keys must be strings")
            size += sum(map(len, inner))
            waiting += [(each, depth + 1) for each in inner.values()]
        elif isinstance(inner, list):
            if len(inner) > VALUES_MAX:
                raise GrammarError(Fault.TOO_LARGE, f"has more than {VALUES_MAX} values")
            waiting += [(each, depth + 1) for each in inner]
        elif isinstance(inner, float) and not math.isfinite(inner):
            raise GrammarError(Fault.INVALID, "not JSON: numbers must be finite")
        elif not isinstance(inner, str | int | float | bool | None):
            raise GrammarError(Fault.INVALID, f"not JSON: {type(inner).__name__}")


def normalised(schema: Any, whitespace: Whitespace) -> str:
    """The schema as compact JSON with its layout; raises `GrammarError` with a JSON pointer."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    checked = _checked(schema, schema, "")
    return json.dumps(
        {**checked, "x-guidance": _LAYOUTS[whitespace]}, ensure_ascii=False, separators=(",", ":")
    )


def _checked(schema: Any, root: Any, place: str) -> Any:
    """A copy of a schema without annotations. Recursion is bounded by `DEPTH_MAX`."""
    if isinstance(schema, bool) and place:
        return schema
    if not isinstance(schema, dict):
        raise GrammarError(Fault.INVALID, "a schema must be an object or a boolean", place)
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        here = f"{place}/{_escaped(keyword)}"
        if keyword in _ANNOTATIONS or (keyword == "uniqueItems" and value is False):
            continue
        if keyword in _UNSUPPORTED or keyword == "uniqueItems":
            raise GrammarError(Fault.UNSUPPORTED, f"the keyword {keyword} is not supported", here)
        if keyword == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        if keyword == "$ref":
            _require_target(value, root, here)
        kept[keyword] = _checked_value(keyword, value, root, here)
    return kept


def _checked_value(keyword: str, value: Any, root: Any, here: str) -> Any:
    if keyword in _NAMED_SCHEMAS:
        if not isinstance(value, dict):
            raise GrammarError(Fault.INVALID, f"{keyword} must be an object", here)
        return {name: _checked(inner, root, f"{here}/{_escaped(name)}") for name, inner in value.items()}
    if keyword in _LISTED_SCHEMAS or (keyword == "items" and isinstance(value, list)):
        if not isinstance(value, list):
            raise GrammarError(Fault.INVALID, f"{keyword} must be a list", here)
        return [_checked(inner, root, f"{here}/{index}") for index, inner in enumerate(value)]
    if keyword in _SINGLE_SCHEMAS:
        return _checked(value, root, here)
    return value


def _require_target(reference: Any, root: Any, place: str) -> None:
    """Raise for a reference that leads out of the document or to nothing."""
    if not isinstance(reference, str):
        raise GrammarError(Fault.INVALID, "$ref must be a string", place)
    if not reference.startswith("#"):
        raise GrammarError(
            Fault.UNSUPPORTED, f"$ref {reference!r} leads out of the schema; only # is supported", place
        )
    if reference != "#" and not reference.startswith("#/"):
        raise GrammarError(
            Fault.UNSUPPORTED, f"$ref {reference!r} names an anchor; only pointers are supported", place
        )
    target = root
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and name in target:
            target = target[name]
        elif isinstance(target, list) and name.isascii() and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        else:
            raise GrammarError(Fault.INVALID, f"$ref {reference!r} leads to nothing", place)


def _escaped(name: str) -> str:
    """A step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def locate(source: str, message: str, error_of: Callable[[str], str]) -> str:
    """The place of a compiler's error in a normalised schema, as a JSON pointer; empty if it cannot be found.

    Compiles smaller and smaller parts of the schema, each with the definitions of the whole, and follows
    those that fail with the same message. `error_of` compiles a source and returns its error or an empty
    string.
    """
    root = json.loads(source)
    shared = {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
    schema, place, attempts = root, "", 0
    while True:
        for step, inner in _parts(schema):
            attempts += 1
            if attempts > LOCATE_ATTEMPTS_MAX:
                return place
            alone = {**inner, **shared} if isinstance(inner, dict) else inner
            if error_of(json.dumps(alone)) == message:
                schema, place = inner, place + step
                break
        else:
            return place + _keyword_of(schema, message)


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The subschemas of a schema with their places below it."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        here = "/" + _escaped(keyword)
        if keyword in _NAMED_SCHEMAS and isinstance(value, dict):
            yield from ((f"{here}/{_escaped(name)}", inner) for name, inner in value.items())
        elif isinstance(value, list) and (keyword in _LISTED_SCHEMAS or keyword == "items"):
            yield from ((f"{here}/{index}", inner) for index, inner in enumerate(value))
        elif keyword in _SINGLE_SCHEMAS and isinstance(value, dict):
            yield here, value


_WORD = re.compile(r"[A-Za-z]+")
_WORDS = (("regex", ("pattern", "patternProperties")), ("type", ("type",)), ("format", ("format",)))


def _keyword_of(schema: Any, message: str) -> str:
    """The keyword that a message is about: one that it names, or one that its words are about."""
    if not isinstance(schema, dict):
        return ""
    for name in _WORD.findall(message):
        if name in schema:
            return f"/{name}"
    named = [keyword for word, keywords in _WORDS if word in message.lower() for keyword in keywords]
    return next((f"/{keyword}" for keyword in named if keyword in schema), "")
