"""`WS /v1/realtime`: a full-duplex conversation.

The client sends `session.open`, `input.append`, `input.replace`, `input.commit`, `response.interrupt`,
`session.rewind`, `session.fork` and `session.close`; the server sends `session.opened`, `response.started`,
`response.delta`, `response.done`, `session.rewound`, `session.forked`, `session.closed` and `error`, each
with a sequence number `seq`. Input may be appended while the model generates; it belongs to the connection
until it is committed, and is computed ahead (`server/listening.py`). A commit with mode "after" waits for the
running turn; one with mode "interrupt" cuts that turn at the last token sent and cancels queued turns; one
with mode "steer" does so in one act with the start of its turn. An invalid message gets an `error` that names
its field, and the connection stays open. `session.opened` carries the number after which messages go on;
errors without a session carry none.

After a lost connection a client opens the session again with `resume_after_seq`, the last number that it
received, and the later messages are replayed; `resumed` says whether all of them were still kept.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from fastapi import APIRouter
from starlette.types import Message
from starlette.websockets import WebSocket

from holdfast.engine.portions import finish
from holdfast.server import limits
from holdfast.server.dialects.tables import REALTIME
from holdfast.server.http.body_writer import frames_of
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem, bad_field, told_as
from holdfast.server.routes.access import caller_of, service_of
from holdfast.server.routes.realtime_channel import RESUME_MAX, Channel, Job, encoded
from holdfast.server.routes.realtime_channels import Channels
from holdfast.server.routes.realtime_connection import Connection, Speaker
from holdfast.server.routes.realtime_messages import (
    AppendMessage,
    ChangeMessage,
    CloseMessage,
    CommitMessage,
    ForkMessage,
    InterruptMessage,
    OpenMessage,
    PendingInput,
    ReplaceMessage,
    RewindMessage,
    Said,
    read_message,
)
from holdfast.server.routes.realtime_openai.conversation import OpenAIConversation, session_asked_for
from holdfast.server.routes.realtime_openai.protocol import (
    OPENAI_EVENTS,
    chosen_subprotocol,
    comes_from_openai,
    kind_of,
    speaks_holdfast,
)
from holdfast.server.routes.realtime_outbox import Outbox
from holdfast.server.routes.sessions import (
    ask_turn,
    changed_settings,
    given_settings,
    kept_tokens,
    read_input,
)
from holdfast.server.service import Service
from holdfast.server.sessions import SessionRecord, require_name
from holdfast.server.turn_request import SessionGiven

__all__ = ["accept", "router"]

router = APIRouter()

CLOSE_SECONDS = 10.0


class Conversation:
    """One connection."""

    def __init__(
        self,
        websocket: WebSocket,
        service: Service,
        caller: Caller,
        channels: Channels,
        outbox: Outbox,
    ) -> None:
        self.websocket = websocket
        self.service = service
        self.caller = caller
        self.channels = channels
        self.outbox = outbox
        self.channel: Channel | None = None
        self.pending: PendingInput | None = None
        self._closing: asyncio.Task[None] | None = None

    def leave(self) -> None:
        """Let the session go; a turn in flight ends by its `on_abort`."""
        if self.channel is not None:
            if self.pending is not None and self.channel.outbox is self.outbox:
                self._take_back(self.channel)
            self.channels.detach(self.channel, self.outbox)
            self.channel = None

    async def finish(self) -> None:
        """Nothing is left: channels outlive connections."""

    async def listen(self, first: Message | None) -> Message | None:
        """Take messages until the client disconnects, or speaks OpenAI's protocol: then that message is
        returned. A connection with the subprotocol `holdfast`, or with a session, stays in this one."""
        message = first
        while True:
            if message is None:
                message = await self.websocket.receive()
            if message["type"] == "websocket.disconnect":
                return None
            text = message.get("text")
            if self._may_change and text is not None and kind_of(text) in OPENAI_EVENTS:
                return message
            if self.outbox.closing is None:
                await self._take(text)
            message = None

    @property
    def _may_change(self) -> bool:
        return self.pending is None and not speaks_holdfast(self.websocket)

    async def _take(self, text: str | None) -> None:
        self._notice_the_end()
        labels: dict[str, Any] = {}
        try:
            if text is None:
                raise Problem(400, "invalid_message", "messages are JSON text, not binary")
            reading = self.service.reading(self.caller)
            await self._hear(await read_message(text, reading), labels, reading.room)
        except Problem as problem:
            self._tell(problem, labels)

    def _notice_the_end(self) -> None:
        """Let go of a session that has ended or was taken over."""
        if self.channel is not None and self.channel.outbox is not self.outbox:
            self.channel = None

    def _tell(self, problem: Problem, labels: dict[str, Any]) -> None:
        if self.channel is not None:
            self.channel.emit_problem(problem, labels)
        else:
            self.outbox.put(encoded("error", None, {**labels, **problem.body()}))

    async def _hear(self, message: Said, labels: dict[str, Any], room: limits.Room | None) -> None:
        """Handle a message, or queue it; never waits for a turn."""
        if isinstance(message, CommitMessage) and self.pending is not None:
            self.pending.refused = True  # Until it is accepted.
        if isinstance(message, CommitMessage | InterruptMessage) and message.turn_id is not None:
            labels["turn_id"] = require_name(message.turn_id, "turn_id")
        elif isinstance(message, RewindMessage | ForkMessage) and message.request_id is not None:
            labels["request_id"] = require_name(message.request_id, "request_id")
        limits.check(message, room)
        if isinstance(message, OpenMessage):
            with told_as({"session_id": "id"}):
                await self._open(message)
            return
        channel, pending = self.channel, self.pending
        if channel is None or pending is None:
            raise Problem(409, "session_not_open", "open a session first", "type")
        match message:
            case AppendMessage():
                pending.append(message)
                self._listen(channel, pending)
            case ReplaceMessage():
                pending.replace(message)
                self._listen(channel, pending)
            case CommitMessage():
                self._commit(channel, pending, message, labels)
                pending.clear()
            case InterruptMessage():
                keep = kept_tokens(message.keep_tokens, message.keep)
                channel.hurry(lambda: channel.interrupt(message.turn_id, keep), labels)
            case RewindMessage():
                channel.submit(Job(labels, act=lambda: self._rewind(channel, message, labels)))
            case ForkMessage():
                channel.submit(Job(labels, act=lambda: self._fork(channel, message, labels)))
            case ChangeMessage():
                channel.submit(Job(labels, act=lambda: self._change(channel, message, labels)))
            case CloseMessage():
                self._closing = channel.hurry(lambda: self._close(channel), labels)

    def _listen(self, channel: Channel, pending: PendingInput) -> None:
        """Compute the appended input ahead."""
        said = pending.said()
        if said:
            self.service.listening.hear(channel.record(), finish(read_input(said)))
        else:
            self._take_back(channel)

    def _take_back(self, channel: Channel) -> None:
        """The appended input is discarded."""
        record = self.service.table.get(channel.tenant, channel.name)
        if record is not None:
            self.service.listening.hear(record, None)

    async def _close(self, channel: Channel) -> None:
        await self.service.sessions.close(self.caller, channel.name)
        await channel.ended.wait()

    async def _open(self, message: OpenMessage) -> None:
        if self._closing is not None:
            # A close that came before is still waiting for its step.
            await asyncio.wait({self._closing}, timeout=CLOSE_SECONDS)
            self._notice_the_end()
        if self.channel is not None:
            raise Problem(409, "session_open", "this connection has a session open", "type")
        service, tenant = self.service, self.caller.tenant
        fresh = bool(given_settings(message)) or (message.ttl, message.metadata, message.system) != (
            None,
            None,
            None,
        )
        record = None
        if message.id is not None:
            record = await service.sessions.known(tenant, require_name(message.id, "id"))
            if record is None and message.resume_after_seq is not None:
                record = await service.sessions.find(tenant, message.id)  # Raises why it ended.
            if record is not None and fresh:
                raise Problem(
                    409,
                    "session_exists",
                    "the session is already open: leave out ttl, metadata, system and settings",
                    "id",
                )
        elif message.resume_after_seq is not None:
            raise bad_field("resume_after_seq", "needs the id of a session")
        if record is None:
            record = await self._new_session(message)
        else:
            await self.channels.fetch(record)
        shown = await service.sessions.describe(record)
        if service.table.get(tenant, record.name) is not record:
            raise service.table.absence(tenant, record.name)  # It ended meanwhile.
        after = message.resume_after_seq
        if after is not None and after > max(RESUME_MAX, self.channels.last_number(record)):
            raise bad_field("resume_after_seq", "no message of this session has this number")
        self.pending = PendingInput(
            min(service.options.body_limit, service.prompts.room.text_bytes),
            service.facts.context_length,
            service.facts.vocabulary,
        )
        service.listening.expect(record)
        self.channel = self.channels.of(record)
        self.channel.attach(self.outbox, shown, after)

    async def _new_session(self, message: OpenMessage) -> SessionRecord:
        """Open a session, or join one that another connection of this client is opening."""
        try:
            given = SessionGiven(
                message.ttl,
                message.system,
                message.metadata or {},
                message.tools or [],
                given_settings(message),
            )
            return await self.service.sessions.open(self.caller, message.id, given)
        except Problem as problem:
            tenant, name = self.caller.tenant, message.id
            record = None if name is None else await self.service.sessions.known(tenant, name)
            if problem.code != "session_exists" or record is None:
                raise
            return record

    def _commit(
        self, channel: Channel, pending: PendingInput, message: CommitMessage, labels: dict[str, Any]
    ) -> None:
        """Queue a turn. A commit that is rejected changes nothing: its input stays pending."""
        if self.websocket.app.state.draining():
            raise Problem(503, "draining", "the server is shutting down", retry_after=5)
        said = pending.said()
        if not said:
            raise Problem(400, "empty_turn", "the turn has no input: append some first", "input")
        asked = finish(ask_turn(REALTIME, message, said))
        self.service.check_turn(asked)
        if message.keep_tokens is not None and message.mode != "steer":
            raise bad_field("keep_tokens", "needs the mode steer")
        labels["turn_id"] = asked.name
        if message.mode == "steer":
            channel.steer(Job(labels, asked=asked), message.keep_tokens)
        else:
            channel.submit(Job(labels, asked=asked), cuts=message.mode == "interrupt")

    async def _rewind(self, channel: Channel, message: RewindMessage, labels: dict[str, Any]) -> None:
        record = channel.record()
        await self.service.sessions.rewind(record, message.to_turn, message.request_id)
        channel.emit("session.rewound", {**await self.service.sessions.describe(record), **labels})

    async def _fork(self, channel: Channel, message: ForkMessage, labels: dict[str, Any]) -> None:
        forked = await self.service.sessions.fork(
            channel.record(), message.id, message.at_turn, message.request_id
        )
        shown = await self.service.sessions.describe(forked)
        channel.emit("session.forked", {**shown, "parent": channel.name, **labels})

    async def _change(self, channel: Channel, message: ChangeMessage, labels: dict[str, Any]) -> None:
        record = channel.record()
        await self.service.sessions.change(record, changed_settings(message), message.metadata)
        channel.emit("session.changed", {**await self.service.sessions.describe(record), **labels})


async def accept(websocket: WebSocket) -> None:
    """Accept a connection; the middleware has checked its origin."""
    offered = cast(list[str], websocket.scope.get("subprotocols", []))
    await websocket.accept(subprotocol=chosen_subprotocol(offered))


@router.websocket("/v1/realtime")
async def realtime(websocket: WebSocket) -> None:
    channels = websocket.app.state.channels
    assert isinstance(channels, Channels)
    service, caller = service_of(websocket), caller_of(websocket)
    outbox = Outbox(frames_of(websocket.scope))
    session_asked_for(websocket)
    await accept(websocket)

    def speaks(openai: bool) -> Speaker:
        if openai:
            return OpenAIConversation(websocket, service, caller, outbox)
        return Conversation(websocket, service, caller, channels, outbox)

    openai = comes_from_openai(websocket) and not speaks_holdfast(websocket)
    await Connection(websocket, outbox, openai, speaks).run()
