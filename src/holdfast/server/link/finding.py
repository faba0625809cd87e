"""Finding the engine of a session, where the API process does not know it or cannot reach it.

Engines with journals of their own are all asked. Engines that share a journal find a session by its name
there: one engine is asked, which answers with the owner, or takes the session over if its owner has ended.

    nobody knows it here     any engine asks the journal                    one message, one statement
    its engine has ended     an engine claims it; the lease decides         within a second of a kill
    its engine is draining   it is asked for until it was handed over
    its engine is cut off    from the journal: another engine claims it, once the lease was not renewed

A session is looked for no longer than `PATIENCE_SECONDS`; then the client gets an error that may be retried.
Used by `session_places`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

import msgspec

from holdfast.server.http.problems import Problem, engine_unavailable
from holdfast.server.link import wire
from holdfast.server.link.placement import roomiest
from holdfast.server.link.remote_engine import RemoteEngine
from holdfast.server.link.remote_engines import RemoteEngines
from holdfast.server.link.wire import Question

__all__ = ["PATIENCE_SECONDS", "Finder", "Patience"]

PATIENCE_SECONDS = 3.0
PAUSE_SECONDS = 0.1

NOT_HERE = frozenset({"session_not_found", "session_moved", "engine_draining", "engine_unavailable"})
"""Refusals after which a session is looked for again: nothing was done."""

Place = tuple[str, wire.StoredSession]
"""The address of an engine, and a session as it is there."""


class Patience:
    """How often one request looks for a session again."""

    __slots__ = ("_until", "_waits", "cut_off")

    def __init__(self) -> None:
        self.cut_off = False
        """Whether an engine was found that cannot write the journal."""
        self._until = time.monotonic() + PATIENCE_SECONDS
        self._waits = False

    async def again(self, problem: Problem) -> bool:
        """Whether to look for the session again after a refusal: at once, and then after a pause."""
        return problem.code in NOT_HERE and await self.pause()

    async def pause(self) -> bool:
        """Wait a moment, unless it is the first time; False if time is up."""
        if time.monotonic() >= self._until:
            return False
        if self._waits:
            await asyncio.sleep(PAUSE_SECONDS)
        self._waits = True
        return True


class Finder:
    """Asks engines for sessions. Which engines there are may change."""

    def __init__(self, remotes: RemoteEngines) -> None:
        self._remotes = remotes

    async def at_any(self, session: str) -> Place | None:
        """Ask all engines for a session."""
        asked = self._remotes.serving
        answers = await asyncio.gather(
            *(self._remotes.ask(engine, wire.Ask(0, Question.STORED, session)) for engine in asked),
            return_exceptions=True,
        )
        for engine, answer in zip(asked, answers, strict=True):
            if isinstance(answer, wire.Done) and answer.answer is not None:
                return engine.address, msgspec.convert(answer.answer, wire.StoredSession)
        return None

    async def in_journal(
        self, session: str, before: str | None, unable: Collection[str] = ()
    ) -> Place | None:
        """Find a session in the journal that the engines share; `before` is where it was last known.

        `unable` are engines that cannot write the journal. None if there is no such session. Raises
        `engine_unavailable` if its engine cannot be reached and has not ended.
        """
        patience, full, cut_off = Patience(), set[str](), set(unable)
        engine = self._claimer(before, full | cut_off)
        while True:
            answer = await self._claimed(engine, session, patience, full, cut_off)
            if answer is not None:
                found = msgspec.convert(answer.answer, wire.Found | None)
                if found is None:
                    return None
                if found.stored is not None:
                    return engine.address, found.stored
                owner = self._remotes.named(found.engine)
                if owner is not None and owner.up and owner not in (engine, *self._at(cut_off)):
                    engine = owner  # It has the session, or reads it.
                    continue
            if not await patience.pause():
                raise engine_unavailable()
            engine = self._claimer(before, full | cut_off)

    def _at(self, addresses: Collection[str]) -> list[RemoteEngine]:
        return [each for each in self._remotes.engines.values() if each.address in addresses]

    async def _claimed(
        self,
        engine: RemoteEngine,
        session: str,
        patience: Patience,
        full: set[str],
        cut_off: set[str],
    ) -> wire.Done | None:
        """Ask an engine; None if it is to be asked again, or another one.

        Engines without room are added to `full`, those that cannot reach the journal to `cut_off`.
        """
        known = [each for each in self._remotes.engines.values() if each.welcome is not None]
        lost = [each.name for each in known if not each.up or each.address in cut_off]
        try:
            return await self._remotes.ask(engine, wire.Claim(0, session, lost))
        except Problem as problem:
            if problem.code == "journal_unavailable":
                cut_off.add(engine.address)
                if all(each.address in cut_off for each in self._remotes.serving):
                    raise
            elif problem.code == "too_many_sessions":
                full.add(engine.address)
            elif problem.code not in ("engine_lost", "engine_unavailable"):
                raise
            if not await patience.pause():
                raise
            return None

    def _claimer(self, before: str | None, full: Collection[str]) -> RemoteEngine:
        """The engine that is to take a session over: where it was, if that is up again, or most room."""
        known = None if before is None else self._remotes.engines.get(before)
        if known is not None and known.up and not known.draining and before not in full:
            return known
        serving = self._remotes.serving
        up = [engine for engine in serving if engine.address not in full] or serving
        chosen = roomiest(up) or (up[0] if up else None)
        if chosen is None:
            raise engine_unavailable()
        return chosen
