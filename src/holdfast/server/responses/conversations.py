"""Conversations: lists of items with a name, continued by responses.

A conversation is described by a hidden session without turns: its metadata holds the conversation's own, the
last response, items that were added since, and ids of items that were deleted. A response of a conversation
continues its last response; after a deletion the items are rendered anew without the deleted ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem, bad_field
from holdfast.server.responses.creation import Creation
from holdfast.server.responses.events import Spell
from holdfast.server.responses.ids import (
    CONVERSATION,
    Place,
    conversation_key,
    conversation_of,
    new_key,
    new_turn,
    response_of,
)
from holdfast.server.responses.items import REFERENCE, Item, with_ids
from holdfast.server.responses.running import Running
from holdfast.server.responses.store import ResponseStore
from holdfast.server.service import Service
from holdfast.server.sessions import SessionRecord, hidden_name
from holdfast.server.turn_request import SessionGiven

__all__ = ["Conversations"]

BYTES_MAX = 4 << 20
"""What a conversation may hold besides its responses."""


class About(msgspec.Struct, omit_defaults=True):
    """The data of a conversation besides its responses."""

    metadata: dict[str, str] = {}
    last: str | None = None
    """The id of its last response."""
    added: list[Item] = []
    """Items that came after that."""
    deleted: list[str] = []
    """Ids of items of its responses that were deleted."""


def _missing() -> Problem:
    said = "there is no such conversation, or it was deleted or is no longer kept"
    return Problem(404, "conversation_not_found", said, "conversation_id")


class Conversations:
    """The conversations of one server."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service = service
        self._store = store
        self._busy = service.hidden.busy

    # --- the conversation -----------------------------------------------------------------------------

    async def create(self, caller: Caller, items: list[Item], metadata: dict[str, str]) -> dict[str, Any]:
        """Make a conversation."""
        key = new_key(CONVERSATION)
        about = About(metadata, None, _added(items, key))
        given = SessionGiven(metadata=_checked(about))
        return self.shown(await self._store.open(caller, key, given))

    async def find(self, caller: Caller, conversation_id: str) -> SessionRecord:
        """The session that describes a conversation."""
        key = conversation_of(conversation_id)
        record = None if key is None else await self._service.sessions.known(caller.tenant, hidden_name(key))
        if record is None:
            raise _missing()
        self._service.table.use_hidden(record)
        return record

    def shown(self, record: SessionRecord) -> dict[str, Any]:
        """A conversation as clients see it."""
        return {
            "id": conversation_key(record.name[1:]),
            "object": "conversation",
            "created_at": int(record.created),
            "metadata": _about(record).metadata,
        }

    async def update(self, record: SessionRecord, metadata: dict[str, str]) -> dict[str, Any]:
        """Replace the metadata of a conversation."""
        await self._keep(record, msgspec.structs.replace(_about(record), metadata=metadata))
        return self.shown(record)

    async def delete(self, record: SessionRecord) -> None:
        """Forget a conversation; its responses stay."""
        await self._service.sessions.close_record(record)

    async def _keep(self, record: SessionRecord, about: About) -> None:
        await self._service.sessions.update(record, _checked(about))

    # --- items ----------------------------------------------------------------------------------------

    async def items(self, caller: Caller, record: SessionRecord) -> list[Item]:
        """All items of a conversation, oldest first."""
        about = _about(record)
        return [*await self._spoken(caller, about), *about.added]

    async def _spoken(self, caller: Caller, about: About) -> list[Item]:
        """The items of its responses, without those that were deleted."""
        place = None if about.last is None else response_of(about.last)
        if place is None:
            return []
        try:
            items = await self._store.items_of(caller, place)
        except Problem as problem:
            if problem.code == "previous_response_not_found":
                raise _missing() from problem
            raise
        gone = set(about.deleted)
        return [item for item in items if item["id"] not in gone]

    async def add(self, record: SessionRecord, items: list[Item]) -> list[Item]:
        """Add items to the end of a conversation."""
        about = _about(record)
        added = _added(items, record.name[1:])
        await self._keep(record, msgspec.structs.replace(about, added=[*about.added, *added]))
        return added

    async def remove(self, caller: Caller, record: SessionRecord, item_id: str) -> None:
        """Delete an item."""
        await self.item(caller, record, item_id)
        about = _about(record)
        added = [item for item in about.added if item["id"] != item_id]
        if len(added) == len(about.added):
            about = msgspec.structs.replace(about, deleted=[*about.deleted, item_id])
        await self._keep(record, msgspec.structs.replace(about, added=added))

    async def item(self, caller: Caller, record: SessionRecord, item_id: str) -> Item:
        """One item."""
        for item in await self.items(caller, record):
            if item["id"] == item_id:
                return item
        raise Problem(404, "item_not_found", "there is no such item", "item_id")

    # --- responses ------------------------------------------------------------------------------------

    async def start(self, caller: Caller, creation: Creation, spell: Spell) -> Running:
        """Start a response that continues a conversation; its items are added when it has ended."""
        assert creation.conversation is not None, "the creation names a conversation"
        record = await self.find(caller, conversation_key(creation.conversation))
        claim = (caller.tenant, record.name)
        if claim in self._busy:
            said = "another response of this conversation is in flight"
            raise Problem(409, "conversation_locked", said, "conversation")
        self._busy.add(claim)
        about = _about(record)

        async def ended(place: Place | None) -> None:
            self._busy.discard(claim)
            if place is not None:
                with suppress(Problem):
                    await self._keep(record, _advanced(_about(record), about, place))

        try:
            creation = await self._continued(caller, creation, about)
            return await self._store.start(caller, creation, spell, ended)
        except BaseException:
            self._busy.discard(claim)
            raise

    async def _continued(self, caller: Caller, creation: Creation, about: About) -> Creation:
        items = [*about.added, *creation.items]
        if about.deleted:
            history = await self._spoken(caller, about)
            return replace(creation, items=items, history=history)
        previous = None if about.last is None else response_of(about.last)
        return replace(creation, items=items, previous=previous)


def _about(record: SessionRecord) -> About:
    return msgspec.convert(record.metadata.get("conversation", {}), About)


def _checked(about: About) -> dict[str, Any]:
    """The stored data of a conversation, as a session's metadata."""
    kept = msgspec.to_builtins(about)
    if len(msgspec.msgpack.encode(kept)) > BYTES_MAX:
        raise bad_field("items", f"a conversation may hold at most {BYTES_MAX} bytes besides its responses")
    return {"conversation": kept}


def _added(items: Sequence[Item], key: str) -> list[Item]:
    """Items with ids that no other items of the conversation have."""
    for place, item in enumerate(items):
        if item["type"] == REFERENCE:
            raise bad_field(f"items[{place}].type", "a reference cannot be added", "unsupported")
    return with_ids([{**item, "id": ""} for item in items], f"{key}{new_turn()}")


def _advanced(now: About, before: About, place: Place) -> About:
    """A conversation after a response; items added or deleted meanwhile stay so."""
    said = {item["id"] for item in before.added}
    return About(
        now.metadata,
        place.response_id,
        [item for item in now.added if item["id"] not in said],
        [item_id for item_id in now.deleted if item_id not in before.deleted],
    )
