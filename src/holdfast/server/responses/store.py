"""Responses on hidden sessions: which session a response continues, and finding responses again.

A response continues in place if its predecessor is the last turn of its session and the session has the
same instructions and tools. After an older turn it continues a fork of the session. Otherwise (other
instructions, other tools, or the session's turn is still running) a new session renders all items of the
conversation. A session has at most one response in flight: `_busy` claims it.

The number of hidden sessions per tenant is limited; the least recently used one is closed. Its responses are
found as long as their text is kept (`closed_sessions`): the next response begins with their items.
Used by the routes of responses and conversations; everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from holdfast.core.turn import KEEP_ALL
from holdfast.server.closed_sessions import ClosedSession
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem, bad_field, told_as
from holdfast.server.link import wire
from holdfast.server.link.engine_client import TurnFeed
from holdfast.server.responses.creation import Creation
from holdfast.server.responses.events import Spell
from holdfast.server.responses.form import (
    Note,
    Shown,
    output_of,
    read_note,
    response_object,
    status_of,
    write_note,
)
from holdfast.server.responses.ids import UNSTORED, Place, item_place, kept_item_id, new_key, new_turn
from holdfast.server.responses.items import REFERENCE, Item, messages_of, with_ids
from holdfast.server.responses.running import Recent, Running
from holdfast.server.responses.tools import told_flat
from holdfast.server.service import Service
from holdfast.server.sessions import SessionRecord, hidden_name
from holdfast.server.turn_request import SessionGiven
from holdfast.server.turn_writer import checked_tools

__all__ = ["Found", "ResponseStore", "response_missing"]

NOTES_MAX = 256 << 20
"""Characters of items that are kept for a tenant's responses; the oldest sessions make room."""
HIDDEN_MAX = 1024
"""Hidden sessions of a tenant; fewer where the server allows a tenant fewer sessions."""

_PLACE = re.compile(r"^input\[([0-9]+)\]")

Ended = Callable[["Place | None"], Awaitable[None]]


def response_missing() -> Problem:
    """There is no such response, or no longer."""
    return Problem(404, "response_not_found", "there is no such response, or it was deleted", "response_id")


def previous_missing() -> Problem:
    """There is no such response to continue."""
    said = "previous_response_id: there is no such response, or it was deleted or is no longer kept"
    return Problem(404, "previous_response_not_found", said, "previous_response_id")


@dataclass(frozen=True, slots=True)
class Found:
    """A stored response that is over."""

    place: Place
    record: SessionRecord | ClosedSession
    turn: wire.NotedTurn
    note: Note

    @property
    def shown(self) -> dict[str, Any]:
        """The response as clients see it."""
        output = output_of(self.place.key, self.turn, self.note)
        return response_object(self.about, status_of(self.turn), output, self.turn)

    @property
    def about(self) -> Shown:
        """The shown part of its request."""
        return Shown(self.place.response_id, self.note, self.record.metadata.get("told", {}))


@dataclass(slots=True)
class Spot:
    """The session that a response is started on.

    It was `made` for the response, or is continued; a session made of items has no history (`anew`).
    """

    record: SessionRecord
    place: Place
    items: list[Item]
    """The items to render: only new ones where the session has a history."""
    made: bool
    anew: bool


class ResponseStore:
    """The responses of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running: dict[tuple[str, str], Running] = {}
        self._recent = Recent()
        self._busy = service.hidden.busy
        self._tasks: set[asyncio.Task[None]] = set()
        self._sizes: dict[str, Counter[str]] = {}
        """Characters that the notes of each tenant's sessions have, since this process started."""
        service.table.subscribe(self._closed)

    # --- creating -------------------------------------------------------------------------------------

    async def start(
        self, caller: Caller, creation: Creation, spell: Spell, ended: Ended | None = None
    ) -> Running:
        """Start a response that is stored. `ended` is awaited with its place before its end is told; with
        None if nothing of it stays."""
        creation = await self._resolved(caller, creation)
        with told_flat():
            spot = await self._spot(caller, creation)
            self._busy.add((caller.tenant, spot.record.name))
            try:
                feed, note = await self._begin(caller, spot, creation)
            except BaseException:
                self._busy.discard((caller.tenant, spot.record.name))
                await self._withdraw(spot)
                raise
        place, claim = spot.place, (caller.tenant, spot.record.name)
        about = Shown(place.response_id, note, creation.told)
        running = Running(caller.tenant, place, about, feed, spell)
        running.background = creation.background
        self._running[running.key] = running

        async def finish(running: Running, result: wire.NotedTurn | None) -> None:
            self._busy.discard(claim)
            stays = result is not None and result.outcome != "failed" and await self._stands(spot, place)
            running.stays = stays
            if running.background or not stays:
                self._recent.add(running)
            # Only now: whoever asks for it while its session is asked finds it running.
            self._running.pop(running.key, None)
            if not stays:
                await self._withdraw(spot)
            if ended is not None:
                await ended(place if stays else None)

        task = asyncio.ensure_future(running.run(creation.streams or creation.background, finish))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return running

    async def start_unstored(self, caller: Caller, creation: Creation) -> tuple[Place, Note, TurnFeed]:
        """Start a response that is not stored: a one-shot request with the whole conversation."""
        creation = await self._resolved(caller, creation)
        history = list(creation.history)
        if creation.previous is not None:
            history = await self.items_of(caller, creation.previous)
        place = Place(new_key(UNSTORED), new_turn())
        items = with_ids(creation.items, place.key)
        system = creation.instructions
        first = [] if system is None else [{"role": "system", "content": system}]

        async def begin(items: list[Item]) -> TurnFeed:
            asked = creation.turn(place.turn, first + messages_of(items), None)
            try:
                return (await self._service.start_requests(caller, [asked]))[0]
            except Problem as problem:
                raise _counted_from(len(first), problem) from problem

        with told_flat():
            feed, _ = await self._fitted(creation, history + items, len(history), begin)
        return place, creation.note(items, []), feed

    async def _begin(self, caller: Caller, spot: Spot, creation: Creation) -> tuple[TurnFeed, Note]:
        """Start the turn of a response on its session."""
        items = with_ids(creation.items, spot.place.key)
        mine = {item["id"] for item in items}

        def noted(kept: list[Item]) -> Note:
            return creation.note(items, [item for item in kept if item["id"] not in mine])

        async def begin(kept: list[Item]) -> TurnFeed:
            note = write_note(noted(kept))
            await self._make_space(caller, len(note))
            asked = creation.turn(spot.place.turn, messages_of(kept), note)
            feed = await self._service.start_turn(spot.record, asked)
            self._sizes.setdefault(caller.tenant, Counter())[spot.record.name] += len(note)
            return feed

        try:
            feed, kept = await self._fitted(creation, spot.items + items, len(spot.items), begin)
        except Problem as problem:
            if spot.anew or not creation.truncates or problem.code != "context_length_exceeded":
                raise
            # The session is full: go on with its latest items in another.
            assert creation.previous is not None, "a session that is full has a history"
            history = await self.items_of(caller, creation.previous)
            self._busy.discard((caller.tenant, spot.record.name))
            fresh = await self._opened(caller, creation, history)
            await self._withdraw(spot)
            spot.record, spot.place, spot.items, spot.made, spot.anew = (
                fresh.record,
                fresh.place,
                fresh.items,
                True,
                True,
            )
            self._busy.add((caller.tenant, spot.record.name))
            return await self._begin(caller, spot, creation)
        return feed, noted(kept)

    async def _fitted(
        self,
        creation: Creation,
        items: list[Item],
        before: int,
        begin: Callable[[list[Item]], Awaitable[TurnFeed]],
    ) -> tuple[TurnFeed, list[Item]]:
        """Start a turn with these items; where asked for, the oldest are dropped until they fit.

        The last `len(items) - before` are the request's own. Returns the items that are left.
        """
        if len(items) == before:
            raise bad_field("input", "must hold at least one item", "empty_turn")
        dropped, more = 0, 1
        while True:
            kept = _without_first(items, dropped)
            try:
                return await begin(kept), kept
            except Problem as problem:
                full = problem.code == "context_length_exceeded"
                if not (creation.truncates and full) or dropped == len(items) - 1:
                    raise
            dropped, more = min(dropped + more, len(items) - 1), 2 * more

    async def _spot(self, caller: Caller, creation: Creation) -> Spot:
        """The session to start a response on: its own, a continued one, a fork, or one made of items."""
        previous = creation.previous
        if previous is None:
            return await self._opened(caller, creation, list(creation.history))
        record = await self.session(caller, previous)
        if isinstance(record, ClosedSession):
            return await self._opened(caller, creation, await self.items_of(caller, previous))
        claim = (caller.tenant, record.name)
        claimed = claim not in self._busy
        self._busy.add(claim)
        try:
            turn = (await self._turn(record, previous)).turn
            same = record.metadata.get("told") == creation.told
            if same and claimed and turn.is_last and creation.in_place:
                claimed = False  # It stays claimed for this response.
                return Spot(record, Place(previous.session, new_turn()), [], made=False, anew=False)
            if same and claimed:
                return await self._forked(caller, record, turn.number)
            items = await self.items_of(caller, previous)
        finally:
            if claimed:
                self._busy.discard(claim)
        return await self._opened(caller, creation, items)

    async def _opened(self, caller: Caller, creation: Creation, history: list[Item]) -> Spot:
        key = new_key()
        if creation.tools.offered:
            checked_tools(creation.tools.offered)
        given = SessionGiven(system=creation.instructions, metadata={"told": creation.told})
        record = await self.open(caller, key, given)
        return Spot(record, Place(key, new_turn()), history, made=True, anew=True)

    async def open(self, caller: Caller, key: str, given: SessionGiven) -> SessionRecord:
        """Open a hidden session; others make room for it."""
        kept = replace(given, ttl=self._service.options.response_ttl)

        async def opened() -> SessionRecord:
            with told_as({"system": "instructions"}):
                return await self._service.sessions.open_hidden(caller, key, kept)

        return await self._with_room(caller, opened)

    async def _forked(self, caller: Caller, record: SessionRecord, turns: int) -> Spot:
        key = new_key()
        forked = await self._with_room(caller, lambda: self._service.sessions.fork_hidden(record, key, turns))
        return Spot(forked, Place(key, new_turn()), [], made=True, anew=False)

    async def _with_room(self, caller: Caller, make: Callable[[], Awaitable[SessionRecord]]) -> SessionRecord:
        """Make a hidden session; at a limit, the one that was not used for longest is closed first."""
        limit = min(HIDDEN_MAX, self._service.options.tenant_sessions or HIDDEN_MAX)
        while self._service.table.count_hidden(caller.tenant) >= limit:
            if not await self._close_oldest(caller):
                said = f"{limit} responses are in flight, the limit of this key"
                raise Problem(429, "too_many_sessions", said)
        return await make()

    async def _make_space(self, caller: Caller, size: int) -> None:
        """Close the tenant's oldest sessions until there is space for a note of that size."""
        mine = self._sizes.get(caller.tenant, Counter())
        while mine.total() + size > NOTES_MAX and await self._close_oldest(caller):
            continue

    def _closed(self, key: str, _why: str) -> None:
        tenant, _, name = key.partition("/")
        self._sizes.get(tenant, Counter()).pop(name, None)

    async def _close_oldest(self, caller: Caller) -> bool:
        """Close the hidden session that was not used for longest; False if all are in use."""
        record = self._service.hidden.oldest(caller.tenant)
        if record is not None:
            await self._service.sessions.give_way(record)
        return record is not None

    async def _stands(self, spot: Spot, place: Place) -> bool:
        """Whether the turn of a response is in its session's history."""
        with suppress(Problem):
            return bool(await self._service.sessions.turns(spot.record, [place.turn]))
        return False

    async def _withdraw(self, spot: Spot) -> None:
        """Close a session that was made for a response of which nothing stays."""
        if spot.made:
            with suppress(Problem):
                await self._service.sessions.close_record(spot.record)

    # --- finding --------------------------------------------------------------------------------------

    async def session(self, caller: Caller, place: Place) -> SessionRecord | ClosedSession:
        """The session of a response, or its kept data."""
        name = hidden_name(place.session)
        record = await self._service.sessions.known(caller.tenant, name)
        if record is not None:
            self._service.table.use_hidden(record)
            return record
        closed = self._service.hidden.closed.find(caller.tenant, name)
        if closed is None:
            raise previous_missing()
        return closed

    async def _turns(self, record: SessionRecord | ClosedSession, *names: str) -> list[wire.NotedTurn]:
        """The turns of a session that were given notes; those in `names` alone, if there are any."""
        if isinstance(record, ClosedSession):
            return [turn for turn in record.turns if not names or turn.name in names]
        return await self._service.sessions.turns(record, names)

    async def _turn(self, record: SessionRecord | ClosedSession, place: Place) -> Found:
        """A response of a session, unless it was deleted."""
        turns = await self._turns(record, place.turn)
        note = read_note(turns[0].note) if turns else None
        if note is None or place.turn in record.metadata.get("deleted", ()):
            raise previous_missing()
        return Found(place, record, turns[0], note)

    async def find(self, caller: Caller, place: Place | None) -> Found:
        """A stored response that is over; raises if there is none."""
        if place is None:
            raise response_missing()
        try:
            found = await self._turn(await self.session(caller, place), place)
        except Problem as problem:
            missing = problem.code in ("previous_response_not_found", "session_not_found", "session_expired")
            raise (response_missing() if missing else problem) from problem
        if not found.note.stored:
            raise response_missing()
        return found

    def running(self, caller: Caller, place: Place | None) -> Running | None:
        """A response in flight, or one whose events are still known."""
        if place is None:
            return None
        key = (caller.tenant, place.key)
        return self._running.get(key) or self._recent.get(key)

    async def items_of(self, caller: Caller, place: Place) -> list[Item]:
        """All items of the conversation up to a response, its output included."""
        record = await self.session(caller, place)
        await self._turn(record, place)
        items: list[Item] = []
        for turn in await self._turns(record):
            note = read_note(turn.note)
            if note is None:
                continue
            key = Place(place.session, turn.name).key
            items += [*note.history, *note.items, *output_of(key, turn, note)]
            if turn.name == place.turn:
                break
        return items

    async def _resolved(self, caller: Caller, creation: Creation) -> Creation:
        """A creation whose items hold no references."""
        if not any(item["type"] == REFERENCE for item in creation.items):
            return creation
        items, referred = [], set()
        for place, item in enumerate(creation.items):
            if item["type"] == REFERENCE:
                kept = kept_item_id(item["id"])
                if kept != item["id"] and kept in referred:
                    continue
                referred.add(kept)
                items.append(await self._referred(caller, kept, place))
            else:
                items.append(item)
        return replace(creation, items=items)

    async def _referred(self, caller: Caller, item_id: str, place: int) -> Item:
        """The item that a reference means: one of the input or output of a stored response."""
        where = item_place(item_id)
        if where is not None:
            with suppress(Problem):
                found = await self._turn(await self.session(caller, where), where)
                # The same turn has this session's key in ids even if the session was forked since.
                items = [*found.note.items, *output_of(where.key, found.turn, found.note)]
                for item in items:
                    if item["id"] == item_id:
                        return item
        said = "there is no such item, or its response is no longer kept"
        raise Problem(404, "item_not_found", f"input[{place}].id: {said}", f"input[{place}].id")

    # --- ending ---------------------------------------------------------------------------------------

    async def cancel(self, running: Running, reason: str = "cancelled") -> dict[str, Any]:
        """End a response in flight; the tokens so far stay. Returns the response as it ended."""
        if not running.ended.is_set():
            self._service.link.end(running.feed, KEEP_ALL, reason)
            await running.ended.wait()
        return running.current()

    async def close_session(self, caller: Caller, key: str) -> None:
        """Close a hidden session, if it is still open."""
        record = await self._service.sessions.known(caller.tenant, hidden_name(key))
        if record is not None:
            await self._service.sessions.close_record(record)

    async def delete(self, caller: Caller, place: Place | None) -> None:
        """Forget a response. Responses that continue it stay, and so do their sessions."""
        running = self.running(caller, place)
        if running is not None:
            await self.cancel(running)
            self._recent.drop(running.key)
        try:
            found = await self.find(caller, place)
        except Problem:
            if running is None:
                raise
            return
        deleted = [*found.record.metadata.get("deleted", ()), found.place.turn]
        record = found.record
        metadata = {**record.metadata, "deleted": deleted}
        all_deleted = {turn.name for turn in await self._turns(record)} <= set(deleted)
        if isinstance(record, ClosedSession):
            record.metadata = metadata
            if all_deleted:
                self._service.hidden.closed.forget(record)
        elif all_deleted and (caller.tenant, record.name) not in self._busy:
            await self._service.sessions.close_record(record)
        else:
            await self._service.sessions.update(record, metadata)


def _counted_from(first: int, problem: Problem) -> Problem:
    """A problem whose indices of the input count from the client's first item."""
    if not first or problem.param is None or not _PLACE.match(problem.param):
        return problem

    def counted(text: str) -> str:
        return _PLACE.sub(lambda found: f"input[{int(found[1]) - first}]", text)

    return Problem(problem.status, problem.code, counted(problem.message), counted(problem.param))


def _without_first(items: list[Item], count: int) -> list[Item]:
    """Items without the first ones, and without the results of calls among these."""
    calls = {item["call_id"] for item in items[:count] if item["type"].endswith("_call")}
    return [
        item for item in items[count:] if not (item["type"].endswith("_output") and item["call_id"] in calls)
    ]
