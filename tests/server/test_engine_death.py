"""The engine's process is killed (-9) while many sessions talk: their clients hear of it, and go on.

Every call that is in flight or comes meanwhile is answered with 503 and `Retry-After`; the server starts an
engine by itself, and requests work again. With a journal each session goes on where it was, and a turn that
is asked for again with its name is not taken twice: the conversation is the one that it is alone. Without
one, a session says that it was lost, and its client begins again.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.models.small import conversation, write_small_model
from tests.server.conftest import Serve
from tests.server.serving import Server
from tests.server.test_load import Talk, check, options_for


class SessionLost(Exception):
    """The server says that a session is gone."""


class Patient(httpx.AsyncClient):
    """A client that tries again after a 503, as the answer tells it to; any other failure is raised."""

    refusals: int = 0
    turns: int = 0

    async def request(self, method: Any, url: Any, **more: Any) -> httpx.Response:
        deadline = time.monotonic() + 300
        while True:
            answer = await super().request(method, url, **more)
            if answer.status_code == 410:
                assert answer.json()["error"]["code"] == "session_lost", answer.text
                raise SessionLost
            if answer.status_code != 503:
                self.turns += str(url).endswith("/turns")
                return answer
            self.refused(answer)
            assert time.monotonic() < deadline, "the engine did not come back"
            await asyncio.sleep(0.1)

    @contextlib.asynccontextmanager
    async def stream(self, *arguments: Any, **more: Any) -> AsyncIterator[httpx.Response]:
        async with super().stream(*arguments, **more) as answer:
            if answer.status_code == 503:
                await answer.aread()
                self.refused(answer)
            yield answer

    def refused(self, answer: httpx.Response) -> None:
        assert answer.json()["error"]["code"] in ("engine_lost", "engine_unavailable"), answer.text
        assert int(answer.headers["retry-after"]) >= 1
        self.refusals += 1


class Survivor(Talk):
    """One client: where its session is lost, it opens it again and says everything once more."""

    lost: int = 0

    async def run(self, client: httpx.AsyncClient) -> None:
        while True:
            try:
                await super().run(client)
            except SessionLost:
                self.lost += 1
                self.stands.clear()
                self.known = 0
            else:
                return


async def kill_again_and_again(server: Server, client: Patient, deaths: int, turns: int) -> None:
    """Kill the engine each time so many turns more were answered, and see that it comes back."""
    for _ in range(deaths):
        goal = client.turns + turns
        while client.turns < goal:
            await asyncio.sleep(0.005)
        os.kill(server.engine_pid(), signal.SIGKILL)
        body = {"model": "model", "prompt": [5, 6, 7], "max_tokens": 2}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text


async def talk_and_kill(server: Server, talks: list[Survivor], deaths: int, turns: int) -> Patient:
    limits = httpx.Limits(max_connections=len(talks) * 2)
    async with Patient(base_url=server.url, timeout=600, limits=limits) as client:
        killing = asyncio.create_task(kill_again_and_again(server, client, deaths, turns))
        try:
            await asyncio.gather(*(talk.run(client) for talk in talks))
            assert killing.done(), "the conversations were over before every death had come"
            await killing
        finally:
            killing.cancel()
        return client


def die(
    serve: Serve, directory: Path, family: str, sessions: int, turns: int, deaths: int, *more: str
) -> None:
    write_small_model(directory / "model", family)
    server = serve(directory / "model", *options_for(sessions, turns), *more)
    talks = [
        Survivor(f"s-{number}", conversation(number, turns, words=6), random.Random(number), warm=False)
        for number in range(sessions)
    ]
    # Not every turn is counted (some are left), and while the engine is away a whole round of them comes due.
    between = sessions * turns // (2 * (deaths + 1))
    client = asyncio.run(talk_and_kill(server, talks, deaths, between))
    assert client.refusals >= deaths, "somebody was in the middle of something each time"
    lost = sum(talk.lost for talk in talks)
    assert lost == 0 if "--journal" in more else lost >= deaths
    assert f"holdfast_engine_restarts_total {deaths}.0" in server.get("/metrics").text
    check(server, directory / "model", talks)


def journal_in(directory: Path) -> tuple[str, str]:
    return "--journal", str(directory / "journal.db")


def test_sessions_go_on_after_the_engine_died(serve: Serve, tmp_path: Path) -> None:
    die(serve, tmp_path, "llama", 8, 4, 1, *journal_in(tmp_path))


def test_sessions_that_are_lost_begin_again(serve: Serve, tmp_path: Path) -> None:
    die(serve, tmp_path, "llama", 8, 4, 1)


@pytest.mark.soak
@pytest.mark.parametrize("family", ["llama", "mistral", "bamba"])
def test_64_sessions_go_on_after_the_engine_died(serve: Serve, tmp_path: Path, family: str) -> None:
    die(serve, tmp_path, family, 64, 20, 5, *journal_in(tmp_path))


@pytest.mark.soak
def test_64_sessions_that_are_lost_begin_again(serve: Serve, tmp_path: Path) -> None:
    die(serve, tmp_path, "llama", 64, 20, 3)
