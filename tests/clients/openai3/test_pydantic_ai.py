"""pydantic-ai: an agent with tools and a typed output, whose default is a tool of its own."""

from __future__ import annotations

import asyncio

import pytest
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from tests.clients.recording import Recorder
from tests.clients.shown import shows
from tests.clients.travel import QUESTION, City, Tools, Trip

SETTINGS = ModelSettings(temperature=0, max_tokens=200)


@pytest.fixture
def model(url: str) -> OpenAIChatModel:
    return OpenAIChatModel("smollm2", provider=OpenAIProvider(base_url=url, api_key="none"))


@shows("pydantic-ai-slim", "chat completions", "structured output")
def test_typed_output_in_its_default_mode(model: OpenAIChatModel, recorder: Recorder) -> None:
    result = Agent(model, output_type=Trip, model_settings=SETTINGS).run_sync("Plan a trip to Rome.")
    assert isinstance(result.output, Trip)
    assert recorder.requests[-1]["tool_choice"] == "required"
    assert recorder.refused == []


def test_tools_beside_a_typed_output(model: OpenAIChatModel, recorder: Recorder, tools: Tools) -> None:
    """Every answer is a call, of a tool or of the output: the loop ends with the output, or at its limit."""
    agent = Agent(model, output_type=Trip, model_settings=SETTINGS, retries=3)

    @agent.tool_plain
    def price(city: City) -> str:
        """The price of a journey to a city, in euros."""
        return tools.price(city)

    try:
        result = agent.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=4))
    except UsageLimitExceeded:
        assert len(tools.calls) >= 4
    else:
        assert isinstance(result.output, Trip)
    assert recorder.refused == []
    assert all(request["tool_choice"] == "required" for request in recorder.requests)


def test_an_agent_with_tools_of_its_own_choice(
    model: OpenAIChatModel, recorder: Recorder, tools: Tools
) -> None:
    agent = Agent(model, model_settings=SETTINGS)

    @agent.tool_plain
    def price(city: City) -> str:
        """The price of a journey to a city, in euros."""
        return tools.price(city)

    try:
        result = agent.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=4))
    except (UsageLimitExceeded, UnexpectedModelBehavior):
        assert tools.calls
    else:
        assert isinstance(result.output, str)
        parts = [part for message in result.all_messages() for part in message.parts]
        called = sum(isinstance(part, ToolCallPart) for part in parts)
        assert called == sum(isinstance(part, ToolReturnPart) for part in parts) == len(tools.calls)
    assert recorder.refused == []


async def streamed(agent: Agent[None, Trip]) -> tuple[int, Trip]:
    async with agent.run_stream("Plan a trip to Oslo.") as result:
        pieces = [piece async for piece in result.stream_output(debounce_by=None)]
        return len(pieces), await result.get_output()


@shows("pydantic-ai-slim", "chat completions", "streamed calls")
def test_a_streamed_output(model: OpenAIChatModel) -> None:
    pieces, trip = asyncio.run(streamed(Agent(model, output_type=Trip, model_settings=SETTINGS)))
    assert isinstance(trip, Trip)
    assert pieces >= 1
