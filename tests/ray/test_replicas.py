"""A real Ray cluster of three engines on one machine: what it serves, what is open, and what deaths cost.

Engines, replicas, API processes, HAProxy and Ray's own helpers are killed under load; clients repeat what had
no answer. What was answered must be stored once, as it was answered.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.databases import new_place
from tests.ray import cluster
from tests.ray.cluster import (
    API_REPLICA,
    CONTROLLER,
    ENGINE,
    ENGINE_REPLICA,
    ENGINES,
    Talk,
    kill,
    processes,
    until,
)
from tests.server.serving import ADMIN_KEY, Server
from tests.server.talking import Talk as RealtimeTalk
from tests.server.test_sessions import events_of


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> str:
    return new_place("postgres", tmp_path_factory.mktemp("journal"))


@pytest.fixture(scope="module")
def server(journal: str) -> Iterator[Server]:
    started = cluster.start(journal, "--admin-key", ADMIN_KEY)
    yield started
    assert started.stop() == 0, "\n".join(started.lines)
    assert not any("Traceback" in line for line in started.lines), "\n".join(started.lines)


def engines(server: Server) -> dict[str, str]:
    """The states of the engines, as one of the API processes sees them."""
    answer = server.get("/health")
    found: dict[str, str] = answer.json().get("engines", {}) if answer.status_code == 200 else {}
    return found


def complete(server: Server) -> bool:
    """Whether the API process that is asked reaches all engines."""
    return list(engines(server).values()) == ["up"] * ENGINES


def test_three_engines_serve_and_nothing_is_open_to_other_machines(server: Server) -> None:
    assert server.lines[0].startswith("Holdfast serves echo on http://127.0.0.1:")
    assert "3 engines, 2 API processes" in server.lines[1]
    assert "sessions survive their engine" in server.lines[2]
    until(lambda: complete(server), "all engines are up")
    assert len(processes(server, ENGINE)) == ENGINES
    assert len(processes(server, API_REPLICA)) == 2
    assert cluster.listening(server) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_sessions_streams_and_sockets_through_haproxy(server: Server) -> None:
    name = server.open()
    assert server.say(name, "one")["text"] == "one"
    with server.http.stream(
        "POST", f"/v1/sessions/{name}/turns", json={"input": "two", "stream": True}
    ) as answer:
        events = events_of(answer)
    assert events[-1][0] == "done"
    with RealtimeTalk(server) as live:
        live.open("live")
        assert live.turn("three")["turns"] == 1
    assert {httpx.get(f"{server.url}/v1/sessions/{name}").json()["turns"] for _ in range(6)} == {2}
    metrics = server.get("/metrics", headers={"Authorization": f"Bearer {ADMIN_KEY}"}).text
    for number in range(ENGINES):
        assert f'holdfast_engine_up{{engine="engine-{number}"}} 1.0' in metrics


def test_what_dies_is_replaced_and_no_answer_is_lost_or_doubled(server: Server, journal: str) -> None:
    talk = Talk(server, journal, 6, seed=1)
    talk.goes_on(5)
    for words in (ENGINE, API_REPLICA, ENGINE_REPLICA, "ray::Registry", CONTROLLER, "haproxy -db"):
        victims = processes(server, words)
        assert victims, f"there is no {words}"
        kill(victims[0])
        talk.goes_on(10)
    assert talk.check() >= 6 * 65
    assert talk.repeated, "somebody died in the middle of something"
    until(lambda: complete(server), "all engines are back")
    assert len(processes(server, ENGINE)) == ENGINES
    assert server.get("/v1/memory").json()["findings"] == []


def test_an_engine_that_is_stopped_and_woken(server: Server, journal: str) -> None:
    """It comes back, or was replaced meanwhile; either way nothing is lost."""
    until(lambda: complete(server), "all engines are up")
    talk = Talk(server, journal, 3, seed=2)
    talk.goes_on(3)
    victim = processes(server, ENGINE)[0]
    os.kill(victim, signal.SIGSTOP)
    talk.goes_on(0)
    until(lambda: list(engines(server).values()).count("up") < ENGINES, "nobody noticed")
    os.kill(victim, signal.SIGCONT)
    talk.goes_on(5)
    talk.check()


def test_nothing_is_left_of_a_cluster(tmp_path: Path) -> None:
    journal = new_place("postgres", tmp_path)
    server = cluster.start(journal)
    name = server.open()
    server.say(name, "one")
    left = [*cluster.descendants(server.process.pid)]
    assert server.stop() == 0, "\n".join(server.lines)
    until(lambda: not any(cluster.title(each) for each in left), "something lives on")
    again = cluster.start(journal)
    assert again.state(name)["turns"] == 1
    assert again.stop() == 0


@pytest.mark.soak
def test_the_head_dies_and_another_cluster_goes_on(tmp_path: Path) -> None:
    """Without its head a cluster ends; what was answered is there in the next one."""
    journal = new_place("postgres", tmp_path)
    answers = 0
    for round_number in range(5):
        server = cluster.start(journal)
        talk = Talk(server, journal, 6, seed=round_number)
        talk.goes_on(10)
        kill(processes(server, "gcs_server")[0])
        talk.goes_on(10)  # Requests need nothing of the head.
        answers += talk.check()
        server.process.kill()
        server.process.wait()
        server.http.close()
    assert answers >= 5 * 6 * 20
