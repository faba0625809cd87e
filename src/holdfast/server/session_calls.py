"""What callers do with sessions, over the link: open, find, close, fork, and each verb on one.

A call either succeeds or raises a `Problem` and has changed nothing. Turns are started by `service`. Used by
all routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from holdfast.core.turn import KEEP_ALL
from holdfast.engine.session_settings import BadSetting, check_change
from holdfast.server.answer_parts import complete_calls, shown_calls
from holdfast.server.hidden_sessions import HiddenSessions
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem, bad_field, engine_unavailable, from_refusal, told_as
from holdfast.server.link import wire
from holdfast.server.link.engine_client import Link
from holdfast.server.options import TTL_MAX
from holdfast.server.ordinary_sessions import OrdinarySessions
from holdfast.server.seeds import Seeds
from holdfast.server.served_model import ServedModel
from holdfast.server.sessions import (
    SessionRecord,
    SessionTable,
    engine_name,
    hidden_name,
    is_hidden,
    new_name,
    require_name,
)
from holdfast.server.turn_request import Input, SessionGiven
from holdfast.server.turn_writer import checked_tools

__all__ = ["SessionCalls"]

SYSTEM_SHARE = 7 / 8
"""Maximum share of the context for a session's system text, and for its tools."""

GIVE_WAY_MAX = 8
"""Hidden sessions that are closed for one session: others may take the room meanwhile."""

NEW_SESSION = SessionGiven()


class SessionCalls:
    """The sessions of all tenants, as all routes use them."""

    def __init__(
        self,
        link: Link,
        model: ServedModel,
        table: SessionTable,
        hidden: HiddenSessions,
        ordinary: OrdinarySessions,
        seeds: Seeds,
        tenant_sessions: int | None,
    ) -> None:
        """`tenant_sessions`: the limit of open sessions of a tenant, if there is one."""
        self._link = link
        self._model = model
        self._table = table
        self._hidden = hidden
        self._ordinary = ordinary
        self._seeds = seeds
        self._tenant_sessions = tenant_sessions

    async def open(
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
        if given is not None and not self._link.acquainted:
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
            seeds = self._seeds.of_session(caller.tenant, given)
            view = done.view or wire.SessionView(key, 0, None, 0)
            record = SessionRecord(caller.tenant, name, view, seeds, asked.system, metadata)
            record.tools = command.tools
            self._table.add(record)

        async def call() -> wire.Done:
            number = self._link.number()
            asked_for = msgspec.structs.replace(command, call=number)
            return await self._link.call(asked_for, number, opened, self._table.opening(caller.tenant, name))

        await self._with_room(caller.tenant, call)
        return self._found(caller.tenant, name)

    async def _with_room(self, tenant: str, make: Callable[[], Awaitable[wire.Done]]) -> wire.Done:
        """Open or fork a session; hidden ones give way where the server has no room for it."""
        for _ in range(GIVE_WAY_MAX):
            try:
                return await make()
            except Problem as problem:
                victim = self._hidden.victim(tenant) if problem.code == "too_many_sessions" else None
                if victim is None:
                    raise
                await self.give_way(victim)
        return await make()

    def _found(self, tenant: str, name: str) -> SessionRecord:
        """A session that was opened a moment ago."""
        record = self._table.get(tenant, name)
        if record is None:
            raise self._table.absence(tenant, name)
        return record

    async def _require_share(self, field: str, text: str, tenant: str) -> None:
        """Raise if the system text or the tools leave too little of the context for a conversation."""
        if not self._model.prompts.chats:
            raise bad_field(field, "this model has no chat template")
        most = int(SYSTEM_SHARE * self._model.facts.context_length)
        with told_as({"input": field}):
            tokens = await self._model.prompts.text(text, first=False, tenant=tenant)
        if len(tokens) > most:
            said = f"may have at most {most} tokens of the context's {self._model.facts.context_length}"
            raise bad_field(field, said, "context_length_exceeded")

    def _require_free(self, tenant: str, name: str) -> None:
        if self._ordinary.find(tenant, name) is not None:
            raise from_refusal("session_exists", "", "id")

    def has_room(self, tenant: str) -> bool:
        """Whether a tenant may open one more session of either kind."""
        limit = self._tenant_sessions
        return limit is None or self._table.count(tenant) + self._ordinary.count(tenant) < limit

    def require_room(self, tenant: str) -> None:
        """Raise unless a tenant may open one more session."""
        if not self.has_room(tenant):
            limit = self._tenant_sessions
            raise Problem(429, "too_many_sessions", f"this key has {limit} open sessions, its limit")

    async def known(self, tenant: str, name: str) -> SessionRecord | None:
        """A tenant's session, if it is open at any engine."""
        record = self._table.get(tenant, name)
        if record is None and await self._link.finds(engine_name(tenant, name)):
            record = self._table.get(tenant, name)
        return record

    async def find(self, tenant: str, name: str) -> SessionRecord:
        """A tenant's session, or the problem that says why there is none."""
        record = await self.known(tenant, require_name(name, "session_id"))
        told = self._model.is_known and self._link.complete  # Every engine has said what it has.
        if record is None and not told and not self._table.has_gone(tenant, name):
            raise engine_unavailable()
        return self._table.find(tenant, name) if record is None else record

    async def close(self, caller: Caller, name: str) -> None:
        """Close a session; a turn in flight is rolled back first. Idempotent."""
        record = await self.known(caller.tenant, require_name(name, "session_id"))
        if record is None and self._table.has_gone(caller.tenant, name):
            return
        await self.close_record(await self.find(caller.tenant, name) if record is None else record)

    async def give_way(self, record: SessionRecord) -> None:
        """Close a hidden session for room; the text of its turns is kept for a while."""
        try:
            turns = await self.turns(record)
        except Problem as problem:
            if problem.code not in ("session_not_found", "session_expired"):
                raise
            turns = []
        await self.close_record(record)
        self._hidden.closed.keep(record.tenant, record.name, record.metadata, turns)

    async def close_record(self, record: SessionRecord) -> None:
        """Close a session that was found."""
        key = engine_name(record.tenant, record.name)
        number = self._link.number()
        try:
            await self._link.call(wire.CloseSession(number, key), number)
        except Problem as problem:
            if problem.code not in ("session_not_found", "session_expired"):
                raise
        # It has ended on the engine; another of its name may have been opened since.
        if self._table.get(record.tenant, record.name) is record:
            self._table.remove(key, "closed")

    async def _call_on(
        self,
        record: SessionRecord,
        command: Callable[[int], wire.Command],
        heard: Callable[[wire.Done], None] | None = None,
        over: Callable[[], None] | None = None,
    ) -> wire.Done:
        """Send a command about a session."""
        number = self._link.number()
        try:
            return await self._link.call(command(number), number, heard, over)
        except Problem as problem:
            raise self.explained(problem, record) from problem

    def explained(self, problem: Problem, record: SessionRecord) -> Problem:
        """The reason why a session has ended since the caller found it."""
        if problem.code == "session_not_found":
            return self._table.absence(record.tenant, record.name)
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
            tokens = await self._model.writer().replacement(said, record, turns[0] == 1)
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
            if view is None and not (self._link.shared):
                view = wire.SessionView(done.answer, 0, None, 0)
            if view is not None and self._table.get(record.tenant, name) is None:
                seeds = self._seeds.of_session(record.tenant, given)
                metadata = dict(record.metadata)
                forked = SessionRecord(record.tenant, name, view, seeds, record.system, metadata)
                forked.tools = record.tools
                self._table.add(forked)

        async def call() -> wire.Done:
            return await self._call_on(
                record,
                lambda number: wire.Fork(number, parent, child, turns, request_id, anew=room),
                made,
                self._table.opening(record.tenant, name),
            )

        with told_as({"to_turn": "at_turn"}):
            done = await (self._with_room(record.tenant, call) if room else call())
        return self._found(record.tenant, done.answer.partition("/")[2])


def _require_settings(settings: dict[str, Any]) -> None:
    """Raise for settings of a session that cannot be."""
    ttl = settings.get("ttl")
    if ttl is not None and not 0 < ttl <= TTL_MAX:
        raise bad_field("ttl", f"must be more than 0 and at most {TTL_MAX:.0f} seconds")
    try:
        check_change(settings)
    except BadSetting as error:
        raise bad_field(error.name, error.needed) from error
