"""Pieces of grammar text in llguidance's dialect of Lark.

`Grammar` collects rules under fresh names. A marker is written by its token where it is one, and as a string
otherwise. JSON arguments are left to llguidance (`%json`); for the notations of Python and Gemma, which it
does not know, values are written as rules: types, enumerations, items, properties and alternatives of a
schema are followed, other keywords are not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.engine.tools.request import resolved
from holdfast.engine.tools.values import Notation

DEPTH_MAX = 8
"""Deeper values are any value of the notation."""

_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"
_INTEGER = r"/-?(0|[1-9][0-9]*)/"
_PYTHON_STRING = r"""/"([^"\\\x00-\x1f]|\\["\\nt'])*"|'([^'\\\x00-\x1f]|\\['\\nt"])*'/"""
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/#&~-]")
_FREE_TEXT = r"/(.|\n)*/"


def literal(text: str) -> str:
    """A string of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Text inside a regular expression."""
    return _SPECIAL.sub(r"\\\g<0>", text).replace("\n", "\\n")


def json_of(schema: Mapping[str, Any], *, strict: bool) -> str:
    """A value that follows a JSON schema, written as templates write JSON, or without spaces.

    Keywords that llguidance does not support are errors for a strict tool and ignored for others.
    """
    guidance = {
        "whitespace_flexible": False,
        "item_separator": ", ?",
        "key_separator": ": ?",
        "lenient": not strict,
    }
    return "%json " + json.dumps({**schema, "x-guidance": guidance}, ensure_ascii=False)


class Grammar:
    """Rules of one grammar. `tokens` maps the texts of markers that are tokens to their ids."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._rules: list[str] = []
        self._shared: dict[str, str] = {}

    def text(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"

    def is_token(self, marker: str) -> bool:
        """Whether a marker is one token."""
        return marker in self._tokens

    def marker(self, marker: str) -> str:
        """A marker: its token, or its text."""
        return f"<[{self._tokens[marker]}]>" if marker in self._tokens else literal(marker)

    def rule(self, body: str, options: str = "") -> str:
        """A rule with that body; returns its name."""
        key = options + body
        if key not in self._shared:
            self._shared[key] = f"rule_{len(self._shared)}"
            self._rules.append(f"{self._shared[key]}{options}: {body}")
        return self._shared[key]

    def free_text(self) -> str:
        """Any text without marker tokens."""
        return self.rule(_FREE_TEXT)

    def text_up_to(self, marker: str) -> str:
        """Any text up to and with the first marker."""
        if self.is_token(marker):
            return f"{self.free_text()} {self.marker(marker)}"
        return self.rule(f"/(.|\\n)*{escaped(marker)}/", "[lazy]")

    def value(self, schema: object, root: Mapping[str, Any], notation: Notation, quote: str = "") -> str:
        """A value that follows a schema, in the notation of Python or Gemma."""
        return _Values(self, root, notation, quote).of(schema, 0)


class _Values:
    """Rules for values in one notation."""

    def __init__(self, grammar: Grammar, root: Mapping[str, Any], notation: Notation, quote: str) -> None:
        self._grammar = grammar
        self._root = root
        self._python = notation is Notation.PYTHON
        self._quote = grammar.marker(quote) if quote else ""
        self._comma = literal(", ") if self._python else literal(",")

    def of(self, schema: object, depth: int) -> str:
        """The name of a rule for values of a schema."""
        return self._grammar.rule(self._body(schema, depth))

    def _body(self, schema: object, depth: int) -> str:
        schema = resolved(schema, self._root)
        if not isinstance(schema, Mapping) or depth > DEPTH_MAX:
            return self._anything()
        if "const" in schema:
            return self._constant(schema["const"])
        if isinstance(schema.get("enum"), Sequence):
            return " | ".join(self._constant(each) for each in schema["enum"])
        choices = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(choices, Sequence) and choices:
            return " | ".join(self.of(each, depth + 1) for each in choices)
        declared = schema.get("type")
        kinds = [declared] if isinstance(declared, str) else list(declared or ())
        if not kinds:
            return self._anything()
        return " | ".join(self._of_type(str(kind), schema, depth) for kind in kinds)

    def _of_type(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        match kind:
            case "string":
                return self._string()
            case "integer":
                return _INTEGER
            case "number":
                return _NUMBER
            case "boolean":
                return f"{self._constant(True)} | {self._constant(False)}"
            case "null":
                return self._constant(None)
            case "array":
                return self._list(self.of(schema.get("items", {}), depth + 1))
            case "object" if isinstance(schema.get("properties"), Mapping):
                return f'"{{" {self._pairs(schema, depth)} "}}"'
            case "object":
                return self._mapping(self._grammar.rule(self._anything()))
        return self._anything()

    def _string(self) -> str:
        if self._python:
            return _PYTHON_STRING
        if not self._quote.startswith("<["):
            return f"{self._quote} {self._grammar.text_up_to(json.loads(self._quote))}"
        return f"{self._quote} {self._grammar.free_text()} {self._quote}"

    def _list(self, item: str) -> str:
        return f'"[" ({item} ({self._comma} {item})*)? "]"'

    def _mapping(self, value: str) -> str:
        key = _PYTHON_STRING if self._python else "/[A-Za-z0-9_]+/"
        pair = f"{key} {literal(': ') if self._python else literal(':')} {value}"
        return f'"{{" ({pair} ({self._comma} {pair})*)? "}}"'

    def _pairs(self, schema: Mapping[str, Any], depth: int) -> str:
        pairs = [
            (f"{self._key(str(name))} {self.of(each, depth + 1)}", str(name))
            for name, each in schema["properties"].items()
        ]
        return in_order(self._grammar, pairs, required_names(schema), self._comma)

    def _key(self, name: str) -> str:
        return literal(f"{json.dumps(name)}: ") if self._python else literal(f"{name}:")

    def _constant(self, value: object) -> str:
        """One value as the family's template writes it."""
        if isinstance(value, str):
            if self._python:
                return f"{literal(json.dumps(value, ensure_ascii=False))} | {literal(repr(value))}"
            return (
                f"{self._quote} {literal(value)} {self._quote}" if value else f"{self._quote} {self._quote}"
            )
        return literal(repr(value) if self._python else json.dumps(value))

    def _anything(self) -> str:
        """Any scalar, and lists and mappings of scalars."""
        scalar = " | ".join(
            [self._string(), _NUMBER, *(self._constant(each) for each in (True, False, None))]
        )
        name = self._grammar.rule(scalar)
        return f"{name} | {self._list(name)} | {self._mapping(name)}"


def required_names(schema: Mapping[str, Any]) -> frozenset[str]:
    """The names that an object must have."""
    names = schema.get("required")
    return (
        frozenset(map(str, names))
        if isinstance(names, Sequence) and not isinstance(names, str)
        else frozenset()
    )


def in_order(grammar: Grammar, pairs: Sequence[tuple[str, str]], required: frozenset[str], comma: str) -> str:
    """Pairs in the order of the schema, those that are not required left out or not, with commas between.

    One rule for each place and whether something stands before it: linear in the number of pairs.
    """
    first, later = "", ""
    for body, name in reversed(pairs):
        if name in required:
            first, later = f"{body} {later}", f"{comma} {body} {later}"
        else:
            first = _either(f"{body} {later}", first)
            later = f"({comma} {body})? {later}"
        first, later = _named(grammar, first), _named(grammar, later)
    return first


def _either(one: str, other: str) -> str:
    return f"({one} | {other})" if other.strip() else f"({one})?"


def _named(grammar: Grammar, body: str) -> str:
    return grammar.rule(body.strip()) if body.strip() else ""
