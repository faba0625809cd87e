"""pipecat: the OpenAI realtime service in a pipeline, in text mode, and a session that survives a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pipecat.adapters.llm.schemas.function_schema import FunctionSchema
from pipecat.adapters.llm.schemas.tools_schema import ToolsSchema
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InterruptionFrame,
    LLMMessagesAppendFrame,
    LLMRunFrame,
    LLMTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.llm_service import FunctionCallParams
from pipecat.services.openai.realtime.events import AudioConfiguration, AudioInput, SessionProperties
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner

from tests.clients import telling
from tests.clients.shown import shows
from tests.clients.socket_recording import SocketRecorder, restarting
from tests.clients.telling import BOTH, CALL, LONG


class Ear(FrameProcessor):
    """Keeps what is said, and errors."""

    def __init__(self) -> None:
        super().__init__()
        self.said = ""
        self.errors: list[str] = []

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, ErrorFrame):
            self.errors.append(frame.error)
        if isinstance(frame, LLMTextFrame):
            self.said += frame.text
        await self.push_frame(frame, direction)


async def until(condition: Any) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.001)


class Voice:
    """A pipeline around the realtime service, whose tool notes what was looked at."""

    def __init__(self, address: str, first: str) -> None:
        """`first` is said when the pipeline starts."""
        self.looked: list[str] = []
        self.ear = Ear()
        look = FunctionSchema("look", "Look.", {"at": {"type": "string"}}, ["at"])
        context = LLMContext([{"role": "user", "content": first}], ToolsSchema([look]))
        properties = SessionProperties(
            output_modalities=["text"],
            instructions="Be brief.",
            audio=AudioConfiguration(input=AudioInput(turn_detection=False)),
        )
        self.service = OpenAIRealtimeLLMService(
            api_key="none",
            base_url=address,
            settings=OpenAIRealtimeLLMService.Settings(model="any", session_properties=properties),
        )
        self.service.register_function("look", self._look)
        pair = LLMContextAggregatorPair(context)
        pipeline = Pipeline([pair.user(), self.service, self.ear, pair.assistant()])
        self.worker = PipelineWorker(pipeline, cancel_on_idle_timeout=False, enable_rtvi=False)

    async def _look(self, params: FunctionCallParams) -> None:
        self.looked.append(params.arguments["at"])
        await params.result_callback(telling.look(params.arguments["at"]))

    async def say(self, text: str) -> None:
        message: Any = {"role": "user", "content": text}
        await self.service.queue_frame(LLMMessagesAppendFrame([message], run_llm=True))

    async def run(self, talk: Callable[[], Awaitable[None]]) -> None:
        """Start the pipeline, say the first text, and end it after `talk`."""
        started = asyncio.Event()

        @self.worker.event_handler("on_pipeline_started")
        async def _started(_worker: PipelineWorker, _frame: Frame) -> None:
            started.set()

        async def talking() -> None:
            try:
                await asyncio.wait_for(started.wait(), 120)
                await self.worker.queue_frame(LLMRunFrame())
                await talk()
            finally:
                await self.worker.queue_frame(EndFrame())

        runner = WorkerRunner(handle_sigint=False)
        await runner.add_workers(self.worker)
        await asyncio.gather(runner.run(), talking())


def address(url: str) -> str:
    return url.replace("http", "ws") + "/v1/realtime"


@shows("pipecat-ai", "Realtime", "two turns", "tool round", "interruption")
def test_pipecat(sockets: SocketRecorder) -> None:
    async def run() -> Voice:
        voice = Voice(address(sockets.url), "hello")

        async def talk() -> None:
            await until(lambda: len(sockets.responses()) == 1)
            await voice.say(CALL)
            await until(lambda: len(sockets.responses()) == 3)
            await voice.say(LONG)
            await until(lambda: voice.ear.said.endswith("x"))
            await voice.service.queue_frame(InterruptionFrame())
            await until(lambda: len(sockets.responses()) == 4)
            await voice.say("after")
            await until(lambda: len(sockets.responses()) == 5 and voice.ear.said.endswith("after"))

        await voice.run(talk)
        return voice

    voice = asyncio.run(run())
    assert voice.ear.errors == [] and voice.looked == ["me"]
    sockets.assert_story()


@shows("pipecat-ai", "Realtime", "parallel calls", "restart")
def test_a_named_session_goes_on_after_a_restart(tmp_path: Path) -> None:
    async def run(url: str, sockets: SocketRecorder, first: str, *turns: tuple[str, int]) -> list[str]:
        """Run a pipeline of its own; each text comes with the number of responses to it."""
        voice, before = Voice(address(url) + "?session_id=kept", first), len(sockets.responses())

        async def answered(responses: int) -> None:
            await until(lambda: len(sockets.responses()) == responses)

        async def talk() -> None:
            expected = before + 1
            await answered(expected)
            for text, answers in turns:
                await voice.say(text)
                expected += answers
                await answered(expected)

        await voice.run(talk)
        assert voice.ear.errors == []
        return voice.looked

    with restarting(tmp_path) as (sockets, server):
        with server() as url:
            assert asyncio.run(run(url, sockets, "hello", (CALL, 2))) == ["me"]
        with server() as url:
            assert asyncio.run(run(url, sockets, "later")) == []
            sockets.assert_continued()
            assert sorted(asyncio.run(run(url, sockets, "more", (BOTH, 2)))) == ["left", "right"]
            assert sockets.errors() == []
