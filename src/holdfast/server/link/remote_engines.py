"""All engines of an API process that has none of its own, and the links to them.

An engine is named by its address. Links are made, watched and made again one by one (`remote_engine`); which
engines there are may change. Those of one set serve the same model and speak the same version of the link,
and either all share one journal or each has its own. To the rest of the API process this is what a supervisor
is to a single engine. Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import ssl
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from holdfast.cluster.lives import ALIVE, LEASE_SECONDS
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.link.engine_client import EngineClient, EngineObserver
from holdfast.server.link.remote_engine import SUSPECT_SECONDS, RemoteEngine, turn_lost
from holdfast.server.link.wire import Question

__all__ = ["RemoteEngines"]

LIVES_SECONDS = 1.0
"""How long an engine may take to read the lives in the journal."""

LIVES_TRIES = 3
"""How many engines are asked for them: one may be cut off from the journal."""


class RemoteEngines:
    """The engines at some addresses."""

    def __init__(
        self, context: ssl.SSLContext, link_seconds: float, observer_of: Callable[[str], EngineObserver]
    ) -> None:
        """`observer_of` makes the observer of the engine at an address."""
        self.engines: dict[str, RemoteEngine] = {}
        """Engines by address. A change makes a new table: others may be going through the old one."""
        self._observer_of = observer_of
        self._context = context
        self._link_seconds = link_seconds
        self._identity = secrets.token_hex(16)
        self._prefix = 1 + secrets.randbelow((1 << (63 - wire.CALL_BITS)) - 1)
        self._numbers = itertools.count(self._prefix << wire.CALL_BITS)
        self._model = ""
        self._journal: str | None = None
        """The journal that the engines share; empty if each has one of its own, None before it is known."""
        self._ready = asyncio.Event()
        self._stopped = asyncio.Event()
        self._changed = asyncio.Event()

    # --- the links --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep links to all engines until `stop`."""
        links: dict[RemoteEngine, asyncio.Task[None]] = {}
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            while not stopped.done():
                self._changed.clear()
                kept = list(self.engines.values())
                ended = [links.pop(engine) for engine in list(links) if engine not in kept]
                for link in ended:
                    link.cancel()
                await asyncio.gather(*ended, return_exceptions=True)
                links |= {each: asyncio.create_task(each.run()) for each in kept if each not in links}
                changed = asyncio.create_task(self._changed.wait())
                waited = [*links.values(), stopped, changed]
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                for link in links.values():
                    if link.done():
                        link.result()  # It ends only by a mistake.
        finally:
            for task in (*links.values(), stopped):
                task.cancel()
            await asyncio.gather(*links.values(), stopped, return_exceptions=True)

    def use(self, addresses: Sequence[str]) -> None:
        """Use the engines at these addresses from now on, and no others."""
        self.engines = {each: self.engines.get(each) or self._engine(each) for each in addresses}
        self._changed.set()

    def _engine(self, address: str) -> RemoteEngine:
        return RemoteEngine(
            address,
            EngineClient(self._observer_of(address), self._numbers, turn_lost),
            self._context,
            self._link_seconds,
            self._greeting,
            self._judge,
            self._is_gone,
        )

    async def wait_ready(self) -> None:
        """Wait until an engine serves."""
        await self._ready.wait()

    def serves(self) -> None:
        """An engine serves."""
        self._ready.set()

    async def stop(self) -> None:
        """Close all links; the engines end what is in flight on them."""
        self._stopped.set()

    def hurry(self) -> None:
        """The engines are not this process's to hurry."""

    def _greeting(self, address: str) -> wire.Greeting:
        return wire.Greeting(wire.PROTOCOL, self._identity, self._prefix, self._model, address)

    def _judge(self, engine: RemoteEngine, welcome: wire.Welcome) -> str | None:
        """Why an engine is not wanted."""
        if welcome.protocol != wire.PROTOCOL:
            spoken = f"version {welcome.protocol} of the link, this process {wire.PROTOCOL}"
            return f"it speaks {spoken}; install the same version of Holdfast for both"
        if self._model not in ("", welcome.model):
            return f"it has model {welcome.model[:8]}, not {self._model[:8]} as the others; give all the same"
        for other in self.serving:
            if other is not engine and other.welcome is not None and other.name == welcome.engine:
                same = other.welcome.life == welcome.life
                what = "the same engine" if same else "another engine with the same name"
                return f"{what} is connected at {other.address}"
        if self._journal not in (None, welcome.journal):
            return "it does not share its journal with the other engines of this process"
        self._model, self._journal = welcome.model, welcome.journal
        return None

    # --- commands ---------------------------------------------------------------------------------

    def number(self) -> int:
        """The number of the next call."""
        return next(self._numbers)

    async def ask(self, engine: RemoteEngine, question: wire.Command) -> wire.Done:
        """Send a command to one engine, and wait for its answer."""
        number = self.number()
        return await engine.client.call(msgspec.structs.replace(question, call=number), number)

    async def lives(self, besides: RemoteEngine | None = None) -> tuple[list[dict[str, Any]], str | None]:
        """The lives that are alive or own sessions, or why they are not known: an engine asks the journal."""
        fault = "no engine can be reached"
        for engine in [each for each in self.serving if each is not besides][:LIVES_TRIES]:
            try:
                async with asyncio.timeout(LIVES_SECONDS):
                    return (await self.ask(engine, wire.Ask(0, Question.LIVES))).answer, None
            except TimeoutError:
                fault = f"{engine.name} gets no answer from the journal"
            except Problem as problem:
                fault = problem.message
        return [], fault

    async def _is_gone(self, suspect: RemoteEngine) -> bool:
        """Whether the journal has not heard of an engine either; False where it cannot be asked."""
        if not self.shared:
            return False
        found, fault = await self.lives(suspect)
        if fault is not None:
            return False
        mine = [life for life in found if life["name"] == suspect.name and life["life_state"] in ALIVE]
        return all(life["lease_seconds"] < LEASE_SECONDS - SUSPECT_SECONDS for life in mine)

    # --- what is known of them --------------------------------------------------------------------

    @property
    def serving(self) -> list[RemoteEngine]:
        """The engines that serve."""
        return [engine for engine in self.engines.values() if engine.up]

    @property
    def up(self) -> bool:
        """Whether an engine serves."""
        return bool(self.serving)

    @property
    def shared(self) -> bool:
        """Whether the engines share a journal, and take over each other's sessions."""
        return bool(self._journal)

    @property
    def complete(self) -> bool:
        """Whether all engines can be asked for a session now, or their journal can."""
        return (self.shared and self.up) or all(engine.up for engine in self.engines.values())

    @property
    def acquainted(self) -> bool:
        """Whether all engines have said which sessions they have, at some time, or need not."""
        return self.shared or all(engine.facts is not None for engine in self.engines.values())

    def name_of(self, address: str) -> str:
        """The name of an engine; the address of one that is used no more."""
        engine = self.engines.get(address)
        return address if engine is None else engine.name

    def named(self, name: str | None) -> RemoteEngine | None:
        """The engine of a name."""
        return next((each for each in self.engines.values() if each.name == name), None)

    @property
    def facts(self) -> wire.ModelFacts | None:
        """Facts about the model; of the first engine that has served."""
        return next((each.facts for each in self.engines.values() if each.facts is not None), None)

    @property
    def engine_options(self) -> dict[str, Any]:
        """The options of the first engine that has served."""
        known = (each.welcome for each in self.engines.values() if each.welcome is not None)
        return next((welcome.options for welcome in known), {})

    @property
    def restarts(self) -> int:
        """How often a link that served has broken."""
        return sum(engine.lost for engine in self.engines.values())
