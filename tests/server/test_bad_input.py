"""Bad input, case by case: the right 4xx with the field's name, never its value, and nothing changed."""

import json
import socket
from typing import Any

import httpx
import pytest

from tests.plain import NO_TLS
from tests.server import bad_values
from tests.server.bad_values import JSON, SECRET
from tests.server.conftest import Serve
from tests.server.serving import Server

BODIES: dict[str, bytes] = {
    "empty": b"",
    "spaces": b"   ",
    "truncated": b'{"input": "x"',
    "trailing garbage": b'{"input": "x"} y',
    "depth": b'{"input": ' + b"[" * 100_000,
    "depth in an extra field": b'{"input": "x", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "NaN": b'{"input": "x", "sampling": {"temperature": NaN}}',
    "infinity": b'{"input": "x", "sampling": {"temperature": Infinity}}',
    "huge number": b'{"input": "x", "sampling": {"max_tokens": ' + b"9" * 100_000 + b"}}",
    "huge exponent": b'{"input": "x", "sampling": {"temperature": 1e999}}',
    "invalid UTF-8": b'{"input": "\xff\xfe"}',
    "invalid UTF-8 in an extra field": b'{"input": "x", "more": "\xff"}',
    "array": b"[]",
    "text": b'"x"',
    "null": b"null",
    "lone surrogate": b'{"input": "\\ud800"}',
}


@pytest.mark.parametrize("case", BODIES)
@pytest.mark.parametrize("path", ["/v1/sessions/{}/turns", "/v1/chat/completions", "/v1/completions"])
def test_bodies_that_are_not_json(echo: Server, path: str, case: str) -> None:
    name = echo.open()
    answer = echo.http.post(path.format(name), content=BODIES[case], headers=JSON)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "code", "param"}


SAMPLING = bad_values.SAMPLING


@pytest.mark.parametrize(("field", "value"), SAMPLING, ids=lambda value: str(value)[:24])
def test_sampling_fields_of_a_turn(echo: Server, field: str, value: Any) -> None:
    name = echo.open()
    echo.say(name, "before")
    known = echo.state(name)["tokens"]["known"]
    answer = echo.post(f"/v1/sessions/{name}/turns", {"input": "x", "sampling": {field: value}})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert field in (error["param"] or "") and field in error["message"]
    assert SECRET not in answer.text
    assert echo.state(name)["tokens"]["known"] == known


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(field, value) for field, value in SAMPLING if field not in ("stop_token_ids",)],
        ("n", 10**9),
        ("n", 0),
        ("top_logprobs", 1_000_000),
        ("top_logprobs", -1),
        ("messages", "x"),
        ("messages", []),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
        ("messages", None),
        ("stream", "x"),
        ("timeout", -1),
        ("timeout", 1e300),
    ],
    ids=lambda value: str(value)[:24],
)
def test_fields_of_a_chat(echo: Server, field: str, value: Any) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, field: value}
    answer = echo.post("/v1/chat/completions", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert field in (error["param"] or "") and field in error["message"]
    assert SECRET not in answer.text


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("", "empty_turn"),
        ([], "empty_turn"),
        ([-1], "invalid_value"),
        ([258], "invalid_value"),
        ([1 << 70], "invalid_value"),
        ([1.0], "invalid_value"),
        ([True], "invalid_value"),
        ([1, {"role": "user", "content": "x"}], "invalid_value"),
        (None, "empty_turn"),
        (7, "invalid_value"),
        ([5] * 8193, "context_length_exceeded"),
        ("x" * 9000, "context_length_exceeded"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_inputs_of_a_turn(echo: Server, value: Any, code: str) -> None:
    name = echo.open()
    echo.say(name, "before")
    known = echo.state(name)["tokens"]["known"]
    answer = echo.post(f"/v1/sessions/{name}/turns", {"input": value, "sampling": {"max_tokens": 2}})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == code
    assert echo.state(name)["tokens"]["known"] == known
    assert echo.say(name, "after")["text"] == "after"


def test_prompt_and_limit_past_the_context_leave_the_session_intact(echo: Server) -> None:
    name = echo.open()
    echo.say(name, "before")
    known = echo.state(name)["tokens"]["known"]
    answer = echo.post(f"/v1/sessions/{name}/turns", {"input": "x", "sampling": {"max_tokens": 9000}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert echo.state(name)["tokens"]["known"] == known


@pytest.mark.parametrize("name", ["a/../b", "%2e%2e%2f", "a%2fb", "nul%00", "x" * 129, "é", "a b", "😀"])
def test_names_that_cannot_be(echo: Server, name: str) -> None:
    assert echo.get(f"/v1/sessions/{name}").status_code in (400, 404)
    answer = echo.post("/v1/sessions", {"id": name})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "id")
    assert name not in answer.text


def test_a_name_of_ten_megabytes(echo: Server) -> None:
    assert echo.post("/v1/sessions", {"id": "x" * 10_000_000}).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/sessions", {"id": "a", "unknown": 1}),
        ("/v1/sessions", {"ttl": -1}),
        ("/v1/sessions", {"ttl": 1e300}),
        ("/v1/sessions", {"metadata": []}),
        ("/v1/sessions", {"metadata": {"x": "y" * 100_000}}),
        ("/v1/sessions", {"system": 5}),
        ("/v1/sessions/{}/turns", {"input": "x", "unknown": 1}),
        ("/v1/sessions/{}/turns", {"input": "x", "sampling": {"unknown": 1}}),
        ("/v1/sessions/{}/turns", {"input": "x", "on_abort": "perhaps"}),
        ("/v1/sessions/{}/turns", {"input": "x", "turn_id": "../x"}),
        ("/v1/sessions/{}/turns", {"sampling": {}}),
        ("/v1/sessions/{}/interrupt", {}),
        ("/v1/sessions/{}/interrupt", {"keep": "all", "keep_tokens": 1}),
        ("/v1/sessions/{}/interrupt", {"keep_tokens": -1}),
        ("/v1/sessions/{}/interrupt", {"keep_tokens": 2**40}),
        ("/v1/sessions/{}/interrupt", {"keep": "some"}),
        ("/v1/sessions/{}/rewind", {"to_turn": -1}),
        ("/v1/sessions/{}/rewind", {"to_turn": 1.5}),
        ("/v1/sessions/{}/rewind", {}),
        ("/v1/sessions/{}/fork", {"at_turn": -1}),
        ("/v1/sessions/{}/fork", {"id": "a/b"}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bodies_of_the_session_calls(echo: Server, path: str, body: dict[str, Any]) -> None:
    name = echo.open()
    echo.say(name, "before")
    known = echo.state(name)["tokens"]["known"]
    answer = echo.post(path.format(name), body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"]
    assert echo.state(name)["tokens"]["known"] == known


def test_sessions_that_are_not_there(echo: Server) -> None:
    for method, path, body in [
        ("GET", "/v1/sessions/none", None),
        ("DELETE", "/v1/sessions/none", None),
        ("POST", "/v1/sessions/none/turns", {"input": "x"}),
        ("POST", "/v1/sessions/none/interrupt", {"keep": "all"}),
        ("POST", "/v1/sessions/none/rewind", {"to_turn": 0}),
        ("POST", "/v1/sessions/none/fork", {}),
    ]:
        answer = echo.http.request(method, path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found"), path


def test_a_name_twice_is_a_conflict(echo: Server) -> None:
    echo.open("twice")
    answer = echo.post("/v1/sessions", {"id": "twice"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_exists")


def test_methods_types_and_sizes(echo: Server) -> None:
    assert echo.http.put("/v1/sessions", json={}).status_code == 405
    assert echo.http.post("/v1/sessions", data={"id": "x"}).status_code == 415
    assert (
        echo.http.post("/v1/sessions", content=b"<x/>", headers={"content-type": "text/xml"}).status_code
        == 415
    )
    untyped = echo.http.post("/v1/sessions", content=b"{}", headers={"origin": echo.url})
    assert untyped.status_code == 415
    assert echo.get("/v1/models", headers={"x-long": "y" * 40_000}).status_code in (400, 431)


def test_a_body_over_the_limit_is_refused_without_being_read(echo: Server) -> None:
    host, port = echo.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        head = "POST /v1/sessions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {1 << 40}\r\n\r\n".encode())
        answer = connection.recv(65536).decode()
    assert answer.startswith("HTTP/1.1 413")


def test_a_chunked_body_over_the_limit_is_cut(echo: Server) -> None:
    def chunks() -> Any:
        for _ in range(64):
            yield b'"' + b"x" * (1 << 20)

    with httpx.Client(base_url=echo.url, timeout=60, verify=NO_TLS) as client:
        try:
            answer = client.post("/v1/sessions", content=chunks(), headers=JSON)
        except httpx.WriteError:
            return  # The server has answered and closed before all was sent.
        assert answer.status_code == 413


def test_the_queue_says_when_it_is_full(serve: Serve) -> None:
    server = serve("echo", "--max-sessions", "3", "--audit", "strict", "--kv-tokens", "4096")
    for name in ("a", "b", "c"):
        server.open(name)
    answer = server.post("/v1/sessions", {"id": "d"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_sessions")
    assert int(answer.headers["retry-after"]) >= 1
    server.check_clean()


def test_what_is_said_is_never_in_the_log(serve: Serve) -> None:
    server = serve("echo", "--log-level", "debug", "--kv-tokens", "4096")
    name = server.open(system=f"system {SECRET}")
    server.say(name, f"user {SECRET}")
    server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]})
    server.post("/v1/chat/completions", {"messages": [{"role": SECRET, "content": 5}]})
    server.check_clean()
    assert server.stop() == 0
    assert SECRET not in "\n".join(server.lines)
    assert any("request" in line for line in server.lines)


def test_errors_are_json_everywhere(echo: Server) -> None:
    for path in ("/nothing", "/v1/nothing", "/v1/sessions/x/nothing"):
        body = json.loads(echo.get(path).text)
        assert body["error"]["code"] == "not_found"
