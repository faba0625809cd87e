"""openai-agents: a realtime session in text mode, with a tool and an interruption."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from agents import function_tool
from agents.realtime import RealtimeAgent, RealtimeRunner

from tests.clients.socket_recording import SocketRecorder
from tests.clients.telling import CALL, LONG

SETTINGS: Any = {
    "model_name": "any",
    "modalities": ["text"],
    # The server hears no speech, so the client cancels by itself.
    "turn_detection": {"type": "semantic_vad", "interrupt_response": False},
}


async def until(events: AsyncIterator[Any], kind: str, count: int = 1) -> None:
    """Wait for so many events of the model."""
    async with asyncio.timeout(60):
        async for event in events:
            assert event.type != "error", event
            if event.type == "raw_model_event" and event.data.type == kind:
                count -= 1
                if not count:
                    return


def test_agents(sockets: SocketRecorder) -> None:
    looked: list[str] = []

    @function_tool
    def look(at: str) -> str:
        """Look at something."""
        looked.append(at)
        return "seen"

    async def run() -> None:
        agent: Any = RealtimeAgent(name="Guide", instructions="Be brief.", tools=[look])
        runner = RealtimeRunner(agent, config={"model_settings": SETTINGS})
        url = sockets.url.replace("http", "ws") + "/v1/realtime?model=any"
        async with await runner.run(model_config={"api_key": "none", "url": url}) as session:
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
