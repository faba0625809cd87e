"""pipecat: an LLM service in a pipeline calls a function, and its context goes on with the result."""

from __future__ import annotations

import asyncio
from typing import Any

from pipecat.adapters.llm.schemas.function_schema import FunctionSchema
from pipecat.adapters.llm.schemas.tools_schema import ToolsSchema
from pipecat.frames.frames import EndFrame, ErrorFrame, Frame, LLMFullResponseEndFrame, LLMRunFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.llm_service import FunctionCallParams
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.workers.runner import WorkerRunner

from tests.clients.recording import Recorder
from tests.clients.shown import shows
from tests.clients.travel import PRICE_PARAMETERS, QUESTION, WEATHER_PARAMETERS, Tools


def schema(name: str, parameters: dict[str, Any]) -> FunctionSchema:
    return FunctionSchema(
        name=name,
        description=f"The {name} of a city.",
        properties=parameters["properties"],
        required=parameters["required"],
    )


class Ear(FrameProcessor):
    """Counts the answers that went by, keeps errors, and says when there were enough answers."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.errors: list[str] = []
        self._left = answers
        self.done = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, ErrorFrame):
            self.errors.append(frame.error)
            self.done.set()
        if isinstance(frame, LLMFullResponseEndFrame):
            self._left -= 1
            if not self._left:
                self.done.set()
        await self.push_frame(frame, direction)


async def converse(url: str, tools: Tools, choices: list[Any]) -> list[str]:
    """Run a pipeline; each answer has the next of the tool choices. Returns the errors."""
    remaining = iter(choices)
    functions = ToolsSchema([schema("weather", WEATHER_PARAMETERS), schema("price", PRICE_PARAMETERS)])
    context = LLMContext([{"role": "user", "content": QUESTION}], functions, next(remaining))
    service = OpenAILLMService(
        api_key="none",
        base_url=url,
        settings=OpenAILLMService.Settings(model="smollm2", temperature=0.0, max_completion_tokens=150),
    )

    async def answer(params: FunctionCallParams) -> None:
        context.set_tool_choice(next(remaining, "none"))
        await params.result_callback(tools.answer(params.function_name, dict(params.arguments)))

    for name in ("weather", "price"):
        service.register_function(name, answer)
    pair = LLMContextAggregatorPair(context)
    ear = Ear(len(choices))
    worker = PipelineWorker(
        Pipeline([pair.user(), service, ear, pair.assistant()]),
        cancel_on_idle_timeout=False,
        enable_rtvi=False,
    )
    started = asyncio.Event()

    @worker.event_handler("on_pipeline_started")
    async def _started(_worker: PipelineWorker, _frame: Frame) -> None:
        started.set()

    async def talk() -> None:
        await asyncio.wait_for(started.wait(), 60)
        await worker.queue_frame(LLMRunFrame())
        await asyncio.wait_for(ear.done.wait(), 300)
        await worker.queue_frame(EndFrame())

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    await asyncio.gather(runner.run(), talk())
    return ear.errors


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@shows("pipecat-ai", "chat completions", "two rounds", "streamed calls")
def test_two_rounds_of_functions_and_an_answer(url: str, recorder: Recorder, tools: Tools) -> None:
    errors = asyncio.run(converse(url, tools, [named("weather"), named("price"), "none"]))
    assert errors == []
    assert [name for name, _ in tools.calls] == ["weather", "price"]
    assert all(request["stream"] for request in recorder.requests)
    recorder.assert_loop(2)


def test_an_agent_with_one_function_that_it_need_not_call(url: str, recorder: Recorder, tools: Tools) -> None:
    """Voice agents offer functions in every answer; most answers call none."""
    errors = asyncio.run(converse(url, tools, ["none"]))
    assert errors == []
    assert tools.calls == []
    assert recorder.requests[0]["tools"]
    assert recorder.refused == []


def test_a_required_function(url: str, recorder: Recorder, tools: Tools) -> None:
    errors = asyncio.run(converse(url, tools, ["required", "none"]))
    assert errors == []
    assert tools.calls
    recorder.assert_loop(1)
