"""openai's own client: chat completions with tools, streamed and whole, and parsed outputs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from tests.clients.recording import Recorder
from tests.clients.shown import shows
from tests.clients.travel import PRICE, QUESTION, WEATHER, City, Tools, Trip, assert_valid

PLAIN: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 200}


@pytest.fixture
def client(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@shows("openai", "chat completions", "two rounds")
def test_a_loop_of_two_rounds(client: OpenAI, recorder: Recorder, tools: Tools) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for name in ("weather", "price"):
        answer = client.chat.completions.create(
            messages=messages, tools=[WEATHER, PRICE], tool_choice=named(name), **PLAIN
        )
        choice = answer.choices[0]
        # OpenAI ends an answer whose call was named with "stop", and so do clients accept both.
        assert choice.finish_reason in ("tool_calls", "stop")
        calls = choice.message.tool_calls
        assert calls is not None and [call.function.name for call in calls] == [name]
        messages.append(choice.message)
        for call in calls:
            result = tools.answer(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    last = client.chat.completions.create(
        messages=messages, tools=[WEATHER, PRICE], tool_choice="none", **PLAIN
    )
    assert last.choices[0].message.tool_calls is None
    assert last.choices[0].finish_reason in ("stop", "length")
    assert [name for name, _ in tools.calls] == ["weather", "price"]
    recorder.assert_loop(2)


def test_required_makes_a_call_of_any_tool(client: OpenAI, tools: Tools) -> None:
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": QUESTION}],
        tools=[WEATHER, PRICE],
        tool_choice="required",
        **PLAIN,
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls
    assert calls
    for call in calls:
        tools.answer(call.function.name, call.function.arguments)
    assert len({call.id for call in calls}) == len(calls)


def test_without_parallel_calls_there_is_one(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": QUESTION}],
        tools=[WEATHER, PRICE],
        tool_choice="required",
        parallel_tool_calls=False,
        **PLAIN,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None and len(calls) == 1
    assert_valid(calls[0].function.name, calls[0].function.arguments)


def test_results_of_parallel_calls_are_taken(client: OpenAI, recorder: Recorder) -> None:
    """Two calls of one message, answered in the other order."""
    calls = [
        {"id": "call_a", "type": "function", "function": {"name": "price", "arguments": '{"city": "Rome"}'}},
        {"id": "call_b", "type": "function", "function": {"name": "price", "arguments": '{"city": "Oslo"}'}},
    ]
    answer = client.chat.completions.create(
        messages=[
            {"role": "user", "content": "What do Rome and Oslo cost?"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call_b", "content": "200"},
            {"role": "tool", "tool_call_id": "call_a", "content": "120"},
        ],
        tools=[PRICE],
        **PLAIN,
    )
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert recorder.refused == []


@shows("openai", "chat completions", "streamed calls")
def test_a_streamed_call_has_its_name_first_and_then_its_arguments(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        messages=[{"role": "user", "content": QUESTION}],
        tools=[WEATHER, PRICE],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
        stream_options={"include_usage": True},
        **PLAIN,
    )
    pieces, reasons, usage = [], [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces += choice.delta.tool_calls or []
            reasons += [choice.finish_reason] if choice.finish_reason else []
    first, *rest = pieces
    assert first.index == 0 and first.id and first.function is not None and first.function.name
    assert rest, "the arguments come in pieces of their own"
    assert all(piece.index == 0 and piece.id is None for piece in rest)
    arguments = "".join(piece.function.arguments or "" for piece in pieces if piece.function)
    assert_valid(first.function.name, arguments)
    assert reasons == ["tool_calls"]
    assert usage is not None and usage.completion_tokens > 0


@shows("openai", "chat completions", "streamed calls")
def test_the_streaming_helper_collects_a_call(client: OpenAI) -> None:
    with client.chat.completions.stream(
        messages=[{"role": "user", "content": QUESTION}],
        tools=[pydantic_function_tool(Trip, name="book")],
        tool_choice=named("book"),
        **PLAIN,
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Trip)


def test_auto_ends_and_loses_nothing(client: OpenAI, recorder: Recorder, tools: Tools) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(4):
        message = (
            client.chat.completions.create(messages=messages, tools=[WEATHER, PRICE], **PLAIN)
            .choices[0]
            .message
        )
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            known = call.function.name in ("weather", "price")
            result = tools.answer(call.function.name, call.function.arguments) if known else "unknown tool"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert recorder.refused == []
    assert message.content or message.tool_calls


@shows("openai", "chat completions", "structured output")
def test_parsed_output(client: OpenAI, recorder: Recorder) -> None:
    answer = client.chat.completions.parse(
        messages=[{"role": "user", "content": "Plan a trip to Rome for two days."}],
        response_format=Trip,
        **PLAIN,
    )
    assert isinstance(answer.choices[0].message.parsed, Trip)
    assert recorder.requests[-1]["response_format"]["type"] == "json_schema"


def test_parsed_output_of_a_nested_type(client: OpenAI) -> None:
    class Journey(BaseModel):
        trips: list[Trip] = Field(max_length=2)
        home: City | None

    answer = client.chat.completions.parse(
        messages=[{"role": "user", "content": "Plan a journey."}],
        response_format=Journey,
        **{**PLAIN, "max_tokens": 1000},
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Journey)


def test_json_mode(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": "Answer as JSON: what is the capital of Italy?"}],
        response_format={"type": "json_object"},
        **{**PLAIN, "max_tokens": 600},
    )
    choice = answer.choices[0]
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)
    else:
        assert choice.finish_reason == "length" and (choice.message.content or "").startswith("{")
