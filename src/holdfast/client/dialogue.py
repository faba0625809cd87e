"""The realtime protocol without I/O: what to send, what was received, what to send again.

The server numbers its messages; `last_seq` is the last number received. If the opening message carries it,
the server replays all later messages. Messages that the server has not answered yet (by the start of
their turn, or by the event of a rewind or fork) are `pending`: after a reconnect they are sent again under
the same id. Made by the sessions of both clients; `realtime` moves it over a connection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.client import calls
from holdfast.client.errors import BadArgument, ProtocolError, RequestFailed, error_from_body
from holdfast.client.values import (
    Body,
    Keep,
    Said,
    ToolCall,
    ToolOutput,
    TurnEventKind,
    TurnFields,
    TurnResult,
)

__all__ = ["Dialogue", "RealtimeEvent"]

SPOKEN = frozenset(f"response.{kind}" for kind in TurnEventKind)
"""The types of the events of a turn while it is generated."""


@dataclass(frozen=True, slots=True)
class RealtimeEvent:
    """Something that the server says: its type, its number, and all of its fields in `body`."""

    type: str
    seq: int | None
    body: Body

    @property
    def turn_id(self) -> str | None:
        """The turn that it is about."""
        turn_id = self.body.get("turn_id")
        return None if turn_id is None else str(turn_id)

    @property
    def text(self) -> str:
        """The words of a `response.delta`, or of a whole turn that is done."""
        return str(self.body.get("text", "")) if self.type in ("response.delta", "response.done") else ""

    @property
    def reasoning(self) -> str:
        """The reasoning: of `response.reasoning.delta`, or of a whole finished turn."""
        name = "text" if self.type == "response.reasoning.delta" else "reasoning"
        return str(self.body.get(name) or "")

    @property
    def tool_call(self) -> ToolCall | None:
        """The call of `response.tool_call` (its arguments are still empty) or `response.tool_call.done`."""
        calls = ("response.tool_call", "response.tool_call.done")
        return ToolCall.from_body(self.body) if self.type in calls else None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of those words."""
        return tuple(self.body.get("token_ids", ()))

    @property
    def result(self) -> TurnResult:
        """How a turn ended: of `response.done`."""
        return TurnResult.from_body(self.body)

    @property
    def error(self) -> RequestFailed | None:
        """What went wrong: of `error`; None of everything else."""
        return error_from_body(self.body.get("error") or {}) if self.type == "error" else None


class Dialogue:
    """One side of a conversation over a connection that may be dropped and come back."""

    __slots__ = ("_repeated", "_tokens", "heard", "last_seq", "pending", "session_id", "turn_id")

    def __init__(self, session_id: str, last_seq: int | None = None) -> None:
        self.session_id = session_id
        self.last_seq = last_seq
        self.pending: list[Body] = []
        self._repeated: set[str] = set()
        """Rewinds and forks that were said more than once, and may be answered so."""
        self.turn_id: str | None = None
        """The turn that speaks, or spoke last."""
        self.heard = 0
        """How many tokens of that turn have arrived, without those of a tool call that is not done."""
        self._tokens = 0
        """How many have arrived in all."""

    def opening(self) -> Body:
        """The first message of a connection."""
        opening: Body = {"type": "session.open", "id": self.session_id}
        if self.last_seq is not None:
            opening["resume_after_seq"] = self.last_seq
        return opening

    def catching_up(self) -> list[Body]:
        """The first messages of a new connection: the opening, and unanswered messages."""
        self._repeated |= {message["request_id"] for message in self.pending if "request_id" in message}
        return [self.opening(), *self.pending]

    def is_pending(self, message: Body) -> bool:
        """Whether a new connection says this very message again by itself."""
        return any(message is waiting for waiting in self.pending)

    def append(self, said: Said) -> Body:
        """More input of the turn to come."""
        given = calls.input_of(said)
        words: Body = {"text": given}
        if not isinstance(given, str):
            words = {"messages" if given and isinstance(given[0], dict) else "token_ids": given}
        message: Body = {"type": "input.append", **words}
        self._say(message)
        return message

    def replace(self, start: int, text: str) -> Body:
        """Replace the appended text from a character on."""
        message: Body = {"type": "input.replace", "start": start, "text": text}
        self._say(message)
        return message

    def tool_results(self, results: Mapping[str, ToolOutput]) -> Body:
        """The results of tool calls as input of the turn to come."""
        return self.append(calls.tool_messages(results))

    def commit(
        self,
        turn_id: str | None,
        mode: Literal["after", "interrupt", "steer"],
        fields: TurnFields,
        keep_tokens: int | None = None,
    ) -> Body:
        """Commit the appended input as a turn, after the running turn or cutting it."""
        options, sampling = calls.turn_fields(fields)
        message: Body = {"type": "input.commit", "turn_id": turn_id or calls.new_id("t"), "mode": mode}
        if keep_tokens is not None:
            message["keep_tokens"] = keep_tokens
        message |= options
        if sampling:
            message["sampling"] = sampling
        self._say(message)
        return message

    def _say(self, message: Body) -> None:
        """Queue a message and repeat it until it is answered; raises if it cannot be sent."""
        calls.written(message)
        self.pending.append(message)

    def interrupt(self, keep: Keep, turn_id: str | None) -> Body:
        """Cut into a turn; without a name, into the one that speaks."""
        named = turn_id or self.turn_id
        if named is None:
            raise BadArgument("no turn has started: there is nothing to interrupt")
        heard = self.heard if named == self.turn_id else None
        return {"type": "response.interrupt", "turn_id": named, **calls.keep_fields(keep, heard)}

    def rewind(self, turns: int) -> Body:
        """Go back so that so many turns remain."""
        message: Body = {"type": "session.rewind", "to_turn": turns, "request_id": calls.new_id("r")}
        self._say(message)
        return message

    def fork(self, child_id: str | None, at_turn: int | None) -> Body:
        """A second session, from here or from the end of an earlier turn."""
        message: Body = {"type": "session.fork", "id": child_id or calls.new_id("s")}
        if at_turn is not None:
            message["at_turn"] = at_turn
        message["request_id"] = calls.new_id("r")
        self._say(message)
        return message

    def close(self) -> Body:
        """End the session for good."""
        return {"type": "session.close"}

    def hear(self, message: str | bytes) -> RealtimeEvent | None:
        """An event, unless it was heard before."""
        try:
            body: Any = json.loads(message)
            event = RealtimeEvent(str(body["type"]), body.get("seq"), body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(f"cannot read a realtime message: {error!r}") from error
        if event.seq is not None and event.type != "session.opened":
            if self.last_seq is not None and event.seq <= self.last_seq:
                return None
            self.last_seq = event.seq
        request_id = body.get("request_id")
        if request_id in self._repeated and not self._waits_for(request_id):
            return None
        self._note(event)
        return event

    def _note(self, event: RealtimeEvent) -> None:
        if event.type == "session.opened":
            self.session_id = str(event.body.get("id", self.session_id))
            if self.last_seq is None:
                self.last_seq = event.seq
        elif event.type == "response.started":
            self.turn_id, self.heard, self._tokens = event.turn_id, 0, 0
            self._answered(event.turn_id)
        elif event.type in SPOKEN and event.turn_id == self.turn_id and event.token_ids:
            self._tokens += len(event.token_ids)
            self.heard = int(event.body.get("settled_tokens", self._tokens))
        elif event.type in ("error", "response.done"):
            self._answered(event.turn_id)
        request_id = event.body.get("request_id")
        self.pending = [
            each for each in self.pending if not request_id or each.get("request_id") != request_id
        ]

    def _waits_for(self, request_id: str) -> bool:
        return any(message.get("request_id") == request_id for message in self.pending)

    def _answered(self, turn_id: str | None) -> None:
        """The server has a turn: its commit and the input appended before it are no longer pending."""
        for place, message in enumerate(self.pending):
            if message["type"] == "input.commit" and message["turn_id"] == turn_id:
                before = [each for each in self.pending[:place] if "request_id" in each]
                self.pending = before + self.pending[place + 1 :]
                return
