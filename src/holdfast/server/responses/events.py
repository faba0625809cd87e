"""A response as a stream of events, in OpenAI's order, each with its sequence number.

    response.created  response.in_progress
      response.output_item.added
        response.content_part.added  response.output_text.delta …  response.output_text.done
        response.content_part.done
      response.output_item.done
    response.completed

Reasoning, text and calls are items of their own; one is done before the next begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from holdfast.server.answer_parts import CallOutcome, plain_text
from holdfast.server.link import wire
from holdfast.server.responses.form import (
    Shown,
    call_item,
    message_item,
    output_of,
    response_object,
    status_of,
)
from holdfast.server.responses.items import Item, encrypted, output_text, reasoning_item

__all__ = ["Event", "ResponseEvents", "Spell", "Written", "written"]

Event = dict[str, Any]
Spell = Callable[[list[wire.Logprob] | None], list[Item]]
"""Log-probabilities as clients see them."""

TEXT_DELTA = "response.output_text.delta"
TEXT_DELTA_BODY = (
    b'{"type":"response.output_text.delta","sequence_number":%d,"item_id":%b,"output_index":%d,'
    b'"content_index":0,"delta":%b,"logprobs":[]}'
)

encode = msgspec.json.Encoder().encode


class Written(NamedTuple):
    """An event as it is sent: its type, and all of it as JSON."""

    kind: str
    body: bytes


def written(event: Event) -> Written:
    """An event, encoded."""
    return Written(event["type"], encode(event))


INPUT_EVENTS = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}


@dataclass(slots=True)
class _Open:
    """The open item: its kind, its place in the output, and its text so far."""

    part: wire.Part
    index: int
    item_id: str
    call: wire.CallFields | None = None
    call_index: int = 0
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Item] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)


class ResponseEvents:
    """The events of one response; `output` are its items so far."""

    def __init__(self, shown: Shown, spell: Spell) -> None:
        self._shown = shown
        self._key = shown.response_id.removeprefix("resp_")
        self.note = shown.note
        self._spell = spell
        self._open: _Open | None = None
        self._number = 0
        self._many: dict[str, int] = {}
        self.output: list[Item] = []
        self.logprobs: list[Item] = []

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return event

    # --- the response ---------------------------------------------------------------------------------

    def lifecycle(self, kind: str, status: str) -> Event:
        """An event about the response as a whole, before its end."""
        return self._event(kind, response=response_object(self._shown, status, []))

    def opening(self, queued: bool = False) -> list[Event]:
        """The first events."""
        status = "queued" if queued else "in_progress"
        first = [self.lifecycle("created", status)]
        if queued:
            first.append(self.lifecycle("queued", status))
        return [*first, self.lifecycle("in_progress", "in_progress")]

    def closing(
        self, result: wire.NotedTurn, error: Mapping[str, Any] | None = None
    ) -> tuple[list[Event], dict[str, Any]]:
        """The last events, and the response as it ended."""
        status = status_of(result)
        events = self._rest(result) if result.outcome == "aborted" else []
        events += self._close(whole=status == "completed")
        if not self.output and status != "failed":
            # An answer without a token has a message without text.
            for item in output_of(self._key, result, self.note):
                events += self._whole(item)
        shown = response_object(self._shown, status, self.output, result, error)
        # A cancelled response has no event of its own: its stream ends as one that stopped early.
        kind = "incomplete" if status == "cancelled" else status
        return [*events, self._event(kind, response=shown)], shown

    def _rest(self, result: wire.NotedTurn) -> list[Event]:
        """The last text of a turn that was cut: it stays, and came with no piece of its own."""
        texts = [
            part["text"] for item in self.output if item["type"] == "message" for part in item["content"]
        ]
        opened = self._open
        said = "".join([*texts, opened.text if opened is not None and opened.part is wire.Part.TEXT else ""])
        more = result.text.removeprefix(said)
        if len(more) == len(result.text) - len(said) and more:
            return self._of(wire.AnswerEvent(wire.Part.TEXT, more), [])
        return []

    def failed(self, error: Mapping[str, Any]) -> tuple[list[Event], dict[str, Any]]:
        """The last event of a response that the engine lost."""
        events = self._close(whole=False)
        shown = response_object(self._shown, "failed", self.output, None, error)
        return [*events, self._event("failed", response=shown)], shown

    # --- items ----------------------------------------------------------------------------------------

    def of(self, delta: wire.Delta) -> list[Event]:
        """The events of new output."""
        logprobs = self._spell(delta.logprobs)
        self.logprobs += logprobs
        parts = delta.events
        if parts is None:
            parts = [wire.AnswerEvent(wire.Part.TEXT, delta.text)] if delta.text else []
        events: list[Event] = []
        for part in parts:
            events += self._of(part, logprobs)
            logprobs = []
        return events

    def written(self, delta: wire.Delta) -> list[Written]:
        """The same, encoded; most have more text of the open message, and are put together here."""
        text, opened = plain_text(delta), self._open
        if text is None or opened is None or opened.part is not wire.Part.TEXT:
            return list(map(written, self.of(delta)))
        opened.pieces.append(text)
        place = (self._number, encode(opened.item_id), opened.index)
        self._number += 1
        return [Written(TEXT_DELTA, TEXT_DELTA_BODY % (*place, encode(text)))]

    def _of(self, part: wire.AnswerEvent, logprobs: list[Item]) -> list[Event]:
        if part.part is wire.Part.CALL_END:
            return self._close(whole=part.text == CallOutcome.COMPLETE)
        events: list[Event] = []
        kind = wire.Part.CALL if part.part is wire.Part.ARGUMENTS else part.part
        if self._open is None or part.part is wire.Part.CALL or self._open.part is not kind:
            events += self._close(whole=True)
            events += self._begin(part)
        opened = self._open
        assert opened is not None, "an item is open"
        if part.part is wire.Part.CALL:
            return events
        opened.pieces.append(part.text)
        opened.logprobs += logprobs
        return events + self._piece(opened, part.text, logprobs)

    def _begin(self, part: wire.AnswerEvent) -> list[Event]:
        index = len(self.output)
        item: Item
        if part.part is wire.Part.CALL:
            call = wire.CallFields(part.id, part.text, "")
            item = call_item(self._key, part.index, call, self.note.kinds) | {"status": "in_progress"}
            self._open = _Open(wire.Part.CALL, index, item["id"], call, part.index)
            if item["type"] == "custom_tool_call":
                item["input"] = ""
            return [self._event("output_item.added", output_index=index, item=item)]
        prefix = "rs" if part.part is wire.Part.REASONING else "msg"
        many = self._many[prefix] = self._many.get(prefix, 0) + 1
        item_id = f"{prefix}_{self._key}" + (f"b{many}" if many > 1 else "")
        self._open = _Open(part.part, index, item_id)
        if part.part is wire.Part.REASONING:
            item = reasoning_item(item_id, "", None)
        else:
            item = message_item(item_id, "", True) | {"content": []}
        return [
            self._event("output_item.added", output_index=index, item=item | {"status": "in_progress"}),
            self._event(
                "content_part.added",
                item_id=item_id,
                output_index=index,
                content_index=0,
                part=_part(part.part, ""),
            ),
        ]

    def _piece(self, opened: _Open, text: str, logprobs: list[Item]) -> list[Event]:
        place = {"item_id": opened.item_id, "output_index": opened.index}
        match opened.part:
            case wire.Part.REASONING:
                return [self._event("reasoning_text.delta", **place, content_index=0, delta=text)]
            case wire.Part.TEXT:
                where = {**place, "content_index": 0}
                return [self._event("output_text.delta", **where, delta=text, logprobs=logprobs)]
        # The input of other tools is an argument of the call: it is known when the call is whole.
        if opened.item_id.startswith("fc_"):
            return [self._event("function_call_arguments.delta", **place, delta=text)]
        return []

    def _close(self, whole: bool) -> list[Event]:
        """End the item that is open; not `whole` if it was cut."""
        opened, self._open = self._open, None
        if opened is None:
            return []
        events: list[Event]
        place = {"item_id": opened.item_id, "output_index": opened.index}
        if opened.call is not None:
            outcome = CallOutcome.COMPLETE if whole else CallOutcome.CUT
            call = wire.CallFields(opened.call.id, opened.call.name, opened.text, outcome)
            item = call_item(self._key, opened.call_index, call, self.note.kinds)
            events = self._inputs(item, place)
        else:
            if opened.part is wire.Part.REASONING:
                sealed = encrypted(opened.text) if self.note.sealed else None
                item = reasoning_item(opened.item_id, opened.text, sealed)
                done = self._event("reasoning_text.done", **place, content_index=0, text=opened.text)
            else:
                item = message_item(opened.item_id, opened.text, whole, opened.logprobs)
                where = {**place, "content_index": 0, "logprobs": opened.logprobs}
                done = self._event("output_text.done", **where, text=opened.text)
            part = _part(opened.part, opened.text, opened.logprobs)
            events = [done, self._event("content_part.done", **place, content_index=0, part=part)]
        self.output.append(item)
        return [*events, self._event("output_item.done", output_index=opened.index, item=item)]

    def _inputs(self, item: Item, place: Mapping[str, Any]) -> list[Event]:
        """The events that end the input of a call."""
        name = INPUT_EVENTS.get(item["type"])
        if name is None:
            return []
        if item["type"] == "function_call":
            return [self._event(f"{name}.done", **place, name=item["name"], arguments=item["arguments"])]
        given = item["input"]
        return [
            self._event(f"{name}.delta", **place, delta=given),
            self._event(f"{name}.done", **place, input=given),
        ]

    # --- a response that is over ----------------------------------------------------------------------

    def replayed(self, result: wire.NotedTurn, error: Mapping[str, Any] | None = None) -> list[Event]:
        """All events of a response that is over; each text in one piece."""
        events = self.opening()
        for item in output_of(self._key, result, self.note):
            events += self._whole(item)
        return events + self.closing(result, error)[0]

    def _whole(self, item: Item) -> list[Event]:
        """The events of an item in one piece."""
        match item["type"]:
            case "message":
                parts = [wire.AnswerEvent(wire.Part.TEXT, "".join(each["text"] for each in item["content"]))]
            case "reasoning":
                texts = "".join(each["text"] for each in item["content"])
                parts = [wire.AnswerEvent(wire.Part.REASONING, texts)]
            case _:
                index = len(self.output)
                self.output.append(item)
                events = [self._event("output_item.added", output_index=index, item=item)]
                events += self._inputs(item, {"item_id": item["id"], "output_index": index})
                return [*events, self._event("output_item.done", output_index=index, item=item)]
        events = [event for part in parts for event in self._of(part, [])]
        return events + self._close(whole=item.get("status") != "incomplete")


def _part(part: wire.Part, text: str, logprobs: list[Item] | None = None) -> Item:
    if part is wire.Part.REASONING:
        return {"type": "reasoning_text", "text": text}
    return output_text(text, logprobs)
