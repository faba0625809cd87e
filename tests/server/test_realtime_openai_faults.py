"""Bad input on every event of OpenAI's realtime protocol, and lost connections."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.apart import until
from tests.server.bad_values import SECRET
from tests.server.openai_talking import Body, OpenAITalk, message, text_of
from tests.server.serving import Server

CREATE, RESPOND = "conversation.item.create", "response.create"
CUT = {"type": "conversation.item.truncate", "item_id": "asked"}


def item(**fields: Any) -> Body:
    return {"type": CREATE, "item": {"type": "message", "role": "user", "content": [], **fields}}


def update(**fields: Any) -> Body:
    return {"type": "session.update", "session": fields}


def respond(**fields: Any) -> Body:
    return {"type": RESPOND, "response": fields}


def tool(**fields: Any) -> list[Body]:
    return [{"type": "function", "name": "look", **fields}]


BAD: list[tuple[Body, str | None]] = [
    ({"type": SECRET}, "type"),
    ({"type": "session.open"}, "type"),
    ({"type": "session.update"}, "session"),
    ({"type": "session.update", "session": 7}, "session"),
    (update(type="transcription"), "session.type"),
    (update(instructions=7), "session.instructions"),
    (update(instructions="x" * 400_000), "session.instructions"),
    (update(output_modalities="text"), "session.output_modalities"),
    (update(output_modalities=[]), "session.output_modalities"),
    (update(modalities=["text", SECRET]), "session.modalities"),
    (update(temperature="warm"), "session.temperature"),
    (update(temperature=1e9), "session.temperature"),
    (update(max_output_tokens=0), "session.max_output_tokens"),
    (update(max_output_tokens=1 << 40), "session.max_output_tokens"),
    (update(max_output_tokens=True), "session.max_output_tokens"),
    (update(max_response_output_tokens=SECRET), "session.max_response_output_tokens"),
    (update(reasoning={"effort": SECRET}), "session.reasoning.effort"),
    (update(tools={}), "session.tools"),
    (update(tools=[7]), "session.tools[0]"),
    (update(tools=[{"type": "mcp", "server_label": SECRET}]), "session.tools[0].type"),
    (update(tools=[{"type": "function"}]), "session.tools[0].name"),
    (update(tools=tool(parameters=7)), "session.tools[0].parameters"),
    (update(tools=tool(function=7)), "session.tools[0].function"),
    (update(tool_choice=SECRET), "session.tool_choice"),
    (update(tool_choice={"type": "mcp"}), "session.tool_choice.type"),
    (update(tool_choice={"type": "function", "name": 7}), "session.tool_choice.name"),
    (update(parallel_tool_calls="yes"), "session.parallel_tool_calls"),
    (update(audio={"input": "x" * 20_000}), "session.audio"),
    (update(voice=["x"] * 2000), "session.voice"),
    ({"type": CREATE}, "item"),
    ({"type": CREATE, "item": {}}, "item.type"),
    ({"type": CREATE, "item": {"type": SECRET}}, "item.type"),
    (item(role=SECRET), "item.role"),
    (item(role="tool"), "item.role"),
    (item(content=None), "item.content"),
    (item(content="hello"), "item.content"),
    (item(content=[{"type": SECRET}]), "item.content[0].type"),
    (item(content=[{"type": "input_text"}]), "item.content[0].text"),
    (item(content=[{"type": "input_text", "text": 7}]), "item.content[0].text"),
    (item(content=[{"type": "input_audio", "audio": SECRET}]), "item.content[0].type"),
    (item(content=[{"type": "input_image", "image_url": SECRET}]), "item.content[0].type"),
    (item(content=[{"type": "input_text", "text": "x" * 400_000}]), "item.content[0].text"),
    (item(id="no spaces"), "item.id"),
    (item(id="x" * 200), "item.id"),
    (item(id="asked"), "item.id"),
    ({**item(), "previous_item_id": SECRET}, "previous_item_id"),
    ({**item(), "previous_item_id": 7}, "previous_item_id"),
    ({"type": CREATE, "item": {"type": "function_call", "arguments": "{}"}}, "item.name"),
    ({"type": CREATE, "item": {"type": "function_call_output", "output": "x"}}, "item.call_id"),
    ({"type": CREATE, "item": {"type": "function_call_output", "call_id": "c"}}, "item.output"),
    (
        {"type": CREATE, "item": {"type": "function_call_output", "call_id": SECRET, "output": "x"}},
        "item.call_id",
    ),
    ({"type": "conversation.item.retrieve"}, "item_id"),
    ({"type": "conversation.item.retrieve", "item_id": SECRET}, "item_id"),
    ({"type": "conversation.item.delete", "item_id": SECRET}, "item_id"),
    ({"type": "conversation.item.delete", "item_id": ["x"]}, "item_id"),
    ({**CUT, "item_id": SECRET}, "item_id"),
    (CUT, "item_id"),
    ({**CUT, "item_id": "answer", "content_index": 1}, "content_index"),
    ({**CUT, "item_id": "answer", "audio_end_ms": 1500}, "audio_end_ms"),
    ({**CUT, "item_id": "answer", "audio_end_ms": -1}, "audio_end_ms"),
    ({**CUT, "item_id": "answer", "text_end": "x"}, "text_end"),
    ({**CUT, "item_id": "answer", "tokens": 1}, "tokens"),
    ({"type": RESPOND, "response": 7}, "response"),
    (respond(conversation=SECRET), "response.conversation"),
    (respond(input={}), "response.input"),
    (respond(input=[{"type": "item_reference", "id": SECRET}]), "response.input[0].id"),
    (respond(input=[{"type": "message", "role": SECRET}]), "response.input[0].role"),
    (respond(metadata=7), "response.metadata"),
    (respond(metadata={"x": "y" * 100_000}), "response.metadata"),
    (respond(instructions=[]), "response.instructions"),
    (respond(tools=[{"type": "function"}]), "response.tools[0].name"),
    (respond(tool_choice="required"), "tool_choice"),
    (respond(tools=tool(), tool_choice={"type": "function", "name": "other"}), "tool_choice.function.name"),
    (respond(max_output_tokens=-1), "response.max_output_tokens"),
    ({"type": "response.cancel"}, None),
    ({"type": "response.cancel", "response_id": SECRET}, "response_id"),
    ({"type": "response.cancel", "response_id": 7}, "response_id"),
]


@pytest.fixture(scope="module")
def talk(shared_caller: Server) -> Iterator[OpenAITalk]:
    """One connection for all bad events, with a message and an answer."""
    with OpenAITalk(shared_caller) as connection:
        connection.create(message("hello", id="asked"))
        connection.create(message("hello yourself", "assistant", id="answer"))
        yield connection


@pytest.mark.parametrize(("event", "param"), BAD, ids=lambda value: json.dumps(value)[:60])
def test_a_bad_event_is_answered_by_an_error_that_names_the_field(
    talk: OpenAITalk, event: Body, param: str | None
) -> None:
    error = talk.refused(event)
    assert error["param"] == param, error
    assert SECRET not in json.dumps(error)
    assert error["type"] == "invalid_request_error" and error["code"]


def test_the_connection_is_as_good_as_new_after_all_of_them(talk: OpenAITalk, caller: Server) -> None:
    talk.connection.send(b"binary")
    assert talk.hear("error")["error"]["code"] == "invalid_message"
    talk.connection.send("{")
    assert talk.hear("error")["error"]["code"] == "invalid_json"
    talk.connection.send('{"type": "response.create", "response": ' + "[" * 10_000 + "]" * 10_000 + "}")
    assert talk.hear("error")["error"]["param"] == "response"
    assert text_of(talk.ask("still here")) == "still here"
    assert caller.complaints() == []


def test_an_input_that_does_not_fit_changes_nothing(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        first = talk.ask("hello")
        for number in range(3):
            talk.create(message("x" * 6000, id=f"long-{number}"))
        error = talk.refused({"type": RESPOND})
        assert error["code"] == "context_length_exceeded" and error["param"] == "conversation"
        for number in range(3):
            name = f"long-{number}"
            talk.told({"type": "conversation.item.delete", "item_id": name}, "conversation.item.deleted")
        after = talk.ask("hello")
        assert after["usage"]["input_token_details"]["cached_tokens"] == first["usage"]["total_tokens"]


def test_a_name_that_is_none_is_refused_before_the_connection(caller: Server) -> None:
    with pytest.raises(Exception, match="400"):
        OpenAITalk(caller, "?model=any&session_id=no%20name")


def test_a_lost_connection_ends_its_response_and_its_session(caller: Server) -> None:
    talk = OpenAITalk(caller)
    talk.send(item(content=[{"type": "input_text", "text": "x" * 6000}]))
    talk.send({"type": RESPOND})
    talk.hear("response.output_text.delta")
    talk.connection.socket.close()
    until(lambda: caller.get("/v1/sessions").json()["sessions"] == [])
    caller.settle()
