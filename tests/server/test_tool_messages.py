"""Tools, calls, results and reasoning over HTTP and WebSockets, in every dialect that has them."""

from typing import Any

import pytest

from tests.server.serving import Server
from tests.server.talking import Talk

LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
BRIEF = {"max_tokens": 2}


def refused(answer: Any, param: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["message"].startswith(param), error


def test_a_conversation_with_calls_and_results_is_answered(echo: Server) -> None:
    body = {"messages": [USER, CALLED, RESULT], "tools": [LOOK], **BRIEF}
    assert echo.post("/v1/chat/completions", body).status_code == 200
    assert echo.post("/v1/chat/completions", {**body, "tool_choice": "none"}).status_code == 200
    thought = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
    assert echo.post("/v1/chat/completions", {"messages": [USER, thought, USER], **BRIEF}).status_code == 200


def test_tokenize_shows_what_tools_add(echo: Server) -> None:
    plain = echo.post("/tokenize", {"messages": [USER]}).json()["count"]
    answer = echo.post("/tokenize", {"messages": [USER], "tools": [LOOK]}).json()
    assert answer["count"] > plain
    assert "Looks." in echo.post("/detokenize", {"tokens": answer["tokens"]}).json()["text"]
    refused(
        echo.post("/tokenize", {"messages": [USER], "chat_template_kwargs": {"tools": []}}),
        "chat_template_kwargs.tools",
    )


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([USER, RESULT], "[1].tool_call_id"),
        ([USER, CALLED, {**RESULT, "tool_call_id": "c2"}], "[2].tool_call_id"),
        ([USER, CALLED, {"role": "tool", "content": "rain"}], "[2].tool_call_id"),
        ([USER, CALLED, {**RESULT, "content": None}], "[2].content"),
        ([{**USER, "tool_calls": [CALL]}], "[0].tool_calls"),
        ([{**USER, "tool_call_id": "c1"}], "[0].tool_call_id"),
        ([{**USER, "reasoning_content": "hm"}], "[0].reasoning_content"),
        ([USER, {**CALLED, "tool_calls": [{"id": "c1"}]}], "[1].tool_calls[0].function"),
        ([USER, {**CALLED, "tool_calls": [{**CALL, "id": ""}]}], "[1].tool_calls[0].id"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages_that_do_not_fit_together_are_refused_with_their_place(
    echo: Server, messages: list[dict[str, Any]], place: str
) -> None:
    refused(echo.post("/v1/chat/completions", {"messages": messages, **BRIEF}), f"messages{place}")
    body = {"input": messages, "append_history": True, "sampling": BRIEF}
    refused(echo.post(f"/v1/sessions/{echo.open()}/turns", body), f"input{place}")


def test_a_session_has_its_tools_from_its_opening_or_its_first_turn(echo: Server) -> None:
    asks = {"sampling": {"max_tokens": 2}}
    opened, late = echo.open(tools=[LOOK]), echo.open()
    sizes = {}
    for session, tools in ((opened, {}), (late, {"tools": [LOOK]})):
        sizes[session] = echo.say(session, "hello", **asks, **tools)["usage"]["prompt_tokens"]
        echo.say(session, "again", **asks, tools=[LOOK])
        other = {"type": "function", "function": {"name": "go"}}
        refused(
            echo.post(f"/v1/sessions/{session}/turns", {"input": "x", "tools": [other]}),
            "tools",
        )
    assert sizes[opened] == sizes[late]
    refused(echo.post("/v1/sessions", {"tools": [{"type": "function"}]}), "tools[0].function")
    turn = {"messages": [USER], "tools": [LOOK], "session_id": echo.open(), **BRIEF}
    assert echo.post("/v1/chat/completions", turn).status_code == 200


def test_a_grammar_that_cannot_be_used_is_refused_by_every_dialect_with_its_own_name(echo: Server) -> None:
    session = echo.open()
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    place = "response_format.json_schema.schema"
    chat = {"messages": [USER], **BRIEF}
    refused(echo.post("/v1/chat/completions", {**chat, "response_format": bad}), place)
    refused(echo.post("/v1/completions", {"prompt": "x", "response_format": bad}), place)
    refused(echo.post(f"/v1/sessions/{session}/turns", {"input": "x", "response_format": bad}), place)
    grammar = {"kind": "json_schema", "value": {"not": {}}}
    refused(echo.post(f"/v1/sessions/{session}/turns", {"input": "x", "grammar": grammar}), "grammar.value")
    vllm = {"structured_outputs": {"choice": []}}
    refused(echo.post("/v1/chat/completions", {**chat, **vllm}), "structured_outputs.choice")
    native = {"text": "x", "sampling_params": {"json_schema": "{"}}
    refused(echo.post("/generate", native), "sampling_params.json_schema")
    both = {**chat, "regex": "a", "ebnf": 'root ::= "a"'}
    refused(echo.post("/v1/chat/completions", both), "ebnf")


def test_a_realtime_turn_may_be_messages_and_a_session_opened_with_tools(echo: Server) -> None:
    with Talk(echo) as talk:
        talk.open(tools=[LOOK])
        talk.say("input.append", messages=[USER])
        talk.say("input.append", text="x")
        assert talk.refused()["param"] == "text"
        talk.say("input.append", messages=[USER])
        talk.say("input.commit", sampling=BRIEF, tool_choice="none")
        assert talk.hear("response.done")["usage"]["prompt_tokens"] > 100
        talk.say("input.append", messages=[RESULT])
        talk.say("input.commit", sampling=BRIEF)
        assert talk.refused()["param"] == "input[0].tool_call_id"
