"""Reads the region of a response template's field: text of the model to values, values to tool calls.

The parsers and their options are those of the template format: text, numbers, JSON with the liberties that
models take, shallow tags, lines of keys and values. A region that cannot be read raises ValueError: it is no
call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.engine.tools.machine import NAME_MAX, OfferedTools
from holdfast.engine.tools.patterns import Pattern
from holdfast.engine.tools.response_template import Field
from holdfast.engine.tools.xml_calls import typed

_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_BARE_KEY = re.compile(r"([{,]\s*)(\w+)(\s*:)")


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call of a region; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str


def calls_of(
    field: Field, body: str, groups: Mapping[str, str], offered: OfferedTools | None
) -> list[FoundCall]:
    """The calls of a region; ValueError if it has none."""
    value = _transformed(field, parse_content(body, field.content, field.arguments), groups)
    found = value if isinstance(value, list) else [value]
    calls = [_call(each, offered) for each in found]
    if not calls:
        raise ValueError("no call")
    return calls


def _call(value: object, offered: OfferedTools | None) -> FoundCall:
    call = value if isinstance(value, Mapping) else {}
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not 0 < len(name) <= NAME_MAX:
        raise ValueError("a call needs a name")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise ValueError("arguments must be an object")
    written = ", ".join(
        f"{json.dumps(key, ensure_ascii=False)}: {_argument(name, key, each, offered)}"
        for key, each in arguments.items()
    )
    call_id = call.get("id")
    return FoundCall(name, "{" + written + "}", call_id if isinstance(call_id, str) else "")


def _argument(name: str, key: str, value: object, offered: OfferedTools | None) -> str:
    """One argument as JSON; a text has the type of the tool's schema."""
    types = offered.types_of(name, key) if offered is not None else ()
    if isinstance(value, str) and types:
        return typed(value, types)
    return json.dumps(value, ensure_ascii=False)


def parse_content(text: str, parser: str, options: Mapping[str, Any]) -> object:
    """The value of a region's text."""
    stripped = text.strip() if options.get("strip", True) else text
    match parser:
        case "int":
            return int(stripped)
        case "float":
            return float(stripped)
        case "bool":
            return stripped.lower() in ("true", "1")
        case "json":
            return _lax_json(text, options)
        case "xml-inline":
            return _tags(text, options)
        case "kv-lines":
            return _lines(text, options)
    return stripped


def _lax_json(text: str, options: Mapping[str, Any]) -> object:
    """JSON, perhaps with bare keys or with other marks around strings."""
    parts = [text]
    for opens, closes in options.get("string_delims", ()):
        quoted = re.compile(re.escape(opens) + r"(.*?)" + re.escape(closes), re.DOTALL)
        parts = _split(parts, quoted)
    if options.get("unquoted_keys"):
        parts = [
            _BARE_KEY.sub(r'\1"\2"\3', part) if place % 2 == 0 else part for place, part in enumerate(parts)
        ]
    try:
        return json.loads("".join(parts))
    except RecursionError:
        raise ValueError("too deep") from None
    except ValueError:
        if options.get("allow_non_json"):
            return text.strip()
        raise


def _split(parts: list[str], quoted: re.Pattern[str]) -> list[str]:
    """Parts of JSON at even places, strings as JSON at odd ones."""
    made: list[str] = []
    for place, part in enumerate(parts):
        if place % 2:
            made.append(part)
            continue
        pieces = quoted.split(part)
        made += [
            json.dumps(each, ensure_ascii=False) if index % 2 else each for index, each in enumerate(pieces)
        ]
    return made


def _nested(text: str, options: Mapping[str, Any]) -> object:
    parser = options.get("value_parser")
    if not isinstance(parser, Mapping):
        return text
    return parse_content(text, str(parser.get("name", "text")), parser.get("args", {}))


def _tags(text: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Shallow tags; the pattern names a key and a value."""
    found: dict[str, Any] = {}
    for match in Pattern(str(options.get("tag_pattern", ""))).matches_in(text):
        if "key" not in match.groups:
            raise ValueError("tag_pattern needs the groups key and value")
        key, value = match.groups["key"], _nested(match.groups.get("value", ""), options)
        if key in found and options.get("merge_duplicates"):
            found[key] = [*found[key], value] if isinstance(found[key], list) else [found[key], value]
        else:
            found[key] = value
    return found


def _lines(text: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Lines of a key and a value."""
    sign = str(options.get("kv_sep", ":"))
    found: dict[str, Any] = {}
    for line in text.split(str(options.get("line_sep", "\n"))):
        key, separator, value = line.strip().partition(sign)
        if separator:
            found[key.strip()] = _nested(value.strip(), options)
    return found


def _transformed(field: Field, value: object, groups: Mapping[str, str]) -> object:
    if field.transform is None:
        return value
    if not field.transform_each:
        return _filled(field.transform, {**groups, "content": value})
    if not isinstance(value, Sequence) or not all(isinstance(each, Mapping) for each in value):
        raise ValueError("transform_each needs an array of objects")
    return [_filled(field.transform, {**groups, **each}) for each in value]


def _filled(transform: object, scope: Mapping[str, Any]) -> object:
    """A transform with its placeholders replaced by values."""
    if isinstance(transform, Mapping):
        return {key: _filled(each, scope) for key, each in transform.items()}
    if isinstance(transform, list):
        return [_filled(each, scope) for each in transform]
    placeholder = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if placeholder is None:
        return transform
    value: object = scope
    for key in placeholder[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"nothing to put in place of {transform}")
        value = value[key]
    return value
