"""Tenants against each other: what a key opens, what it shows of others, and what it can take from them."""

import stat
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hostile import demands
from tests.hostile.conftest import ROOM, Serve, started
from tests.hostile.neighbours import Watch
from tests.hostile.raw import ask, handshake, head
from tests.plain import NO_TLS
from tests.server.serving import ADMIN_KEY, Server

pytestmark = pytest.mark.soak

ANN = {"authorization": "Bearer key-of-ann"}
BOB = {"authorization": "Bearer key-of-bob"}
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}

X = [{"role": "user", "content": "x"}]

Keyed = Callable[..., Server]


@pytest.fixture
def keyed(serve: Serve, tmp_path: Path) -> Keyed:
    """A server with keys, whose file has a mode."""

    def start(*arguments: str, lines: str = "ann:key-of-ann\nbob:key-of-bob\n", mode: int = 0o600) -> Server:
        keys = tmp_path / "keys"
        keys.write_text(lines)
        keys.chmod(mode)
        return serve(
            "echo", "--api-keys", str(keys), *ROOM, *arguments, environment={"HOLDFAST_ADMIN_KEY": ADMIN_KEY}
        )

    return start


def test_a_tenant_cannot_take_all_sessions(keyed: Keyed) -> None:
    """By default: the server's limit is stated, the tenant's is not."""
    server = keyed("--max-sessions", "40")
    statuses = [server.post("/v1/sessions", {}, headers=ANN).status_code for _ in range(60)]
    assert statuses[0] == 201
    assert 429 in statuses
    assert server.post("/v1/sessions", {"id": "mine"}, headers=BOB).status_code == 201
    said = server.post("/v1/sessions/mine/turns", {"input": "hello"}, headers=BOB)
    assert said.json()["text"] == "hello"


def test_a_tenant_learns_nothing_of_what_others_hold(keyed: Keyed) -> None:
    """One who holds nothing looks at the memory before and after another has taken a page."""
    server = keyed()
    assert server.post("/v1/sessions", {"id": "a"}, headers=ANN).status_code == 201
    seen: list[Any] = []
    for _ in range(12):
        seen.append(_numbers(server.get("/v1/memory", headers=BOB).json()))
        body = {"input": list(range(65, 65 + 14)), "sampling": {"max_tokens": 2, "ignore_eos": True}}
        assert server.post("/v1/sessions/a/turns", body, headers=ANN).status_code == 200
    changes = sum(one != other for one, other in pairwise(seen))
    assert changes <= 2, f"the figures followed the other's pages {changes} of {len(seen) - 1} times"


def _numbers(memory: dict[str, Any]) -> Any:
    """What a tenant sees of the pools, and of everything else that holds memory."""
    return {name: memory[name] for name in ("pools", "tenants", "top", "sessions", "tree") if name in memory}


def test_a_tenant_of_the_anonymous_name_is_nobody_special(keyed: Keyed, tmp_path: Path) -> None:
    """Either the name is refused, or it shares nothing with callers that have no tenant of their own."""
    server = started(keyed, lines="public:key-of-public\nann:key-of-ann\n")
    if isinstance(server, str):
        assert "public" in server and "Traceback" not in server
        return
    public = {"authorization": "Bearer key-of-public"}
    assert server.post("/v1/sessions", {"id": "mine"}, headers=public).status_code == 201
    assert server.get("/v1/sessions/mine", headers=ADMIN).status_code == 404
    assert server.get("/v1/sessions", headers=ADMIN).json()["sessions"] == []


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o600])
def test_a_file_of_keys_that_others_can_read_draws_a_warning(keyed: Keyed, mode: int) -> None:
    server = keyed(mode=mode)
    warned = [line for line in server.lines if "WARNING" in line and ("key" in line and "read" in line)]
    if mode & stat.S_IROTH:
        assert warned
    elif not mode & stat.S_IRGRP:
        assert not warned
    assert "key-of-ann" not in "\n".join(server.lines)


def test_nothing_of_another_tenant_can_be_named(keyed: Keyed) -> None:
    server = keyed()
    assert server.post("/v1/sessions", {"id": "private"}, headers=ANN).status_code == 201
    assert server.post("/v1/sessions/private/turns", {"input": "secret"}, headers=ANN).status_code == 200
    for method, path, body in (
        ("GET", "/v1/sessions/private", None),
        ("DELETE", "/v1/sessions/private", None),
        ("POST", "/v1/sessions/private/turns", {"input": "x"}),
        ("POST", "/v1/sessions/private/rewind", {"to_turn": 0}),
        ("POST", "/v1/sessions/private/fork", {}),
        ("POST", "/v1/sessions/private/interrupt", {"keep": "all"}),
        ("POST", "/v1/sessions/private/spill", {}),
        ("POST", "/v1/sessions/ann%2fprivate/turns", {"input": "x"}),
        ("POST", "/v1/chat/completions", {"messages": X, "session_id": "private"}),
        ("POST", "/generate", {"text": "x", "session_params": {"id": "private"}}),
    ):  # fmt: skip
        answer = server.http.request(method, path, json=body, headers=BOB)
        assert demands.refused(answer.status_code), (path, answer.text)
        assert "secret" not in answer.text
    assert server.get("/v1/sessions/private", headers=ANN).json()["turns"] == 1


BAD_KEYS = (
    "",
    "Bearer",
    "Bearer ",
    "Bearer nobody",
    "Basic a2V5",
    "Bearer key-of-ann\x00",
    "\xff" * 100,
    "Bearer " + "x" * 20_000,
)


def test_without_a_key_nothing_is_open(keyed: Keyed) -> None:
    server = keyed()
    for path in ("/v1/models", "/v1/sessions", "/v1/memory", "/metrics", "/openapi.json", "/v1/nothing"):
        for key in BAD_KEYS:
            answer = ask(server, head(server, "GET", path, f"Authorization: {key}"))
            assert answer.status in (400, 401, 403, 431), (path, key[:20], answer)
    for path in ("/v1/realtime", "/v1/memory/live", "/v1/nothing"):
        assert ask(server, handshake(server, path)).status in (401, 403, 404)
    for path in ("/metrics", "/flush_cache", "/server_info"):
        method = "POST" if path == "/flush_cache" else "GET"
        assert server.http.request(method, path, headers=ANN).status_code == 403


def test_strangers_do_not_hold_up_those_who_have_keys(keyed: Keyed) -> None:
    """A hundred thousand keys, and requests with none of them."""
    lines = "".join(f"tenant-{number % 1000}:key-{number}\n" for number in range(99_998))
    server = keyed(lines=f"{lines}ann:key-of-ann\nbob:key-of-bob\n")
    server.http.headers.update(ANN)

    def attack() -> int:
        with httpx.Client(base_url=server.url, timeout=demands.ANSWER_SECONDS, verify=NO_TLS) as http:
            for number in range(500):
                key = {"authorization": f"Bearer nobody-{number}"}
                assert http.get("/v1/models", headers=key).status_code == 401
        return 500

    with Watch(server, headers=ANN) as watch:
        before = watch.neighbours[0].tokens
        answered = watch.during(attack)
        said = watch.neighbours[0].tokens - before
        assert said >= answered // 4, f"{said} tokens while {answered} strangers were refused"
