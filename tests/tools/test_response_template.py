"""Checkpoints' own response templates, read as they stream; and the patterns that they are made of."""
# ruff: noqa: E501 (each answer on one line)

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from holdfast.engine.tools.events import Outcome, Transcript, wire_form
from holdfast.engine.tools.machine import HELD_MAX
from holdfast.engine.tools.parser import AnswerParser
from holdfast.engine.tools.patterns import Pattern, PatternRefused, Search
from holdfast.engine.tools.response_template import TemplateRefused, read_response_template
from holdfast.engine.tools.template_calls import template_format
from holdfast.engine.tools.template_values import parse_content
from tests.tools.answers import OFFERED, meaning, parsed

PATTERNS = [
    r"\s*<call>",
    r"\s*<call>\s*<f=(?P<name>[^>\n]+)>",
    r"</f>\s*</call>",
    r"a+?b|ab*c",
    r"(?:x|xy)(?P<z>z*)",
    r"<a(?P<n>\w{1,3})>",
    r"\s*(?:<\|end\|>|<\|eot\|>)",
    "ab|a",
    "a|ab",
    r"(a|b)*c",
    r"x{2}y|[^a-z]{2,}z",
    r"<k=(?P<key>\w+)>(?P<value>.*?)</k>",
]
FRAGMENTS = [*"abcxyz <>\n0", "<call>", "<f=", "</f>", "</call>", "<|end|>", "<a", "foo", "<k=a>", "</k>"]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PATTERNS), st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.integers(0, 30))
def test_a_search_finds_what_re_finds(source: str, fragments: list[str], cut: int) -> None:
    text = "".join(fragments)
    search = Search(Pattern(source))
    search.feed(text[:cut])
    before = search.pending
    search.feed(text[cut:])
    search.finish()
    found, expected = search.match(text), re.compile(source, re.DOTALL).search(text)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        groups = {name: group for name, group in expected.groupdict().items() if group is not None}
        assert (found.start, found.end, found.groups) == (*expected.span(), groups)
        assert found.start >= before or found.end <= cut


@pytest.mark.parametrize(
    "source", ["(?=a)", "^a", "a$", r"\bA", r"(a)\1", "(?i)a", "a++", "a{999}", "(", "((a{99}){99})"]
)
def test_patterns_that_are_refused(source: str) -> None:
    with pytest.raises(PatternRefused):
        Pattern(source)


QWEN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>"},
    },
}
CODER = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}
GEMMA = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}
LISTED = {
    "start_anchor": ">>",
    "fields": {
        "tool_calls": {
            "open": "<calls>",
            "close": "</calls>",
            "content": "json",
            "transform": {"function": {"name": "{tool.name}", "arguments": "{args}"}, "id": "{id}"},
            "transform_each": True,
        },
    },
}

CASES = [
    (QWEN, "", "Hi.\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>\n<tool_call>{\"name\": \"g\"}</tool_call><|im_end|>", "Hi.", "", [("f", '{"a": 1}'), ("g", "{}")]),
    (QWEN, "x<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nYes.", "Yes.", "Hm.", []),
    (QWEN, "x<|im_start|>assistant\n", "<think>\nHm.</think>\n<tool_call>{\"name\": \"g\"}", "", "Hm.", [("g", "{}")]),
    (QWEN, "", "a <tool_call>{\"name\": 5}</tool_call> b <tool_ca", "a <tool_call>{\"name\": 5}</tool_call> b <tool_ca", "", []),
    (QWEN, "", "a <tool_call>half {", "a <tool_call>half {", "", []),
    (CODER, "", "Ok\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\ny\n</parameter>\n</function>\n</tool_call>", "Ok", "", [("f", '{"a": 1, "b": "x\\ny"}')]),
    (GEMMA, "<|turn>model\n", "<|channel>thought\nHm<channel|><|tool_call>call:f{a:1,b:<|\"|>k:\"v\",{x:<|\"|>}<tool_call|><turn|>", "", "Hm", [("f", '{"a": 1, "b": "k:\\"v\\",{x:"}')]),
    (LISTED, "", "noise<calls>[{\"tool\": {\"name\": \"f\"}, \"args\": {\"a\": 1}, \"id\": \"7\"}, {\"tool\": {\"name\": \"g\"}, \"args\": {}, \"id\": \"8\"}]</calls>", "", "", [("f", '{"a": 1}'), ("g", "{}")]),
]  # fmt: skip


def parser_of(template: object, prompt: str) -> AnswerParser:
    calls = template_format(read_response_template(template), prompt)
    return AnswerParser(calls, None, {}, call_id=lambda index: f"call_{index}", offered=OFFERED)


@pytest.mark.parametrize("case", CASES, ids=[str(index) for index in range(len(CASES))])
def test_every_cut_of_an_answer_means_the_same(case: tuple[object, ...]) -> None:
    template, prompt, wire, text, reasoning, calls = case
    assert isinstance(prompt, str)
    assert isinstance(wire, str)
    assert isinstance(calls, list)
    expected = (text, reasoning, [(*call, Outcome.COMPLETE) for call in calls])
    places = range(len(wire) + 1)
    cuts = [[wire[:first], wire[first:]] for first in places]
    cuts += [[wire[:a], wire[a:b], wire[b:]] for a, b in itertools.combinations(places[::11], 2)]
    for pieces in [*cuts, list(wire)]:
        events = parsed(parser_of(template, prompt), pieces)
        assert meaning(events) == expected, pieces
        assert wire_form(events) == wire, pieces


def test_a_border_waits_for_a_longer_one_that_begins_where_it_does() -> None:
    fields = {
        "note": {"open": "<x>", "close": "</x>"},
        "tool_calls": {"open": "<x><y>", "close": "</y>", "content": "json"},
        "content": {},
    }
    template = {"start_anchor": ">>", "fields": fields}
    for wire, text, names in (('<x><y>{"name": "g"}</y>!', "!", ["g"]), ("<x>n</x>!", "n!", [])):
        for pieces in ([wire], list(wire)):
            heard = Transcript(parsed(parser_of(template, ""), pieces))
            assert (heard.text, [call.name for call in heard.calls]) == (text, names)


def test_an_id_of_the_answer_is_kept() -> None:
    wire = str(CASES[-1][2])
    assert [call.id for call in Transcript(parsed(parser_of(LISTED, ""), [wire])).calls] == ["7", "8"]


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([QWEN, CODER, GEMMA, LISTED]),
    st.lists(
        st.one_of(
            st.sampled_from(
                ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "g"}', "<function=g>", "</function>",
                 "<|tool_call>call:g", "{}", "<tool_call|>", "<calls>", "</calls>", "<|im_end|>", " ", "\n", "<"]
            ),
            st.text(max_size=4),
        ),
        max_size=16,
    ),
    st.lists(st.integers(0, 200), max_size=8),
)  # fmt: skip
def test_random_answers_lose_nothing(template: object, mixture: list[str], cuts: list[int]) -> None:
    wire = "".join(mixture)
    once = parsed(parser_of(template, ""), [wire])
    assert wire_form(once) == wire
    places = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})
    pieces = [wire[first:second] for first, second in itertools.pairwise(places)]
    again = parsed(parser_of(template, ""), pieces)
    assert wire_form(again) == wire
    assert meaning(again) == meaning(once)


def test_what_is_held_is_bounded() -> None:
    parser = parser_of(CODER, "")
    sent = out = 0
    for piece in ["<tool_call>", "<function=", *["n" * 1000] * (3 * HELD_MAX // 1000)]:
        sent += len(piece)
        out += len(wire_form(parser.feed(piece)))
        assert sent - out <= HELD_MAX + 2000


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (5, "must be an object"),
        ({"fields": {}}, "fields must be"),
        ({"fields": {"content": {}}}, "start_anchor"),
        ({"fields": {"content": {"open": ""}}, "start_anchor": "x"}, "empty text"),
        ({"fields": {"content": {"open": "a", "open_pattern": "a"}}, "start_anchor": "x"}, "has both"),
        ({"fields": {"content": {"open_pattern": "(?=a)"}}, "start_anchor": "x"}, "content.open_pattern"),
        ({"fields": {"a": {}, "b": {}}, "start_anchor": "x"}, "at most one"),
        ({"fields": {"tool_calls": {}}, "start_anchor": "x"}, "tool_calls needs"),
        ({"fields": {"content": {"content": "yaml"}}, "start_anchor": "x"}, "content must be one of"),
        ({"fields": {"content": {"opne": "x"}}, "start_anchor": "x"}, "unknown keys: opne"),
        ({"fields": {"content": {}}, "start_anchor": "x", "version": 2}, "version"),
    ],
)
def test_templates_that_are_refused(template: object, problem: str) -> None:
    with pytest.raises(TemplateRefused, match=problem):
        read_response_template(template)


def test_contents() -> None:
    assert parse_content(" 5 ", "int", {}) == 5
    assert parse_content("1.5", "float", {}) == 1.5
    assert parse_content("True", "bool", {}) is True
    assert parse_content(" x ", "text", {"strip": False}) == " x "
    assert parse_content("a: 1\nb: x", "kv-lines", {"value_parser": {"name": "json", "args": {"allow_non_json": True}}}) == {"a": 1, "b": "x"}  # fmt: skip
    pattern = {"tag_pattern": r"<(?P<key>\w+)>(?P<value>[^<]*)</\w+>", "merge_duplicates": True}
    assert parse_content("<a>1</a><b>2</b><a>3</a>", "xml-inline", pattern) == {"a": ["1", "3"], "b": "2"}


@pytest.mark.parametrize("case", CASES[:3] + CASES[5:])
def test_transformers_reads_the_same(case: tuple[object, ...]) -> None:
    """The interpreter of transformers, on the answers above that it can read."""
    template, prompt, wire, text, reasoning, calls = case
    assert isinstance(calls, list)
    message = parse_response(wire, template, prefix=prompt)
    assert message.get("content", "") == text
    assert message.get("thinking", "") == reasoning
    found = message.get("tool_calls", [])
    functions = [each["function"] for each in (found if isinstance(found, list) else [found])]
    assert [function["name"] for function in functions] == [name for name, _ in calls]
    if template in (QWEN, GEMMA):
        assert [function.get("arguments", {}) for function in functions] == [
            json.loads(each) for _, each in calls
        ]
