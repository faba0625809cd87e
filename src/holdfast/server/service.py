"""Sessions and turns of a caller, over the link to the engine: what all routes share.

A route translates a request of its dialect into one of these calls and formats the result. A call either
succeeds or raises a `Problem` and has changed nothing.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import msgspec

from holdfast.core.turn import KEEP_ALL
from holdfast.engine.sampling import SamplingError
from holdfast.engine.session_settings import BadSetting, check_change
from holdfast.server.answer_parts import complete_calls, shown_calls
from holdfast.server.found_sessions import Conversations
from holdfast.server.hidden_sessions import HiddenSessions
from holdfast.server.http.bodies import Reading
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import (
    Problem,
    bad_field,
    context_exceeded,
    engine_unavailable,
    from_refusal,
    told_as,
)
from holdfast.server.link import wire
from holdfast.server.link.engine_client import EngineClient, Link, TurnFeed
from holdfast.server.link.engine_set import EngineSet
from holdfast.server.link.supervisor import Progress, Supervisor
from holdfast.server.listening import Listening
from holdfast.server.occupants import Occupant, Occupants, Watched
from holdfast.server.options import TTL_MAX, ServerOptions
from holdfast.server.ordinary_sessions import OrdinarySessions
from holdfast.server.prompts import Prompts
from holdfast.server.seeds import Seeds
from holdfast.server.sessions import (
    SessionRecord,
    SessionTable,
    engine_name,
    hidden_name,
    is_hidden,
    new_name,
    require_name,
    shown_name,
)
from holdfast.server.telemetry.metrics import Metrics
from holdfast.server.telemetry.tracing import open_traces
from holdfast.server.telemetry.turn_log import log_turn
from holdfast.server.turn_request import Input, SessionGiven, TurnAsked
from holdfast.server.turn_starter import TurnStarter
from holdfast.server.turn_writer import TurnWriter, checked_tools

__all__ = ["Service"]

SYSTEM_SHARE = 7 / 8
"""Maximum share of the context for a session's system text, and for its tools."""

BUSY = ("session_busy", "turn_exists")
"""Refusals because of another turn in flight."""

STARTS_MAX = 5
"""How often a turn is started while the clients of turns before it have disconnected."""

GIVE_WAY_MAX = 8
"""Hidden sessions that are closed for one session: others may take the room meanwhile."""

NEW_SESSION = SessionGiven()


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
        self.supervisor: Supervisor | EngineSet
        if remote is None:
            self.link = client = EngineClient(self)
            self.supervisor = Supervisor(client, configure, options.hang_seconds, progress)
        else:
            self.engines = EngineSet(options.engine, remote, options.link_seconds, self)
            self.link = self.supervisor = self.engines
        self._prompts: Prompts | None = None
        self.metrics = metrics
        self.traces = open_traces()
        self.model_name = model_name
        self.hidden = HiddenSessions(self.table)
        self.ordinary = OrdinarySessions()
        self.conversations = Conversations(options.found_sessions, self._close_hidden, self._count_found)
        self.listening = Listening(self.link, self._writer)
        self.occupants = Occupants(lambda feed: self.leave(feed, feed.keeps))
        self.metrics.found_sessions.set_function(lambda: len(self.conversations))
        self.seeds = Seeds(options.seed)
        self.created = int(time.time())

    @property
    def facts(self) -> wire.ModelFacts:
        """Facts about the served model."""
        if self.supervisor.facts is None:
            raise engine_unavailable()
        return self.supervisor.facts

    @property
    def prompts(self) -> Prompts:
        """The prompt writer of the served model."""
        if self._prompts is None:
            raise engine_unavailable()
        return self._prompts

    def reading(self, caller: Caller) -> Reading:
        """How bodies of a caller are read; large ones only after the model is loaded."""

        async def read_large(content: bytes) -> bytes:
            return await self.prompts.read_body(content, caller.tenant)

        room = None if self._prompts is None else self._prompts.room
        return Reading(self.options.body_limit, room, read_large)

    def close(self) -> None:
        """Close traces and text processes."""
        self.traces.close()
        if self._prompts is not None:
            self._prompts.close()

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
        if self._prompts is None:
            facts = ready.facts
            self._prompts = Prompts(
                ready.vocabulary, facts.context_length, calls=facts.calls, reasoning=facts.reasoning
            )
            self._prompts.warm_up()
            self.model_name = self.model_name or shown_name(facts.path)
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

    # --- sessions ---------------------------------------------------------------------------------

    async def open_session(
        self, caller: Caller, name: str | None, asked: SessionGiven = NEW_SESSION
    ) -> SessionRecord:
        """Open a session for a caller."""
        given, name = name, require_name(name, "id") if name is not None else new_name("s")
        return await self._open(caller, given, name, asked)

    async def open_hidden(self, caller: Caller, key: str, asked: SessionGiven) -> SessionRecord:
        """Open a session that a dialect keeps for a caller; it does not count among the caller's own."""
        return await self._open(caller, None, hidden_name(key), asked)

    async def _open(self, caller: Caller, given: str | None, name: str, asked: SessionGiven) -> SessionRecord:
        _require_settings({"ttl": asked.ttl, **asked.settings})
        if asked.system is not None:
            await self._require_share("system", asked.system, caller.tenant)
        if asked.tools:
            checked_tools(asked.tools)
            written = msgspec.json.encode(asked.tools).decode()
            await self._require_share("tools", written, caller.tenant)
        if not is_hidden(name):
            self.require_room(caller.tenant)
            self._require_free(caller.tenant, name)
        if given is not None and not self.link.acquainted:
            raise engine_unavailable()  # An engine that was never reached may have one of that name.
        key = engine_name(caller.tenant, name)
        metadata = dict(asked.metadata)
        command = wire.OpenSession(
            0,
            key,
            caller.tenant,
            asked.ttl,
            asked.system,
            metadata,
            list(asked.tools),
            dict(asked.settings),
        )

        def opened(done: wire.Done) -> None:
            seeds = self.seeds.of_session(caller.tenant, given)
            view = done.view or wire.SessionView(key, 0, None, 0)
            record = SessionRecord(caller.tenant, name, view, seeds, asked.system, metadata)
            record.tools = command.tools
            self.table.add(record)

        async def call() -> wire.Done:
            number = self.link.number()
            asked_for = msgspec.structs.replace(command, call=number)
            return await self.link.call(asked_for, number, opened, self.table.opening(caller.tenant, name))

        await self._with_room(caller.tenant, call)
        return self._found(caller.tenant, name)

    async def _with_room(self, tenant: str, make: Callable[[], Awaitable[wire.Done]]) -> wire.Done:
        """Open or fork a session; hidden ones give way where the server has no room for it."""
        for _ in range(GIVE_WAY_MAX):
            try:
                return await make()
            except Problem as problem:
                victim = self.hidden.victim(tenant) if problem.code == "too_many_sessions" else None
                if victim is None:
                    raise
                await self.give_way(victim)
        return await make()

    def _found(self, tenant: str, name: str) -> SessionRecord:
        """A session that was opened a moment ago."""
        record = self.table.get(tenant, name)
        if record is None:
            raise self.table.absence(tenant, name)
        return record

    async def _require_share(self, field: str, text: str, tenant: str) -> None:
        """Raise if the system text or the tools leave too little of the context for a conversation."""
        if not self.prompts.chats:
            raise bad_field(field, "this model has no chat template")
        most = int(SYSTEM_SHARE * self.facts.context_length)
        with told_as({"input": field}):
            tokens = await self.prompts.text(text, first=False, tenant=tenant)
        if len(tokens) > most:
            said = f"may have at most {most} tokens of the context's {self.facts.context_length}"
            raise bad_field(field, said, "context_length_exceeded")

    def _require_free(self, tenant: str, name: str) -> None:
        if self.ordinary.find(tenant, name) is not None:
            raise from_refusal("session_exists", "", "id")

    def has_room(self, tenant: str) -> bool:
        """Whether a tenant may open one more session of either kind."""
        limit = self.options.tenant_sessions
        return limit is None or self.table.count(tenant) + self.ordinary.count(tenant) < limit

    def require_room(self, tenant: str) -> None:
        """Raise unless a tenant may open one more session."""
        if not self.has_room(tenant):
            limit = self.options.tenant_sessions
            raise Problem(429, "too_many_sessions", f"this key has {limit} open sessions, its limit")

    async def known(self, tenant: str, name: str) -> SessionRecord | None:
        """A tenant's session, if it is open at any engine."""
        record = self.table.get(tenant, name)
        if record is None and await self.link.finds(engine_name(tenant, name)):
            record = self.table.get(tenant, name)
        return record

    async def find(self, tenant: str, name: str) -> SessionRecord:
        """A tenant's session, or the problem that says why there is none."""
        record = await self.known(tenant, require_name(name, "session_id"))
        told = self._prompts is not None and self.link.complete  # Every engine has said what it has.
        if record is None and not told and not self.table.has_gone(tenant, name):
            raise engine_unavailable()
        return self.table.find(tenant, name) if record is None else record

    async def close_session(self, caller: Caller, name: str) -> None:
        """Close a session; a turn in flight is rolled back first. Idempotent."""
        record = await self.known(caller.tenant, require_name(name, "session_id"))
        if record is None and self.table.has_gone(caller.tenant, name):
            return
        await self.close_record(await self.find(caller.tenant, name) if record is None else record)

    async def give_way(self, record: SessionRecord) -> None:
        """Close a hidden session for room; what its turns said is kept for a while."""
        try:
            turns = await self.turns(record)
        except Problem as problem:
            if problem.code not in ("session_not_found", "session_expired"):
                raise
            turns = []
        await self.close_record(record)
        self.hidden.closed.keep(record.tenant, record.name, record.metadata, turns)

    async def close_record(self, record: SessionRecord) -> None:
        """Close a session that was found."""
        key = engine_name(record.tenant, record.name)
        number = self.link.number()
        try:
            await self.link.call(wire.CloseSession(number, key), number)
        except Problem as problem:
            if problem.code not in ("session_not_found", "session_expired"):
                raise
        # It has ended on the engine; another of its name may have been opened since.
        if self.table.get(record.tenant, record.name) is record:
            self.table.remove(key, "closed")

    async def _call_on(
        self,
        record: SessionRecord,
        command: Callable[[int], wire.Command],
        heard: Callable[[wire.Done], None] | None = None,
        over: Callable[[], None] | None = None,
    ) -> wire.Done:
        """Send a command about a session."""
        number = self.link.number()
        try:
            return await self.link.call(command(number), number, heard, over)
        except Problem as problem:
            raise self._explained(problem, record) from problem

    def _explained(self, problem: Problem, record: SessionRecord) -> Problem:
        """The reason why a session has ended since the caller found it."""
        if problem.code == "session_not_found":
            return self.table.absence(record.tenant, record.name)
        return problem

    async def describe(self, record: SessionRecord) -> dict[str, Any]:
        """A session as clients see it."""
        key = engine_name(record.tenant, record.name)
        done = await self._call_on(record, lambda number: wire.Ask(number, wire.Question.SESSION, key))
        return self.shown(done.answer, record)

    def shown(self, answer: dict[str, Any], record: SessionRecord) -> dict[str, Any]:
        """The engine's report with the caller's name and metadata."""
        answer.pop("age_seconds", None)
        answer["idle_seconds"] = round(answer["idle_seconds"], 3)
        return {
            **answer,
            "id": record.name,
            "created": int(record.created),
            "metadata": record.metadata,
            "tool_calls": shown_calls(complete_calls(record.view.calls)),
        }

    async def interrupt(
        self, record: SessionRecord, turn: str | None, keep: int | None, request_id: str | None = None
    ) -> None:
        """Interrupt a session's turn: `keep` tokens stay, None for none, KEEP_ALL for all."""
        if keep is not None and keep < KEEP_ALL:
            raise bad_field("keep_tokens", "must not be negative")
        key = engine_name(record.tenant, record.name)
        await self._call_on(record, lambda number: wire.Interrupt(number, key, turn, keep, request_id))

    async def rewind(self, record: SessionRecord, turns: int, request_id: str | None = None) -> None:
        """Rewind so that `turns` turns remain."""
        key = engine_name(record.tenant, record.name)
        await self._call_on(record, lambda number: wire.Rewind(number, key, turns, request_id))

    async def compact(
        self, record: SessionRecord, turns: tuple[int, int], said: Input, request_id: str | None = None
    ) -> int:
        """Replace a range of turns; answers how many tokens the next turn computes again."""
        field = "text" if said.messages is None else "messages"
        key, turn = engine_name(record.tenant, record.name), new_name("c")
        with told_as({"input": field, "max_tokens": field}):
            tokens = await self._writer().replacement(said, record, turns[0] == 1)
            done = await self._call_on(
                record, lambda number: wire.Compact(number, key, *turns, tokens, turn, request_id)
            )
        return int(done.answer)

    async def move(self, record: SessionRecord, to: str | None) -> bool:
        """Start moving an idle session's memory to a tier, or back to the device; whether it started."""
        key = engine_name(record.tenant, record.name)
        return bool((await self._call_on(record, lambda number: wire.MoveSession(number, key, to))).answer)

    async def turns(self, record: SessionRecord, names: Sequence[str] = ()) -> list[wire.NotedTurn]:
        """The turns of a session that were given notes; those in `names` alone, if there are any."""
        key = engine_name(record.tenant, record.name)
        question = wire.Question.TURNS
        done = await self._call_on(record, lambda number: wire.Ask(number, question, key, list(names)))
        return msgspec.convert(done.answer, list[wire.NotedTurn])

    async def update(self, record: SessionRecord, metadata: dict[str, Any]) -> None:
        """Replace a session's metadata."""
        key = engine_name(record.tenant, record.name)

        def updated(_: wire.Done) -> None:
            record.metadata = metadata

        await self._call_on(record, lambda number: wire.UpdateSession(number, key, metadata), updated)

    async def change(
        self, record: SessionRecord, settings: dict[str, Any], metadata: dict[str, Any] | None = None
    ) -> None:
        """Change how a session is kept, as far as it is given, and replace its metadata, if they are."""
        _require_settings(settings)
        key = engine_name(record.tenant, record.name)

        def changed(_: wire.Done) -> None:
            record.metadata = record.metadata if metadata is None else metadata

        await self._call_on(
            record, lambda number: wire.UpdateSession(number, key, metadata, settings), changed
        )

    async def fork_hidden(self, record: SessionRecord, key: str, turns: int) -> SessionRecord:
        """Fork a session of a dialect's own into another, at the end of turn `turns`."""
        return await self._fork(record, None, hidden_name(key), turns, None, True)

    async def fork(
        self, record: SessionRecord, name: str | None, turns: int | None, request_id: str | None = None
    ) -> SessionRecord:
        """Fork a session: a second one that shares its history."""
        given, name = name, require_name(name, "id") if name is not None else new_name("s")
        # A repeated request gets the session that it made before, even at the limit.
        room = self.has_room(record.tenant)
        if request_id is None:
            self.require_room(record.tenant)
        self._require_free(record.tenant, name)
        return await self._fork(record, given, name, turns, request_id, room)

    async def _fork(
        self,
        record: SessionRecord,
        given: str | None,
        name: str,
        turns: int | None,
        request_id: str | None,
        room: bool,
    ) -> SessionRecord:
        parent, child = engine_name(record.tenant, record.name), engine_name(record.tenant, name)

        def made(done: wire.Done) -> None:
            """Add the new session; a repeated request finds it already there, or at another engine."""
            name = done.answer.partition("/")[2]
            view = done.view
            if view is None and not (self.engines is not None and self.engines.shared):
                view = wire.SessionView(done.answer, 0, None, 0)
            if view is not None and self.table.get(record.tenant, name) is None:
                seeds = self.seeds.of_session(record.tenant, given)
                metadata = dict(record.metadata)
                forked = SessionRecord(record.tenant, name, view, seeds, record.system, metadata)
                forked.tools = record.tools
                self.table.add(forked)

        async def call() -> wire.Done:
            return await self._call_on(
                record,
                lambda number: wire.Fork(number, parent, child, turns, request_id, anew=room),
                made,
                self.table.opening(record.tenant, name),
            )

        with told_as({"to_turn": "at_turn"}):
            done = await (self._with_room(record.tenant, call) if room else call())
        return self._found(record.tenant, done.answer.partition("/")[2])

    # --- turns ------------------------------------------------------------------------------------

    def check_turn(self, asked: TurnAsked) -> None:
        """Raise for what is invalid independent of the session's state."""
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
                    raise self._explained(problem, record) from problem

    async def start_request(self, caller: Caller, asked: TurnAsked) -> list[TurnFeed]:
        """Start a one-shot request with all its choices."""
        return await self._starter.start_requests(caller.tenant, [asked])

    async def start_requests(self, caller: Caller, asked: Sequence[TurnAsked]) -> list[TurnFeed]:
        """Start one-shot requests with all their choices, or none; all are sent before any is awaited."""
        return await self._starter.start_requests(caller.tenant, asked)

    def _writer(self) -> TurnWriter:
        return TurnWriter(self.prompts, self.facts)

    @property
    def _starter(self) -> TurnStarter:
        return TurnStarter(self.link, self.seeds, self.prompts, self.facts, self.conversations)

    def _close_hidden(self, name: str) -> None:
        """End the session of a conversation; nobody waits for that."""
        self.link.send(wire.CloseSession(self.link.number(), name))

    def _count_found(self, how: str) -> None:
        self.metrics.conversations.labels(how).inc()

    async def flush(self) -> None:
        """Evict prefixes that nobody uses; conversations that are sent whole are found no more."""
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


def _require_settings(settings: dict[str, Any]) -> None:
    """Raise for settings of a session that cannot be."""
    ttl = settings.get("ttl")
    if ttl is not None and not 0 < ttl <= TTL_MAX:
        raise bad_field("ttl", f"must be more than 0 and at most {TTL_MAX:.0f} seconds")
    try:
        check_change(settings)
    except BadSetting as error:
        raise bad_field(error.name, error.needed) from error
