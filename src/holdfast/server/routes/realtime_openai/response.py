"""One response as its client hears it: from `response.created` to `response.done`.

The parts of the answer become output items in their order: text is a message, each call an item. The events
are those of OpenAI's protocol; clients of the beta get its names. Reasoning has no events there: it counts in
the usage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.server.answer_parts import CallOutcome, reasoning_tokens
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.link.engine_client import TurnFeed
from holdfast.server.routes.realtime_openai.history import Cut, Marks, Turn
from holdfast.server.routes.realtime_openai.items import Item, ItemKind, Status
from holdfast.server.routes.realtime_openai.settings import AnswerSettings
from holdfast.server.sessions import new_name

__all__ = ["Response"]

Emit = Callable[[str, dict[str, Any]], None]
Place = Callable[[Item], str | None]
"""Puts an output item into the conversation, and answers the id of the item before it."""


class Response:
    """One response. `place` is None while its output is no part of the conversation."""

    def __init__(
        self,
        emit: Emit,
        settings: AnswerSettings,
        metadata: dict[str, Any] | None,
        *,
        beta: bool,
        conversation: str | None,
        created_after: int,
        spell: Callable[[Sequence[int]], str],
    ) -> None:
        """`conversation` is the one that it joins; the client had created so many items before it."""
        self.name = new_name("resp")
        self.items: list[Item] = []
        self.marks = Marks(spell)
        self.joins = conversation is not None
        """Whether its output belongs to the conversation."""
        self.created_after = created_after
        self.feed: TurnFeed | None = None
        self.sent = 0
        """Tokens sent to the client, without those of a call that has not ended."""
        self.begun = False
        self.cancelled = False
        self.kept: int | None = None
        """How many tokens stay of it, where it was cancelled after it had begun."""
        self.turn: Turn | None = None
        """Its turn on the session, where it has one."""
        self.context: list[Item] = []
        """The items before its output."""
        self.cut: Cut | None = None
        """Where it is to be cut once it has ended, if its client said so."""
        self.steering: asyncio.Future[bool] | None = None
        """Whether the next response was accepted as one that steers this one, if it was sent as such."""
        self.steered = False
        self.ended = asyncio.Event()
        self._emit = emit
        self._settings = settings
        self._metadata = metadata
        self._beta = beta
        self._conversation = conversation
        self.place: Place | None = None
        self._previous: str | None = None
        self._pieces: list[str] = []
        """The text of the last item while it is generated."""
        self._characters = 0

    # --- the answer -------------------------------------------------------------------------------

    def begin(self) -> None:
        """The response has started."""
        self.begun = True
        self._emit("response.created", {"response": self._shown(Status.IN_PROGRESS.value, None, None)})
        self._emit("rate_limits.updated", {"rate_limits": []})

    def hear(self, delta: wire.Delta) -> None:
        """More of the answer."""
        heard = delta.index + len(delta.tokens)
        self.marks.hear(delta.tokens)
        self.sent = heard if delta.settled is None else delta.settled
        events = delta.events
        if events is None:
            events = [wire.AnswerEvent(wire.Part.TEXT, delta.text)] if delta.text else []
        for event in events:
            match event.part:
                case wire.Part.TEXT:
                    self._say(event.text, delta.index, heard)
                case wire.Part.CALL:
                    self._call(event)
                case wire.Part.ARGUMENTS:
                    self._pieces.append(event.text)
                    self._part("response.function_call_arguments.delta", delta=event.text)
                case wire.Part.CALL_END:
                    complete = event.text == CallOutcome.COMPLETE
                    self._close(Status.COMPLETED if complete else Status.INCOMPLETE)
                case wire.Part.REASONING:
                    continue

    def said(self, item: Item) -> str:
        """The text of an output item so far."""
        return "".join(self._pieces) if item is self._open else item.text

    @property
    def _open(self) -> Item | None:
        """The item that is being generated."""
        last = self.items[-1] if self.items else None
        return last if last is not None and last.status is Status.IN_PROGRESS else None

    def _say(self, text: str, before: int, heard: int) -> None:
        if not text:
            return
        item = self._open
        if item is None or item.kind is not ItemKind.MESSAGE:
            self._begin(Item(new_name("item"), ItemKind.MESSAGE, role="assistant"))
            self.marks.begin(before)
            self._part("response.content_part.added", content_index=0, part={"type": "text", "text": ""})
        self._pieces.append(text)
        self._characters += len(text)
        self.marks.add(self._characters, heard)
        self._part(self._named("delta"), content_index=0, delta=text)

    def _call(self, event: wire.AnswerEvent) -> None:
        self._begin(Item(new_name("item"), ItemKind.CALL, name=event.text, call_id=event.id))

    def _begin(self, item: Item) -> None:
        if self._open is not None:
            self._close(Status.COMPLETED)
        item.status = Status.IN_PROGRESS
        self.items.append(item)
        self._pieces, self._characters = [], 0
        shown = item.shown(beta=self._beta)
        self._emit("response.output_item.added", {**self._ids, "item": shown})
        if self.place is not None:
            self._previous = self.place(item)
            kind = "conversation.item.created" if self._beta else "conversation.item.added"
            self._emit(kind, {"previous_item_id": self._previous, "item": shown})

    def _close(self, status: Status) -> None:
        """The last item has ended."""
        item = self.items[-1]
        item.texts, item.status = ("".join(self._pieces),), status
        if item.kind is ItemKind.MESSAGE:
            self._part(self._named("done"), content_index=0, text=item.text)
            self._part(
                "response.content_part.done", content_index=0, part={"type": "text", "text": item.text}
            )
        elif status is Status.COMPLETED:
            self._part("response.function_call_arguments.done", arguments=item.text, name=item.name)
        shown = item.shown(beta=self._beta)
        self._emit("response.output_item.done", {**self._ids, "item": shown})
        if self.place is not None and not self._beta:
            self._emit("conversation.item.done", {"previous_item_id": self._previous, "item": shown})

    @property
    def _ids(self) -> dict[str, Any]:
        return {"response_id": self.name, "output_index": len(self.items) - 1}

    def _part(self, kind: str, **fields: Any) -> None:
        """An event about the last item."""
        item = self.items[-1]
        call = {"call_id": item.call_id} if item.kind is ItemKind.CALL else {}
        self._emit(kind, {**self._ids, "item_id": item.id, **call, **fields})

    def _named(self, what: str) -> str:
        return f"response.text.{what}" if self._beta else f"response.output_text.{what}"

    # --- its end ----------------------------------------------------------------------------------

    def end(self, end: wire.End) -> None:
        """The turn has ended by itself, at its limit, or because it was cut."""
        if self.steered:
            self._finish("cancelled", {"type": "cancelled", "reason": "client_cancelled"}, end)
        elif end.outcome == "finished" and end.reason != "length":
            self._finish("completed", None, end)
        elif end.outcome == "finished":
            self._finish("incomplete", {"type": "incomplete", "reason": "max_output_tokens"}, end)
        elif self.cancelled:
            self._finish("cancelled", {"type": "cancelled", "reason": "client_cancelled"}, end)
        else:
            said = {"type": "server_error", "code": "aborted", "message": "the response was aborted"}
            self._finish("failed", {"type": "failed", "error": said}, end)

    def drop(self) -> None:
        """The response was cancelled before it started."""
        self._finish("cancelled", {"type": "cancelled", "reason": "client_cancelled"}, None)

    def fail(self, problem: Problem) -> None:
        """The turn failed, and was rolled back."""
        error = problem.body()["error"]
        assert isinstance(error, dict)
        said = {name: error[name] for name in ("type", "code", "message")}
        self._finish("failed", {"type": "failed", "error": said}, None)

    def _finish(self, status: str, details: dict[str, Any] | None, end: wire.End | None) -> None:
        if self._open is not None:
            self._close(Status.COMPLETED if status == "completed" else Status.INCOMPLETE)
        self._emit("response.done", {"response": self._shown(status, details, end)})

    def _shown(self, status: str, details: dict[str, Any] | None, end: wire.End | None) -> dict[str, Any]:
        settings = self._settings
        shown: dict[str, Any] = {
            "object": "realtime.response",
            "id": self.name,
            "status": status,
            "status_details": details,
            "output": [item.shown(beta=self._beta) for item in self.items],
            "conversation_id": self._conversation,
            "metadata": self._metadata,
            "usage": None if end is None else shown_usage(end),
        }
        if self._beta:
            temperature = 1.0 if settings.temperature is None else settings.temperature
            shown |= {"modalities": ["text"], "temperature": temperature}
            return shown | {"max_output_tokens": settings.shown_limit}
        return shown | {"output_modalities": ["text"], "max_output_tokens": settings.shown_limit}


def shown_usage(end: wire.End) -> dict[str, Any]:
    """The tokens of a response; cached ones were in memory and were not computed again."""
    cached = end.cached_tokens
    return {
        "total_tokens": end.prompt_tokens + len(end.tokens),
        "input_tokens": end.prompt_tokens,
        "output_tokens": len(end.tokens),
        "input_token_details": {
            "text_tokens": end.prompt_tokens,
            "audio_tokens": 0,
            "image_tokens": 0,
            "cached_tokens": cached,
            "cached_tokens_details": {"text_tokens": cached, "audio_tokens": 0, "image_tokens": 0},
        },
        "output_token_details": {
            "text_tokens": len(end.tokens),
            "audio_tokens": 0,
            "reasoning_tokens": reasoning_tokens(end),
        },
    }
