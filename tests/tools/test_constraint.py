"""Grammars of calls: llguidance accepts what the formats write, and nothing else."""
# ruff: noqa: E501 (each answer on one line)

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.tools.constraint import Reasons, tool_grammar
from holdfast.engine.tools.events import Outcome, Transcript
from holdfast.engine.tools.formats import CALL_FORMATS, REASONING_FORMATS
from holdfast.engine.tools.parser import AnswerParser
from holdfast.engine.tools.request import Mode, Tool, Tools
from tests.tools.matching import Checker
from tests.tools.tokens import byte_tokenizer

WEATHER = Tool(
    "weather",
    "The weather of a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "where": {"$ref": "#/$defs/place"},
        },
        "required": ["city"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "near": {"type": "boolean"},
                },
                "required": ["tags"],
                "additionalProperties": False,
            }
        },
    },
    strict=True,
)
TIME = Tool("time", "The time.", {})

ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n2\n</parameter>\n<parameter=where>\n{\"tags\": [\"a\"]}\n</parameter>\n</function>\n</tool_call>",
    "llama3-json": '{"name": "weather", "parameters": {"city": "Bern", "unit": "C"}}',
    "pythonic": "[weather(city='Bern', days=2, where={\"tags\": [\"a\", 'b'], \"near\": True})]",
    "lfm2": '<|tool_call_start|>[weather(city="Bern")]<|tool_call_end|>',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Bern"}',
    "mistral-json": '[TOOL_CALLS][{"name": "weather", "arguments": {"city":"Bern"}}]',
    "nemotron": '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Bern"}}]</TOOLCALL>',
    "gemma4": '<|tool_call>call:weather{city:<|"|>Bern<|"|>,days:2,where:{tags:[<|"|>a<|"|>],near:true}}<tool_call|>',
    "functiongemma": "<start_function_call>call:weather{city:<escape>Bern<escape>,days:2}<end_function_call>",
    "harmony": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Bern"}',
}  # fmt: skip
TWO_CALLS = {
    "hermes": ONE_CALL["hermes"] + '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    "qwen3-coder": ONE_CALL["qwen3-coder"] + "\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
    "llama3-json": ONE_CALL["llama3-json"] + '; {"name": "time", "parameters": {}}',
    "pythonic": "[weather(city='Bern'), time()]",
    "lfm2": '<|tool_call_start|>[weather(city="Bern"), time()]<|tool_call_end|>',
    "mistral": ONE_CALL["mistral"] + "[TOOL_CALLS]time[ARGS]{}",
    "mistral-json": '[TOOL_CALLS][{"name": "weather", "arguments": {"city":"Bern"}}, {"name": "time", "arguments": {}}]',
    "nemotron": '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Bern"}}, {"name": "time", "arguments": {}}]</TOOLCALL>',
    "functiongemma": ONE_CALL["functiongemma"] + "<start_function_call>call:time{}<end_function_call>",
    "gemma4": ONE_CALL["gemma4"] + "<|tool_call>call:time{}<tool_call|>",
}  # fmt: skip
# The place of the first character that must be refused: an unknown tool, and arguments against the schema.
UNKNOWN = {name: call.replace("weather", "whether") for name, call in ONE_CALL.items()}
WRONG = {
    **{name: call.replace("city", "town") for name, call in ONE_CALL.items()},
    "gemma4": "<|tool_call>call:weather{city:5}<tool_call|>",
    "functiongemma": "<start_function_call>call:weather{city:5}<end_function_call>",
}
FORMATS = sorted(CALL_FORMATS)


def checker(name: str, tools: Tools, reasons: Reasons | None = None, *, as_text: bool = False) -> Checker:
    markers = CALL_FORMATS[name].markers
    if name in ("qwen3-coder",):
        markers = ("<tool_call>", "</tool_call>")
    if reasons is not None:
        markers += reasons.format.markers
    markers = () if as_text else markers
    tokenizer = byte_tokenizer(tuple(markers))
    tokens = {marker: tokenizer.token_to_id(marker) for marker in markers}
    grammar = tool_grammar(name, tools, tokens, reasons)
    assert grammar is not None
    return Checker(grammar, markers)


@pytest.mark.parametrize("as_text", [False, True], ids=["tokens", "text"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call(name: str, as_text: bool) -> None:
    check = checker(name, Tools((WEATHER, TIME), Mode.REQUIRED), as_text=as_text)
    assert check.accepts(ONE_CALL[name])
    assert not check.accepts("")
    assert not check.begins("No.")
    assert not check.begins(UNKNOWN[name])
    assert not check.begins(WRONG[name])
    assert not check.accepts(ONE_CALL[name][:-3])
    if name in TWO_CALLS:
        assert check.accepts(TWO_CALLS[name])


@pytest.mark.parametrize("as_text", [False, True], ids=["tokens", "text"])
@pytest.mark.parametrize("name", sorted(TWO_CALLS))
def test_one_call_where_calls_are_not_parallel(name: str, as_text: bool) -> None:
    for mode in (Mode.REQUIRED, Mode.AUTO):
        check = checker(name, Tools((WEATHER, TIME), mode, parallel=False), as_text=as_text)
        assert check.accepts(ONE_CALL[name])
        assert not check.begins(TWO_CALLS[name])


@pytest.mark.parametrize("as_text", [False, True], ids=["tokens", "text"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_named_tool(name: str, as_text: bool) -> None:
    check = checker(name, Tools((TIME, WEATHER), Mode.NAMED, named="weather"), as_text=as_text)
    assert check.accepts(ONE_CALL[name])
    if name in TWO_CALLS:
        assert not check.begins(TWO_CALLS[name])
    other = checker(name, Tools((TIME, WEATHER), Mode.NAMED, named="time"), as_text=as_text)
    assert not other.begins(ONE_CALL[name])


@pytest.mark.parametrize("as_text", [False, True], ids=["tokens", "text"])
@pytest.mark.parametrize("name", FORMATS)
def test_free_text_until_the_trigger(name: str, as_text: bool) -> None:
    check = checker(name, Tools((WEATHER, TIME)), as_text=as_text)
    said = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert check.accepts(f"{said}It is sunny,\n\n<b>not</b> cold; 5 < 6.")
    assert check.accepts(ONE_CALL[name])
    assert not check.begins(UNKNOWN[name])
    assert not check.begins(WRONG[name])
    if name not in ("llama3-json", "pythonic", "harmony"):
        assert check.accepts("I look.\n" + TWO_CALLS[name])
    if name == "harmony":
        thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        assert check.accepts(thought + ONE_CALL[name])


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "mistral", "gemma4"])
def test_calls_behind_reasoning(name: str) -> None:
    think = REASONING_FORMATS["think"]
    tools = Tools((WEATHER,), Mode.REQUIRED)
    thought = "I should { look.\n</think>\n\n"
    opened = checker(name, tools, Reasons(think, is_open=True))
    assert opened.accepts(thought + ONE_CALL[name])
    assert not opened.begins(ONE_CALL[name])
    closed = checker(name, tools, Reasons(think))
    assert closed.accepts("<think>\n" + thought + ONE_CALL[name])
    assert closed.accepts(ONE_CALL[name])
    assert not closed.begins("No")
    automatic = checker(name, Tools((WEATHER,)), Reasons(think))
    assert automatic.accepts("<think>\n" + thought + "So " + ONE_CALL[name])
    assert automatic.accepts("Hello")
    assert not automatic.begins("<think>\n" + thought + UNKNOWN[name])


def test_nothing_to_call_is_no_grammar() -> None:
    assert tool_grammar("hermes", Tools(()), {}) is None
    assert tool_grammar("hermes", Tools((TIME,), Mode.NONE), {}) is None


def test_arguments_are_any_object_where_the_model_decides_and_the_tool_is_not_strict() -> None:
    loose = Tool("weather", "", WEATHER.parameters)
    call = WRONG["hermes"]
    assert checker("hermes", Tools((loose,))).accepts(call)
    assert not checker("hermes", Tools((loose,), Mode.REQUIRED)).begins(call)


def test_unsupported_keywords_are_errors_for_strict_tools_alone() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "contentEncoding": "x", "not": {}}}}
    grammar = tool_grammar("hermes", Tools((Tool("f", "", schema, strict=False),), Mode.REQUIRED), {})
    assert grammar is not None
    Checker(grammar, ())
    strict = tool_grammar("hermes", Tools((Tool("f", "", schema, strict=True),), Mode.REQUIRED), {})
    assert strict is not None
    with pytest.raises(AssertionError, match="not"):
        Checker(strict, ())


def test_strings_follow_the_enumeration_in_xml() -> None:
    check = checker("qwen3-coder", Tools((WEATHER,), Mode.REQUIRED))
    begin = "<tool_call>\n<function=weather>\n<parameter=city>\nx < y\n</parameter>\n<parameter=unit>\n"
    end = "\n</parameter>\n</function>\n</tool_call>"
    assert check.accepts(begin + "C" + end)
    assert not check.begins(begin + "K")


@pytest.mark.parametrize("as_text", [False, True], ids=["tokens", "text"])
@pytest.mark.parametrize("name", FORMATS)
def test_whatever_a_required_grammar_allows_is_read_as_calls(name: str, as_text: bool) -> None:
    """Random answers under the grammar: each is whole calls of offered tools, with valid arguments."""
    check = checker(name, Tools((WEATHER, TIME), Mode.REQUIRED), as_text=as_text)
    offered = Tools((WEATHER, TIME)).for_parser()
    ended = 0
    for seed in range(12):
        answer = check.sample(Random(seed), most=1500)
        if answer is None:
            continue
        ended += 1
        parser = AnswerParser(CALL_FORMATS[name], None, {}, call_id=str, offered=offered)
        transcript = Transcript(parser.feed(answer) + parser.finish())
        assert transcript.calls, answer
        for call in transcript.calls:
            assert call.outcome is Outcome.COMPLETE, answer
            assert_fits(call.name, json.loads(call.arguments))
        if name != "harmony":
            assert transcript.text == "", answer
    assert ended >= 2


def assert_fits(name: str, arguments: dict[str, object]) -> None:
    """The arguments follow the schema of the tool."""
    if name == "time":
        assert arguments == {}
        return
    assert name == "weather"
    assert isinstance(arguments.pop("city"), str)
    assert isinstance(arguments.pop("days", 1), int)
    assert arguments.pop("unit", "C") in ("C", "F")
    where = arguments.pop("where", {"tags": []})
    assert isinstance(where, dict)
    assert all(isinstance(tag, str) for tag in where.pop("tags"))
    assert isinstance(where.pop("near", True), bool)
    assert not where
    assert not arguments


NAMES = st.text(alphabet="ab_-é\"'\\{}<> ", min_size=1, max_size=5)
SCALARS = st.sampled_from(
    [
        {"type": "string"},
        {"type": "integer"},
        {"type": ["number", "null"]},
        {"type": "boolean"},
        {"enum": ["a", 'b "c"', "d's"]},
        {"enum": [1, None, "x"]},
        {"const": "é\n"},
        {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        {},
        {"type": "object"},
        {"$ref": "#/$defs/self"},
    ]
)


def objects(inner: st.SearchStrategy[dict[str, object]]) -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(NAMES, inner, max_size=4).flatmap(
        lambda properties: st.builds(
            lambda required: {"type": "object", "properties": properties, "required": required},
            st.lists(st.sampled_from(sorted(properties)), unique=True) if properties else st.just([]),
        )
    )


SCHEMAS = objects(
    st.recursive(
        SCALARS,
        lambda inner: objects(inner) | st.builds(lambda item: {"type": "array", "items": item}, inner),
        max_leaves=5,
    )
)


@settings(max_examples=60, deadline=None)
@given(
    schemas=st.lists(SCHEMAS, min_size=1, max_size=3),
    name=st.sampled_from(FORMATS),
    mode=st.sampled_from([Mode.AUTO, Mode.REQUIRED]),
    strict=st.booleans(),
    as_text=st.booleans(),
)
def test_every_schema_gives_a_grammar_that_compiles(
    schemas: list[dict[str, object]], name: str, mode: Mode, strict: bool, as_text: bool
) -> None:
    root = {"$defs": {"self": {"type": "array", "items": {"type": "string"}}}}
    tools = tuple(Tool(f"f{index}", "", {**schema, **root}, strict) for index, schema in enumerate(schemas))
    check = checker(name, Tools(tools, mode), as_text=as_text)
    assert check.begins("")
