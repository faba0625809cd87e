"""What an API process apart and HAProxy add to a token, and what three engines do for the turns of one.

Each way from client to engine is a set of processes that stay up; rounds take turns between the ways, so all
of them see the same load on the machine. The model takes no time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from holdfast.bench.cluster.processes import Cluster, cpu_of
from holdfast.bench.timing import in_turn
from holdfast.bench.wire.client import Stream
from holdfast.bench.wire.load import TurnSample, tokens_of

__all__ = ["Way", "measure_paths", "measure_scale"]

GIVEN = 16
WANTED = 256
TURNS = 4
STREAMS = 16
FIRSTS = 60
APIS = 2
"""API processes beside several engines, as `serve --replicas` has them."""

Address = tuple[str, int]


@dataclass(slots=True)
class Way:
    """Where clients connect, which processes take part, and what was measured of them."""

    addresses: Sequence[Address]
    pids: Mapping[str, Sequence[int]]
    streams: int = STREAMS
    firsts: list[float] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)
    turns_per_second: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of processor time for each token of a round, by process."""

    def figures(self) -> dict[str, float]:
        """Medians over the rounds."""
        found = {
            "first_token_ms": 1000 * median(self.firsts),
            "tokens_per_second": median(self.tokens_per_second),
            "turns_per_second": median(self.turns_per_second),
        }
        each = {f"{role}_us_per_token": 1e6 * median(seconds) for role, seconds in self.cpu.items()}
        return {**found, **each, "us_per_token": sum(each.values())}


async def _streams(way: Way, count: int, prefix: str) -> list[tuple[str, Stream]]:
    """Connections with a session each, spread over the addresses."""
    found = []
    for number in range(count):
        stream = await Stream.connect(way.addresses[number % len(way.addresses)])
        name = f"{prefix}-{number}"
        await stream.ask("/v1/sessions", {"id": name})
        found.append((name, stream))
    return found


async def _close(streams: list[tuple[str, Stream]]) -> None:
    for name, stream in streams:
        await stream.ask(f"/v1/sessions/{name}", method="DELETE")
        stream.close()


async def _turns(name: str, stream: Stream, turns: int, wanted: int) -> list[TurnSample]:
    return [await stream.turn(name, tokens_of(0, turn, GIVEN), wanted) for turn in range(turns)]


async def _round(way: Way, number: int) -> None:
    """First tokens of one stream, then the processor time of many."""
    alone = await _streams(way, 1, f"alone{number}")
    (pair,) = alone
    await _turns(*pair, 5, 4)
    way.firsts += [sample.first for sample in await _turns(*pair, FIRSTS, 4)]
    await _close(alone)
    many = await _streams(way, way.streams, f"many{number}")
    await asyncio.gather(*(_turns(*each, 1, 8) for each in many))
    before = {role: cpu_of(pids) for role, pids in way.pids.items()}
    began = asyncio.get_running_loop().time()
    said = await asyncio.gather(*(_turns(*each, TURNS, WANTED) for each in many))
    seconds = asyncio.get_running_loop().time() - began
    tokens = sum(sample.tokens for samples in said for sample in samples)
    for role, pids in way.pids.items():
        way.cpu.setdefault(role, []).append((cpu_of(pids) - before[role]) / tokens)
    way.tokens_per_second.append(tokens / seconds)
    way.turns_per_second.append(len(many) * TURNS / seconds)
    await _close(many)


def _rounds(ways: Mapping[str, Way], rounds: int) -> dict[str, dict[str, float]]:
    for number in range(rounds):
        for name in in_turn(list(ways), number):
            asyncio.run(_round(ways[name], number))
    return {name: way.figures() for name, way in ways.items()}


def measure_paths(rounds: int, haproxy: str | None) -> dict[str, dict[str, float]]:
    """A single server; an API process on an engine apart; and the same behind HAProxy, if there is one."""
    with Cluster() as cluster:
        single = cluster.server("echo")
        engine = cluster.engine("echo")
        api = cluster.api([engine])
        apart = {"api": [api.pid], "engine": [engine.pid]}
        ways = {
            "single server": Way([single.address], {"server": [single.pid]}),
            "API process apart": Way([api.address], apart),
        }
        if haproxy is not None:
            proxy = cluster.haproxy(haproxy, [api])
            ways["behind HAProxy"] = Way([proxy.address], {**apart, "haproxy": [proxy.pid]})
        return _rounds(ways, rounds)


def measure_scale(rounds: int, replicas: int) -> dict[str, dict[str, float]]:
    """One engine and API process; and several engines on two API processes, with as many more clients."""
    with Cluster() as cluster:
        ways = {}
        for count in (1, replicas):
            engines = [cluster.engine("echo") for _ in range(count)]
            apis = [cluster.api(engines) for _ in range(min(count, APIS))]
            pids = {"api": [api.pid for api in apis], "engine": [engine.pid for engine in engines]}
            ways[f"replicas: {count}"] = Way([api.address for api in apis], pids, STREAMS * count)
        return _rounds(ways, rounds)
