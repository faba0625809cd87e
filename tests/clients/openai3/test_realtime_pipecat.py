"""pipecat: the OpenAI realtime service in a pipeline, in text mode."""

from __future__ import annotations

import asyncio
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

from tests.clients.socket_recording import SocketRecorder
from tests.clients.telling import CALL, LONG


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
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def test_pipecat(sockets: SocketRecorder) -> None:
    looked: list[Any] = []
    ear = Ear()

    async def run() -> None:
        look = FunctionSchema("look", "Look.", {"at": {"type": "string"}}, ["at"])
        context = LLMContext([{"role": "user", "content": "hello"}], ToolsSchema([look]))
        properties = SessionProperties(
            output_modalities=["text"],
            instructions="Be brief.",
            audio=AudioConfiguration(input=AudioInput(turn_detection=False)),
        )
        service = OpenAIRealtimeLLMService(
            api_key="none",
            base_url=sockets.url.replace("http", "ws") + "/v1/realtime",
            settings=OpenAIRealtimeLLMService.Settings(model="any", session_properties=properties),
        )

        async def answer(params: FunctionCallParams) -> None:
            looked.append(dict(params.arguments))
            await params.result_callback("seen")

        service.register_function("look", answer)
        pair = LLMContextAggregatorPair(context)
        pipeline = Pipeline([pair.user(), service, ear, pair.assistant()])
        worker = PipelineWorker(pipeline, cancel_on_idle_timeout=False, enable_rtvi=False)
        started = asyncio.Event()

        @worker.event_handler("on_pipeline_started")
        async def _started(_worker: PipelineWorker, _frame: Frame) -> None:
            started.set()

        async def say(text: str) -> None:
            message: Any = {"role": "user", "content": text}
            await service.queue_frame(LLMMessagesAppendFrame([message], run_llm=True))

        async def talk() -> None:
            try:
                await asyncio.wait_for(started.wait(), 60)
                await worker.queue_frame(LLMRunFrame())
                await until(lambda: len(sockets.responses()) == 1)
                await say(CALL)
                await until(lambda: len(sockets.responses()) == 3)
                await say(LONG)
                await until(lambda: ear.said.endswith("x"))
                await service.queue_frame(InterruptionFrame())
                await until(lambda: len(sockets.responses()) == 4)
                await say("after")
                await until(lambda: len(sockets.responses()) == 5 and ear.said.endswith("after"))
            finally:
                await worker.queue_frame(EndFrame())

        runner = WorkerRunner(handle_sigint=False)
        await runner.add_workers(worker)
        await asyncio.gather(runner.run(), talk())

    asyncio.run(run())
    assert ear.errors == [] and looked == [{"at": "me"}]
    sockets.assert_story()
