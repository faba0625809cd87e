"""Anthropic's conversations as chat templates take them: roles, texts, calls and results in OpenAI's form.

A user's message may hold results of tools and text: the results become messages of their own, directly after
the calls that they answer, and the text follows them. Consecutive messages of one role are one message, as
Anthropic defines it. A system message behind the beginning becomes text of the user's message that it stands
in, since most chat templates allow one system message, in front.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from holdfast.engine.portions import Portions
from holdfast.server.dialects.refused import NOT_BUILT
from holdfast.server.http.problems import Problem, bad_field
from holdfast.server.limits import MESSAGES_MAX

__all__ = [
    "SIGNATURE",
    "CacheControl",
    "Conversation",
    "Message",
    "MessageBlock",
    "SystemBlock",
    "read_conversation",
    "sealed",
]

PORTION = 64
"""Messages in one portion."""

SIGNATURE = "holdfast"
"""The signature of thinking whose text is shown; clients send it back, and nothing is checked by it."""
SEALED = "holdfast."
"""The beginning of a signature that holds thinking whose text is not shown."""
REMINDER = "<system-reminder>\n{text}\n</system-reminder>"
BILLING = "x-anthropic-billing-header:"
"""The first system block of Claude Code: billing data, which changes, and is left out of the prompt."""

NOT_TEXT = frozenset({"image", "document", "search_result", "audio", "video", "file", "container_upload"})
OTHERS = frozenset(
    {
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "tool_reference",
        "mcp_tool_use",
        "mcp_tool_result",
        "compaction",
        "browser_state",
    }
)
"""Blocks of tools that Anthropic's servers run."""

_PLACE = re.compile(r"messages\[([0-9]+)\]")


class CacheControl(msgspec.Struct):
    """A place up to which the prompt should stay cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class SystemBlock(msgspec.Struct):
    """A block of text, in the system prompt or in the result of a tool."""

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None


class MessageBlock(msgspec.Struct):
    """A block of a message: text, thinking, a call or its result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[SystemBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class Message(msgspec.Struct):
    """A message of a conversation; the other fields belong to system messages."""

    role: str
    content: str | list[MessageBlock]
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: dict[str, Any] | None = None


@dataclass(slots=True)
class Conversation:
    """Messages in OpenAI's form, and for each the place where the client wrote it."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    calls: set[str] = field(default_factory=set)
    """Ids of the calls in the assistant's last message."""

    @property
    def begins_answer(self) -> bool:
        """Whether the last message is the beginning of the answer, which continues it."""
        return bool(self.messages) and bool(self.messages[-1]["role"] == "assistant")

    def add(self, place: str, **message: Any) -> dict[str, Any]:
        """Append a message."""
        self.messages.append(message)
        self.places.append(place)
        return message

    def say(self, place: str, text: str) -> None:
        """Append text of the user."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last["role"] == "user":
            last["content"] = f"{last['content']}\n{text}"
        else:
            self.add(place, role="user", content=text)

    def told(self, problem: Problem) -> Problem:
        """A problem with the places of the client's messages and the names of Anthropic's fields."""
        message, param = self._named(problem.message), problem.param
        return Problem(
            problem.status,
            problem.code,
            message,
            None if param is None else self._named(param),
            problem.retry_after,
        )

    def _named(self, text: str) -> str:
        def place(found: re.Match[str]) -> str:
            number = int(found[1])
            return self.places[number] if number < len(self.places) else found[0]

        named = _PLACE.sub(place, text)
        return named.replace(".function.parameters", ".input_schema").replace(".function.name", ".name")


def read_conversation(
    system: str | list[SystemBlock] | None, messages: Sequence[Message]
) -> Portions[Conversation]:
    """The conversation of a request; raises the problem with it. In portions."""
    if not messages:
        raise bad_field("messages", "must hold at least one message", "empty_turn")
    if len(messages) > MESSAGES_MAX:
        raise bad_field("messages", f"may hold at most {MESSAGES_MAX} messages")
    made = Conversation()
    instructions = _system_text(system, "system")
    last_user = max((number for number, each in enumerate(messages) if each.role == "user"), default=-1)
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        if number % PORTION == PORTION - 1:
            yield
        if message.role == "user":
            _add_user(made, message, place)
        elif message.role == "assistant":
            _add_assistant(made, message, place)
        elif message.role == "system":
            text = _system_text(_blocks_of_system(message, place), f"{place}.content")
            if message.clear_at == "next_user_message" and number < last_user:
                continue
            if made.messages:
                made.say(place, REMINDER.format(text=text))
            else:
                instructions = "\n".join(part for part in (instructions, text) if part)
        else:
            raise bad_field(f"{place}.role", "must be one of user, assistant, system")
    if not made.messages:
        raise bad_field("messages", "must hold a message of the user", "empty_turn")
    if made.begins_answer and made.calls:
        reason = "the calls of the last message need their results: end with tool_result blocks"
        raise bad_field(f"{made.places[-1]}.content", reason)
    if instructions:
        made.messages.insert(0, {"role": "system", "content": instructions})
        made.places.insert(0, "system")
    return made


def _system_text(system: str | list[SystemBlock] | None, place: str) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = _texts(system, place)
    return "\n".join(text for text in texts if not text.startswith(BILLING))


def _blocks_of_system(message: Message, place: str) -> str | list[SystemBlock]:
    if (message.output_config or {}).get("effort") is not None:
        raise bad_field(f"{place}.output_config.effort", NOT_BUILT, "unsupported")
    if isinstance(message.content, str):
        return message.content
    blocks = []
    for number, block in enumerate(message.content):
        if block.type != "text":
            raise bad_field(f"{place}.content[{number}].type", "must be text in a system message")
        blocks.append(SystemBlock(block.type, block.text))
    return blocks


def _texts(blocks: Sequence[SystemBlock | MessageBlock], place: str) -> list[str]:
    """The texts of blocks that must be text."""
    texts = []
    for number, block in enumerate(blocks):
        where = f"{place}[{number}]"
        if block.type != "text":
            raise _unknown_block(block.type, where, "text")
        texts.append(_required(block.text, f"{where}.text"))
    return texts


def _required(value: str | None, place: str) -> str:
    if value is None:
        raise bad_field(place, "this field is required")
    return value


def _unknown_block(kind: str, place: str, allowed: str) -> Problem:
    if kind in NOT_TEXT:
        return bad_field(
            f"{place}.type", f"blocks of type {kind} are not supported: only text is", "unsupported"
        )
    if kind in OTHERS:
        reason = f"blocks of type {kind} are not supported: no tools run on this server"
        return bad_field(f"{place}.type", reason, "unsupported")
    return bad_field(f"{place}.type", f"must be one of {allowed}")


# --- the user -------------------------------------------------------------------------------------


def _add_user(made: Conversation, message: Message, place: str) -> None:
    """A user's message: results first, then the text."""
    if isinstance(message.content, str):
        said = [message.content]
    else:
        said = []
        for number, block in enumerate(message.content):
            where = f"{place}.content[{number}]"
            if block.type == "tool_result":
                _add_result(made, block, where)
            elif block.type == "text":
                said.append(_required(block.text, f"{where}.text"))
            else:
                raise _unknown_block(block.type, where, "text, tool_result")
        if not message.content:
            raise bad_field(f"{place}.content", "must not be empty", "empty_turn")
    if said:
        made.say(place, "\n".join(said))


def _add_result(made: Conversation, block: MessageBlock, place: str) -> None:
    call = _required(block.tool_use_id, f"{place}.tool_use_id")
    if call not in made.calls:
        reason = "names no tool_use block of the assistant's message before it"
        raise bad_field(f"{place}.tool_use_id", reason)
    content = block.content
    if content is None or isinstance(content, str):
        text = content or ""
    else:
        text = "\n".join(_texts(content, f"{place}.content"))
    if block.is_error:
        text = f"Error: {text}"
    made.add(place, role="tool", tool_call_id=call, content=text)


# --- the assistant --------------------------------------------------------------------------------


def _add_assistant(made: Conversation, message: Message, place: str) -> None:
    """An assistant's message: text, thinking and calls, each in order."""
    last = made.messages[-1] if made.messages else None
    if last is None or last["role"] != "assistant":
        last = made.add(place, role="assistant", content="")
        made.calls = set()
    if isinstance(message.content, str):
        last["content"] += message.content
        return
    for number, block in enumerate(message.content):
        where = f"{place}.content[{number}]"
        if block.type == "text":
            last["content"] += _required(block.text, f"{where}.text")
        elif block.type == "thinking":
            thought = _required(block.thinking, f"{where}.thinking") or _opened(block.signature, where)
            if thought:
                last["reasoning_content"] = last.get("reasoning_content", "") + thought
        elif block.type == "tool_use":
            last.setdefault("tool_calls", []).append(_call(made, block, where))
        elif block.type != "redacted_thinking":  # It is another server's, and only that one can read it.
            raise _unknown_block(block.type, where, "text, thinking, redacted_thinking, tool_use")


def _call(made: Conversation, block: MessageBlock, place: str) -> dict[str, Any]:
    call = _required(block.id, f"{place}.id")
    if not call or call in made.calls:
        raise bad_field(f"{place}.id", "must be the id of one block, and not empty")
    made.calls.add(call)
    name = _required(block.name, f"{place}.name")
    if block.input is None:
        raise bad_field(f"{place}.input", "this field is required")
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def sealed(thinking: str) -> str:
    """A signature that holds thinking whose text is not shown, so that the client sends it back."""
    return SEALED + base64.urlsafe_b64encode(thinking.encode()).decode()


def _opened(signature: str | None, place: str) -> str:
    """The thinking that a signature of ours holds; nothing for any other."""
    if signature is None or not signature.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(SEALED), altchars=b"-_", validate=True).decode()
    except ValueError:
        raise bad_field(f"{place}.signature", "was not made by this server") from None
