"""Hand-overs: sessions at rest that leave this engine for another, with their memory.

    find the engine --> write the memory to a file --> send it there --> change the owner --> tell the engine
                         (disk tier; none without)      (sender)          (one statement)

Turns go on until the owner changes; one that came meanwhile makes the file old, and it is written again. Only
the one statement is waited for by turns of the session, which then go to the other engine. Until it, an
abandoned hand-over has changed nothing; after it the session is the other engine's, which computes it again
if it does not have the memory. Everything here is polled between two steps. Used by the engine process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from holdfast.core.errors import JournalUnavailable, Refused, SessionBusy, SessionMoved, UnknownSession
from holdfast.core.session import Life, Place, Session
from holdfast.engine.claims import SessionClaims
from holdfast.engine.durable.store import Home
from holdfast.engine.listeners import Reply
from holdfast.engine.tiers.back_off import Cause
from holdfast.engine.tiers.files import Header
from holdfast.engine.verbs import Verbs
from holdfast.server.link.snapshot_sender import SnapshotSender

__all__ = ["HandOvers", "UnknownEngine"]

log = logging.getLogger("holdfast.engine")

TRIES_MAX = 3
"""How often the memory of a session is sent that gets a turn meanwhile."""

REST_SECONDS = 5.0
"""How long a session may take to come to rest, or to be written."""


class UnknownEngine(Refused):
    """No engine of this name takes sessions."""

    code = "engine_not_found"
    param = "engine"


class HandOver:
    """One session on its way."""

    __slots__ = ("bytes", "home", "reply", "sent", "session", "tries", "until")

    def __init__(self, reply: Reply, session: Session, home: Home, until: float) -> None:
        self.reply = reply
        self.session = session
        self.home = home
        self.until = until
        self.tries = 0
        self.bytes = 0
        self.sent: Header | None = None
        """What the other engine has of it."""


class HandOvers:
    """The hand-overs of one engine."""

    def __init__(self, verbs: Verbs, claims: SessionClaims, sender: SnapshotSender) -> None:
        self._verbs = verbs
        self._loop = verbs.loop
        self._claims = claims
        self._sender = sender
        self._polled: list[Callable[[], bool]] = []
        """What is looked at between two steps, until it returns True."""
        self._sending: list[Callable[[], bool]] = []
        """The same, of what the sender does: its descriptor wakes the process."""
        self.pending = 0
        """Hand-overs that have not ended."""

    # --- called by the commands -------------------------------------------------------------------

    def begin(self, reply: Reply, session_id: str, engine: str) -> None:
        """Hand a session over to the engine of that name."""
        self.pending += 1

        def answered(future: Future[list[Home]]) -> None:
            error = future.exception()
            if error is not None:
                self._refuse(reply, JournalUnavailable(str(error)))
                return
            home = next((each for each in future.result() if each.name == engine), None)
            session = self._loop.scheduler.registry.sessions.get(session_id)
            if home is None:
                self._refuse(reply, UnknownEngine(f"no other engine that takes sessions is named {engine}"))
            elif session is None or session_id not in self._loop.session_log.sessions:
                self._refuse(reply, UnknownSession(f"session {session_id} does not exist"))
            else:
                self._rest(HandOver(reply, session, home, self._loop.now() + REST_SECONDS))

        self._claims.ask(self._claims.store.others, answered)

    def poll(self) -> None:
        """Look at what has come since the last call."""
        self._sender.clear()
        sending, self._sending = self._sending, []
        self._sending += [look for look in sending if not look()]
        polled, self._polled = self._polled, []
        self._polled += [look for look in polled if not look()]

    @property
    def waits(self) -> bool:
        """Whether a hand-over has to be looked at again soon, without anything that wakes the process."""
        return self.pending > len(self._sending)

    # --- the steps --------------------------------------------------------------------------------

    def _refuse(self, reply: Reply, refusal: Refused) -> None:
        self.pending -= 1
        reply.refused(refusal)

    def _rest(self, each: HandOver) -> None:
        """Wait until a session is at rest, then write it."""

        def look() -> bool:
            if not self._is_here(each):
                self._refuse(each.reply, SessionMoved(each.session.id))
            elif self._is_at_rest(each.session):
                self._write(each)
            elif self._loop.now() > each.until:
                self._refuse(each.reply, SessionBusy(f"session {each.session.id} has a turn in flight"))
            else:
                return False
            return True

        if not look():
            self._polled.append(look)

    def _is_here(self, each: HandOver) -> bool:
        name = each.session.id
        same = self._loop.scheduler.registry.sessions.get(name) is each.session
        return same and name in self._loop.session_log.sessions

    def _is_at_rest(self, session: Session) -> bool:
        """Whether no turn has the session, and its last token is computed."""
        registry = self._loop.scheduler.registry
        idle = session.life is Life.IDLE and session.turn is None and session.at_rest
        settled = session.place in (Place.HOME, Place.AWAY) and not registry.copying(session)
        shedding = self._loop.dispatcher.is_shedding(session.id)
        return idle and settled and session not in registry.seals and not shedding

    def _write(self, each: HandOver) -> None:
        """Have the session's memory in a file, if there is a disk tier and anything to move."""
        disk, session = self._loop.disk, each.session
        if disk is None or not session.sequence.computed:
            self._give(each)
            return
        store, until = disk.store, self._loop.now() + REST_SECONDS
        if not store.covers(session) and disk.writer.can_write(session):
            disk.writer.write(session, Cause.SPILL)

        def look() -> bool:
            if store.covers(session):
                self._send(each)
            elif session.id in disk.writer.writing and self._loop.now() < until:
                return False
            elif not self._is_here(each) or not self._is_at_rest(session):
                self._again(each)
            else:
                self._give(each)  # It could not be written: the other engine computes it again.
            return True

        if not look():
            self._polled.append(look)

    def _send(self, each: HandOver) -> None:
        """Send the file of a session."""
        disk = self._loop.disk
        assert disk is not None, "a file was written"
        snapshot = disk.store.snapshots[each.session.id]
        header = disk.store.header(snapshot.length, snapshot.tokens)
        try:
            descriptor = os.open(disk.store.files.directory / snapshot.file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            log.warning("session %s is moved without its memory: %s", each.session.id, error)
            self._give(each)
            return
        sent = self._sender.send(each.home.address, each.session.id, header, descriptor, snapshot.bytes)

        def look() -> bool:
            if not sent.done():
                return False
            error = sent.exception()
            if error is not None:
                log.warning("session %s is moved without its memory: %s", each.session.id, error)
            else:
                each.sent, each.bytes = header, snapshot.bytes
            self._give(each)
            return True

        self._sending.append(look)

    def _again(self, each: HandOver) -> None:
        """A turn came meanwhile: begin again, a few times."""
        each.tries += 1
        each.sent, each.bytes = None, 0
        if each.tries >= TRIES_MAX:
            self._refuse(each.reply, SessionBusy(f"session {each.session.id} has got a turn meanwhile"))
            return
        each.until = self._loop.now() + REST_SECONDS
        self._rest(each)

    def _give(self, each: HandOver) -> None:
        """Change the owner; turns that come now wait for that."""
        asked: list[Future[Any]] = []

        def attempt() -> bool:
            if asked:
                if not asked[0].done():
                    return False
                self._given(each, asked[0])
                return True
            if not self._is_here(each) or not self._is_at_rest(each.session) or self._is_old(each):
                self._again(each)
                return True
            name, life = each.session.id, each.home.life
            store = self._claims.store
            asked.append(self._loop.session_log.ask(lambda: store.hand_over([name], life)))
            return False

        self._verbs.when_free(each.session.id, attempt)

    def _is_old(self, each: HandOver) -> bool:
        """Whether the other engine has the memory of an older history."""
        if each.sent is None:
            return False
        sequence = each.session.sequence
        same = each.sent.length == sequence.computed
        return not same or sequence.tokens.digest(each.sent.length) != each.sent.tokens

    def _given(self, each: HandOver, future: Future[frozenset[str]]) -> None:
        """The store has answered."""
        name, error = each.session.id, future.exception()
        if error is not None:
            self._refuse(each.reply, JournalUnavailable(str(error)))
            return
        if name not in future.result():
            self._refuse(each.reply, UnknownEngine(f"engine {each.home.name} takes no sessions any more"))
            return
        self._loop.dispatcher.part_with([name], self._loop.now())
        told = self._sender.tell(each.home.address, name)

        def look() -> bool:
            if not told.done():
                return False
            if told.exception() is not None:
                log.info("engine %s was not told of session %s", each.home.name, name)
            self.pending -= 1
            each.reply.done(None, each.bytes)
            return True

        self._sending.append(look)
