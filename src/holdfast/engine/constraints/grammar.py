"""The grammar of a turn's text, as the request states it and the journal stores it.

`Grammar.of` checks and normalises a client's grammar, in the API process: sizes first, then JSON, keywords
and references, each error with its place. GBNF, choices and structural tags become Lark, so that the engine's
process parses no text in Python. Compilation (`compiler`) comes later and may find more errors.

A normalised grammar is two plain strings. Equal grammars have equal digests; annotations of a schema (titles,
descriptions) do not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Any

from holdfast.engine.constraints import gbnf, lark, schema, structural_tags
from holdfast.engine.constraints.errors import Fault, GrammarError

__all__ = [
    "CHOICES_MAX",
    "GBNF_BYTES_MAX",
    "SOURCE_BYTES_MAX",
    "TEXT_BYTES_MAX",
    "Grammar",
    "Kind",
    "Whitespace",
]

SOURCE_BYTES_MAX = 256 << 10
"""Limit of a JSON schema or structural tag, and of every normalised grammar."""
TEXT_BYTES_MAX = 64 << 10
"""Limit of a grammar or regular expression written as text."""
GBNF_BYTES_MAX = 16 << 10
"""GBNF is parsed in Python: this much takes about 50 ms."""
CHOICES_MAX = 4096

_NO_TOKENS: Mapping[str, int] = MappingProxyType({})


class Kind(Enum):
    """How a request writes its grammar."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    GBNF = "gbnf"
    """Rules of the form `name ::= …`, as llama.cpp, vLLM and SGLang (`ebnf`) write them; Lark is accepted
    too."""
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"

    @property
    def form(self) -> Form:
        """The language of a normalised grammar of this kind."""
        return _FORMS.get(self, Form.LARK)


class Form(Enum):
    """The languages that are compiled."""

    SCHEMA = "schema"
    REGEX = "regex"
    LARK = "lark"


_FORMS = {Kind.JSON_OBJECT: Form.SCHEMA, Kind.JSON_SCHEMA: Form.SCHEMA, Kind.REGEX: Form.REGEX}

Whitespace = schema.Whitespace


@dataclass(frozen=True)
class Grammar:
    """A checked grammar: its kind, and its source in the language of `kind.form`."""

    kind: Kind
    source: str

    @classmethod
    def of(
        cls,
        kind: Kind,
        value: Any = None,
        *,
        control_tokens: Mapping[str, int] = _NO_TOKENS,
        whitespace: Whitespace = Whitespace.SPACED,
    ) -> Grammar:
        """Check and normalise a client's grammar; raises `GrammarError`.

        `value` is a string, or for JSON kinds also the parsed value. `control_tokens` are the model's, by
        name (`vocabulary.control_tokens`); `whitespace` says how JSON is laid out.
        """
        source = _source_of(kind, value, control_tokens, whitespace)
        _require_bytes(source, SOURCE_BYTES_MAX)
        return cls(kind, source)

    @cached_property
    def digest(self) -> str:
        """The grammar's name in caches: equal for grammars that match the same texts in the same way."""
        found = hashlib.sha256(self.kind.form.value.encode())
        found.update(self.source.encode())
        return found.hexdigest()[:32]

    def to_values(self) -> dict[str, str]:
        """The grammar as plain values, for the journal and for messages between processes."""
        return {"kind": self.kind.value, "source": self.source}

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> Grammar:
        """A grammar that `to_values` wrote; raises `GrammarError` if it cannot be one."""
        kind, source = values.get("kind"), values.get("source")
        known = {each.value for each in Kind}
        if not isinstance(source, str) or not isinstance(kind, str) or kind not in known:
            raise GrammarError(Fault.INVALID, "not a recorded grammar: kind or source is missing or unknown")
        _require_bytes(source, SOURCE_BYTES_MAX)
        return cls(Kind(kind), source)


def _source_of(kind: Kind, value: Any, control_tokens: Mapping[str, int], whitespace: Whitespace) -> str:
    match kind:
        case Kind.JSON_OBJECT:
            return schema.normalised({"type": "object"}, whitespace)
        case Kind.JSON_SCHEMA:
            return schema.normalised(_parsed(value), whitespace)
        case Kind.REGEX:
            return _text(value)
        case Kind.GBNF if isinstance(value, str) and "::=" in value:
            return gbnf.to_lark(_text(value, GBNF_BYTES_MAX))
        case Kind.LARK | Kind.GBNF:
            return lark.with_token_ids(_text(value), control_tokens)
        case Kind.CHOICE:
            return _choice(_parsed(value))
        case Kind.STRUCTURAL_TAG:
            return structural_tags.to_lark(_parsed(value), control_tokens, whitespace)


def _text(value: object, bytes_max: int = TEXT_BYTES_MAX) -> str:
    """A grammar that is text."""
    if not isinstance(value, str):
        raise GrammarError(Fault.INVALID, "must be a string")
    _require_bytes(value, bytes_max)
    if "\0" in value:
        raise GrammarError(Fault.INVALID, "must not contain NUL characters")
    return value


def _parsed(value: Any) -> Any:
    """A JSON value, parsed if it came as text, within the limits of size and depth."""
    if isinstance(value, str):
        _require_bytes(value, SOURCE_BYTES_MAX)
        try:
            value = json.loads(value, parse_constant=_no_constant)
        except RecursionError:
            raise GrammarError(Fault.TOO_LARGE, f"nested deeper than {schema.DEPTH_MAX} levels") from None
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, column {error.colno}"
            raise GrammarError(Fault.INVALID, f"not JSON: {error.msg}", place) from None
    schema.require_bounded(value, bytes_max=SOURCE_BYTES_MAX)
    return value


def _no_constant(name: str) -> float:
    raise GrammarError(Fault.INVALID, f"not JSON: {name} is not a number of JSON")


def _require_bytes(text: str, most: int) -> None:
    size = len(text)
    if size <= most:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise GrammarError(Fault.INVALID, "contains an unpaired surrogate") from None
    if size > most:
        raise GrammarError(Fault.TOO_LARGE, f"has {size} bytes; the limit is {most}")


def _choice(value: Any) -> str:
    if not isinstance(value, list) or not value:
        raise GrammarError(Fault.INVALID, "must be a list of at least one string")
    if len(value) > CHOICES_MAX:
        raise GrammarError(Fault.TOO_LARGE, f"has {len(value)} choices; the limit is {CHOICES_MAX}")
    for index, choice in enumerate(value):
        if not isinstance(choice, str) or not choice:
            raise GrammarError(Fault.INVALID, "must be a non-empty string", f"/{index}")
    return lark.terminal_choice(list(dict.fromkeys(value)))
