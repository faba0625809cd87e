"""The engine's process dies or hangs, the server is told to end: clients hear of it, and it comes back."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.plain import NO_TLS
from tests.server.conftest import Serve
from tests.server.serving import Server
from tests.server.test_sessions import ENDLESS, UNENDING, long_turn


def test_kill_9_of_the_engine_is_heard_and_healed(serve: Serve) -> None:
    server = serve("echo", "--audit", "strict", *ENDLESS, execute=True)
    name = server.open("lost")
    server.say(name, "hello")
    call: Any = long_turn(server, name, "long", sampling=UNENDING)
    os.kill(server.engine_pid(), signal.SIGKILL)
    call.join()
    assert call.answer.status_code == 503
    assert call.answer.json()["error"]["code"] == "engine_lost"
    assert int(call.answer.headers["retry-after"]) >= 1
    refused = server.post("/v1/completions", {"model": "echo", "prompt": "x", "max_tokens": 1})
    assert refused.status_code in (200, 503)
    if refused.status_code == 503:
        assert int(refused.headers["retry-after"]) >= 1
    server.wait_ready()
    assert (
        server.post("/v1/completions", {"model": "echo", "prompt": "x", "max_tokens": 1}).status_code == 200
    )
    gone = server.get("/v1/sessions/lost")
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "session_lost")
    assert server.open("lost") == "lost"
    assert server.say("lost", "again")["text"] == "again"
    assert "holdfast_engine_restarts_total 1.0" in server.get("/metrics").text
    server.check_clean()


def test_kill_9_under_a_stream_ends_it_with_an_error(serve: Serve) -> None:
    server = serve("echo", *ENDLESS)
    name = server.open()
    body = {"input": "abc", "stream": True, "sampling": UNENDING}
    with server.http.stream("POST", f"/v1/sessions/{name}/turns", json=body) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: delta"
        os.kill(server.engine_pid(), signal.SIGKILL)
        rest = list(lines)
    assert "event: error" in rest
    assert any("engine_lost" in line for line in rest)
    server.wait_ready()


def test_a_journal_brings_sessions_back_after_kill_9(serve: Serve, tmp_path: Any) -> None:
    server = serve("echo", "--kv-tokens", "16384", "--journal", str(tmp_path / "journal.db"))
    name = server.open("kept", system="Be brief.", metadata={"a": 1})
    turns = [server.say(name, f"word {number}", turn_id=f"t-{number}") for number in range(3)]
    known = server.state(name)["tokens"]["known"]
    server.kill_engine()
    server.wait_ready()
    back = server.state(name)
    assert (back["tokens"]["known"], back["turns"], back["metadata"]) == (known, 3, {"a": 1})
    again = server.say(name, "word 2", turn_id="t-2")
    assert again["token_ids"] == turns[2]["token_ids"]
    assert server.state(name)["turns"] == 3
    usage = server.say(name, "on")["usage"]
    assert usage["prompt_tokens"] > known
    server.check_clean()


def test_a_hanging_engine_is_replaced(serve: Serve) -> None:
    server = serve("echo", "--kv-tokens", "16384", "--hang-seconds", "3")
    before = server.engine_pid()
    server.kill_engine(signal.SIGSTOP)
    server.wait_ready()
    assert server.engine_pid() != before
    assert server.say(server.open(), "hello")["text"] == "hello"


def test_no_engine_outlives_its_server(serve: Serve) -> None:
    server = serve("echo", "--kv-tokens", "4096", execute=True)
    engine = Path(f"/proc/{server.engine_pid()}")
    server.process.kill()
    server.process.wait()
    deadline = time.monotonic() + 30
    while engine.exists():
        assert time.monotonic() < deadline, "the engine's process is still there"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_0(serve: Serve, number: int) -> None:
    server = serve("echo", "--kv-tokens", "16384", "--context-length", "16384", "--audit", "strict")
    name = server.open()
    answers: list[httpx.Response] = []

    def finish() -> None:
        body = {"input": "abc", "sampling": {"max_tokens": 300, "ignore_eos": True}}
        answers.append(
            httpx.post(f"{server.url}/v1/sessions/{name}/turns", json=body, timeout=60, verify=NO_TLS)
        )

    call = threading.Thread(target=finish)
    call.start()
    while server.state(name)["state"] not in ("RUNNING",) and call.is_alive():
        time.sleep(0.002)
    server.process.send_signal(number)
    call.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 300
    assert server.stop() == 0


def test_a_second_signal_does_not_wait(serve: Serve) -> None:
    server = serve("echo", "--drain-seconds", "600", *ENDLESS)
    name = server.open()
    call: Any = long_turn(server, name, "endless", sampling=UNENDING)
    server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 60
    while server.get("/health/ready").status_code == 200:
        assert time.monotonic() < deadline, "the signal is not heard"
        time.sleep(0.01)
    refused = httpx.post(f"{server.url}/v1/sessions", json={}, timeout=10, verify=NO_TLS)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    call.join()


def test_clients_that_are_cut_off_at_the_end_are_no_errors(serve: Serve) -> None:
    """Every client that hears of the end closes what it had open, and what it says then reaches no engine."""
    room = ("--context-length", "500000", "--kv-tokens", "3100000")
    server = serve("echo", "--drain-seconds", "0.2", *room)
    # All of them must still speak when the last has begun, on a slow machine too.
    unending = UNENDING | {"max_tokens": 490_000}
    calls: list[Any] = [long_turn(server, server.open(), f"t-{each}", sampling=unending) for each in range(6)]
    assert server.stop() == 0
    for call in calls:
        call.join()
        assert call.answer.status_code == 503 or call.answer.json()["finish_reason"] == "abort"
    assert server.complaints() == []


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_reason(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    with pytest.raises(AssertionError, match="NoSuchModel"):
        Server(tmp_path)
