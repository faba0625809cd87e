"""The registry of a cluster's engines, a named actor: it assigns their names and publishes their addresses.

Engines send a heartbeat every second. API processes poll with their version, and are answered
when it changes, or after a while. If the actor is lost, Ray restarts it, and the engines' heartbeats restore
it within seconds; API processes continue with their last version. No request passes through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from holdfast.cluster.slots import Slots

__all__ = ["NAMESPACE", "REGISTRY", "Registry", "Told", "open_registry"]

NAMESPACE = "holdfast"
REGISTRY = "engines"
WAIT_SECONDS = 10.0
TICK_SECONDS = 0.5

API_SECONDS = 3 * WAIT_SECONDS
"""How long an API process that does not ask is remembered."""

Told = tuple[int, int, dict[str, str]]
"""A version; how many engines there should be; where the known ones are, by name."""


class Registry:
    """The slots of one application's engines, on an event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slots = Slots(clock())
        self._version = 0
        self._known: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._deployments = 0
        self._apis: dict[str, float] = {}

    async def deployed(self, number: int | None = None) -> int | bool:
        """The number of a deployment that begins; or whether deployment `number` is the last one."""
        if number is not None:
            return number == self._deployments
        self._deployments = max(self._deployments + 1, time.time_ns())
        return self._deployments

    async def take(self, holder: str, least: int) -> int | None:
        """A slot for a new engine; None if it must ask again later. There are `least` engines at least."""
        self._at_least(least)
        return self._slots.take(holder, self._clock())

    async def hold(self, holder: str, number: int, address: str, least: int) -> bool:
        """An engine lives; False if its slot is another's."""
        self._at_least(least)
        held = self._slots.hold(holder, number, address, self._clock())
        self._tell()
        return held

    def _at_least(self, count: int) -> None:
        if self._slots.expected < count:
            self._slots.expect(count)

    async def release(self, holder: str) -> None:
        """An engine has ended."""
        self._slots.release(holder)
        self._tell()

    async def expect(self, count: int) -> None:
        """There should be so many engines; those beyond them that are silent are forgotten."""
        self._slots.expire(self._clock())
        self._slots.expect(count)
        self._tell()

    async def apis(self) -> list[str]:
        """Where the API processes are that asked lately."""
        now = self._clock()
        self._apis = {each: asked for each, asked in self._apis.items() if now - asked < API_SECONDS}
        return sorted(self._apis)

    async def engines(self, version: int, api: str = "") -> Told:
        """All engines by name, with where they are, once that is not what the caller knows.

        `api` is where the caller serves, if it does.
        """
        if api:
            self._apis[api] = self._clock()
        while not self._slots.settled(self._clock()):
            await asyncio.sleep(TICK_SECONDS)
        deadline = self._clock() + WAIT_SECONDS
        while version == self._version and self._clock() < deadline:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._changed.wait()
        return self._version, self._slots.expected, self._known

    def _tell(self) -> None:
        known = self._slots.addresses()
        if known != self._known:
            self._known = known
            # Versions of an actor that was started again differ from those before.
            self._version = max(self._version + 1, time.time_ns())
            self._changed.set()
            self._changed = asyncio.Event()


def open_registry(application: str) -> Any:
    """The registry of an application; started if there is none."""
    kind = import_module("ray").remote(Registry)
    return kind.options(
        name=f"{application}-{REGISTRY}",
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=3,
        max_concurrency=10_000,
        num_cpus=0,
    ).remote()
