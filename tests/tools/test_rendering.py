"""Messages of clients in the form of templates, the choice of formats, and the fields of requests."""
# ruff: noqa: E501 (each answer on one line)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from holdfast.engine.text.chat_template import ChatTemplate, ChatTemplateError
from holdfast.engine.tools.choose import Chosen, choose
from holdfast.engine.tools.events import Call, Outcome
from holdfast.engine.tools.formats import call_format
from holdfast.engine.tools.parser import AnswerParser
from holdfast.engine.tools.plain_rendering import PLAIN_FORMAT, plain_messages
from holdfast.engine.tools.rendering import (
    ArgumentForm,
    TemplateForm,
    probe,
    tail_after_calls,
    template_messages,
)
from holdfast.engine.tools.request import Mode, Tool, Tools, ToolsRefused, parameter_types, read_tools
from tests.tools import templates
from tests.tools.answers import meaning

CALL_ID = "call_0123456789"
WRITTEN = '{"a": 7, "b": "x\\n\\"é\\"", "c": [1, {"k": true}]}'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "array"}},
}
TOOL = {"type": "function", "function": {"name": "f", "description": "Does f.", "parameters": SCHEMA}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Look.",
        "tool_calls": [{"id": CALL_ID, "type": "function", "function": {"name": "f", "arguments": WRITTEN}}],
    },
    {"role": "tool", "tool_call_id": CALL_ID, "content": [{"type": "text", "text": "RES"}, {"type": "text", "text": "ULT"}]},
]  # fmt: skip


def rendered(source: str, messages: Sequence[Mapping[str, Any]], **variables: object) -> str:
    template = ChatTemplate(source, {})
    return template.render_unchecked(messages, add_generation_prompt=False, **variables)


def form_of(source: str) -> TemplateForm:
    return probe(lambda messages: rendered(source, [dict(each) for each in messages]), ChatTemplateError)


@pytest.mark.parametrize("name", sorted(templates.FAMILIES))
def test_a_template_renders_calls_that_the_family_s_parser_reads(name: str) -> None:
    source = templates.FAMILIES[name]
    form = form_of(source)
    text = rendered(source, template_messages(HISTORY, form), tools=[TOOL])
    assert "RESULT" in text
    begin = text.index('{"name"') if name == "llama3-json" else text.rindex("Hi")
    tools = read_tools([TOOL]).for_parser()
    parser = AnswerParser(call_format(name), None, {}, call_id=str, offered=tools)
    _, _, calls = meaning(parser.feed(text[begin:]) + parser.finish())
    assert [call[:2] for call in calls] == [("f", WRITTEN)]


def test_forms_are_found_by_rendering() -> None:
    assert form_of(templates.HERMES) == TemplateForm(ArgumentForm.OBJECT)
    assert form_of(templates.AS_STRING) == TemplateForm(ArgumentForm.STRING)
    assert form_of(templates.MISTRAL) == TemplateForm(ArgumentForm.OBJECT, short_ids=True)
    for single in (templates.LLAMA, templates.HARMONY):
        assert form_of(single) == TemplateForm(several_calls=False)
    assert not form_of(templates.NO_TOOLS).shows_calls


def test_arguments_stay_a_string_where_the_template_wants_one() -> None:
    text = rendered(templates.AS_STRING, template_messages(HISTORY, TemplateForm(ArgumentForm.STRING)))
    assert f'"arguments": {WRITTEN}}}' in text


def test_reasoning_has_the_name_of_each_family() -> None:
    with_text = [HISTORY[0], {**HISTORY[1], "content": "So."}, HISTORY[2]]
    only_thinking = template_messages(HISTORY, TemplateForm())
    assert only_thinking[1]["thinking"] == only_thinking[1]["reasoning_content"] == "Look."
    both = template_messages(with_text, TemplateForm())
    assert "thinking" not in both[1]
    assert rendered(templates.HARMONY, both)


def test_ids_are_shortened_alike() -> None:
    made = template_messages(HISTORY, TemplateForm(short_ids=True))
    short = made[1]["tool_calls"][0]["id"]
    assert len(short) == 9
    assert made[2]["tool_call_id"] == short
    assert template_messages(HISTORY, TemplateForm())[2]["tool_call_id"] == CALL_ID


def test_calls_get_messages_of_their_own_where_a_message_has_one() -> None:
    first = HISTORY[1]["tool_calls"][0]
    second = {"id": "two", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    results = [{"role": "tool", "tool_call_id": each, "content": each} for each in ("two", CALL_ID)]
    messages = [HISTORY[0], {**HISTORY[1], "tool_calls": [first, second]}, *results, HISTORY[0]]
    made = template_messages(messages, TemplateForm(several_calls=False))
    assert [each["role"] for each in made] == ["user", "assistant", "tool", "assistant", "tool", "user"]
    assert [each["content"] for each in made] == ["Hi", "", CALL_ID, "", "two", "Hi"]
    assert [each.get("thinking") for each in made if each["role"] == "assistant"] == ["Look.", None]
    for source in (templates.LLAMA, templates.HARMONY):
        text = rendered(source, made)
        assert text.index(WRITTEN) < text.index(CALL_ID) < text.index("two")


TAILS = {
    "hermes": "<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n",
    "qwen3-coder": "<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n",
    "mistral": "</s>[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]42[/TOOL_RESULTS]",
    "gemma4": '<turn|>\n<|tool_response>response:f{value:<|"|>42<|"|>}<tool_response|>',
    "harmony": '<|call|><|start|>functions.f to=assistant<|channel|>commentary<|message|>"42"<|end|>',
    "llama3-json": '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|>',
}


@pytest.mark.parametrize("name", sorted(templates.FAMILIES))
def test_results_follow_the_calls_of_an_append_only_session(name: str) -> None:
    source = templates.FAMILIES[name]
    call = Call("abcdefghi", "f", '{"a": 1}', Outcome.COMPLETE)
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "42"}
    form = form_of(source)
    tail = tail_after_calls(lambda each: rendered(source, each), name, [call], [result], form)
    assert tail == TAILS[name]
    several = [Call("123456789", "g", "{}", Outcome.COMPLETE), call]
    assert tail_after_calls(lambda each: rendered(source, each), name, several, [result], form) == tail


def test_a_template_that_writes_calls_in_another_format_is_refused() -> None:
    call = Call("abcdefghi", "f", "{}", Outcome.COMPLETE)
    for source in (templates.CODER, templates.NO_TOOLS):
        with pytest.raises(ToolsRefused, match="does not render calls"):
            tail_after_calls(
                lambda each, source=source: rendered(source, each), "hermes", [call], [], TemplateForm()
            )


def test_messages_without_tools_keep_their_fields() -> None:
    messages = [{"role": "user", "content": "Hi", "name": "Ada"}, {"role": "assistant", "content": "Yes"}]
    assert template_messages(messages, TemplateForm()) == messages
    assert "tool_calls" not in template_messages([{**messages[1], "tool_calls": None}], TemplateForm())[0]


def with_call(**changes: object) -> list[dict[str, Any]]:
    call = {**HISTORY[1]["tool_calls"][0], **changes}
    return [HISTORY[0], {**HISTORY[1], "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (with_call(function={"name": "f", "arguments": "{"}), "messages[1].tool_calls[0].function.arguments"),
        (
            with_call(function={"name": "f", "arguments": "[1]"}),
            "messages[1].tool_calls[0].function.arguments",
        ),
        (with_call(function={"arguments": "{}"}), "messages[1].tool_calls[0].function.name"),
        (with_call(function=None), "messages[1].tool_calls[0].function"),
        (with_call(id=None), "messages[1].tool_calls[0].id"),
        ([{**HISTORY[1], "tool_calls": "f"}], "messages[0].tool_calls"),
        ([{**HISTORY[1], "role": "user"}], "messages[0].tool_calls"),
        ([{**HISTORY[1], "reasoning_content": 5}], "messages[0].reasoning_content"),
        ([*HISTORY[:2], {**HISTORY[2], "tool_call_id": "other"}], "messages[2].tool_call_id"),
        ([*HISTORY[:2], {**HISTORY[2], "tool_call_id": None}], "messages[2].tool_call_id"),
        ([*HISTORY[:2], {**HISTORY[2], "content": None}], "messages[2].content"),
        ([*HISTORY[:2], {**HISTORY[2], "content": [{"type": "image_url"}]}], "messages[2].content[0]"),
        ([*HISTORY[:2], {**HISTORY[2], "content": 5}], "messages[2].content"),
    ],
)
def test_errors_name_the_field(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(ToolsRefused) as refused:
        template_messages(messages, TemplateForm())
    assert refused.value.param == param


def test_a_template_without_calls_refuses_them() -> None:
    form = TemplateForm(shows_calls=False)
    assert template_messages(HISTORY[:1], form) == HISTORY[:1]
    for messages in (HISTORY, [{"role": "tool", "tool_call_id": "x", "name": "f", "content": ""}]):
        with pytest.raises(ToolsRefused, match="does not render tool calls"):
            template_messages(messages, form)


CHOICES = [
    (templates.HERMES, Chosen("hermes", None)),
    (templates.HERMES + "</think>", Chosen("hermes", "think")),
    (templates.CODER, Chosen("qwen3-coder", None)),
    (templates.MISTRAL, Chosen("mistral", None)),
    ("[TOOL_CALLS][{{ calls }}][THINK][/THINK]", Chosen("mistral-json", "mistral")),
    (templates.GEMMA, Chosen("gemma4", "gemma4")),
    ("<start_function_call>{{ call }}<end_function_call>", Chosen("functiongemma", None)),
    (templates.HARMONY, Chosen("harmony", None)),
    (templates.LLAMA, Chosen("llama3-json", None)),
    ("<TOOLCALL>[{{ calls }}]</TOOLCALL>", Chosen("nemotron", None)),
    ("<|tool_call_start|>{{ calls }}<|tool_call_end|>", Chosen("lfm2", None)),
    ("<|python_start|>{{ calls }}", Chosen("pythonic", None)),
    ("<tool_call>{{ name }}<arg_key>{{ key }}</arg_key></tool_call>\"name\"", Chosen(None, None)),
    (templates.NO_TOOLS, Chosen(None, None)),
]  # fmt: skip


@pytest.mark.parametrize(("source", "chosen"), CHOICES)
def test_a_template_shows_its_formats(source: str, chosen: Chosen) -> None:
    assert choose(source, (), {}) == chosen
    if chosen.calls is not None:
        call_format(chosen.calls)


def test_tokens_and_configuration_help() -> None:
    assert choose(None, (), {"model_type": "gpt_oss"}) == Chosen("harmony", None)
    assert choose(templates.NO_TOOLS, (), {"model_type": "qwen3"}) == Chosen(None, None)
    assert choose(templates.NO_TOOLS, ("<think>", "</think>"), {}) == Chosen(None, "think")
    assert choose("{{ tools }}", ("<|tool_call_start|>",), {}) == Chosen("lfm2", None)


def test_the_fields_of_a_request() -> None:
    other = {"type": "function", "function": {"name": "g", "strict": True}}
    tools = read_tools([TOOL, other])
    assert [tool.name for tool in tools.callable_tools] == ["f", "g"]
    assert tools.offered[0] == Tool("f", "Does f.", SCHEMA)
    assert tools.offered[1].strict
    assert tools.parallel
    assert tools.offered[0].in_openai_form() == TOOL
    named = read_tools([TOOL, other], {"type": "function", "function": {"name": "g"}}, parallel=False)
    assert named.mode is Mode.NAMED
    assert [tool.name for tool in named.callable_tools] == ["g"]
    assert not named.parallel
    assert read_tools([TOOL], "none").callable_tools == ()
    assert read_tools(None) == Tools((), Mode.NONE)
    assert read_tools([TOOL], "required").mode is Mode.REQUIRED


@pytest.mark.parametrize(
    ("tools", "choice", "parallel", "param"),
    [
        (5, None, None, "tools"),
        ("f", None, None, "tools"),
        ([TOOL] * 600, None, None, "tools"),
        ([5], None, None, "tools[0]"),
        ([{"type": "web_search"}], None, None, "tools[0].type"),
        ([{"type": "function"}], None, None, "tools[0].function"),
        ([{"function": {"name": "a b"}}], None, None, "tools[0].function.name"),
        ([TOOL, TOOL], None, None, "tools[1].function.name"),
        ([{"function": {"name": "a", "description": 5}}], None, None, "tools[0].function.description"),
        ([{"function": {"name": "a", "parameters": 5}}], None, None, "tools[0].function.parameters"),
        ([{"function": {"name": "a", "parameters": {"type": "array"}}}], None, None, "tools[0].function.parameters.type"),
        ([{"function": {"name": "a", "strict": 1}}], None, None, "tools[0].function.strict"),
        (None, "required", None, "tool_choice"),
        ([TOOL], "always", None, "tool_choice"),
        ([TOOL], {"type": "custom"}, None, "tool_choice.type"),
        ([TOOL], {"type": "function", "function": {"name": "g"}}, None, "tool_choice.function.name"),
        ([TOOL], None, "yes", "parallel_tool_calls"),
    ],
)  # fmt: skip
def test_errors_of_a_request_name_the_field(
    tools: object, choice: object, parallel: object, param: str
) -> None:
    with pytest.raises(ToolsRefused) as refused:
        read_tools(tools, choice, parallel)
    assert refused.value.param == param
    assert str(refused.value).startswith(f"{param}: ")


def test_types_of_parameters() -> None:
    schema = {
        "properties": {
            "a": {"type": ["integer", "null"]},
            "b": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]},
            "c": {"enum": [1, "two", None, 1.5, True, [], {}]},
            "d": {"const": "x"},
            "e": {"type": "string", "nullable": True},
            "f": {},
            "g": {"$ref": "#/$defs/loop"},
        },
        "$defs": {"x": {"type": "object"}, "loop": {"$ref": "#/$defs/loop"}},
    }
    assert parameter_types(schema) == {
        "a": ("integer", "null"),
        "b": ("object", "null"),
        "c": ("integer", "string", "null", "number", "boolean", "array", "object"),
        "d": ("string",),
        "e": ("string", "null"),
        "f": (),
        "g": (),
    }
    assert parameter_types({}) == {}


def test_tools_are_text_where_a_template_knows_none() -> None:
    """As for the embedded SmolLM2, whose template writes role and content of each message."""
    tools = read_tools([TOOL]).offered
    second = {"role": "tool", "tool_call_id": CALL_ID, "content": "MORE"}
    messages = template_messages(
        [{"role": "system", "content": "Be brief."}, *HISTORY, second], TemplateForm()
    )
    plain = plain_messages(messages, tools)
    assert [each["role"] for each in plain] == ["system", "user", "assistant", "user"]
    assert plain[0]["content"].startswith("Be brief.\n\n# Tools")
    assert '{"name": "f", "description": "Does f."' in plain[0]["content"]
    assert plain[3]["content"].count("<tool_response>") == 2
    assert "RESULT" in plain[3]["content"]
    parser = AnswerParser(call_format(PLAIN_FORMAT), None, {}, call_id=str)
    _, _, calls = meaning(parser.feed(plain[2]["content"]) + parser.finish())
    assert calls == [("f", WRITTEN, Outcome.COMPLETE)]
    assert rendered(templates.NO_TOOLS, plain).count("<tool_call>") == 2
    assert plain_messages(HISTORY[:1], tools)[0]["role"] == "system"
    assert plain_messages(HISTORY[:1], ()) == HISTORY[:1]
