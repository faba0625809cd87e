"""A turn whose answer is read: content apart from reasoning and calls, and cuts that halve no call."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken

from holdfast.engine.constraints.turn import TurnConstraint
from holdfast.engine.sampling import Sampling
from holdfast.engine.text.answer_reader import AnswerReader, Places, UnknownFormat
from holdfast.engine.text.stream import TurnStream
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.engine.tools.answer import Answer, AnswerSpec
from holdfast.engine.tools.events import CallArguments, CallBegin, CallEnd, Outcome, wire_form
from tests.engine.tiny import END, MARKS, TEMPLATE, encoder

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
HERMES = AnswerSpec("hermes", "think", seed="s")
CALL = '{"name": "f", "arguments": {"a": "é"}}'


def tokenizer(*, special: bool = True) -> Tokenizer:
    """The tiny vocabulary with markers that are tokens."""
    made = encoder()
    if special:
        made.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    else:
        made.add_tokens([AddedToken(marker, special=False) for marker in MARKERS])
    return Tokenizer(made, template=TEMPLATE, names={"eos_token": MARKS[END]}, eos_tokens=(END,))


WITH_MARKERS = tokenizer()
PLAIN = Tokenizer(encoder(), template=TEMPLATE, names={"eos_token": MARKS[END]}, eos_tokens=(END,))


def stream(spec: AnswerSpec = HERMES, words: Tokenizer = WITH_MARKERS, **sampling: object) -> TurnStream:
    constraint = None if spec.thinking_tokens is None else TurnConstraint(None)
    chosen = Sampling(**sampling)  # type: ignore[arg-type]
    return TurnStream(words, chosen, (END,), constraint=constraint, reader=AnswerReader(spec, words))


def encoded(text: str, words: Tokenizer = WITH_MARKERS) -> list[int]:
    return words.encode(text, add_special_tokens=False)


ANSWER = f"<think>\nWhich one?</think>\n\nI look. <tool_call>\n{CALL}\n</tool_call>"


@pytest.mark.parametrize(
    "words", [WITH_MARKERS, tokenizer(special=False), PLAIN], ids=["special", "added", "text"]
)
def test_content_is_text_and_the_rest_comes_as_events(words: Tokenizer) -> None:
    turn = stream(words=words)
    for token in [*encoded(ANSWER, words), END]:
        turn.push([token])
    assert (turn.text, turn.finish) == ("I look.", "stop")
    assert wire_form(turn.events) == ANSWER
    answer = turn.answer()
    assert (answer.text, answer.reasoning) == ("I look.", "Which one?")
    (call,) = answer.calls
    assert (call.name, json.loads(call.arguments), call.outcome) == ("f", {"a": "é"}, Outcome.COMPLETE)
    assert answer.complete_calls == answer.calls
    kinds = [type(event) for event in turn.events if not hasattr(event, "text") or event.text]
    assert kinds.index(CallBegin) < kinds.index(CallArguments) < kinds.index(CallEnd)


def test_tokens_at_once_and_one_by_one_give_the_same_answer() -> None:
    tokens = [*encoded(ANSWER), END]
    one, many = stream(), stream()
    many.push(tokens)
    for token in tokens:
        one.push([token])
    assert one.answer() == many.answer() and one.tokens == many.tokens
    assert wire_form(one.events) == wire_form(many.events)


def test_special_tokens_that_are_no_markers_stay_out_of_the_text_unless_asked_for() -> None:
    said = encoded("a<|pad|>b<tool_call>" + CALL + "</tool_call>")
    assert said.count(WITH_MARKERS.token_of("<|pad|>") or -1) == 1
    hidden, shown = stream(), stream(skip_special_tokens=False)
    hidden.push([*said, END])
    shown.push([*said, END])
    assert (hidden.text, shown.text) == ("ab", "a<|pad|>b<|end|>")
    assert len(hidden.answer().calls) == len(shown.answer().calls) == 1


def test_a_stop_string_ends_the_answer_before_its_marker() -> None:
    turn = stream(stop=["look"])
    turn.push(encoded(ANSWER))
    assert (turn.finish, turn.text) == ("stop", "I ")
    assert turn.answer().calls == () and turn.answer().reasoning == "Which one?"


def test_held_text_goes_out_before_a_marker() -> None:
    turn = stream(stop=["look. and"])
    turn.push([*encoded(ANSWER), END])
    assert turn.text == "I look." and len(turn.answer().calls) == 1


def test_half_a_character_before_a_marker_is_no_part_of_it() -> None:
    turn = stream()
    turn.push([*encoded("é")[:1], *encoded("<tool_call>" + CALL + "</tool_call>"), END])
    assert turn.text == "\N{REPLACEMENT CHARACTER}" and len(turn.answer().calls) == 1


def test_text_of_tokens_and_tokens_of_text_skip_reasoning_and_calls() -> None:
    turn = stream()
    turn.push(encoded("<think>no</think>ab<tool_call>" + CALL + "</tool_call>cd"))
    turn.end()
    assert turn.text == "abcd"
    before_call = len(encoded("<think>no</think>ab"))
    whole = len(turn.tokens)
    assert [turn.text_of(count) for count in (0, 4, before_call, before_call + 5, whole)] == [
        "",
        "",
        "ab",
        "ab",
        "abcd",
    ]
    heard = [turn.tokens_of(characters) for characters in range(5)]
    assert heard == [0, before_call - 1, before_call, whole - 1, whole], "a call is kept whole or not at all"


@pytest.mark.parametrize("words", [WITH_MARKERS, PLAIN], ids=["tokens", "text"])
def test_a_cut_by_characters_never_halves_a_call(words: Tokenizer) -> None:
    said = f"ab <tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call> cd <tool_call>{CALL}</tool_call>"
    turn = stream(words=words)
    turn.push(encoded(said, words))
    turn.end()
    for characters in range(len(turn.text) + 1):
        kept = stream(words=words)
        kept.push(turn.tokens[: turn.tokens_of(characters)])
        kept.end()
        assert all(call.outcome is Outcome.COMPLETE for call in kept.answer().calls)
        assert turn.text.startswith(kept.text) and len(kept.text) <= characters


@pytest.mark.parametrize("words", [WITH_MARKERS, PLAIN], ids=["tokens", "text"])
def test_settled_tokens_are_those_outside_a_call(words: Tokenizer) -> None:
    before = encoded("ab ", words)
    first = encoded(f"<tool_call>{CALL}</tool_call>", words)
    second = encoded(f"\n<tool_call>{CALL}", words)
    turn = stream(words=words)
    settled: list[int] = []
    for token in [*before, *first, *second]:
        turn.push([token])
        settled.append(turn.settled_tokens)
    assert settled[: len(before)] == list(range(1, len(before) + 1))
    inside = settled[len(before) : len(before) + len(first) - 1]
    assert set(inside) == {len(before)}, "inside a call, and while one may begin"
    assert settled[len(before) + len(first) - 1] == len(before) + len(first)
    assert settled[-1] <= len(before) + len(first) + 1, "the second call is not closed"


def test_a_cut_inside_a_call_leaves_only_complete_calls() -> None:
    turn = stream()
    turn.push(encoded(f"ab<tool_call>{CALL}</tool_call><tool_call>" + CALL[:-4]))
    turn.end(cut=True)
    assert isinstance(turn.events[-1], CallEnd) and turn.events[-1].outcome is Outcome.CUT
    kept = turn.answer(turn.settled_tokens)
    assert [call.outcome for call in kept.calls] == [Outcome.COMPLETE] and kept.text == "ab"
    assert kept.call_ends == (turn.settled_tokens - 1,), "a call ends before the marker that closes it"
    turn.end()
    assert turn.answer(turn.settled_tokens) == kept


def test_a_call_that_ran_out_of_tokens_is_reported_as_cut() -> None:
    turn = stream()
    turn.push(encoded("<tool_call>" + CALL[:-4]))
    turn.end()
    assert [call.outcome for call in turn.answer().calls] == [Outcome.CUT]
    assert turn.answer().complete_calls == ()


def test_reasoning_is_counted_and_its_budget_ends_it() -> None:
    close = WITH_MARKERS.token_of("</think>")
    turn = stream(AnswerSpec(None, "think", thinking_tokens=3))
    taken = turn.push(encoded("<think>abcdef"))
    assert taken == encoded("<think>abc"), "what follows the budget is not taken"
    assert turn.constraint is not None and turn.constraint.forced() == [close]
    assert turn.push([close or -1]) == [close] and turn.constraint.free
    turn.push([*encoded("so"), END])
    assert turn.answer() == Answer("so", "abc", reasoning_tokens=3)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_budget_of_nothing_ends_reasoning_at_once(is_open: bool) -> None:
    turn = stream(AnswerSpec(None, "think", reasoning_is_open=is_open, thinking_tokens=0))
    if not is_open:
        turn.push(encoded("<think>"))
    assert turn.constraint is not None and turn.constraint.forced() == encoded("</think>")


def test_an_end_marker_of_several_tokens_is_forced_once() -> None:
    turn = stream(AnswerSpec(None, "think", reasoning_is_open=True, thinking_tokens=2), PLAIN)
    marker = encoded("</think>", PLAIN)
    assert len(marker) > 3 and turn.constraint is not None
    turn.push(encoded("abc", PLAIN))
    assert turn.tokens == encoded("ab", PLAIN) and turn.constraint.forced() == marker
    for place, token in enumerate(marker):
        assert turn.push([token]) == [token]
        assert turn.constraint.forced() == marker[place + 1 :]
    turn.push([*encoded("c", PLAIN), END])
    assert (turn.text, turn.answer().reasoning) == ("c", "ab")


def test_a_second_thought_is_closed_at_once() -> None:
    turn = stream(AnswerSpec(None, "think", thinking_tokens=1))
    turn.push(encoded("<think>a"))
    turn.push(encoded("</think>b<think>"))
    assert turn.constraint is not None and turn.constraint.forced() == encoded("</think>")


def test_harmony_reasons_by_itself() -> None:
    words = encoder()
    marks = ("<|channel|>", "<|message|>", "<|call|>", "<|return|>", "<|constrain|>")
    words.add_special_tokens([AddedToken(mark, special=True) for mark in (*marks, "<|end|>", "<|start|>")])
    made = Tokenizer(words, template=TEMPLATE, names={}, eos_tokens=(END,))
    turn = TurnStream(
        made,
        Sampling(stop_token_ids=[made.token_of("<|call|>") or -1], ignore_eos=True),
        (END,),
        constraint=TurnConstraint(None),
        reader=AnswerReader(AnswerSpec("harmony", thinking_tokens=2), made),
    )
    turn.push(made.encode("<|channel|>analysis<|message|>abc", add_special_tokens=False))
    assert turn.constraint is not None and turn.constraint.forced() == [END]
    turn.push([END])
    rest = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
    turn.push(made.encode(rest, add_special_tokens=False))
    answer = turn.answer()
    assert (answer.reasoning, answer.reasoning_tokens, turn.finish) == ("ab", 2, "stop")
    assert [(call.name, call.outcome) for call in answer.calls] == [("f", Outcome.COMPLETE)]


def test_a_constraint_sees_exactly_the_tokens_of_the_turn() -> None:
    class Seen(TurnConstraint):
        seen: list[int]

        def accept(self, tokens: object) -> None:
            self.seen += tokens  # type: ignore[operator]

    seen = Seen(None)
    seen.seen = []
    turn = TurnStream(WITH_MARKERS, Sampling(stop=["c"]), (END,), constraint=seen)
    turn.push(encoded("abcd"))
    assert seen.seen == turn.tokens == encoded("abc")
    assert turn.answer() == Answer("ab") and turn.events == []


def test_places_of_one_part_among_others() -> None:
    places = Places()
    places.add(3, 2)
    places.add(5, 1)
    places.add(9, 2)
    assert [places.before(place) for place in (0, 3, 4, 6, 8, 9, 10, 11, 99)] == [0, 0, 1, 3, 3, 3, 4, 5, 5]
    assert [places.end_of(count) for count in (0, 1, 3, 4, 5, 9)] == [0, 4, 6, 10, 11, 11]


@pytest.mark.parametrize("spec", [AnswerSpec("telepathy"), AnswerSpec(None, "telepathy")])
def test_an_unknown_format_is_refused(spec: AnswerSpec) -> None:
    with pytest.raises(UnknownFormat, match="telepathy"):
        AnswerReader(spec, PLAIN)
