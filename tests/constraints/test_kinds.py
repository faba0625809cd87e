"""Every kind of grammar accepts what it must and refuses what it must not."""

from __future__ import annotations

import pytest

from holdfast.engine.constraints.errors import Fault, GrammarError
from holdfast.engine.constraints.grammar import (
    CHOICES_MAX,
    SOURCE_BYTES_MAX,
    TEXT_BYTES_MAX,
    Grammar,
    Kind,
    Whitespace,
)
from holdfast.engine.text.tokenizer import Tokenizer
from tests.constraints.conftest import Open
from tests.constraints.vocabularies import END

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
CASES: list[tuple[Kind, object, list[str], list[str]]] = [
    (Kind.JSON_OBJECT, None, ["{}", '{"a": [1, null]}'], ["[]", "1", '{"a"}', "{} ", ""]),
    (
        Kind.JSON_SCHEMA,
        PERSON,
        ['{"name": "Bo"}', '{"name": "", "age": 3}'],
        ["{}", '{"age": 3}', '{"name": "x", "age": -1}', '{"name": "x", "z": 1}', '{"name":"x"}'],
    ),
    (Kind.JSON_SCHEMA, '{"enum": ["a", "b", 3]}', ['"a"', "3"], ['"c"', "a"]),
    (Kind.JSON_SCHEMA, {"type": "integer", "format": "int32"}, ["7"], ["x"]),
    (Kind.JSON_SCHEMA, {"type": "string", "format": "our-own"}, ['"anything"'], ["1"]),
    (
        Kind.JSON_SCHEMA,
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
        ["[1, 1]"],
        ["1"],
    ),
    (Kind.JSON_SCHEMA, True, ["1", "[]"], [""]),
    (Kind.REGEX, r"[a-c]+\d?", ["abc", "a1"], ["1", "a12", "d", ""]),
    (Kind.REGEX, "^a/b$", ["a/b"], ["a", "xa/b"]),
    (Kind.LARK, 'start: "a" item*\nitem: "," /[0-9]+/', ["a", "a,1,22"], ["a,", "b"]),
    (Kind.LARK, 'start: %json {"type": "integer"} "."', ["12."], ["12", "x."]),
    (Kind.GBNF, 'root ::= "a" ("b" | [c-e])* # end', ["a", "abcde"], ["b", "af"]),
    (Kind.GBNF, 'start: "lark" "too"', ["larktoo"], ["lark"]),
    (
        Kind.CHOICE,
        ["yes", "no", "no way", 'né\n"\\/'],
        ["yes", "no", "no way", 'né\n"\\/'],
        ["n", "yesno", ""],
    ),
    (Kind.CHOICE, '["<|end|>"]', ["<|end|>"], ["x"]),
]


def matches(open_matcher: Open, tokenizer: Tokenizer, kind: Kind, value: object, text: str) -> bool:
    matcher = open_matcher(kind, value)
    spelled = matcher.vocabulary.tokenizer.tokenize_str(text)
    return matcher.accept([*spelled, END])


@pytest.mark.parametrize(("kind", "value", "good", "bad"), CASES)
def test_accepts_and_refuses(
    open_matcher: Open, tokenizer: Tokenizer, kind: Kind, value: object, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert matches(open_matcher, tokenizer, kind, value, text), text
    for text in bad:
        assert not matches(open_matcher, tokenizer, kind, value, text), text


@pytest.mark.parametrize(
    ("whitespace", "good", "bad"),
    [
        (Whitespace.SPACED, '{"name": "x", "age": 1}', '{"name":"x","age":1}'),
        (Whitespace.COMPACT, '{"name":"x","age":1}', '{"name": "x", "age": 1}'),
        (Whitespace.FLEXIBLE, '{ "name"  :\n"x" , "age": 1}', '{"name":' + " " * 17 + '"x"}'),
    ],
)
def test_whitespace(open_matcher: Open, whitespace: Whitespace, good: str, bad: str) -> None:
    for text, expected in ((good, True), (bad, False)):
        matcher = open_matcher(Kind.JSON_SCHEMA, PERSON, whitespace=whitespace)
        assert matcher.accept(matcher.vocabulary.tokenizer.tokenize_str(text)) is expected


def test_lark_may_name_control_tokens(open_matcher: Open) -> None:
    source = 'start: "<|call|>" <|call|> /<tool>/ // <|call|>\n'
    matcher = open_matcher(Kind.LARK, source)
    text = matcher.vocabulary.tokenizer.tokenize_str
    call = matcher.vocabulary.control_tokens["<|call|>"]
    assert matcher.validate([*text("<|call|>"), call, *text("<tool>")]) == len(text("<|call|><tool>")) + 1
    assert matcher.accept([*text("<|call|>"), call, *text("<tool>"), END])


def test_digests_ignore_annotations_and_layout_of_the_source() -> None:
    first = Grammar.of(Kind.JSON_SCHEMA, '{"type":  "string", "title": "A"}')
    second = Grammar.of(Kind.JSON_SCHEMA, {"description": "B", "type": "string"})
    assert first == second
    assert first.digest == second.digest
    others = [
        Grammar.of(Kind.JSON_SCHEMA, {"type": "string"}, whitespace=Whitespace.COMPACT),
        Grammar.of(Kind.JSON_SCHEMA, {"type": "integer"}),
        Grammar.of(Kind.REGEX, first.source[:1] + "x"),
        Grammar.of(Kind.CHOICE, ["string"]),
    ]
    assert len({first.digest, *(each.digest for each in others)}) == 5


def test_a_property_named_like_an_annotation_is_kept(open_matcher: Open) -> None:
    schema = {"type": "object", "properties": {"title": {"const": 1}}, "required": ["title"]}
    assert open_matcher(Kind.JSON_SCHEMA, schema).accept(
        open_matcher(Kind.JSON_SCHEMA, schema).vocabulary.tokenizer.tokenize_str('{"title": 1}')
    )


@pytest.mark.parametrize(("kind", "value"), [(case[0], case[1]) for case in CASES])
def test_records_come_back(kind: Kind, value: object) -> None:
    grammar = Grammar.of(kind, value)
    values = grammar.to_values()
    assert all(isinstance(each, str) for each in values.values())
    assert Grammar.from_values(values) == grammar
    assert Grammar.from_values(values).digest == grammar.digest


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"kind": "json_schema"},
        {"kind": "poem", "source": ""},
        {"kind": "regex", "source": 1},
        {"kind": ["x"], "source": ""},
    ],
)
def test_records_that_are_none_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(GrammarError) as caught:
        Grammar.from_values(values)
    assert caught.value.fault is Fault.INVALID


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Kind.REGEX, "a" * (TEXT_BYTES_MAX + 1)),
        (Kind.REGEX, "é" * (TEXT_BYTES_MAX // 2 + 1)),
        (Kind.LARK, "start: " + "x" * TEXT_BYTES_MAX),
        (Kind.GBNF, "root ::= " + '"x" ' * TEXT_BYTES_MAX),
        (Kind.JSON_SCHEMA, '"' + "a" * SOURCE_BYTES_MAX + '"'),
        (Kind.JSON_SCHEMA, {"const": "a" * (SOURCE_BYTES_MAX + 1)}),
        (Kind.JSON_SCHEMA, {"enum": list(range(30_000))}),
        (Kind.JSON_SCHEMA, "[" * 100_000),
        (Kind.CHOICE, ["x"] * (CHOICES_MAX + 1)),
    ],
)
def test_too_large(kind: Kind, value: object) -> None:
    with pytest.raises(GrammarError) as caught:
        Grammar.of(kind, value)
    assert caught.value.fault is Fault.TOO_LARGE


def test_too_deep() -> None:
    schema: dict[str, object] = {}
    for _ in range(100):
        schema = {"items": schema}
    with pytest.raises(GrammarError, match="deeper than") as caught:
        Grammar.of(Kind.JSON_SCHEMA, schema)
    assert caught.value.fault is Fault.TOO_LARGE


def test_a_recorded_grammar_is_bounded_too() -> None:
    with pytest.raises(GrammarError) as caught:
        Grammar.from_values({"kind": "regex", "source": "a" * (SOURCE_BYTES_MAX + 1)})
    assert caught.value.fault is Fault.TOO_LARGE
