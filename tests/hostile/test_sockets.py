"""Connections that never finish what they began, bodies that nobody asked for, and bytes that are no HTTP."""

import contextlib
import json
import random
import resource
import select
import socket
import time

import pytest

from tests.hostile import demands
from tests.hostile.conftest import ROOM, Serve
from tests.hostile.neighbours import Watch
from tests.hostile.raw import (
    TEXT,
    answer_of,
    ask,
    closed_by_server,
    connect,
    frame,
    handshake,
    head,
    open_socket,
)
from tests.server.serving import Server

pytestmark = pytest.mark.soak

JSON = "Content-Type: application/json"
NATIVE_LONG = {"max_new_tokens": 390_000, "ignore_eos": True}


def beginnings(server: Server) -> dict[str, bytes]:
    """Requests that are never finished."""
    body = head(server, "POST", "/v1/sessions", JSON, "Content-Length: 1000")
    chunked = head(server, "POST", "/v1/sessions", JSON, "Transfer-Encoding: chunked")
    return {
        "nothing": b"",
        "half a line": b"GET /v1/mod",
        "half a header": head(server, "GET", "/v1/models")[:-2] + b"X-More: ",
        "no body": body,
        "half a body": body + b'{"id": "x',
        "half a chunk": chunked + b'100\r\n{"id": "x',
        "no more chunks": chunked + b'2\r\n{"\r\n',
        "half a handshake": handshake(server, "/v1/realtime")[:-2],
    }


def trickle(connections: list[socket.socket]) -> None:
    """Wait until the server has closed all of them; some get a byte now and then, which wins them nothing."""
    left = dict(enumerate(connections))
    deadline = time.monotonic() + demands.HALF_OPEN_SECONDS
    while left:
        assert time.monotonic() < deadline, f"{len(left)} of {len(connections)} connections are still open"
        for number, connection in list(left.items()):
            if closed_by_server(connection):
                del left[number]
            elif number % 2:
                try:
                    connection.send(b" ")
                except OSError:
                    del left[number]
        time.sleep(1.0)


def test_connections_that_finish_nothing_are_closed(echo: Server) -> None:
    with Watch(echo) as watch:
        connections = []
        for sent in beginnings(echo).values():
            for _ in range(24):
                connections.append(connect(echo))
                connections[-1].sendall(sent)
        try:
            watch.during(lambda: trickle(connections))
        finally:
            for connection in connections:
                connection.close()


def test_others_are_served_while_connections_do_nothing(echo: Server) -> None:
    """Hundreds of strangers who say nothing: a new client is still let in."""
    idle: list[socket.socket] = []
    with Watch(echo) as watch:
        try:
            idle += [connect(echo) for _ in range(900)]
            watch.go_on()
            assert ask(echo, head(echo, "GET", "/v1/models")).status == 200
        finally:
            for connection in idle:
                connection.close()


def test_running_short_of_descriptors_is_said_and_survived(serve: Serve) -> None:
    """With 256 descriptors for a process: strangers leave room for others, and regulars are warned of."""
    server = serve("echo", *ROOM, descriptors=256)
    with Watch(server) as watch, contextlib.ExitStack() as held:
        for _ in range(400):
            held.enter_context(connect(server))
        watch.go_on()
        assert ask(server, head(server, "GET", "/v1/models")).status == 200
        watch.during(lambda: [stay(server, held) for _ in range(400)])
        watch.go_on()
        warned = [line for line in server.lines if "WARNING" in line and "descriptor" in line.lower()]
        assert warned, "nothing in the log says that descriptors run short"
        assert len(server.lines) < 200, "the log is flooded"
        held.close()
        deadline = time.monotonic() + demands.ANSWER_SECONDS
        while ask(server, head(server, "GET", "/v1/models")).status != 200:
            assert time.monotonic() < deadline, "descriptors did not come back"


def stay(server: Server, held: contextlib.ExitStack) -> None:
    """Ask something on a connection, and keep it."""
    connection = held.enter_context(connect(server, demands.STANDSTILL_SECONDS))
    try:
        connection.sendall(head(server, "GET", "/v1/models"))
    except OSError:
        return  # It is not let in.
    answer_of(connection)


def test_the_server_takes_all_descriptors_that_it_may_have(serve: Serve) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        server = serve("echo", *ROOM)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[0] == hard


def test_unfinished_bodies_hold_little_memory(echo: Server) -> None:
    """Forty bodies of nearly the largest size, none of which ends."""
    piece = b" " * (15 * demands.MEBIBYTE)

    def attack(connections: list[socket.socket]) -> None:
        begun = head(echo, "POST", "/v1/sessions", JSON, f"Content-Length: {len(piece) + 100}")
        for connection in connections:
            connection.settimeout(demands.STANDSTILL_SECONDS)
            try:
                connection.sendall(begun + piece)
            except OSError:
                continue  # It is not read to its end: refused, closed, or left waiting.

    with Watch(echo, growth_bytes=demands.BODIES_GROWTH_BYTES) as watch:
        connections = [connect(echo) for _ in range(40)]
        try:
            watch.during(lambda: attack(connections))
            for _ in range(5):
                watch.go_on()
        finally:
            for connection in connections:
                connection.close()


def test_a_request_with_two_lengths_is_no_cover_for_another(echo: Server) -> None:
    """Content-Length and Transfer-Encoding at once: a proxy may see other requests than the server."""
    hidden = head(echo, "GET", "/v1/models")
    for lengths in (
        [f"Content-Length: {5 + len(hidden)}", "Transfer-Encoding: chunked"],
        ["Transfer-Encoding: chunked", f"Content-Length: {5 + len(hidden)}"],
    ):
        with connect(echo, demands.STANDSTILL_SECONDS) as connection:
            connection.sendall(head(echo, "POST", "/flush_cache", *lengths) + b"0\r\n\r\n" + hidden)
            first = answer_of(connection)
            second = answer_of(connection)
            assert demands.refused(first.status), first
            assert second.status == 0, "the connection was kept, and what was hidden answered"


def test_an_upgrade_with_a_body_is_answered_or_closed(echo: Server) -> None:
    for length in ("Content-Length: 5", "Transfer-Encoding: chunked"):
        with connect(echo, demands.HALF_OPEN_SECONDS) as connection:
            connection.sendall(handshake(echo, "/v1/realtime", length) + b"5\r\nhello\r\n0\r\n\r\n")
            readable, _, _ = select.select([connection], [], [], demands.HALF_OPEN_SECONDS)
            assert readable, "neither an answer nor an end"


CHUNKED = b"POST /v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 100,
    b"GET / HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET " + b"/" * 200_000 + b" HTTP/1.1\r\n\r\n",
    b"\r\n" * 50_000,
    b"\x00" * 100_000,
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n folded\r\n\r\n",
    CHUNKED + b"ffffffffffffffff\r\n",
    CHUNKED + b"1" * 100_000,
    CHUNKED + b"1;" + b"x" * 300_000,
    b"POST /v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    b"POST /v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
)


def test_bytes_that_are_no_http_harm_nobody(echo: Server) -> None:
    chance = random.Random(26)

    def attack() -> list[int]:
        sent = [*GARBAGE, *(chance.randbytes(chance.randint(1, 5000)) for _ in range(200))]
        return [ask(echo, each, demands.STANDSTILL_SECONDS, is_all=True).status for each in sent]

    with Watch(echo) as watch:
        statuses = watch.during(attack)
        assert all(status in (0, 505) or demands.refused(status) for status in statuses), statuses


def test_a_chunked_body_in_tiny_chunks_starves_nobody(echo: Server) -> None:
    """A body of a megabyte, one byte at a time: each byte costs six."""

    def attack() -> None:
        with connect(echo) as connection:
            connection.sendall(head(echo, "POST", "/v1/sessions", JSON, "Transfer-Encoding: chunked"))
            piece = b"1\r\n \r\n" * 4096
            try:
                for _ in range(256):
                    connection.sendall(piece)
                connection.sendall(b"0\r\n\r\n")
            except OSError:
                return  # Refused before its end.
            answer_of(connection)

    with Watch(echo) as watch:
        watch.during(attack)


def test_requests_on_one_connection_without_waiting_starve_nobody(echo: Server) -> None:
    def attack() -> None:
        with connect(echo) as connection:
            connection.settimeout(demands.STANDSTILL_SECONDS)
            try:
                for _ in range(100):
                    connection.sendall(head(echo, "GET", "/v1/models") * 100)
            except OSError:
                return  # What is not read piles up on the attacker's side.

    with Watch(echo) as watch:
        watch.during(attack)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_path_forges_no_line_of_the_log(serve: Serve, form: str) -> None:
    server = serve("echo", *ROOM, "--log-level", "debug", "--log-format", form)
    forged = "12:00:00 ERROR holdfast.server  forged"
    ends = ("%0a", "%0d%0a", "%0d", "%c2%85", "%e2%80%a8", "%0b", "%0c", "%1b[2K%1b[1A", "%1b%5b31m", "%00")
    for end in ends:
        for method in ("GET", "POST"):
            ask(server, head(server, method, f"/v1/{end}{forged.replace(' ', '%20')}", "Content-Length: 0"))
        ask(server, head(server, "GET", "/v1/models", f"X-Request-Id: a\x85{forged}"))
    server.check_clean()
    text = "\n".join(server.lines)
    assert not [line for line in text.splitlines() if line.startswith(forged)]
    assert not set(text) & {"\x1b", "\x00", "\r", "\x0b", "\x0c", "\x85", "\u2028"}


def test_streams_that_nobody_reads_hold_little_memory(serve: Serve) -> None:
    """Answers of hundreds of thousands of tokens to clients that never read a byte of them."""
    server = serve("echo", "--kv-tokens", "3300000", "--context-length", "400000")
    long = {"stream": True, "max_tokens": 390_000, "ignore_eos": True}
    user = [{"role": "user", "content": "abc"}]
    repeated = [{"role": "user", "content": "x" * 190_000}]  # Without a way to ask for more than it says.
    sampling = {"max_tokens": 390_000, "ignore_eos": True}
    bodies = (
        ("/v1/completions", {"prompt": "abc", **long}),
        ("/v1/chat/completions", {"messages": user, "logprobs": True, **long}),
        ("/generate", {"text": "abc", "stream": True, "sampling_params": NATIVE_LONG}),
        (
            "/v1/responses",
            {"input": "x" * 190_000, "stream": True, "max_output_tokens": 190_000, "store": False},
        ),
        ("/v1/messages", {"messages": repeated, "stream": True, "max_tokens": 190_000}),
        ("/v1/sessions/silent/turns", {"input": "abc", "stream": True, "sampling": sampling}),
    )
    spoken: tuple[dict[str, object], ...] = (
        {"type": "session.open", "id": "unheard"},
        {"type": "input.append", "text": "abc"},
        {"type": "input.commit", "sampling": sampling},
    )
    with Watch(server) as watch:
        server.open("silent")
        silent = []
        try:
            for path, asked in bodies:
                body = json.dumps(asked)
                silent.append(connect(server))
                silent[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sent = head(server, "POST", path, JSON, f"Content-Length: {len(body)}") + body.encode()
                silent[-1].sendall(sent)
            silent.append(open_socket(server, "/v1/realtime"))
            for message in spoken:
                silent[-1].sendall(frame(TEXT, json.dumps(message).encode()))
            before = watch.neighbours[0].tokens
            while watch.neighbours[0].tokens - before < 40_000:  # As many as each of them was sent.
                watch.go_on()
            for connection in silent[: len(bodies)]:
                assert connection.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"
        finally:
            for connection in silent:
                connection.close()
