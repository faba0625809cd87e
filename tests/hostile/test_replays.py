"""Clients that come back to a realtime session: with absurd numbers, to others' sessions, and all at once."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from tests.hostile import demands
from tests.hostile.conftest import Serve
from tests.hostile.neighbours import Watch, resident_bytes
from tests.server.apart import Apart
from tests.server.serving import ADMIN_KEY, Server
from tests.server.talking import Talk

pytestmark = pytest.mark.soak

CLIENTS, ROUNDS = 8, 40
ABSURD: tuple[Any, ...] = (
    *(-1, -(1 << 63), (1 << 52) + 1, 1 << 53, 1 << 63, 1 << 64, 10**400),
    *(1.5, True, "5", [1], {"after": 1}, "x" * 100_000),
)


def test_absurd_numbers_change_nothing(echo: Server) -> None:
    with Talk(echo) as talk:
        talk.open("numbers")
        last = talk.turn("hello")["seq"]
    with Watch(echo) as watch, Talk(echo) as talk:

        def attack() -> list[tuple[str, str]]:
            found = []
            for number in ABSURD:
                talk.say("session.open", id="numbers", resume_after_seq=number)
                refused = talk.refused()
                found.append((refused["code"], refused["param"]))
            return found

        assert set(watch.during(attack)) == {("invalid_value", "resume_after_seq")}
        opened = talk.open("numbers", resume_after_seq=last)
        assert (opened["resumed"], opened["seq"], opened["turns"]) == (True, last, 1)
        talk.say("session.close")
        talk.hear("session.closed")


def test_nobody_comes_back_to_a_session_of_another_tenant(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("red:red-key\nblue:blue-key\n")
    keys.chmod(0o600)
    server = serve("echo", "--api-keys", str(keys), environment={"HOLDFAST_ADMIN_KEY": ADMIN_KEY})

    def talk(key: str) -> Talk:
        return Talk(server, additional_headers={"Authorization": f"Bearer {key}"})

    with talk("red-key") as red, talk("blue-key") as blue:
        red.open("secret")
        red.turn("a secret", turn_id="t1")
        for name in ("secret", "red/secret", "red%2Fsecret", "../red/secret", "red~secret", "red#secret"):
            blue.say("session.open", id=name, resume_after_seq=0)
            assert blue.refused()["code"] in ("session_not_found", "bad_name")
        assert blue.open("secret")["turns"] == 0, "its own of that name"
        assert "a secret" not in str(blue.heard)
        assert red.turn("still here", turn_id="t2")["text"] == "still here"
    assert server.complaints() == []


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Apart]:
    """Engines and API processes; they end with the test, cleanly."""
    made = Apart(tmp_path)
    yield made
    made.end()


def storm(servers: Sequence[Server], name: str, closes: bool) -> Counter[str]:
    """Clients that open one session over and over, with and without numbers, and leave at any moment."""
    told: Counter[str] = Counter()

    def client(seed: int) -> None:
        dice = random.Random(seed)
        for number in range(ROUNDS):
            server = dice.choice(servers)
            if closes and dice.random() < 0.2:
                told[f"closed {server.http.delete(f'/v1/sessions/{name}').status_code}"] += 1
            talk = Talk(server)
            try:
                resumes = {"resume_after_seq": dice.choice((0, 1, 7, 1 << 40))} if dice.random() < 0.5 else {}
                talk.say("session.open", id=name, **resumes)
                opened = talk.hear("session.opened", "error")
                told[opened.get("error", {}).get("code", "opened")] += 1
                if opened["type"] == "session.opened" and dice.random() < 0.5:
                    talk.commit("word", turn_id=f"t-{seed}-{number}")
                    ended = talk.hear("response.done", "error", "session.closed")
                    told[ended.get("error", {}).get("code", ended["type"])] += 1
            except ConnectionClosed as closed:
                told[f"code {closed.rcvd.code if closed.rcvd is not None else None}"] += 1
            finally:
                talk.drop()

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(CLIENTS)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(demands.ANSWER_SECONDS)
        assert not each.is_alive(), f"a client was never answered: {told}"
    return told


ALLOWED = {
    *("opened", "response.done", "session.closed", "code 1008", "closed 200", "closed 404"),
    *("session_not_found", "session_exists", "session_busy", "turn_cancelled"),
}


def check_anew(servers: Sequence[Server], name: str, wait: Callable[[], object]) -> None:
    """A new session of that name has nothing of the old ones."""
    for server in servers:
        server.http.delete(f"/v1/sessions/{name}")
    wait()
    for server in servers:
        with Talk(server) as talk:
            assert talk.open(name)["turns"] == 0
            assert talk.turn("anew", turn_id="t1")["text"] == "anew"
            assert [message["seq"] for message in talk.heard] == list(range(len(talk.heard)))
            talk.say("session.close")
            talk.hear("session.closed")
        wait()


@pytest.mark.parametrize("closes", [False, True])
def test_many_who_come_back_to_one_session_at_once_are_all_answered(echo: Server, closes: bool) -> None:
    with Watch(echo) as watch:
        told = watch.during(lambda: storm([echo], "storm", closes))
        assert set(told) <= ALLOWED, told
        assert told["opened"] and told["response.done"], told
        check_anew([echo], "storm", lambda: None)


@pytest.mark.parametrize("closes", [False, True])
def test_many_who_come_back_through_two_processes_are_all_answered(apart: Apart, closes: bool) -> None:
    engine = apart.engine("--kv-tokens", "65536", "--context-length", "8192")
    servers = [apart.api(engine), apart.api(engine)]
    before = sum(map(resident_bytes, servers))
    told = storm(servers, "storm", closes)
    assert set(told) <= ALLOWED, told
    assert told["opened"] and told["response.done"], told
    assert sum(map(resident_bytes, servers)) - before <= demands.GROWTH_BYTES

    def known_alike() -> None:
        # What one process changes the others hear a moment later.
        while len({server.get("/v1/sessions").text for server in servers}) > 1:
            pass

    check_anew(servers, "storm", known_alike)
    for server in servers:
        assert server.complaints() == []
