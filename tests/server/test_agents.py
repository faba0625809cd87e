"""OpenAI's client, unchanged, as agents use it: tool calls and reasoning, whole and streamed.

`caller` repeats what it is told, so a test says the very call or thought that it wants to see.
"""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.agents import BERN, OSLO, TOOLS, called, calling, user
from tests.server.openai_client import openai_client
from tests.server.serving import Server


@pytest.fixture
def client(caller: Server) -> Iterator[openai.OpenAI]:
    with openai_client(caller) as client:
        yield client


# --- tools ----------------------------------------------------------------------------------------


def test_a_tools_loop_with_two_rounds(client: openai.OpenAI) -> None:
    """Each result is what the model says next, in its wrapping: the first one is another call."""
    messages = [user(calling("weather", BERN))]
    results = [calling("sing", {"loud": True}), "Bern has rain."]
    seen: list[tuple[str, Any]] = []
    while True:
        answer = client.chat.completions.create(model="echo", messages=messages, tools=TOOLS)
        choice = answer.choices[0]
        messages.append(choice.message.model_dump(exclude_none=True))
        if choice.finish_reason != "tool_calls":
            break
        for call in choice.message.tool_calls or []:
            assert call.type == "function" and call.id
            messages.append({"role": "tool", "tool_call_id": call.id, "content": results.pop(0)})
        seen += called(choice.message)
    assert seen == [("weather", BERN), ("sing", {"loud": True})]
    assert choice.finish_reason == "stop" and "Bern has rain." in (choice.message.content or "")
    ids = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert len(set(ids)) == 2


def test_parallel_calls_with_text_around_them(client: openai.OpenAI) -> None:
    text = f"One moment.\n{calling('weather', BERN)}\n{calling('weather', OSLO)}"
    answer = client.chat.completions.create(model="echo", messages=[user(text)], tools=TOOLS, n=2)
    for choice in answer.choices:
        assert choice.message.content is not None and choice.message.content.strip() == "One moment."
        assert called(choice.message) == [("weather", BERN), ("weather", OSLO)]
        assert choice.finish_reason == "tool_calls"
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == 4, "choices are answers of their own"


def test_streamed_calls(client: openai.OpenAI) -> None:
    text = f"Wait.\n{calling('weather', BERN)}\n{calling('sing', {'loud': False})}"
    stream = client.chat.completions.create(
        model="echo", messages=[user(text)], tools=TOOLS, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas).strip() == "Wait."
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for delta in deltas:
        for call in delta.tool_calls or []:
            assert call.function is not None
            if call.function.name is not None:
                assert call.id and call.type == "function" and call.index not in names
                names[call.index] = call.function.name
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert names == {0: "weather", 1: "sing"}
    assert [json.loads(arguments[index]) for index in (0, 1)] == [BERN, {"loud": False}]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "tool_calls" and not any(reasons[:-1])
    assert chunks[-1].usage is not None


def test_the_stream_helper_puts_calls_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="echo", messages=[user(calling("weather", BERN))], tools=TOOLS
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert called(message) == [("weather", BERN)] and not message.content


def test_calls_that_are_broken_or_cut(client: openai.OpenAI) -> None:
    broken = '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>'
    answer = client.chat.completions.create(model="echo", messages=[user(broken)], tools=TOOLS).choices[0]
    assert answer.finish_reason == "stop"
    (call,) = answer.message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    text = calling("weather", BERN)
    limit = text.index("Bern")
    answer = client.chat.completions.create(
        model="echo", messages=[user(text)], tools=TOOLS, max_tokens=limit
    ).choices[0]
    assert answer.finish_reason == "length"
    (call,) = answer.message.tool_calls or []
    assert call.type == "function" and call.function.arguments.startswith('{"city":')


def test_without_tools_a_call_is_text(client: openai.OpenAI) -> None:
    text = calling("weather", BERN)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = client.chat.completions.create(
            model="echo", messages=[user(text)], extra_body=fields
        ).choices[0]
        assert (answer.message.content, answer.finish_reason) == (text, "stop")
        assert answer.message.tool_calls is None


def test_log_probabilities_are_of_all_tokens(client: openai.OpenAI) -> None:
    text = f"<think>Hm.</think>Yes.{calling('weather', BERN)}"
    answer = client.chat.completions.create(
        model="echo", messages=[user(text)], tools=TOOLS, logprobs=True
    ).choices[0]
    assert answer.logprobs is not None and answer.logprobs.content is not None
    spelled = "".join(entry.token for entry in answer.logprobs.content)
    assert spelled.startswith(text)
    stream = client.chat.completions.create(
        model="echo", messages=[user(text)], tools=TOOLS, logprobs=True, stream=True
    )
    streamed = [
        entry.token
        for chunk in stream
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else None) or []
    ]
    assert "".join(streamed) == spelled


# --- reasoning ------------------------------------------------------------------------------------


def test_reasoning_is_apart_and_counted(client: openai.OpenAI) -> None:
    text = "<think>It is a greeting.</think>Hello!"
    answer = client.chat.completions.create(model="echo", messages=[user(text)])
    message: Any = answer.choices[0].message
    assert message.content.strip() == "Hello!"
    assert message.reasoning_content == message.reasoning == "It is a greeting."
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    thought = answer.usage.completion_tokens_details.reasoning_tokens
    assert thought is not None and len("It is a greeting.") <= thought < answer.usage.completion_tokens - 5
    deltas: list[Any] = [
        chunk.choices[0].delta
        for chunk in client.chat.completions.create(model="echo", messages=[user(text)], stream=True)
    ]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "It is a greeting."
    assert "".join(delta.content or "" for delta in deltas).strip() == "Hello!"


def test_reasoning_that_is_not_separate_is_text(client: openai.OpenAI) -> None:
    text = "<think>Hm.</think>Hello!"
    answer = client.chat.completions.create(
        model="echo", messages=[user(text)], extra_body={"separate_reasoning": False}
    )
    assert answer.choices[0].message.content == text
    stream = client.chat.completions.create(
        model="echo", messages=[user(text)], extra_body={"stream_reasoning": False}, stream=True
    )
    thoughts: list[Any] = [chunk.choices[0].delta for chunk in stream]
    assert [delta.reasoning for delta in thoughts if hasattr(delta, "reasoning")] == ["Hm."]
