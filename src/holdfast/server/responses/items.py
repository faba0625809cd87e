"""Items of the input: checked, in the form in which they are stored and shown again, and as chat messages.

Stored items are JSON objects as OpenAI's API returns them. Reasoning, text and calls that follow each other
are one message of the assistant.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from holdfast.engine.portions import Portions
from holdfast.server.http.problems import bad_field

__all__ = [
    "REFERENCE",
    "Item",
    "encrypted",
    "messages_of",
    "output_text",
    "read_items",
    "reasoning_item",
    "with_ids",
]

Item = dict[str, Any]

PORTION = 64
"""Items in one portion."""

REFERENCE = "item_reference"
ID_CHARACTERS_MAX = 256
ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text", "text")
UNSUPPORTED_PARTS = ("input_image", "input_file", "input_audio", "image_url", "computer_screenshot")
_SEALED = "hf1."
"""What `encrypted_content` begins with, if it was written by this server."""


def _message(item_id: str, role: str, content: list[Item]) -> Item:
    return {"id": item_id, "type": "message", "role": role, "status": "completed", "content": content}


def read_items(given: str | Sequence[Any], field: str = "input") -> Portions[list[Item]]:
    """The items of a request, checked; those without an id have an empty one. In portions.

    A reference is left as it is: the store resolves it.
    """
    if isinstance(given, str):
        return [_message("", "user", [{"type": "input_text", "text": given}])]
    items = []
    for place, each in enumerate(given):
        items.append(_read(each, f"{field}[{place}]"))
        if place % PORTION == PORTION - 1:
            yield
    return items


def with_ids(items: Iterable[Item], key: str) -> list[Item]:
    """Items with ids; those without one get it from `key` and their place."""
    return [
        item if item["id"] else {**item, "id": f"{_READERS[item['type']][0]}_{key}i{place}"}
        for place, item in enumerate(items)
    ]


def _read(given: Any, where: str) -> Item:
    if not isinstance(given, Mapping):
        raise bad_field(where, "must be an object")
    kind = given.get("type")
    if kind is None:
        kind = "message" if "role" in given else REFERENCE
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise bad_field(f"{where}.type", f"must be one of {', '.join(_READERS)}", "unsupported")
    item_id = "" if given.get("id") is None else _text(given, "id", where, ID_CHARACTERS_MAX)
    return reader[1](given, item_id, where)


def _text(given: Mapping[str, Any], field: str, where: str, most: int | None = None) -> str:
    value = given.get(field)
    if not isinstance(value, str):
        raise bad_field(f"{where}.{field}", "must be text" if field in given else "this field is required")
    if most is not None and len(value) > most:
        raise bad_field(f"{where}.{field}", f"may have at most {most} characters")
    return value


def _read_message(given: Mapping[str, Any], item_id: str, where: str) -> Item:
    role = given.get("role")
    if role not in ROLES:
        raise bad_field(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    texts = _texts(given.get("content"), f"{where}.content")
    if role == "assistant":
        return _message(item_id, "assistant", [output_text(text) for text in texts])
    return _message(item_id, str(role), [{"type": "input_text", "text": text} for text in texts])


def output_text(text: str, logprobs: list[Item] | None = None) -> Item:
    """A part of an output message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def _texts(content: Any, where: str) -> list[str]:
    """The texts of a content: text, or a list of parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise bad_field(where, "must be text or an array of parts")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        at = f"{where}[{place}]"
        if kind == "refusal":
            texts.append(_text(part, "refusal", at))
        elif kind in TEXTS:
            texts.append(_text(part, "text", at))
        elif kind in UNSUPPORTED_PARTS:
            raise bad_field(f"{at}.type", f"{kind} is not supported yet: the model takes text", "unsupported")
        else:
            raise bad_field(f"{at}.type", f"must be one of {', '.join(TEXTS)}, refusal")
    return texts


def _read_call(given: Mapping[str, Any], item_id: str, where: str) -> Item:
    item = {
        "id": item_id,
        "type": "function_call",
        "call_id": _text(given, "call_id", where, ID_CHARACTERS_MAX),
        "name": _text(given, "name", where, ID_CHARACTERS_MAX),
        "arguments": _text(given, "arguments", where),
        "status": "incomplete" if given.get("status") == "incomplete" else "completed",
    }
    return _in_namespace(item, given)


def _in_namespace(item: Item, given: Mapping[str, Any]) -> Item:
    namespace = given.get("namespace")
    return item | {"namespace": namespace} if isinstance(namespace, str) else item


def _read_custom_call(given: Mapping[str, Any], item_id: str, where: str) -> Item:
    item = {
        "id": item_id,
        "type": "custom_tool_call",
        "call_id": _text(given, "call_id", where, ID_CHARACTERS_MAX),
        "name": _text(given, "name", where, ID_CHARACTERS_MAX),
        "input": _text(given, "input", where),
        "status": "completed",
    }
    return _in_namespace(item, given)


def _read_shell_call(given: Mapping[str, Any], item_id: str, where: str) -> Item:
    action = given.get("action")
    if not isinstance(action, Mapping) or not isinstance(action.get("command"), list):
        raise bad_field(f"{where}.action", "must be an object with a command, which is an array of texts")
    return {
        "id": item_id,
        "type": "local_shell_call",
        "call_id": _text(given, "call_id", where, ID_CHARACTERS_MAX),
        "action": dict(action),
        "status": "completed",
    }


def _read_output(given: Mapping[str, Any], item_id: str, where: str) -> Item:
    kind = str(given["type"])
    # The result of a shell call names the call by its id alone.
    by_id = kind == "local_shell_call_output" and "call_id" not in given
    call_id = _text(given, "id" if by_id else "call_id", where, ID_CHARACTERS_MAX)
    content = given.get("output")
    output = content if isinstance(content, str) else "".join(_texts(content, f"{where}.output"))
    return {"id": item_id, "type": kind, "call_id": call_id, "output": output, "status": "completed"}


def _read_reasoning(given: Mapping[str, Any], item_id: str, where: str) -> Item:
    content, sealed = given.get("content"), given.get("encrypted_content")
    texts = [] if content is None else _reasoning_texts(content, f"{where}.content")
    if not texts and isinstance(sealed, str):
        texts = _unsealed(sealed)
    return reasoning_item(item_id, "".join(texts), None)


def _reasoning_texts(content: Any, where: str) -> list[str]:
    if not isinstance(content, list):
        raise bad_field(where, "must be an array of parts")
    texts = []
    for place, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise bad_field(f"{where}[{place}]", "must be an object")
        texts.append(_text(part, "text", f"{where}[{place}]"))
    return texts


def reasoning_item(item_id: str, text: str, sealed: str | None) -> Item:
    """An item of reasoning; `sealed` is its `encrypted_content`."""
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}] if text else [],
        "encrypted_content": sealed,
    }


def encrypted(text: str) -> str:
    """Reasoning as a client may carry it along. It is encoded, not secret: `content` has it, too."""
    return _SEALED + base64.b64encode(text.encode("utf-8", "replace")).decode()


def _unsealed(sealed: str) -> list[str]:
    """The reasoning in `encrypted_content`; nothing if another server wrote it."""
    if not sealed.startswith(_SEALED):
        return []
    try:
        return [base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode()]
    except (binascii.Error, ValueError):
        return []


def _read_reference(given: Mapping[str, Any], _item_id: str, where: str) -> Item:
    return {"type": REFERENCE, "id": _text(given, "id", where, ID_CHARACTERS_MAX)}


Reader = Callable[[Mapping[str, Any], str, str], Item]
_READERS: dict[str, tuple[str, Reader]] = {
    "message": ("msg", _read_message),
    "function_call": ("fc", _read_call),
    "function_call_output": ("fco", _read_output),
    "custom_tool_call": ("ctc", _read_custom_call),
    "custom_tool_call_output": ("ctco", _read_output),
    "local_shell_call": ("lsc", _read_shell_call),
    "local_shell_call_output": ("lsco", _read_output),
    "reasoning": ("rs", _read_reasoning),
    REFERENCE: ("ref", _read_reference),
}


# --- messages -------------------------------------------------------------------------------------


def messages_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Items as chat messages."""
    messages: list[dict[str, Any]] = []
    assistant: dict[str, Any] | None = None
    for item in items:
        kind = item["type"]
        if (kind == "message" and item["role"] != "assistant") or kind.endswith("_output"):
            assistant = None
            messages.append(_plain(item))
            continue
        call = _call(item)
        if call is not None and item["status"] == "incomplete":
            continue  # A call that was cut, or has invalid arguments: templates take whole ones.
        if assistant is None or _begins(item, assistant):
            assistant = {"role": "assistant", "content": ""}
            messages.append(assistant)
        if call is not None:
            assistant.setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            text = "".join(part["text"] for part in item["content"])
            assistant["reasoning_content"] = assistant.get("reasoning_content", "") + text
        else:
            assistant["content"] += _joined(item)
    # Reasoning that a client sent without anything after it.
    return [message for message in messages if message != {"role": "assistant", "content": ""}]


def _begins(item: Item, assistant: Mapping[str, Any]) -> bool:
    """Whether an item cannot belong to the assistant's message before it."""
    if item["type"] == "reasoning":
        return bool(assistant["content"] or assistant.get("tool_calls"))
    return item["type"] == "message" and bool(assistant["content"] or assistant.get("tool_calls"))


def _plain(item: Item) -> dict[str, Any]:
    if item["type"] == "message":
        return {"role": item["role"], "content": _joined(item)}
    return {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}


def _joined(item: Item) -> str:
    return "".join(part["text"] for part in item["content"])


def _call(item: Item) -> dict[str, Any] | None:
    """A call in the form of chat completions; None if the item is something else."""
    match item["type"]:
        case "function_call":
            name, arguments = _called(item), item["arguments"]
        case "custom_tool_call":
            name, arguments = _called(item), json.dumps({"input": item["input"]})
        case "local_shell_call":
            action = {each: value for each, value in item["action"].items() if each not in ("type", "env")}
            name, arguments = "local_shell", json.dumps(action)
        case _:
            return None
    return {"id": item["call_id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _called(item: Item) -> str:
    """The name by which the model calls a tool."""
    namespace = item.get("namespace")
    return str(item["name"] if namespace is None else f"{namespace}.{item['name']}")
