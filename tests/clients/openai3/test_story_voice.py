"""The whole story, restart included, through the LLM services of the voice frameworks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from livekit.agents import function_tool
from livekit.agents.llm import ChatContext, FunctionCall, FunctionCallOutput
from livekit.plugins import openai
from pipecat.adapters.llm.schemas.function_schema import FunctionSchema
from pipecat.adapters.llm.schemas.tools_schema import ToolsSchema
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    FunctionCallResultFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMRunFrame,
    LLMTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.llm_service import FunctionCallParams
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.workers.runner import WorkerRunner

from tests.clients import telling
from tests.clients.shown import shows
from tests.clients.story import TOLD, tell
from tests.clients.telling import BOTH, CALL

ANSWERS = {CALL: 2, BOTH: 2}
"""How many answers the model gives to these texts; one to all others."""


class Livekit:
    """The LLM of livekit's openai plugin."""

    def __init__(self) -> None:
        self.looked: list[str] = []
        self._context = ChatContext.empty()

        @function_tool
        async def look(at: str) -> str:
            """Look at something."""
            self.looked.append(at)
            return telling.look(at)

        self._tools: list[Any] = [look]

    async def connect(self, url: str) -> None:
        self._llm = openai.LLM(model="echo", base_url=url, api_key="none")

    async def say(self, text: str) -> str:
        self._context.add_message(role="user", content=text)
        while True:
            said, calls = "", []
            async with self._llm.chat(chat_ctx=self._context, tools=self._tools) as stream:
                async for chunk in stream:
                    if chunk.delta is not None:
                        said += chunk.delta.content or ""
                        calls += chunk.delta.tool_calls
            if said:
                self._context.add_message(role="assistant", content=said)
            if not calls:
                return said
            for call in calls:
                named: Any = {"call_id": call.call_id, "name": call.name}
                at = json.loads(call.arguments)["at"]
                self.looked.append(at)
                self._context.insert(FunctionCall(arguments=call.arguments, **named))
                self._context.insert(FunctionCallOutput(output=telling.look(at), is_error=False, **named))

    async def cut(self, text: str) -> str:
        asked = self._context.copy()
        asked.add_message(role="user", content=text)
        async with self._llm.chat(chat_ctx=asked, tools=self._tools) as stream:
            async for chunk in stream:
                if chunk.delta is not None and chunk.delta.content:
                    return chunk.delta.content
        raise AssertionError("the stream had no text")


class _Ear(FrameProcessor):
    """Keeps what is said; `heard` is set at the first text, `done` at the end of an answer without a call."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.said = ""
        self.errors: list[str] = []
        self.heard, self.done = asyncio.Event(), asyncio.Event()
        self._left = answers

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, ErrorFrame):
            self.errors.append(frame.error)
            self.done.set()
        elif isinstance(frame, FunctionCallResultFrame):
            self.said = ""
        elif isinstance(frame, LLMTextFrame):
            self.said += frame.text
            self.heard.set()
        elif isinstance(frame, LLMFullResponseEndFrame):
            self._left -= 1
            if not self._left:
                self.done.set()
        await self.push_frame(frame, direction)


class Pipecat:
    """The OpenAI service of pipecat; a pipeline for each turn, and one context for all of them.

    It sends results of tools as JSON.
    """

    def __init__(self) -> None:
        self.looked: list[str] = []
        look = FunctionSchema("look", "Look.", {"at": {"type": "string"}}, ["at"])
        self._context = LLMContext([], ToolsSchema([look]))

    async def connect(self, url: str) -> None:
        self._url = url

    async def _answer(self, params: FunctionCallParams) -> None:
        self.looked.append(params.arguments["at"])
        await params.result_callback(telling.look(params.arguments["at"]))

    async def _run(self, text: str, cut: bool) -> str:
        service = OpenAILLMService(
            api_key="none", base_url=self._url, settings=OpenAILLMService.Settings(model="echo")
        )
        service.register_function("look", self._answer)
        self._context.add_message({"role": "user", "content": text})
        pair, ear = LLMContextAggregatorPair(self._context), _Ear(ANSWERS.get(text, 1))
        pipeline = Pipeline([pair.user(), service, ear, pair.assistant()])
        worker = PipelineWorker(pipeline, cancel_on_idle_timeout=False, enable_rtvi=False)
        started = asyncio.Event()

        @worker.event_handler("on_pipeline_started")
        async def _started(_worker: PipelineWorker, _frame: Frame) -> None:
            started.set()

        async def talk() -> None:
            try:
                await asyncio.wait_for(started.wait(), 100)
                await worker.queue_frame(LLMRunFrame())
                await asyncio.wait_for((ear.heard if cut else ear.done).wait(), 100)
                if cut:
                    await worker.queue_frame(InterruptionFrame())
            finally:
                await worker.queue_frame(EndFrame())

        runner = WorkerRunner(handle_sigint=False)
        await runner.add_workers(worker)
        await asyncio.gather(runner.run(), talk())
        assert ear.errors == []
        return ear.said

    async def say(self, text: str) -> str:
        return await self._run(text, cut=False)

    async def cut(self, text: str) -> str:
        return await self._run(text, cut=True)


# Both stream every answer, so their calls are streamed.


@shows("livekit-agents", "chat completions", *TOLD, "streamed calls")
def test_livekit(tmp_path: Path) -> None:
    tell(Livekit(), tmp_path)


@shows("pipecat-ai", "chat completions", *(each for each in TOLD if each != "two rounds"), "streamed calls")
def test_pipecat(tmp_path: Path) -> None:
    tell(Pipecat(), tmp_path, rounds=1)
