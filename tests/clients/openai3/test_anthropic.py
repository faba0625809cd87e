"""Anthropic's own client: messages with tools, streamed and whole, parsed outputs, counting, and errors."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_tool

from tests.clients.conftest import serving
from tests.clients.recording import Recorder
from tests.clients.shown import shows
from tests.clients.travel import (
    PRICE_PARAMETERS,
    QUESTION,
    WEATHER_PARAMETERS,
    City,
    Tools,
    Trip,
    assert_valid,
)

ROOT = Path(__file__).parents[3]
SIZES = ("--kv-tokens", "8192", "--context-length", "2048", "--seed", "7")
PLAIN: dict[str, Any] = {"model": "smollm2", "max_tokens": 200, "extra_body": {"temperature": 0}}
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city for some days.",
    "input_schema": WEATHER_PARAMETERS,
}
PRICE: Any = {
    "name": "price",
    "description": "The price of a journey to a city, in euros.",
    "input_schema": PRICE_PARAMETERS,
    "cache_control": {"type": "ephemeral"},
}
SYSTEM: Any = [
    {"type": "text", "text": "You plan trips.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
]


@pytest.fixture
def client(recorder: Recorder) -> Anthropic:
    return Anthropic(base_url=recorder.url, api_key="none", max_retries=0, timeout=300)


def named(name: str) -> Any:
    return {"type": "tool", "name": name, "disable_parallel_tool_use": True}


def calls_of(message: Any) -> list[Any]:
    return [block for block in message.content if block.type == "tool_use"]


def results(message: Any, tools: Tools) -> Any:
    return {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": call.id, "content": tools.answer(call.name, call.input)}
            for call in calls_of(message)
        ],
    }


@shows("anthropic", "Messages", "two turns")
def test_two_turns_and_what_the_second_finds_cached(client: Anthropic, recorder: Recorder) -> None:
    messages: list[Any] = [{"role": "user", "content": "Name a city in Italy."}]
    first = client.messages.create(messages=messages, system=SYSTEM, **PLAIN)
    assert first.content[0].type == "text" and first.stop_reason in ("end_turn", "max_tokens")
    messages += [first.to_param(), {"role": "user", "content": [{"type": "text", "text": "Another one?"}]}]
    second = client.messages.create(messages=messages, system=SYSTEM, **PLAIN)
    assert (second.usage.cache_read_input_tokens or 0) > first.usage.input_tokens
    assert recorder.refused == []


@shows("anthropic", "Messages", "two rounds")
def test_a_loop_of_two_rounds(client: Anthropic, recorder: Recorder, tools: Tools) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for name in ("weather", "price"):
        answer = client.messages.create(
            messages=messages, tools=[WEATHER, PRICE], tool_choice=named(name), **PLAIN
        )
        assert answer.stop_reason == "tool_use" and [call.name for call in calls_of(answer)] == [name]
        messages += [answer.to_param(), results(answer, tools)]
    last = client.messages.create(
        messages=messages, tools=[WEATHER, PRICE], tool_choice={"type": "none"}, **PLAIN
    )
    assert calls_of(last) == [] and last.stop_reason in ("end_turn", "max_tokens")
    assert [name for name, _ in tools.calls] == ["weather", "price"] and recorder.refused == []


@shows("anthropic", "Messages", "streamed calls")
def test_the_streaming_helper_collects_a_call(client: Anthropic) -> None:
    with client.messages.stream(
        messages=[{"role": "user", "content": QUESTION}],
        tools=[WEATHER],
        tool_choice=named("weather"),
        **PLAIN,
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and "input_json" in kinds and kinds[-1] == "message_stop"
    (call,) = calls_of(final)
    assert_valid(call.name, call.input)
    assert final.usage.output_tokens > 0 and final.usage.input_tokens + (
        final.usage.cache_read_input_tokens or 0
    )


def test_an_eager_tool_streams_pieces_of_its_input(client: Anthropic) -> None:
    tool = {**WEATHER, "eager_input_streaming": True}
    stream = client.messages.create(
        messages=[{"role": "user", "content": QUESTION}],
        tools=[tool],
        tool_choice=named("weather"),
        stream=True,
        **PLAIN,
    )
    deltas = [event.delta for event in stream if event.type == "content_block_delta"]
    pieces = [delta.partial_json for delta in deltas if delta.type == "input_json_delta"]
    assert len(pieces) > 1
    assert_valid("weather", json.loads("".join(pieces)))


def test_text_streams_and_a_client_that_leaves_is_no_error(client: Anthropic) -> None:
    ask: Any = [{"role": "user", "content": "Tell a long story."}]
    with client.messages.stream(messages=ask, **PLAIN) as stream:
        assert next(iter(stream.text_stream))
    with client.messages.stream(messages=ask, **{**PLAIN, "max_tokens": 20}) as stream:
        assert stream.get_final_text() == "".join(
            block.text for block in stream.get_final_message().content if block.type == "text"
        )


def test_the_tool_runner_goes_on_until_the_model_has_answered(client: Anthropic, tools: Tools) -> None:
    """It asks for a thread first, and goes on without one."""

    @beta_tool
    def price(city: City) -> str:
        """The price of a journey to a city, in euros."""
        return tools.price(city)

    runner = client.beta.messages.tool_runner(
        messages=[{"role": "user", "content": "What does Rome cost?"}],
        tools=[price],
        tool_choice=named("price"),
        max_iterations=2,
        **PLAIN,
    )
    answers = list(runner)
    assert len(answers) == 2 and all(answer.stop_reason == "tool_use" for answer in answers)
    assert [name for name, _ in tools.calls][:1] == ["price"]


@shows("anthropic", "Messages", "structured output")
def test_parsed_output(client: Anthropic, recorder: Recorder) -> None:
    answer = client.messages.parse(
        messages=[{"role": "user", "content": "Plan a trip to Rome for two days."}],
        output_format=Trip,
        **PLAIN,
    )
    assert isinstance(answer.parsed_output, Trip)
    assert recorder.requests[-1]["output_config"]["format"]["type"] == "json_schema"


def test_counted_tokens_are_those_of_the_answer(client: Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    counted = client.messages.count_tokens(
        model="smollm2", messages=messages, system=SYSTEM, tools=[WEATHER, PRICE]
    )
    usage = client.messages.create(messages=messages, system=SYSTEM, tools=[WEATHER, PRICE], **PLAIN).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_thinking_is_accepted_where_the_model_has_none(client: Anthropic) -> None:
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, {"type": "disabled"}):
        chosen: Any = thinking
        answer = client.messages.create(
            messages=[{"role": "user", "content": "Say hello."}], thinking=chosen, **PLAIN
        )
        assert answer.content


def test_errors_are_the_clients_exceptions(client: Anthropic) -> None:
    ask: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(messages=ask, **{**PLAIN, "model": "another"})
    assert missing.value.type == "not_found_error" and missing.value.request_id
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(messages=[], **PLAIN)
    assert bad.value.type == "invalid_request_error" and "messages" in (bad.value.api_message or "")
    image: Any = [{"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}]
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(messages=[{"role": "user", "content": image}], **PLAIN)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(messages=[{"role": "user", "content": "word " * 5000}], **PLAIN)


def test_models(client: Anthropic) -> None:
    (model,) = client.models.list()
    assert model.id == "smollm2" and model.created_at.year >= 2026
    assert client.models.retrieve("smollm2").max_input_tokens == 4096
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("another")


def test_an_answer_goes_on_where_the_client_began_it(client: Anthropic) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Say hello."},
        {"role": "assistant", "content": "Hello, "},
    ]
    answer = client.messages.create(messages=messages, **PLAIN)
    whole = client.messages.count_tokens(model="smollm2", messages=messages)
    assert answer.content and whole.input_tokens == answer.usage.input_tokens + (
        answer.usage.cache_read_input_tokens or 0
    )


def test_the_asynchronous_client(recorder: Recorder) -> None:
    async def run() -> list[str]:
        async with AsyncAnthropic(base_url=recorder.url, api_key="none", max_retries=0) as client:

            async def ask(city: str) -> str:
                question: Any = [{"role": "user", "content": f"Where is {city}?"}]
                async with client.messages.stream(messages=question, **{**PLAIN, "max_tokens": 20}) as stream:
                    return await stream.get_final_text()

            return list(await asyncio.gather(*map(ask, ("Rome", "Oslo", "Paris"))))

    assert all(asyncio.run(run())) and recorder.refused == []


def test_a_conversation_goes_on_after_a_restart_of_the_server(tmp_path: Path, tools: Tools) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for choice in (named("weather"), {"type": "none"}):
        with serving(tmp_path / "errors", "smollm2", *SIZES, "--journal", str(tmp_path / "journal")) as url:
            client = Anthropic(base_url=url, api_key="none", max_retries=0)
            answer = client.messages.create(messages=messages, tools=[WEATHER], tool_choice=choice, **PLAIN)
        if answer.stop_reason == "tool_use":
            messages += [answer.to_param(), results(answer, tools)]
    assert len(tools.calls) == 1 and calls_of(answer) == [] and answer.content


def test_the_examples_of_the_documentation_run(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "messages.md").read_text().replace("http://127.0.0.1:8000", recorder.url)
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(example, "messages.md", "exec"), {})
    assert capsys.readouterr().out.startswith("tool_use weather {")
    command, _ = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    said = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout
    assert json.loads(said)["type"] == "message" and recorder.refused == []
