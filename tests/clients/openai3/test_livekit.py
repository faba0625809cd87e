"""livekit-agents: the LLM of its openai plugin, alone and in a session that runs functions, without audio."""

from __future__ import annotations

import asyncio
from typing import Any

from livekit.agents import Agent, AgentSession, function_tool
from livekit.agents.llm import ChatContext, FunctionCall, FunctionCallOutput
from livekit.plugins import openai

from tests.clients.recording import Recorder
from tests.clients.shown import shows
from tests.clients.travel import QUESTION, City, Tools, Trip, assert_valid


def model(url: str, **fields: Any) -> openai.LLM:
    return openai.LLM(
        model="smollm2", base_url=url, api_key="none", temperature=0, max_completion_tokens=150, **fields
    )


def offered(tools: Tools) -> list[Any]:
    @function_tool
    async def price(city: City) -> str:
        """The price of a journey to a city, in euros."""
        return tools.price(city)

    return [price]


async def ask(
    llm: openai.LLM, context: ChatContext, functions: list[Any], choice: Any
) -> tuple[str, list[Any]]:
    """The text and the calls of one streamed answer."""
    text, calls = "", []
    async with llm.chat(chat_ctx=context, tools=functions, tool_choice=choice) as stream:
        async for chunk in stream:
            if chunk.delta is not None:
                text += chunk.delta.content or ""
                calls += chunk.delta.tool_calls
    return text, calls


@shows("livekit-agents", "chat completions", "two rounds", "streamed calls")
def test_two_rounds_and_an_answer(url: str, recorder: Recorder, tools: Tools) -> None:
    async def run() -> str:
        async with model(url) as llm:
            context = ChatContext.empty()
            context.add_message(role="user", content=QUESTION)
            functions = offered(tools)
            for _ in range(2):
                _, calls = await ask(llm, context, functions, "required")
                assert calls
                for call in calls:
                    output = tools.price(**assert_valid(call.name, call.arguments))
                    context.insert(
                        FunctionCall(call_id=call.call_id, name=call.name, arguments=call.arguments)
                    )
                    context.insert(
                        FunctionCallOutput(
                            call_id=call.call_id, name=call.name, output=output, is_error=False
                        )
                    )
            text, calls = await ask(llm, context, functions, "none")
            assert calls == []
            return text

    assert asyncio.run(run())
    assert len(tools.calls) >= 2
    recorder.assert_loop(2)


def test_a_session_runs_a_function_and_goes_on(url: str, recorder: Recorder, tools: Tools) -> None:
    async def run() -> None:
        async with model(url) as llm, AgentSession(llm=llm, max_tool_steps=2) as session:
            await session.start(
                Agent(instructions="Answer about journeys.", tools=offered(tools)), record=False
            )
            handle = session.generate_reply(user_input=QUESTION, tool_choice="required")
            await handle

    asyncio.run(run())
    assert tools.calls and tools.calls[0][0] == "price"
    assert recorder.refused == []
    assert any(message["role"] == "tool" for message in recorder.requests[-1]["messages"])


@shows("livekit-agents", "chat completions", "structured output")
def test_structured_output(url: str, recorder: Recorder) -> None:
    async def run() -> str:
        async with model(url) as llm:
            context = ChatContext.empty()
            context.add_message(role="user", content="Plan a trip to Rome.")
            text = ""
            async with llm.chat(chat_ctx=context, response_format=Trip) as stream:
                async for chunk in stream:
                    text += (chunk.delta.content or "") if chunk.delta is not None else ""
            return text

    assert isinstance(Trip.model_validate_json(asyncio.run(run())), Trip)
    assert recorder.requests[-1]["response_format"]["type"] == "json_schema"
