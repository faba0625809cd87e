"""What holds on every route: bodies that nobody reads, sockets to nowhere, notes that are nested too deep."""

import contextlib
import json
import socket
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.server.bad_values import JSON
from tests.server.serving import Server
from tests.server.talking import Talk

CHUNK = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"


def answered(server: Server, head: str, body: bytes) -> bytes:
    """Send the beginning of a request, then another request; all that is answered until the server closes."""
    host, port = server.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}\r\nhost: localhost\r\n\r\n".encode())
        # Once the server has answered and closed, nothing more can be sent, or be read twice.
        with contextlib.suppress(ConnectionError):
            connection.sendall(body)
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while more := connection.recv(65536):
                answer += more
    return answer


CHUNKED = "transfer-encoding: chunked"
TYPED = "content-type: application/json"
UNREAD = {
    "a limit that chunks go over": (413, f"POST /v1/sessions HTTP/1.1\r\n{TYPED}\r\n{CHUNKED}", CHUNK * 17),
    "another type": (415, f"POST /v1/sessions HTTP/1.1\r\ncontent-type: text/xml\r\n{CHUNKED}", CHUNK),
    "no such path": (404, f"POST /nowhere HTTP/1.1\r\n{CHUNKED}", CHUNK),
    "no such method": (405, "PUT /v1/sessions HTTP/1.1\r\ncontent-length: 1000000", b" " * 1000),
}


@pytest.mark.parametrize("case", UNREAD)
def test_an_answer_before_a_long_body_was_read_closes_the_connection(echo: Server, case: str) -> None:
    status, head, body = UNREAD[case]
    head, _, rest = answered(echo, head, body).decode().partition("\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ") and "x-request-id" in head
    assert "connection: close" in head.lower() and "HTTP/1.1" not in rest


def test_an_answer_to_a_short_body_keeps_the_connection(echo: Server) -> None:
    answer = answered(echo, "POST /nowhere HTTP/1.1\r\ncontent-length: 2", b"{}").decode()
    assert answer.startswith("HTTP/1.1 404 ") and "HTTP/1.1 200 " in answer


def test_headers_that_are_too_long_are_the_clients_fault(echo: Server) -> None:
    answer = echo.get("/v1/models", headers={"x-long": "y" * 40_000})
    assert (answer.status_code, answer.json()["error"]["type"]) == (431, "invalid_request_error")


@pytest.mark.parametrize("path", ["/", "/nowhere", "/v1/realtime/", "/v1/sessions"])
def test_a_socket_to_a_path_that_has_none_is_answered_in_json(echo: Server, path: str) -> None:
    with pytest.raises(InvalidStatus) as refused, connect(echo.url.replace("http://", "ws://") + path):
        pass
    response = refused.value.response
    assert response.status_code == 404 and response.headers["x-request-id"].startswith("req-")
    assert json.loads(response.body)["error"]["code"] == "not_found"


def nested(depth: int) -> Any:
    """An object that is `depth` deep."""
    value: Any = 1
    for _ in range(depth - 1):
        value = [value]
    return {"a": value}


def test_metadata_may_be_nested_so_deep_and_no_deeper(echo: Server) -> None:
    name = echo.open(metadata=nested(64))
    assert echo.state(name)["metadata"] == nested(64)
    for depth in (65, 900, 940, 960):
        body = b'{"metadata": {"a": ' + b"[" * (depth - 1) + b"1" + b"]" * (depth - 1) + b"}}"
        answer = echo.http.post("/v1/sessions", content=body, headers=JSON)
        assert answer.status_code == 400, (depth, answer.text)
    body = b'{"metadata": {"a": ' + b'{"b": ' * 64 + b"1" + b"}" * 64 + b"}}"
    error = echo.http.post("/v1/sessions", content=body, headers=JSON).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "metadata")
    assert [each["id"] for each in echo.get("/v1/sessions").json()["sessions"]] == [name]


def test_a_conversation_goes_on_after_metadata_that_is_too_deep(echo: Server) -> None:
    with Talk(echo) as talk:
        for depth in (65, 940, 957):
            talk.connection.send(
                '{"type": "session.open", "metadata": {"a": ' + "[" * depth + "1" + "]" * depth + "}}"
            )
            assert talk.refused()["code"] in ("invalid_value", "invalid_json")
        talk.open("deep-enough", metadata=nested(64))
