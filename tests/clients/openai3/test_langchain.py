"""langchain-openai: `bind_tools` and `with_structured_output` of ChatOpenAI."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.clients.recording import Recorder
from tests.clients.shown import shows
from tests.clients.travel import QUESTION, City, Tools, Trip, assert_valid


@pytest.fixture
def model(url: str) -> ChatOpenAI:
    return ChatOpenAI(
        model="smollm2", base_url=url, api_key="none", temperature=0, max_tokens=200, max_retries=0
    )


def offered(tools: Tools) -> list[Any]:
    @tool
    def weather(city: City, days: int) -> str:
        """The weather of a city for some days."""
        return tools.weather(city, min(max(days, 1), 7))

    @tool
    def price(city: City) -> str:
        """The price of a journey to a city, in euros."""
        return tools.price(city)

    return [weather, price]


@shows("langchain-openai", "chat completions", "two rounds")
def test_a_loop_of_two_rounds(model: ChatOpenAI, recorder: Recorder, tools: Tools) -> None:
    functions = offered(tools)
    by_name = {function.name: function for function in functions}
    messages: list[Any] = [HumanMessage(QUESTION)]
    for name in ("weather", "price"):
        answer = model.bind_tools(functions, tool_choice=name).invoke(messages)
        assert [call["name"] for call in answer.tool_calls] == [name]
        assert answer.invalid_tool_calls == []
        messages.append(answer)
        messages += [by_name[call["name"]].invoke(call) for call in answer.tool_calls]
    assert isinstance(messages[-1], ToolMessage)
    last = model.bind_tools(functions, tool_choice="none").invoke(messages)
    assert last.tool_calls == []
    assert [name for name, _ in tools.calls] == ["weather", "price"]
    recorder.assert_loop(2)


def test_any_tool_and_parallel_calls(model: ChatOpenAI, tools: Tools) -> None:
    answer = model.bind_tools(offered(tools), tool_choice="any").invoke([HumanMessage(QUESTION)])
    assert answer.tool_calls
    assert {call["name"] for call in answer.tool_calls} <= {"weather", "price"}
    assert answer.invalid_tool_calls == []


@shows("langchain-openai", "chat completions", "streamed calls")
def test_a_streamed_call(model: ChatOpenAI, tools: Tools) -> None:
    whole: AIMessageChunk | None = None
    for chunk in model.bind_tools(offered(tools), tool_choice="price").stream([HumanMessage(QUESTION)]):
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    (call,) = whole.tool_calls
    assert_valid("price", call["args"])
    assert len(whole.tool_call_chunks) == 1


@shows("langchain-openai", "chat completions", "structured output")
def test_structured_output_in_its_default_mode(model: ChatOpenAI, recorder: Recorder) -> None:
    trip = model.with_structured_output(Trip).invoke("Plan a trip to Rome for two days.")
    assert isinstance(trip, Trip)
    assert recorder.requests[-1]["response_format"]["type"] == "json_schema"


@pytest.mark.parametrize("method", ["function_calling", "json_mode"])
def test_structured_output_in_its_other_modes(model: ChatOpenAI, method: Any) -> None:
    prompt = 'Plan a trip to Rome as JSON: {"city": "Rome", "days": 2, "cheap": true}.'
    structured = model.with_structured_output(Trip, method=method, include_raw=True)
    answer = structured.invoke(prompt)
    if method == "function_calling":
        assert isinstance(answer["parsed"], Trip)
    else:
        assert isinstance(answer["parsed"], Trip) or answer["parsing_error"] is not None
        assert answer["raw"].content.lstrip().startswith("{")
