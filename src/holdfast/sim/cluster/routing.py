"""Routing policies compared: where first turns go, and what that costs in hits, load spread and moved bytes.

A world of its own, without faults: sessions of a workload begin, have turns and end on replicas with bounded
memory; in the middle of a run a tenth of the replicas is drained, one after another. Placement, rebalancing
and draining are the code of `cluster.placement`. Used by `holdfast sim-cluster --routing`.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from holdfast.cluster.placement import PRESSED, Load, choose, least_loaded, plan_drain, rebalance
from holdfast.sim.cluster.history import MASK

__all__ = ["POLICIES", "WORKLOADS", "Routed", "Workload", "compare", "route"]

TOKEN_BYTES = 131_072
"""KV of a token of a model with 32 layers, 8 KV heads of 128 and 16 bits."""

REPLICA_TOKENS = 262_144
PREFIX_SHARE = 0.2
"""The share of a replica's memory that keeps prefixes which no session uses."""

SESSIONS_PER_REPLICA = 10
CANDIDATES = 8
HOLDERS = 8
"""How many replicas, and how many holders of a prefix, an API process compares."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions that share prefixes: how many prefixes and turns, and how long they are, in tokens."""

    name: str
    prefixes: int
    prefix_tokens: int
    turn_tokens: int
    turns: int
    think: float


WORKLOADS = {
    each.name: each
    for each in (
        Workload("agent", prefixes=200, prefix_tokens=6000, turn_tokens=1200, turns=10, think=4.0),
        Workload("voice", prefixes=40, prefix_tokens=900, turn_tokens=180, turns=16, think=7.0),
    )
}


class Routed(NamedTuple):
    """A row of the comparison."""

    workload: str
    replicas: int
    policy: str
    turns: int
    hits: float
    """The share of the tokens of shared prefixes that first turns found in memory."""
    spread: float
    """The highest load over the mean, as a mean over time."""
    moved: float
    """Gigabytes moved between replicas for a thousand turns."""


@dataclass(slots=True)
class Member:
    """A replica: its sessions, and the prefixes that it keeps."""

    number: int
    used: int = 0
    drained: bool = False
    sessions: OrderedDict[int, int] = field(default_factory=OrderedDict)
    prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def load(self) -> Load:
        """What placement sees."""
        return Load(self.number, self.used, REPLICA_TOKENS)


class Fleet:
    """All replicas under one policy."""

    def __init__(self, workload: Workload, replicas: int, policy: str, seed: int) -> None:
        self.workload = workload
        self.policy = policy
        self.dice = random.Random(seed)
        self.members = [Member(number) for number in range(replicas)]
        self.holders: dict[int, OrderedDict[int, None]] = {}
        self.owner: dict[int, Member] = {}
        self.prefix_of: dict[int, int] = {}
        self.wanted = self.found = self.moved = self.turns = 0
        self.spreads: list[float] = []
        shares = [1.0 / (rank + 1) for rank in range(workload.prefixes)]
        self._shares = [sum(shares[: rank + 1]) for rank in range(workload.prefixes)]

    # --- policies ---------------------------------------------------------------------------------

    def some(self) -> list[Load]:
        """Replicas that an API process compares."""
        found: dict[int, Load] = {}
        for _ in range(3 * CANDIDATES):
            member = self.members[int(self.dice.random() * len(self.members))]
            if not member.drained:
                found[member.number] = member.load
                if len(found) == CANDIDATES:
                    break
        return list(found.values())

    def place(self, session: int) -> Member:
        """The replica of a session's first turn."""
        return self.members[POLICIES[self.policy](self, session)]

    def any_replica(self, _session: int) -> int:
        """A random replica."""
        return self.some()[0].life

    def by_hash(self, session: int) -> int:
        """The hash of the session's id; the next replica if that one is drained."""
        number = (session * 0x9E3779B97F4A7C15 & MASK) % len(self.members)
        while self.members[number].drained:
            number = (number + 1) % len(self.members)
        return number

    def by_load(self, _session: int) -> int:
        """The least loaded of some."""
        return least_loaded(self.some()).life

    def by_prefix(self, session: int) -> int:
        """The least loaded replica that holds the prefix, however loaded."""
        near = self._near(session)
        return least_loaded(near if near else self.some()).life

    def by_prefix_and_load(self, session: int) -> int:
        """As served: a holder of the prefix, unless it is twice as loaded as another."""
        near = self._near(session)
        seen = {load.life: load for load in (*self.some(), *near)}
        return choose(list(seen.values()), [load.life for load in near])

    def _near(self, session: int) -> list[Load]:
        holders = list(self.holders.get(self.prefix_of[session], ()))[-HOLDERS:]
        return [self.members[number].load for number in holders if not self.members[number].drained]

    # --- sessions ---------------------------------------------------------------------------------

    def begin(self, session: int) -> None:
        """The first turn of a session: its prefix is in memory, or computed."""
        workload = self.workload
        prefix = self.dice.choices(range(workload.prefixes), cum_weights=self._shares)[0]
        self.prefix_of[session] = prefix
        member = self.place(session)
        self.wanted += workload.prefix_tokens
        if prefix in member.prefixes:
            self.found += workload.prefix_tokens
        self._keep(member, prefix)
        self._add(member, session, workload.prefix_tokens)
        self.turn(session)

    def _keep(self, member: Member, prefix: int) -> None:
        member.prefixes[prefix] = None
        member.prefixes.move_to_end(prefix)
        self.holders.setdefault(prefix, OrderedDict())[member.number] = None
        while len(member.prefixes) * self.workload.prefix_tokens > PREFIX_SHARE * REPLICA_TOKENS:
            dropped, _ = member.prefixes.popitem(last=False)
            self.holders[dropped].pop(member.number, None)

    def _add(self, member: Member, session: int, tokens: int) -> None:
        member.sessions[session] = tokens
        member.used += tokens
        self.owner[session] = member

    def turn(self, session: int) -> None:
        """A turn: the session grows; where nobody owns sessions it goes to any replica, and moves."""
        self.turns += 1
        if self.policy == "any replica":
            self.move(session, self.place(session))
        member = self.owner[session]
        grown = self.workload.turn_tokens
        member.sessions[session] += grown
        member.sessions.move_to_end(session)
        member.used += grown
        if member.used > PRESSED * REPLICA_TOKENS and self.policy != "any replica":
            idle = [(str(name), tokens) for name, tokens in member.sessions.items() if name != session]
            for each in rebalance(member.load, idle, self.some()):
                self.move(int(each.session), self.members[each.target])

    def move(self, session: int, target: Member) -> None:
        """Move a session's memory."""
        source = self.owner[session]
        if source is not target:
            tokens = source.sessions.pop(session)
            source.used -= tokens
            self._add(target, session, tokens)
            self.moved += tokens * TOKEN_BYTES

    def end(self, session: int) -> None:
        """A session is closed."""
        member = self.owner.pop(session)
        member.used -= member.sessions.pop(session)
        del self.prefix_of[session]

    def drain(self, member: Member) -> None:
        """A rolling update: the sessions leave, and the prefixes are lost."""
        member.drained = True
        if self.policy == "hash of the session":
            moves = [(session, self.by_hash(session)) for session in member.sessions]
        else:
            idle = [(str(name), tokens) for name, tokens in member.sessions.items()]
            planned = plan_drain(idle, self.some(), len(idle))
            moves = [(int(move.session), move.target) for move in planned]
        for session, target in moves:
            self.move(session, self.members[target])
        for prefix in member.prefixes:
            self.holders[prefix].pop(member.number, None)
        member.prefixes.clear()

    def undrain(self) -> None:
        """The drained replica has started again, and takes sessions."""
        for member in self.members:
            member.drained = False

    def look(self) -> None:
        """Note how evenly the replicas are loaded."""
        used = [member.used for member in self.members if not member.drained]
        self.spreads.append(max(used) * len(used) / max(1, sum(used)))


POLICIES: dict[str, Callable[[Fleet, int], int]] = {
    "any replica": Fleet.any_replica,
    "hash of the session": Fleet.by_hash,
    "least loaded": Fleet.by_load,
    "prefix": Fleet.by_prefix,
    "prefix and load": Fleet.by_prefix_and_load,
}


def route(workload: Workload, replicas: int, policy: str, seed: int = 1) -> Routed:
    """Run one workload under one policy for three lengths of a session; the last two are measured."""
    fleet = Fleet(workload, replicas, policy, seed)
    dice = fleet.dice
    length = workload.think * workload.turns
    places = replicas * SESSIONS_PER_REPLICA
    queue = [(dice.random() * length, session, True) for session in range(places)]
    heapify(queue)
    begun = places
    drains = list(range(0, replicas, 10))
    next_look, next_drain, step = length, 1.5 * length, length / len(drains)
    while queue[0][0] < 3 * length:
        now, session, first = heappop(queue)
        while now >= next_look:
            fleet.look()
            next_look += workload.think
        while drains and now >= next_drain:
            fleet.undrain()
            fleet.drain(fleet.members[drains.pop(0)])
            next_drain += step
        if first:
            fleet.begin(session)
        else:
            fleet.turn(session)
        if dice.random() < 1.0 / workload.turns:
            fleet.end(session)
            heappush(queue, (now + workload.think * dice.random(), begun, True))
            begun += 1
        else:
            heappush(queue, (now + workload.think * (0.5 + dice.random()), session, False))
    spread = sum(fleet.spreads) / len(fleet.spreads)
    moved = fleet.moved / fleet.turns / 1e6
    return Routed(workload.name, replicas, policy, fleet.turns, fleet.found / fleet.wanted, spread, moved)


def compare(sizes: tuple[int, ...], seed: int = 1) -> list[Routed]:
    """Every policy on every workload at every number of replicas."""
    return [
        route(workload, replicas, policy, seed)
        for workload in WORKLOADS.values()
        for replicas in sizes
        for policy in POLICIES
    ]
