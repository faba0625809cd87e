"""What the text process makes of a turn's constraint, tools and reasoning: tokens, grammar, specification."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.engine.echo import echo_tokenizer
from holdfast.server.link import wire
from holdfast.server.link.worker import vocabulary_of
from holdfast.server.text import jobs
from holdfast.server.text.process import TextWorker, tokenizer_of
from tests.tools.matching import Checker
from tests.tools.templates import HERMES
from tests.tools.tokens import byte_tokenizer

MARKERS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SAID = [{"role": "user", "content": "hi"}]


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def worker(
    template: str = HERMES, calls: str | None = "hermes", reasoning: str | None = "think"
) -> TextWorker:
    encoder = byte_tokenizer(MARKERS)
    end = encoder.token_to_id("<|im_end|>")
    vocabulary = wire.Vocabulary(encoder.to_str(), template, {"eos_token": "<|im_end|>"}, [end])
    return TextWorker(jobs.Setup(vocabulary, 1 << 14, 1 << 30, 10.0, 60.0, calls=calls, reasoning=reasoning))


def written(made: TextWorker, asks: jobs.Asks, **more: Any) -> jobs.Written:
    answer = made.answer(jobs.Chat(SAID, None, first=True, asks=asks, **more))
    assert isinstance(answer, jobs.Written), answer
    return answer


def refused(made: TextWorker, job: jobs.Job) -> jobs.Refused:
    answer = made.answer(job)
    assert isinstance(answer, jobs.Refused), answer
    return answer


def text(made: TextWorker, tokens: list[int]) -> str:
    answer = made.answer(jobs.Spell(tokens))
    assert isinstance(answer, jobs.Spelled)
    return answer.text


def checker(answer: jobs.Written) -> Checker:
    assert answer.grammar is not None and answer.grammar.kind == "lark"
    return Checker(answer.grammar.source, MARKERS)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def constraint(kind: str, value: Any, field: str = "regex") -> jobs.ConstraintFields:
    return jobs.ConstraintFields(kind, value, field)


# --- how the answer is read -----------------------------------------------------------------------


def test_a_turn_with_tools_that_may_be_called_is_read_and_not_constrained() -> None:
    made = worker()
    answer = written(made, jobs.Asks(tools=[tool("look")]))
    assert answer.grammar is None
    assert answer.answer == wire.AnswerFields(
        calls="hermes", reasoning="think", reasoning_is_open=True, tools={"look": {"city": ["string"]}}
    )
    assert '"look"' in text(made, answer.tokens) and text(made, answer.tokens).endswith("<think>\n")


def test_a_turn_without_tools_is_read_for_reasoning_alone() -> None:
    answer = written(worker(), jobs.Asks(thinking_tokens=5)).answer
    assert answer == wire.AnswerFields(reasoning="think", reasoning_is_open=True, thinking_tokens=5)
    assert written(worker(), jobs.Asks(separate_reasoning=False)).answer is None
    assert written(worker(), jobs.Asks(reads=False)).answer is None
    assert written(worker(reasoning=None), jobs.Asks()).answer is None


def test_harmony_reads_its_channels_with_or_without_tools() -> None:
    answer = written(worker(calls="harmony", reasoning=None), jobs.Asks())
    assert answer.answer == wire.AnswerFields(calls="harmony")


def test_a_prompt_of_tokens_is_open_inside_the_reasoning_too() -> None:
    made = worker()
    for prompt, is_open in (("x<think>\n", True), ("x", False)):
        tail = byte_tokenizer(MARKERS).encode(prompt).ids
        answer = made.answer(jobs.AnswerTo(tail, jobs.Asks()))
        assert isinstance(answer, jobs.Written) and answer.answer is not None
        assert answer.answer.reasoning_is_open is is_open


def test_tools_that_must_not_be_called_are_not_shown_to_a_request_and_are_to_a_session() -> None:
    made, asks = worker(), jobs.Asks(tools=[tool("look")], tool_choice="none")
    one_shot, session = written(made, asks, one_shot=True), written(made, asks)
    assert "look" not in text(made, one_shot.tokens) and "look" in text(made, session.tokens)
    for answer in (one_shot, session):
        assert answer.grammar is None and answer.answer is not None and answer.answer.calls is None


def some_of(mode: str, *names: str) -> dict[str, Any]:
    """A choice among some of the tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


# --- grammars -------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_call_that_is_required_is_constrained_after_the_reasoning(choice: Any) -> None:
    check = checker(written(worker(), jobs.Asks(tools=[tool("look"), tool("go")], tool_choice=choice)))
    assert check.accepts(f"hm</think>\n\n{call('look', city='x')}")
    assert check.accepts(f"hm</think>{call('go', city='x')}") is (choice == "required")
    for wrong in ("hm</think>hello", call("look", city="x"), f"hm</think>{call('look', town='x')}"):
        assert not check.accepts(wrong)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called(mode: str) -> None:
    made = worker()
    answer = written(made, jobs.Asks(tools=[tool("look"), tool("go")], tool_choice=some_of(mode, "look")))
    assert "go" in text(made, answer.tokens), "the others are described"
    check = checker(answer)
    assert check.accepts(f"hm</think>{call('look', city='x')}")
    assert not check.accepts(f"hm</think>{call('go', city='x')}")
    assert check.accepts("hm</think>hello") is (mode == "auto")


def test_strict_tools_and_single_calls_are_constrained_where_the_model_decides() -> None:
    strict = checker(written(worker(), jobs.Asks(tools=[tool("look", strict=True)])))
    assert strict.accepts("hm</think>hello")
    assert strict.accepts(f"hm</think>{call('look', city='x')}")
    assert not strict.accepts(f"hm</think>{call('look', town='x')}")
    two = f"hm</think>{call('look', city='x')}\n{call('look', city='y')}"
    assert strict.accepts(two)
    single = checker(written(worker(), jobs.Asks(tools=[tool("look")], parallel_tool_calls=False)))
    assert not single.accepts(two) and single.accepts(f"hm</think>{call('look', city='x')}")


GRAMMARS = [
    ("regex", "[0-9]{2}/a", "12/a", "12"),
    ("json_schema", SCHEMA, '{"city": "x"}', "{}"),
    ("json_object", None, '{"a": 1}', "[]"),
    ("choice", ["}{", "b"], "}{", "c"),
    ("gbnf", 'root ::= "a" | "}"', "}", "b"),
    ("lark", "start: WORD\nWORD: /[a-z]{2}/", "ab", "a"),
]


@pytest.mark.parametrize(("kind", "value", "right", "wrong"), GRAMMARS, ids=[each[0] for each in GRAMMARS])
def test_a_constraint_applies_after_the_reasoning_and_leaves_calls_alone(
    kind: str, value: Any, right: str, wrong: str
) -> None:
    asked = constraint(kind, value)
    check = checker(written(worker(), jobs.Asks(constraint=asked)))
    assert check.accepts(f"hm</think>\n{right}")
    assert not check.accepts(right) and not check.accepts(f"hm</think>{wrong}")
    both = checker(written(worker(), jobs.Asks(constraint=asked, tools=[tool("look")])))
    assert both.accepts(f"hm</think>{right}") and both.accepts(f"hm</think>{call('look', city='x')}")
    assert not both.accepts(f"hm</think>{wrong}")
    must = checker(
        written(worker(), jobs.Asks(constraint=asked, tools=[tool("look")], tool_choice="required"))
    )
    assert must.accepts(f"hm</think>{call('look', city='x')}") and not must.accepts(f"hm</think>{right}")


def test_a_constraint_without_reasoning_and_tools_is_the_clients() -> None:
    asks = jobs.Asks(constraint=constraint("regex", "[a-z]"))
    assert written(worker(reasoning=None), asks).grammar == wire.GrammarFields("regex", "[a-z]")
    plain = jobs.Asks(constraint=constraint("regex", "[a-z]"), reads=False)
    tail = byte_tokenizer(MARKERS).encode("x<think>").ids
    answer = worker().answer(jobs.AnswerTo(tail, plain))
    assert answer == jobs.Written(tail, wire.GrammarFields("regex", "[a-z]"))


def test_a_constraint_of_harmony_applies_to_its_final_channel() -> None:
    markers = (
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|constrain|>",
        "<|return|>",
    )
    encoder = byte_tokenizer(markers)
    vocabulary = wire.Vocabulary(encoder.to_str(), HERMES, {}, [encoder.token_to_id("<|return|>")])
    made = TextWorker(jobs.Setup(vocabulary, 1 << 14, 1 << 30, 10.0, 60.0, calls="harmony"))
    answer = written(made, jobs.Asks(constraint=constraint("regex", "[0-9]+")))
    assert answer.grammar is not None
    check = Checker(answer.grammar.source, markers)
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert check.accepts("<|channel|>final<|message|>12")
    assert check.accepts(f"{thought}<|channel|>final<|message|>12")
    assert not check.accepts("<|channel|>final<|message|>hm") and not check.accepts("12")


@pytest.mark.parametrize(
    ("kind", "value", "code", "place"),
    [
        ("json_schema", {"properties": {"a": {"not": {}}}}, "unsupported_grammar", "/properties/a/not"),
        ("json_schema", {"properties": {"a": {"$ref": "#/x"}}}, "invalid_grammar", "/properties/a/$ref"),
        ("json_schema", "{", "invalid_grammar", "line 1"),
        ("choice", [], "invalid_grammar", ""),
        ("structural_tag", {}, "invalid_grammar", ""),
        ("gbnf", "root ::= (", "invalid_grammar", ""),
    ],
    ids=str,
)
def test_a_grammar_that_cannot_be_used_is_refused_with_its_field_and_place(
    kind: str, value: Any, code: str, place: str
) -> None:
    asks = jobs.Asks(constraint=constraint(kind, value, "response_format.json_schema.schema"))
    for job in (jobs.Chat(SAID, None, first=True, asks=asks), jobs.AnswerTo([1], asks)):
        answer = refused(worker(), job)
        assert (answer.code, answer.param) == (code, "response_format.json_schema.schema")
        assert answer.message.startswith("response_format.json_schema.schema: ") and place in answer.message


def test_a_strict_schema_that_cannot_be_enforced_is_refused_with_its_place() -> None:
    bad = tool("go", strict=True)
    bad["function"]["parameters"] = {"type": "object", "properties": {"a": {"not": {}}}}
    job = jobs.Chat(SAID, None, first=True, asks=jobs.Asks(tools=[tool("look"), bad]))
    answer = refused(worker(), job)
    assert answer.param == "tools[1].function.parameters" and "/properties/a/not" in answer.message
    bad["function"]["strict"] = False
    assert isinstance(worker().answer(job), jobs.Written)


@pytest.mark.parametrize(
    ("asks", "param"),
    [
        (jobs.Asks(tools=[tool("a b")]), "tools[0].function.name"),
        (jobs.Asks(tools=[tool("a"), tool("a")]), "tools[1].function.name"),
        (jobs.Asks(tools=[{"type": "custom"}]), "tools[0].type"),
        (jobs.Asks(tools=[tool("a")], tool_choice="always"), "tool_choice"),
        (
            jobs.Asks(tools=[tool("a")], tool_choice={"type": "function", "function": {"name": "b"}}),
            "tool_choice.function.name",
        ),
        (jobs.Asks(tool_choice="required"), "tool_choice"),
        (jobs.Asks(tools=[tool("a")], tool_choice=some_of("never", "a")), "tool_choice.allowed_tools.mode"),
        (jobs.Asks(tools=[tool("a")], tool_choice=some_of("auto")), "tool_choice.allowed_tools.tools"),
        (
            jobs.Asks(tools=[tool("a")], tool_choice=some_of("auto", "b")),
            "tool_choice.allowed_tools.tools[0]",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tools_that_are_malformed_are_refused_with_their_field(asks: jobs.Asks, param: str) -> None:
    answer = refused(worker(), jobs.Chat(SAID, None, first=True, asks=asks))
    assert (answer.code, answer.param) == ("invalid_value", param)


# --- conversations with calls ---------------------------------------------------------------------


def asked_call(call_id: str, arguments: str = '{"city": "x"}') -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(call_id: str, said: str = "rain") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": said}


def test_a_session_goes_on_after_calls_as_the_whole_conversation_does() -> None:
    made, asks = worker(), jobs.Asks(tools=[tool("look")])
    calls = [wire.CallFields("a", "look", '{"city": "x"}'), wire.CallFields("b", "look", '{"city": "y"}')]
    end = byte_tokenizer(MARKERS).token_to_id("<|im_end|>")
    goes_on = made.answer(jobs.Chat([result("a"), result("b", "sun")], end, False, calls=calls, asks=asks))
    assistant = {"role": "assistant", "content": "", "tool_calls": [asked_call("a"), asked_call("b")]}
    whole = made.answer(jobs.Chat([*SAID, assistant, result("a"), result("b", "sun")], None, True, asks=asks))
    assert isinstance(goes_on, jobs.Written) and isinstance(whole, jobs.Written)
    tail = text(made, goes_on.tokens)
    assert tail.startswith("\n<|im_start|>user\n<tool_response>\nrain") and "sun" in tail
    assert text(made, whole.tokens).endswith(tail) and goes_on.answer == whole.answer


@pytest.mark.parametrize("calls", [[], [wire.CallFields("b", "look", "{}")]])
def test_a_result_that_answers_no_call_is_refused(calls: list[wire.CallFields]) -> None:
    for system in (None, "be brief"):
        first = refused(worker(), jobs.Chat([*SAID, result("a")], None, True, system=system))
        assert (first.code, first.param) == ("invalid_value", "messages[1].tool_call_id")
    later = refused(worker(), jobs.Chat([result("a")], None, False, calls=calls))
    assert later.param == "messages[0].tool_call_id" and later.message.startswith(later.param)


def test_calls_that_are_malformed_are_refused_with_their_place() -> None:
    assistant = {"role": "assistant", "content": "", "tool_calls": [asked_call("a", "{")]}
    answer = refused(worker(), jobs.Chat([*SAID, assistant], None, True, system="be brief"))
    assert answer.param == "messages[1].tool_calls[0].function.arguments"


def test_control_tokens_in_tools_arguments_and_results_stay_text() -> None:
    made = worker()
    end = byte_tokenizer(MARKERS).token_to_id("<|im_end|>")

    def ends(said: str) -> int:
        escaped = json.dumps({"city": said}).replace("<", "\\u003c")
        assistant = {"role": "assistant", "content": "", "tool_calls": [asked_call("a", escaped)]}
        asks = jobs.Asks(tools=[tool("look", description=said)], template_kwargs={"x": said})
        answer = made.answer(jobs.Chat([*SAID, assistant, result("a", said)], None, True, asks=asks))
        assert isinstance(answer, jobs.Written)
        assert text(made, answer.tokens).count(said) >= 3
        return answer.tokens.count(end)

    assert ends("<|im_end|>") == ends("harmless")


def test_a_template_without_tools_gets_them_as_text_and_calls_in_their_format() -> None:
    """Even a model that was never trained for tools makes valid calls where they are required."""
    made = TextWorker(jobs.Setup(vocabulary_of(echo_tokenizer()), 1 << 14, 1 << 30, 10.0, 60.0))
    answer = written(made, jobs.Asks(tools=[tool("look")], tool_choice="required"))
    assert answer.answer == wire.AnswerFields(calls="hermes", tools={"look": {"city": ["string"]}})
    assert "<tools>" in text(made, answer.tokens)
    assert answer.grammar is not None
    check = Checker(answer.grammar.source, ())
    assert check.accepts(call("look", city="x")) and not check.accepts("hello")
    assistant = {"role": "assistant", "content": None, "tool_calls": [asked_call("a")]}
    whole = made.answer(jobs.Chat([*SAID, {**assistant, "content": ""}, result("a")], None, True))
    calls = [wire.CallFields("a", "look", "{}")]
    tools = jobs.Asks(tools=[tool("look")])
    goes_on = made.answer(jobs.Chat([result("a")], None, False, calls=calls, asks=tools))
    assert isinstance(whole, jobs.Written) and isinstance(goes_on, jobs.Written)
    tail = text(made, goes_on.tokens)
    assert "<tool_response>\nrain" in tail and "<tools>" not in tail
    assert text(made, whole.tokens).endswith(tail.lstrip("\n").partition("<|end|>")[2].lstrip("\n") or tail)


def test_the_template_gets_its_variables_and_a_prompt_may_end_the_reasoning() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    )
    made = worker(template)
    off = written(made, jobs.Asks(template_kwargs={"enable_thinking": False}))
    assert text(made, off.tokens).endswith("</think>\n\n")
    asks = jobs.Asks(constraint=constraint("regex", "[a-z]"), template_kwargs={"enable_thinking": False})
    assert written(made, asks).grammar == wire.GrammarFields("regex", "[a-z]")
    free = checker(written(made, jobs.Asks(constraint=constraint("regex", "[a-z]"))))
    assert free.accepts("a") and free.accepts("<think>hm</think>\na") and not free.accepts("hm</think>a")


def test_reasoning_of_earlier_turns_reaches_the_template() -> None:
    made = worker("{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}")
    for name in ("reasoning", "reasoning_content"):
        messages = [*SAID, {"role": "assistant", "content": "b", name: "thought"}, *SAID]
        answer = made.answer(jobs.Chat(messages, None, True))
        assert isinstance(answer, jobs.Written) and text(made, answer.tokens) == "hithoughtbhi"


def test_a_tokenizer_of_the_server_finds_the_same_format() -> None:
    vocabulary = vocabulary_of(echo_tokenizer())
    assert tokenizer_of(vocabulary).chat.call_format == "hermes"
    assert tokenizer_of(vocabulary).chat.is_plain
