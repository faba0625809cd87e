"""The openai package's realtime connections, current and beta, and one that survives a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from tests.clients.conftest import serving
from tests.clients.shown import shows
from tests.clients.socket_recording import SocketRecorder
from tests.clients.telling import CALL, LONG

LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}


async def until(connection: Any, *kinds: str) -> Any:
    """The next event of one of these types."""
    async with asyncio.timeout(60):
        async for event in connection:
            assert event.type != "error", event
            if event.type in kinds:
                return event
    raise AssertionError("the connection ended")


async def ask(connection: Any, text: str) -> Any:
    content = [{"type": "input_text", "text": text}]
    await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
    await connection.response.create()


async def story(connection: Any, delta: str, settings: dict[str, Any]) -> None:
    """Two turns, a tool round, an interruption, and one more turn."""
    await until(connection, "session.created")
    await connection.session.update(session={**settings, "instructions": "Be brief.", "tools": [LOOK]})
    await until(connection, "session.updated")
    await ask(connection, "hello")
    await until(connection, "response.done")
    await ask(connection, CALL)
    done = await until(connection, "response.done")
    result = {"type": "function_call_output", "call_id": done.response.output[0].call_id, "output": "seen"}
    await connection.conversation.item.create(item=result)
    await connection.response.create()
    await until(connection, "response.done")
    await ask(connection, LONG)
    await until(connection, delta)
    await connection.response.cancel()
    await ask(connection, "after")
    await until(connection, "response.done")
    await until(connection, "response.done")


@shows("openai", "Realtime", "two turns", "tool round", "interruption")
def test_openai(sockets: SocketRecorder) -> None:
    async def run() -> None:
        client = AsyncOpenAI(base_url=f"{sockets.url}/v1", api_key="none")
        async with client.realtime.connect(model="any") as connection:
            settings = {"type": "realtime", "output_modalities": ["text"]}
            await story(connection, "response.output_text.delta", settings)

    asyncio.run(run())
    sockets.assert_story()


@shows("openai", "Realtime, beta", "two turns", "tool round", "interruption")
def test_openai_beta(sockets: SocketRecorder) -> None:
    async def run() -> None:
        # Without an address of its own the beta connects by TLS alone.
        url = sockets.url.replace("http", "ws") + "/v1"
        client = AsyncOpenAI(websocket_base_url=url, api_key="none")
        async with client.beta.realtime.connect(model="any") as connection:
            await story(connection, "response.text.delta", {"modalities": ["text"], "temperature": 0.8})

    asyncio.run(run())
    assert sockets.headers[0]["openai-beta"] == "realtime=v1"
    sockets.assert_story()


@shows("openai", "Realtime", "restart")
def test_a_named_session_goes_on_after_a_restart(tmp_path: Path) -> None:
    async def run(url: str, text: str) -> Any:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        async with client.realtime.connect(model="any", extra_query={"session_id": "kept"}) as connection:
            await ask(connection, text)
            return (await until(connection, "response.done")).response

    before = None
    for number in range(2):
        options = ("--journal", str(tmp_path / "journal"), "--kv-tokens", "4096", "--context-length", "2048")
        with serving(tmp_path / "errors", "echo", *options) as url:
            response = asyncio.run(run(url, f"turn {number}"))
            assert response.status == "completed"
            if before is not None:
                assert response.usage.input_tokens > before.usage.total_tokens
            before = response
