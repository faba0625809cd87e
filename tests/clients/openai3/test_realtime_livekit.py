"""livekit-agents: the realtime model of its openai plugin in a session, in text mode."""

from __future__ import annotations

import asyncio

from livekit.agents import Agent, AgentSession, function_tool
from livekit.plugins import openai

from tests.clients.socket_recording import SocketRecorder
from tests.clients.telling import CALL, LONG


def test_livekit(sockets: SocketRecorder) -> None:
    looked: list[str] = []

    @function_tool
    async def look(at: str) -> str:
        """Look at something."""
        looked.append(at)
        return "seen"

    async def run() -> str:
        url = f"{sockets.url}/v1"
        llm = openai.realtime.RealtimeModel(model="any", base_url=url, api_key="none", modalities=["text"])
        async with asyncio.timeout(120), AgentSession(llm=llm, max_tool_steps=2) as session:
            await session.start(Agent(instructions="Be brief.", tools=[look]), record=False)
            for text in ("hello", CALL):
                await session.generate_reply(user_input=text)
            cut = session.generate_reply(user_input=LONG)
            while not sockets.heard[-1].get("delta", "").endswith("x"):
                await asyncio.sleep(0.001)
            await session.interrupt()
            await cut.wait_for_playout()
            await session.generate_reply(user_input="after")
            said = session.history.items[-1].text_content or ""
        await llm.aclose()
        return said

    assert asyncio.run(run()) == "after"
    assert looked == ["me"]
    sockets.assert_story()
