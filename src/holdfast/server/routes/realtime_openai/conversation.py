"""One connection of an OpenAI realtime client: events in, events out, on one session.

The first event is `session.created`. An invalid event gets an `error` with its `event_id` that names the
field, changes nothing, and leaves the connection open. One response at a time belongs to the conversation;
a cancelled one may be followed at once by the next. Responses with the conversation "none" run beside it.

`response.cancel`, `conversation.item.truncate`, `conversation.item.create` and `response.create` in a row
steer: the next turn is sent before the cancelled one has ended, and the engine cuts the one and begins the
other in one act (`_steer`). Where that cannot be done, the next turn is sent after the end of the cancelled
one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from starlette.types import Message
from starlette.websockets import WebSocket

from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem, bad_field, internal_error, turn_failed
from holdfast.server.limits import MESSAGES_MAX
from holdfast.server.link import wire
from holdfast.server.link.engine_client import TurnFeed, join
from holdfast.server.routes.realtime_openai.client_events import (
    AUDIO_EVENTS,
    AudioEvent,
    BufferClear,
    ClientEvent,
    ItemCreate,
    ItemDelete,
    ItemFields,
    ItemRetrieve,
    ItemTruncate,
    ResponseCancel,
    ResponseCreate,
    ResponseFields,
    SessionUpdate,
    read_event,
)
from holdfast.server.routes.realtime_openai.history import Cut
from holdfast.server.routes.realtime_openai.items import Item, ItemKind, read_item, standing
from holdfast.server.routes.realtime_openai.protocol import (
    HOLDFAST_MESSAGES,
    Misunderstood,
    is_beta,
    kind_of,
    query_of,
)
from holdfast.server.routes.realtime_openai.response import Response
from holdfast.server.routes.realtime_openai.settings import Settings
from holdfast.server.routes.realtime_openai.talk import Asked, Talk, apart
from holdfast.server.routes.realtime_outbox import Outbox, TurnPen
from holdfast.server.service import Service
from holdfast.server.sessions import new_name, require_name

__all__ = ["OpenAIConversation", "session_asked_for"]

log = logging.getLogger("holdfast.server")

MOMENT_SECONDS = 0.01
"""How long to wait for more items, or the response to them, before they are computed ahead."""

APART_MAX = 8
"""Responses outside of the conversation that may run at a time."""

_encoder = msgspec.json.Encoder()


def session_asked_for(websocket: WebSocket) -> str | None:
    """The session that a connection names in its address; raises if that is no name."""
    name = query_of(websocket).get("session_id")
    return None if name is None else require_name(name, "session_id")


class OpenAIConversation:
    """One connection."""

    def __init__(self, websocket: WebSocket, service: Service, caller: Caller, outbox: Outbox) -> None:
        named = session_asked_for(websocket)
        self.websocket = websocket
        self.service = service
        self.caller = caller
        self.outbox = outbox
        self.beta = is_beta(websocket)
        self.talk = Talk(service, caller, named or new_name("sess"), stays=named is not None)
        self.settings = Settings(self.talk.name, service.model_name, self.beta)
        self.conversation_id = new_name("conv")
        self.items: list[Item] = []
        self.active: Response | None = None
        """The last response of the conversation, until it has ended."""
        self._speaking: set[Response] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._created = 0
        self._understood = False
        self._told: set[type[AudioEvent]] = set()
        self._listening: asyncio.Task[None] | None = None
        self._cutting: asyncio.Task[None] | None = None
        """A cut that waits for the end of its response."""
        self._left = False

    # --- events ------------------------------------------------------------------------------------

    async def listen(self, first: Message | None) -> Message | None:
        """Take events until the client disconnects, or speaks the other protocol from the start: then that
        message is returned."""
        self.emit("session.created", {"session": self.settings.shown()})
        if self.beta:
            shown = {"id": self.conversation_id, "object": "realtime.conversation"}
            self.emit("conversation.created", {"conversation": shown})
        message = first
        while True:
            if message is None:
                message = await self.websocket.receive()
            if message["type"] == "websocket.disconnect":
                return None
            text = message.get("text")
            if not self._understood and text is not None and kind_of(text) in HOLDFAST_MESSAGES:
                return message
            if self.outbox.closing is None:
                await self._take(text)
                await self.outbox.room()
            message = None

    def leave(self) -> None:
        """The connection has ended: so do its responses."""
        self._left = True
        self.talk.unheard()
        for response in self._speaking:
            response.cancelled = True
            if response.feed is not None:
                self.service.leave(response.feed, keeps=False)

    async def finish(self) -> None:
        """Close the session, unless it has a name of the client's."""
        await asyncio.gather(*self._tasks)
        try:
            await self.talk.close()
        except Problem as problem:
            log.debug("session not closed: %s", problem.code)

    def emit(self, kind: str, body: dict[str, Any]) -> None:
        """Send an event."""
        self.outbox.put(_encoder.encode({"type": kind, "event_id": new_name("event"), **body}).decode())

    def _tell(self, problem: Problem, event_id: str | None) -> None:
        told = problem if isinstance(problem, Misunderstood) else Misunderstood(problem, event_id)
        self.emit("error", told.body())

    async def _take(self, text: str | None) -> None:
        event_id = None
        try:
            if text is None:
                raise Problem(400, "invalid_message", "events are JSON text, not binary")
            event = await read_event(text, self.service.reading(self.caller))
            self._understood = True
            event_id = event.event_id
            await self._hear(event)
        except Problem as problem:
            self._tell(problem, event_id)
        except Exception as error:
            log.error("a realtime event failed", exc_info=error)
            self._tell(internal_error(), event_id)

    async def _hear(self, event: ClientEvent) -> None:
        """Carry an event out. All but those that steer wait for a cut, which waits for its response's end."""
        if self._cutting is not None and not isinstance(event, ItemCreate | ResponseCreate):
            await self._cutting
        match event:
            case SessionUpdate():
                self.settings.update(event.session)
                self.emit("session.updated", {"session": self.settings.shown()})
            case ItemCreate():
                self._create_item(event)
            case ItemRetrieve():
                item = self._find(event.item_id, "item_retrieve_invalid_item_id")
                self.emit("conversation.item.retrieved", {"item": item.shown(beta=self.beta)})
            case ItemDelete():
                self.items.remove(self._find(event.item_id, "item_delete_invalid_item_id"))
                self.emit("conversation.item.deleted", {"item_id": event.item_id})
            case ItemTruncate():
                await self._truncate(event)
            case ResponseCreate():
                self._create_response(event)
            case ResponseCancel():
                self._cancel(self._cancellable(event.response_id))
            case BufferClear():
                self.emit("input_audio_buffer.cleared", {})
            case AudioEvent() if type(event) not in self._told:
                self._told.add(type(event))
                said = "this model takes and gives text: send text as conversation.item.create"
                raise Problem(400, AUDIO_EVENTS[type(event)], said, "type")

    # --- items -------------------------------------------------------------------------------------

    def _find(self, item_id: str, code: str, field: str = "item_id") -> Item:
        for item in self.items:
            if item.id == item_id:
                return item
        raise bad_field(field, "there is no such item in the conversation", code)

    def _create_item(self, event: ItemCreate) -> None:
        item = read_item(event.item, "item")
        if any(other.id == item.id for other in self.items):
            said = "an item of this id is already in the conversation"
            raise bad_field("item.id", said, "item_create_duplicate_item_id")
        if item.kind is ItemKind.RESULT and not self.talk.stays:
            calls = (other for other in standing(self.items) if other.kind is ItemKind.CALL)
            if all(call.call_id != item.call_id for call in calls):
                said = "is not the call_id of a function call in the conversation"
                raise bad_field("item.call_id", said, "item_create_invalid_call_id")
        self._require_room(item)
        place = len(self.items)
        if event.previous_item_id == "root":
            place = 0
        elif event.previous_item_id is not None:
            code = "item_create_invalid_previous_item_id"
            place = self.items.index(self._find(event.previous_item_id, code, "previous_item_id")) + 1
        self._created += 1
        item.number = self._created
        self.items.insert(place, item)
        previous = self.items[place - 1].id if place else None
        shown = {"previous_item_id": previous, "item": item.shown(beta=self.beta)}
        for kind in ("created",) if self.beta else ("added", "done"):
            self.emit(f"conversation.item.{kind}", shown)
        if self.active is None and self._listening is None and item.kind is ItemKind.MESSAGE:
            self._listening = self._spawn(self._listen())

    async def _listen(self) -> None:
        """Have the items that no response answers yet computed ahead; a problem is left to the response."""
        try:
            await asyncio.sleep(MOMENT_SECONDS)
            if self.active is None and not self._left:
                asked = Asked("", self.settings.answer, self.settings.answer)
                await self.talk.listen(list(self.items), asked)
        except Problem as problem:
            log.debug("not computed ahead: %s", problem.code)
        finally:
            self._listening = None

    def _require_room(self, item: Item) -> None:
        if len(self.items) >= MESSAGES_MAX:
            raise bad_field("item", f"a conversation may hold at most {MESSAGES_MAX} items: delete some")
        room = self.service.reading(self.caller).room
        if room is not None and sum(len(each.text) for each in (*self.items, item)) > room.text_bytes:
            most = room.text_bytes
            raise bad_field("item", f"a conversation may have at most {most} characters: delete some items")

    async def _truncate(self, event: ItemTruncate) -> None:
        code = "item_truncate_invalid_item_id"
        item = self._find(event.item_id, code)
        if not item.is_answer:
            raise bad_field("item_id", "only messages of the assistant can be cut", code)
        if event.content_index != 0:
            raise bad_field("content_index", "must be 0")
        if event.audio_end_ms and event.text_end is None and event.tokens is None:
            raise bad_field("audio_end_ms", "the answer is text: give 0, or text_end or tokens")
        speaking = next((each for each in self._speaking if item in each.items), None)
        if speaking is None:
            await self._cut_ended(item, event)
            return
        self._cancel(speaking)
        self._aim(speaking, item, event)
        self._cutting = self._spawn(self._cut_later(speaking, item, event))

    def _aim(self, response: Response, item: Item, event: ItemTruncate) -> None:
        """Note where a response that is ending is to be cut, if its last message is."""
        text = response.said(item)
        if response.turn is None or item is not response.items[-1]:
            return
        if event.tokens is not None:
            characters, tokens = response.marks.before_token(event.tokens, text)
        else:
            characters, tokens = response.marks.before_character(event.text_end or 0, text)
        if characters < len(text):
            response.cut = Cut(response.turn, item, tokens, characters)

    async def _cut_later(self, response: Response, item: Item, event: ItemTruncate) -> None:
        try:
            await response.ended.wait()
            if not response.steered:
                await self._cut_ended(self._find(item.id, "item_truncate_invalid_item_id"), event)
                return
            if response.cut is not None and response.cut.turn.answer:
                self.talk.was_cut(response.cut)
            self._tell_cut(item, event)
        except Problem as problem:
            self._tell(problem, event.event_id)
        except Exception as error:
            log.error("a realtime event failed", exc_info=error)
            self._tell(internal_error(), event.event_id)
        finally:
            self._cutting = None

    async def _cut_ended(self, item: Item, event: ItemTruncate) -> None:
        """Cut an answer that is whole."""
        end, cut = self._cut_of(item, event)
        if cut is not None:
            await self.talk.cut(cut)
        elif end < len(item.text):
            item.texts = (item.text[:end],)
        self._tell_cut(item, event)

    def _tell_cut(self, item: Item, event: ItemTruncate) -> None:
        shown = {"content_index": 0, "audio_end_ms": event.audio_end_ms, "text_end": len(item.text)}
        self.emit("conversation.item.truncated", {"item_id": item.id, **shown})

    def _cut_of(self, item: Item, event: ItemTruncate) -> tuple[int, Cut | None]:
        """How many characters stay, and the cut of the session's last turn if the item ends it."""
        turn = self.talk.turns[-1] if self.talk.turns else None
        if turn is None or not turn.answer or turn.answer[-1] != item.said or self._turn_runs:
            if event.tokens is not None:
                raise bad_field("tokens", "only the last answer is cut at a token; give text_end")
            return event.text_end or 0, None
        if event.tokens is not None:
            characters, tokens = turn.marks.before_token(event.tokens, item.text)
        else:
            characters, tokens = turn.marks.before_character(event.text_end or 0, item.text)
        whole = characters >= len(item.text)
        return characters, None if whole else Cut(turn, item, tokens, characters)

    @property
    def _turn_runs(self) -> bool:
        """Whether a response of the conversation has a turn in flight."""
        return any(each.joins and each.feed is not None for each in self._speaking)

    def _spelled(self, tokens: Sequence[int]) -> str:
        return self.service.prompts.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _placing(self, after: Item | None) -> Callable[[Item], str | None]:
        """What puts a response's output into the conversation: behind the items that it answers."""

        def place(item: Item) -> str | None:
            nonlocal after
            at = 0 if after is None else len(self.items)
            if after in self.items:
                at = self.items.index(after) + 1
            self.items.insert(at, item)
            after = item
            return self.items[at - 1].id if at else None

        return place

    # --- responses ---------------------------------------------------------------------------------

    def _create_response(self, event: ResponseCreate) -> None:
        if self.websocket.app.state.draining():
            raise Problem(503, "draining", "the server is shutting down", retry_after=5)
        fields = event.response if event.response is not None else ResponseFields()
        if fields.conversation not in (None, "auto", "none"):
            raise bad_field("response.conversation", "must be auto or none")
        joins = fields.conversation != "none"
        answer = self.settings.answer.changed(fields, "response")
        given = None if fields.input is None else self._given(fields.input)
        if joins and self.active is not None and not self.active.cancelled:
            said = f"Conversation already has an active response in progress: {self.active.name}"
            raise Problem(400, "conversation_already_has_active_response", said)
        if not joins and len(self._speaking) > APART_MAX:
            said = f"at most {APART_MAX} responses may run outside of the conversation"
            raise Problem(429, "too_many_responses", said)
        response = Response(
            self.emit,
            answer,
            fields.metadata,
            beta=self.beta,
            conversation=self.conversation_id if joins else None,
            created_after=self._created,
            spell=self._spelled,
        )
        before, self.active = (self.active, response) if joins else (None, self.active)
        self._speaking.add(response)
        asked = Asked(response.name, self.settings.answer, answer)
        steers = None if before is None or given is not None else self._steers(before)
        self._spawn(self._respond(response, asked, given, before, steers, event.event_id))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _steers(self, before: Response) -> list[Item] | None:
        """The items that a response adds to one that was cancelled and has not ended, if it can steer it.

        The conversation must have what the cancelled one was given and has said, and then these items.
        """
        keep = before.kept if before.cut is None else before.cut.tokens
        context = [*standing(before.context), *before.items]
        items = standing(self.items)
        rest = items[len(context) :]
        if before.turn is None or before.ended.is_set() or before.steering is not None or keep is None:
            return None
        if not rest or items[: len(context)] != context or len(standing(before.items)) != len(before.items):
            return None
        before.steering = asyncio.get_running_loop().create_future()
        return rest

    def _given(self, entries: list[ItemFields]) -> list[Item]:
        """The context of a response that has one of its own."""
        made: list[Item] = []
        for number, fields in enumerate(entries):
            place = f"response.input[{number}]"
            if fields.type == "item_reference":
                made.append(self._find(fields.id or "", "invalid_item_reference", f"{place}.id"))
            else:
                made.append(read_item(fields, place))
        return made

    async def _respond(
        self,
        response: Response,
        asked: Asked,
        given: list[Item] | None,
        before: Response | None,
        steers: list[Item] | None,
        event_id: str | None,
    ) -> None:
        """Make one response. A problem before it starts is an error; one after that is its end."""
        try:
            if before is not None and steers is not None:
                await self._steer(response, asked, before, steers)
            if before is not None:
                await before.ended.wait()
            if self._cutting is not None:
                await self._cutting
            await self._speak(response, asked, given)
        except Problem as problem:
            self._failed(response, problem, event_id)
        except Exception as error:
            log.error("a realtime response failed", exc_info=error)
            self._failed(response, internal_error(), event_id)
        finally:
            self._speaking.discard(response)
            if self.active is response:
                self.active = None
            response.ended.set()

    async def _steer(self, response: Response, asked: Asked, before: Response, items: list[Item]) -> None:
        """Send the turn of a response before the one that it follows has ended; the engine cuts that one.

        If it is refused, the response is made as any other when the one before it has ended.
        """
        assert before.turn is not None and before.steering is not None, "it was found to be steered"
        keep = before.kept if before.cut is None else before.cut.tokens
        assert keep is not None, "something stays of it"
        try:
            response.feed, response.turn = await self.talk.steer(before.turn, keep, items, asked)
            before.steered = True
        except Problem as problem:
            log.debug("not steered: %s", problem.code)
        finally:
            before.steering.set_result(before.steered)

    def _failed(self, response: Response, problem: Problem, event_id: str | None) -> None:
        if not response.begun:
            self._tell(problem, event_id)
            return
        response.fail(problem)
        self._withdraw(response)

    def _withdraw(self, response: Response) -> None:
        """Take the output of a response that was rolled back out of the conversation."""
        for item in response.items:
            if item in self.items:
                self.items.remove(item)
                self.emit("conversation.item.deleted", {"item_id": item.id})

    async def _speak(self, response: Response, asked: Asked, given: list[Item] | None) -> None:
        """Start a response, and send it until it ends."""
        items = [item for item in self.items if item.number <= response.created_after]
        if response.joins:
            response.place = self._placing(items[-1] if items else None)
        response.context = items
        if response.cancelled and response.feed is None:
            response.begin()
            response.drop()
            return
        if response.feed is None and given is None and response.joins:
            response.feed, response.turn = await self.talk.start(items, asked)
        elif response.feed is None:
            context = items if given is None else given
            request = apart(context, asked, self.service.facts.context_length)
            self.service.check_turn(request)
            (response.feed,) = await self.service.start_request(self.caller, request)
        feed, turn = response.feed, response.turn
        response.begin()
        if response.cancelled:
            self._cut(response, feed)
        try:
            end = await self._send(response, feed)
        except Problem:
            if turn is not None:
                self.talk.ended(turn, kept=False, answer=[])
            raise
        response.end(end)
        if turn is not None:
            kept = _kept(end)
            turn.marks = response.marks
            self.talk.ended(turn, kept=kept, answer=standing(response.items))
            if not kept:
                self._withdraw(response)

    async def _send(self, response: Response, feed: TurnFeed) -> wire.End:
        """Send a turn's output. What comes after a cut is held back, and sent if the turn finished anyway."""
        late: list[wire.Delta] = []

        def hear(delta: wire.Delta) -> bool:
            if response.cancelled or not self.outbox.has_room:
                return False
            response.hear(delta)
            return True

        feed.write_with(TurnPen(hear))
        async for delta in feed.deltas():
            if response.cancelled:
                late.append(delta)
                continue
            response.hear(delta)
            await self.outbox.room()
        end = feed.end
        assert end is not None, "the turn is over"
        if end.outcome == "failed":
            raise turn_failed(end.reason)
        steered = response.steering is not None and await response.steering
        if late and end.outcome == "finished" and not steered:
            response.hear(join(late))
        return end

    def _cancellable(self, name: str | None) -> Response:
        for response in self._speaking:
            if response.name == name or (name is None and response is self.active):
                return response
        said = "Cancellation failed: no active response found"
        raise Problem(400, "response_cancel_not_active", said, None if name is None else "response_id")

    def _cancel(self, response: Response) -> None:
        """Stop a response; it keeps the sent tokens."""
        if not response.cancelled:
            response.cancelled = True
            if response.feed is not None:
                self._cut(response, response.feed)

    def _cut(self, response: Response, feed: TurnFeed) -> None:
        """End a turn: the sent tokens stay; without any output, its input is rolled back too."""
        response.kept = response.sent if response.items else None
        self.service.link.end(feed, response.kept, "interrupt")


def _kept(end: wire.End) -> bool:
    """Whether the session has the turn."""
    return end.outcome == "finished" or (end.view is not None and end.view.known >= end.prompt_tokens)
