"""The whole story, restart included, through the clients on openai 2."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import instructor
import litellm
import pytest
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI

from tests.clients import telling
from tests.clients.conftest import serving
from tests.clients.recording import Recorder
from tests.clients.shown import shows
from tests.clients.story import SIZES, TOLD, Talk, tell
from tests.clients.travel import Trip

PARAMETERS: Any = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
LOOK: Any = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS},
}


class LiteLLM:
    """litellm's completions."""

    def __init__(self) -> None:
        self.looked: list[str] = []
        self._messages: list[Any] = []

    async def connect(self, url: str) -> None:
        self._where: dict[str, Any] = {
            "model": "openai/echo",
            "api_base": url,
            "api_key": "none",
            "num_retries": 0,
            "tools": [LOOK],
        }

    async def say(self, text: str) -> str:
        self._messages.append({"role": "user", "content": text})
        while True:
            answer = await litellm.acompletion(messages=self._messages, **self._where)
            message = answer.choices[0].message
            self._messages.append(message)
            if not message.tool_calls:
                return str(message.content)
            for call in message.tool_calls:
                at = json.loads(call.function.arguments)["at"]
                self.looked.append(at)
                result = telling.look(at)
                self._messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    async def cut(self, text: str) -> str:
        said = [*self._messages, {"role": "user", "content": text}]
        stream = await litellm.acompletion(messages=said, stream=True, **self._where)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                await stream.aclose()
                return str(chunk.choices[0].delta.content)
        raise AssertionError("the stream had no text")


class LlamaIndex:
    """OpenAILike with a tool."""

    def __init__(self) -> None:
        self.looked: list[str] = []
        self._history: list[ChatMessage] = []
        self._tools = [FunctionTool.from_defaults(self.look)]

    def look(self, at: str) -> str:
        """Look at something."""
        self.looked.append(at)
        return telling.look(at)

    async def connect(self, url: str) -> None:
        self._llm = OpenAILike(
            model="echo",
            api_base=url,
            api_key="none",
            is_chat_model=True,
            is_function_calling_model=True,
            max_retries=0,
        )

    async def say(self, text: str) -> str:
        self._history.append(ChatMessage(role=MessageRole.USER, content=text))
        while True:
            answer = await self._llm.achat_with_tools(
                self._tools, chat_history=list(self._history), allow_parallel_tool_calls=True
            )
            self._history.append(answer.message)
            calls = self._llm.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
            if not calls:
                return answer.message.content or ""
            for call in calls:
                result = self.look(**call.tool_kwargs)
                extra = {"tool_call_id": call.tool_id}
                self._history.append(
                    ChatMessage(role=MessageRole.TOOL, content=result, additional_kwargs=extra)
                )

    async def cut(self, text: str) -> str:
        said = [*self._history, ChatMessage(role=MessageRole.USER, content=text)]
        async for piece in await self._llm.astream_chat(said):
            if piece.delta:
                return piece.delta
        raise AssertionError("the stream had no text")


@pytest.mark.parametrize(
    "talk",
    [
        pytest.param(LiteLLM, marks=shows("litellm", "chat completions", *TOLD)),
        pytest.param(LlamaIndex, marks=shows("llama-index-llms-openai-like", "chat completions", *TOLD)),
    ],
    ids=["litellm", "llama-index"],
)
def test_the_whole_story(talk: type[Talk], tmp_path: Path) -> None:
    tell(talk(), tmp_path)


def called(*trips: Trip) -> str:
    """A text that is calls of instructor's tool when it is repeated."""
    arguments = [json.dumps(trip.model_dump()) for trip in trips]
    return "\n".join(
        f'<tool_call>\n{{"name": "Trip", "arguments": {each}}}\n</tool_call>' for each in arguments
    )


@shows("instructor", "chat completions", "two turns", "tool round", "interruption", "restart")
@shows("instructor", "chat completions", "parallel calls")
def test_instructor(tmp_path: Path) -> None:
    """Its turns are tool calls; the interruption is a partial output that nobody reads to its end."""
    messages: list[Any] = []
    for cities in (("Rome", "Oslo"), ("Paris",)):
        with serving(tmp_path / "errors", "echo", *SIZES, "--journal", str(tmp_path / "journal")) as url:
            recorder = Recorder(url)
            plain = OpenAI(base_url=f"{recorder.url}/v1", api_key="none", max_retries=0)
            client = instructor.from_openai(plain)
            for city in cities:
                trip = Trip(city=city, days=2, cheap=True)
                messages.append({"role": "user", "content": called(trip)})
                asked: dict[str, Any] = {"model": "echo", "messages": messages, "max_retries": 0}
                next(iter(client.chat.completions.create_partial(response_model=Trip, **asked)))
                answer = client.chat.completions.create(response_model=Trip, **asked)
                # Its models are subclasses of the ones that it is given.
                assert answer.model_dump() == trip.model_dump()
                messages.append({"role": "assistant", "content": answer.model_dump_json()})
            parallel = instructor.from_openai(plain, mode=instructor.Mode.PARALLEL_TOOLS)
            trips = [Trip(city=city, days=3, cheap=False) for city in ("Oslo", "Rome")]
            several: Any = [*messages, {"role": "user", "content": called(*trips)}]
            answers = parallel.chat.completions.create(
                model="echo", messages=several, response_model=Iterable[Trip], max_retries=0
            )
            assert [each.model_dump() for each in answers] == [trip.model_dump() for trip in trips]
            assert recorder.refused == []
            recorder.close()
    assert len(messages) == 6
