"""OpenAI's responses: `/v1/responses` to create, stream, retrieve, cancel and delete them.

Unknown fields are ignored; fields that are known and not built are refused by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from holdfast.engine.portions import in_turns
from holdfast.server.http.answers import FeedAnswer, Pieces, StreamAnswer, TurnAnswer, json_answer
from holdfast.server.http.bodies import brings_body
from holdfast.server.http.body_writer import BodyWriter
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem, bad_field, turn_failed
from holdfast.server.link import wire
from holdfast.server.link.engine_client import TurnFeed
from holdfast.server.responses.conversations import Conversations
from holdfast.server.responses.creation import Creation
from holdfast.server.responses.events import Event, ResponseEvents, Spell, Written, written
from holdfast.server.responses.form import Note, Shown, output_of, response_object, result_of, status_of
from holdfast.server.responses.ids import Place, response_of
from holdfast.server.responses.items import Item
from holdfast.server.responses.running import Running
from holdfast.server.responses.store import ResponseStore
from holdfast.server.routes.access import body_of, caller_of, service_of
from holdfast.server.routes.responses_body import RESPONSE_BODY, creation_of
from holdfast.server.routes.schema import documented
from holdfast.server.service import Service

__all__ = ["error_event", "event_pieces", "page_of", "responses_of", "router", "speller", "start_stored"]

router = APIRouter(tags=["responses"])

PAGE = 20
PAGE_MAX = 100


def responses_of(request: Any) -> tuple[ResponseStore, Conversations]:
    """The responses and conversations of the server."""
    store, conversations = request.app.state.responses
    assert isinstance(store, ResponseStore) and isinstance(conversations, Conversations)
    return store, conversations


def speller(service: Service) -> Spell:
    """Spells log-probabilities as output texts have them."""

    def token(number: int, logprob: float) -> Item:
        spelled = service.prompts.tokenizer.token_bytes(number)
        text = spelled.decode("utf-8", errors="replace")
        return {"token": text, "bytes": list(spelled), "logprob": logprob}

    def spell(logprobs: list[wire.Logprob] | None) -> list[Item]:
        return [
            {
                **token(entry.token, entry.logprob),
                "top_logprobs": [token(other.token, other.logprob) for other in entry.top],
            }
            for entry in logprobs or ()
        ]

    return spell


def sse(events: Iterable[Written]) -> bytes:
    """Events as server-sent events."""
    return b"".join([b"event: %b\ndata: %b\n\n" % (kind.encode(), body) for kind, body in events])


class BodySink:
    """Writes the events of a response to the body of an answer."""

    __slots__ = ("_writer",)

    def __init__(self, writer: BodyWriter) -> None:
        self._writer = writer

    @property
    def ready(self) -> bool:
        """Whether the client keeps up."""
        return self._writer.ready

    def write(self, events: Sequence[Written]) -> None:
        """Write events in one piece."""
        self._writer.write(sse(events))


def event_pieces(running: Running, after: int | None = None) -> Pieces:
    """The events of a response, as they come."""

    async def pieces(writer: BodyWriter | None) -> AsyncIterator[bytes]:
        async for events in running.read(after, None if writer is None else BodySink(writer)):
            yield sse(events)

    return pieces


def _failure(problem: Problem) -> bytes:
    return sse([written(error_event(problem))])


def error_event(problem: Problem) -> Event:
    """A problem as the last event of a stream."""
    return {
        "type": "error",
        "sequence_number": 0,
        "code": problem.code,
        "message": problem.message,
        "param": problem.param,
    }


@router.post("/v1/responses", **documented(RESPONSE_BODY.described, "Create a response.", stream=True))
async def create(request: Request) -> Response:
    service, caller = service_of(request), caller_of(request)
    body = await body_of(request, RESPONSE_BODY.read)
    creation = await in_turns(creation_of(service, body))
    if creation.prewarms or (not creation.stored and creation.conversation is None):
        store, _ = responses_of(request)
        return _unstored(service, creation, *await store.start_unstored(caller, creation))
    running = await start_stored(request, caller, creation)

    def leave() -> None:
        if not creation.background:
            service.leave(running.feed, creation.options.keeps)

    if creation.streams:
        return StreamAnswer(event_pieces(running), leave, _failure)
    if creation.background:
        return json_answer(running.current())
    return TurnAnswer(_result(running), leave)


async def start_stored(connection: Any, caller: Caller, creation: Creation) -> Running:
    """Start a response that is stored, or belongs to a conversation."""
    store, conversations = responses_of(connection)
    spell = speller(service_of(connection))
    if creation.conversation is not None:
        return await conversations.start(caller, creation, spell)
    return await store.start(caller, creation, spell)


async def _result(running: Running) -> Response:
    return json_answer(await running.result())


def _unstored(service: Service, creation: Creation, place: Place, note: Note, feed: TurnFeed) -> Response:
    """The answer of a response that is not stored."""

    def leave() -> None:
        service.leave(feed, False)

    spell, about = speller(service), Shown(place.response_id, note, creation.told)
    if creation.streams:
        form = ResponseForm(ResponseEvents(about, spell))
        return FeedAnswer([feed], form, leave, form.failed)
    return TurnAnswer(_whole(place, about, feed, spell), leave)


class ResponseForm:
    """The events of a response that is not stored, read from its turn."""

    def __init__(self, events: ResponseEvents) -> None:
        self._events = events

    def opening(self) -> bytes:
        """The first events."""
        return sse(map(written, self._events.opening()))

    def delta(self, _place: int, delta: wire.Delta) -> bytes:
        """The events of new output."""
        return sse(self._events.written(delta))

    def end(self, _place: int, end: wire.End) -> bytes:
        """The last events."""
        error = None
        if end.outcome == "failed":
            error = {"code": "server_error", "message": turn_failed(end.reason).message}
        return sse(map(written, self._events.closing(result_of(end, self._events.note), error)[0]))

    def failed(self, problem: Problem) -> bytes:
        """The last event of a response that the engine lost."""
        error = {"code": "server_error", "message": problem.message}
        return sse(map(written, self._events.failed(error)[0]))

    def closing(self) -> bytes:
        """Nothing."""
        return b""


async def _whole(place: Place, about: Shown, feed: TurnFeed, spell: Spell) -> Response:
    end = await feed.result()
    if end.outcome == "failed":
        raise turn_failed(end.reason)
    result = result_of(end, about.note)
    output = output_of(place.key, result, about.note, spell(end.logprobs))
    return json_answer(response_object(about, status_of(result), output, result))


@router.get("/v1/responses/{response_id}", **documented(None, "A stored response.", stream=True))
async def retrieve(request: Request, response_id: str) -> Response:
    caller, place = caller_of(request), response_of(response_id)
    store, _ = responses_of(request)
    streams = _flag(request, "stream")
    after = _number(request, "starting_after", 0, (1 << 53) - 1)
    running = store.running(caller, place)
    if streams and running is not None and running.events:
        return StreamAnswer(event_pieces(running, after), _stay, _failure)
    if running is not None and not streams:
        return json_answer(running.current())
    if running is not None:
        await running.ended.wait()
        events = [{"type": f"response.{_kind(running.current())}", "response": running.current()}]
        return _replayed(events, after)
    found = await store.find(caller, place)
    if not streams:
        return json_answer(found.shown)
    events = ResponseEvents(found.about, speller(service_of(request))).replayed(found.turn)
    return _replayed(events, after)


def _kind(shown: dict[str, Any]) -> str:
    return "incomplete" if shown["status"] == "cancelled" else str(shown["status"])


def _replayed(events: list[Event], after: int | None) -> Response:
    """Events of a response that is over. Their pieces may have been smaller when they were first sent, so a
    client that has read some gets the last one, with all of the response."""
    if after is not None:
        events = [{**events[-1], "sequence_number": after + 1}]

    async def pieces(_writer: BodyWriter | None) -> AsyncIterator[bytes]:
        for shown in events:
            yield sse([written({"sequence_number": 0, **shown})])

    return StreamAnswer(pieces, _stay, _failure)


def _stay() -> None:
    """Nothing ends when a reader leaves."""


def _flag(request: Request, name: str) -> bool:
    given = request.query_params.get(name)
    if given not in (None, "true", "false"):
        raise bad_field(name, "must be true or false")
    return given == "true"


def _number(request: Request, name: str, least: int, most: int) -> int | None:
    given = request.query_params.get(name)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 20 and least <= int(given) <= most):
        raise bad_field(name, f"must be an integer from {least} to {most}")
    return int(given)


@router.delete("/v1/responses/{response_id}", **documented(None, "Delete a response."))
async def delete(request: Request, response_id: str) -> Response:
    store, _ = responses_of(request)
    await store.delete(caller_of(request), response_of(response_id))
    return json_answer({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel", **documented(None, "Cancel a response in flight."))
async def cancel(request: Request, response_id: str) -> Response:
    caller, place = caller_of(request), response_of(response_id)
    if brings_body(request):
        await request.body()
    store, _ = responses_of(request)
    running = store.running(caller, place)
    if running is not None:
        return json_answer(await store.cancel(running))
    return json_answer((await store.find(caller, place)).shown)


@router.get("/v1/responses/{response_id}/input_items", **documented(None, "The input of a response."))
async def input_items(request: Request, response_id: str) -> Response:
    caller, place = caller_of(request), response_of(response_id)
    store, _ = responses_of(request)
    running = store.running(caller, place)
    items = running.about.note.items if running is not None else (await store.find(caller, place)).note.items
    return json_answer(page_of(request, items))


def page_of(request: Request, items: Sequence[Item]) -> dict[str, Any]:
    """A page of items, as OpenAI lists them."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_field("order", "must be asc or desc")
    limit = _number(request, "limit", 1, PAGE_MAX) or PAGE
    ordered = list(items) if order == "asc" else list(reversed(items))
    after = request.query_params.get("after")
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise bad_field("after", "there is no such item")
        ordered = ordered[places[0] + 1 :]
    data = ordered[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(ordered) > limit,
    }
