"""Hostile grammars end within limits, by refusal or by a compiled form, while the calling thread goes on.

No test here measures time; `pytest-timeout` ends what hangs. That the caller goes on is counted: it keeps
polling while the compilation runs, which it could not if the interpreter lock were held.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from holdfast.engine.constraints.compiler import Compilation, Compiler, State
from holdfast.engine.constraints.errors import Fault, GrammarError
from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.constraints.guidance import GuidanceBuilder
from tests.constraints.walks import allowed_by


def nested(width: int, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {f"p{index}": schema for index in range(width)}}
    return schema


BEFORE: list[tuple[Kind, Any]] = [
    (Kind.JSON_SCHEMA, json.dumps({"enum": ["x" * 100] * 100_000})),
    (Kind.JSON_SCHEMA, {"enum": [f"value {index}" for index in range(100_000)]}),
    (Kind.JSON_SCHEMA, '{"items":' * 50_000 + "{}" + "}" * 50_000),
    (Kind.JSON_SCHEMA, nested(3, 9)),
    (Kind.REGEX, "(" * 70_000),
    (Kind.GBNF, "root ::= " + "(" * 16_000),
    (Kind.CHOICE, ["a" * 300_000]),
    (
        Kind.STRUCTURAL_TAG,
        {"structures": [{"begin": "<", "schema": {}, "end": ""}] * 1000, "triggers": ["<"]},
    ),
]


@pytest.mark.parametrize(("kind", "value"), BEFORE)
def test_refused_before_anything_is_compiled(kind: Kind, value: Any) -> None:
    with pytest.raises(GrammarError) as caught:
        Grammar.of(kind, value)
    assert caught.value.fault is Fault.TOO_LARGE


COMPILED: list[tuple[Kind, Any]] = [
    (Kind.REGEX, "(a*)*b"),
    (Kind.REGEX, "(x+x+)+y"),
    (Kind.REGEX, "[ab]*a[ab]{200}c"),
    (Kind.REGEX, "(?:(?:a{1,1000}){1,1000}){1,1000}"),
    (Kind.REGEX, "(a?){5000}a{5000}"),
    (Kind.REGEX, "((a{0,9}b){0,9}c){0,9}" * 200),
    (Kind.REGEX, r"(\p{L}|\d|[^x]){1,500}" * 50),
    (Kind.JSON_SCHEMA, {"type": "string", "pattern": "(.*a.{200}){30}"}),
    (Kind.JSON_SCHEMA, {"type": "string", "maxLength": 10**9}),
    (Kind.JSON_SCHEMA, {"type": "array", "items": nested(2, 3), "minItems": 10**6}),
    (Kind.JSON_SCHEMA, {"enum": [f"value number {index}" for index in range(9000)]}),
    (Kind.JSON_SCHEMA, nested(2, 10)),
    (
        Kind.JSON_SCHEMA,
        {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(1500)}},
    ),
    (Kind.JSON_SCHEMA, {"anyOf": [nested(3, 2) for _ in range(150)]}),
    (
        Kind.JSON_SCHEMA,
        {"allOf": [{"anyOf": [{"properties": {f"{a}{i}": {"const": 1}}} for a in "ab"]} for i in range(20)]},
    ),
    (
        Kind.JSON_SCHEMA,
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ),
    (Kind.JSON_SCHEMA, {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}}]}),
    (Kind.JSON_SCHEMA, {"type": "number", "minimum": 1e-300, "maximum": 1e300, "multipleOf": 1e-9}),
    (
        Kind.LARK,
        "start: a\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(500)) + 'a500: "x"\na: a0',
    ),
    (Kind.LARK, "start: start start | start"),
    (Kind.LARK, 'start: "a"~1..100000000'),
    (Kind.GBNF, 'root ::= "(" root ")" root | root root | ""'),
    (Kind.CHOICE, [f"{index} " * 10 for index in range(4000)]),
]


def compiled_while_polling(builder: GuidanceBuilder, grammar: Grammar) -> tuple[Compilation, int]:
    """A compilation that has ended, and how often its caller polled while it ran."""
    done = threading.Event()
    compiler = Compiler(builder, wake=done.set)
    work = compiler.request(grammar)
    polls = 0
    while work.state is State.WAITING:
        done.wait(0.0005)
        polls += not done.is_set()
        compiler.poll()
    compiler.close()
    return work, polls


def test_the_caller_goes_on_meanwhile(builder: GuidanceBuilder) -> None:
    """If compilation held the interpreter lock, the caller would come back when it is done."""
    properties = {f"p{index}": {"type": "integer"} for index in range(2000)}
    grammar = Grammar.of(Kind.JSON_SCHEMA, {"type": "object", "properties": properties})
    _, polls = compiled_while_polling(builder, grammar)
    assert polls >= 5


@pytest.mark.parametrize(("kind", "value"), COMPILED)
def test_ends_within_limits(builder: GuidanceBuilder, kind: Kind, value: Any) -> None:
    work, _ = compiled_while_polling(builder, Grammar.of(kind, value))
    if work.error is not None:
        assert work.error.fault in (Fault.TOO_LARGE, Fault.TOO_SLOW, Fault.INVALID, Fault.UNSUPPORTED)
        return
    matcher = work.result().matcher()
    for _ in range(30):
        allowed = [token for token in allowed_by(matcher) if token not in builder.vocabulary.end_tokens]
        if not allowed:
            break
        assert matcher.accept(allowed[-1:]) or "too complex" in matcher.why
    assert matcher.failed == bool(matcher.why)


def test_a_grammar_whose_first_token_exceeds_a_limit_is_refused(builder: GuidanceBuilder) -> None:
    properties = {f"p{index}": {"type": "integer"} for index in range(1500)}
    with pytest.raises(GrammarError, match="too complex") as caught:
        builder.compile(Grammar.of(Kind.JSON_SCHEMA, {"type": "object", "properties": properties}))
    assert caught.value.fault is Fault.TOO_LARGE
