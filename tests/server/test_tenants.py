"""Keys and tenants: who may do what, and that nobody sees or reaches what is another's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from holdfast.server.app import all_routes
from holdfast.server.http.keys import Caller
from holdfast.server.http.middleware import ADMIN, PUBLIC
from holdfast.server.routes.status import tenant_memory
from tests.plain import NO_TLS
from tests.server.conftest import Serve
from tests.server.serving import ADMIN_KEY, Server

ALICE, BOB, ICE = "key-of-alice-123", "key-of-bob-456", "key-of-ice-789"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"# who\nalice:{ALICE}\nbob:{BOB}\nice:{ICE}\n")
    server = Server(
        "echo", "--api-keys", str(keys), "--admin-key", ADMIN_KEY, "--audit", "strict", "--kv-tokens", "16384"
    )
    yield server
    assert server.stop() == 0


def as_(server: Server, key: str | None) -> httpx.Client:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=30, verify=NO_TLS)


def test_only_health_answers_without_a_key(keyed: Server) -> None:
    with as_(keyed, None) as nobody, as_(keyed, "wrong") as stranger:
        for client in (nobody, stranger):
            assert client.get("/health").status_code == 200
            assert client.get("/health/ready").status_code == 200
            paths = ["/v1/models", "/v1/sessions", "/v1/memory", "/metrics", "/openapi.json", "/nothing"]
            for path in paths:
                answer = client.get(path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
            assert client.post("/v1/sessions", json={}).status_code == 401
            assert client.post("/flush_cache").status_code == 401


def test_admin_calls_need_the_admin_key(keyed: Server) -> None:
    with as_(keyed, ALICE) as alice, as_(keyed, ADMIN_KEY) as admin:
        for path in ("/metrics", "/get_server_info"):
            assert alice.get(path).status_code == 403
        assert alice.post("/flush_cache").status_code == 403
        assert admin.get("/metrics").status_code == 200


TENANTS = {
    "/abort_request", "/close_session", "/detokenize", "/generate", "/get_model_info", "/health_generate",
    "/model_info", "/open_session", "/tokenize", "/tokenizer_info", "/version", "/v1/chat/completions",
    "/v1/completions", "/v1/conversations", "/v1/conversations/{conversation_id}",
    "/v1/conversations/{conversation_id}/items", "/v1/conversations/{conversation_id}/items/{item_id}",
    "/v1/memory", "/v1/memory/live", "/v1/messages", "/v1/messages/count_tokens", "/v1/models",
    "/v1/models/{model:path}", "/v1/realtime", "/v1/responses", "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel", "/v1/responses/{response_id}/input_items", "/v1/sessions",
    "/v1/sessions/{session_id}", "/v1/sessions/{session_id}/compact", "/v1/sessions/{session_id}/fork",
    "/v1/sessions/{session_id}/input", "/v1/sessions/{session_id}/interrupt",
    "/v1/sessions/{session_id}/restore", "/v1/sessions/{session_id}/rewind",
    "/v1/sessions/{session_id}/spill", "/v1/sessions/{session_id}/turns", "/web/{name}",
}  # fmt: skip
"""Paths that any key may use, each for what is its own. A new path belongs here, or into ADMIN."""


def test_every_path_is_known_as_anybody_s_or_the_operator_s(keyed: Server) -> None:
    assert set(all_routes()) == TENANTS | set(ADMIN) | set(PUBLIC)
    with as_(keyed, ALICE) as alice:
        for path in ADMIN:
            for method in all_routes()[path]:
                answer = alice.request(method, path, json=None if method == "GET" else {})
                assert answer.status_code == 403, (method, path)


def test_B16_tenants_share_neither_names_nor_prefixes(keyed: Server) -> None:
    prompt = "the same long prompt for everybody, several pages of it " * 6
    with as_(keyed, ALICE) as alice, as_(keyed, BOB) as bob:
        body = {"model": "echo", "prompt": prompt, "max_tokens": 1}
        cached = []
        for client in (alice, alice, bob, bob):
            usage = client.post("/v1/completions", json=body).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == 0 and cached[1] > 200
        assert cached[2] == 0 and cached[3] > 200
        assert alice.post("/v1/sessions", json={"id": "mine"}).status_code == 201
        assert bob.get("/v1/sessions/mine").status_code == 404
        assert bob.post("/v1/sessions/mine/turns", json={"input": "x"}).status_code == 404
        assert bob.delete("/v1/sessions/mine").status_code == 404
        assert bob.post("/v1/sessions/mine/fork", json={}).status_code == 404
        assert bob.post("/v1/sessions", json={"id": "mine"}).status_code == 201
        assert [each["id"] for each in bob.get("/v1/sessions").json()["sessions"]] == ["mine"]
        alice.post("/v1/sessions/mine/turns", json={"input": "hello"})
        assert bob.get("/v1/sessions/mine").json()["tokens"]["known"] == 0
        seen = bob.get("/v1/memory").text
        assert "alice" not in seen
        for client in (alice, bob):
            assert client.delete("/v1/sessions/mine").status_code == 200


def test_a_tenant_whose_name_ends_anothers_sees_nothing_of_it(keyed: Server) -> None:
    """`alice/hidden` ends in `ice/hidden`, and is not ice's."""
    with as_(keyed, ALICE) as alice, as_(keyed, ICE) as ice, as_(keyed, ADMIN_KEY) as admin:
        for client, name in ((alice, "hidden"), (ice, "own")):
            assert client.post("/v1/sessions", json={"id": name}).status_code == 201
            said = {"input": "hello " * 20, "sampling": {"max_tokens": 4}}
            assert client.post(f"/v1/sessions/{name}/turns", json=said).status_code == 200
        assert "session alice/hidden" in holders(admin.get("/v1/memory").json())
        assert "session hidden" in holders(alice.get("/v1/memory").json())
        shown = ice.get("/v1/memory").json()
        url = keyed.url.replace("http://", "ws://") + "/v1/memory/live"
        with connect(url, additional_headers={"authorization": f"Bearer {ICE}"}) as connection:
            report: dict[str, Any] = {}
            while report.get("type") != "memory.report":
                message = connection.recv(timeout=60)
                report = json.loads(message) if isinstance(message, str) else {}
        for seen in (shown, report):
            assert "session own" in holders(seen)
            assert {holder.partition(" ")[2] for holder in holders(seen)} <= {"own", "ice"}, (
                "ice's, no other's"
            )
        for client, name in ((alice, "hidden"), (ice, "own")):
            assert client.delete(f"/v1/sessions/{name}").status_code == 200


def holders(report: dict[str, Any]) -> list[str]:
    return [entry["holder"] for entry in report["top"]]


def test_a_tenant_sees_its_own_holders_and_the_admin_sees_all() -> None:
    top = [
        "session jo/x",
        "turn t of ann/x",
        "turn ann#r of ann#r",
        "tree ann",
        "tree joann",
        "turn t of joann/ann",
    ]
    heard = [{"session": name, "heard": 7, "ahead": 3} for name in ("jo/x", "ann/y")]
    report: dict[str, Any] = {
        "top": [{"holder": name, "full": 1} for name in top],
        "listening": heard,
        "tenants": [],
        "findings": [],
    }
    shown = tenant_memory(report, Caller("ann", admin=False))["listening"]
    assert shown == [{"session": "y", "heard": 7, "ahead": 3}]
    shown = tenant_memory(report, Caller("ann", admin=True))["listening"]
    assert [each["session"] for each in shown] == ["jo/x", "y"]
    assert holders(tenant_memory(report, Caller("ann", admin=False))) == [
        "turn t of x",
        "turn r of r",
        "tree ann",
    ]
    assert holders(tenant_memory(report, Caller("ann", admin=True))) == [
        "session jo/x",
        "turn t of x",
        "turn r of r",
        "tree ann",
        "tree joann",
        "turn t of joann/ann",
    ]


def test_a_host_that_others_can_reach_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="api-keys"):
        Server("echo", "--host", "0.0.0.0")


def test_anonymous_by_choice(serve: Serve) -> None:
    server = serve("echo", "--host", "0.0.0.0", "--allow-anonymous", "--kv-tokens", "4096")
    assert server.url.startswith("http://0.0.0.0")


def test_a_tenant_has_a_cap_on_its_sessions(serve: Serve, tmp_path: Path) -> None:
    server = serve(
        "echo",
        "--tenant-sessions",
        "2",
        "--kv-tokens",
        "4096",
        environment={"HOLDFAST_API_KEYS": f"alice:{ALICE},bob:{BOB}"},
    )
    with as_(server, ALICE) as alice, as_(server, BOB) as bob:
        assert [alice.post("/v1/sessions", json={}).status_code for _ in range(3)] == [201, 201, 429]
        name = bob.post("/v1/sessions", json={}).json()["id"]
        assert bob.post(f"/v1/sessions/{name}/turns", json={"input": "one two"}).status_code == 200
        fork = f"/v1/sessions/{name}/fork"
        made = [bob.post(fork, json={"request_id": "f"}) for _ in range(2)]
        assert [answer.status_code for answer in made] == [201, 201], "it was made, and asked for again"
        assert made[0].json()["id"] == made[1].json()["id"]
        for refused in ({"request_id": "g"}, {}):
            answer = bob.post(fork, json=refused)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_sessions")


def test_sessions_that_expire_at_once_count_against_nobody(serve: Serve) -> None:
    server = serve("echo", "--tenant-sessions", "3", "--kv-tokens", "4096", "--audit", "strict")
    for number in range(40):
        answer = server.post("/v1/sessions", {"id": f"short-{number}", "ttl": 1e-9})
        assert answer.status_code in (201, 410), answer.text
    for number in range(3):
        server.open(f"long-{number}")
    assert server.post("/v1/sessions", {}).status_code == 429
    server.check_clean()
