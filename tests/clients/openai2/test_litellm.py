"""litellm: completions through its OpenAI provider, with tools, streamed, and with a response format."""

from __future__ import annotations

import json
from typing import Any

import litellm

from tests.clients.recording import Recorder
from tests.clients.shown import shows
from tests.clients.travel import PRICE, QUESTION, WEATHER, Tools, Trip, assert_valid


def ask(url: str, messages: list[Any], **fields: Any) -> Any:
    return litellm.completion(
        model="openai/smollm2",
        api_base=url,
        api_key="none",
        messages=messages,
        temperature=0,
        max_tokens=200,
        num_retries=0,
        **fields,
    )


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@shows("litellm", "chat completions", "two rounds")
def test_a_loop_of_two_rounds(url: str, recorder: Recorder, tools: Tools) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for name in ("weather", "price"):
        message = ask(url, messages, tools=[WEATHER, PRICE], tool_choice=named(name)).choices[0].message
        assert [call.function.name for call in message.tool_calls] == [name]
        messages.append(message)
        for call in message.tool_calls:
            result = tools.answer(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "name": name, "content": result})
    last = ask(url, messages, tools=[WEATHER, PRICE], tool_choice="none").choices[0]
    assert not last.message.tool_calls
    recorder.assert_loop(2)


def test_required_calls_may_be_several(url: str, tools: Tools) -> None:
    choice = ask(
        url, [{"role": "user", "content": QUESTION}], tools=[WEATHER, PRICE], tool_choice="required"
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls:
        tools.answer(call.function.name, call.function.arguments)
    assert tools.calls


@shows("litellm", "chat completions", "streamed calls")
def test_a_streamed_call(url: str) -> None:
    stream = ask(
        url,
        [{"role": "user", "content": QUESTION}],
        tools=[PRICE],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
    )
    whole = litellm.stream_chunk_builder(list(stream))
    (call,) = whole.choices[0].message.tool_calls
    assert call.id
    assert_valid(call.function.name, call.function.arguments)


@shows("litellm", "chat completions", "structured output")
def test_structured_output(url: str, recorder: Recorder) -> None:
    answer = ask(url, [{"role": "user", "content": "Plan a trip to Rome."}], response_format=Trip)
    assert isinstance(Trip.model_validate(json.loads(answer.choices[0].message.content)), Trip)
    assert recorder.requests[-1]["response_format"]["type"] == "json_schema"
    assert recorder.refused == []
