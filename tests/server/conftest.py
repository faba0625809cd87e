"""Servers for the tests: one that all may share, and others made on demand. All count strictly."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.models.small import write_small_model
from tests.server.apart import apart
from tests.server.serving import Server

__all__ = ["apart"]

Serve = Callable[..., Server]


@pytest.fixture(scope="session")
def shared_echo() -> Iterator[Server]:
    """A server of the model that says what it was told."""
    server = Server("echo", "--audit", "strict", "--kv-tokens", "65536", "--context-length", "8192")
    yield server
    assert server.stop() == 0
    assert server.complaints() == []


@pytest.fixture
def echo(shared_echo: Server) -> Iterator[Server]:
    """That server, with nothing cached before each test, and found as it should be after it."""
    assert shared_echo.post("/flush_cache").status_code == 200
    yield shared_echo
    shared_echo.check_clean()
    assert shared_echo.complaints() == []


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers of one's own; they end with the test, cleanly."""
    started: list[Server] = []

    def start(
        model: str | Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        descriptors: int | None = None,
        execute: bool = False,
    ) -> Server:
        server = Server(model, *arguments, environment=environment, descriptors=descriptors, execute=execute)
        started.append(server)
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            assert server.stop() == 0, "\n".join(server.lines)
        else:
            server.http.close()
        assert not any("Traceback" in line for line in server.lines), "\n".join(server.lines)


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of small real models, by family, each written once."""
    written: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in written:
            written[family] = tmp_path_factory.mktemp("small") / family
            write_small_model(written[family], family)
        return written[family]

    return directory


@pytest.fixture(scope="session")
def shared_caller() -> Iterator[Server]:
    parsers = ("--tool-parser", "hermes", "--reasoning-parser", "think")
    server = Server(
        "echo", *parsers, "--audit", "strict", "--kv-tokens", "65536", "--context-length", "16384"
    )
    yield server
    assert server.stop() == 0
    assert server.complaints() == []


@pytest.fixture
def caller(shared_caller: Server) -> Iterator[Server]:
    """A server of the model that says what it was told, with formats for calls and reasoning."""
    assert shared_caller.post("/flush_cache").status_code == 200
    yield shared_caller
    shared_caller.check_clean()


@pytest.fixture(scope="session")
def responder() -> Iterator[Server]:
    """A server for responses and conversations, whose sessions stay from test to test."""
    server = Server(
        *("echo", "--tool-parser", "hermes", "--audit", "strict"),
        *("--kv-tokens", "65536", "--context-length", "8192"),
    )
    yield server
    assert server.stop() == 0
    assert server.complaints() == []
