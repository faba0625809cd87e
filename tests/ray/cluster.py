"""`holdfast serve echo --replicas 3` on this machine, its processes, and clients that talk through it."""

import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from holdfast.engine.durable.stores import read_sessions
from tests.server.serving import Server
from tests.server.test_kill_server import Answerless, Conversation, ask, told

ENGINES = 3
ENGINE = "holdfast.cli.child"
API_REPLICA = "ServeReplica:holdfast:Api"
ENGINE_REPLICA = "ServeReplica:holdfast:Engine"
CONTROLLER = "ray::ServeController"
OPTIONS = ("--replica-cpus", "0.25", "--kv-tokens", "65536", "--drain-seconds", "5")
ROOT = Path(__file__).parents[2]


def start(journal: str, *arguments: str, environment: dict[str, str] | None = None) -> Server:
    """Three engines, in a cluster that ends with its command unless the arguments name one to join."""
    return _serve("--replicas", str(ENGINES), "--journal", journal, *arguments, environment=environment)


def start_one(*arguments: str) -> Server:
    """One engine without a journal, in a cluster that ends with its command."""
    return _serve("--replicas", "1", *arguments)


def _serve(*arguments: str, environment: dict[str, str] | None = None) -> Server:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return Server(
        *("echo", *OPTIONS, *arguments),
        execute=True,
        environment={"PYTHONPATH": path, **(environment or {})},
        starts_within=300,
    )


# --- its processes ------------------------------------------------------------------------------------


def descendants(process: int) -> Iterator[int]:
    """All processes below one."""
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        children = [int(each) for task in tasks for each in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in children:
        yield child
        yield from descendants(child)


def title(process: int) -> str:
    """What a process calls itself."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def processes(server: Server, words: str) -> list[int]:
    """The cluster's processes whose title has some words."""
    return [each for each in descendants(server.process.pid) if words in title(each)]


def listening(server: Server) -> set[str]:
    """The addresses, without ports, that the cluster's processes listen at."""
    sockets: dict[str, str] = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                raw = bytes.fromhex(fields[1].partition(":")[0])
                words = struct.unpack(f"<{len(raw) // 4}I", raw)
                sockets[fields[9]] = socket.inet_ntop(family, struct.pack(f">{len(words)}I", *words))
    found: set[str] = set()
    for process in descendants(server.process.pid):
        try:
            links = [str(each.readlink()) for each in Path(f"/proc/{process}/fd").iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found |= {sockets[each[8:-1]] for each in links if each[8:-1] in sockets}
    return found


def until(look: Callable[[], Any], what: str, seconds: float = 120) -> Any:
    """Wait until `look` finds something."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


# --- its clients --------------------------------------------------------------------------------------


class Talk:
    """Conversations that go on whatever dies: what had no answer is asked for again, with the same id."""

    def __init__(self, server: Server, journal: str, count: int, seed: int) -> None:
        self.server = server
        self.journal = journal
        self.conversations = [Conversation(f"talk{seed}-{number}", number) for number in range(count)]
        self.repeated = 0
        self.acknowledged = dict.fromkeys((each.name for each in self.conversations), 0)
        self._faults: list[BaseException] = []
        self._ends = threading.Event()
        dice = random.Random(seed)
        self._talkers = [
            threading.Thread(target=self._talk, args=(each, dice.random())) for each in self.conversations
        ]
        for talker in self._talkers:
            talker.start()

    def _talk(self, conversation: Conversation, seed: float) -> None:
        dice = random.Random(seed)
        try:
            while not self._ends.is_set():
                act = conversation.next_act(dice)
                conversation.waits = act
                answer = None
                while answer is None:
                    try:
                        with httpx.Client(base_url=self.server.url, timeout=90) as http:
                            answer = ask(http, act)
                    except Answerless:
                        self.repeated += 1
                        if self._ends.is_set():
                            return
                        time.sleep(0.1)
                conversation.learn(act, answer)
                self.acknowledged[conversation.name] += 1
        except (AssertionError, httpx.HTTPError, KeyError, ValueError) as error:
            self._faults.append(error)

    def goes_on(self, count: int) -> None:
        """Wait until every conversation has had so many answers more."""
        goal = {name: had + count for name, had in self.acknowledged.items()}

        def there() -> bool:
            assert not self._faults, self._faults
            return all(self.acknowledged[name] >= wanted for name, wanted in goal.items())

        until(there, f"somebody is not answered: {self.acknowledged}, not {goal}")

    def check(self) -> int:
        """End all talk: what was answered is stored, once, as it was answered. Returns how many answers."""
        self._ends.set()
        for talker in self._talkers:
            talker.join(120)
            assert not talker.is_alive(), "a client was left without an end"
        assert not self._faults, self._faults
        stored = {each.id.rpartition("/")[2]: each for each in read_sessions(self.journal)}
        for conversation in self.conversations:
            for name, turns in ((conversation.name, conversation.turns), *conversation.children.items()):
                found = told(stored[name])
                act = conversation.waits
                if found != turns and act is not None and act.session == name:
                    kept = turns[: act.body["to_turn"]] if act.kind == "rewind" else turns
                    assert found[: len(kept)] == kept
                    assert [each.name for each in found[len(kept) :]] in ([], [act.name])
                else:
                    assert found == turns, f"{name} is not what was answered"
        return sum(self.acknowledged.values())


def kill(process: int) -> None:
    """Kill -9."""
    os.kill(process, signal.SIGKILL)
