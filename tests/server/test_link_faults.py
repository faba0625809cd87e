"""Engines and API processes die, stop and hang, and the network between them is cut, slow or half-open.

Turns in flight end with an error that may be retried and names the turn; others go on; nothing stays held.
"""

import contextlib
import json
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from holdfast.server.link import wire
from tests.plain import NO_TLS
from tests.server.apart import ENDLESS, SMALL, Apart, EngineProcess, said, states, until
from tests.server.serving import Server
from tests.server.talking import Talk
from tests.server.test_link_refusals import Foreigner

SOON = ("--link-seconds", "2")
LOST = "the link to an API process is lost"
"""What an engine says of one that hangs: either limit, its own or that of the network, may be the first."""
LONG = {"max_tokens": 90_000, "ignore_eos": True}


class Turn(threading.Thread):
    """A turn that takes long, streamed; `events` are what was heard of it."""

    def __init__(self, server: Server, session: str, name: str, **sampling: Any) -> None:
        super().__init__(daemon=True)
        self.url = f"{server.url}/v1/sessions/{session}/turns"
        self.body = {"input": "abc", "turn_id": name, "stream": True, "sampling": LONG | sampling}
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.status = 0
        self.broken = False
        self.start()

    def run(self) -> None:
        name = ""
        try:
            with httpx.stream("POST", self.url, json=self.body, timeout=60, verify=NO_TLS) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    if line.startswith("event: "):
                        name = line.removeprefix("event: ")
                    elif line.startswith("data: "):
                        self.events.append((name, json.loads(line.removeprefix("data: "))))
        except httpx.HTTPError:
            self.broken = True

    def speaks(self) -> None:
        """Wait until it has begun to answer."""
        until(lambda: self.events)

    def lost(self) -> dict[str, Any]:
        """The error that it ended with."""
        self.join(60)
        assert not self.is_alive()
        kind, body = self.events[-1]
        assert kind == "error", self.events[-1]
        error: dict[str, Any] = body["error"]
        assert (error["code"], error["type"]) == ("engine_lost", "unavailable_error")
        assert str(self.body["turn_id"]) in error["message"]
        return error


def two(apart: Apart, *more: str) -> tuple[list[EngineProcess], Server]:
    """Two engines with room for long turns, and an API process."""
    engines = [apart.engine("--engine-id", f"e{number}", *ENDLESS, *more) for number in range(2)]
    return engines, apart.api(*engines, arguments=SOON)


def placed(server: Server, *engines: str) -> dict[str, str]:
    """A session at each engine, by the engine's name."""
    found: dict[str, str] = {}
    for number in range(16):
        name = server.open(f"p-{number}")
        found.setdefault(server.state(name)["engine"], name)
        if set(found) == set(engines):
            return found
    raise AssertionError(f"only {found}")


def test_kill_9_of_an_engine_under_load(apart: Apart, tmp_path: Any) -> None:
    journal = ("--journal", str(tmp_path / "journal"))
    dies = apart.engine("--engine-id", "e0", *ENDLESS, *journal)
    stays = apart.engine("--engine-id", "e1", *ENDLESS)
    server = apart.api(dies, stays, arguments=SOON)
    at = placed(server, "e0", "e1")
    server.say(at["e0"], "kept", turn_id="kept")
    turns = {engine: Turn(server, name, f"long-{engine}") for engine, name in at.items()}
    for turn in turns.values():
        turn.speaks()
    dies.process.kill()
    turns["e0"].lost()
    assert turns["e1"].is_alive()
    refused = server.get(f"/v1/sessions/{at['e0']}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    assert states(server) == {"e0": "down", "e1": "up"}
    assert server.say(server.open(), "elsewhere")["text"] == "elsewhere"
    assert turns["e1"].is_alive()
    assert server.http.delete(f"/v1/sessions/{at['e1']}").status_code == 200
    turns["e1"].join(60)
    back = apart.engine("--engine-id", "e0", *ENDLESS, *journal, listen=dies.address)
    apart.connected(server, 2)
    assert server.state(at["e0"])["turns"] == 1, "what was acknowledged is there"
    assert server.say(at["e0"], "kept", turn_id="kept")["text"] == "kept"
    assert server.state(at["e0"])["turns"] == 1, "a turn is not repeated"
    assert back.address == dies.address
    server.check_clean()


def test_a_session_of_an_engine_that_cannot_be_asked_is_not_denied(apart: Apart) -> None:
    engines, here = two(apart)
    at = placed(here, "e0", "e1")
    os.kill(engines[0].process.pid, signal.SIGSTOP)
    try:
        named = [part for engine in engines for part in ("--engine", engine.address)]
        late = Server(None, *named, "--link-keys", str(apart.keys))
        assert late.say(at["e1"], "here")["text"] == "here"
        for answer in (
            late.get(f"/v1/sessions/{at['e0']}"),
            late.http.delete(f"/v1/sessions/{at['e0']}"),
            late.post("/v1/sessions", {"id": at["e0"]}),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert late.say(late.open(), "unnamed")["text"] == "unnamed"
    finally:
        os.kill(engines[0].process.pid, signal.SIGCONT)
    apart.connected(late, 2)
    assert late.state(at["e0"])["turns"] == 0
    taken = late.post(f"/v1/sessions/{at['e1']}/fork", {"id": at["e0"]})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "session_exists")
    assert late.stop() == 0


def test_sessions_without_a_journal_are_lost_with_their_engine(apart: Apart) -> None:
    engines, server = two(apart)
    at = placed(server, "e0", "e1")
    engines[0].process.kill()
    until(lambda: states(server)["e0"] == "down")
    apart.engine("--engine-id", "e0", *ENDLESS, listen=engines[0].address)
    apart.connected(server, 2)
    gone = server.get(f"/v1/sessions/{at['e0']}")
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "session_lost")
    assert server.say(at["e1"], "here")["text"] == "here"


def test_kill_9_of_an_api_process_under_load(apart: Apart) -> None:
    engines, dies = two(apart, *SOON)
    stays = apart.api(*engines, arguments=SOON)
    at = placed(dies, "e0", "e1")
    turns = [Turn(dies, name, f"long-{engine}") for engine, name in at.items()]
    chat = {"model": "echo", "messages": [{"role": "user", "content": "a chat"}]}
    assert dies.post("/v1/chat/completions", chat).status_code == 200
    mine = stays.open("mine")
    other = Turn(stays, mine, "other")
    for turn in (*turns, other):
        turn.speaks()
    dies.process.kill()
    for engine in engines:
        engine.says("the link to an API process is lost")
    for name in at.values():
        until(lambda name=name: stays.state(name)["state"] == "IDLE")
        assert stays.state(name)["turns"] == 0, "rolled back"
        assert stays.say(name, "next")["text"] == "next"
    assert other.is_alive() and not other.broken
    assert stays.http.delete(f"/v1/sessions/{mine}").status_code == 200
    other.join(60)
    stays.check_clean()


def test_a_realtime_turn_is_repeated_through_another_api_process(apart: Apart) -> None:
    engines, dies = two(apart, *SOON)
    stays = apart.api(*engines, arguments=SOON)
    talk = Talk(dies)
    talk.open("voice")
    first = talk.turn("one", turn_id="first")
    talk.commit("two", turn_id="second", sampling=LONG)
    talk.hear("response.delta")
    seen = talk.last_seq()
    dies.process.kill()
    with contextlib.suppress(ConnectionClosed, OSError):
        talk.hear("nothing that is ever said")
    until(lambda: stays.state("voice")["state"] == "IDLE")
    with Talk(stays) as again:
        back = again.open("voice", resume_after_seq=seen)
        assert (back["resumed"], back["turns"]) == (False, 1) and back["seq"] >= seen
        repeated = again.turn("one", turn_id="first")
        assert repeated["text"] == first["text"] == "one"
        assert again.turn("two", turn_id="second")["turns"] == 2
        assert min(message["seq"] for message in again.heard) >= seen
    stays.check_clean()


class Client(threading.Thread):
    """Takes turns on one session through any API process, and repeats each until it is acknowledged."""

    def __init__(self, urls: list[str], name: str, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.urls, self.session, self.halt = urls, name, stop
        self.acknowledged = 0
        self.retried = 0
        self.wrong: list[str] = []
        self.start()

    def run(self) -> None:
        while not self.halt.is_set() and not self.wrong:
            body = {"input": f"turn {self.acknowledged}", "turn_id": f"t-{self.acknowledged}"}
            url = self.urls[(self.acknowledged + self.retried) % len(self.urls)]
            try:
                answer = httpx.post(
                    f"{url}/v1/sessions/{self.session}/turns", json=body, timeout=30, verify=NO_TLS
                )
            except httpx.HTTPError:
                self.retried += 1
                continue
            if answer.status_code == 200:
                if answer.json()["text"] != body["input"]:
                    self.wrong.append(answer.text)
                self.acknowledged += 1
            elif answer.status_code in (409, 503):
                self.retried += 1
                time.sleep(0.02)
            else:
                self.wrong.append(answer.text)


def _go_on(clients: list[Client]) -> None:
    """Wait until each client has had another turn."""
    before = [client.acknowledged for client in clients]
    until(
        lambda: all(client.acknowledged > was for client, was in zip(clients, before, strict=True)),
        60,
        lambda: [(client.acknowledged, client.retried, client.wrong) for client in clients],
    )


@pytest.mark.parametrize("rounds", [1, pytest.param(25, marks=pytest.mark.soak)])
def test_no_acknowledged_turn_is_lost_or_doubled(apart: Apart, tmp_path: Any, rounds: int) -> None:
    """Engines with journals and API processes are killed under load; clients repeat what was not answered."""
    room = ("--kv-tokens", "65536", *SOON)
    kept = [(*room, "--engine-id", f"e{each}", "--journal", str(tmp_path / f"j{each}")) for each in range(2)]
    engines = [apart.engine(*each) for each in kept]
    servers = [apart.api(*engines, arguments=SOON) for _ in range(2)]
    ports = [server.url.rpartition(":")[2] for server in servers]
    stop = threading.Event()
    names = [servers[0].open(f"load-{number}") for number in range(6)]
    clients = [Client([server.url for server in servers], name, stop) for name in names]
    for round_ in range(rounds):
        victim = round_ % 2
        _go_on(clients)
        engines[victim].process.kill()
        engines[victim] = apart.engine(*kept[victim], listen=engines[victim].address)
        apart.connected(servers[0], 2)
        servers[1].process.kill()
        servers[1].http.close()
        servers[1] = apart.api(*engines, arguments=(*SOON, "--port", ports[1]))
        _go_on(clients)
    stop.set()
    for client in clients:
        client.join(60)
    assert [client.wrong for client in clients] == [[]] * len(clients)
    found = {name: servers[1].state(name)["turns"] for name in names}
    assert found == {client.session: client.acknowledged for client in clients}
    assert sum(client.retried for client in clients) > 0, "nothing was disturbed"


def test_an_engine_that_hangs_is_left_and_taken_back(apart: Apart) -> None:
    engines, server = two(apart, *SOON)
    at = placed(server, "e0", "e1")
    turn = Turn(server, at["e0"], "hangs")
    turn.speaks()
    os.kill(engines[0].process.pid, signal.SIGSTOP)
    try:
        assert "hangs" in turn.lost()["message"]
        said(server.lines, "nothing was heard of it for")
        assert states(server) == {"e0": "down", "e1": "up"}
        assert server.say(at["e1"], "here")["text"] == "here"
    finally:
        os.kill(engines[0].process.pid, signal.SIGCONT)
    apart.connected(server, 2)
    until(lambda: server.state(at["e0"])["state"] == "IDLE")
    assert server.state(at["e0"])["turns"] == 0, "the engine has ended what nobody waits for"
    assert server.say(at["e0"], "again")["text"] == "again"
    server.check_clean()


def test_an_api_process_that_hangs_is_left_and_taken_back(apart: Apart) -> None:
    engines, server = two(apart, *SOON)
    other = apart.api(*engines, arguments=SOON)
    at = placed(server, "e0", "e1")
    turn = Turn(server, at["e0"], "hangs")
    turn.speaks()
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        for engine in engines:
            engine.says(LOST)
        until(lambda: other.state(at["e0"])["state"] == "IDLE")
        assert other.say(at["e0"], "meanwhile")["text"] == "meanwhile"
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    turn.lost()
    apart.connected(server, 2)
    assert server.state(at["e0"])["turns"] == 1
    assert server.say(at["e0"], "after")["usage"]["cached_tokens"] > 0
    server.check_clean()


def test_a_cut_network_is_mended(apart: Apart) -> None:
    engine = apart.engine("--engine-id", "e0", *ENDLESS)
    proxy = apart.proxy(engine)
    server = apart.api(proxy, arguments=SOON)
    name = server.open("cut")
    server.say(name, "one", turn_id="one")
    for round_ in range(3):
        turn = Turn(server, name, f"cut-{round_}")
        turn.speaks()
        proxy.cut()
        turn.lost()
        apart.connected(server, 1)
        until(lambda: server.state(name)["state"] == "IDLE")
    assert server.say(name, "one", turn_id="one")["text"] == "one"
    assert server.state(name)["turns"] == 1
    assert server.get("/metrics").text.count('holdfast_link_losses_total{engine="e0"} 3.0') == 1
    server.check_clean()


def test_a_half_open_network_is_noticed_at_both_ends(apart: Apart) -> None:
    engine = apart.engine("--engine-id", "e0", *ENDLESS, *SOON)
    proxy = apart.proxy(engine)
    server = apart.api(proxy, arguments=SOON)
    name = server.open("half")
    turn = Turn(server, name, "half-open")
    turn.speaks()
    proxy.flows.clear()
    turn.lost()
    said(server.lines, "nothing was heard of it for")
    engine.says(LOST)
    proxy.flows.set()
    apart.connected(server, 1)
    assert server.say(name, "again")["text"] == "again"
    server.check_clean()


def test_a_frame_that_is_cut_in_the_middle_does_no_harm(apart: Apart) -> None:
    engine = apart.engine("--engine-id", "e0", *SMALL)
    proxy = apart.proxy(engine)
    server = apart.api(proxy, arguments=SOON)
    name = server.open("middle")
    proxy.cut_after = len(proxy.recorded[-1]) + 2000
    refused = server.post(f"/v1/sessions/{name}/turns", {"input": "x" * 4000, "turn_id": "long"})
    assert refused.status_code == 503 and "turn long" in refused.json()["error"]["message"]
    proxy.cut_after = None
    apart.connected(server, 1)
    assert server.say(name, "x" * 100, turn_id="long")["text"] == "x" * 100
    assert server.state(name)["turns"] == 1
    server.check_clean()


def test_a_slow_network_is_only_slow(apart: Apart) -> None:
    engine = apart.engine("--engine-id", "e0", *SMALL)
    proxy = apart.proxy(engine)
    server = apart.api(proxy, arguments=SOON)
    proxy.delay = 0.05
    name = server.open("slow")
    assert server.say(name, "hello " * 20)["text"] == "hello " * 20
    proxy.delay = 0.0
    server.check_clean()


def test_an_api_process_that_takes_nothing_is_dropped_before_the_engine_s_memory_is_full(
    apart: Apart,
) -> None:
    """It sends heartbeats, and reads nothing: what waits for it is bounded."""
    engine = apart.engine("--engine-id", "e0", *SMALL)
    server = apart.api(engine)
    server.open("asked", metadata={"long": "x" * 60_000})
    slow = Foreigner(engine, apart.keys)
    slow.say(wire.Greeting(wire.PROTOCOL, "slow", 9))
    assert isinstance(slow.hear(), wire.Welcome)
    slow.tls.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    number = 9 << wire.CALL_BITS
    questions = (wire.Ask(number + call, wire.Question.STORED, "public/asked") for call in range(1 << 20))
    with pytest.raises((ConnectionError, ssl.SSLError, TimeoutError)):
        _say_all(slow, questions)
    slow.tls.close()
    assert "MiB of reports" in engine.says("it has not taken")
    assert server.say("asked", "hello")["text"] == "hello"
    server.check_clean()


def _say_all(foreigner: Foreigner, messages: Iterable[wire.Command]) -> None:
    for message in messages:
        foreigner.say(message)


def test_sigterm_drains_an_engine(apart: Apart) -> None:
    engines, server = two(apart, "--drain-seconds", "60")
    at = placed(server, "e0", "e1")
    turn = Turn(server, at["e0"], "ends", max_tokens=3000)
    turn.speaks()
    engines[0].process.send_signal(signal.SIGTERM)
    until(lambda: states(server)["e0"] != "up")
    refused = server.post(f"/v1/sessions/{at['e0']}/turns", {"input": "more"})
    assert refused.status_code == 503
    assert server.state(server.open())["engine"] == "e1", "nothing new is placed there"
    turn.join(60)
    assert turn.events[-1][0] == "done" and turn.events[-1][1]["usage"]["completion_tokens"] == 3000
    assert engines[0].process.wait(60) == 0


def test_a_second_signal_does_not_wait(apart: Apart) -> None:
    engine = apart.engine("--engine-id", "e0", *ENDLESS, "--drain-seconds", "600")
    server = apart.api(engine)
    turn = Turn(server, server.open(), "endless")
    turn.speaks()
    engine.process.send_signal(signal.SIGTERM)
    engine.says("draining")
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(60) == 0
    turn.join(60)
    kind, body = turn.events[-1]
    assert kind == "error" or body["finish_reason"] == "abort"


def test_an_api_process_starts_before_its_engines(apart: Apart) -> None:
    """Neither end waits for the other to be started first."""
    taken = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{taken.getsockname()[1]}"
    started = threading.Event()
    servers: list[Server] = []

    def start() -> None:
        servers.append(Server(None, "--engine", address, "--link-keys", str(apart.keys)))
        started.set()

    threading.Thread(target=start, daemon=True).start()
    time.sleep(0.5)
    taken.close()
    apart.engine("--engine-id", "late", *SMALL, listen=address)
    assert started.wait(60)
    try:
        assert servers[0].say(servers[0].open(), "hello")["text"] == "hello"
    finally:
        assert servers[0].stop() == 0
