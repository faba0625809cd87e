"""Connections that do not get to the point: deadlines, strangers, bodies without an end, descriptors."""

import contextlib
import json
import re
import resource
import socket
import subprocess
import sys

import httpx
import pytest

from holdfast.server.http.body_memory import BodyMemory
from holdfast.server.http.connections import DESCRIPTORS_RESERVED, Connections, HttpConnection
from holdfast.server.http.problems import Problem
from tests.plain import NO_TLS
from tests.server.conftest import Serve
from tests.server.raw import connected, rest, status
from tests.server.talking import Talk

HEAD = "POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
SHORT = ("--header-seconds", "0.5", "--body-seconds", "0.5")


def answer_of(connection: socket.socket) -> bytes:
    """One answer, its body to the length that it states."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(65536)
    head, _, body = answer.partition(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head.lower())
    assert found is not None, head
    while len(body) < int(found[1]):
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def test_a_request_that_does_not_arrive_is_ended_and_nothing_else_is(serve: Serve) -> None:
    server = serve("echo", *SHORT)
    with contextlib.ExitStack() as stack:
        used, streamed = (stack.enter_context(connected(server)) for _ in range(2))
        talk = stack.enter_context(Talk(server))
        used.sendall(GET)
        assert status(answer_of(used)) == 200
        body = json.dumps({"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True})
        streamed.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert streamed.recv(1) == b"H"
        # Each of these ends by its deadline; when the last has, the ones above have outlived theirs too.
        late = {
            "nothing": (b"", 0),
            "half a head": (GET[:20], 408),
            "half a body": (f"{HEAD}Content-Length: 50\r\n\r\n{{".encode(), 408),
            "half a chunk": (f"{HEAD}Transfer-Encoding: chunked\r\n\r\n5\r\n{{".encode(), 408),
            "a body that nobody reads": (
                b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx",
                200,
            ),
        }
        for _ in range(2):
            waiting = {case: stack.enter_context(connected(server)) for case in late}
            for case, connection in waiting.items():
                connection.sendall(late[case][0])
            for case, connection in waiting.items():
                answer, expected = rest(connection), late[case][1]
                assert status(answer) == expected, (case, answer)
                assert expected != 408 or b"-seconds" in answer, answer
        used.sendall(GET)
        assert status(answer_of(used)) == 200
        used.sendall(GET[:20])
        assert status(rest(used)) == 408, "a second request has a deadline too"
        talk.open("idle")
        assert rest(streamed).endswith(b"0\r\n\r\n")
    assert server.get("/health").status_code == 200


def test_bytes_that_trickle_in_do_not_move_a_deadline(serve: Serve) -> None:
    server = serve("echo", *SHORT)
    for begun in (b"GET /health HTTP/1.1\r\nX: ", f"{HEAD}Content-Length: 1000000\r\n\r\n".encode()):
        with connected(server) as connection:
            connection.sendall(begun)
            connection.settimeout(0.05)
            for _ in range(2000):
                try:
                    answer = connection.recv(65536)
                    break
                except TimeoutError:
                    connection.sendall(b"y")
            assert status(answer) == 408


# --- strangers and descriptors -----------------------------------------------------------------------


class Fake:
    """A connection, as far as others can tell."""

    def __init__(self, authenticated: bool = False) -> None:
        self.authenticated = authenticated
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def fake(authenticated: bool = False) -> HttpConnection:
    return Fake(authenticated)  # type: ignore[return-value]


def test_of_too_many_strangers_the_oldest_is_closed() -> None:
    crowd = Connections(1.0, 1.0, descriptors_max=400)
    assert crowd.unauthenticated_max == 100
    known = [fake(authenticated=True) for _ in range(10)]
    strangers = [fake() for _ in range(150)]
    for number, each in enumerate([*known, *strangers]):
        assert crowd.enter(each, 10 + number % 200)
    assert [each.closed for each in known] == [0] * 10  # type: ignore[attr-defined]
    assert [each.closed for each in strangers] == [1] * 50 + [0] * 100  # type: ignore[attr-defined]
    for each in strangers:
        crowd.leave(each)
    assert not crowd.unauthenticated


def test_when_descriptors_run_short_new_connections_are_refused_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    crowd = Connections(1.0, 1.0, descriptors_max=400)
    assert crowd.enter(fake(), 100) and not caplog.messages
    assert crowd.enter(fake(), 360)
    for _ in range(100):
        assert not crowd.enter(fake(), 400 - DESCRIPTORS_RESERVED)
    assert len(caplog.messages) == 1 and "descriptors run short" in caplog.text


def test_half_open_connections_keep_nobody_out(serve: Serve) -> None:
    limit = 400
    server = serve("echo", descriptors=limit)
    with contextlib.ExitStack() as stack:
        half_open = [stack.enter_context(connected(server)) for _ in range(600)]
        for each in half_open:
            with contextlib.suppress(ConnectionError):
                each.sendall(GET[:20])
        assert server.get("/v1/models").status_code == 200
        for each in half_open[: 600 - limit // 4]:
            assert rest(each) == b"", "the oldest are closed"
        half_open[-1].sendall(GET[20:])
        assert status(answer_of(half_open[-1])) == 200, "the newest are not"


def test_a_server_without_descriptors_says_so_and_lives(serve: Serve) -> None:
    server = serve("echo", descriptors=200)
    refused = 0
    with contextlib.ExitStack() as stack:
        kept = []
        for _ in range(250):  # All of them use their connection, so none is a stranger.
            connection = stack.enter_context(connected(server))
            connection.sendall(GET)
            answer = answer_of(connection)
            assert status(answer) in (200, 503)
            refused += status(answer) == 503
            if status(answer) == 200:
                kept.append(connection)
        assert refused > 50
        for connection in kept:
            connection.sendall(GET)
            assert status(answer_of(connection)) == 200
    server.http.close()
    server.http = httpx.Client(base_url=server.url, timeout=60, verify=NO_TLS)
    # The server may not have seen yet that the others are closed.
    assert any(server.get("/health").status_code == 200 for _ in range(1000))
    assert sum("descriptors run short" in line for line in server.lines) == 1


def test_the_soft_limit_of_descriptors_is_raised() -> None:
    """In a process of its own: the limit is the whole process's."""
    code = (
        "import resource; from holdfast.server.http.connections import raise_descriptor_limit as up\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))\n"
        "print(up() > 300, resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard)"
    )
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 300
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True", "True"]


# --- bodies without an end ---------------------------------------------------------------------------


def test_bytes_of_bodies_are_bounded_for_all_and_for_each() -> None:
    intake = BodyMemory(100, 60)
    intake.take("a", 60)
    for tenant, count in (("a", 1), ("b", 41)):
        with pytest.raises(Problem) as refused:
            intake.take(tenant, count)
        assert refused.value.status == 429 and "100" in refused.value.message
    intake.take("b", 40)
    intake.give_back("a", 60)
    intake.take("b", 20)
    intake.give_back("b", 60)
    assert intake.total == 0


def test_unfinished_bodies_take_a_bounded_part_of_memory(serve: Serve) -> None:
    mebibyte = 1 << 20
    server = serve(
        "echo", "--body-limit", "1M", "--bodies-limit", "2M",
        environment={"HOLDFAST_API_KEYS": "ann:secret-a,bob:secret-b"},
    )  # fmt: skip

    def opens(key: str) -> httpx.Response:
        return server.post("/v1/sessions", {}, headers={"Authorization": f"Bearer {key}"})

    with connected(server) as connection:
        head = f"{HEAD}Authorization: Bearer secret-a\r\nContent-Length: {mebibyte}\r\n\r\n"
        connection.sendall(head.encode() + b" " * (mebibyte - 1))
        # As soon as all of it but its last byte is there, ann has no room for the two bytes of another.
        answer = opens("secret-a")
        while answer.status_code == 201:
            answer = opens("secret-a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_bodies")
        assert int(answer.headers["retry-after"]) >= 1
        assert opens("secret-b").status_code == 201, "bob has room of his own"
        connection.sendall(b" ")
        assert status(answer_of(connection)) == 400  # An empty body, to its end.
        assert opens("secret-a").status_code == 201
        connection.sendall(head.encode() + b" " * (mebibyte - 1))
        while opens("secret-a").status_code == 201:
            pass
    while opens("secret-a").status_code != 201:
        pass  # Its bytes are given back when the server has seen that the connection is closed.
