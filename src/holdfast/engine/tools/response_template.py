"""A checkpoint's own description of its answers: `response_template` of its tokenizer_config.json.

The format is that of transformers: fields of the message (content, thinking, tool_calls), each a region of
the answer that a literal or a pattern opens and closes, a parser for the region's text, and a transform that
puts the value and the pattern's named groups into the message's shape. The field without an opening takes all
other text. This file reads and checks a template; `template_values` reads regions, `template_calls` is the
machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from holdfast.engine.tools.patterns import Pattern, PatternRefused

_TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
    *("repeats", "join", "optional", "transform", "transform_each"),
}
_CONTENTS = {"text", "int", "float", "bool", "json", "xml-inline", "kv-lines"}
_REASONING_NAMES = {"thinking", "reasoning", "reasoning_content"}


class TemplateRefused(ValueError):
    """A response template cannot be used; the message names the place in it."""


class Part(Enum):
    """The role of a field in an answer."""

    TEXT = "text"
    REASONING = "reasoning"
    CALLS = "calls"


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its borders, and how its text is read."""

    name: str
    opens: Pattern | None
    closes: Pattern | None
    content: str
    arguments: Mapping[str, Any]
    transform: object
    transform_each: bool
    closing: str = ""
    """The text that closes it, where that is not a pattern."""

    @property
    def part(self) -> Part:
        """What the field is in an answer."""
        if self.name == "tool_calls":
            return Part.CALLS
        return Part.REASONING if self.name in _REASONING_NAMES else Part.TEXT


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """A checked template. `implicit` is the field of text that belongs to no other."""

    fields: tuple[Field, ...]
    anchor: Pattern

    @property
    def implicit(self) -> Field | None:
        """The field that has no opening."""
        return next((field for field in self.fields if field.opens is None), None)

    @property
    def has_parts(self) -> bool:
        """Whether answers have more than text."""
        return any(field.part is not Part.TEXT for field in self.fields)

    @property
    def reasoning_end(self) -> str:
        """The text that ends the reasoning; empty where there is none, or a pattern ends it."""
        return next((field.closing for field in self.fields if field.part is Part.REASONING), "")

    def end_of_calls(self, text: str) -> int | None:
        """The place after the first end of a region of calls."""
        closes = next((field.closes for field in self.fields if field.part is Part.CALLS), None)
        found = None if closes is None else next(closes.matches_in(text), None)
        return None if found is None else found.end

    def begun_in(self, prompt: str) -> str:
        """The part of the answer that the prompt already has: the text after its last anchor."""
        last = None
        for found in self.anchor.matches_in(prompt):
            last = found
        return "" if last is None else prompt[last.end :]


def read_response_template(written: object) -> ResponseTemplate:
    """Check a template; raises `TemplateRefused`."""
    where = "response_template"
    if not isinstance(written, Mapping):
        raise TemplateRefused(f"{where} must be an object")
    if unknown := set(written) - _TEMPLATE_KEYS:
        raise TemplateRefused(f"{where} has unknown keys: {', '.join(sorted(map(str, unknown)))}")
    if written.get("version", 1) != 1:
        raise TemplateRefused(f"{where}.version must be 1")
    fields = written.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise TemplateRefused(f"{where}.fields must be an object with a field")
    read = tuple(_read_field(str(name), field, f"{where}.fields.{name}") for name, field in fields.items())
    if sum(field.opens is None for field in read) > 1:
        raise TemplateRefused(f"{where}.fields: at most one field may lack 'open' and 'open_pattern'")
    if any(field.opens is None and field.part is Part.CALLS for field in read):
        raise TemplateRefused(f"{where}.fields.tool_calls needs 'open' or 'open_pattern'")
    anchor = _border(written, "start_anchor", "start_anchor_pattern", where)
    if anchor is None:
        raise TemplateRefused(f"{where} needs 'start_anchor' or 'start_anchor_pattern'")
    return ResponseTemplate(read, anchor)


def _read_field(name: str, field: object, where: str) -> Field:
    if not isinstance(field, Mapping):
        raise TemplateRefused(f"{where} must be an object")
    if unknown := set(field) - _FIELD_KEYS:
        raise TemplateRefused(f"{where} has unknown keys: {', '.join(sorted(map(str, unknown)))}")
    content = field.get("content", "text")
    if content not in _CONTENTS:
        raise TemplateRefused(f"{where}.content must be one of: {', '.join(sorted(_CONTENTS))}")
    arguments = field.get("content_args", {})
    if not isinstance(arguments, Mapping):
        raise TemplateRefused(f"{where}.content_args must be an object")
    transform_each = field.get("transform_each", False)
    if not isinstance(transform_each, bool):
        raise TemplateRefused(f"{where}.transform_each must be true or false")
    return Field(
        name,
        _border(field, "open", "open_pattern", where),
        _border(field, "close", "close_pattern", where),
        content,
        arguments,
        field.get("transform"),
        transform_each,
        _closing_text(field),
    )


def _closing_text(field: Mapping[str, Any]) -> str:
    texts = field.get("close", "")
    return texts if isinstance(texts, str) else str(texts[0])


def _border(written: Mapping[str, Any], literal: str, pattern: str, where: str) -> Pattern | None:
    """One border of a region: a text, one of several texts, or a pattern."""
    if literal in written and pattern in written:
        raise TemplateRefused(f"{where} has both {literal!r} and {pattern!r}")
    try:
        if literal in written:
            texts = [written[literal]] if isinstance(written[literal], str) else written[literal]
            if (
                not isinstance(texts, Sequence)
                or not texts
                or not all(isinstance(each, str) for each in texts)
            ):
                raise TemplateRefused(f"{where}.{literal} must be a string or an array of strings")
            border = Pattern.of_literals(*texts)
        elif pattern in written:
            border = Pattern(str(written[pattern]))
        else:
            return None
    except PatternRefused as error:
        raise TemplateRefused(f"{where}.{pattern}: {error}") from None
    if border.matches_nothing:
        raise TemplateRefused(f"{where}: a border must not match the empty text")
    return border
