"""Deaths without warning: a process with sessions in flight is killed, again and again, on the same journal.

After each death the journal must hold every act that was acknowledged, and of the acts that were only begun
either all or nothing; a turn that is asked for again is never applied twice; the next process must come to
life with exactly what the journal holds.
"""

import json
import random
import signal
import subprocess
from itertools import groupby
from pathlib import Path

import pytest

from holdfast.core.tokens import TokenLog
from holdfast.engine.durable.records import StoredSession
from holdfast.engine.durable.stores import read_sessions
from holdfast.engine.engine import Engine
from tests.databases import STORES, new_place
from tests.engine.tiny import greedy, tiny_engine, word
from tests.preloaded.commands import Command

ROOT = Path(__file__).parents[2]
POINTS = ("before append", "mid-record", "after write", "after fsync", "after the answer")


def picture(stored: StoredSession) -> dict[str, object]:
    tokens = [token for turn in stored.turns for token in (*turn.input, *turn.output)]
    return {"tokens": TokenLog(tokens).digest(len(tokens)), "turns": len(stored.turns)}


class Graveyard:
    """What was promised so far, and what was found."""

    def __init__(self, directory: Path, path: Path, store: str) -> None:
        self.directory = directory
        self.path = path
        self.journal = new_place(store, path / "sessions.journal")
        self.again: list[dict[str, object]] = []
        self.acknowledged = 0
        self.begun = 0
        self.replayed = 0

    def kill_one(self, seed: int, point: str, count: int) -> None:
        """Let a process live until it is killed, and look at what it left."""
        process = Command(
            *(str(self.directory), str(self.path), self.journal, str(seed), point, str(count)),
            module="tests.engine.victim",
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write("".join(json.dumps(asked) + "\n" for asked in self.again).encode())
        process.stdin.close()
        lines: list[dict[str, object]] = []
        for line in process.stdout:
            lines.append(json.loads(line))
            if point == "anywhere" and sum("ack" in each for each in lines) >= count:
                process.send_signal(signal.SIGKILL)
                lines += [json.loads(rest) for rest in process.stdout if rest.endswith(b"\n")]
                break
        process.stdout.close()
        errors = process.stderr.read().decode()
        process.stderr.close()
        assert process.wait() == -signal.SIGKILL, errors
        self.examine(lines)

    def examine(self, lines: list[dict[str, object]]) -> None:
        """Hold what was promised against what is there."""
        stored = {session.id: session for session in read_sessions(self.journal)}
        assert not any(session.damaged for session in stored.values())
        for session in stored.values():
            ids = [turn.turn_id for turn in session.turns]
            assert len(set(ids)) == len(ids), "a turn was applied twice"
        self.again = []
        told = [line for line in lines if "session" in line]
        for name, each in groupby(
            sorted(told, key=lambda line: str(line["session"])), lambda line: line["session"]
        ):
            self.examine_session(str(name), list(each), stored.get(str(name)))

    def examine_session(
        self, name: str, lines: list[dict[str, object]], stored: StoredSession | None
    ) -> None:
        promises = [line for line in lines if "ack" in line]
        self.acknowledged += len(promises)
        self.replayed += sum("replayed" in line for line in promises)
        open_act = lines[-1] if "ask" in lines[-1] else None
        last = promises[-1] if promises else None
        if open_act is None:
            assert last is not None
            if last["ack"] == "close":
                assert stored is None
                return
            assert stored is not None, f"{name} is lost"
            assert picture(stored) == {"tokens": last["tokens"], "turns": last["turns"]}, last
            self.answers(promises, stored)
            return
        self.begun += 1
        if stored is None:
            assert open_act["ask"] == "close" or last is None, f"{name} is lost"
            return
        if last is not None and last["ack"] != "close" and open_act["ask"] == "turn":
            undone = {**stored_without(stored, str(open_act["turn_id"]))}
            assert undone == {"tokens": last["tokens"], "turns": last["turns"]}, (
                "the turns before it are whole"
            )
            self.answers(promises, stored)
        if open_act["ask"] == "turn":
            self.again.append(open_act)

    def answers(self, promises: list[dict[str, object]], stored: StoredSession) -> None:
        """What was answered is what is remembered."""
        outputs = {line["turn_id"]: line["output"] for line in promises if line["ack"] == "turn"}
        for turn in stored.finished:
            if outputs.get(turn.turn_id) is not None:
                assert turn.tokens == outputs[turn.turn_id]


def stored_without(stored: StoredSession, turn_id: str) -> dict[str, object]:
    """A session as it was before a turn that may have been its last."""
    turns = stored.turns
    if turns and turns[-1].turn_id == turn_id:
        turns = turns[:-1]
    tokens = [token for turn in turns for token in (*turn.input, *turn.output)]
    return {"tokens": TokenLog(tokens).digest(len(tokens)), "turns": len(turns)}


def recover(graveyard: Graveyard) -> None:
    """What is left of all of them is whole: every session goes on, and nothing is held by nobody."""
    path = graveyard.path
    engine: Engine = tiny_engine(
        graveyard.directory,
        journal=graveyard.journal,
        disk=str(path / "disk"),
        disk_limit=8 << 20,
        kv_tokens=2048,
    )
    stored = {session.id: picture(session)["turns"] for session in read_sessions(graveyard.journal)}
    for name in engine.sessions():
        session = engine.resume(name)
        assert session.turns == stored[name]
        assert session.say([word("river")], greedy(3)).finish_reason == "length"
    engine.close()
    assert engine.audit() == []
    files = {snapshot.snapshot.file for snapshot in read_sessions(graveyard.journal) if snapshot.snapshot}
    assert {file.name for file in (path / "disk").iterdir()} == files


DEATHS = {
    ("llama", "sqlite"): POINTS,
    ("bamba", "sqlite"): ("anywhere", "anywhere", "after fsync"),
    ("llama", "postgres"): ("mid-record", "after write", "anywhere"),
}


@pytest.mark.parametrize(("family", "store"), DEATHS, ids=map("-".join, DEATHS))
def test_nothing_that_was_acknowledged_is_lost(
    directories: dict[str, Path], tmp_path: Path, family: str, store: str
) -> None:
    graveyard = Graveyard(directories[family], tmp_path, store)
    dice = random.Random(family)
    deaths = DEATHS[family, store]
    for seed, point in enumerate(deaths):
        graveyard.kill_one(seed, point, dice.randint(20, 45))
    assert graveyard.acknowledged > 20 * len(deaths) // 2
    assert graveyard.begun > 0, "somebody died in the middle of something"
    recover(graveyard)


@pytest.mark.soak
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("family", ["llama", "bamba", "mistral", "olmo3"])
def test_fifty_deaths(directories: dict[str, Path], tmp_path: Path, family: str, store: str) -> None:
    graveyard = Graveyard(directories[family], tmp_path, store)
    dice = random.Random(family)
    for seed in range(50):
        graveyard.kill_one(seed, dice.choice((*POINTS, "anywhere", "anywhere")), dice.randint(1, 300))
    assert graveyard.acknowledged > 1000
    assert graveyard.replayed > 0, "some turns were answered from the journal"
    recover(graveyard)
