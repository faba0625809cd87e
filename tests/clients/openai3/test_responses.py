"""openai's own client and openai-agents on responses: their default interface, unchanged.

The agents run with nothing set but the address: responses are what they call by default.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from agents import (
    Agent,
    AsyncOpenAI,
    ModelSettings,
    OpenAIConversationsSession,
    OpenAIProvider,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import MaxTurnsExceeded
from openai import NotFoundError, OpenAI

from tests.clients.recording import Recorder
from tests.clients.shown import shows
from tests.clients.travel import PRICE, QUESTION, WEATHER, City, Tools, Trip, assert_valid

set_tracing_disabled(disabled=True)

PLAIN: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_output_tokens": 120}
FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in (WEATHER, PRICE)]


@pytest.fixture
def client(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)


@pytest.fixture
def config(url: str) -> RunConfig:
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)
    return RunConfig(model_provider=OpenAIProvider(openai_client=client), model="smollm2")


def offered(tools: Tools) -> list[Any]:
    @function_tool
    def price(city: City) -> str:
        """The price of a journey to a city, in euros."""
        return tools.price(city)

    return [price]


@shows("openai", "Responses", "two rounds")
def test_a_loop_of_two_rounds(client: OpenAI, recorder: Recorder, tools: Tools) -> None:
    said: Any = QUESTION
    previous = None
    for name in ("weather", "price"):
        answer = client.responses.create(
            input=said,
            tools=FLAT,
            tool_choice={"type": "function", "name": name},
            parallel_tool_calls=False,
            previous_response_id=previous,
            **PLAIN,
        )
        (call,) = [item for item in answer.output if item.type == "function_call"]
        result = tools.answer(call.name, call.arguments)
        said = [{"type": "function_call_output", "call_id": call.call_id, "output": result}]
        previous = answer.id
    last = client.responses.create(
        input=said, tools=FLAT, tool_choice="none", previous_response_id=previous, **PLAIN
    )
    assert last.output_text and last.status in ("completed", "incomplete")
    assert last.usage is not None and answer.usage is not None
    assert last.usage.input_tokens_details.cached_tokens == answer.usage.total_tokens
    assert [name for name, _ in tools.calls] == ["weather", "price"] and recorder.refused == []


@shows("openai", "Responses", "streamed calls")
def test_the_streaming_helper_collects_a_call(client: OpenAI) -> None:
    choice: dict[str, Any] = {"tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(input=QUESTION, **choice, **PLAIN) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.delta") > 1
    assert "response.function_call_arguments.done" in kinds
    (call,) = [item for item in final.output if item.type == "function_call"]
    assert_valid(call.name, call.arguments)


def test_a_stream_and_its_final_response(client: OpenAI) -> None:
    pieces = []
    with client.responses.stream(input="Say hello.", **{**PLAIN, "max_output_tokens": 400}) as stream:
        pieces += [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert len(pieces) > 1 and final.output_text == "".join(pieces)
    assert client.responses.retrieve(final.id).output_text == final.output_text


@shows("openai", "Responses", "structured output")
def test_a_parsed_output(client: OpenAI) -> None:
    answer = client.responses.parse(
        input="Plan a trip to Rome.",
        text_format=Trip,
        model="smollm2",
        temperature=0,
        max_output_tokens=200,
    )
    assert isinstance(answer.output_parsed, Trip)


def test_what_is_kept_of_a_response(client: OpenAI) -> None:
    answer = client.responses.create(input="Say hello.", metadata={"a": "b"}, **PLAIN)
    assert client.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    assert [item.type for item in client.responses.input_items.list(answer.id)] == ["message"]
    background = client.responses.create(input="Tell a story.", background=True, **PLAIN)
    assert client.responses.cancel(background.id).status in ("cancelled", "completed", "incomplete")
    client.responses.delete(answer.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(answer.id)


def test_a_conversation(client: OpenAI) -> None:
    made = client.conversations.create(items=[{"role": "user", "content": "My name is Ann."}])
    first = client.responses.create(input="Say hello.", conversation=made.id, **PLAIN)
    second = client.responses.create(input="Again.", conversation=made.id, **PLAIN)
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens
    assert len(list(client.conversations.items.list(made.id))) == 5
    assert client.conversations.delete(made.id).deleted


# --- openai-agents --------------------------------------------------------------------------------


def agent(tools: Tools, **settings: Any) -> Agent[Any]:
    chosen = ModelSettings(temperature=0, max_tokens=120, tool_choice="required", **settings)
    return Agent(name="travel", tools=offered(tools), model_settings=chosen, reset_tool_choice=False)


@shows("openai-agents", "Responses", "two rounds")
def test_agents_run_two_rounds(config: RunConfig, recorder: Recorder, tools: Tools) -> None:
    with pytest.raises(MaxTurnsExceeded):
        asyncio.run(
            Runner.run(agent(tools, parallel_tool_calls=False), QUESTION, max_turns=3, run_config=config)
        )
    assert len(tools.calls) == 3 and recorder.refused == []
    sent = recorder.requests[-1]["input"]
    calls = [item["call_id"] for item in sent if item.get("type") == "function_call"]
    results = [item["call_id"] for item in sent if item.get("type") == "function_call_output"]
    assert len(calls) == 2 and calls == results


def test_agents_continue_their_responses(config: RunConfig, recorder: Recorder, tools: Tools) -> None:
    with pytest.raises(MaxTurnsExceeded):
        asyncio.run(
            Runner.run(
                agent(tools, parallel_tool_calls=False),
                QUESTION,
                max_turns=3,
                run_config=config,
                auto_previous_response_id=True,
            )
        )
    assert len(tools.calls) == 3 and recorder.refused == []
    last = recorder.requests[-1]
    assert last["previous_response_id"].startswith("resp_")
    assert [item["type"] for item in last["input"]] == ["function_call_output"]


@shows("openai-agents", "Responses", "streamed calls")
def test_agents_stream(config: RunConfig, recorder: Recorder, tools: Tools) -> None:
    async def run() -> list[str]:
        calls_once = agent(tools, parallel_tool_calls=False)
        result = Runner.run_streamed(calls_once, QUESTION, max_turns=2, run_config=config)
        kinds: list[str] = []
        try:
            async for event in result.stream_events():
                kinds += [event.name if event.type == "run_item_stream_event" else event.type]
        except MaxTurnsExceeded:
            kinds.append("limit")
        return kinds

    kinds = asyncio.run(run())
    assert "tool_called" in kinds and "tool_output" in kinds and recorder.refused == []


@shows("openai-agents", "Responses", "structured output")
def test_agents_have_a_typed_output(config: RunConfig, recorder: Recorder) -> None:
    settings = ModelSettings(temperature=0, max_tokens=200)
    planner = Agent(name="planner", output_type=Trip, model_settings=settings)
    result = asyncio.run(Runner.run(planner, "Plan a trip to Rome.", run_config=config))
    assert isinstance(result.final_output, Trip) and recorder.refused == []
    assert json.loads(json.dumps(recorder.requests[-1]["text"]["format"]))["type"] == "json_schema"


def test_agents_keep_their_session_as_a_conversation(config: RunConfig, recorder: Recorder, url: str) -> None:
    async def run() -> tuple[int, int]:
        client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)
        session = OpenAIConversationsSession(openai_client=client)
        settings = ModelSettings(temperature=0, max_tokens=400)
        polite = Agent(name="polite", instructions="Be polite.", model_settings=settings)
        await Runner.run(polite, "Say hello.", session=session, run_config=config)
        before = len(await session.get_items())
        await Runner.run(polite, "Say goodbye.", session=session, run_config=config)
        after = len(await session.get_items())
        await session.clear_session()
        return before, after

    assert asyncio.run(run()) == (2, 4)
    assert recorder.refused == []


def test_agents_over_a_websocket(server_url: str, tools: Tools) -> None:
    client = AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0, timeout=300)
    provider = OpenAIProvider(openai_client=client, use_responses_websocket=True)
    config = RunConfig(model_provider=provider, model="smollm2")
    with pytest.raises(MaxTurnsExceeded):
        asyncio.run(
            Runner.run(
                agent(tools, parallel_tool_calls=False),
                QUESTION,
                max_turns=3,
                run_config=config,
                auto_previous_response_id=True,
            )
        )
    assert len(tools.calls) == 3
