"""The items of a conversation: messages, function calls and their results.

An item is read from a client's event, shown in OpenAI's form, and rendered as a chat message. Calls that the
model did not finish are shown, but are no part of the history.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from holdfast.server.http.problems import Problem, bad_field
from holdfast.server.prompts import ROLES
from holdfast.server.routes.realtime_openai.client_events import ItemFields, PartFields
from holdfast.server.sessions import new_name, require_name

__all__ = ["Item", "ItemKind", "Status", "chat_messages", "read_item", "standing"]

MESSAGE_ROLES = tuple(role for role in ROLES if role not in ("tool", "function"))
TEXT_PARTS = ("input_text", "output_text", "text")
SPOKEN_PARTS = ("input_audio", "output_audio", "audio")


class ItemKind(StrEnum):
    """The kind of an item."""

    MESSAGE = "message"
    CALL = "function_call"
    RESULT = "function_call_output"


class Status(StrEnum):
    """How far an item or a response is."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"


@dataclass(slots=True, eq=False)
class Item:
    """One item. `texts` are the parts of a message, a call's arguments, or a result."""

    id: str
    kind: ItemKind
    texts: tuple[str, ...] = ()
    role: str = ""
    name: str = ""
    call_id: str = ""
    status: Status = Status.COMPLETED
    number: int = 0
    """How many items the client had created before it; 0 for the model's own."""

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.texts)

    @property
    def said(self) -> tuple[str, ...]:
        """Its form in the history, to detect later changes."""
        return (self.id, self.kind, self.role, self.name, self.call_id, self.text)

    @property
    def is_answer(self) -> bool:
        """Whether it is a message of the assistant."""
        return self.kind is ItemKind.MESSAGE and self.role == "assistant"

    def shown(self, *, beta: bool) -> dict[str, Any]:
        """The item in OpenAI's form."""
        shown: dict[str, Any] = {
            "id": self.id,
            "object": "realtime.item",
            "type": self.kind.value,
            "status": self.status.value,
        }
        match self.kind:
            case ItemKind.MESSAGE:
                part = "input_text" if self.role != "assistant" else "text" if beta else "output_text"
                content = [{"type": part, "text": text} for text in self.texts]
                return shown | {"role": self.role, "content": content}
            case ItemKind.CALL:
                return shown | {"call_id": self.call_id, "name": self.name, "arguments": self.text}
            case ItemKind.RESULT:
                return shown | {"call_id": self.call_id, "output": self.text}


def read_item(fields: ItemFields, place: str) -> Item:
    """An item that a client gives; `place` is the field that has it."""
    name = fields.id if fields.id is not None else new_name("item")
    require_name(name, f"{place}.id")
    match fields.type:
        case "message":
            role = fields.role
            if role not in MESSAGE_ROLES:
                raise bad_field(f"{place}.role", f"must be one of {', '.join(MESSAGE_ROLES)}")
            if fields.content is None:
                raise bad_field(f"{place}.content", "this field is required")
            texts = [
                _text_of(part, f"{place}.content[{number}]") for number, part in enumerate(fields.content)
            ]
            return Item(name, ItemKind.MESSAGE, tuple(texts), role)
        case "function_call":
            called = _given(fields.name, f"{place}.name")
            arguments = fields.arguments if fields.arguments is not None else ""
            call_id = fields.call_id or new_name("call")
            return Item(name, ItemKind.CALL, (arguments,), name=called, call_id=call_id)
        case "function_call_output":
            output = fields.output
            if output is None:
                raise bad_field(f"{place}.output", "this field is required")
            return Item(name, ItemKind.RESULT, (output,), call_id=_given(fields.call_id, f"{place}.call_id"))
    kinds = ", ".join(ItemKind)
    raise bad_field(f"{place}.type", f"must be one of {kinds}")


def _given(value: str | None, field: str) -> str:
    if not value:
        raise bad_field(field, "this field is required")
    return value


def _text_of(part: PartFields, place: str) -> str:
    """The text of a part; of a spoken one its transcript."""
    if part.type in SPOKEN_PARTS and part.transcript is not None:
        return part.transcript
    if part.type in SPOKEN_PARTS:
        said = f"{place}.type: this model takes text; give audio as text, or with its transcript"
        raise Problem(400, "audio_not_supported", said, f"{place}.type")
    if part.type not in TEXT_PARTS:
        raise bad_field(f"{place}.type", f"must be one of {', '.join(TEXT_PARTS)}", "unsupported")
    if part.text is None:
        raise bad_field(f"{place}.text", "this field is required")
    return part.text


def standing(items: Iterable[Item]) -> list[Item]:
    """The items that are part of the history: without calls that were not finished."""
    return [item for item in items if item.kind is not ItemKind.CALL or item.status is not Status.INCOMPLETE]


def chat_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Items as chat messages; adjacent text and calls of the assistant are one message."""
    messages: list[dict[str, Any]] = []
    for item in standing(items):
        match item.kind:
            case ItemKind.MESSAGE:
                messages.append({"role": item.role, "content": item.text})
            case ItemKind.RESULT:
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.text})
            case ItemKind.CALL:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item.name, "arguments": item.text}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
    return messages
