"""At which engine a session is, and where a new one is opened.

    a session            the engine that is known to have it (`directory`), or that finds it (`finding`)
    something new        the engine with most room (`placement`); a fork goes where its parent is

The engines say which sessions they have (`EngineReports`). A command that was refused because its session is
elsewhere by now is sent again, to the engine that has it then (`again`). The session of a chat that was found
by its content is known to this API process alone. Used by `engine_set`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Protocol

import msgspec

from holdfast.server.http.problems import Problem, engine_unavailable, from_refusal
from holdfast.server.link import wire
from holdfast.server.link.cluster_events import ClusterEvents
from holdfast.server.link.directory import AskedDirectory, Directory
from holdfast.server.link.engine_client import GiveUp, TurnFeed
from holdfast.server.link.finding import Finder, Patience
from holdfast.server.link.placement import roomiest
from holdfast.server.link.remote_engine import RemoteEngine
from holdfast.server.link.remote_engines import RemoteEngines

__all__ = ["EngineReports", "EngineSetObserver", "SessionPlaces"]

log = logging.getLogger("holdfast.server")


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


class SessionPlaces:
    """The engines of all sessions that this API process knows."""

    def __init__(self, remotes: RemoteEngines, observer: EngineSetObserver) -> None:
        self.directory: Directory = AskedDirectory(self._look_up)
        self.events = ClusterEvents()
        self._remotes = remotes
        self._observer = observer
        self._finder = Finder(remotes)
        self._volatile: dict[str, str] = {}
        """Engines of chats' sessions, by name: no other API process knows of these."""
        self._left: dict[str, str] = {}
        """Where sessions were that are looked for: an engine that was restarted may have their files."""
        self._cut_off: dict[str, str] = {}
        """Engines of sessions that are looked for, where these cannot write the journal."""

    # --- what the engines report ------------------------------------------------------------------

    def own(self, session: str, address: str) -> bool:
        """An engine says that it has a session; False if another one has it."""
        owner = self.directory.owner(session)
        other = None if owner in (None, address) else self._remotes.engines.get(owner or "")
        if not self._remotes.shared and other is not None and other.up:
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
        self.events.add("up", self._remotes.name_of(address))
        if self._remotes.shared:
            self._observer.engine_ready(ready, None)
        else:
            mine = [stored for stored in ready.sessions if self.own(stored.view.name, address)]
            names = {stored.view.name for stored in mine}
            for session in self.directory.owned(address) - names:
                self.directory.forget(session)
            apart = (other for other in self._remotes.engines if other != address)
            others = {each for other in apart for each in self.directory.owned(other)}
            self._observer.engine_ready(msgspec.structs.replace(ready, sessions=mine), others)
        self._remotes.serves()

    def left(self, address: str) -> list[str]:
        """A link is lost: the sessions of chats that nobody can find any more."""
        self.events.add("down", self._remotes.name_of(address))
        lost = [session for session, owner in self._volatile.items() if owner == address]
        for session in lost:
            del self._volatile[session]
        return lost

    def removed(self, address: str, moved: Mapping[str, str]) -> None:
        """The engine at an address is used no more: `moved` says where it serves now, with its sessions."""
        for session in self.directory.owned(address):
            self.directory.forget(session)
            if (new := moved.get(address)) is not None:
                self.directory.note(session, new)

    # --- where a session is -----------------------------------------------------------------------

    def owner(self, session: str) -> RemoteEngine | None:
        """The engine that has a session, as far as is known without asking."""
        address = self._volatile.get(session) or self.directory.owner(session)
        return None if address is None else self._remotes.engines.get(address)

    async def found(self, session: str) -> RemoteEngine:
        """The engine that has a session; raises if none has it."""
        owner = self.owner(session)
        if owner is not None and (owner.up or not self._remotes.shared or session in self._volatile):
            return owner
        owner = self.owner(session) if await self.finds(session) else None
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
        if not self._remotes.shared:
            return await self._finder.at_any(session)
        before = self._left.pop(session, None) or self.directory.owner(session)
        unable = self._cut_off.pop(session, None)
        found = await self._finder.in_journal(session, before, () if unable is None else (unable,))
        if found is not None and before not in (None, found[0]):
            self.events.add("taken over", self._remotes.name_of(found[0]), session=session)
        return found

    async def again(self, problem: Problem, session: str, engine: RemoteEngine, patience: Patience) -> bool:
        """Whether a command that was refused is sent again, to the engine that its session is at by now."""
        if not self._remotes.shared or session in self._volatile:
            return False
        if problem.code == "journal_unavailable":
            if patience.cut_off or len(self._remotes.serving) < 2:
                return False
            patience.cut_off = True
            self._cut_off[session] = engine.address
        elif not await patience.again(problem):
            return False
        if self.directory.owner(session) == engine.address:
            self.directory.forget(session)
            self._left[session] = engine.address
        return True

    async def is_elsewhere(self, session: str, engine: RemoteEngine) -> bool:
        """Whether another engine has a session; a shared journal decides that itself."""
        if self._remotes.shared:
            return False
        owner = await self._sought(session)
        return owner is not None and owner is not engine

    async def _sought(self, session: str) -> RemoteEngine | None:
        """The engine that has a session, which all are asked for if none is known to have it."""
        owner = self.owner(session)
        if owner is None and len(self._remotes.serving) > 1 and await self.finds(session):
            owner = self.owner(session)
        return owner

    # --- where something new goes -----------------------------------------------------------------

    def roomiest(self) -> RemoteEngine:
        """The engine with most room, which something is placed at; raises if none takes anything."""
        engine = roomiest(self._remotes.serving)
        if engine is None:
            raise engine_unavailable()
        engine.placed += 1
        return engine

    async def for_new(self, session: str) -> RemoteEngine:
        """Where a session is opened: where one of its name is, if there is one; it is refused there."""
        if self._remotes.shared:  # The journal decides between engines.
            owner = self.owner(session)
            return self.roomiest() if owner is None or not owner.up else owner
        return await self._sought(session) or self.roomiest()

    def for_turn(self, command: wire.StartTurn) -> tuple[RemoteEngine, bool]:
        """The engine of a turn that is no client's session, and whether another one would do."""
        if command.session is None:
            return self.roomiest(), True
        owner = self.owner(command.session)
        if owner is None and command.parent is not None:
            owner = self.owner(command.parent)
            if owner is None:
                raise from_refusal("session_not_found", "", None)
        if owner is None and command.keep:
            raise from_refusal("session_not_found", "", None)
        return (self.roomiest(), True) if owner is None else (owner, False)

    def note_chat(self, session: str, engine: RemoteEngine) -> None:
        """The session of a chat is begun at an engine."""
        self._volatile[session] = engine.address

    def forget_chat(self, session: str) -> None:
        """The session of a chat was not begun."""
        self._volatile.pop(session, None)


class EngineReports:
    """Hears one engine's reports, and passes them on with the engine that they come from."""

    def __init__(self, places: SessionPlaces, observer: EngineSetObserver, address: str) -> None:
        self._places = places
        self._observer = observer
        self._address = address
        self.session_seen = observer.session_seen
        self.session_taken_up = observer.session_taken_up
        self.turn_ended = observer.turn_ended

    def session_gone(self, session: str, reason: str) -> None:
        """A session was closed, has expired or moved; another engine's of that name stays."""
        if reason == "moved":
            self._places.disown(session, self._address)
        elif self._places.disown(session, self._address):
            self._observer.session_gone(session, reason)

    def session_stored(self, stored: wire.StoredSession) -> None:
        """Another API process has opened or changed a session."""
        if self._places.own(stored.view.name, self._address):
            self._observer.session_stored(stored)

    def engine_ready(self, ready: wire.Ready) -> None:
        """The engine serves."""
        self._places.joined(self._address, ready)

    def engine_lost(self) -> None:
        """The link to the engine is lost."""
        self._observer.engine_lost(self._places.left(self._address))
