"""Preloaded commands stand for executed ones: same output, same end, real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preloaded import commands
from tests.server.conftest import Serve

SETTINGS = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


@pytest.fixture(autouse=True)
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks are allowed, whatever the environment of the run says."""
    monkeypatch.delenv("HOLDFAST_TESTS_EXECUTE", raising=False)


def command_line(process: int) -> list[str]:
    return Path(f"/proc/{process}/cmdline").read_bytes().decode().rstrip("\0").split("\0")


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    "arguments",
    [("version",), ("nosuch",), ("sessions", "ls", "--journal", "/nowhere"), ("serve", "--help")],
    ids=lambda arguments: arguments[0],
)
def test_a_fork_says_and_ends_as_a_new_interpreter_does(arguments: tuple[str, ...]) -> None:
    assert commands.NURSERY.fits(SETTINGS)
    forked = commands.run(*arguments, text=True, env=SETTINGS)
    executed = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=SETTINGS,
    )
    assert (forked.returncode, forked.stdout) == (executed.returncode, executed.stdout)
    assert forked.stderr == executed.stderr


def test_a_server_and_its_engine_are_processes_of_their_own(serve: Serve) -> None:
    server = serve("echo", "--kv-tokens", "4096")
    assert isinstance(server.process, commands.Command)
    engine = server.engine_pid()
    assert (parent(server.process.pid), parent(engine)) == (os.getpid(), server.process.pid)
    expected = [sys.executable, "-m", "holdfast.cli", "serve", *server.arguments]
    assert command_line(server.process.pid) == expected
    assert command_line(engine)[:3] == [sys.executable, "-m", "holdfast.server.link.worker"]
    server.kill_engine()
    server.wait_ready()
    assert parent(server.engine_pid()) == server.process.pid
    server.process.send_signal(signal.SIGKILL)
    assert server.process.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "OMP_NUM_THREADS", "LD_PRELOAD"])
def test_what_an_interpreter_reads_at_its_start_is_not_forked(name: str) -> None:
    assert not commands.NURSERY.fits({**SETTINGS, name: "7"})
    assert commands.NURSERY.fits({**SETTINGS, "HOLDFAST_SEED": "7"})


def test_all_are_executed_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TESTS_EXECUTE", "1")
    assert not commands.NURSERY.fits(SETTINGS)
