"""llama-index: OpenAILike with tools, streamed and not, and a structured model."""

from typing import Any

import pytest
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.clients.recording import Recorder
from tests.clients.shown import shows
from tests.clients.travel import QUESTION, City, Tools, Trip, assert_valid


@pytest.fixture
def llm(url: str) -> OpenAILike:
    return OpenAILike(
        model="smollm2",
        api_base=url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=4096,
        temperature=0.0,
        max_tokens=200,
        max_retries=0,
    )


def offered(tools: Tools) -> list[FunctionTool]:
    def price(city: City) -> str:
        """The price of a journey to a city, in euros."""
        return tools.price(city)

    return [FunctionTool.from_defaults(price)]


@shows("llama-index-llms-openai-like", "chat completions", "two rounds")
def test_a_loop_of_two_rounds(llm: OpenAILike, recorder: Recorder, tools: Tools) -> None:
    functions = offered(tools)
    history = [ChatMessage(role=MessageRole.USER, content=QUESTION)]
    for _ in range(2):
        answer = llm.chat_with_tools(functions, chat_history=list(history), tool_required=True)
        calls = llm.get_tool_calls_from_response(answer)
        assert [call.tool_name for call in calls] == ["price"]
        history.append(answer.message)
        for call in calls:
            result = functions[0].call(**assert_valid("price", call.tool_kwargs)).content
            extra = {"tool_call_id": call.tool_id}
            history.append(ChatMessage(role=MessageRole.TOOL, content=result, additional_kwargs=extra))
    last = llm.chat_with_tools(functions, chat_history=list(history), tool_choice="none")
    assert llm.get_tool_calls_from_response(last, error_on_no_tool_call=False) == []
    assert len(tools.calls) == 2
    recorder.assert_loop(2)


def test_parallel_calls_are_allowed(llm: OpenAILike, recorder: Recorder, tools: Tools) -> None:
    answer = llm.chat_with_tools(
        offered(tools), user_msg=QUESTION, tool_required=True, allow_parallel_tool_calls=True
    )
    calls = llm.get_tool_calls_from_response(answer)
    assert calls
    assert all(assert_valid("price", call.tool_kwargs) for call in calls)
    assert recorder.requests[-1]["parallel_tool_calls"] is True


@shows("llama-index-llms-openai-like", "chat completions", "streamed calls")
def test_a_streamed_call(llm: OpenAILike, tools: Tools) -> None:
    last: Any = None
    for piece in llm.stream_chat_with_tools(offered(tools), user_msg=QUESTION, tool_required=True):
        last = piece
    (call,) = llm.get_tool_calls_from_response(last)
    assert_valid("price", call.tool_kwargs)


@shows("llama-index-llms-openai-like", "chat completions", "structured output")
def test_structured_output_in_its_default_mode(llm: OpenAILike, recorder: Recorder) -> None:
    answer = llm.as_structured_llm(Trip).complete("Plan a trip to Rome for two days.")
    assert isinstance(answer.raw, Trip)
    assert recorder.refused == []
