"""Requests that a browser or a proxy could be made to send: host names, origins, framing, upgrades, paths."""

import json
import re

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from holdfast.engine.options import OptionError
from holdfast.server.app import all_routes
from holdfast.server.http.hosts import Hosts, foreign_page
from holdfast.server.http.middleware import GET_WITH_EFFECTS
from holdfast.server.http.problems import Problem
from holdfast.server.options import ServerOptions
from tests.server.conftest import Serve
from tests.server.raw import exchange, status, upgrade
from tests.server.serving import Server
from tests.server.talking import Talk

EVIL = "http://evil.example"


def allows(hosts: Hosts, host: str | None) -> bool:
    try:
        hosts.require(host)
    except Problem as problem:
        return problem.status != 421
    return True


LOOPBACK = [
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "a.localhost:1",
    "127.0.0.1",
    "127.9.8.7:80",
    "[::1]:8000",
]
STRANGE = [
    None, "", "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
    "notlocalhost", "localhost:8000:1", "localhost:x", "localhost@evil.example", "[::1", "[evil.example]",
    "127.0.0.1/x",
    "\xb2",
    "localhost, evil.example", "localhost\t", "192.168.1.7", "0.0.0.0",
]  # fmt: skip


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_names_are_this_server(host: str) -> None:
    assert allows(Hosts(ServerOptions(), keys_required=False), host)


@pytest.mark.parametrize("host", STRANGE)
def test_other_names_are_not(host: str | None) -> None:
    assert not allows(Hosts(ServerOptions(), keys_required=False), host)


def test_the_address_that_is_listened_on_and_what_is_allowed() -> None:
    named = Hosts(ServerOptions(host="10.0.0.7", allowed_host=("LLM.example.org", "fd00::7")), False)
    assert all(
        allows(named, host) for host in ("10.0.0.7:8000", "llm.example.org", "[fd00::7]:1", "localhost")
    )
    assert not any(allows(named, host) for host in ("10.0.0.8", "example.org", "x.llm.example.org"))
    # Listening on every address, it is called by any of them; a name could be anybody's.
    every = Hosts(ServerOptions(host="0.0.0.0", allow_anonymous=True), False)
    assert allows(every, "192.168.1.7:8000") and allows(every, "[fe80::1]") and not allows(every, "gpu.lan")


def test_with_keys_names_are_checked_only_if_some_are_given() -> None:
    assert allows(Hosts(ServerOptions(), keys_required=True), "llm.example.org")
    some = Hosts(ServerOptions(allowed_host=("llm.example.org",)), keys_required=True)
    assert allows(some, "llm.example.org:443") and not allows(some, "evil.example")
    assert allows(Hosts(ServerOptions(allowed_host=("*",)), keys_required=False), "evil.example")


@pytest.mark.parametrize("name", ["", "llm.example.org:443", "http://llm.example.org", "a b", "[::1]:80"])
def test_what_cannot_be_a_host_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(OptionError) as refused:
        ServerOptions(allowed_host=(name,))
    assert refused.value.option == "allowed_host"


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/health", "/", "/nowhere"])
def test_a_rebound_name_is_not_served(echo: Server, path: str) -> None:
    answer = exchange(echo, f"GET {path} HTTP/1.1\r\nHost: evil.example\r\nOrigin: {EVIL}\r\n\r\n")
    assert status(answer) == 421 and b"--allowed-host" in answer and b"evil" not in answer


@pytest.mark.parametrize(
    ("request_head", "expected"),
    [
        ("GET /v1/models HTTP/1.1\r\nHost: localhost", 200),
        ("GET /v1/models HTTP/1.0\r\nHost: localhost", 200),
        ("GET /v1/models HTTP/1.1\r\nX: y", 400),
        ("GET /v1/models HTTP/1.0\r\nX: y", 421),
        ("GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example", 400),
        ("GET /v1/models HTTP/1.0\r\nHost: evil.example\r\nHost: localhost", 400),
        ("GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost", 400),
        ("GET http://localhost/v1/models HTTP/1.1\r\nHost: evil.example", 400),
    ],
)
def test_hosts_that_are_said_twice_or_not_at_all(echo: Server, request_head: str, expected: int) -> None:
    assert status(exchange(echo, f"{request_head}\r\n\r\n")) == expected


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/memory/live", "/nowhere"])
def test_a_rebound_name_opens_no_websocket(echo: Server, path: str) -> None:
    answer = exchange(echo, upgrade(path, host="evil.example", more=f"Origin: {EVIL}\r\n"))
    assert status(answer) == 421
    answer = exchange(echo, upgrade(path, more=f"Host: evil.example\r\nOrigin: {EVIL}\r\n"))
    assert status(answer) == 400


def test_a_proxy_with_keys_passes_its_own_name_on(serve: Serve) -> None:
    """As the nginx and Caddy examples of docs/operations.md do."""
    server = serve("echo", environment={"HOLDFAST_API_KEYS": "ann:secret-a,bob:secret-b"})
    known = {
        "Host": "llm.example.org",
        "Origin": "https://llm.example.org",
        "Authorization": "Bearer secret-a",
    }
    assert server.post("/v1/sessions", {}, headers=known).status_code == 201
    assert server.get("/v1/models", headers={**known, "Authorization": "Bearer x"}).status_code == 401
    lines = "".join(f"{name}: {value}\r\n" for name, value in known.items() if name != "Host")
    assert status(exchange(server, upgrade(host="llm.example.org", more=lines))) == 101
    foreign = lines.replace("https://llm.example.org", EVIL)
    assert status(exchange(server, upgrade(host="llm.example.org", more=foreign))) == 403


def test_a_proxy_without_keys_needs_its_name_allowed(serve: Serve) -> None:
    server = serve("echo", "--allowed-host", "llm.example.org", environment={"HOLDFAST_ALLOWED_HOST": "x"})
    for host, expected in (("llm.example.org", 200), ("localhost", 200), ("x", 421)):
        assert server.get("/v1/models", headers={"Host": host}).status_code == expected


# --- pages of other origins --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "foreign"),
    [
        ({}, False),
        ({"host": "localhost:1", "origin": "http://localhost:1"}, False),
        ({"host": "localhost:1", "origin": "http://localhost:2"}, True),
        ({"host": "llm.example.org:443", "origin": "https://llm.example.org"}, False),
        ({"host": "llm.example.org:80", "origin": "https://llm.example.org"}, True),
        ({"host": "localhost", "origin": "null"}, True),
        ({"host": "localhost", "origin": ""}, True),
        ({"host": "", "origin": "null"}, True),
        ({"host": "localhost", "origin": "http://["}, True),
        ({"host": "localhost", "origin": "http://allowed.example"}, False),
        ({"host": "localhost", "sec-fetch-site": "cross-site"}, True),
        ({"host": "localhost", "sec-fetch-site": "same-site", "origin": "http://localhost"}, True),
        ({"host": "localhost", "sec-fetch-site": "cross-site", "origin": "http://allowed.example"}, False),
        ({"host": "inner", "sec-fetch-site": "same-origin", "origin": "https://llm.example.org"}, False),
        ({"host": "localhost", "sec-fetch-site": "none"}, False),
    ],
)
def test_which_pages_are_foreign(headers: dict[str, str], foreign: bool) -> None:
    assert foreign_page(headers, ("http://allowed.example",)) is foreign
    assert not foreign_page(headers, ("*",))


READ_ONLY = {
    "/", "/favicon.ico", "/web/{name}", "/health", "/health/ready", "/metrics", "/v1/models",
    "/v1/models/{model:path}",
    "/v1/sessions", "/v1/sessions/{session_id}", "/v1/memory", "/v1/storm", "/get_model_info", "/model_info",
    "/v1/cluster", "/v1/cluster/events",
    "/get_server_info", "/server_info", "/tokenizer_info", "/version", "/ping",
    "/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items",
    "/v1/conversations/{conversation_id}", "/v1/conversations/{conversation_id}/items",
    "/v1/conversations/{conversation_id}/items/{item_id}",
}  # fmt: skip
"""Paths where GET changes nothing. A new one belongs here, or into GET_WITH_EFFECTS."""


def test_every_path_that_answers_get_is_known_to_change_nothing_or_is_guarded() -> None:
    reading = {path for path, methods in all_routes().items() if "GET" in methods}
    assert reading - set(GET_WITH_EFFECTS) == READ_ONLY
    assert not READ_ONLY & set(GET_WITH_EFFECTS)


@pytest.mark.parametrize("headers", [{"origin": EVIL}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}])
def test_no_page_of_another_site_changes_anything(echo: Server, headers: dict[str, str]) -> None:
    name = echo.open("kept")
    asked = 0
    for path, methods in all_routes().items():
        for method in methods - {"WS", "HEAD"}:
            if method == "GET" and path not in GET_WITH_EFFECTS:
                continue
            asked += 1
            answer = echo.http.request(method, path.replace("{session_id}", name), headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed"), path
            assert "--cors-origin" in answer.text and "evil" not in answer.text
    assert asked > 15
    assert echo.post("/flush_cache", headers={"origin": echo.url}).status_code == 200
    assert [each["id"] for each in echo.get("/v1/sessions", headers=headers).json()["sessions"]] == [name]


@pytest.mark.parametrize(
    "origin", ["http://[", "http://]", "http://[::1", "http://[x]:y", "\xff\xfe", "null", ""]
)
def test_an_origin_that_cannot_be_read_is_refused(echo: Server, origin: str) -> None:
    assert status(exchange(echo, upgrade(more=f"Origin: {origin}\r\n"))) == 403
    assert (
        status(exchange(echo, f"POST /flush_cache HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\n\r\n"))
        == 403
    )


def test_allowed_pages_may_send_what_openai_s_and_anthropic_s_clients_send(serve: Serve) -> None:
    page = "https://app.example"
    server = serve("echo", "--cors-origin", page)
    sent = (
        "accept, authorization, content-type, idempotency-key, openai-beta, openai-organization, "
        "openai-project, user-agent, x-request-id, x-stainless-arch, x-stainless-helper-method, "
        "x-stainless-lang, x-stainless-os, x-stainless-package-version, x-stainless-retry-count, "
        "x-stainless-runtime, x-stainless-runtime-version, x-stainless-timeout, anthropic-beta, "
        "anthropic-dangerous-direct-browser-access, anthropic-version, x-api-key, x-app"
    )
    for method in sorted({method for methods in all_routes().values() for method in methods} - {"WS"}):
        asked = {
            "Origin": page,
            "Access-Control-Request-Method": method,
            "Access-Control-Request-Headers": sent,
        }
        answer = server.http.options("/v1/chat/completions", headers=asked)
        assert answer.status_code == 200, answer.text
        assert answer.headers["access-control-allow-origin"] == page
        allowed = answer.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
        assert set(sent.replace(" ", "").split(",")) <= set(allowed)
        assert method in answer.headers["access-control-allow-methods"]
        refused = server.http.options("/v1/chat/completions", headers={**asked, "Origin": EVIL})
        assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
    body = {"messages": [{"role": "user", "content": "hello"}]}
    answer = server.post(
        "/v1/chat/completions", body, headers={"Origin": page, "Sec-Fetch-Site": "cross-site"}
    )
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == page
    message = server.post("/v1/messages", {**body, "max_tokens": 4}, headers={"Origin": page})
    assert message.status_code == 200 and message.headers["access-control-allow-origin"] == page
    assert "request-id" in message.headers["access-control-expose-headers"].split(", ")
    with Talk(server, origin=page) as talk:
        assert talk.open()["turns"] == 0


# --- framing, upgrades, paths ------------------------------------------------------------------------

AGAIN = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = "POST /flush_cache HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "request_text",
    [
        f"{HEAD}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        f"{HEAD}Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        f"{HEAD.replace('1.1', '1.0')}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        f"{HEAD}Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        f"{HEAD}Content-Length: \xb2\r\n\r\nab",
        f"{HEAD}Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
    ],
)
def test_a_body_that_two_could_read_differently_ends_the_connection(echo: Server, request_text: str) -> None:
    answer = exchange(echo, request_text + AGAIN)
    assert status(answer) in (400, 501) and len(re.findall(rb"HTTP/1.1 \d", answer)) == 1
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize(("version", "expected"), [("1.0", 200), ("1.1", 200), ("2.0", 505), ("9.9", 505)])
def test_a_version_of_http_that_is_not_spoken_is_rejected(echo: Server, version: str, expected: int) -> None:
    answer = exchange(echo, f"GET / HTTP/{version}\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    assert status(answer) == expected


@pytest.mark.parametrize(
    ("request_text", "expected"),
    [
        (upgrade(more="Content-Length: 3\r\n") + "abc", 400),
        (upgrade(more="Content-Length: 3\r\n"), 400),
        (upgrade(more="Transfer-Encoding: chunked\r\n") + "0\r\n\r\n", 400),
        (upgrade(more="Content-Length: 0\r\n"), 101),
        (upgrade(method="POST"), 400),
        (upgrade().replace("13", "12"), 426),
        (upgrade().replace("Sec-WebSocket-Key", "X-Key"), 400),
        (upgrade(more="".join(f"X-{number}: y\r\n" for number in range(300))), 431),
        (upgrade(more=f"X-Long: {'y' * 9000}\r\n"), 431),
        (upgrade(path="/" + "y" * 9000), 414),
    ],
    ids=(
        *("short body", "announced body", "chunked body", "empty body", "method", "version", "no key"),
        *("many headers", "long header", "long path"),
    ),
)
def test_every_request_for_a_websocket_is_answered(echo: Server, request_text: str, expected: int) -> None:
    answer = exchange(echo, request_text)
    assert status(answer) in (expected, 400) if expected != 101 else status(answer) == 101, answer


def test_a_path_that_is_not_there_is_named_with_those_that_are(echo: Server) -> None:
    said = {
        "/chat/completions": "POST /v1/chat/completions",
        "/v1/model": "GET /v1/models",
        "/v1/sessions/x/turn": "POST /v1/sessions/{session_id}/turns",
        "/v1/realtime": "/v1/realtime is a WebSocket",
    }
    for path, expected in said.items():
        error = echo.get(path).json()["error"]
        assert error["code"] == "not_found" and path in error["message"] and expected in error["message"]
    error = echo.get("/nothing/like/it%0a%1b%5b31m" + "y" * 4000).json()["error"]
    assert r"/nothing/like/it\n\x1b[31myyy" in error["message"] and "/openapi.json" in error["message"]
    assert len(error["message"]) < 400
    wrong = echo.http.put("/v1/sessions", json={})
    assert wrong.headers["allow"] == "GET, POST"
    assert "/v1/sessions takes GET, POST" in wrong.json()["error"]["message"]
    with pytest.raises(InvalidStatus) as refused, connect(echo.url.replace("http", "ws") + "/v1/realtim"):
        pass
    assert "WS /v1/realtime" in json.loads(refused.value.response.body)["error"]["message"]


def test_all_routes_are_those_that_are_served(echo: Server) -> None:
    described = set(echo.get("/openapi.json").json()["paths"])
    assert described <= {path.replace(":path", "") for path in all_routes()}
    assert len(described) > 20
