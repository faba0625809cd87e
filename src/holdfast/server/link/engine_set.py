"""All engines of an API process that has none of its own: commands go to the engine that they concern.

To the rest of the API process this is a `Link`, as the client of a single engine is.

    a session            the engine that has it (`directory`)
    something new        the engine with most room (`placement`); a fork goes where its parent is
    a report, a flush    all engines; their answers are joined (`joined_reports`)

An engine that cannot be reached takes nothing and loses nothing: commands about its sessions fail with an
error that may be retried, and the others serve on. Where the engines share a journal, another one takes such
a session over (`finding`), and a command that was refused because its session is elsewhere by now is sent
there. All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import ssl
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from holdfast.server.http.problems import Problem, engine_unavailable, from_refusal
from holdfast.server.link import wire
from holdfast.server.link.calls import Once, session_of
from holdfast.server.link.cluster_events import ClusterEvents
from holdfast.server.link.directory import AskedDirectory, Directory
from holdfast.server.link.engine_client import EngineClient, GiveUp, LoopTime, TurnFeed, joined_times
from holdfast.server.link.finding import Finder, Patience
from holdfast.server.link.joined_reports import JoinedPictures, joined_memory, joined_pulse
from holdfast.server.link.placement import roomiest
from holdfast.server.link.remote_engine import RemoteEngine, turn_lost
from holdfast.server.link.wire import Question

__all__ = ["EngineSet", "EngineSetObserver"]

log = logging.getLogger("holdfast.server")

AT_ALL = frozenset({Question.MEMORY, Question.PICTURE, Question.SESSIONS, Question.FLUSH})
"""Questions that all engines answer."""

ELSEWHERE = frozenset({"engine_draining", "engine_unavailable"})
"""Refusals after which something new is placed at another engine."""


class EngineSetObserver(Protocol):
    """Hears of sessions and turns of all engines."""

    def session_seen(self, view: wire.SessionView) -> None:
        """A report carried the view of a session."""

    def session_gone(self, session: str, reason: str) -> None:
        """A session was closed, or has expired."""

    def session_stored(self, stored: wire.StoredSession) -> None:
        """A session that another API process has opened or changed."""

    def session_taken_up(self, session: str, give: GiveUp, /) -> None:
        """Another API process has the realtime client of a session now."""

    def turn_ended(self, feed: TurnFeed) -> None:
        """A turn has had its end, or was lost."""

    def engine_ready(self, ready: wire.Ready, others: Collection[str] | None = ()) -> None:
        """An engine serves; sessions that neither it nor another has (`others`) are lost.

        None are where `others` is None.
        """

    def engine_lost(self, volatile: Collection[str] | None = None) -> None:
        """An engine is lost, and with it the chats that were found by their content."""


class Seat:
    """Hears one engine's reports, and passes them on with the engine that they come from."""

    def __init__(self, engines: EngineSet, observer: EngineSetObserver, address: str) -> None:
        self._engines = engines
        self._observer = observer
        self._address = address
        self.session_seen = observer.session_seen
        self.session_taken_up = observer.session_taken_up
        self.turn_ended = observer.turn_ended

    def session_gone(self, session: str, reason: str) -> None:
        """A session was closed, has expired or moved; another engine's of that name stays."""
        if reason == "moved":
            self._engines.disown(session, self._address)
        elif self._engines.disown(session, self._address):
            self._observer.session_gone(session, reason)

    def session_stored(self, stored: wire.StoredSession) -> None:
        """Another API process has opened or changed a session."""
        if self._engines.own(stored.view.name, self._address):
            self._observer.session_stored(stored)

    def engine_ready(self, ready: wire.Ready) -> None:
        """The engine serves."""
        self._engines.joined(self._address, ready)

    def engine_lost(self) -> None:
        """The link to the engine is lost."""
        self._observer.engine_lost(self._engines.left(self._address))


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
        self._context = context
        self._link_seconds = link_seconds
        self._identity = secrets.token_hex(16)
        self._prefix = 1 + secrets.randbelow((1 << (63 - wire.CALL_BITS)) - 1)
        self._numbers = itertools.count(self._prefix << wire.CALL_BITS)
        self._model = ""
        self._journal: str | None = None
        """The journal that the engines share; empty if each has one of its own, None before it is known."""
        self.directory: Directory = AskedDirectory(self._look_up)
        self._volatile: dict[str, str] = {}
        """Engines of chats' sessions, by name: no other API process knows of these."""
        self._left: dict[str, str] = {}
        """Where sessions were that are looked for: an engine that was restarted may have their files."""
        self._cut_off: dict[str, str] = {}
        """Engines of sessions that are looked for, where these cannot write the journal."""
        self.events = ClusterEvents()
        self._pictures = JoinedPictures()
        self._ready = asyncio.Event()
        self._stopped = asyncio.Event()
        self._changed = asyncio.Event()
        self.engines: dict[str, RemoteEngine] = {}
        self._finder = Finder(lambda: self.engines, self.ask)
        self.change(addresses)

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

    def change(self, addresses: Sequence[str], moved: Mapping[str, str] | None = None) -> None:
        """Use the engines at these addresses from now on, and no others.

        `moved` names the new addresses of engines that serve elsewhere now: their sessions are there.
        """
        engines = {each: self.engines.get(each) or self._engine(each) for each in addresses}
        for address in self.engines.keys() - engines.keys():
            for session in self.directory.owned(address):
                self.directory.forget(session)
                if (new := (moved or {}).get(address)) is not None:
                    self.directory.note(session, new)
        self.engines = engines  # A new table: others may be going through the old one.
        self._changed.set()

    def _engine(self, address: str) -> RemoteEngine:
        return RemoteEngine(
            address,
            EngineClient(Seat(self, self._observer, address), self._numbers, turn_lost),
            self._context,
            self._link_seconds,
            self._greeting,
            self._judge,
        )

    def _name_of(self, address: str) -> str:
        """The name of an engine; the address of one that is used no more."""
        engine = self.engines.get(address)
        return address if engine is None else engine.name

    async def wait_ready(self) -> None:
        """Wait until an engine serves."""
        await self._ready.wait()

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
        for other in self._up:
            if other is not engine and other.welcome is not None and other.name == welcome.engine:
                same = other.welcome.life == welcome.life
                what = "the same engine" if same else "another engine with the same name"
                return f"{what} is connected at {other.address}"
        if self._journal not in (None, welcome.journal):
            return "it does not share its journal with the other engines of this process"
        self._model, self._journal = welcome.model, welcome.journal
        return None

    @property
    def shared(self) -> bool:
        """Whether the engines share a journal, and take over each other's sessions."""
        return bool(self._journal)

    @property
    def _up(self) -> list[RemoteEngine]:
        return [engine for engine in self.engines.values() if engine.up]

    @property
    def up(self) -> bool:
        """Whether an engine serves."""
        return bool(self._up)

    @property
    def complete(self) -> bool:
        """Whether all engines can be asked for a session now, or their journal can."""
        return (self.shared and self.up) or all(engine.up for engine in self.engines.values())

    @property
    def acquainted(self) -> bool:
        """Whether all engines have said which sessions they have, at some time, or need not."""
        return self.shared or all(engine.facts is not None for engine in self.engines.values())

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

    # --- what the engines report ------------------------------------------------------------------

    def own(self, session: str, address: str) -> bool:
        """An engine says that it has a session; False if another one has it."""
        owner = self.directory.owner(session)
        other = None if owner in (None, address) else self.engines.get(owner or "")
        if not self.shared and other is not None and other.up:
            fields = {"session": session, "engine": address, "kept": owner}
            log.error("two engines have a session of one name", extra={"fields": fields})
            return False
        self.directory.note(session, address)
        return True

    def disown(self, session: str, address: str) -> bool:
        """An engine says that a session has ended; False if another one has it."""
        if self._volatile.pop(session, None) is not None:
            return True
        if self.directory.owner(session) not in (None, address):
            return False
        self.directory.forget(session)
        return True

    def joined(self, address: str, ready: wire.Ready) -> None:
        """An engine serves."""
        self.events.add("up", self._name_of(address))
        if self.shared:
            self._observer.engine_ready(ready, None)
            self._ready.set()
            return
        mine = [stored for stored in ready.sessions if self.own(stored.view.name, address)]
        names = {stored.view.name for stored in mine}
        for session in self.directory.owned(address) - names:
            self.directory.forget(session)
        others = {each for other in self.engines if other != address for each in self.directory.owned(other)}
        self._observer.engine_ready(msgspec.structs.replace(ready, sessions=mine), others)
        self._ready.set()

    def left(self, address: str) -> list[str]:
        """A link is lost: the sessions of chats that nobody can find any more."""
        self.events.add("down", self._name_of(address))
        lost = [session for session, owner in self._volatile.items() if owner == address]
        for session in lost:
            del self._volatile[session]
        return lost

    async def home(self, session: str) -> RemoteEngine:
        """The engine that has a session; raises if none has."""
        return await self._found(session)

    def handed_over(self, session: str, address: str) -> None:
        """A session was handed over to an engine."""
        self.directory.note(session, address)

    # --- where commands go ------------------------------------------------------------------------

    def _owner(self, session: str) -> RemoteEngine | None:
        address = self._volatile.get(session) or self.directory.owner(session)
        return None if address is None else self.engines.get(address)

    async def _found(self, session: str) -> RemoteEngine:
        """The engine of a session; raises if none has it."""
        owner = self._owner(session)
        if owner is not None and (owner.up or not self.shared or session in self._volatile):
            return owner
        owner = self._owner(session) if await self.finds(session) else None
        if owner is None:
            self.directory.forget(session)
            self._observer.session_gone(session, "closed")
            raise from_refusal("session_not_found", "", "session_id")
        return owner

    async def finds(self, session: str) -> bool:
        """Whether an engine has a session that this process did not know of, or takes it over."""
        found = await self.directory.look_up(session)
        if found is not None:
            self._observer.session_stored(found[1])
        return found is not None

    async def _look_up(self, session: str) -> tuple[str, wire.StoredSession] | None:
        """Ask for a session at all engines, or at one that finds it in their journal."""
        if self.shared:
            before = self._left.pop(session, None) or self.directory.owner(session)
            unable = self._cut_off.pop(session, None)
            found = await self._finder.in_journal(session, before, () if unable is None else (unable,))
            if found is not None and before not in (None, found[0]):
                self.events.add("taken over", self._name_of(found[0]), session=session)
            return found
        return await self._finder.at_any(session)

    async def ask(self, engine: RemoteEngine, question: wire.Command) -> wire.Done:
        """Send a command to one engine, and wait for its answer."""
        number = self.number()
        return await engine.client.call(msgspec.structs.replace(question, call=number), number)

    async def _again(self, problem: Problem, session: str, engine: RemoteEngine, patience: Patience) -> bool:
        """Whether a command that was refused is sent again, to the engine that its session is at by now."""
        if not self.shared or session in self._volatile:
            return False
        if problem.code == "journal_unavailable":
            if patience.cut_off or len(self._up) < 2:
                return False
            patience.cut_off = True
            self._cut_off[session] = engine.address
        elif not await patience.again(problem):
            return False
        if self.directory.owner(session) == engine.address:
            self.directory.forget(session)
            self._left[session] = engine.address
        return True

    def _roomiest(self) -> RemoteEngine:
        engine = roomiest(self._up)
        if engine is None:
            raise engine_unavailable()
        engine.placed += 1
        return engine

    async def _for_new(self, session: str) -> RemoteEngine:
        """Where a session is opened: where one of its name is, if there is one; it is refused there."""
        owner = self._owner(session)
        if self.shared:  # The journal decides between engines.
            return self._roomiest() if owner is None or not owner.up else owner
        if owner is None and len(self._up) > 1 and await self.finds(session):
            owner = self._owner(session)
        return self._roomiest() if owner is None else owner

    async def _is_elsewhere(self, session: str, engine: RemoteEngine) -> bool:
        """Whether another engine has a session; a shared journal decides that itself."""
        if self.shared:
            return False
        owner = self._owner(session)
        if owner is None and len(self._up) > 1 and await self.finds(session):
            owner = self._owner(session)
        return owner is not None and owner is not engine

    # --- the link ---------------------------------------------------------------------------------

    @property
    def pulse(self) -> wire.Pulse | None:
        """The heartbeats of all engines as one."""
        return joined_pulse([each.client.pulse for each in self._up if each.client.pulse is not None])

    @property
    def turns(self) -> int:
        """Turns in flight."""
        return sum(engine.client.turns for engine in self.engines.values())

    def totals(self) -> Counter[str]:
        """The counters of all engines."""
        return sum((engine.client.totals() for engine in self.engines.values()), Counter())

    def loop_times(self) -> dict[str, LoopTime]:
        """How long work between steps took at all engines, by kind of work."""
        joined: dict[str, LoopTime] = {}
        for engine in self.engines.values():
            joined = joined_times(joined, engine.client.loop_times())
        return joined

    def number(self) -> int:
        """The number of the next call."""
        return next(self._numbers)

    def send(self, command: wire.Command) -> bool:
        """Send a command about a session; False if its engine does not serve."""
        assert isinstance(command, (wire.Hear, wire.CloseSession, wire.KeepMissed)), "others are calls"
        owner = self._owner(command.session)
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
                if not await self._again(problem, session_of(command), engine, patience):
                    raise

    async def _for(self, command: wire.Command) -> RemoteEngine:
        """The engine that a command concerns."""
        if isinstance(command, wire.OpenSession):
            return await self._for_new(command.session)
        engine = await self._found(session_of(command))
        if isinstance(command, wire.Fork) and await self._is_elsewhere(command.child, engine):
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
                self.directory.note(command.session, engine.address)
            elif isinstance(command, wire.Fork) and done.view is not None:
                self.directory.note(done.answer, engine.address)
            if heard is not None:
                heard(done)

        return await engine.client.call(command, number, noted, over)

    async def start(self, commands: Sequence[wire.StartTurn]) -> list[TurnFeed]:
        """Start all turns of a request at one engine, or none."""
        first = commands[0]
        if first.session is not None and not first.volatile:
            return await self._start_at_owner(first.session, commands)
        for _ in self.engines:
            engine, is_new = await self._for_turn(first)
            if first.volatile and first.session is not None:
                self._volatile[first.session] = engine.address
            try:
                return await engine.client.start(commands)
            except Problem as problem:
                if is_new and first.session is not None:
                    self._volatile.pop(first.session, None)
                if not is_new or problem.code not in ELSEWHERE or len(self._up) < 2:
                    raise
        raise engine_unavailable()

    async def _start_at_owner(self, session: str, commands: Sequence[wire.StartTurn]) -> list[TurnFeed]:
        """Start turns of a session at the engine that has it."""
        patience = Patience()
        while True:
            engine = await self._found(session)
            try:
                return await engine.client.start(commands)
            except Problem as problem:
                if not await self._again(problem, session, engine, patience):
                    raise

    async def _for_turn(self, command: wire.StartTurn) -> tuple[RemoteEngine, bool]:
        """The engine of a turn that is no client's session, and whether another one would do."""
        if command.session is None:
            return self._roomiest(), True
        owner = self._owner(command.session)
        if owner is None and command.parent is not None:
            owner = self._owner(command.parent)
            if owner is None:
                raise from_refusal("session_not_found", "", None)
        if owner is None and command.keep:
            raise from_refusal("session_not_found", "", None)
        return (self._roomiest(), True) if owner is None else (owner, False)

    def end(self, feed: TurnFeed, keep: int | None, reason: str) -> None:
        """Abort a turn."""
        for engine in self.engines.values():
            if engine.client.runs(feed):
                engine.client.end(feed, keep, reason)

    def end_all(self, reason: str) -> None:
        """Abort every turn of this process at all engines, each by its own policy."""
        for engine in self.engines.values():
            engine.client.end_all(reason)

    # --- reports ----------------------------------------------------------------------------------

    async def _ask_all(self, question: wire.Ask) -> wire.Done:
        """The answers of all engines as one; those that are lost meanwhile are left out."""
        asked = self._up
        if not asked:
            raise engine_unavailable()
        answers = await asyncio.gather(
            *(self.ask(engine, self._part(engine, question)) for engine in asked), return_exceptions=True
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
        mine = [name for name in question.names if self.directory.owner(name) == engine.address]
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
