"""livekit-agents: the realtime model of its openai plugin in a session, in text mode, through a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from livekit.agents import Agent, AgentSession, APIConnectOptions, function_tool
from livekit.plugins import openai

from tests.clients import telling
from tests.clients.shown import shows
from tests.clients.socket_recording import SocketRecorder, restarting
from tests.clients.telling import BOTH, CALL, LONG, TWICE

RETRIES = APIConnectOptions(max_retry=60, retry_interval=1.0)
"""It connects again by itself, and sends its history again; a server may take a while to start."""


@asynccontextmanager
async def started(url: str, looked: list[str]) -> AsyncIterator[AgentSession[Any]]:
    """A session of an agent whose tool notes what was looked at."""

    @function_tool
    async def look(at: str) -> str:
        """Look at something."""
        looked.append(at)
        return telling.look(at)

    llm = openai.realtime.RealtimeModel(
        model="any", base_url=f"{url}/v1", api_key="none", modalities=["text"], conn_options=RETRIES
    )
    async with asyncio.timeout(300), AgentSession(llm=llm, max_tool_steps=2) as session:
        await session.start(Agent(instructions="Be brief.", tools=[look]), record=False)
        yield session
    await llm.aclose()


def listening(session: AgentSession[Any]) -> Callable[[], Awaitable[None]]:
    """Waits until the session has connected again and its history, sent again, is confirmed.

    A turn before that would compare its history with nothing, and send all of it twice.
    """
    remote = session.current_agent.realtime_llm_session
    known = {item.id for item in remote.chat_ctx.items}
    connected = asyncio.Event()
    remote.on("session_reconnected", lambda _: connected.set())

    async def wait() -> None:
        await connected.wait()
        while not known <= {item.id for item in remote.chat_ctx.items}:
            await asyncio.sleep(0.05)

    return wait


def last_said(session: AgentSession[Any]) -> str:
    return session.history.items[-1].text_content or ""


@shows("livekit-agents", "Realtime", "two turns", "tool round", "interruption")
def test_livekit(sockets: SocketRecorder) -> None:
    looked: list[str] = []

    async def run() -> str:
        async with started(sockets.url, looked) as session:
            for text in ("hello", CALL):
                await session.generate_reply(user_input=text)
            cut = session.generate_reply(user_input=LONG)
            while not sockets.heard[-1].get("delta", "").endswith("x"):
                await asyncio.sleep(0.001)
            await session.interrupt()
            await cut.wait_for_playout()
            await session.generate_reply(user_input="after")
            return last_said(session)

    assert asyncio.run(run()) == "after"
    assert looked == ["me"]
    sockets.assert_story()


@shows("livekit-agents", "Realtime", "two rounds", "parallel calls", "restart")
def test_a_session_goes_on_after_a_restart(tmp_path: Path) -> None:
    looked: list[str] = []

    async def run() -> None:
        with restarting(tmp_path) as (sockets, server), ExitStack() as running:
            url = running.enter_context(server())
            async with started(url, looked) as session:
                await session.generate_reply(user_input="hello")
                await session.generate_reply(user_input=TWICE)
                assert looked == ["twice", "me"]
                sent_again = listening(session)
                running.close()
                running.enter_context(server())
                await sent_again()
                await session.generate_reply(user_input="later")
                assert last_said(session) == "later"
                sockets.assert_continued()
                await session.generate_reply(user_input=BOTH)
                assert sorted(looked[2:]) == ["left", "right"]

    asyncio.run(run())
