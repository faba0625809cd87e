"""Sessions that move between engines with their memory: real processes, PostgreSQL and small models."""

import contextlib
import json
import os
import signal
import threading
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.cutting import Proxy
from tests.cluster.test_serving import engine_ids, kill, retried, rounds
from tests.databases import run_sql, shared_cluster
from tests.models.small import conversation, write_small_model
from tests.plain import NO_TLS
from tests.preloaded import commands
from tests.server.apart import Apart, EngineProcess, until
from tests.server.apart import Proxy as PortProxy
from tests.server.shared import Shared, folder

GREEDY = {"sampling": {"max_tokens": 12, "temperature": 0}}


class Movable(Shared):
    """Engines with a disk tier each."""

    def __init__(
        self, apart: Apart, path: Path, model: str | Path = "echo", *more: str, **given: Any
    ) -> None:
        self._path = path
        super().__init__(apart, *more, model=str(model), **given)

    def engine(self, name: str | None = None, listen: str = "127.0.0.1:0", *more: str) -> EngineProcess:
        name = name or f"e{next(self._names)}"
        return super().engine(name, listen, "--disk", folder(self._path / name), *more)

    def move(self, session: str, engine: str) -> dict[str, Any]:
        """Move a session; the answer."""
        answer = self.apis[0].post("/v1/cluster/move", {"session": session, "engine": engine})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@pytest.fixture
def another_machine(tmp_path: Path) -> str:
    """The file of the boot id of another machine: engines there cannot open files of engines here."""
    if os.getuid() != 0:
        pytest.skip("only root can hide the boot id of this machine")
    path = tmp_path / "boot_id"
    path.write_text(f"{uuid.uuid4()}\n")
    return str(path)


@pytest.mark.parametrize(
    "family",
    ["bamba", pytest.param("llama", marks=pytest.mark.soak), pytest.param("mistral", marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("machines", [1, 2])
def test_a_moved_session_computes_nothing_again(
    apart: Apart, tmp_path: Path, family: str, machines: int, another_machine: str
) -> None:
    model = write_small_model(tmp_path / "model", family)
    shared = Movable(apart, tmp_path, model, engines=1, apis=0)
    if machines == 2:
        shared._given["machine"] = another_machine
    shared.engines.append(shared.engine())
    shared.apis += [apart.api(*shared.engines) for _ in range(2)]
    here, there = shared.apis
    said = conversation(3, turns=6)
    alone, moving = here.open("alone"), here.open("moving")
    known = 0
    for turn, text in enumerate(said):
        expected = here.say(alone, text, **GREEDY)
        if turn:
            target = f"e{1 - shared.of(moving)}"
            moved = shared.move(moving, target)
            assert moved["to"] == target and moved["bytes"] > 0
        answer = (here, there)[turn % 2].say(moving, text, **GREEDY)
        assert answer["text"] == expected["text"]
        usage = answer["usage"]
        if turn:
            own = usage["prompt_tokens"] - known
            assert (usage["cached_tokens"], usage["computed_tokens"]) == (known, own), "nothing else"
        known = usage["prompt_tokens"] + usage["completion_tokens"]
    epochs = dict(run_sql(shared.url, "SELECT id, epoch FROM sessions"))
    assert epochs == {"public/alone": 1, "public/moving": len(said)}, "each move raises the epoch by one"


@pytest.mark.soak
def test_what_does_not_fit_is_computed_again(apart: Apart, tmp_path: Path) -> None:
    """Another layout is refused when it is announced; a damaged file is found when it is read."""
    model = write_small_model(tmp_path / "model")
    shared = Movable(apart, tmp_path, model, engines=1, apis=0)
    shared.engines.append(shared.engine("e1", "127.0.0.1:0", "--page-size", "32"))
    shared.engines.append(shared.engine("e2"))
    shared.apis.append(apart.api(*shared.engines))
    api = shared.apis[0]
    said = conversation(5, turns=4)
    alone, name = api.open("alone"), api.open("moving")
    expected = [api.say(alone, text, **GREEDY)["text"] for text in said]
    home = shared.of(name)
    assert api.say(name, said[0], **GREEDY)["text"] == expected[0]
    for turn, target in enumerate(("e1", "e0") if home != 1 else ("e0", "e1"), 1):
        if target == f"e{shared.of(name)}":
            continue
        assert shared.move(name, target)["bytes"] == 0, "the layouts differ"
        assert api.say(name, said[turn], **GREEDY)["text"] == expected[turn]
    if shared.of(name) == 1:
        shared.move(name, "e0")
        api.post(f"/v1/sessions/{name}/rewind", {"to_turn": 3})
    target = "e2" if shared.of(name) == 0 else "e0"
    assert shared.move(name, target)["bytes"] > 0
    for file in (tmp_path / target).glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-64:] = bytes(each ^ 0xFF for each in content[-64:])
        file.write_bytes(content)
    last = api.say(name, said[3], **GREEDY)
    assert last["text"] == expected[3]
    shared.engines[int(target[1])].says("is recomputed: its snapshot cannot be used")


def test_moves_under_load(apart: Apart, tmp_path: Path) -> None:
    shared = Movable(apart, tmp_path)
    moved: list[int] = []

    def disturb(_: int) -> None:
        for number in range(16):
            target = f"e{number % 3}"
            body = {"session": f"c{number % 8}", "engine": target}
            answer = shared.apis[number % 2].post("/v1/cluster/move", body)
            assert answer.status_code in (200, 409, 503), answer.text
            moved.append(answer.status_code)

    rounds(shared, 1, disturb)
    assert moved.count(200) > 0
    homes = engine_ids(shared.apis[0], [f"c{number}" for number in range(8)])
    assert set(homes.values()) <= {"e0", "e1", "e2"}


@pytest.mark.parametrize("asked", ["signal", pytest.param("command", marks=pytest.mark.soak)])
def test_an_engine_is_drained_under_load(apart: Apart, tmp_path: Path, asked: str) -> None:
    shared = Movable(apart, tmp_path)

    def disturb(_: int) -> None:
        if asked == "signal":
            shared.engines[0].process.send_signal(signal.SIGTERM)
        else:
            ran = commands.run("cluster", "drain", "e0", "--url", shared.apis[1].url, text=True)
            assert ran.returncode == 0, ran.stdout
        assert shared.engines[0].process.wait(60) == 0

    rounds(shared, 1, disturb)
    lives = dict(run_sql(shared.url, "SELECT name, state FROM lives"))
    assert lives.get("e0", "ended") == "ended", "its life was ended, not taken"
    owners = {
        name
        for (name,) in run_sql(shared.url, "SELECT l.name FROM sessions s JOIN lives l ON l.life = s.owner")
    }
    assert owners <= {"e1", "e2"}


def test_a_drain_hands_sessions_over_with_their_memory(apart: Apart, tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model")
    shared = Movable(apart, tmp_path, model, engines=2, apis=1)
    api = shared.apis[0]
    names = [api.open(f"s{number}") for number in range(6)]
    first = {name: api.say(name, f"one two three {name}", **GREEDY) for name in names}
    leaving = [name for name in names if shared.of(name) == 0]
    assert leaving
    shared.engines[0].process.send_signal(signal.SIGTERM)
    assert shared.engines[0].process.wait(60) == 0
    for name in leaving:
        usage = retried(
            lambda name=name: api.post(f"/v1/sessions/{name}/turns", {"input": "and four", **GREEDY})
        ).json()["usage"]
        known = first[name]["usage"]["prompt_tokens"] + first[name]["usage"]["completion_tokens"]
        assert usage["cached_tokens"] >= known - 1, "its memory came with it"
        assert api.state(name)["engine"] == "e1"


def test_a_restarted_engine_reads_its_files_when_sessions_are_claimed(apart: Apart, tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model")
    shared = Movable(apart, tmp_path, model, engines=2, apis=1)
    api = shared.apis[0]
    name = api.open("kept")
    first = api.say(name, "one two three", **GREEDY)
    target = f"e{1 - shared.of(name)}"
    shared.move(name, target)
    number = int(target[1])
    address = shared.engines[number].address
    kill(shared, number)
    shared.engines[number] = shared.engine(target, address)
    apart.connected(api, 2)
    turn = {"input": "four", **GREEDY}
    said = retried(lambda: api.post(f"/v1/sessions/{name}/turns", turn)).json()
    known = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert said["usage"]["cached_tokens"] == known, "the file that came with the move was kept"
    assert api.state(name)["engine"] == target


@pytest.mark.soak
def test_a_move_is_abandoned_without_loss_if_the_other_engine_dies(apart: Apart, tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model")
    shared = Movable(apart, tmp_path, model, engines=2, apis=1)
    api = shared.apis[0]
    name = api.open("stays")
    api.say(name, "one two", **GREEDY)
    here = shared.of(name)
    other = shared.engines[1 - here]
    other.process.send_signal(signal.SIGSTOP)
    heard: list[Any] = []
    asking = threading.Thread(
        target=lambda: heard.append(api.post("/v1/cluster/move", {"session": name, "engine": f"e{1 - here}"}))
    )
    asking.start()
    other.process.kill()
    other.process.wait(30)
    assert api.say(name, "three", **GREEDY)["usage"]["computed_tokens"] < 30, "it serves on"
    asking.join(60)
    assert heard and (heard[0].status_code != 200 or api.state(name)["turns"] == 2)
    assert (
        retried(lambda: api.post(f"/v1/sessions/{name}/turns", {"input": "four", **GREEDY})).status_code
        == 200
    )
    assert api.state(name)["turns"] == 3


@pytest.mark.parametrize("killed", ["the sender", "the receiver"])
def test_an_engine_is_killed_while_a_session_s_memory_comes(
    apart: Apart, tmp_path: Path, killed: str, another_machine: str
) -> None:
    """The session goes on at the other engine; half a file is none."""
    model = write_small_model(tmp_path / "model")
    shared = Movable(apart, tmp_path, model, engines=1, apis=0)
    shared._given["machine"] = another_machine
    with contextlib.closing(PortProxy(0)) as proxy:
        shared.engines.append(shared.engine("e1", "127.0.0.1:0", "--advertise", proxy.address))
        proxy.port_there = shared.engines[1].port
        api = apart.api(shared.engines[0])
        name = api.open("s")
        said = api.say(name, "one two " * 50, **GREEDY)
        both = apart.api(*shared.engines)
        shared.apis.append(both)
        until(lambda: shared.of(name) == 0)
        proxy.hold_after = 8 << 10
        body = {"session": name, "engine": "e1"}
        asking = threading.Thread(target=lambda: both.post("/v1/cluster/move", body))
        asking.start()
        until(lambda: not proxy.flows.is_set())
        assert [path.suffix for path in (tmp_path / "e1").iterdir()] == [".partial"], "it is on its way"
        kill(shared, 0 if killed == "the sender" else 1)
        asking.join(60)
        turn = {"input": "three", **GREEDY}
        usage = retried(lambda: both.post(f"/v1/sessions/{name}/turns", turn)).json()["usage"]
        known = said["usage"]["prompt_tokens"] + said["usage"]["completion_tokens"]
        if killed == "the sender":
            until(lambda: not list((tmp_path / "e1").iterdir()))
            assert shared.of(name) == 1 and usage["computed_tokens"] > known, "all is computed again"
        else:
            assert shared.of(name) == 0 and usage["cached_tokens"] == known


def test_the_operators_commands(apart: Apart, tmp_path: Path) -> None:
    shared = Movable(apart, tmp_path, engines=2, apis=1)
    api = shared.apis[0]
    name = api.open("shown")
    api.say(name, "one")
    until(lambda: sum(row.get("sessions", 0) for row in api.get("/v1/cluster").json()["engines"]) == 1)

    def run(*words: str) -> Any:
        return commands.run("cluster", *words, "--url", api.url, text=True)

    shown = run("status")
    assert shown.returncode == 0, shown.stdout
    assert "e0" in shown.stdout and "e1" in shown.stdout and "live" in shown.stdout
    target = f"e{1 - shared.of(name)}"
    moved = run("move", name, target)
    assert moved.returncode == 0 and f"to {target}" in moved.stdout
    assert api.state(name)["engine"] == target and api.say(name, "two")["text"] == "two"
    assert "0 sessions moved" in run("rebalance").stdout
    wrong = run("move", name, "nowhere")
    assert wrong.returncode != 0 and "is not an engine of this server" in wrong.stdout + wrong.stderr
    assert "moved" in run("events").stdout
    assert run("drain", target).returncode == 0
    assert shared.engines[int(target[1])].process.wait(60) == 0
    assert (
        retried(lambda: api.post(f"/v1/sessions/{name}/turns", {"input": "three"})).json()["text"] == "three"
    )
    assert api.state(name)["turns"] == 3


HOSTILE = [
    {"session": "s", "engine": ""},
    {"session": "s", "engine": "e\0"},
    {"session": "s", "engine": "e" * 100_000},
    {"session": "../s", "engine": "e0"},
    {"session": "", "engine": "e0"},
    {"session": "s" * 129, "engine": "e0"},
    {"session": "s", "engine": "e0", "tenant": "\0"},
    {"session": "s", "engine": "e0", "tenant": "public/s"},
    {"session": "s", "engine": "e0", "tenant": "\\0' OR 1=1 --"},
    {"session": "s", "engine": "e0", "tenant": "x" * 1_000_000},
    {"session": "s", "engine": "e0", "tenant": ["x"]},
    {"session": "s", "engine": "e0", "more": 1},
    {"session": 7, "engine": "e0"},
    [],
]
RAW = [
    b'{"session": "s", "engine": "e0", "tenant": "\\ud800"}',
    b'{"engine": "\xff"}',
    b"",
    b"null",
    b"[" * 9999,
]


def test_hostile_bodies_are_refused_and_nothing_moves(apart: Apart) -> None:
    shared = Shared(apart, engines=2, apis=1)
    api = shared.apis[0]
    name = api.open("s")
    api.say(name, "one")
    home = shared.of(name)
    for body in (*(json.dumps(each).encode() for each in HOSTILE), *RAW):
        for path in ("move", "drain"):
            answer = httpx.post(f"{api.url}/v1/cluster/{path}", content=body, timeout=30, verify=NO_TLS)
            assert answer.status_code in (400, 404, 422), (path, body[:80], answer.text)
            assert answer.json()["error"]["message"]
    assert (shared.of(name), api.say(name, "two")["text"]) == (home, "two")
    assert [each["state"] for each in api.get("/v1/cluster").json()["engines"]] == ["up", "up"]


def test_the_status_is_shown_without_the_database_and_without_engines(apart: Apart) -> None:
    database = shared_cluster()
    name = database.new_database()
    with Proxy(database.directory) as proxy:
        beyond = f"postgresql://holdfast@/{name}?host={proxy.directory}"
        shared = Shared(apart, url=beyond, engines=2, apis=1)
        api = shared.apis[0]
        api.say(api.open("s"), "one")

        def rows() -> dict[str, tuple[str, bool]]:
            found = api.get("/v1/cluster").json()["engines"]
            return {each["engine"]: (each["state"], "life" in each) for each in found}

        assert rows() == {"e0": ("up", True), "e1": ("up", True)}
        proxy.part()
        until(lambda: api.get("/v1/cluster").json()["fault"])
        assert rows() == {"e0": ("up", False), "e1": ("up", False)}
        for engine in shared.engines:
            engine.process.kill()
        until(lambda: rows() == {"e0": ("down", False), "e1": ("down", False)})
        shown = commands.run("cluster", "status", "--url", api.url, text=True)
        assert shown.returncode == 0 and "lives are not shown: no engine can be reached" in shown.stdout


def test_sessions_leave_an_engine_under_pressure(apart: Apart, tmp_path: Path) -> None:
    shared = Movable(apart, tmp_path, "echo", "--kv-tokens", "4096", engines=2, apis=0)
    lone = apart.api(shared.engines[0])
    names = [lone.open(f"s{number}") for number in range(8)]
    for name in names:
        lone.say(name, (name * 300)[:465], sampling={"max_tokens": 2})
    both = apart.api(*shared.engines)
    shared.apis.append(both)

    until(lambda: len(both.get("/v1/sessions").json()["sessions"]) == len(names))
    moved = both.post("/v1/cluster/rebalance").json()["moved"]
    held = [(each["state"], each["memory"]) for each in both.get("/v1/sessions").json()["sessions"]]
    assert {(each["from"], each["to"]) for each in moved} == {("e0", "e1")}, held
    assert moved[0]["session"].endswith(names[0]), "the longest idle one"
    assert len(moved) < len(names) / 2, "no more than it takes"
    assert both.post("/v1/cluster/rebalance").json()["moved"] == []
    for name in names[:2]:
        assert both.say(name, "and on")["text"] == "and on"
