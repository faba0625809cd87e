"""The server that agents of Node call: the echo model with room for their long prompts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.conftest import serving
from tests.clients.recording import Recorder


@pytest.fixture(scope="session")
def agents_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("agents") / "errors"
    sizes = ("--kv-tokens", "524288", "--context-length", "131072")
    with serving(log, "echo", *sizes, "--tool-parser", "hermes", "--reasoning-parser", "think") as url:
        yield url


@pytest.fixture
def agent_recorder(agents_url: str) -> Iterator[Recorder]:
    """The proxy in front of it, for one test."""
    recorder = Recorder(agents_url)
    yield recorder
    recorder.close()
