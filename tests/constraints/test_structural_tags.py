"""Structural tags: free text until a trigger, then exactly a tag."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.engine.constraints.grammar import Kind
from holdfast.engine.constraints.guidance import GuidanceMatcher
from tests.constraints.conftest import Open
from tests.constraints.vocabularies import END
from tests.constraints.walks import allowed_by

ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TWO_TAGS = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=add>", "schema": ARGUMENTS, "end": "</function>"},
        {"begin": "<function=stop>", "schema": {"const": 1}, "end": "</function>"},
        {"begin": "[other] ", "schema": {"type": "boolean"}, "end": ""},
    ],
    "triggers": ["<function=", "["],
}


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def triggered(**options: bool) -> dict[str, Any]:
    tags = [tag("<f>", {"type": "json_schema", "json_schema": ARGUMENTS}, "</f>")]
    return {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": tags, **options}}


CALL = '<f>{"a": 1}</f>'
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        TWO_TAGS,
        [
            "",
            "no call, <functio and < and f=",
            'see <function=add>{"a": 1}</function> and <function=stop>1</function> done',
            "[other] true[other] false",
        ],
        [
            "<function=",
            "<function=sub>",
            '<function=add>{"a": "x"}',
            "<function=stop>1</functio",
            "a [x] b",
            "[other] ",
        ],
    ),
    (triggered(), ["", "text", CALL, f"a {CALL} b {CALL}"], ["<f", "<f>", "<f>{}</f>"]),
    (triggered(at_least_one=True), [CALL, f"a {CALL} b"], ["", "text", "a <f>"]),
    (triggered(stop_after_first=True), ["", "text", f"a {CALL}"], [f"{CALL} b", CALL + CALL]),
    (triggered(at_least_one=True, stop_after_first=True), [CALL, f"a {CALL}"], ["", f"{CALL} b"]),
    (
        {
            "format": {
                "type": "tags_with_separator",
                "separator": ";",
                "at_least_one": True,
                "tags": [tag("<", text("x"), ">")],
            }
        },
        ["<x>", "<x>;<x>"],
        ["", "<x>;", "<x><x>"],
    ),
    (
        {
            "format": {
                "type": "tags_with_separator",
                "separator": "",
                "stop_after_first": True,
                "tags": [tag("<", text("x"), ">")],
            }
        },
        ["", "<x>"],
        ["<x><x>"],
    ),
    (
        {
            "format": {
                "type": "sequence",
                "elements": [tag("<t>", {"type": "any_text"}, "</t>"), {"type": "regex", "pattern": "a/b|c"}],
            }
        },
        ["<t></t>a/b", "<t>x < y</t>c"],
        ["<t>x", "<t>x</t>", "<t></t>d", "a/b"],
    ),
    (
        {"format": {"type": "or", "elements": [text("yes"), tag("no: ", {"type": "any_text"}, "")]}},
        ["yes", "no: for\nreasons", "no: "],
        ["no", "yes."],
    ),
]


@pytest.mark.parametrize(("value", "good", "bad"), CASES)
def test_accepts_and_refuses(
    open_matcher: Open, value: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for each in [*good, *bad]:
        matcher = open_matcher(Kind.STRUCTURAL_TAG, value)
        tokens = matcher.vocabulary.tokenizer.tokenize_str(each)
        assert matcher.accept([*tokens, END]) == (each in good), each


def with_tokens(matcher: GuidanceMatcher, parts: list[str]) -> list[int]:
    """Tokens of texts, where the exact name of a control token stands for it."""
    found: list[int] = []
    for part in parts:
        control = matcher.vocabulary.control_tokens.get(part)
        found += [control] if control is not None else matcher.vocabulary.tokenizer.tokenize_str(part)
    return found


def test_marks_that_are_control_tokens_are_asked_for_as_tokens(open_matcher: Open) -> None:
    structures = [{"begin": "<|call|>add ", "schema": ARGUMENTS, "end": "<tool>"}]
    value = {"structures": structures, "triggers": ["<|call|>"]}
    matcher = open_matcher(Kind.STRUCTURAL_TAG, value)
    whole = ["some text ", "<|call|>", 'add {"a": 1}', "<tool>", " more"]
    assert matcher.accept(with_tokens(matcher, whole)), matcher.why
    matcher = open_matcher(Kind.STRUCTURAL_TAG, value)
    assert matcher.vocabulary.control_tokens["<|call|>"] in allowed_by(matcher)
    assert matcher.accept(with_tokens(matcher, ["text", "<|call|>"]))
    assert not matcher.accepting
    assert matcher.vocabulary.tokenizer.decode_bytes(matcher.forced()).startswith(b"add")
    assert matcher.accept(with_tokens(matcher, ['add {"a": 1}']))
    assert allowed_by(matcher) == [matcher.vocabulary.control_tokens["<tool>"]]


def test_after_a_trigger_the_rest_of_a_tag_is_forced(open_matcher: Open) -> None:
    value = {"structures": [{"begin": "<f=add>", "schema": ARGUMENTS, "end": "</f>"}], "triggers": ["<f="]}
    matcher = open_matcher(Kind.STRUCTURAL_TAG, value)
    assert matcher.accept(matcher.vocabulary.tokenizer.tokenize_str("Sure: <f="))
    assert matcher.vocabulary.tokenizer.decode_bytes(matcher.forced()).startswith(b'add>{"a"')
