"""`WS /v1/responses`: responses over one connection, with input that steers a running response.

The client sends `response.create` with the fields of `POST /v1/responses`; the events are those of a stream.
Requests with the same `stream_id` run one after the other, others at the same time; events carry the id. A
response that is not stored can be continued only on its connection.

`response.steer` adds a user message to a response in flight. The response ends
(`response.incomplete`, reason `steered`) and keeps its output. A response with the same settings follows and
continues it. If the response ended in calls meanwhile, the message waits for the request that brings their
results (`response.steer.pending`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from holdfast.engine.portions import finish, in_turns
from holdfast.server.http.bodies import decode_large
from holdfast.server.http.body_writer import FrameWriter, frames_of
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem, bad_field
from holdfast.server.responses.creation import Creation
from holdfast.server.responses.events import Written
from holdfast.server.responses.form import STEERED
from holdfast.server.responses.ids import response_of
from holdfast.server.responses.items import Item, read_items
from holdfast.server.responses.running import Running
from holdfast.server.responses.store import ResponseStore
from holdfast.server.routes.access import caller_of, service_of
from holdfast.server.routes.realtime import accept
from holdfast.server.routes.responses import responses_of, start_stored
from holdfast.server.routes.responses_body import RESPONSE_BODY, creation_of
from holdfast.server.service import Service

__all__ = ["router"]

log = logging.getLogger("holdfast.server")

router = APIRouter()

WAITING_MAX = 64
"""Requests of a connection that run, or wait for others."""
STEERS_MAX = 8
"""Steering messages of a response, and responses whose messages wait for results of calls."""

_encoder = msgspec.json.Encoder()


class Envelope(msgspec.Struct):
    """The common fields of all messages."""

    type: str
    stream_id: str | None = None


class SteerMessage(msgspec.Struct):
    """Input for a response in flight."""

    previous_response_id: str
    input: str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Steer:
    """Input that was accepted for a response."""

    id: str
    given: str | list[dict[str, Any]]
    items: list[Item]


@dataclass(slots=True)
class Active:
    """A response in flight on the connection, and the input that is to follow it."""

    running: Running
    creation: Creation
    lane: str | None
    steers: list[Steer]


class Following(NamedTuple):
    """A response that is to follow another one, and the input of it that came meanwhile."""

    creation: Creation | None
    response_id: str
    steers: list[Steer]


NOTHING = Following(None, "", [])


class LaneSink:
    """Writes the events of a response to its connection."""

    __slots__ = ("_frames", "_lane")

    def __init__(self, frames: FrameWriter, lane: str | None) -> None:
        self._frames = frames
        self._lane = lane

    @property
    def ready(self) -> bool:
        """Whether the client keeps up."""
        return self._frames.ready

    def write(self, events: Sequence[Written]) -> None:
        """Write a message for each event."""
        for event in events:
            self._frames.write(framed(event, self._lane))


def framed(event: Written, lane: str | None) -> bytes:
    """An event as a message, with the id of its stream."""
    if lane is None:
        return event.body
    return b'%b,"stream_id":%b}' % (event.body[:-1], _encoder.encode(lane))


class Socket:
    """One connection."""

    def __init__(self, websocket: WebSocket, service: Service, caller: Caller, store: ResponseStore) -> None:
        self._websocket = websocket
        self._service = service
        self._caller = caller
        self._store = store
        self._frames = frames_of(websocket.scope)
        self._sending = asyncio.Lock()
        self._lanes: dict[str | None, asyncio.Lock] = {}
        self._users: Counter[str | None] = Counter()
        """Requests that run on each lane, or wait for it."""
        self._active: dict[str, Active] = {}
        self._held: dict[str, list[Steer]] = {}
        """Input that waits for the results of a response's calls."""
        self._unstored: set[str] = set()
        """Keys of sessions that end with the connection."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Read messages until the client disconnects."""
        try:
            while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
                content = (message.get("text") or "").encode("utf-8", "surrogatepass")
                await self._read(content or message.get("bytes") or b"")
        finally:
            await self._leave()

    async def _leave(self) -> None:
        for active in self._active.values():
            self._service.leave(active.running.feed, active.creation.options.keeps)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(active.running.ended.wait() for active in self._active.values()))
        for key in self._unstored:
            await self._store.close_session(self._caller, key)

    async def _read(self, content: bytes) -> None:
        lane = None
        try:
            reading = self._service.reading(self._caller)
            envelope = await decode_large(content, Envelope, reading)
            lane = envelope.stream_id
            if envelope.type == "response.create":
                body = await decode_large(content, RESPONSE_BODY.read, reading)
                if body.background:
                    raise bad_field("background", "is not supported over a WebSocket", "unsupported")
                if len(self._tasks) >= WAITING_MAX:
                    raise Problem(429, "queue_full", f"{WAITING_MAX} requests of this connection wait")
                self._spawn(self._create(await in_turns(creation_of(self._service, body)), lane))
            elif envelope.type == "response.steer":
                await self._steer(await decode_large(content, SteerMessage, reading))
            else:
                raise bad_field("type", "must be response.create or response.steer")
        except Problem as problem:
            await self._fail(problem, lane)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(self._until_closed(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_closed(self, work: Any) -> None:
        try:
            await work
        except (WebSocketDisconnect, RuntimeError) as error:
            log.debug("connection closed: %s", type(error).__name__)

    async def _say(self, shown: dict[str, Any], lane: str | None) -> None:
        if lane is not None:
            shown = {**shown, "stream_id": lane}
        await self._send(_encoder.encode(shown))

    async def _send(self, message: bytes) -> None:
        async with self._sending:
            await self._websocket.send({"type": "websocket.send", "text": message.decode()})

    async def _fail(self, problem: Problem, lane: str | None) -> None:
        await self._say({"type": "error", "status": problem.status, **problem.body()}, lane)

    # --- responses ------------------------------------------------------------------------------------

    async def _create(self, creation: Creation, lane: str | None) -> None:
        """Run a response, and those that its steering makes follow."""
        self._users[lane] += 1
        try:
            async with self._lanes.setdefault(lane, asyncio.Lock()):
                await self._run(replace(creation, streams=True), lane)
        finally:
            self._users[lane] -= 1
            if not self._users[lane]:
                del self._users[lane], self._lanes[lane]

    async def _run(self, creation: Creation, lane: str | None) -> None:
        following = Following(creation, "", [])
        while following.creation is not None:
            try:
                following = await self._respond(self._prepared(following.creation), lane)
            except Problem as problem:
                for steer in following.steers:
                    given = SteerMessage(following.response_id, steer.given)
                    await self._refuse(given, "successor_creation_failed", problem.message, lane, steer.id)
                if not following.steers:
                    await self._fail(problem, lane)
                return

    def _prepared(self, creation: Creation) -> Creation:
        """A creation with the input that waited for it."""
        previous = creation.previous
        if previous is None:
            return creation
        steers = self._held.pop(previous.response_id, [])
        said = [item for steer in steers for item in steer.items]
        # Results come first: they answer the calls that the conversation ended in.
        results = [item for item in creation.items if item["type"].endswith("_output")]
        others = [item for item in creation.items if not item["type"].endswith("_output")]
        in_place = creation.stored or previous.session in self._unstored
        return replace(creation, items=[*results, *said, *others], in_place=in_place)

    async def _respond(self, creation: Creation, lane: str | None) -> Following:
        """Run a response; returns its successor, if it was steered."""
        running = await start_stored(self._websocket, self._caller, creation)
        if not creation.stored:
            self._unstored.add(running.place.session)
        response_id = running.place.response_id
        active = self._active[response_id] = Active(running, creation, lane, [])
        try:
            sink = None if self._frames is None else LaneSink(self._frames, lane)
            async for events in running.read(sink=sink):
                for each in events:
                    await self._send(framed(each, lane))
        finally:
            if running.ended.is_set():
                del self._active[response_id]
        if not active.steers:
            return NOTHING
        calls = [item for item in (running.shown or {})["output"] if item["type"].endswith("_call")]
        if calls and running.stays:
            await self._hold(active, response_id, calls)
            return NOTHING
        items = [item for steer in active.steers for item in steer.items]
        if running.stays:
            return Following(_follows(creation, response_id, items), response_id, active.steers)
        again = replace(creation, items=[*creation.items, *items])
        return Following(again, response_id, active.steers)

    # --- steering -------------------------------------------------------------------------------------

    async def _steer(self, message: SteerMessage) -> None:
        """Accept input for a response in flight, and end the response where it is."""
        given, target = message.input, message.previous_response_id
        active = self._active.get(target)
        if active is None:
            await self._refuse(message, "response_not_found", "no such response is in flight here", None)
            return
        if active.creation.conversation is not None:
            said = "a response of a conversation cannot be steered"
            await self._refuse(message, "steering_not_supported", said, active.lane)
            return
        if max(len(active.steers), len(self._held)) >= STEERS_MAX:
            await self._refuse(message, "too_many_pending_steers", "too much input waits", active.lane)
            return
        try:
            items = finish(read_items(given))
            if not items or any(item["type"] != "message" or item["role"] != "user" for item in items):
                raise bad_field("input", "must be text, or messages of the role user")
        except Problem as problem:
            await self._refuse(message, "invalid_input", problem.message, active.lane)
            return
        steer = Steer(f"steer_{secrets.token_hex(8)}", given, items)
        active.steers.append(steer)
        about = {"id": steer.id, "previous_response_id": target}
        await self._say(
            {"type": "response.steer.accepted", "sequence_number": 0, "steer": about}, active.lane
        )
        if not active.running.ended.is_set():
            self._spawn(self._store.cancel(active.running, STEERED))

    async def _refuse(
        self, message: SteerMessage, code: str, said: str, lane: str | None, steer_id: str | None = None
    ) -> None:
        error = {"type": "invalid_request_error", "code": code, "message": said}
        steer = {"input": message.input, "previous_response_id": message.previous_response_id}
        if steer_id is not None:
            steer["id"] = steer_id
        shown = {"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": steer}
        await self._say(shown, lane)

    async def _hold(self, active: Active, response_id: str, calls: list[Item]) -> None:
        """Keep input until the results of a response's calls come."""
        self._held.setdefault(response_id, []).extend(active.steers)
        required = [_result(call) for call in calls]
        for steer in active.steers:
            about = {"id": steer.id, "previous_response_id": response_id}
            shown = {"type": "response.steer.pending", "sequence_number": 0, "steer": about}
            more = {"reason": "waiting_for_required_input", "required_input": required}
            await self._say({**shown, **more}, active.lane)


def _result(call: Item) -> Item:
    """The client's item for a call."""
    result = {"type": f"{call['type']}_output", "call_id": call["call_id"]}
    return {**result, "name": call["name"]} if call["type"] == "function_call" else result


def _follows(creation: Creation, response_id: str, items: list[Item]) -> Creation:
    """The response that continues a steered one, with its settings."""
    shown = {**creation.shown, "previous_response_id": response_id}
    return replace(creation, items=items, shown=shown, previous=response_of(response_id), history=())


@router.websocket("/v1/responses")
async def socket(websocket: WebSocket) -> None:
    store, _ = responses_of(websocket)
    await accept(websocket)
    try:
        await Socket(websocket, service_of(websocket), caller_of(websocket), store).run()
    except (WebSocketDisconnect, RuntimeError) as error:
        log.debug("connection closed: %s", type(error).__name__)
