"""The server is killed under load, again and again, on one journal; its clients know what they were told.

Conversations go on over HTTP until their server dies: its listening process, its engine, or both at once.
What a client had an answer to must be there afterwards, as it was answered; what it had none to is sent again
with the same id, and is there once. Nothing else is there, and nothing is held by nobody. A server that is
asked to end writes the memory of all sessions first, and the next one computes none of it again.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.engine.durable.records import StoredSession
from holdfast.engine.durable.stores import read_sessions
from tests.databases import STORES, new_place, shared_cluster
from tests.plain import NO_TLS
from tests.server.conftest import Serve
from tests.server.serving import Server
from tests.server.test_sessions import events_of

CONVERSATIONS = 6
CHILDREN_MAX = 12
WORDS = ("bak", "del", "fin", "gor", "kus", "lan")


@dataclass(frozen=True, slots=True)
class Act:
    """Something that a client asks for; `name` is the id that keeps it from being done twice."""

    kind: str
    session: str
    name: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Told:
    """A turn as it was answered."""

    name: str
    tokens: tuple[int, ...]


class Answerless(Exception):
    """The server was gone before it answered."""


@dataclass(slots=True)
class Conversation:
    """One client: what it knows of its session, and what it has no answer to."""

    name: str
    seed: int
    opened: bool = False
    turns: list[Told] = field(default_factory=list)
    children: dict[str, list[Told]] = field(default_factory=dict)
    waits: Act | None = None
    serial: int = 0

    def next_act(self, dice: random.Random) -> Act:
        """What to ask for next."""
        self.serial += 1
        name = f"{self.name}-{self.serial}"
        if not self.opened:
            return Act("open", self.name, name, {"id": self.name})
        chance = dice.random()
        if chance < 0.08 and self.turns:
            return Act("rewind", self.name, name, {"to_turn": dice.randint(0, len(self.turns))})
        if chance < 0.14 and len(self.children) < CHILDREN_MAX // CONVERSATIONS:
            return Act("fork", self.name, name, {"id": f"child-{name}", "at_turn": len(self.turns)})
        if len(self.turns) > 12:
            return Act("rewind", self.name, name, {"to_turn": 1})
        sampling = {"max_tokens": dice.randint(1, 60), "ignore_eos": True, "temperature": 0}
        said = " ".join(dice.choice(WORDS) for _ in range(dice.randint(1, 6)))
        return Act("turn", self.name, name, {"input": said, "sampling": sampling, "stream": chance < 0.6})

    def learn(self, act: Act, answer: dict[str, Any]) -> None:
        """An answer came."""
        self.waits = None
        if act.kind == "open":
            self.opened = True
        elif act.kind == "turn":
            assert answer["finish_reason"] in ("length", "stop")
            self.turns.append(Told(act.name, tuple(answer["token_ids"])))
        elif act.kind == "rewind":
            assert answer["turns"] == act.body["to_turn"]
            del self.turns[act.body["to_turn"] :]
        else:
            self.children[answer["id"]] = list(self.turns)


def ask(http: httpx.Client, act: Act) -> dict[str, Any]:
    """Ask, and return what was answered; `Answerless` if nobody knows what came of it."""
    place = f"/v1/sessions/{act.session}"
    try:
        if act.kind == "open":
            answer = http.post("/v1/sessions", json=act.body)
            if answer.status_code == 409:  # It was opened, and nobody heard it.
                answer = http.get(place)
        elif act.kind == "turn" and act.body["stream"]:
            with http.stream("POST", f"{place}/turns", json={**act.body, "turn_id": act.name}) as answer:
                if answer.status_code == 200:
                    return streamed(answer)
                answer.read()
        elif act.kind == "turn":
            answer = http.post(f"{place}/turns", json={**act.body, "turn_id": act.name})
        else:
            answer = http.post(f"{place}/{act.kind}", json={**act.body, "request_id": act.name})
    except httpx.TransportError as error:
        raise Answerless from error
    if answer.status_code == 503:
        raise Answerless
    assert answer.status_code in (200, 201), answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(response: httpx.Response) -> dict[str, Any]:
    """The end of a stream that has one; what it said before is what it says then."""
    events = events_of(response)
    if not events or events[-1][0] == "error":
        raise Answerless
    name, last = events[-1]
    if name != "done":
        raise Answerless
    tokens = [token for kind, event in events if kind == "delta" for token in event["token_ids"]]
    assert tokens == last["token_ids"]
    return last


class Ward:
    """All conversations, and what is promised to them."""

    def __init__(self, serve: Callable[[], Server], journal: str, seed: int) -> None:
        self.serve = serve
        self.journal = journal
        self.dice = random.Random(seed)
        self.server = serve()
        self.conversations = [Conversation(f"talk-{number}", number) for number in range(CONVERSATIONS)]
        self.acknowledged = 0
        self.unanswered = 0
        self.found_applied = 0
        self._counting = threading.Lock()
        self._silence = threading.Event()

    def round(self, victim: str, count: int) -> None:
        """Let everybody talk until so many acts were answered, kill, and see what is left.

        A database that dies is started again, and the talk goes on for as long.
        """
        faults: list[BaseException] = []
        self._silence.clear()
        talkers = [
            threading.Thread(target=self._talk, args=(conversation, self.dice.random(), faults))
            for conversation in self.conversations
        ]
        for talker in talkers:
            talker.start()
        self._until_answered(count, talkers, faults)
        self.kill(victim)
        if victim.startswith("database"):
            self._until_answered(count, talkers, faults)
            self._silence.set()
        for talker in talkers:
            talker.join(120)
            assert not talker.is_alive(), "a client was left without an end"
        assert not faults, faults
        self.recover(victim)

    def _until_answered(
        self, count: int, talkers: list[threading.Thread], faults: list[BaseException]
    ) -> None:
        goal = self.acknowledged + count
        deadline = time.monotonic() + 120
        while self.acknowledged < goal and not faults and any(talker.is_alive() for talker in talkers):
            assert time.monotonic() < deadline, "nobody is answered"
            time.sleep(0.001)

    def _talk(self, conversation: Conversation, seed: float, faults: list[BaseException]) -> None:
        dice = random.Random(seed)
        try:
            with httpx.Client(base_url=self.server.url, timeout=90, verify=NO_TLS) as http:
                while not self._silence.is_set():
                    act = conversation.next_act(dice)
                    conversation.waits = act
                    conversation.learn(act, ask(http, act))
                    with self._counting:
                        self.acknowledged += 1
        except Answerless:
            return
        except BaseException as error:  # Whatever it is, the test has to hear of it.
            faults.append(error)
            raise

    def kill(self, victim: str) -> None:
        """Kill -9, without a word before."""
        engine = self.server.engine_pid()
        if victim == "database stopped":
            shared_cluster().stop()
            shared_cluster().start()
        if victim == "database killed":
            shared_cluster().kill()
            shared_cluster().start()
        if victim in ("engine", "both"):
            os.kill(engine, signal.SIGKILL)
        if victim in ("server", "both"):
            self.server.process.kill()
            self.server.process.wait()

    def recover(self, victim: str) -> None:
        """After a death: what was promised is there, and what was not answered is asked for again."""
        if victim == "engine" or victim.startswith("database"):
            self.server.wait_ready()
        else:
            self.server.http.close()
            self.server = self.serve()
        stored = self.stored()
        known = {conversation.name for conversation in self.conversations}
        known |= {child for conversation in self.conversations for child in conversation.children}
        waiting = {each.waits.body.get("id") for each in self.conversations if each.waits is not None}
        assert set(stored) <= known | waiting, "a session that nobody asked for"
        for conversation in self.conversations:
            self._check(conversation, stored)
        for conversation in self.conversations:
            self._ask_again(conversation)
        stored = self.stored()
        for conversation in self.conversations:
            for name, turns in ((conversation.name, conversation.turns), *conversation.children.items()):
                assert told(stored[name]) == turns
                shown = self.server.state(name)
                assert shown["turns"] == len(turns)
                assert shown["state"] in ("IDLE", "SEALING", "SPILLED", "SPILLING"), "nobody talks"
        assert self.server.get("/v1/memory").json()["findings"] == []

    def stored(self) -> dict[str, StoredSession]:
        """The sessions of the journal by the names that clients give them."""
        sessions = {session.id.rpartition("/")[2]: session for session in read_sessions(self.journal)}
        assert not any(session.damaged for session in sessions.values())
        return sessions

    def _check(self, conversation: Conversation, stored: dict[str, StoredSession]) -> None:
        """What was answered is there; of what was not, all or nothing."""
        for child, turns in conversation.children.items():
            assert told(stored[child]) == turns
        act = conversation.waits
        if not conversation.opened:
            return
        assert conversation.name in stored, f"{conversation.name} is lost"
        found = told(stored[conversation.name])
        before = conversation.turns
        if act is not None and found != before:
            self.found_applied += 1
            if act.kind == "turn":
                assert (found[:-1], found[-1].name) == (before, act.name)
            else:
                assert act.kind == "rewind"
                assert found == before[: act.body["to_turn"]]
            return
        assert found == before, f"{conversation.name} is not what was answered"

    def _ask_again(self, conversation: Conversation) -> None:
        """The same request once more; a fork under another name is still the fork that was made."""
        act = conversation.waits
        if act is None:
            return
        self.unanswered += 1
        stored = self.stored()
        turns = told(stored[conversation.name]) if conversation.opened else []
        applied = [turn for turn in turns if turn.name == act.name]
        if act.kind == "fork":
            made = act.body["id"] in stored
            act = Act(act.kind, act.session, act.name, {**act.body, "id": f"{act.body['id']}-again"})
            answer = ask(self.server.http, act)
            assert answer["id"].endswith("-again") is not made
        else:
            answer = ask(self.server.http, act)
        conversation.learn(act, answer)
        if applied:
            assert conversation.turns[-1] == applied[0], "an answer that is given again is the same"


def told(session: StoredSession) -> list[Told]:
    """A session's turns, as they would have been answered."""
    names = [turn.turn_id for turn in session.turns]
    assert len(set(names)) == len(names), "a turn was applied twice"
    return [Told(turn.turn_id, tuple(turn.output)) for turn in session.turns]


def soak(serve: Callable[[], Server], journal: str, victims: list[str], seed: int) -> Ward:
    """Some deaths, and a last look after a clean end."""
    ward = Ward(serve, journal, seed)
    for victim in victims:
        ward.round(victim, ward.dice.randint(30, 120))
    assert ward.acknowledged >= 30 * len(victims)
    ward.server.check_clean()
    return ward


DEATHS = {
    "sqlite": ["server", "engine", "both", "engine", "server"],
    "postgres": ["engine", "database stopped", "database killed", "both"],
}


@pytest.mark.parametrize("durability", ["commit", pytest.param("fsync", marks=pytest.mark.soak)])
@pytest.mark.parametrize("store", STORES)
def test_no_answer_is_lost_and_none_given_twice(
    serve: Serve, tmp_path: Path, store: str, durability: str
) -> None:
    journal = new_place(store, tmp_path / "sessions.journal")
    options = ("--kv-tokens", "65536", "--audit", "strict", "--journal", journal, "--durability", durability)
    ward = soak(lambda: serve("echo-hybrid", *options), journal, DEATHS[store], 1)
    assert ward.unanswered > 0, "somebody died in the middle of something"


@pytest.mark.soak
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("family", ["llama", "mistral", "bamba"])
def test_fifty_deaths_of_a_server(
    serve: Serve, small_models: Callable[[str], Path], tmp_path: Path, family: str, store: str
) -> None:
    journal = new_place(store, tmp_path / "sessions.journal")
    options = ("--kv-tokens", "8192", "--window-tokens", "8192", "--state-slots", "48", "--audit", "strict")
    disk = ("--disk", str(tmp_path / "disk"), "--disk-limit", "16MiB", "--snapshot-seconds", "0.2")
    dice = random.Random(family)
    kinds = [
        "server",
        "engine",
        "both",
        *(["database stopped", "database killed"] if store == "postgres" else []),
    ]
    victims = [dice.choice(kinds) for _ in range(50)]
    ward = soak(
        lambda: serve(small_models(family), *options, *disk, "--journal", journal), journal, victims, 2
    )
    assert ward.unanswered > 0, "somebody died in the middle of something"
    assert ward.found_applied > 0, "some acts were done, and nobody heard it"


@pytest.mark.parametrize(
    "family", ["bamba", *(pytest.param(name, marks=pytest.mark.soak) for name in ("llama", "mistral"))]
)
def test_a_server_that_is_asked_to_end_leaves_all_that_it_computed(
    serve: Serve, small_models: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    options = ("--kv-tokens", "4096", "--window-tokens", "4096", "--state-slots", "48", "--audit", "strict")
    tiers = ("--host-memory", "16MiB", "--disk", str(tmp_path / "disk"), "--snapshot-seconds", "3600")
    durable = ("--journal", str(tmp_path / "sessions.journal"))
    greedy = {"sampling": {"max_tokens": 12, "ignore_eos": True, "temperature": 0}}

    server = serve(small_models(family), *options, *tiers, *durable)
    said = {}
    for name, tier in (("here", None), ("host", "host"), ("disk", "disk")):
        server.open(name)
        for words in ("bak del fin", "gor kus", "lan bak lan"):
            server.say(name, f"{words} {name}", **greedy)
        fork = server.post(f"/v1/sessions/{name}/fork", {"id": f"{name}-aside"}).json()["id"]
        said[name] = server.say(fork, "del del kus", **greedy)["token_ids"]
        assert server.http.delete(f"/v1/sessions/{fork}").status_code == 200
        if tier is not None:
            assert server.post(f"/v1/sessions/{name}/spill", {"tier": tier}).status_code in (200, 202)
            wait_for(lambda name=name, tier=tier: server.state(name)["tier"] == tier)
    known = {name: server.state(name)["tokens"]["known"] for name in said}
    assert server.stop() == 0
    assert any("Writing 2 sessions of" in line for line in server.lines), "what lies on disk is there already"

    server = serve(small_models(family), *options, *tiers, *durable)
    for name, tokens in said.items():
        back = server.state(name)
        assert (back["tier"], back["tokens"]["known"]) == ("disk", known[name])
        assert back["tokens"]["computed"] >= known[name] - 1, "at most the last word is left to compute"
        turn = server.say(name, "del del kus", **greedy)
        assert turn["token_ids"] == tokens
        assert turn["usage"]["cached_tokens"] == known[name], "nothing was computed again"
    server.check_clean()


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.02)
