"""Responses over a WebSocket, with OpenAI's client: lanes, steering, and what is not stored."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.agents import BERN, TOOLS, calling
from tests.server.openai_client import openai_client
from tests.server.serving import Server

FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
LONG = {"max_output_tokens": 6000, "ignore_eos": True}


@pytest.fixture
def client(responder: Server) -> Iterator[openai.OpenAI]:
    with openai_client(responder) as client:
        yield client


@pytest.fixture
def connection(client: openai.OpenAI) -> Iterator[Any]:
    # A client with unread events waits for its whole timeout when it closes.
    options: Any = {"close_timeout": 0.2}
    with client.responses.connect(websocket_connection_options=options) as connection:
        yield connection


def create(connection: Any, said: Any, **fields: Any) -> None:
    connection.send({"type": "response.create", "model": "echo", "input": said, **fields})


def until(connection: Any, kind: str) -> list[Any]:
    """Events up to the first of a kind."""
    events = []
    while not events or events[-1].type != kind:
        events.append(connection.recv())
        assert events[-1].type != "error" or kind == "error", events[-1]
    return events


def finished(connection: Any) -> Any:
    return until(connection, "response.completed")[-1].response


def test_responses_on_one_connection(connection: Any, client: openai.OpenAI) -> None:
    create(connection, "one")
    events = until(connection, "response.completed")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    first = events[-1].response
    assert events[0].type == "response.created" and first.output_text == "one"
    create(connection, "two", previous_response_id=first.id)
    second = finished(connection)
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens
    assert client.responses.retrieve(second.id).output_text == "two"


def test_what_is_not_stored_is_continued_on_its_connection(client: openai.OpenAI) -> None:
    stored = client.responses.create(model="echo", input="kept")
    with client.responses.connect() as connection:
        create(connection, "one", store=False, previous_response_id=stored.id)
        first = finished(connection)
        create(connection, "two", store=False, previous_response_id=first.id)
        second = finished(connection)
        assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)
    with client.responses.connect() as connection:
        create(connection, "three", previous_response_id=second.id)
        error = until(connection, "error")[-1]
        assert (error.status, error.error.code) == (404, "previous_response_not_found")
        create(connection, "on", previous_response_id=stored.id)
        after = finished(connection)
        assert after.usage.input_tokens_details.cached_tokens == stored.usage.total_tokens


def test_lanes_run_beside_each_other(connection: Any) -> None:
    create(connection, "x" * 40, stream_id="slow", **LONG)
    begun = connection.recv()
    assert (begun.type, begun.stream_id) == ("response.created", "slow")
    create(connection, "quick", stream_id="fast")
    create(connection, "after", stream_id="fast")
    ends = []
    while len(ends) < 2:
        event = connection.recv()
        if event.type == "response.completed":
            ends.append((event.stream_id, event.response.output_text))
    assert ends == [("fast", "quick"), ("fast", "after")]


def test_steering_cuts_a_response_and_another_follows(connection: Any, client: openai.OpenAI) -> None:
    create(connection, "x" * 40, instructions="Be terse.", **LONG)
    begun = until(connection, "response.output_text.delta")
    first = begun[0].response.id
    connection.response.steer(input="Wait, say this.", previous_response_id=first)
    events = until(connection, "response.incomplete")
    (accepted,) = [event for event in events if event.type == "response.steer.accepted"]
    assert accepted.steer.previous_response_id == first
    cut = events[-1].response
    assert cut.id == first and cut.incomplete_details.reason == "steered"
    pieces = [event.delta for event in [*begun, *events] if event.type == "response.output_text.delta"]
    assert cut.output_text == "".join(pieces)
    assert client.responses.retrieve(first).output_text == cut.output_text, "what was said stays"
    follows = until(connection, "response.output_text.delta")
    assert follows[0].type == "response.created"
    successor = follows[0].response
    assert (successor.previous_response_id, successor.instructions) == (first, "Be terse.")
    (said,) = client.responses.input_items.list(successor.id)
    assert said.content[0].text == "Wait, say this."
    assert follows[-1].delta.startswith("W")


def test_steering_waits_for_the_results_of_calls(connection: Any) -> None:
    """The response ends in a call before it can be cut, or is cut before it: both are right."""
    create(connection, calling("weather", BERN), tools=FLAT)
    first = connection.recv().response.id
    connection.response.steer(input="And hurry.", previous_response_id=first)
    while True:
        event = connection.recv()
        if event.type in ("response.steer.pending", "response.completed") and event.type.endswith("pending"):
            break
        if event.type == "response.completed" and event.response.id != first:
            assert "And hurry." in event.response.output_text
            return
    (required,) = event.required_input
    assert (required.type, required.name) == ("function_call_output", "weather")
    result = {"type": "function_call_output", "call_id": required.call_id, "output": "rain"}
    create(connection, [result], tools=FLAT, previous_response_id=first)
    assert "And hurry." in finished(connection).output_text


@pytest.mark.parametrize(
    ("steer", "code"),
    [
        ({"previous_response_id": "resp_x", "input": "x"}, "response_not_found"),
        ({"input": []}, "invalid_input"),
        ({"input": [{"role": "system", "content": "x"}]}, "invalid_input"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "invalid_input"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_steering_that_is_refused(connection: Any, steer: Any, code: str) -> None:
    create(connection, "x" * 40, **LONG)
    target = connection.recv().response.id
    connection.send({"type": "response.steer", "previous_response_id": target, **steer})
    failed = until(connection, "response.steer.failed")[-1]
    assert failed.error.code == code and len(failed.steer.input) == len(steer["input"])


def test_a_response_of_a_conversation_is_not_steered(connection: Any, client: openai.OpenAI) -> None:
    create(connection, "x" * 40, conversation=client.conversations.create().id, **LONG)
    target = connection.recv().response.id
    connection.response.steer(input="x", previous_response_id=target)
    assert until(connection, "response.steer.failed")[-1].error.code == "steering_not_supported"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("", None),
        ("[]", None),
        ("{}", "type"),
        ('{"type": "session.update"}', "type"),
        ('{"type": "response.create"}', "input"),
        ('{"type": "response.create", "input": "x", "background": true}', "background"),
        ('{"type": "response.create", "input": "x", "generate": false}', "generate"),
        ('{"type": "response.create", "input": "x", "previous_response_id": "y"}', "previous_response_id"),
        ('{"type": "response.create", "input": ' + "[" * 500 + "]" * 500 + "}", None),
        ('{"type": "response.steer", "input": "x"}', "previous_response_id"),
        ('{"type": "response.steer", "previous_response_id": "x", "input": 7}', "input"),
        ('{"type": "response.create", "input": "x", "stream_id": "' + "x" * 500 + '"}', "stream_id"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_messages_are_refused_and_the_connection_stays(
    connection: Any, message: str, param: str | None
) -> None:
    connection._connection.send(message)
    error = json.loads(connection._connection.recv())
    assert (error["type"], error["status"]) == (
        "error",
        400 if param != "previous_response_id" else error["status"],
    )
    assert param is None or error["error"]["param"] == param
    create(connection, "still here")
    assert finished(connection).output_text == "still here"


def test_a_connection_that_is_lost_takes_its_responses_back(responder: Server, client: openai.OpenAI) -> None:
    stored = client.responses.create(model="echo", input="kept")
    with client.responses.connect() as connection:
        create(connection, "x" * 40, previous_response_id=stored.id, **LONG)
        assert connection.recv().type == "response.created"
    while True:
        after = client.responses.create(model="echo", input="on", previous_response_id=stored.id)
        assert after.usage is not None and stored.usage is not None
        if after.usage.input_tokens_details.cached_tokens == stored.usage.total_tokens:
            break
    assert responder.get("/v1/memory").json()["findings"] == []
