"""Commands to several engines: each goes to the engine that it concerns.

To the rest of the API process this is a `Link`, as the client of a single engine is.

    a session, something new     one engine (`session_places`)
    a report, a flush            all engines; their answers are joined (`joined_reports`)

An engine that cannot be reached takes nothing and loses nothing: commands about its sessions fail with an
error that may be retried, and the others serve on. Where the engines share a journal, another one takes such
a session over. All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.server.http.problems import Problem, engine_unavailable, from_refusal
from holdfast.server.link import wire
from holdfast.server.link.calls import Once, session_of
from holdfast.server.link.engine_client import LoopTime, TurnFeed, joined_times
from holdfast.server.link.finding import Patience
from holdfast.server.link.joined_reports import JoinedPictures, joined_memory, joined_pulse
from holdfast.server.link.remote_engine import RemoteEngine
from holdfast.server.link.remote_engines import RemoteEngines
from holdfast.server.link.session_places import EngineReports, EngineSetObserver, SessionPlaces
from holdfast.server.link.wire import Question

__all__ = ["EngineSet"]

AT_ALL = frozenset({Question.MEMORY, Question.PICTURE, Question.SESSIONS, Question.FLUSH})
"""Questions that all engines answer."""

ELSEWHERE = frozenset({"engine_draining", "engine_unavailable"})
"""Refusals after which something new is placed at another engine."""


class EngineSet:
    """The engines at some addresses, behind one link."""

    def __init__(
        self,
        addresses: Sequence[str],
        context: ssl.SSLContext,
        link_seconds: float,
        observer: EngineSetObserver,
    ) -> None:
        self._observer = observer
        self.remotes = RemoteEngines(context, link_seconds, self._reports_of)
        self.places = SessionPlaces(self.remotes, observer)
        self._pictures = JoinedPictures()
        self.change(addresses)

    def _reports_of(self, address: str) -> EngineReports:
        return EngineReports(self.places, self._observer, address)

    def change(self, addresses: Sequence[str], moved: Mapping[str, str] | None = None) -> None:
        """Use the engines at these addresses from now on, and no others.

        `moved` names the new addresses of engines that serve elsewhere now: their sessions are there.
        """
        for address in self.remotes.engines.keys() - set(addresses):
            self.places.removed(address, moved or {})
        self.remotes.use(addresses)

    # --- the link: what is known ------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether the engines share a journal, and take over each other's sessions."""
        return self.remotes.shared

    @property
    def complete(self) -> bool:
        """Whether all engines can be asked for a session now, or their journal can."""
        return self.remotes.complete

    @property
    def acquainted(self) -> bool:
        """Whether all engines have said which sessions they have, at some time, or need not."""
        return self.remotes.acquainted

    @property
    def pulse(self) -> wire.Pulse | None:
        """The heartbeats of all engines as one."""
        pulses = [engine.client.pulse for engine in self.remotes.serving]
        return joined_pulse([pulse for pulse in pulses if pulse is not None])

    @property
    def turns(self) -> int:
        """Turns in flight."""
        return sum(engine.client.turns for engine in self.remotes.engines.values())

    def totals(self) -> Counter[str]:
        """The counters of all engines."""
        return sum((engine.client.totals() for engine in self.remotes.engines.values()), Counter())

    def loop_times(self) -> dict[str, LoopTime]:
        """How long work between steps took at all engines, by kind of work."""
        joined: dict[str, LoopTime] = {}
        for engine in self.remotes.engines.values():
            joined = joined_times(joined, engine.client.loop_times())
        return joined

    async def finds(self, session: str) -> bool:
        """Whether an engine has a session that this process did not know of, or takes it over."""
        return await self.places.finds(session)

    # --- the link: commands -----------------------------------------------------------------------

    def number(self) -> int:
        """The number of the next call."""
        return self.remotes.number()

    def send(self, command: wire.Command) -> bool:
        """Send a command about a session; False if its engine does not serve."""
        assert isinstance(command, (wire.Hear, wire.CloseSession, wire.KeepMissed)), "others are calls"
        owner = self.places.owner(command.session)
        return owner is not None and owner.client.send(command)

    async def call(
        self,
        command: wire.Command,
        number: int,
        heard: Callable[[wire.Done], None] | None = None,
        over: Callable[[], None] | None = None,
    ) -> wire.Done:
        """Send a command to the engine that it concerns, and wait for its answer."""
        if isinstance(command, wire.Ask) and command.what in AT_ALL:
            return await self._ask_all(command)
        engine, done = await self._call_owner(command, number, heard, Once(over))
        if isinstance(command, wire.Fork) and done.view is None:
            await self.finds(done.answer)  # The fork was made before, and is at another engine by now.
        match command:
            case wire.Ask(what=Question.LEASED):
                return msgspec.structs.replace(done, answer=self._pictures.leased(engine.name, done.answer))
            case wire.Ask(what=Question.SESSION):
                return msgspec.structs.replace(done, answer={**done.answer, "engine": engine.name})
        return done

    async def _call_owner(
        self,
        command: wire.Command,
        number: int,
        heard: Callable[[wire.Done], None] | None,
        over: Callable[[], None],
    ) -> tuple[RemoteEngine, wire.Done]:
        """Send a command to the engine that it concerns: the engine, and its answer."""
        patience = Patience()
        while True:
            try:
                engine = await self._for(command)
            except BaseException:
                over()
                raise
            try:
                return engine, await self._call_at(engine, command, number, heard, over)
            except Problem as problem:
                if not await self.places.again(problem, session_of(command), engine, patience):
                    raise

    async def _for(self, command: wire.Command) -> RemoteEngine:
        """The engine that a command concerns."""
        if isinstance(command, wire.OpenSession):
            return await self.places.for_new(command.session)
        engine = await self.places.found(session_of(command))
        if isinstance(command, wire.Fork) and await self.places.is_elsewhere(command.child, engine):
            raise from_refusal("session_exists", "", "id")
        return engine

    async def _call_at(
        self,
        engine: RemoteEngine,
        command: wire.Command,
        number: int,
        heard: Callable[[wire.Done], None] | None,
        over: Callable[[], None],
    ) -> wire.Done:
        def noted(done: wire.Done) -> None:
            if isinstance(command, wire.OpenSession):
                self.places.directory.note(command.session, engine.address)
            elif isinstance(command, wire.Fork) and done.view is not None:
                self.places.directory.note(done.answer, engine.address)
            if heard is not None:
                heard(done)

        return await engine.client.call(command, number, noted, over)

    # --- the link: turns --------------------------------------------------------------------------

    async def start(self, commands: Sequence[wire.StartTurn]) -> list[TurnFeed]:
        """Start all turns of a request at one engine, or none."""
        first = commands[0]
        if first.session is not None and not first.volatile:
            return await self._start_at_owner(first.session, commands)
        for _ in self.remotes.engines:
            engine, is_new = self.places.for_turn(first)
            if first.volatile and first.session is not None:
                self.places.note_chat(first.session, engine)
            try:
                return await engine.client.start(commands)
            except Problem as problem:
                if is_new and first.session is not None:
                    self.places.forget_chat(first.session)
                if not is_new or problem.code not in ELSEWHERE or len(self.remotes.serving) < 2:
                    raise
        raise engine_unavailable()

    async def _start_at_owner(self, session: str, commands: Sequence[wire.StartTurn]) -> list[TurnFeed]:
        """Start turns of a session at the engine that has it."""
        patience = Patience()
        while True:
            engine = await self.places.found(session)
            try:
                return await engine.client.start(commands)
            except Problem as problem:
                if not await self.places.again(problem, session, engine, patience):
                    raise

    def end(self, feed: TurnFeed, keep: int | None, reason: str) -> None:
        """Abort a turn."""
        for engine in self.remotes.engines.values():
            if engine.client.runs(feed):
                engine.client.end(feed, keep, reason)

    def end_all(self, reason: str) -> None:
        """Abort every turn of this process at all engines, each by its own policy."""
        for engine in self.remotes.engines.values():
            engine.client.end_all(reason)

    # --- reports ----------------------------------------------------------------------------------

    async def _ask_all(self, question: wire.Ask) -> wire.Done:
        """The answers of all engines as one; those that are lost meanwhile are left out."""
        asked = self.remotes.serving
        if not asked:
            raise engine_unavailable()
        answers = await asyncio.gather(
            *(self.remotes.ask(engine, self._part(engine, question)) for engine in asked),
            return_exceptions=True,
        )
        found: dict[str, Any] = {}
        for engine, answer in zip(asked, answers, strict=True):
            if isinstance(answer, wire.Done):
                found[engine.name] = answer.answer
            elif not isinstance(answer, Problem):
                raise answer
        if not found:
            raise engine_unavailable()
        return wire.Done(question.call, answer=self._joined(question, found))

    def _part(self, engine: RemoteEngine, question: wire.Ask) -> wire.Ask:
        """An engine's part of a question."""
        if question.what != Question.SESSIONS:
            return question
        owner = self.places.directory.owner
        mine = [name for name in question.names if owner(name) == engine.address]
        return msgspec.structs.replace(question, names=mine)

    def _joined(self, question: wire.Ask, found: dict[str, Any]) -> Any:
        match question.what:
            case Question.MEMORY:
                return joined_memory(found)
            case Question.PICTURE:
                return self._pictures.join(found)
            case Question.SESSIONS:
                by_name = {
                    each["id"]: {**each, "engine": name} for name, part in found.items() for each in part
                }
                return [by_name[name] for name in question.names if name in by_name]
        return None
