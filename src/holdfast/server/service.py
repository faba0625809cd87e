"""Sessions and turns of a caller, over the link to the engine; shared by all routes.

A route translates a request of its dialect into one of these calls and formats the result. A call either
succeeds or raises a `Problem` and has changed nothing.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Collection, Sequence
from typing import Any

from holdfast.core.turn import KEEP_ALL
from holdfast.engine.sampling import SamplingError
from holdfast.server.found_sessions import Conversations
from holdfast.server.hidden_sessions import HiddenSessions
from holdfast.server.http.bodies import Reading
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import (
    Problem,
    context_exceeded,
)
from holdfast.server.link import wire
from holdfast.server.link.engine_client import EngineClient, Link, TurnFeed
from holdfast.server.link.engine_set import EngineSet
from holdfast.server.link.remote_engines import RemoteEngines
from holdfast.server.link.supervisor import Progress, Supervisor
from holdfast.server.listening import Listening
from holdfast.server.occupants import Occupant, Occupants, Watched
from holdfast.server.options import ServerOptions
from holdfast.server.ordinary_sessions import OrdinarySessions
from holdfast.server.prompts import Prompts
from holdfast.server.seeds import Seeds
from holdfast.server.served_model import ServedModel
from holdfast.server.session_calls import SessionCalls
from holdfast.server.sessions import (
    SessionRecord,
    SessionTable,
    engine_name,
    shown_name,
)
from holdfast.server.telemetry.metrics import Metrics
from holdfast.server.telemetry.tracing import open_traces
from holdfast.server.telemetry.turn_log import log_turn
from holdfast.server.turn_request import TurnAsked
from holdfast.server.turn_starter import TurnStarter

__all__ = ["Service"]

BUSY = ("session_busy", "turn_exists")
"""Refusals because of another turn in flight."""

STARTS_MAX = 5
"""How often a turn is started while the clients of turns before it have disconnected."""


class Service:
    """The engine as all routes use it."""

    def __init__(
        self,
        options: ServerOptions,
        configure: wire.Configure,
        metrics: Metrics,
        model_name: str,
        progress: Progress,
        remote: ssl.SSLContext | None = None,
    ) -> None:
        """`remote`: TLS of the links, where the engines are apart."""
        self.options = options
        self.table = SessionTable()
        self.session_taken_up = self.table.taken_up
        self.engines: EngineSet | None = None
        self.link: Link
        self.supervisor: Supervisor | RemoteEngines
        if remote is None:
            self.link = client = EngineClient(self)
            self.supervisor = Supervisor(client, configure, options.hang_seconds, progress)
        else:
            self.link = self.engines = EngineSet(options.engine, remote, options.link_seconds, self)
            self.supervisor = self.engines.remotes
        self.model = ServedModel(lambda: self.supervisor.facts)
        self.metrics = metrics
        self.traces = open_traces()
        self.model_name = model_name
        self.hidden = HiddenSessions(self.table)
        self.ordinary = OrdinarySessions()
        self.conversations = Conversations(options.found_sessions, self._close_hidden, self._count_found)
        self.listening = Listening(self.link, self.model.writer)
        self.occupants = Occupants(lambda feed: self.leave(feed, feed.keeps))
        self.metrics.found_sessions.set_function(lambda: len(self.conversations))
        self.seeds = Seeds(options.seed)
        self.sessions = SessionCalls(
            self.link,
            self.model,
            self.table,
            self.hidden,
            self.ordinary,
            self.seeds,
            options.tenant_sessions,
        )
        self.created = int(time.time())

    @property
    def facts(self) -> wire.ModelFacts:
        """Facts about the served model."""
        return self.model.facts

    @property
    def prompts(self) -> Prompts:
        """The prompt writer of the served model."""
        return self.model.prompts

    def reading(self, caller: Caller) -> Reading:
        """How bodies of a caller are read; large ones only after the model is loaded."""

        async def read_large(content: memoryview) -> memoryview:
            return await self.prompts.read_body(content, caller.tenant)

        return Reading(self.options.body_limit, self.model.room, read_large)

    def close(self) -> None:
        """Close traces and text processes."""
        self.traces.close()
        self.model.close()

    # --- what the engine reports ------------------------------------------------------------------

    def session_seen(self, view: wire.SessionView) -> None:
        """A report carried the view of a session."""
        self.table.seen(view)

    def session_gone(self, session: str, reason: str) -> None:
        """A session was closed, or has expired."""
        self.table.remove(session, reason)
        self.conversations.gone(session)
        self.listening.gone(session)

    def session_stored(self, stored: wire.StoredSession) -> None:
        """Another API process has opened or changed a session."""
        if not self.table.changed(stored):
            self._restore(stored)

    def _restore(self, stored: wire.StoredSession) -> None:
        name = stored.view.name.partition("/")[2]
        known, turns = self.table.get(stored.tenant, name), stored.view.turns
        seeds = self.seeds.of_session(stored.tenant, name, turns) if known is None else known.seeds
        self.table.restore(stored, seeds)

    def engine_lost(self, volatile: Collection[str] | None = None) -> None:
        """An engine that served is lost, with its volatile sessions; all of them if it is the only one."""
        self.metrics.engine_lost()
        if volatile is None:
            self.conversations.clear()
        else:
            for session in volatile:
                self.conversations.gone(session)
        self.listening.clear()

    def engine_ready(self, ready: wire.Ready, others: Collection[str] | None = ()) -> None:
        """An engine is ready; sessions that neither it nor other engines (`others`) know are lost.

        None are where `others` is None: engines share a journal, and take sessions over.
        """
        self.model.told(ready)
        self.model_name = self.model_name or shown_name(ready.facts.path)
        for stored in ready.sessions:
            self._restore(stored)
        if others is not None:
            self.table.lose_all({stored.view.name for stored in ready.sessions}.union(others))

    def turn_ended(self, feed: TurnFeed) -> None:
        """Count a turn, log its figures and end its trace, all without its text.

        A replayed turn was counted when it ran.
        """
        if feed.session is not None:
            self.listening.turn_ended(feed.session)
            self.occupants.turn_ended(feed)
        if feed.replayed:
            return
        self.conversations.ended(feed)
        self.metrics.turn_ended(feed)
        self.traces.turn_ended(feed)
        log_turn(feed)

    async def ask(self, what: str, name: str | None = None, names: list[str] | None = None) -> Any:
        """Ask the engine for a report."""
        number = self.link.number()
        return (await self.link.call(wire.Ask(number, wire.Question(what), name, names or []), number)).answer

    # --- turns ------------------------------------------------------------------------------------

    def check_turn(self, asked: TurnAsked) -> None:
        """Raise for fields that are invalid in any state of the session."""
        limit = asked.sampling.max_tokens
        if limit is not None and limit >= self.facts.context_length:
            raise context_exceeded(self.facts.context_length, 0, limit).renamed(asked.fields)
        try:
            asked.sampling.check_vocabulary(self.facts.vocabulary)
        except SamplingError as error:
            raise Problem(400, "bad_sampling", str(error), error.param).renamed(asked.fields) from error

    async def start_turn(
        self, record: SessionRecord, asked: TurnAsked, client: Watched | None = None
    ) -> TurnFeed:
        """Start a turn on a session. `client` is the one whose disconnect ends the turn, if one's does."""
        self.listening.begun(record)
        occupant = self.occupants.enter(engine_name(record.tenant, record.name), client)
        try:
            feed = await self._start_free(record, asked, occupant)
        except BaseException:
            self.occupants.remove(occupant)
            raise
        self.occupants.started(occupant, feed)
        return feed

    async def _start_free(self, record: SessionRecord, asked: TurnAsked, occupant: Occupant) -> TurnFeed:
        """Start a turn; a turn before it whose client has disconnected makes room for it."""
        attempts = 0
        while True:
            attempts += 1
            try:
                return await self._starter.start_turn(record, asked)
            except Problem as problem:
                again = problem.code in BUSY and attempts < STARTS_MAX
                if not again or not await self.occupants.vacated(occupant):
                    raise self.sessions.explained(problem, record) from problem

    async def start_request(self, caller: Caller, asked: TurnAsked) -> list[TurnFeed]:
        """Start a one-shot request with all its choices."""
        return await self._starter.start_requests(caller.tenant, [asked])

    async def start_requests(self, caller: Caller, asked: Sequence[TurnAsked]) -> list[TurnFeed]:
        """Start one-shot requests with all their choices, or none; all are sent before any is awaited."""
        return await self._starter.start_requests(caller.tenant, asked)

    @property
    def _starter(self) -> TurnStarter:
        return TurnStarter(self.link, self.seeds, self.prompts, self.facts, self.conversations)

    def _close_hidden(self, name: str) -> None:
        """End the session of a conversation, without waiting."""
        self.link.send(wire.CloseSession(self.link.number(), name))

    def _count_found(self, how: str) -> None:
        self.metrics.conversations.labels(how).inc()

    async def flush(self) -> None:
        """Evict unleased prefixes; hidden sessions of chats are no longer found."""
        self.conversations.close_idle()
        await self.ask("flush")

    def leave(self, feed: TurnFeed, keeps: bool) -> None:
        """A turn's client disconnected: end the turn within a step, by its `on_abort`.

        A conversation that is sent whole keeps its prompt, for the client to try again.
        """
        nothing = 0 if self.conversations.left(feed) else None
        self.link.end(feed, KEEP_ALL if keeps else nothing, "the client went away")

    async def drain(self, seconds: float) -> None:
        """Wait for the turns in flight, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self.link.turns and self.supervisor.up and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.table.leave()
