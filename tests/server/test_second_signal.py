"""A server that writes its sessions and is told once more to end does so at once, and nothing is lost.

The file of one session is a pipe that nobody reads: whoever writes it stands still, as with a disk that does
not answer. What was written before is there at the next start; what was not is computed again from the
journal, and says the same.
"""

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.durable.journal_reading import read_sessions
from holdfast.engine.tiers.files import SUFFIX
from tests.server.conftest import Serve
from tests.server.serving import Server

NAMES = ("first", "second", "third")
GREEDY = {"sampling": {"max_tokens": 12, "ignore_eos": True, "temperature": 0}}
LONG = {"sampling": {"max_tokens": 3800, "ignore_eos": True, "temperature": 0}}


class Stand:
    """A server with a journal and a disk, and the next one on the same files."""

    def __init__(self, serve: Serve, model: Path, folder: Path) -> None:
        self.serve = serve
        self.model = model
        self.journal = folder / "sessions.journal"
        self.disk = folder / "disk"

    def start(self, *more: str) -> Server:
        sizes = ("--kv-tokens", "8192", "--window-tokens", "8192", "--state-slots", "48", "--audit", "strict")
        tiers = ("--disk", str(self.disk), "--snapshot-seconds", "3600", "--journal", str(self.journal))
        return self.serve(self.model, *sizes, *tiers, *more)

    def block(self, place: int) -> None:
        """The file that is written as number `place`, counted from 1, will stand still."""
        session = read_sessions(self.journal)[place - 1].id
        name = hashlib.sha256(session.encode()).hexdigest()[:20]
        os.mkfifo(self.disk / f"{name}-{place}{SUFFIX}.partial")


MakeStand = Callable[[str], Stand]


@pytest.fixture
def stand_of(serve: Serve, small_models: Callable[[str], Path], tmp_path: Path) -> MakeStand:
    return lambda family: Stand(serve, small_models(family), tmp_path)


def talk(server: Server) -> dict[str, list[int]]:
    """Three sessions of two turns; what each would say next, as a fork of it does."""
    expected = {}
    for name in NAMES:
        server.open(name)
        for words in ("bak del fin", "gor kus lan"):
            server.say(name, f"{words} {name}", **GREEDY)
    for name in NAMES:
        fork = server.post(f"/v1/sessions/{name}/fork", {}).json()["id"]
        expected[name] = server.say(fork, "del del kus", **GREEDY)["token_ids"]
        assert server.http.delete(f"/v1/sessions/{fork}").status_code == 200
    return expected


def wait_for(server: Server, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "\n".join(server.lines)
        assert server.process.poll() is None, "\n".join(["it ended:", *server.lines])
        time.sleep(0.01)


def ended(server: Server) -> int:
    """The status of a server that was told to end."""
    server.http.close()
    try:
        return server.process.wait(120)
    except subprocess.TimeoutExpired:
        server.process.kill()
        raise AssertionError("\n".join(["it did not end:", *server.lines])) from None
    finally:
        server._reader.join(10)


def said(server: Server, words: str) -> list[str]:
    return [line for line in server.lines if words in line]


def goes_on(server: Server, expected: dict[str, list[int]], written: int) -> None:
    """Everything is there: the first `written` sessions as files, the others as tokens."""
    before = {name: server.state(name) for name in NAMES}
    assert [before[name]["turns"] for name in NAMES] == [2, 2, 2]
    for place, name in enumerate(NAMES):
        tokens: dict[str, Any] = before[name]["tokens"]
        turn = server.say(name, "del del kus", **GREEDY)
        assert turn["token_ids"] == expected[name]
        if place < written:
            assert turn["usage"]["cached_tokens"] == tokens["known"], "it was written"
        else:
            assert tokens["computed"] == 0, "nobody had the time to write it"
    server.check_clean()


@pytest.mark.parametrize(
    ("family", "number"),
    [pytest.param("llama", signal.SIGTERM, marks=pytest.mark.soak), ("bamba", signal.SIGINT)],
)
def test_a_second_signal_cuts_the_writing_short(stand_of: MakeStand, family: str, number: int) -> None:
    stand = stand_of(family)
    server = stand.start()
    expected = talk(server)
    stand.block(2)
    server.process.send_signal(number)
    wait_for(server, lambda: bool(said(server, "Writing 3 sessions of")))
    server.process.send_signal(number)
    assert ended(server) == 0
    (line,) = said(server, "were not written")
    assert "2 of 3 sessions were not written" in line
    assert server.complaints() == []
    goes_on(stand.start(), expected, written=1)
    assert not list(stand.disk.glob("*.partial")), "what was left behind is swept away"


def cut_off(server: Server) -> None:
    """Tell the server to end while a turn is in flight, and then not to wait for it."""
    with server.http.stream(
        "POST", "/v1/sessions/third/turns", json={"input": "bak", "stream": True, **LONG}
    ) as answer:
        lines = answer.iter_lines()
        while not next(lines).startswith("event: delta"):
            pass
        server.process.send_signal(signal.SIGTERM)
        wait_for(server, lambda: server.get("/health/ready").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        *_, last = (line for line in lines if line.startswith("data: "))
        assert json.loads(last.removeprefix("data: "))["finish_reason"] == "abort"


def test_a_signal_for_the_turns_in_flight_still_lets_sessions_be_written(stand_of: MakeStand) -> None:
    stand = stand_of("llama")
    server = stand.start("--drain-seconds", "600")
    expected = talk(server)
    cut_off(server)
    assert ended(server) == 0
    assert said(server, "Writing 3 sessions of")
    assert said(server, "were not written") == []
    goes_on(stand.start(), expected, written=3)


def test_every_wait_has_a_signal_of_its_own(stand_of: MakeStand) -> None:
    stand = stand_of("llama")
    server = stand.start("--drain-seconds", "600")
    expected = talk(server)
    stand.block(1)
    cut_off(server)
    server.process.send_signal(signal.SIGTERM)
    assert ended(server) == 0
    (line,) = said(server, "were not written")
    assert "3 of 3 sessions were not written" in line
    goes_on(stand.start(), expected, written=0)
