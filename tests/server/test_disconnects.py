"""Clients that go away, at every phase: the turn ends within a step, and the session is as it was."""

import json
import socket
import time
from typing import Any

import pytest

from tests.server.serving import Server
from tests.server.test_sessions import long_turn, wait_state


def send(server: Server, path: str, body: Any) -> socket.socket:
    """Send a request and leave the connection open."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def steps(server: Server) -> int:
    return int(server.get("/v1/memory").json()["step"])


ENDLESS = {"max_tokens": 7000, "ignore_eos": True}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("policy", ["rollback", "keep"])
def test_B2_B3_a_client_that_goes_away_while_the_model_speaks(
    echo: Server, stream: bool, policy: str
) -> None:
    name = echo.open()
    first = echo.say(name, "first words")
    known = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    body = {"input": "abc", "stream": stream, "sampling": ENDLESS, "on_abort": policy}
    connection = send(echo, f"/v1/sessions/{name}/turns", body)
    wait_state(echo, name, "RUNNING")
    before = steps(echo)
    connection.close()
    wait_state(echo, name, "IDLE")
    assert steps(echo) - before < 3000, "the turn ran on to its limit"
    after = echo.state(name)
    if policy == "rollback":
        assert (after["tokens"]["known"], after["turns"]) == (known, 1)
    else:
        assert after["turns"] == 2
        assert after["tokens"]["known"] > known
    turn = echo.say(name, "and on")
    assert turn["text"] == "and on"
    assert turn["usage"]["cached_tokens"] == after["tokens"]["known"]


def test_a_client_that_goes_away_during_its_prompt(echo: Server) -> None:
    """Chunks of 512 tokens: the turn is somewhere in its prompt when the client leaves."""
    for pause in (0.0, 0.002, 0.005, 0.01):
        name = echo.open()
        connection = send(
            echo, f"/v1/sessions/{name}/turns", {"input": "x" * 7000, "sampling": {"max_tokens": 99}}
        )
        time.sleep(pause)
        connection.close()
        answer = echo.post(f"/v1/sessions/{name}/turns", {"input": "again"})
        assert answer.json()["text"] == "again"


def test_B4_a_client_that_goes_away_while_it_waits(echo: Server) -> None:
    """More requests than run at once: some run, some wait when their clients leave, and all of them end."""
    connections = [
        send(echo, "/v1/completions", {"model": "echo", "prompt": "abc", **ENDLESS}) for _ in range(80)
    ]
    deadline = time.monotonic() + 20
    while not any("TURN" in pool for pool in echo.held()):
        assert time.monotonic() < deadline, "no turn has begun"
    for connection in connections:
        connection.close()
    echo.settle()


def test_a_client_that_goes_away_at_the_last_token(echo: Server) -> None:
    for _ in range(20):
        name = echo.open()
        connection = send(echo, f"/v1/sessions/{name}/turns", {"input": "ab", "stream": True})
        connection.recv(1)
        connection.close()
        wait_state(echo, name, "IDLE")
        assert echo.state(name)["turns"] in (0, 1)
        assert echo.say(name, "again")["text"] == "again"


def test_a_client_that_goes_away_during_close(echo: Server) -> None:
    for _ in range(5):
        name = echo.open()
        call: Any = long_turn(echo, name, "long")
        host, port = echo.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"DELETE /v1/sessions/{name} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        call.join()
        assert call.answer.json()["finish_reason"] == "abort"
        deadline = time.monotonic() + 10
        while echo.get(f"/v1/sessions/{name}").status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        # The one who closed is gone; whoever asks again may close it once more.
        assert echo.http.delete(f"/v1/sessions/{name}").status_code in (200, 404)


def test_half_a_request_is_no_request(echo: Server) -> None:
    host, port = echo.url.removeprefix("http://").split(":")
    for piece in (
        b"POST /v1/sess",
        b"POST /v1/sessions HTTP/1.1\r\ncontent-length: 100\r\n\r\n{",
        b"\x00\xff" * 50,
    ):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(piece)
    assert echo.get("/health").status_code == 200


def test_A5_C2_a_second_turn_is_refused_and_the_first_goes_on(echo: Server) -> None:
    name = echo.open()
    echo.say(name, "before")
    call: Any = long_turn(echo, name, "first")
    for _ in range(3):
        refused = echo.post(f"/v1/sessions/{name}/turns", {"input": "second"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_busy")
    for verb, body in (("rewind", {"to_turn": 0}), ("fork", {})):
        assert echo.post(f"/v1/sessions/{name}/{verb}", body).status_code == 409
    assert echo.state(name)["state"] == "RUNNING"
    assert (
        echo.post(f"/v1/sessions/{name}/interrupt", {"turn_id": "other", "keep": "none"}).status_code == 404
    )
    assert (
        echo.post(f"/v1/sessions/{name}/interrupt", {"turn_id": "first", "keep": "none"}).status_code == 200
    )
    call.join()
    assert echo.state(name)["turns"] == 1
    assert echo.say(name, "after")["text"] == "after"


def test_B7_a_turn_without_tokens_is_refused(echo: Server) -> None:
    name = echo.open()
    for value in ("", []):
        assert echo.post(f"/v1/sessions/{name}/turns", {"input": value}).status_code == 400
    assert echo.say(name, "x")["text"] == "x"


def test_B5_a_turn_that_is_too_long_leaves_the_session(echo: Server) -> None:
    name = echo.open()
    turn = echo.say(name, "y" * 6000, sampling={"max_tokens": 1})
    refused = echo.post(f"/v1/sessions/{name}/turns", {"input": "z" * 6000})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    known = turn["usage"]["prompt_tokens"] + 1
    assert echo.say(name, "on", sampling={"max_tokens": 1})["usage"]["cached_tokens"] == known


def test_B13_C7_a_turn_longer_than_the_time_to_live_keeps_its_session(echo: Server) -> None:
    for ttl in (0.6, 2.0, 6.0):  # On a slow machine a session may expire before its turn comes.
        body = {"input": "abc", "timeout": 2 * ttl, "on_abort": "keep", "sampling": ENDLESS}
        answer = echo.post(f"/v1/sessions/{echo.open(ttl=ttl)}/turns", body)
        if answer.status_code != 410:
            break
    # It is the turn's own deadline that ends it, not the session's.
    assert answer.json()["abort_reason"] == "deadline", answer.text


def test_B17_the_gauges_are_the_ledger_s(echo: Server) -> None:
    name = echo.open()
    echo.say(name, "x" * 500, sampling={"max_tokens": 1})
    deadline = time.monotonic() + 10
    while True:
        pools = echo.get("/v1/memory").json()["pools"]
        ledger = {
            f"{pool['component']} {kind}": float(count)
            for pool in pools
            for kind, count in pool["holders"].items()
        }
        gauges = {}
        for line in echo.get("/metrics").text.splitlines():
            if line.startswith("holdfast_units{"):
                labels = dict(
                    part.split("=") for part in line[len("holdfast_units{") :].split("}")[0].split(",")
                )
                gauges[f"{labels['component']} {labels['holder']}".replace('"', "")] = float(line.split()[-1])
        if gauges == ledger:
            return
        assert time.monotonic() < deadline, (gauges, ledger)
        time.sleep(0.2)
