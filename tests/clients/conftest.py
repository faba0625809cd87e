"""Real servers in the project's own environment, behind recording proxies.

`HOLDFAST_PYTHON` is the interpreter of that environment, and servers are forks of one process of it that has
imported what they need (`tests/preloaded`). Clients never leave the machine: their telemetry is
off, and what they would look up elsewhere they have with them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

os.environ.setdefault("HOLDFAST_PYTHON", str(Path(__file__).parents[2] / ".venv" / "bin" / "python"))

from tests.clients.recording import Recorder
from tests.clients.shown import Results
from tests.clients.travel import Tools
from tests.preloaded import commands

READY = re.compile(r"Holdfast serves \S+ on (http://\S+)")

os.environ.update(
    {
        "OPENAI_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LANGSMITH_TRACING": "false",
        "OTEL_SDK_DISABLED": "true",
    }
)


RESULTS = pytest.StashKey[Results]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make clients` writes down which client passed which story."""
    parser.addoption("--results", type=Path, help="file of clients and the stories that they passed")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--results")
    if path is not None:
        config.stash[RESULTS] = Results(path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    results = item.config.stash.get(RESULTS, None)
    if results is not None and (report.failed or (report.passed and call.when == "call")):
        results.note(item, report.passed)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    results = session.config.stash.get(RESULTS, None)
    if results is not None:
        results.write()


@contextmanager
def serving(log: Path, model: str, *options: str) -> Iterator[str]:
    """The address of a server that must end with status 0."""
    command = ["serve", model, "--port", "0", "--audit", "strict", *options]
    with log.open("w") as errors:
        process = commands.start(*command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        found = next((match for line in process.stdout if (match := READY.search(line))), None)
        assert found is not None, log.read_text()
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
    assert status == 0, log.read_text()


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the embedded model."""
    log = tmp_path_factory.mktemp("server") / "errors"
    sizes = ("--kv-tokens", "32768", "--context-length", "4096", "--seed", "7")
    with serving(log, "smollm2", *sizes) as url:
        yield url


@pytest.fixture(scope="session")
def shared_recorder(server_url: str) -> Iterator[Recorder]:
    recorder = Recorder(server_url)
    yield recorder
    recorder.close()


@pytest.fixture
def recorder(shared_recorder: Recorder) -> Recorder:
    """The proxy, without what earlier tests sent."""
    shared_recorder.clear()
    return shared_recorder


@pytest.fixture
def url(recorder: Recorder) -> str:
    """What clients call their base URL."""
    return f"{recorder.url}/v1"


@pytest.fixture
def tools() -> Tools:
    return Tools()
