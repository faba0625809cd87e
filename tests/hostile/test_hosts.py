"""Pages of other sites, and names that lead to this machine: without keys everybody on loopback is the admin.

A browser that was told that `evil.example` is 127.0.0.1 sends that name as Host, and an Origin to match.
"""

import re
from collections.abc import Iterator

import pytest

from holdfast.server.app import all_routes
from tests.hostile import demands
from tests.hostile.conftest import ROOM, Serve
from tests.hostile.raw import address_of, ask, handshake, head
from tests.server.serving import Server

STRANGERS = (
    "evil.example",
    "evil.example:{port}",
    "localhost.evil.example:{port}",
    "127.0.0.1.evil.example:{port}",
    "evil.example@127.0.0.1:{port}",
    "127.0.0.1:{port}@evil.example",
    "127.0.0.1:{port}:evil.example",
    "127.0.0.1:{port}, evil.example",
    "notlocalhost:{port}",
    "[::1].evil.example:{port}",
    "0.0.0.0.evil.example",
    "\xff\xfe",
)
"""Values of Host that name nobody here; {port} is the server's own."""

FRIENDS = ("127.0.0.1:{port}", "127.0.0.1", "localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}")

SOCKETS = tuple(sorted(path for path, methods in all_routes().items() if "WS" in methods))
CALLS = tuple(
    (method, re.sub(r"\{session_id\}", "kept", path))
    for path, methods in sorted(all_routes().items())
    for method in sorted(methods - {"WS"})
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server for all of these: nothing here harms it."""
    server = Server("echo", *ROOM)
    server.open("kept")
    yield server
    assert [each["id"] for each in server.get("/v1/sessions").json()["sessions"]] == ["kept"]
    server.check_clean()
    assert server.stop() == 0
    assert server.complaints() == []


def named(server: Server, host: str) -> str:
    return host.format(port=address_of(server)[1])


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_host_that_names_somebody_else_is_refused_on_every_call(server: Server, stranger: str) -> None:
    host = named(server, stranger)
    for method, path in CALLS:
        for headers in ([], [f"Origin: http://{host}"]):
            answer = ask(server, head(server, method, path, "Content-Length: 0", *headers, host=host))
            assert answer.status in demands.HOST_REFUSED, (method, path, answer)
            assert "evil" not in answer.body, "a client's value is not repeated"


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("path", SOCKETS)
def test_a_host_that_names_somebody_else_opens_no_websocket(server: Server, path: str, stranger: str) -> None:
    host = named(server, stranger)
    for headers in ([], [f"Origin: http://{host}"]):
        answer = ask(server, handshake(server, path, *headers, host=host))
        assert answer.status in demands.HOST_REFUSED, answer


def test_names_of_this_machine_are_served(server: Server) -> None:
    for friend in FRIENDS:
        host = named(server, friend)
        assert ask(server, head(server, "GET", "/v1/models", "Connection: close", host=host)).status == 200
        for path in SOCKETS:
            opened = ask(server, handshake(server, path, f"Origin: http://{host.lower()}", host=host))
            assert opened.status == 101, (host, opened)


def test_requests_without_a_host_or_with_two_are_refused(server: Server) -> None:
    host = ":".join(map(str, address_of(server)))
    two = head(server, "GET", "/v1/sessions", f"Host: {host}", host="evil.example")
    for sent in (two, head(server, "GET", "/v1/sessions", host="")):
        assert ask(server, sent).status in demands.HOST_REFUSED


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://[", "http://127.0.0.1:1", "\xff"])
@pytest.mark.parametrize("path", SOCKETS)
def test_a_page_of_another_origin_opens_no_websocket(server: Server, path: str, origin: str) -> None:
    answer = ask(server, handshake(server, path, f"Origin: {origin}"))
    assert demands.refused(answer.status), answer


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://["])
@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
def test_a_page_of_another_origin_changes_nothing(server: Server, path: str, origin: str) -> None:
    """A form of another site needs no permission to send this."""
    for kind in ([], ["Content-Type: text/plain"], ["Content-Type: application/x-www-form-urlencoded"]):
        sent = head(server, "POST", path, f"Origin: {origin}", "Content-Length: 0", *kind)
        assert demands.refused(ask(server, sent).status)


def test_a_host_that_the_operator_names_is_served(serve: Serve) -> None:
    server = serve("echo", *ROOM, "--allowed-host", "llm.example.org")
    assert ask(server, head(server, "GET", "/v1/models", host="llm.example.org")).status == 200
    assert ask(server, head(server, "GET", "/v1/models", host="127.0.0.1")).status == 200
    assert ask(server, head(server, "GET", "/v1/models", host="evil.example")).status in demands.HOST_REFUSED
