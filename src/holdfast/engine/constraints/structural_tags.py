"""Structural tags to Lark: free text until a trigger, then a tag whose content a grammar constrains.

Two notations are read. The older one of vLLM and SGLang lists `structures` (begin, schema, end) and
`triggers`. The newer one has a `format`, a tree of typed nodes: const_string, json_schema, regex, any_text,
sequence, or, tag, triggered_tags, tags_with_separator. The older is translated to `triggered_tags`. Where
`begin`, `end` or a trigger contains the name of a control token, the grammar asks for the token. Errors name
their place by a JSON pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.engine.constraints import schema
from holdfast.engine.constraints.errors import Fault, GrammarError
from holdfast.engine.constraints.lark import ANY_TEXT, literal, pattern, split_at_tokens

__all__ = ["TAGS_MAX", "to_lark"]

TAGS_MAX = 512


def to_lark(value: Any, control_tokens: Mapping[str, int], whitespace: schema.Whitespace) -> str:
    """The grammar of a structural tag; raises `GrammarError`."""
    if not isinstance(value, dict):
        raise GrammarError(Fault.INVALID, "must be an object")
    writer = _Writer(control_tokens, whitespace)
    if "format" in value:
        body = writer.node(value["format"], "/format")
    elif "structures" in value:
        body = writer.structures(value)
    else:
        raise GrammarError(Fault.INVALID, "needs structures and triggers, or format")
    return writer.grammar(body)


@dataclass(frozen=True, slots=True)
class _Tag:
    """A tag: its begin and end text, and its content as Lark (None: free text)."""

    begin: str
    end: str
    content: str | None
    place: str

    @classmethod
    def of(cls, value: dict[str, Any], content: str | None, place: str) -> _Tag:
        end = _string(value, "end", place) if value.get("end") is not None else ""
        return cls(_string(value, "begin", place), end, content, place)


class _Writer:
    """Collects the rules of one grammar. The depth of the value, and so of recursion, was checked."""

    def __init__(self, control_tokens: Mapping[str, int], whitespace: schema.Whitespace) -> None:
        self._tokens = control_tokens
        self._whitespace = whitespace
        self._rules: list[str] = []
        self._nodes: dict[str, Callable[[dict[str, Any], str], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def grammar(self, body: str) -> str:
        return "\n".join([f"start: {body}", *self._rules, f"TEXT: {ANY_TEXT}"]) + "\n"

    def node(self, value: Any, place: str) -> str:
        """The Lark expression of a node."""
        if not isinstance(value, dict):
            raise GrammarError(Fault.INVALID, "must be an object", place)
        kind = value.get("type")
        if not isinstance(kind, str) or kind not in self._nodes:
            known = ", ".join(self._nodes)
            problem = f"type {kind!r} is not supported; supported are {known}"
            raise GrammarError(Fault.UNSUPPORTED, problem, f"{place}/type")
        return self._nodes[kind](value, place)

    def structures(self, value: dict[str, Any]) -> str:
        """The older notation: tags with schemas, and triggers. A tag without a schema holds any JSON."""
        tags: list[_Tag] = []
        for index, structure in enumerate(_list(value, "structures", "")):
            place = f"/structures/{index}"
            content = self._schema(_object(structure, place).get("schema", {}), f"{place}/schema")
            tags.append(_Tag.of(structure, content, place))
        return self._triggered(value, tags, "")

    def _const_string(self, value: dict[str, Any], place: str) -> str:
        return self._spelled(_string(value, "value", place))

    def _json_schema(self, value: dict[str, Any], place: str) -> str:
        return self._schema(value.get("json_schema", {}), f"{place}/json_schema")

    def _schema(self, value: Any, place: str) -> str:
        try:
            return "%json " + schema.normalised(value, self._whitespace)
        except GrammarError as error:
            raise error.below(place) from None

    def _regex(self, value: dict[str, Any], place: str) -> str:
        return self._rule(pattern(_string(value, "pattern", place)))

    def _any_text(self, _value: dict[str, Any], _place: str) -> str:
        return self._rule("TEXT")

    def _sequence(self, value: dict[str, Any], place: str) -> str:
        elements = _list(value, "elements", place)
        for index, element in enumerate(elements[:-1]):
            if isinstance(element, dict) and element.get("type") == "any_text":
                problem = "any_text must be the last element or the content of a tag: nothing else ends it"
                raise GrammarError(Fault.UNSUPPORTED, problem, f"{place}/elements/{index}")
        found = [self.node(element, f"{place}/elements/{index}") for index, element in enumerate(elements)]
        return self._rule(" ".join(found))

    def _or(self, value: dict[str, Any], place: str) -> str:
        elements = _list(value, "elements", place)
        found = [self.node(element, f"{place}/elements/{index}") for index, element in enumerate(elements)]
        return self._rule(" | ".join(self._rule(each) for each in found))

    def _tag(self, value: dict[str, Any], place: str) -> str:
        tag = self._read_tag(value, place)
        return self._rule(f"{self._spelled(tag.begin)} {self._rest(tag)}")

    def _read_tag(self, value: Any, place: str) -> _Tag:
        content = _object(value, place).get("content")
        free = isinstance(content, dict) and content.get("type") == "any_text"
        return _Tag.of(value, None if free else self.node(content, f"{place}/content"), place)

    def _rest(self, tag: _Tag) -> str:
        """The content and the end of a tag. Free text goes on until the end is written."""
        end = split_at_tokens(tag.end, self._tokens)
        if tag.content is not None or not end:
            return " ".join([tag.content or self._rule("TEXT"), *end])
        return self._text_until(end)

    def _triggered_tags(self, value: dict[str, Any], place: str) -> str:
        tags = _list(value, "tags", place)
        read = [self._read_tag(tag, f"{place}/tags/{index}") for index, tag in enumerate(tags)]
        return self._triggered(value, read, place)

    def _triggered(self, value: dict[str, Any], tags: list[_Tag], place: str) -> str:
        """Text up to a trigger, then the rest of one of its tags; again and again unless told otherwise."""
        listed = _list(value, "triggers", place)
        triggers = [_text(each, f"{place}/triggers/{index}") for index, each in enumerate(listed)]
        rests: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            trigger = max((each for each in triggers if tag.begin.startswith(each)), key=len, default=None)
            if trigger is None:
                problem = "begin starts with none of the triggers"
                raise GrammarError(Fault.INVALID, problem, f"{tag.place}/begin")
            spelled = self._spelled(tag.begin[len(trigger) :])
            rests[trigger].append(self._rule(f"{spelled} {self._rest(tag)}"))
        calls = [
            self._rule(f"{self._text_until(split_at_tokens(trigger, self._tokens))} ({' | '.join(found)})")
            for trigger, found in rests.items()
            if found
        ]
        any_call = self._rule(" | ".join(calls))
        at_least_one = value.get("at_least_one") is True
        if value.get("stop_after_first") is True:
            return any_call if at_least_one else self._rule(f"{any_call} | {self._rule('TEXT')}")
        return self._rule(f"{any_call}{'+' if at_least_one else '*'} {self._rule('TEXT')}")

    def _tags_with_separator(self, value: dict[str, Any], place: str) -> str:
        tags = _list(value, "tags", place)
        found = [self._tag(tag, f"{place}/tags/{index}") for index, tag in enumerate(tags)]
        any_tag = self._rule(" | ".join(found))
        separator = self._spelled(_string(value, "separator", place))
        body = any_tag if value.get("stop_after_first") is True else f"{any_tag} ({separator} {any_tag})*"
        return self._rule(body if value.get("at_least_one") is True else f"({body})?")

    def _text_until(self, symbols: list[str]) -> str:
        """Free text up to the first occurrence of a mark. A control token cannot occur in text."""
        first, *others = symbols
        if first.startswith("<"):
            return " ".join([self._rule("TEXT"), *symbols])
        return " ".join([self._rule(f"TEXT {first}", lazy=True), *others])

    def _spelled(self, text: str) -> str:
        return " ".join(split_at_tokens(text, self._tokens)) or literal("")

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        """The name of a new rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GrammarError(Fault.INVALID, "must be an object", place)
    return value


def _list(value: dict[str, Any], key: str, place: str) -> list[Any]:
    found = value.get(key)
    if not isinstance(found, list) or not found:
        raise GrammarError(Fault.INVALID, f"{key} must be a list of at least one", f"{place}/{key}")
    if len(found) > TAGS_MAX:
        problem = f"{key} has {len(found)} entries; the limit is {TAGS_MAX}"
        raise GrammarError(Fault.TOO_LARGE, problem, f"{place}/{key}")
    return found


def _string(value: dict[str, Any], key: str, place: str) -> str:
    return _text(value.get(key), f"{place}/{key}", empty=key in ("begin", "end", "separator", "value"))


def _text(value: Any, place: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise GrammarError(
            Fault.INVALID, "must be a string" if empty else "must be a non-empty string", place
        )
    return value
