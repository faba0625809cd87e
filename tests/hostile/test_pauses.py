"""Processes that are paused or killed: a pause is not a hang, and a killed server leaves nothing behind."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.hostile import demands
from tests.hostile.conftest import ROOM, Serve
from tests.hostile.neighbours import Watch, engine_pid

pytestmark = pytest.mark.soak

HANG_SECONDS = 2.0


@pytest.mark.parametrize("who", ["server", "both"])
def test_a_pause_is_no_hang_of_the_engine(serve: Serve, who: str) -> None:
    """As `docker pause` does it, for longer than an engine may be silent: nothing is killed, nothing lost."""
    server = serve("echo", *ROOM, "--hang-seconds", str(HANG_SECONDS))
    with Watch(server) as watch:
        paused = [server.process.pid, *([watch.engine] if who == "both" else [])]
        server.open("kept")
        server.say("kept", "hello")
        for _ in range(2):
            for pid in paused:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(3 * HANG_SECONDS)
            for pid in paused:
                os.kill(pid, signal.SIGCONT)
            for _ in range(5):
                watch.go_on()
        assert server.state("kept")["turns"] == 1
        assert server.say("kept", "again")["text"] == "again"


def test_an_engine_that_is_paused_alone_is_still_replaced(serve: Serve) -> None:
    """The watch over the engine holds: one that hangs while the server lives is started again."""
    server = serve("echo", *ROOM, "--hang-seconds", str(HANG_SECONDS))
    before = engine_pid(server)
    server.kill_engine(signal.SIGSTOP)
    server.wait_ready(demands.ANSWER_SECONDS)
    assert engine_pid(server) != before
    assert server.say(server.open(), "hello")["text"] == "hello"


def test_a_killed_server_leaves_no_directories(serve: Serve, tmp_path: Path) -> None:
    """They go with the engine, or with the next server's start."""
    environment = {"TMPDIR": str(tmp_path)}
    for _ in range(2):
        server = serve("echo", *ROOM, environment=environment)
        engine = Path(f"/proc/{engine_pid(server)}")
        server.process.kill()
        server.process.wait()
        deadline = time.monotonic() + demands.ANSWER_SECONDS
        while engine.exists() and "Z (" not in _status(engine):
            assert time.monotonic() < deadline, "the engine outlives its server"
            time.sleep(0.1)
    serve("echo", *ROOM, environment=environment)
    left = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("holdfast-"))
    assert len(left) == 1, left


def _status(process: Path) -> str:
    try:
        return (process / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
