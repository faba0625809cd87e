"""Draining an engine: its sessions at rest go to other engines, turns run to their end, and it ends.

It takes no sessions any more as soon as that begins. Which engine gets a session is decided by
`cluster.placement`, with the room that each engine says it has. A session that gets a turn meanwhile is
tried again; one that cannot be handed over is claimed by the engine that needs it, once this one has ended.
Used by the engine process; engines with journals of their own hand nothing over.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future

from holdfast.cluster.placement import Load, plan_drain
from holdfast.core.session import Life, Session
from holdfast.engine.claims import SessionClaims
from holdfast.engine.durable.store import Home
from holdfast.engine.listeners import Refusal
from holdfast.engine.loop import EngineLoop
from holdfast.server.link import wire
from holdfast.server.link.hand_overs import HandOvers, UnknownEngine
from holdfast.server.link.loads import load_of
from holdfast.server.link.snapshot_sender import SnapshotSender

__all__ = ["Drain"]

log = logging.getLogger("holdfast.engine")

AT_ONCE = 4
"""Sessions that are handed over at a time."""

PAUSE_SECONDS = 0.2
"""How long nothing is handed over after a hand-over has failed."""


class Drain:
    """The end of one engine among others."""

    def __init__(
        self, loop: EngineLoop, claims: SessionClaims, hand_overs: HandOvers, sender: SnapshotSender
    ) -> None:
        self._loop = loop
        self._claims = claims
        self._hand_overs = hand_overs
        self._sender = sender
        self._homes: dict[int, Home] = {}
        self._looks: dict[int, Future[wire.Pulse | None]] = {}
        self._loads: dict[int, Load] = {}
        self._going: dict[str, int] = {}
        """Sessions on their way, with the units that they need."""
        self._resumes = 0.0
        self._begun = False
        self.found = False
        """Whether the other engines are known."""

    def begin(self) -> None:
        """Take no more sessions, and find the engines that do."""
        if self._begun:
            return
        self._begun = True
        self._claims.ask(self._claims.store.drain, lambda _: None)
        self._claims.ask(self._claims.store.others, self._others)

    def _others(self, future: Future[list[Home]]) -> None:
        if future.exception() is None:
            self._homes = {home.life: home for home in future.result() if home.address}
        self._looks = {life: self._sender.look(home.address) for life, home in self._homes.items()}
        self.found = not self._looks

    @property
    def over(self) -> bool:
        """Whether nothing is left to hand over, or nobody to hand it over to."""
        left = bool(self._loop.session_log.sessions) and bool(self._loads)
        return self.found and not left and not self._hand_overs.pending

    def poll(self) -> None:
        """Hand some more sessions over."""
        if not self._begun:
            return
        for life in [life for life, look in self._looks.items() if look.done()]:
            look = self._looks.pop(life)
            pulse = None if look.exception() is not None else look.result()
            if pulse is not None and not pulse.draining:
                self._loads[life] = load_of(life, pulse)
            self.found = not self._looks
        waits = self._loop.now() < self._resumes
        if self.found and self._loads and len(self._going) < AT_ONCE and not waits:
            self._hand_over()

    def _hand_over(self) -> None:
        registry, names = self._loop.scheduler.registry, self._loop.session_log.sessions
        idle = (
            (name, self._units(session))
            for name in list(names)
            if name not in self._going
            and (session := registry.sessions.get(name)) is not None
            and session.life in (Life.IDLE, Life.SEALING)
        )
        for move in plan_drain(idle, list(self._loads.values()), AT_ONCE - len(self._going)):
            units = self._units(registry.sessions[move.session])
            self._going[move.session] = units
            self._loads[move.target].used += units
            leaving = Leaving(self, move.session, move.target)
            self._hand_overs.begin(leaving, move.session, self._name(move.target))

    def _units(self, session: Session) -> int:
        """Pages that a session needs at another engine."""
        return max(1, -(-session.sequence.computed // self._loop.setup.tuning.page_size))

    def _name(self, life: int) -> str:
        return self._homes[life].name

    def left(self, session: str) -> None:
        """A hand-over has ended."""
        self._going.pop(session, None)

    def refused(self, session: str, life: int, refusal: Refusal) -> None:
        """A hand-over has failed: it is tried again, elsewhere if its engine takes nothing any more."""
        units = self._going.pop(session, 0)
        self._resumes = self._loop.now() + PAUSE_SECONDS
        if life in self._loads:
            self._loads[life].used -= units
        log.info("session %s was not handed over to engine %s: %s", session, self._name(life), refusal)
        if isinstance(refusal, UnknownEngine):
            self._loads.pop(life, None)


class Leaving:
    """Hears what became of one hand-over."""

    __slots__ = ("_drain", "_life", "_session")

    def __init__(self, drain: Drain, session: str, life: int) -> None:
        self._drain = drain
        self._session = session
        self._life = life

    def done(self, session_id: str | None, answer: object = None) -> None:
        """The session is another engine's."""
        log.info("session %s was handed over with %s bytes", session_id or self._session, answer)
        self._drain.left(self._session)

    def refused(self, refusal: Refusal) -> None:
        """It was not."""
        self._drain.refused(self._session, self._life, refusal)
