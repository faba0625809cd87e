"""Engines that come, go and move while an API process runs; `/metrics/targets`. Real engine processes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.replicas.engine_runner import Deaf
from holdfast.replicas.targets import MetricsTargets
from holdfast.server.http.keys import Keys
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.link.engine_set import EngineSet
from holdfast.server.link.tls import client_context
from tests.server.apart import SMALL, Apart, apart

__all__ = ["apart"]


@contextlib.asynccontextmanager
async def linked(apart: Apart, *addresses: str) -> AsyncIterator[EngineSet]:
    """An engine set that runs."""
    engines = EngineSet(addresses, client_context(str(apart.keys)), 5.0, Deaf())
    running = asyncio.create_task(engines.remotes.run())
    try:
        yield engines
    finally:
        await engines.remotes.stop()
        await asyncio.wait_for(running, 10)


async def until(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not look():
            await asyncio.sleep(0.01)


async def opened(engines: EngineSet, name: str) -> None:
    number = engines.number()
    command = wire.OpenSession(number, name, "public", None, None, {}, [], {})
    await engines.call(command, number)


def test_engines_come_and_go(apart: Apart) -> None:
    first, second = apart.engine(), apart.engine()

    async def story() -> None:
        async with linked(apart) as engines:
            assert not engines.remotes.up
            engines.change([first.address])
            await until(lambda: engines.remotes.up)
            await opened(engines, "public/one")
            kept = engines.remotes.engines[first.address]
            engines.change([first.address, second.address])
            await until(lambda: engines.complete)
            assert engines.remotes.engines[first.address] is kept, "its link was not touched"
            assert kept.lost == 0
            engines.change([second.address])
            await until(lambda: not kept.up)
            assert engines.places.directory.owner("public/one") is None
            with pytest.raises(Problem):
                await opened_again(engines)
            engines.change([second.address, first.address])
            await until(lambda: engines.complete)
            assert engines.places.directory.owner("public/one") == first.address

    async def opened_again(engines: EngineSet) -> None:
        number = engines.number()
        await engines.call(wire.Ask(number, wire.Question.SESSION, "public/one"), number)

    asyncio.run(story())


def test_an_engine_that_moves_keeps_its_sessions(apart: Apart, tmp_path: Path) -> None:
    options = (*SMALL, "--engine-id", "engine-0", "--journal", str(tmp_path / "journal"))
    before = apart.engine(*options)
    other = apart.engine()

    async def story() -> None:
        async with linked(apart, before.address, other.address) as engines:
            await until(lambda: engines.complete)
            while len(engines.places.directory.owned(before.address)) < 1:
                await opened(engines, f"public/{engines.number()}")
            (name, *_) = sorted(engines.places.directory.owned(before.address))
            assert await asyncio.to_thread(before.stop) == 0
            after = await asyncio.to_thread(apart.engine, *options)
            engines.change([after.address, other.address], {before.address: after.address})
            assert engines.places.directory.owner(name) == after.address, "before it is connected"
            assert not engines.complete, "so nobody is told that there is no such session"
            await until(lambda: engines.complete)
            number = engines.number()
            answer = await engines.call(wire.Ask(number, wire.Question.SESSION, name), number)
            assert answer.answer["engine"] == "engine-0"

    asyncio.run(story())


async def asked(targets: MetricsTargets, *headers: tuple[bytes, bytes]) -> tuple[int, Any]:
    """Status and body of an answer."""
    said: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    await targets({"type": "http", "headers": list(headers)}, receive, send)
    return said[0]["status"], json.loads(said[1]["body"])


def test_the_admin_finds_all_api_processes() -> None:
    targets = MetricsTargets(Keys({}, "the admin"), lambda: ["b:2", "a:1"])
    status, body = asyncio.run(asked(targets, (b"authorization", b"Bearer the admin")))
    assert (status, [each["targets"] for each in body]) == (200, [["a:1"], ["b:2"]])
    assert body[0]["labels"] == {"api": "a:1"}
    for headers in ([], [(b"authorization", b"Bearer another")], [(b"authorization", b"Basic the admin")]):
        status, body = asyncio.run(asked(targets, *headers))
        assert (status, body["error"]["code"]) == (403, "admin_required")
