"""What a tenant may hold, over the wire: its quota is its own, and nobody loses memory to a larger tenant."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.engine.options import OptionError
from holdfast.server.http.keys import Keys
from holdfast.server.options import ServerOptions
from tests.plain import NO_TLS
from tests.server.conftest import Serve
from tests.server.serving import ADMIN_KEY, Server

KEYS = {"alice": "key-of-alice-123", "bob": "key-of-bob-456"}


def client_of(server: Server, tenant: str) -> httpx.Client:
    key = KEYS.get(tenant, ADMIN_KEY)
    return httpx.Client(
        base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60, verify=NO_TLS
    )


def talk(client: httpx.Client, name: str, words: int, letter: str = "x", priority: int = 0) -> dict[str, Any]:
    """A session with one turn of so many tokens in and out together: the model takes letters for tokens."""
    assert client.post("/v1/sessions", json={"id": name, "priority": priority}).status_code == 201
    answer = client.post(f"/v1/sessions/{name}/turns", json={"input": letter * words})
    assert answer.status_code == 200, answer.text
    turn: dict[str, Any] = answer.json()
    return turn


def held(client: httpx.Client, tenant: str) -> tuple[int, int]:
    """What a tenant holds on the device, and may hold there."""
    tenants = {each["tenant"]: each["pools"] for each in client.get("/v1/memory").json()["tenants"]}
    (pool,) = tenants[tenant]
    return pool["units"], pool["limit"]


def test_a_tenant_stays_within_its_part_and_takes_from_itself(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text(f"alice:{KEYS['alice']} device=0.25\nbob:{KEYS['bob']}\n")
    options = ("--api-keys", str(keys), "--admin-key", ADMIN_KEY, "--kv-tokens", "16384", "--audit", "strict")
    server = serve("echo", *options)
    server.http = client_of(server, "admin")
    with client_of(server, "alice") as alice, client_of(server, "bob") as bob:
        talk(bob, "kept", 1000)
        before = held(bob, "bob")
        for number in range(6):
            # None finds another's prefix; the first gives way first, however quickly they follow.
            talk(alice, f"s{number}", 1000, "abcdef"[number], priority=min(number, 1) - 1)
            assert held(alice, "alice")[0] <= 256 == held(alice, "alice")[1]
        assert held(bob, "bob") == before and before[1] == 1024
        again = bob.post("/v1/sessions/kept/turns", json={"input": "again"}).json()
        assert again["usage"]["cached_tokens"] > 1900, "nothing of it gave way"
        first = alice.post("/v1/sessions/s0/turns", json={"input": "again"}).json()
        assert first["usage"]["cached_tokens"] < 1900, "the least of its own did"
        refused = alice.post("/v1/sessions/s1/turns", json={"input": "x" * 9000})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (429, "over_quota", "input")
        assert "its tenant may hold 256" in error["message"]
        assert [each["tenant"] for each in alice.get("/v1/memory").json()["tenants"]] == ["alice"]
        admin = {each["tenant"] for each in server.get("/v1/memory").json()["tenants"]}
        assert admin == {"alice", "bob"}
        for client in (alice, bob):
            for session in client.get("/v1/sessions").json()["sessions"]:
                assert client.delete(f"/v1/sessions/{session['id']}").status_code == 200
    server.settle()


def test_one_part_for_every_tenant(serve: Serve) -> None:
    server = serve("echo", "--kv-tokens", "16384", "--tenant-device", "0.5")
    talk(server.http, "mine", 100)
    assert held(server.http, "public")[1] == 512


def read(tmp_path: Path, text: str) -> Keys:
    file = tmp_path / "keys.txt"
    file.write_text(text)
    return Keys.read(ServerOptions(api_keys=str(file)))


def test_parts_stand_after_a_key_and_add_up_over_a_tenants_keys(tmp_path: Path) -> None:
    keys = read(tmp_path, "ann:one device=0.5 host=0.25\nann:two disk=1\nbob:three\nfour disk=0.1\n")
    assert keys.shares["ann"] == {"device": 0.5, "host": 0.25, "disk": 1.0}
    assert "bob" not in keys.shares
    caller = keys.caller("four")
    assert caller is not None and keys.shares[caller.tenant] == {"disk": 0.1}


@pytest.mark.parametrize(
    "part", ["device", "device=", "device=0", "device=1.5", "device=nan", "gpu=0.5", "secret"]
)
def test_anything_else_after_a_key_is_an_error_that_does_not_repeat_it(tmp_path: Path, part: str) -> None:
    with pytest.raises(OptionError, match="device=, host=, disk= with a number up to 1") as caught:
        read(tmp_path, f"ann:one {part}\n")
    assert caught.value.option == "api_keys"
    assert "secret" not in str(caught.value)
