"""From the end of an engine, killed or stopped, to the next acknowledged turn of each of its sessions.

Clients of many sessions take turns with short pauses, each with an id, and repeat what had no answer through
another API process. Engines end one after the other, the next one when all sessions have gone on. At the end
each session must have just the turns that were acknowledged.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import quantiles

import httpx

from holdfast.bench.cluster.processes import Cluster, EngineProcess

__all__ = ["measure_failover"]

APIS = 2
PAUSE_SECONDS = 0.02
"""How long a client waits before it repeats a request."""
THINK_SECONDS = 0.05
"""How long a client waits between two turns: clients that never rest would measure the machine."""
REST_SECONDS = 1.0
"""How long engines serve between two deaths."""
GIVE_UP_SECONDS = 30.0


@dataclass(slots=True)
class Talker:
    """A client of one session."""

    name: str
    clients: list[httpx.AsyncClient]
    acknowledged: int = 0
    last: tuple[float, float] = (0.0, 0.0)
    """When the last request that was acknowledged was sent, and when its answer came."""
    taken: list[float] = field(default_factory=list)
    """The seconds of each turn whose first request was answered."""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, path: str, body: dict[str, object], place: int) -> tuple[float, dict[str, object]]:
        """Send a request until it is answered, through one API process after another."""
        deadline = time.perf_counter() + GIVE_UP_SECONDS
        while time.perf_counter() < deadline:
            sent = time.perf_counter()
            try:
                answer = await self.clients[place % len(self.clients)].post(path, json=body)
            except httpx.TransportError:
                answer = None
            if answer is not None and answer.status_code in (200, 201):
                return sent, answer.json()
            if answer is not None and answer.status_code not in (409, 429, 503):
                raise RuntimeError(f"{path} answered {answer.status_code}: {answer.text}")
            place += 1
            await asyncio.sleep(PAUSE_SECONDS)
        raise RuntimeError(f"{path} had no answer within {GIVE_UP_SECONDS:g} s")

    async def talk(self, place: int) -> None:
        """Take turns until cancelled."""
        while True:
            turn = f"t{self.acknowledged}"
            body: dict[str, object] = {"input": turn, "turn_id": turn, "sampling": {"max_tokens": 8}}
            began = time.perf_counter()
            sent, _ = await self.ask(f"/v1/sessions/{self.name}/turns", body, place)
            self.acknowledged += 1
            self.last = (sent, time.perf_counter())
            if sent - began < PAUSE_SECONDS:
                self.taken.append(self.last[1] - sent)
            self.news.set()
            await asyncio.sleep(THINK_SECONDS)

    async def first_after(self, moment: float) -> float:
        """When the first turn was acknowledged that was asked for after a moment."""
        while self.last[0] <= moment:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), GIVE_UP_SECONDS)
        return self.last[1]


async def _homes(client: httpx.AsyncClient, talkers: list[Talker]) -> dict[str, str]:
    """The engine of each session."""
    states = [(await client.get(f"/v1/sessions/{talker.name}")).json() for talker in talkers]
    return {state["id"]: state["engine"] for state in states}


async def _gap(talker: Talker, killed: float) -> float:
    return await talker.first_after(killed) - killed


async def _deaths(
    engines: list[EngineProcess], clients: list[httpx.AsyncClient], sessions: int, hang: bool
) -> tuple[list[float], list[float], int]:
    run = secrets.token_hex(4)
    talkers = [Talker(f"bench-{run}-{number}", clients) for number in range(sessions)]
    for talker in talkers:
        await talker.ask("/v1/sessions", {"id": talker.name}, 0)
    tasks = [asyncio.create_task(talker.talk(place)) for place, talker in enumerate(talkers)]
    gaps: list[float] = []
    try:
        for place in range(len(engines) - 1):
            await asyncio.sleep(REST_SECONDS)
            homes = await _homes(clients[0], talkers)
            there = [talker for talker in talkers if homes[talker.name] == f"e{place}"]
            killed = time.perf_counter()
            await asyncio.to_thread(engines[place].freeze if hang else engines[place].kill)
            gaps += await asyncio.gather(*(_gap(talker, killed) for talker in there))
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if not isinstance(error, asyncio.CancelledError):
            raise RuntimeError("a client failed") from error
    wrong = 0
    for talker in talkers:
        state = (await clients[0].get(f"/v1/sessions/{talker.name}")).json()
        # The turn that was under way when its client ended may have been committed.
        wrong += state["turns"] - talker.acknowledged not in (0, 1)
        await clients[0].delete(f"/v1/sessions/{talker.name}")
    return gaps, [seconds for talker in talkers for seconds in talker.taken], wrong


async def _run(engines: list[EngineProcess], urls: list[str], sessions: int, hang: bool) -> dict[str, float]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    clients = [httpx.AsyncClient(base_url=url, timeout=GIVE_UP_SECONDS, limits=limits) for url in urls]
    try:
        gaps, turns, wrong = await _deaths(engines, clients, sessions, hang)
    finally:
        for client in clients:
            await client.aclose()
    cut, usual = (quantiles(each, n=100, method="inclusive") for each in (gaps, turns))
    return {
        "samples": float(len(gaps)),
        "turn_p50_s": usual[49],
        "turn_p99_s": usual[98],
        "gap_p50_s": cut[49],
        "gap_p99_s": cut[98],
        "gap_max_s": max(gaps),
        "sessions_with_lost_or_doubled_turns": float(wrong),
    }


def measure_failover(
    journal: str, sessions: int, deaths: int, hang_seconds: float | None
) -> dict[str, float]:
    """End so many engines that share a journal, one after the other; one more is left.

    They are killed; with `hang_seconds` they are stopped, and links are lost after so long a silence.
    """
    links = () if hang_seconds is None else ("--link-seconds", str(hang_seconds))
    with Cluster() as cluster:

        def start(number: int) -> EngineProcess:
            options = ("--journal", journal, "--kv-tokens", "65536", "--log-level", "error", *links)
            return cluster.engine("echo", "--engine-id", f"e{number}", *options)

        with ThreadPoolExecutor(deaths + 1) as pool:
            engines = list(pool.map(start, range(deaths + 1)))
        urls = [cluster.api(engines, "--log-level", "error", *links).url for _ in range(APIS)]
        try:
            return asyncio.run(_run(engines, urls, sessions, hang_seconds is not None))
        finally:
            for engine in engines[:-1]:
                engine.kill()
