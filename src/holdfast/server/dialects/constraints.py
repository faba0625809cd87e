"""Constraints as each dialect writes them: from the fields of a request to the kind and source of a grammar.

OpenAI has `response_format`, vLLM `structured_outputs` (formerly `guided_*`), SGLang `regex`, `json_schema`,
`ebnf` and `structural_tag`, this server's own dialects `grammar`. All become a `Constraint`. The grammar
itself is checked in a text process; this module checks its wrapping.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.engine.constraints.grammar import Kind
from holdfast.server.http.problems import bad_field

__all__ = [
    "Constraint",
    "in_field",
    "json_object",
    "native_grammar",
    "response_format",
    "structured_outputs",
]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint of an answer. `field` is the client's field, which problems name."""

    kind: Kind
    value: Any
    field: str


def in_field(kind: Kind, field: str) -> Callable[[Any], Constraint | None]:
    """Reads a field that is a grammar of one kind; an empty text asks for nothing."""

    def read(given: Any) -> Constraint | None:
        return None if given == "" else Constraint(kind, given, field)

    return read


def json_object(field: str) -> Callable[[bool], Constraint | None]:
    """Reads a switch that asks for any JSON object."""

    def read(given: bool) -> Constraint | None:
        return Constraint(Kind.JSON_OBJECT, None, field) if given else None

    return read


# --- OpenAI ---------------------------------------------------------------------------------------

_RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def response_format(given: Mapping[str, Any]) -> Constraint | None:
    """OpenAI's `response_format`, with `structural_tag` as vLLM and SGLang have it there."""
    field = "response_format"
    kind = given.get("type")
    if not given or kind == "text":
        return None
    if kind == "json_object":
        return Constraint(Kind.JSON_OBJECT, None, field)
    if kind == "structural_tag":
        tag = {name: value for name, value in given.items() if name != "type"}
        return Constraint(Kind.STRUCTURAL_TAG, tag, field)
    if kind != "json_schema":
        raise bad_field(f"{field}.type", f"must be one of {', '.join(_RESPONSE_FORMATS)}")
    wrapped = given.get("json_schema")
    if not isinstance(wrapped, dict):
        raise bad_field(f"{field}.json_schema", "must be an object with a name and a schema")
    _require_known(wrapped, ("name", "description", "schema", "strict"), f"{field}.json_schema")
    schema = wrapped.get("schema")
    if schema is None:
        return Constraint(Kind.JSON_OBJECT, None, f"{field}.json_schema")
    return Constraint(Kind.JSON_SCHEMA, schema, f"{field}.json_schema.schema")


# --- vLLM -----------------------------------------------------------------------------------------

_STRUCTURED_KINDS: Mapping[str, Kind] = {
    "json": Kind.JSON_SCHEMA,
    "json_object": Kind.JSON_OBJECT,
    "regex": Kind.REGEX,
    "choice": Kind.CHOICE,
    "grammar": Kind.GBNF,
    "structural_tag": Kind.STRUCTURAL_TAG,
}
_STRUCTURED_HINTS = ("disable_fallback", "disable_any_whitespace", "_backend", "_backend_was_auto")
"""Fields that change nothing: there is one backend, and JSON is laid out without free whitespace."""
_STRUCTURED_REFUSED = ("whitespace_pattern", "disable_additional_properties")


def structured_outputs(given: Mapping[str, Any]) -> Constraint | None:
    """vLLM's `structured_outputs`: an object with exactly one constraint."""
    field = "structured_outputs"
    _require_known(given, (*_STRUCTURED_KINDS, *_STRUCTURED_HINTS, *_STRUCTURED_REFUSED), field)
    for name in _STRUCTURED_REFUSED:
        if given.get(name) not in (None, False, ""):
            raise bad_field(f"{field}.{name}", "is not supported yet", "unsupported")
    asked = [name for name in _STRUCTURED_KINDS if given.get(name) not in (None, False, "")]
    if len(asked) > 1:
        raise bad_field(f"{field}.{asked[1]}", f"cannot be combined with {field}.{asked[0]}")
    if not asked:
        return None
    kind = _STRUCTURED_KINDS[asked[0]]
    value = None if kind is Kind.JSON_OBJECT else given[asked[0]]
    return Constraint(kind, value, f"{field}.{asked[0]}")


# --- sessions and realtime ------------------------------------------------------------------------


def native_grammar(given: Mapping[str, Any]) -> Constraint:
    """This server's `grammar`: a kind and a value."""
    _require_known(given, ("kind", "value"), "grammar")
    kind = given.get("kind")
    known = {each.value: each for each in Kind}
    if not isinstance(kind, str) or kind not in known:
        raise bad_field("grammar.kind", f"must be one of {', '.join(known)}")
    if known[kind] is not Kind.JSON_OBJECT and given.get("value") is None:
        raise bad_field("grammar.value", "this field is required")
    return Constraint(known[kind], given.get("value"), "grammar.value")


def _require_known(given: Mapping[str, Any], known: Collection[str], field: str) -> None:
    """Raise for a field inside of a constraint that nothing would look at; its name is not repeated."""
    if not given.keys() <= set(known):
        raise bad_field(field, f"has a field other than {', '.join(known)}")
