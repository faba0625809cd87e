"""Errors name the place: a JSON pointer in schemas and tags, line and column in text."""

from __future__ import annotations

import pytest

from holdfast.engine.constraints.errors import Fault, GrammarError
from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.constraints.guidance import GuidanceBuilder

# What only the compiler can see, and what is seen before.
SCHEMAS: list[tuple[object, str, Fault]] = [
    ({"properties": {"a": {"not": {}}}}, "/properties/a/not", Fault.UNSUPPORTED),
    ({"anyOf": [{}, {"uniqueItems": True}]}, "/anyOf/1/uniqueItems", Fault.UNSUPPORTED),
    ({"properties": {"a/b~c": {"if": {}}}}, "/properties/a~1b~0c/if", Fault.UNSUPPORTED),
    ({"x-guidance": {"lenient": True}}, "/x-guidance", Fault.UNSUPPORTED),
    ({"$defs": {"t": {"$ref": "#/$defs/none"}}}, "/$defs/t/$ref", Fault.INVALID),
    ({"items": {"$ref": "https://example.org/a"}}, "/items/$ref", Fault.UNSUPPORTED),
    ({"$ref": "#name"}, "/$ref", Fault.UNSUPPORTED),
    ({"properties": {"a": 1}}, "/properties/a", Fault.INVALID),
    ({"properties": []}, "/properties", Fault.INVALID),
    ({"allOf": {}}, "/allOf", Fault.INVALID),
    ({"properties": {"a": {"type": "strin"}}}, "/properties/a/type", Fault.INVALID),
    ({"items": {"properties": {"b": {"pattern": "(("}}}}, "/items/properties/b/pattern", Fault.INVALID),
    ({"properties": {"b": {"pattern": "(?=a)b"}}}, "/properties/b/pattern", Fault.UNSUPPORTED),
    (
        {"$defs": {"x": {"format": "regex", "type": "string"}}, "$ref": "#/$defs/x"},
        "/$defs/x/format",
        Fault.UNSUPPORTED,
    ),
    ({"properties": {"a": {"minimum": "5", "type": "integer"}}}, "/properties/a/minimum", Fault.INVALID),
    ({"anyOf": [{"type": "integer", "minimum": 5, "maximum": 3}]}, "/anyOf/0/minimum", Fault.INVALID),
    (
        {"properties": {"a": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}}},
        "/properties/a/oneOf",
        Fault.UNSUPPORTED,
    ),
]


@pytest.mark.parametrize(("schema", "place", "fault"), SCHEMAS)
def test_schemas(builder: GuidanceBuilder, schema: object, place: str, fault: Fault) -> None:
    with pytest.raises(GrammarError) as caught:
        builder.compile(Grammar.of(Kind.JSON_SCHEMA, schema))
    assert (caught.value.place, caught.value.fault) == (place, fault)
    assert caught.value.of_field("response_format").startswith(f"response_format: at {place}: ")
    assert "\n" not in caught.value.problem


TEXTS: list[tuple[Kind, object, str, Fault]] = [
    (Kind.LARK, 'start: "a"\n  other', "line 2, column 8", Fault.INVALID),
    (Kind.LARK, 'start: "a" bar\nbar: /((/', "line 2, column 6", Fault.INVALID),
    (Kind.LARK, "start: <|unknown|>", "line 1, column 8", Fault.INVALID),
    (Kind.LARK, "rule: /a/", "", Fault.INVALID),
    (Kind.REGEX, "((", "line 1, column 2", Fault.INVALID),
    (Kind.REGEX, r"a(?=b)", "line 1, column 2", Fault.UNSUPPORTED),
    (Kind.REGEX, 12, "", Fault.INVALID),
    (Kind.REGEX, "a\0b", "", Fault.INVALID),
    (Kind.JSON_SCHEMA, '{"a":\n  tru}', "line 2, column 3", Fault.INVALID),
    (Kind.JSON_SCHEMA, '{"const": NaN}', "", Fault.INVALID),
    (Kind.JSON_SCHEMA, {"const": float("inf")}, "", Fault.INVALID),
    (Kind.JSON_SCHEMA, {"const": {1: 2}}, "", Fault.INVALID),
    (Kind.JSON_SCHEMA, {"const": object()}, "", Fault.INVALID),
    (Kind.JSON_SCHEMA, [], "", Fault.INVALID),
    (Kind.JSON_SCHEMA, False, "", Fault.INVALID),
    (Kind.JSON_SCHEMA, '{"const": "\\ud800"}', "", Fault.INVALID),
    (Kind.CHOICE, [], "", Fault.INVALID),
    (Kind.CHOICE, "a", "line 1, column 1", Fault.INVALID),
    (Kind.CHOICE, ["a", 3], "/1", Fault.INVALID),
    (Kind.CHOICE, ["a", ""], "/1", Fault.INVALID),
    (Kind.GBNF, 'root ::= "a" other', "line 1, column 14", Fault.INVALID),
    (Kind.GBNF, 'rot ::= "a"', "", Fault.INVALID),
    (Kind.GBNF, 'root ::= "a\n', "line 1, column 10", Fault.INVALID),
    (Kind.GBNF, 'root ::= "a"\nroot ::= "b"', "line 2, column 1", Fault.INVALID),
    (Kind.GBNF, 'root ::= ("a"', "line 1, column 14", Fault.INVALID),
    (Kind.GBNF, "root ::= * x\nx ::= x", "line 1, column 10", Fault.INVALID),
    (Kind.GBNF, "root ::= [z-a]", "line 1, column 10", Fault.INVALID),
    (Kind.GBNF, "root ::= []", "line 1, column 10", Fault.INVALID),
    (Kind.GBNF, r'root ::= "\q"', "line 1, column 10", Fault.INVALID),
    (Kind.GBNF, r'root ::= "\uD800"', "line 1, column 10", Fault.INVALID),
    (Kind.GBNF, "root ::= [a]{5,2}", "line 1, column 13", Fault.INVALID),
    (Kind.GBNF, "root ::= [a]{999999}", "line 1, column 13", Fault.TOO_LARGE),
    (Kind.GBNF, "root ::= " + "(" * 70 + '"a"' + ")" * 70, "line 1, column 74", Fault.TOO_LARGE),
    (Kind.GBNF, "root ::= x\nx ::= x", "", Fault.INVALID),
    (
        Kind.LARK,
        'start: a | b\na: %json {"type": "integer"}\nb: %json {"properties": {"x": {"pattern": "("}}}',
        "schema 2 of the grammar/properties/x/pattern",
        Fault.INVALID,
    ),
    (
        Kind.STRUCTURAL_TAG,
        {
            "structures": [
                {"begin": "<a>", "schema": {"type": "object"}, "end": ""},
                {"begin": "<b>", "schema": {"items": {"type": "string", "pattern": "[z-a]"}}, "end": ""},
            ],
            "triggers": ["<"],
        },
        "schema 2 of the grammar/items/pattern",
        Fault.INVALID,
    ),
    (Kind.STRUCTURAL_TAG, [], "", Fault.INVALID),
    (Kind.STRUCTURAL_TAG, {}, "", Fault.INVALID),
    (Kind.STRUCTURAL_TAG, {"structures": []}, "/structures", Fault.INVALID),
    (Kind.STRUCTURAL_TAG, {"structures": [1], "triggers": ["<"]}, "/structures/0", Fault.INVALID),
    (
        Kind.STRUCTURAL_TAG,
        {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]},
        "/structures/0/begin",
        Fault.INVALID,
    ),
    (
        Kind.STRUCTURAL_TAG,
        {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": [""]},
        "/triggers/0",
        Fault.INVALID,
    ),
    (
        Kind.STRUCTURAL_TAG,
        {"structures": [{"begin": "<a>", "schema": {"items": {"not": {}}}, "end": ""}], "triggers": ["<a"]},
        "/structures/0/schema/items/not",
        Fault.UNSUPPORTED,
    ),
    (Kind.STRUCTURAL_TAG, {"format": {"type": "grammar"}}, "/format/type", Fault.UNSUPPORTED),
    (Kind.STRUCTURAL_TAG, {"format": 3}, "/format", Fault.INVALID),
    (Kind.STRUCTURAL_TAG, {"format": {"type": "regex"}}, "/format/pattern", Fault.INVALID),
    (
        Kind.STRUCTURAL_TAG,
        {
            "format": {
                "type": "sequence",
                "elements": [{"type": "any_text"}, {"type": "const_string", "value": "a"}],
            }
        },
        "/format/elements/0",
        Fault.UNSUPPORTED,
    ),
    (
        Kind.STRUCTURAL_TAG,
        {"format": {"type": "or", "elements": [{"type": "json_schema", "json_schema": {"then": {}}}]}},
        "/format/elements/0/json_schema/then",
        Fault.UNSUPPORTED,
    ),
]


@pytest.mark.parametrize(("kind", "value", "place", "fault"), TEXTS)
def test_texts(builder: GuidanceBuilder, kind: Kind, value: object, place: str, fault: Fault) -> None:
    with pytest.raises(GrammarError) as caught:
        builder.compile(Grammar.of(kind, value))
    assert (caught.value.place, caught.value.fault) == (place, fault), str(caught.value)
    assert len(caught.value.problem) < 200
