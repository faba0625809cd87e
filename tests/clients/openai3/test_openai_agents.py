"""openai-agents over chat completions: the runner's loop, streamed and not, and a typed output."""

from __future__ import annotations

import asyncio

import pytest
from agents import (
    Agent,
    AsyncOpenAI,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import MaxTurnsExceeded

from tests.clients.recording import Recorder
from tests.clients.shown import shows
from tests.clients.travel import QUESTION, City, Tools, Trip

set_tracing_disabled(disabled=True)


@pytest.fixture
def model(url: str) -> OpenAIChatCompletionsModel:
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    return OpenAIChatCompletionsModel(model="smollm2", openai_client=client)


def offered(tools: Tools) -> list[object]:
    @function_tool
    def price(city: City) -> str:
        """The price of a journey to a city, in euros."""
        return tools.price(city)

    return [price]


def test_the_loop_calls_a_tool_and_sends_its_result_back(
    model: OpenAIChatCompletionsModel, recorder: Recorder, tools: Tools
) -> None:
    """After its first call an agent chooses for itself again: the loop ends, or reaches its limit."""
    settings = ModelSettings(temperature=0, max_tokens=120, tool_choice="required")
    agent = Agent(name="travel", model=model, tools=offered(tools), model_settings=settings)
    try:
        asyncio.run(Runner.run(agent, QUESTION, max_turns=3))
    except MaxTurnsExceeded:
        assert len(recorder.requests) >= 3
    assert tools.calls and tools.calls[0][0] == "price"
    assert recorder.requests[0]["tool_choice"] == "required"
    recorder.assert_loop(1)


@shows("openai-agents", "chat completions", "two rounds")
def test_two_rounds_of_required_calls(
    model: OpenAIChatCompletionsModel, recorder: Recorder, tools: Tools
) -> None:
    settings = ModelSettings(temperature=0, max_tokens=120, tool_choice="required", parallel_tool_calls=False)
    agent = Agent(
        name="travel", model=model, tools=offered(tools), model_settings=settings, reset_tool_choice=False
    )
    with pytest.raises(MaxTurnsExceeded):
        asyncio.run(Runner.run(agent, QUESTION, max_turns=3))
    assert len(tools.calls) == 3
    recorder.assert_loop(2)


@shows("openai-agents", "chat completions", "streamed calls")
def test_a_streamed_run(model: OpenAIChatCompletionsModel, recorder: Recorder, tools: Tools) -> None:
    async def run() -> list[str]:
        settings = ModelSettings(temperature=0, max_tokens=120, tool_choice="required")
        agent = Agent(name="travel", model=model, tools=offered(tools), model_settings=settings)
        result = Runner.run_streamed(agent, QUESTION, max_turns=2)
        kinds: list[str] = []
        try:
            async for event in result.stream_events():
                kinds += [event.name if event.type == "run_item_stream_event" else event.type]
        except MaxTurnsExceeded:
            kinds.append("limit")
        return kinds

    kinds = asyncio.run(run())
    assert "tool_called" in kinds and "tool_output" in kinds
    assert all(request["stream"] for request in recorder.requests)
    assert recorder.refused == []
    assert tools.calls


@shows("openai-agents", "chat completions", "structured output")
def test_a_typed_output_in_its_default_mode(model: OpenAIChatCompletionsModel, recorder: Recorder) -> None:
    settings = ModelSettings(temperature=0, max_tokens=200)
    agent = Agent(name="planner", model=model, output_type=Trip, model_settings=settings)
    result = asyncio.run(Runner.run(agent, "Plan a trip to Rome."))
    assert isinstance(result.final_output, Trip)
    assert recorder.requests[-1]["response_format"]["type"] == "json_schema"
