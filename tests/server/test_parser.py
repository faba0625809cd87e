"""Parsing is bounded: tiny chunks take many rounds of the event loop, and lose nothing on the way."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import h11
import pytest
import uvicorn

from holdfast.server.http import parser
from holdfast.server.http.connections import Config, Connections
from holdfast.server.http.parser import EVENTS_MAX, Parser

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKS = 6_000
BODY = b"1\r\n-\r\n" * CHUNKS + b"0\r\n\r\n"


class Application:
    """Reads a body and says how long it was, or answers until the client has gone."""

    def __init__(self, endless: bool = False) -> None:
        self.endless = endless
        self.left = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        length, more = 0, True
        while more:
            message = await receive()
            length, more = length + len(message.get("body", b"")), message.get("more_body", False)
        said = b"%d\n" % length
        headers = [] if self.endless else [(b"content-length", b"%d" % len(said))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": said, "more_body": self.endless})
        if self.endless:
            self.left = (await receive())["type"] == "http.disconnect"


@asynccontextmanager
async def serving(application: Application) -> AsyncIterator[int]:
    """A server in this event loop; its port."""
    options: dict[str, Any] = {"port": 0, "lifespan": "off", "log_config": None}
    config = Config(
        application, Connections(60.0, 60.0, 400), h11_max_incomplete_event_size=64 << 10, **options
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


def in_loop(work: Callable[[], Any]) -> Any:
    """Run a coroutine to its end."""
    return asyncio.run(asyncio.wait_for(work(), 60))


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    """The body of the next answer."""
    await reader.readuntil(b"\r\n\r\n")
    return await reader.readline()


def test_a_round_of_the_loop_parses_a_bounded_number_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    original, parsed, rounds = Parser.next_event, 0, [0]

    def counted(self: Parser) -> Any:
        nonlocal parsed
        event = original(self)
        parsed += event is not h11.NEED_DATA
        return event

    monkeypatch.setattr(Parser, "next_event", counted)

    async def attack() -> None:
        loop = asyncio.get_running_loop()

        def tick() -> None:
            rounds.append(parsed)
            loop.call_soon(tick)

        async with serving(Application()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            tick()
            for _ in range(2):
                writer.write(HEAD + BODY)
                assert await answer_of(reader) == b"%d\n" % CHUNKS
            writer.close()

    in_loop(attack)
    assert parsed >= 2 * CHUNKS
    assert max(after - before for before, after in pairwise(rounds)) <= EVENTS_MAX


def test_requests_behind_tiny_chunks_are_answered() -> None:
    async def ask() -> list[bytes]:
        async with serving(Application()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write((HEAD + BODY + HEAD + b"0\r\n\r\n") * 3)
            said = [await answer_of(reader) for _ in range(6)]
            writer.close()
            return said

    assert in_loop(ask) == [b"%d\n" % CHUNKS, b"0\n"] * 3


def test_a_client_that_goes_after_tiny_chunks_is_noticed() -> None:
    async def leave() -> bool:
        application = Application(endless=True)
        async with serving(application) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD + BODY)
            await reader.readuntil(b"\r\n\r\n")
            writer.close()
            while not application.left:
                await asyncio.sleep(0.01)
        return application.left

    assert in_loop(leave)


def test_headers_may_come_byte_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read without an event is no event: nothing has been asked yet whose body could wait."""
    monkeypatch.setattr(parser, "EVENTS_MAX", 8)
    faults: list[dict[str, Any]] = []

    async def ask() -> list[bytes]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        said = []
        async with serving(Application()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                for byte in HEAD:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.002)
                writer.write(BODY)
                said.append(await answer_of(reader))
            writer.close()
        return said

    assert in_loop(ask) == [b"%d\n" % CHUNKS] * 2
    assert not faults
