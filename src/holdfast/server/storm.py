"""The storm: a load test inside the server, of many sessions with random turns and interruptions.

It shows on the page that memory stays accounted for. The server must have been started with `--storm`, and
the call needs the admin key. Its sessions belong to a tenant of their own and are closed when it ends.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from holdfast.core.turn import KEEP_ALL
from holdfast.engine.sampling import Sampling
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem
from holdfast.server.service import Service
from holdfast.server.sessions import SessionRecord, new_name
from holdfast.server.turn_request import Input, SessionGiven, TurnAsked

__all__ = ["Storm"]

log = logging.getLogger("holdfast.server")

TENANT = "~storm"
"""A name that no key can have."""

WORDS = ("wind", "rain", "thunder", "wave", "cloud", "gust", "spray", "gale", "squall", "hail", "tide")


class Storm:
    """At most one storm at a time."""

    def __init__(self, service: Service, draining: Callable[[], bool]) -> None:
        self._service = service
        self._draining = draining
        self._caller = Caller(TENANT, admin=False)
        self._task: asyncio.Task[None] | None = None
        self._until = 0.0
        self.turns = 0
        self.interrupts = 0
        self.refused = 0

    @property
    def running(self) -> bool:
        """Whether one is running."""
        return self._task is not None

    @property
    def _over(self) -> bool:
        return time.monotonic() >= self._until or self._draining()

    def shown(self) -> dict[str, Any]:
        """Its state, as clients see it."""
        return {
            "allowed": self._service.options.storm,
            "running": self.running,
            "seconds_left": round(max(0.0, self._until - time.monotonic()), 1) if self.running else 0,
            "turns": self.turns,
            "interrupts": self.interrupts,
            "refused": self.refused,
        }

    def start(self, sessions: int, seconds: float, seed: int) -> None:
        """Start one."""
        if not self._service.options.storm:
            raise Problem(403, "storm_off", "the server was not started with --storm")
        if self._task is not None:
            raise Problem(409, "storm_running", "a storm is already running")
        self.turns = self.interrupts = self.refused = 0
        self._until = time.monotonic() + seconds
        self._task = asyncio.create_task(self._run(sessions, seed))

    def stop(self) -> None:
        """End it; its sessions are closed."""
        self._until = 0.0

    async def _run(self, sessions: int, seed: int) -> None:
        try:
            talks = [self._talk(random.Random(seed + number)) for number in range(sessions)]
            await asyncio.gather(*talks)
        finally:
            self._task = None
        log.info("storm ended", extra={"fields": {"turns": self.turns, "interrupts": self.interrupts}})

    async def _talk(self, chance: random.Random) -> None:
        """One client: opens sessions, takes turns, interrupts some, closes."""
        while not self._over:
            try:
                record = await self._service.sessions.open(self._caller, None, SessionGiven(ttl=120.0))
            except Problem:
                self.refused += 1
                await asyncio.sleep(chance.uniform(0.1, 0.5))
                continue
            try:
                for _ in range(chance.randint(1, 8)):
                    if self._over:
                        break
                    await self._turn(record, chance)
                    await asyncio.sleep(chance.uniform(0.0, 0.5))
            finally:
                await self._close(record)

    async def _turn(self, record: SessionRecord, chance: random.Random) -> None:
        words = " ".join(chance.choice(WORDS) for _ in range(chance.randint(4, 60)))
        sampling = Sampling(max_tokens=chance.randint(8, 120), ignore_eos=True)
        stops_after = chance.randint(0, 40) if chance.random() < 0.4 else None
        try:
            feed = await self._service.start_turn(
                record, TurnAsked(Input(text=words), sampling, new_name("t"))
            )
            self.turns += 1
            try:
                async for delta in feed.deltas():
                    said = delta.index + len(delta.tokens)
                    if self._over:
                        self._service.leave(feed, keeps=False)
                    elif stops_after is not None and said >= stops_after:
                        self.interrupts += 1
                        self._service.link.end(feed, chance.choice([None, KEEP_ALL, said // 2]), "interrupt")
                        stops_after = None
            finally:
                self._service.leave(feed, keeps=False)
        except Problem:
            self.refused += 1

    async def _close(self, record: SessionRecord) -> None:
        if self._draining():
            return  # It ends with the engine.
        try:
            await self._service.sessions.close(self._caller, record.name)
        except Problem as problem:
            log.info("cannot close a session of the storm: %s", problem.code)
