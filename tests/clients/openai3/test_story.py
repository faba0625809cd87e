"""The whole story, restart included, through each client that resends its history or names a response."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agents import (
    Agent,
    AsyncOpenAI,
    OpenAIConversationsSession,
    OpenAIProvider,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from anthropic import AsyncAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider as PydanticProvider

from tests.clients import telling
from tests.clients.shown import shows
from tests.clients.story import TOLD, Talk, tell

set_tracing_disabled(disabled=True)

PARAMETERS: Any = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
LOOK: Any = {"name": "look", "description": "Look at something.", "parameters": PARAMETERS}


class _Client:
    """A client whose tool notes what was looked at."""

    def __init__(self) -> None:
        self.looked: list[str] = []

    def look(self, at: str) -> str:
        """Look at something."""
        self.looked.append(at)
        return telling.look(at)


class Chat(_Client):
    """Chat completions of the openai package."""

    async def connect(self, url: str) -> None:
        self._client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        self._messages: list[Any] = getattr(self, "_messages", [])
        self._tools: Any = [{"type": "function", "function": LOOK}]

    async def say(self, text: str) -> str:
        self._messages.append({"role": "user", "content": text})
        while True:
            answer = await self._client.chat.completions.create(
                model="echo", messages=self._messages, tools=self._tools
            )
            message = answer.choices[0].message
            self._messages.append(message)
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                content = self.look(**json.loads(call.function.arguments))
                self._messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    async def cut(self, text: str) -> str:
        said = [*self._messages, {"role": "user", "content": text}]
        stream = await self._client.chat.completions.create(
            model="echo", messages=said, tools=self._tools, stream=True
        )
        async with stream:
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    heard: str = chunk.choices[0].delta.content
                    self._messages += [said[-1], {"role": "assistant", "content": heard}]
                    return heard
        raise AssertionError("the stream had no text")


class Responses(_Client):
    """Responses of the openai package; each names the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self._where: dict[str, Any] = {}

    async def connect(self, url: str) -> None:
        self._client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)

    def _body(self, said: Any) -> dict[str, Any]:
        return {"model": "echo", "input": said, "tools": [{"type": "function", **LOOK}], **self._where}

    def _note(self, response_id: str) -> None:
        self._where = {"previous_response_id": response_id}

    async def say(self, text: str) -> str:
        said: Any = text
        while True:
            answer = await self._client.responses.create(**self._body(said))
            self._note(answer.id)
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output_text
            said = [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": self.look(**json.loads(call.arguments)),
                }
                for call in calls
            ]

    async def cut(self, text: str) -> str:
        stream = await self._client.responses.create(**self._body(text), stream=True)
        async with stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    return event.delta
        raise AssertionError("the stream had no text")


class Conversations(Responses):
    """Responses in a conversation."""

    async def connect(self, url: str) -> None:
        await super().connect(url)
        if not self._where:
            self._where = {"conversation": (await self._client.conversations.create()).id}

    def _note(self, response_id: str) -> None:
        """The conversation goes on by itself."""


class Messages(_Client):
    """The anthropic package."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: list[Any] = []
        tool = {"name": "look", "description": "Look.", "input_schema": PARAMETERS}
        self._plain: dict[str, Any] = {"model": "echo", "max_tokens": 8000, "tools": [tool]}

    async def connect(self, url: str) -> None:
        self._client = AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)

    async def say(self, text: str) -> str:
        self._messages.append({"role": "user", "content": text})
        while True:
            answer = await self._client.messages.create(messages=self._messages, **self._plain)
            self._messages.append(answer.to_param())
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in answer.content if block.type == "text")
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": self.look(**call.input)}
                for call in calls
            ]
            self._messages.append({"role": "user", "content": results})

    async def cut(self, text: str) -> str:
        said: Any = [*self._messages, {"role": "user", "content": text}]
        async with self._client.messages.stream(messages=said, **self._plain) as stream:
            async for heard in stream.text_stream:
                return heard
        raise AssertionError("the stream had no text")


class LangChain(_Client):
    """ChatOpenAI with a tool."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: list[Any] = []
        self._tool = langchain_tool(self.look)

    async def connect(self, url: str) -> None:
        model = ChatOpenAI(model="echo", base_url=url, api_key="none", max_retries=0)
        self._model = model.bind_tools([self._tool])

    async def say(self, text: str) -> str:
        self._messages.append(HumanMessage(text))
        while True:
            answer = await self._model.ainvoke(self._messages)
            self._messages.append(answer)
            if not answer.tool_calls:
                return str(answer.content)
            self._messages += [await self._tool.ainvoke(call) for call in answer.tool_calls]

    async def cut(self, text: str) -> str:
        async for chunk in self._model.astream([*self._messages, HumanMessage(text)]):
            if chunk.content:
                return str(chunk.content)
        raise AssertionError("the stream had no text")


class PydanticAi(_Client):
    """An agent of pydantic-ai."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: list[Any] = []

    async def connect(self, url: str) -> None:
        model = OpenAIChatModel("echo", provider=PydanticProvider(base_url=url, api_key="none"))
        self._agent = PydanticAgent(model)
        self._agent.tool_plain(self.look)

    async def say(self, text: str) -> str:
        result = await self._agent.run(text, message_history=self._messages)
        self._messages = result.all_messages()
        return result.output

    async def cut(self, text: str) -> str:
        async with self._agent.run_stream(text, message_history=self._messages) as result:
            async for heard in result.stream_text(delta=True, debounce_by=None):
                return heard
        raise AssertionError("the stream had no text")


class Agents(_Client):
    """openai-agents, which resends its items; `chat` is over chat completions."""

    def __init__(self, chat: bool = False) -> None:
        super().__init__()
        self._chat = chat
        self._items: list[Any] = []
        self._agent: Agent[Any] = Agent(name="guide", tools=[function_tool(self.look)])

    async def connect(self, url: str) -> None:
        self._client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        provider = OpenAIProvider(openai_client=self._client, use_responses=not self._chat)
        self._config = RunConfig(model_provider=provider, model="echo")

    async def say(self, text: str) -> str:
        said = [*self._items, {"role": "user", "content": text}]
        result = await Runner.run(self._agent, said, run_config=self._config)
        self._items = result.to_input_list()
        return str(result.final_output)

    def _streamed(self, text: str) -> Any:
        said = [*self._items, {"role": "user", "content": text}]
        return Runner.run_streamed(self._agent, said, run_config=self._config)

    async def cut(self, text: str) -> str:
        result = self._streamed(text)
        heard = ""
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                heard = heard or event.data.delta
                result.cancel()
        return heard


class AgentConversations(Agents):
    """openai-agents whose session is a conversation of the server."""

    def __init__(self) -> None:
        super().__init__()
        self._name: str | None = None

    async def connect(self, url: str) -> None:
        await super().connect(url)
        self._session = OpenAIConversationsSession(conversation_id=self._name, openai_client=self._client)

    async def say(self, text: str) -> str:
        result = await Runner.run(self._agent, text, session=self._session, run_config=self._config)
        self._name = self._session.session_id
        return str(result.final_output)

    def _streamed(self, text: str) -> Any:
        return Runner.run_streamed(self._agent, text, session=self._session, run_config=self._config)


TALKS: dict[str, tuple[Callable[[], Talk], str, str]] = {
    "openai-chat": (Chat, "openai", "chat completions"),
    "openai-responses": (Responses, "openai", "Responses"),
    "openai-conversations": (Conversations, "openai", "Responses, conversations"),
    "anthropic": (Messages, "anthropic", "Messages"),
    "langchain": (LangChain, "langchain-openai", "chat completions"),
    "pydantic-ai": (PydanticAi, "pydantic-ai-slim", "chat completions"),
    "agents-chat": (lambda: Agents(chat=True), "openai-agents", "chat completions"),
    "agents-responses": (Agents, "openai-agents", "Responses"),
    "agents-conversations": (AgentConversations, "openai-agents", "Responses, conversations"),
}
"""Clients with their package and interface."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=shows(*told, *TOLD)) for name, (_, *told) in TALKS.items()]
)
def test_the_whole_story(name: str, tmp_path: Path) -> None:
    tell(TALKS[name][0](), tmp_path)
