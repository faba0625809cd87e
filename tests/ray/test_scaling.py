"""A cluster that grows by Serve's hook: turns wait, and a second engine comes and is used."""

import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.ray import cluster
from tests.ray.cluster import until
from tests.server.serving import Server

LONG = {"max_tokens": 6000, "ignore_eos": True}


@pytest.fixture
def server() -> Iterator[Server]:
    started = cluster.start_one("--max-replicas", "2", "--max-running", "1", "--context-length", "16384")
    yield started
    assert started.stop() == 0, "\n".join(started.lines)


def test_waiting_turns_bring_another_engine(server: Server) -> None:
    assert server.lines[1].strip() == "1 engine, up to 2 under load, 1 API process, on Ray 2.60.0"
    assert "a session is lost with its engine" in server.lines[2]
    assert list(server.get("/health").json()["engines"]) == ["engine-0"]
    ends = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=600) as http:
            while not ends.is_set():
                http.post("/v1/completions", json={"model": "echo", "prompt": "go", **LONG})

    clients = [threading.Thread(target=ask) for _ in range(6)]
    for client in clients:
        client.start()
    until(lambda: len(server.get("/health").json()["engines"]) == 2, "no engine comes", 300)
    until(lambda: list(server.get("/health").json()["engines"].values()) == ["up", "up"], "it is used", 300)
    assert len(cluster.processes(server, cluster.ENGINE)) == 2
    ends.set()
    for client in clients:
        client.join(300)
        assert not client.is_alive()
