"""`holdfast chat` with tools, formats and reasoning: a process in a terminal, against a scripted server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.answer_options import AnswerAsked, AnswerOptions
from holdfast.engine.options import OptionError
from tests.client.scripted import Answer, Scripted, answer, delta, result, spoken, stream
from tests.engine.terminal import Terminal

PROMPT = r"(?<!\w)> $"
TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "price", "arguments": '{"city": "Rome"}'}}
MODEL = answer({"data": [{"id": "m"}]})
OPENED = answer({"id": "s"})


def ended(text: str, *tokens: int, **fields: object) -> bytes:
    body = {**result(text, *tokens, finish_reason=str(fields.pop("finish_reason", "stop"))), **fields}
    return f"event: done\ndata: {json.dumps(body)}\n\n".encode()


def calling() -> Answer:
    """A turn that thinks, and calls one tool."""
    return stream(
        spoken("reasoning.delta", index=0, text="Rome is ", token_ids=[1], settled_tokens=1),
        spoken("reasoning.delta", index=1, text="a city.", token_ids=[2], settled_tokens=2),
        spoken("tool_call", index=0, id="call_1", name="price", token_ids=[3], settled_tokens=2),
        spoken("tool_call.delta", index=0, arguments='{"city": ', token_ids=[4], settled_tokens=2),
        spoken("tool_call.delta", index=0, arguments='"Rome"}', token_ids=[5], settled_tokens=2),
        spoken(
            "tool_call.done",
            index=0,
            id="call_1",
            name="price",
            arguments='{"city": "Rome"}',
            outcome="complete",
            token_ids=[6],
            settled_tokens=6,
        ),
        ended(
            "",
            *range(1, 7),
            finish_reason="tool_calls",
            reasoning="Rome is a city.",
            tool_calls=[CALL],
        ),
    )


def saying(text: str) -> Answer:
    return stream(delta(text, 7), ended(text, 7))


def tools_file(tmp_path: Path, tools: object = (TOOL,)) -> str:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(tools if not isinstance(tools, tuple) else list(tools)))
    return str(path)


def test_a_call_is_shown_and_its_result_is_typed(tmp_path: Path) -> None:
    script = (MODEL, OPENED, calling(), saying("120 euros."), answer({"id": "s"}))
    options = ("--tools", tools_file(tmp_path), "--tool-choice", "price", "--thinking-tokens", "50")
    with Scripted(*script) as server, Terminal("chat", "--url", server.url, *options) as terminal:
        terminal.until(PROMPT)
        terminal.type("what does Rome cost?\n")
        shown = terminal.until(r"result of price> $")
        assert "[thought 15 characters; /thinking shows them]\n" in shown
        assert 'calls price {"city": "Rome"}\n' in shown
        assert "Rome is a city" not in shown
        terminal.type("120\n")
        assert "120 euros.\n" in terminal.until(PROMPT)
        terminal.type("/quit\n")
        assert terminal.end()[0] == 0
    _, opened, said, results, _ = server.asked
    assert opened.body["tools"] == [TOOL]
    assert said.body["tool_choice"] == {"type": "function", "function": {"name": "price"}}
    assert (said.body["thinking_tokens"], results.body["thinking_tokens"]) == (50, 50)
    assert results.body["input"] == [{"role": "tool", "tool_call_id": "call_1", "content": "120"}]
    assert "tool_choice" not in results.body, "after a result the model chooses for itself"


def test_reasoning_is_unfolded_by_a_command(tmp_path: Path) -> None:
    script = (MODEL, OPENED, calling(), answer({"id": "s"}))
    with (
        Scripted(*script) as server,
        Terminal("chat", "--url", server.url, "--tools", tools_file(tmp_path)) as terminal,
    ):
        terminal.until(PROMPT)
        terminal.type("/thinking\n")
        terminal.until("no reasoning to show")
        terminal.until(PROMPT)
        terminal.type("hello\n")
        terminal.until(r"result of price> $")
        terminal.type("\n")
        terminal.until("the calls stay unanswered")
        terminal.until(PROMPT)
        terminal.type("/thinking\n")
        terminal.until(r"Rome is a city\.")
        terminal.until(PROMPT)
        terminal.type("/quit\n")
        assert terminal.end()[0] == 0


def test_reasoning_is_shown_as_it_comes_if_asked() -> None:
    script = (MODEL, OPENED, calling(), answer({"id": "s"}))
    options = ("--show-thinking", "--no-thinking")
    with Scripted(*script) as server, Terminal("chat", "--url", server.url, *options) as terminal:
        terminal.until(PROMPT)
        terminal.type("hello\n")
        assert "Rome is a city.\ncalls price " in terminal.until(r"result of price> $")
        terminal.type("\x04")
        terminal.until("the calls stay unanswered")
        terminal.until(PROMPT)
        terminal.type("/quit\n")
        assert terminal.end()[0] == 0
    assert server.asked[2].body["thinking"] is False


def test_a_call_that_is_cut_says_so() -> None:
    cut = stream(
        spoken("tool_call", index=0, id="call_1", name="price", token_ids=[3], settled_tokens=0),
        spoken("tool_call.delta", index=0, arguments='{"ci', token_ids=[4], settled_tokens=0),
        spoken(
            "tool_call.done",
            index=0,
            id="call_1",
            name="price",
            arguments='{"ci',
            outcome="cut",
            token_ids=[],
            settled_tokens=0,
        ),
        ended("", 3, 4, finish_reason="length"),
    )
    with (
        Scripted(MODEL, OPENED, cut, answer({"id": "s"})) as server,
        Terminal("chat", "--url", server.url) as terminal,
    ):
        terminal.until(PROMPT)
        terminal.type("hello\n")
        assert 'calls price {"ci  [cut: not a whole call]\n' in terminal.until(PROMPT)
        terminal.type("/quit\n")
        assert terminal.end()[0] == 0


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_format_is_sent_with_every_turn(tmp_path: Path, wrapped: bool) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    whole = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    path = tmp_path / "format.json"
    path.write_text(json.dumps(whole if wrapped else schema))
    asked = AnswerAsked.read(AnswerOptions(response_format=str(path)))
    assert asked.said == asked.results == {"response_format": whole}


@pytest.mark.parametrize(
    ("content", "fields", "problem"),
    [
        ("[", {}, "--tools {path} is not JSON: Expecting value: line 1 column 2 (char 1)"),
        ("{}", {}, "--tools {path}: tools: must be an array"),
        ('[{"type": "web"}]', {}, "--tools {path}: tools[0].type: must be 'function', not 'web'"),
        (json.dumps([TOOL]), {"tool_choice": "weather"}, "--tool-choice "),
        (json.dumps([TOOL]), {"thinking_tokens": -1}, "--thinking-tokens must be at least 0, not -1"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    tmp_path: Path, content: str, fields: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "tools.json"
    path.write_text(content)
    with pytest.raises(OptionError) as caught:
        AnswerAsked.read(AnswerOptions(tools=str(path), **fields))
    assert caught.value.typed.startswith(problem.format(path=path))


def test_a_choice_without_tools_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="needs --tools"):
        AnswerAsked.read(AnswerOptions(tool_choice="required"))
    with pytest.raises(OptionError, match="cannot be read"):
        AnswerAsked.read(AnswerOptions(response_format=str(tmp_path / "absent.json")))
