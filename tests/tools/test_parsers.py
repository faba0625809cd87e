"""Every parser over all ways to cut its input into pieces, as text and as tokens."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.tools.emitter import SPACE_HELD_MAX
from holdfast.engine.tools.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    Outcome,
    Text,
    Transcript,
    call_ids,
    wire_form,
)
from holdfast.engine.tools.formats import CALL_FORMATS, REASONING_FORMATS, call_format, reasoning_format
from holdfast.engine.tools.machine import HELD_MAX, NAME_MAX
from holdfast.engine.tools.parser import AnswerParser
from holdfast.engine.tools.values import DEPTH_MAX
from tests.tools.answers import ANSWERS, OFFERED, Answer, meaning, parsed

NUMBERED = [pytest.param(each, id=f"{index}-{each.format}") for index, each in enumerate(ANSWERS)]


@pytest.mark.parametrize("answer", NUMBERED)
def test_an_answer_means_what_it_should(answer: Answer) -> None:
    events = parsed(answer.parser(), [answer.wire])
    assert meaning(events) == answer.expected
    assert wire_form(events) == answer.wire


@pytest.mark.parametrize("answer", NUMBERED)
def test_every_cut_means_the_same(answer: Answer) -> None:
    """Two pieces at every character, three at many pairs, and one character at a time."""
    wire = answer.wire
    places = range(len(wire) + 1)
    cuts = [[wire[:first], wire[first:]] for first in places]
    cuts += [
        [wire[:first], wire[first:second], wire[second:]]
        for first, second in itertools.combinations(places[:: max(1, len(wire) // 12)], 2)
    ]
    for pieces in [*cuts, list(wire)]:
        events = parsed(answer.parser(), pieces)
        assert meaning(events) == answer.expected, pieces
        assert wire_form(events) == wire, pieces


def tokens_of(answer: Answer) -> dict[int, str]:
    return {1000 + index: marker for index, marker in enumerate(answer.markers)}


@pytest.mark.parametrize("answer", NUMBERED)
def test_every_cut_between_tokens_means_the_same(answer: Answer) -> None:
    """Markers arrive as tokens, the text between them cut at every character."""
    tokens = tokens_of(answer)
    pieces = answer.pieces(tokens)
    once = parsed(answer.parser(tokens), pieces)
    assert wire_form(once) == answer.wire
    for first in range(len(pieces) + 1):
        joined = joined_texts(pieces[:first]) + joined_texts(pieces[first:])
        events = parsed(answer.parser(tokens), joined)
        assert meaning(events) == meaning(once), joined
        assert wire_form(events) == answer.wire, joined


def joined_texts(pieces: list[str | int]) -> list[str | int]:
    joined: list[str | int] = []
    for is_text, group in itertools.groupby(pieces, key=lambda piece: isinstance(piece, str)):
        parts = list(group)
        joined += ["".join(map(str, parts))] if is_text else parts
    return joined


# The marker inside a string is a token there: the call is broken. Text that looks like a marker stays text.
DIFFERENT_AS_TOKENS = {
    '<tool_call>{"name": "f", "arguments": {"b": "</tool_call> and <tool_call>"}}</tool_call>',
    "No thoughts </think> here",
}


@pytest.mark.parametrize(
    "answer",
    [each for each in ANSWERS if each.format != "qwen3-coder" and each.wire not in DIFFERENT_AS_TOKENS],
)
def test_tokens_mean_what_the_text_means(answer: Answer) -> None:
    tokens = tokens_of(answer)
    assert meaning(parsed(answer.parser(tokens), answer.pieces(tokens))) == answer.expected


@pytest.mark.parametrize(
    "answer",
    [each for each in ANSWERS if not each.is_open and each.format not in ("llama3-json", "pythonic")],
)
def test_text_that_looks_like_a_marker_stays_text_where_markers_are_tokens(answer: Answer) -> None:
    tokens = tokens_of(answer)
    text, reasoning, calls = meaning(parsed(answer.parser(tokens), list(answer.wire)))
    assert (text, reasoning, calls) == (answer.wire, "", [])


def test_a_marker_token_ends_a_string() -> None:
    answer = Answer("hermes", '<tool_call>{"name": "f", "arguments": {"b": "never closed</tool_call> So.')
    tokens = tokens_of(answer)
    events = parsed(answer.parser(tokens), answer.pieces(tokens))
    assert meaning(events) == (" So.", "", [("f", '{"b": "never closed', Outcome.BROKEN)])


def test_a_token_opens_reasoning_anywhere() -> None:
    wire = "First.\n<think>\nHm.\n</think>\n\nThen."
    as_text = Answer("hermes", wire, thinks="think")
    assert meaning(parsed(as_text.parser(), [wire])) == (wire, "", [])
    tokens = tokens_of(as_text)
    assert meaning(parsed(as_text.parser(tokens), as_text.pieces(tokens))) == ("First.Then.", "Hm.", [])


def test_arguments_are_streamed() -> None:
    parser = Answer("hermes", "").parser()
    begin = parser.feed('<tool_call>{"name": "f", "arguments": {"b": "x')
    assert [type(event) for event in begin] == [CallBegin, CallArguments]
    assert parser.in_call
    assert [event.text for event in parser.feed("yz") if isinstance(event, CallArguments)] == ["yz"]
    ends = [event for event in parser.feed('"}}') if isinstance(event, CallEnd)]
    assert [event.outcome for event in ends] == [Outcome.COMPLETE]
    assert not parser.in_call


def test_xml_strings_are_streamed() -> None:
    parser = Answer("qwen3-coder", "").parser()
    parser.feed("<tool_call>\n<function=f>\n<parameter=b>\nfirst ")
    assert [event.text for event in parser.feed("word ") if isinstance(event, CallArguments)] == ["word "]


def test_ids_come_from_the_caller_or_the_answer() -> None:
    parser = AnswerParser(call_format("mistral"), None, {}, call_id=call_ids("turn 7"), offered=None)
    events = parser.feed("[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]g[ARGS]{}") + parser.finish()
    first, second = [event for event in events if isinstance(event, CallBegin)]
    assert first.id == "abcdefghi"
    assert second.id == call_ids("turn 7")(1) != call_ids("turn 8")(1)


@pytest.mark.parametrize("answer", NUMBERED)
def test_an_interrupted_answer_never_has_half_a_call(answer: Answer) -> None:
    """Cut at any character: nothing was heard that the whole answer does not say, and only whole calls."""
    whole = Transcript(parsed(answer.parser(), [answer.wire]))
    for size in range(len(answer.wire)):
        parser = answer.parser()
        events = parser.feed(answer.wire[:size]) + parser.interrupt()
        assert answer.wire.startswith(wire_form(events))
        heard = Transcript(events)
        assert whole.text.startswith(heard.text)
        assert whole.reasoning.startswith(heard.reasoning)
        assert heard.complete_calls == whole.complete_calls[: len(heard.complete_calls)]
        assert all(call.outcome is not Outcome.CUT for call in heard.calls[:-1])
        kept = Transcript(parsed(answer.parser(), [answer.wire[: heard.settled]]))
        assert kept.complete_calls == heard.complete_calls
        assert [call for call in kept.calls if call.outcome is Outcome.CUT] == []
        assert (kept.text.rstrip(), kept.reasoning) == (heard.text.rstrip(), heard.reasoning)


def test_an_interrupted_call_leaves_no_trace() -> None:
    wire = 'Ok.\n<tool_call>\n{"name": "f", "arguments": {"b": "half'
    for size in range(4, len(wire) + 1):
        parser = Answer("hermes", wire).parser()
        heard = Transcript(parser.feed(wire[:size]) + parser.interrupt())
        assert heard.text == "Ok."
        assert heard.settled == len("Ok.")
        assert heard.complete_calls == []


PIECES = sorted({marker for each in CALL_FORMATS.values() for marker in each.markers})
PIECES += sorted({marker for each in REASONING_FORMATS.values() for marker in each.markers})
PIECES += [
    '{"name": "f", "arguments": {"a": 1}}',
    '{"name": "',
    '"arguments": {',
    "}",
    "]",
    "[",
    "f(",
    "a=1",
    ")",
]
PIECES += [
    "call:f{",
    "functions.",
    "analysis",
    "commentary to=functions.f",
    "a>",
    "\n",
    " ",
    '"',
    "\\",
    "😀",
    "x",
]
MIXTURE = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=24)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(CALL_FORMATS)),
    thinks=st.sampled_from([None, *sorted(REASONING_FORMATS)]),
    mixture=MIXTURE,
    cuts=st.lists(st.integers(0, 400), max_size=12),
    is_open=st.booleans(),
    by_token=st.booleans(),
)
def test_random_mixtures(
    name: str, thinks: str | None, mixture: list[str], cuts: list[int], is_open: bool, by_token: bool
) -> None:
    """Nothing is lost or invented, and pieces do not matter."""
    answer = Answer(name, "".join(mixture), thinks=thinks, is_open=is_open)
    tokens = tokens_of(answer) if by_token else {}
    pieces = answer.pieces(tokens)
    once = parsed(answer.parser(tokens), joined_texts(pieces))
    assert wire_form(once) == answer.wire
    assert_well_formed(once)
    places = sorted({0, len(pieces), *(cut for cut in cuts if cut < len(pieces))})
    parts = [joined_texts(pieces[first:second]) for first, second in itertools.pairwise(places)]
    again = parsed(answer.parser(tokens), [piece for part in parts for piece in part])
    assert wire_form(again) == answer.wire
    assert meaning(again) == meaning(once)


def assert_well_formed(events: list[Event]) -> None:
    """Calls begin and end in turn, and text stands between them."""
    calls, is_open = 0, False
    for event in events:
        match event:
            case CallBegin(index=index):
                assert not is_open
                assert index == calls
                calls, is_open = calls + 1, True
            case CallArguments(index=index) | CallEnd(index=index):
                assert is_open
                assert index == calls - 1
                is_open = not isinstance(event, CallEnd)
            case Text():
                assert not is_open
    assert not is_open


FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=200, deadline=None)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-(10**20), 10**20) | FLOATS | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=12,
    ),
    name=st.sampled_from(["hermes", "mistral", "nemotron", "llama3-json", "harmony", "pythonic"]),
)
def test_complete_arguments_are_the_values_that_were_written(value: object, name: str) -> None:
    written = json.dumps({"v": value}, ensure_ascii=False)
    wire = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>',
        "nemotron": f'<TOOLCALL>[{{"name": "f", "arguments": {written}}}]</TOOLCALL>',
        "mistral": f"[TOOL_CALLS]f[ARGS]{written}",
        "llama3-json": f'{{"name": "f", "parameters": {written}}}',
        "harmony": f"<|channel|>commentary to=functions.f<|message|>{written}<|call|>",
        "pythonic": f"[f(v={value!r})]",
    }[name]
    text, _, calls = meaning(parsed(Answer(name, wire).parser(), [wire]))
    if name == "pythonic" and "e" in repr(value):
        return  # Keywords and floats with an exponent are written as JSON writes them or not at all.
    assert [(call[0], call[2]) for call in calls] == [("f", Outcome.COMPLETE)]
    assert json.loads(calls[0][1]) == {"v": value}
    assert text == ""


LONG = 3 * HELD_MAX


@pytest.mark.parametrize("name", sorted(CALL_FORMATS))
@pytest.mark.parametrize("size", [1, 7, LONG])
def test_long_input_is_held_within_bounds(name: str, size: int) -> None:
    """Endless white space, names, keys and nesting: all of it arrives, in order, whatever the pieces."""
    call = CALL_FORMATS[name]
    opens = call.markers[0]
    bodies = [
        " " * (SPACE_HELD_MAX * 3),
        "\n" * (HELD_MAX + 9),
        "n" * (NAME_MAX * 3),
        "[" * 400,
        '{"name":' * 99,
    ]
    for body in bodies if size > 1 else bodies[:1]:
        wire = f"text{opens}{body}{opens}f"
        pieces = [wire[place : place + size] for place in range(0, len(wire), size)]
        answer = Answer(name, wire)
        events = parsed(answer.parser(), pieces)
        assert wire_form(events) == wire
        assert meaning(events) == meaning(parsed(answer.parser(), [wire]))


def test_nesting_is_bounded() -> None:
    for depth, outcome in ((DEPTH_MAX - 1, Outcome.COMPLETE), (DEPTH_MAX, Outcome.BROKEN)):
        wire = f'[TOOL_CALLS]f[ARGS]{{"v": {"[" * depth}{"]" * depth}}}'
        _, _, calls = meaning(parsed(Answer("mistral", wire).parser(), [wire]))
        assert [call[2] for call in calls] == [outcome]


def test_what_a_parser_holds_is_bounded() -> None:
    """A value that is held for its name goes out as text when it is too long."""
    parser = Answer("hermes", "").parser()
    out = len(wire_form(parser.feed('<tool_call>{"arguments": {"b": "')))
    sent = len('<tool_call>{"arguments": {"b": "')
    for _ in range(3 * HELD_MAX // 1000):
        out += len(wire_form(parser.feed("x" * 1000)))
        sent += 1000
        assert sent - out <= HELD_MAX + 2000


def test_names_of_formats() -> None:
    assert call_format("qwen3").name == "hermes"
    assert call_format("gpt-oss").reasons
    assert reasoning_format("deepseek-r1").opens == "<think>"
    with pytest.raises(ValueError, match=r"unknown tool parser 'nope'; one of: .*hermes"):
        call_format("nope")
    with pytest.raises(ValueError, match=r"unknown reasoning parser 'nope'; one of: .*think"):
        reasoning_format("nope")


def test_the_prompt_may_open_the_reasoning() -> None:
    assert reasoning_format("think").is_open_in("<|im_start|>assistant\n<think>\n")
    assert not reasoning_format("think").is_open_in("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert reasoning_format("gemma4").is_open_in("<|turn>model\n<|channel>thought\n")


def test_offered_tools() -> None:
    assert OFFERED.knows("f")
    assert not OFFERED.knows("zzz")
    assert OFFERED.types_of("zzz", "a") == ()
