"""Servers to attack. One that an attack has harmed is ended with its test; one that held is used again."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import demands
from tests.hostile.neighbours import check_clean
from tests.models.small import write_small_model
from tests.server.serving import Server

Serve = Callable[..., Server]

ROOM = ("--kv-tokens", "65536", "--context-length", "8192")

FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Remember of a test that it failed: its server is not used again."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


def end(server: Server) -> None:
    """End a server; one that stands still is killed, since its test has said so already."""
    server.http.close()
    server.process.terminate()
    try:
        server.process.wait(demands.STANDSTILL_SECONDS)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
    server._reader.join(10)
    assert server.process.stdout is not None
    server.process.stdout.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers of one's own; they end with the test."""
    started: list[Server] = []

    def start(model: str | Path, *arguments: str, **more: Any) -> Server:
        started.append(Server(model, *arguments, starts_within=demands.START_SECONDS, **more))
        return started[-1]

    yield start
    for server in started:
        end(server)


def started(start: Serve, *arguments: Any, **more: Any) -> Server | str:
    """A server; or what it said when it ended at its start."""
    try:
        return start(*arguments, **more)
    except AssertionError as ended:
        return str(ended)


@pytest.fixture(scope="session")
def idle_servers() -> Iterator[list[Server]]:
    """At most one server of the model that says what it was told, with nothing in it."""
    servers: list[Server] = []
    yield servers
    for server in servers:
        assert server.stop() == 0
        assert server.complaints() == []


@pytest.fixture
def echo(idle_servers: list[Server], request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of that model, found as it should be after each test."""
    if not idle_servers:
        idle_servers.append(Server("echo", *ROOM, starts_within=demands.START_SECONDS))
    server = idle_servers.pop()
    yield server
    if FAILED in request.node.stash:
        end(server)
        return
    check_clean(server)
    assert server.complaints() == []
    idle_servers.append(server)


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small real model."""
    return write_small_model(tmp_path_factory.mktemp("small") / "llama")
