"""OpenAI's conversations: `/v1/conversations`, with their items."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from holdfast.engine.portions import in_turns
from holdfast.server.http.answers import json_answer
from holdfast.server.http.bodies import brings_body
from holdfast.server.http.problems import bad_field
from holdfast.server.responses.items import read_items
from holdfast.server.routes.access import body_of, caller_of
from holdfast.server.routes.responses import page_of, responses_of
from holdfast.server.routes.responses_body import checked_metadata
from holdfast.server.routes.schema import documented

__all__ = ["router"]

router = APIRouter(tags=["conversations"])


class ConversationBody(msgspec.Struct, kw_only=True):
    """A conversation to create."""

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] | None = None


class ConversationUpdateBody(msgspec.Struct, kw_only=True):
    """New metadata of a conversation."""

    metadata: dict[str, Any] | None


class ConversationItemsBody(msgspec.Struct, kw_only=True):
    """Items to add to a conversation."""

    items: list[dict[str, Any]]


@router.post("/v1/conversations", **documented(ConversationBody, "Create a conversation.", required=False))
async def create(request: Request) -> Response:
    _, conversations = responses_of(request)
    body = await body_of(request, ConversationBody) if brings_body(request) else ConversationBody()
    items = await in_turns(read_items(body.items or [], "items"))
    metadata = checked_metadata(body.metadata)
    return json_answer(await conversations.create(caller_of(request), items, metadata))


@router.get("/v1/conversations/{conversation_id}", **documented(None, "A conversation."))
async def retrieve(request: Request, conversation_id: str) -> Response:
    _, conversations = responses_of(request)
    return json_answer(conversations.shown(await conversations.find(caller_of(request), conversation_id)))


@router.post(
    "/v1/conversations/{conversation_id}",
    **documented(ConversationUpdateBody, "Replace the metadata of a conversation."),
)
async def update(request: Request, conversation_id: str) -> Response:
    _, conversations = responses_of(request)
    body = await body_of(request, ConversationUpdateBody)
    record = await conversations.find(caller_of(request), conversation_id)
    return json_answer(await conversations.update(record, checked_metadata(body.metadata)))


@router.delete("/v1/conversations/{conversation_id}", **documented(None, "Delete a conversation."))
async def delete(request: Request, conversation_id: str) -> Response:
    _, conversations = responses_of(request)
    await conversations.delete(await conversations.find(caller_of(request), conversation_id))
    return json_answer({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.post(
    "/v1/conversations/{conversation_id}/items",
    **documented(ConversationItemsBody, "Add items to a conversation."),
)
async def add_items(request: Request, conversation_id: str) -> Response:
    _, conversations = responses_of(request)
    body = await body_of(request, ConversationItemsBody)
    items = await in_turns(read_items(body.items, "items"))
    if not items:
        raise bad_field("items", "must hold at least one item")
    added = await conversations.add(await conversations.find(caller_of(request), conversation_id), items)
    listed = {"object": "list", "data": added, "has_more": False}
    return json_answer({**listed, "first_id": added[0]["id"], "last_id": added[-1]["id"]})


@router.get("/v1/conversations/{conversation_id}/items", **documented(None, "Items of a conversation."))
async def list_items(request: Request, conversation_id: str) -> Response:
    caller = caller_of(request)
    _, conversations = responses_of(request)
    items = await conversations.items(caller, await conversations.find(caller, conversation_id))
    return json_answer(page_of(request, items))


@router.get("/v1/conversations/{conversation_id}/items/{item_id}", **documented(None, "An item."))
async def retrieve_item(request: Request, conversation_id: str, item_id: str) -> Response:
    caller = caller_of(request)
    _, conversations = responses_of(request)
    record = await conversations.find(caller, conversation_id)
    return json_answer(await conversations.item(caller, record, item_id))


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}", **documented(None, "Delete an item."))
async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    caller = caller_of(request)
    _, conversations = responses_of(request)
    record = await conversations.find(caller, conversation_id)
    await conversations.remove(caller, record, item_id)
    return json_answer(conversations.shown(record))
