"""The server and the proxy of realtime sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import serving
from tests.clients.socket_recording import SocketRecorder


def pytest_addoption(parser: pytest.Parser) -> None:
    """Recordings are made by hand; see tests/server/test_realtime_recordings.py."""
    parser.addoption("--record", help="directory for recordings of realtime sessions")


@pytest.fixture(scope="session")
def echo_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the model that says what it was told: calls too, where it was told one."""
    log = tmp_path_factory.mktemp("echo") / "errors"
    sizes = ("--kv-tokens", "65536", "--context-length", "16384", "--tool-parser", "hermes")
    with serving(log, "echo", *sizes) as url:
        yield url


@pytest.fixture
def sockets(echo_url: str, request: pytest.FixtureRequest) -> Iterator[SocketRecorder]:
    """The proxy in front of that server's realtime sessions. `--record DIRECTORY` keeps what was said."""
    recorder = SocketRecorder(echo_url)
    yield recorder
    recorder.close()
    directory = request.config.getoption("--record")
    if directory is not None:
        recorder.save(Path(directory) / f"{request.node.name.removeprefix('test_')}.json")
