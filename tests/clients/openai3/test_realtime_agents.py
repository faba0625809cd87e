"""openai-agents: a realtime session in text mode, with a tool, an interruption and a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agents import function_tool
from agents.realtime import RealtimeAgent, RealtimeRunner

from tests.clients import telling
from tests.clients.shown import shows
from tests.clients.socket_recording import SocketRecorder, restarting
from tests.clients.telling import BOTH, CALL, LONG, TWICE

SETTINGS: Any = {
    "model_name": "any",
    "modalities": ["text"],
    # The server hears no speech, so the client cancels by itself.
    "turn_detection": {"type": "semantic_vad", "interrupt_response": False},
}


async def until(events: AsyncIterator[Any], kind: str, count: int = 1) -> None:
    """Wait for so many events of the model."""
    async with asyncio.timeout(120):
        async for event in events:
            assert event.type != "error", event
            if event.type == "raw_model_event" and event.data.type == kind:
                count -= 1
                if not count:
                    return


STORY = ("two turns", "tool round", "streamed calls", "interruption")


@asynccontextmanager
async def connected(url: str, looked: list[str]) -> AsyncIterator[Any]:
    """A session of an agent whose tool notes what was looked at."""

    @function_tool
    def look(at: str) -> str:
        """Look at something."""
        looked.append(at)
        return telling.look(at)

    agent: Any = RealtimeAgent(name="Guide", instructions="Be brief.", tools=[look])
    runner = RealtimeRunner(agent, config={"model_settings": SETTINGS})
    async with await runner.run(model_config={"api_key": "none", "url": url}) as session:
        yield session


@shows("openai-agents", "Realtime", *STORY)
def test_agents(sockets: SocketRecorder) -> None:
    looked: list[str] = []

    async def run() -> None:
        url = sockets.url.replace("http", "ws") + "/v1/realtime?model=any"
        async with connected(url, looked) as session:
            events = session.__aiter__()
            await session.send_message("hello")
            await until(events, "turn_ended")
            await session.send_message(CALL)
            await until(events, "turn_ended", 2)
            await session.send_message(LONG)
            await until(events, "output_text_delta")
            await session.interrupt()
            await until(events, "turn_ended")
            await session.send_message("after")
            await until(events, "turn_ended")

    asyncio.run(run())
    assert looked == ["me"]
    sockets.assert_story()


@shows("openai-agents", "Realtime", "two rounds", "parallel calls", "restart")
def test_a_named_session_goes_on_after_a_restart(tmp_path: Path) -> None:
    looked: list[str] = []

    async def run(url: str, *turns: tuple[str, int]) -> None:
        address = url.replace("http", "ws") + "/v1/realtime?model=any&session_id=kept"
        async with connected(address, looked) as session:
            events = session.__aiter__()
            for text, answers in turns:
                await session.send_message(text)
                await until(events, "turn_ended", answers)

    with restarting(tmp_path) as (sockets, server):
        with server() as url:
            asyncio.run(run(url, ("hello", 1), (TWICE, 3)))
        with server() as url:
            asyncio.run(run(url, ("later", 1)))
            sockets.assert_continued()
            asyncio.run(run(url, (BOTH, 2)))
    assert looked[:2] == ["twice", "me"] and sorted(looked[2:]) == ["left", "right"]
