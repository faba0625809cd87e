"""The response object, and the note that is kept with its turn.

The note has the request's fields that the response shows: input items, settings, metadata. The output is
built from the turn's result on each request. A response whose conversation was rendered anew has its items
in `history`, so that it depends on no other response.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from holdfast.server.answer_parts import CallOutcome
from holdfast.server.link import wire
from holdfast.server.responses.items import Item, encrypted, output_text, reasoning_item
from holdfast.server.responses.tools import FUNCTION, ToolKind

__all__ = [
    "NO_RESULT",
    "Note",
    "call_item",
    "output_of",
    "read_note",
    "response_object",
    "result_of",
    "status_of",
]

STEERED = "steered"
"""Why a turn was aborted to make room for what its client said meanwhile."""


class Note(msgspec.Struct, omit_defaults=True):
    """The stored data of a response besides its result."""

    created: float
    shown: dict[str, Any]
    """Fields of the response object that are the client's own; without instructions and tools, which its
    session keeps once for all."""
    items: list[Item]
    """The items of its input."""
    history: list[Item] = []
    """The items before its input, where the first turn of its session has them."""
    kinds: dict[str, ToolKind] = {}
    """Tools that are not plain functions, by the name that the model calls."""
    sealed: bool = False
    """Whether reasoning is shown as `encrypted_content`, too."""
    stored: bool = True
    prewarms: bool = False
    """Whether the prompt alone was computed."""


_encoder = msgspec.json.Encoder()
_notes = msgspec.json.Decoder(Note)


def write_note(note: Note) -> str:
    """A note as it is kept."""
    return _encoder.encode(note).decode()


def read_note(text: str) -> Note | None:
    """A note; None if the text is not one."""
    try:
        return _notes.decode(text)
    except msgspec.DecodeError:
        return None


NO_RESULT = wire.NotedTurn(0, "", "", "", "", "", 0, 0, 0)
"""The result of a turn that has none yet."""


def result_of(end: wire.End, note: Note) -> wire.NotedTurn:
    """The end of a turn, in the form in which it is kept; a prompt that was computed alone is complete."""
    return wire.NotedTurn(
        0,
        "",
        "",
        end.outcome,
        "stop" if note.prewarms and end.reason == "length" else end.reason,
        end.text,
        end.prompt_tokens,
        end.cached_tokens,
        len(end.tokens),
        end.answer,
    )


def status_of(result: wire.NotedTurn) -> str:
    """The status of a response whose turn is over."""
    if result.outcome == "failed":
        return "failed"
    if result.outcome == "aborted":
        return "incomplete" if result.reason == STEERED else "cancelled"
    return "incomplete" if result.reason == "length" else "completed"


def output_of(key: str, result: wire.NotedTurn, note: Note, logprobs: list[Item] | None = None) -> list[Item]:
    """The output items of a turn: reasoning, text, calls. `logprobs` are those of the text."""
    output: list[Item] = []
    if note.prewarms:
        return output
    answer = result.answer
    if answer is not None and answer.reasoning:
        sealed = encrypted(answer.reasoning) if note.sealed else None
        output.append(reasoning_item(f"rs_{key}", answer.reasoning, sealed))
    calls = [] if answer is None else answer.calls
    if result.text or (not calls and not output):
        whole = status_of(result) == "completed" or bool(calls)
        output.append(message_item(f"msg_{key}", result.text, whole, logprobs))
    return output + [call_item(key, index, call, note.kinds) for index, call in enumerate(calls)]


def message_item(item_id: str, text: str, whole: bool, logprobs: list[Item] | None = None) -> Item:
    """A message of the model."""
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "completed" if whole else "incomplete",
        "content": [output_text(text, logprobs)],
    }


def call_item(key: str, index: int, call: wire.CallFields, kinds: Mapping[str, ToolKind]) -> Item:
    """A call of the model, as the client's tool wants it."""
    kind = kinds.get(call.name) or ToolKind(FUNCTION, call.name)
    status = "completed" if call.outcome == CallOutcome.COMPLETE else "incomplete"
    called = {"call_id": call.id, "status": status}
    match kind.type:
        case "custom":
            item = {
                "id": f"ctc_{key}{index}",
                "type": "custom_tool_call",
                **called,
                "name": kind.name,
                "input": _argument(call.arguments, "input"),
            }
        case "local_shell":
            return {
                "id": f"lsc_{key}{index}",
                "type": "local_shell_call",
                **called,
                "action": _action(call.arguments),
            }
        case _:
            item = {
                "id": f"fc_{key}{index}",
                "type": "function_call",
                **called,
                "name": kind.name,
                "arguments": call.arguments,
            }
    return item if kind.namespace is None else item | {"namespace": kind.namespace}


def _arguments(written: str) -> dict[str, Any]:
    """The arguments of a call; none if the model wrote something else."""
    try:
        read = json.loads(written)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def _argument(written: str, name: str) -> str:
    """One argument that is text; as the model wrote it, if it has no such argument."""
    value = _arguments(written).get(name)
    return value if isinstance(value, str) else written


def _action(written: str) -> Item:
    """The action of a shell call."""
    read = _arguments(written)
    command = read.get("command")
    texts = [str(each) for each in command] if isinstance(command, list) else [str(command or written)]
    action: Item = {"type": "exec", "command": texts, "env": {}}
    if isinstance(read.get("working_directory"), str):
        action["working_directory"] = read["working_directory"]
    if isinstance(read.get("timeout_ms"), int):
        action["timeout_ms"] = read["timeout_ms"]
    return action


class Shown(NamedTuple):
    """The request's part of a response: its id, its note, and its session's instructions and tools."""

    response_id: str
    note: Note
    told: Mapping[str, Any]


def response_object(
    shown: Shown,
    status: str,
    output: list[Item],
    result: wire.NotedTurn | None = None,
    error: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A response as clients see it; `result` if its turn is over."""
    reason = None
    if status == "incomplete":
        steered = result is not None and result.reason == STEERED
        reason = {"reason": STEERED if steered else "max_output_tokens"}
    return {
        "id": shown.response_id,
        "object": "response",
        "created_at": shown.note.created,
        "status": status,
        "error": error,
        "incomplete_details": reason,
        "output": output,
        "usage": None if result is None else _usage(result),
        **shown.note.shown,
        **shown.told,
    }


def _usage(result: wire.NotedTurn) -> dict[str, Any]:
    reasoned = 0 if result.answer is None else result.answer.reasoning_tokens
    return {
        "input_tokens": result.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": result.cached_tokens,
            "cache_write_tokens": result.prompt_tokens - result.cached_tokens,
        },
        "output_tokens": result.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoned},
        "total_tokens": result.prompt_tokens + result.completion_tokens,
    }
