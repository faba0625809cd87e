"""Members in processes of their own, killed, stopped and drained while they commit: no turn is lost."""

import random
import signal
from contextlib import closing

import pytest

from holdfast.engine.durable.stores import read_sessions
from tests.cluster.test_owners import Member
from tests.databases import run_sql, shared_cluster

pytest.importorskip("psycopg")
from holdfast.engine.durable.postgres import lives
from holdfast.engine.durable.postgres.link import connect

SESSIONS = tuple(f"s{number}" for number in range(6))


class Crowd:
    """Three members, and what they have acknowledged."""

    def __init__(self, seed: int) -> None:
        self.place = shared_cluster().url(shared_cluster().new_database())
        self.dice = random.Random(seed)
        self.members: dict[int, Member] = {}
        self.owner: dict[str, int] = {}
        self.acknowledged: dict[str, list[str]] = {name: [] for name in SESSIONS}
        self.asked: dict[str, list[str]] = {name: [] for name in SESSIONS}
        self.begun = 0
        self.refused = 0
        for _ in range(3):
            self.start()
        for name, life in zip(SESSIONS, list(self.members) * 2, strict=True):
            assert self.members[life].ask("open", name, "red") is True
            self.owner[name] = life

    def start(self) -> None:
        self.begun += 1
        member = Member(self.place, f"member{self.begun}")
        self.members[member.ask("life")] = member

    def say(self, name: str) -> None:
        number = len(self.asked[name]) + 1
        self.asked[name].append(f"t{number}")
        self.members[self.owner[name]].send("turn", name, number)

    def hear(self, name: str) -> None:
        if self.members[self.owner[name]].heard():
            self.acknowledged[name].append(self.asked[name][-1])
        else:
            self.refused += 1

    def declare_dead(self, life: int) -> None:
        with closing(connect(self.place)) as connection:
            run_sql(self.place, f"UPDATE lives SET lease = now() - interval '1 s' WHERE life = {life}")
            assert lives.bury_life(connection, life)

    def claim(self, names: list[str]) -> None:
        """All members claim at once; each session has one winner, with everything that was acknowledged."""
        for member in self.members.values():
            member.send("claim", *names)
        won = {life: member.heard() for life, member in self.members.items()}
        assert sorted(name for found in won.values() for name in found) == sorted(names)
        for life, found in won.items():
            for name, turns in found.items():
                self.owner[name] = life
                self.require(name, turns)

    def require(self, name: str, turns: list[str]) -> None:
        stored = [turn for turn in turns if turn in self.acknowledged[name]]
        assert stored == self.acknowledged[name], "lost, doubled or reordered"
        assert len(set(turns)) == len(turns)

    def lose_one(self, how: signal.Signals) -> None:
        """A member is killed or stopped with commits under way, and taken over; a stopped one wakes then."""
        life = self.dice.choice(list(self.members))
        victim = self.members[life]
        mine = [name for name in SESSIONS if self.owner[name] == life]
        for name in SESSIONS:
            self.say(name)
        victim.process.send_signal(how)
        for name in SESSIONS:
            if name not in mine:
                self.hear(name)
        self.declare_dead(life)
        del self.members[life]
        self.start()
        self.claim(mine)
        if how is signal.SIGSTOP:
            victim.send("turn", mine[0] if mine else "nothing", 999)
            victim.process.send_signal(signal.SIGCONT)
            answers = [victim.heard() for _ in mine]
            for name, answer in zip(mine, answers, strict=True):
                # Commits from before it stopped count; they are in what the next owner has read.
                if answer is True:
                    self.acknowledged[name].append(self.asked[name][-1])
            assert victim.heard() is False
            victim.end()
        else:
            victim.process.wait()

    def drain_one(self) -> None:
        """A member drains: its sessions go to another, and it ends."""
        life = self.dice.choice(list(self.members))
        member = self.members.pop(life)
        mine = [name for name in SESSIONS if self.owner[name] == life]
        assert member.ask("drain") is True
        target = self.dice.choice(list(self.members))
        assert member.ask("give", target, *mine) == sorted(mine)
        if mine:
            assert sorted(self.members[target].ask("claim", *mine)) == sorted(mine)
        for name in mine:
            self.owner[name] = target
        member.end()
        self.start()


def test_nothing_acknowledged_is_lost_among_processes() -> None:
    crowd = Crowd(1)
    for how in (signal.SIGKILL, None, signal.SIGSTOP, signal.SIGKILL, None, signal.SIGSTOP):
        for name in SESSIONS:
            crowd.say(name)
        for name in SESSIONS:
            crowd.hear(name)
        if how is None:
            crowd.drain_one()
        else:
            crowd.lose_one(how)
    for name in SESSIONS:
        crowd.say(name)
        crowd.hear(name)
    stored = {session.id: [turn.turn_id for turn in session.turns] for session in read_sessions(crowd.place)}
    for name in SESSIONS:
        crowd.require(name, stored[name])
        assert len(crowd.acknowledged[name]) >= 7 and "t999" not in stored[name]
    assert crowd.refused == 0, "whoever owned a session was heard"
    for member in crowd.members.values():
        member.end()
