"""From what clients say to tokens: chat messages, plain text, token ids.

A conversation's first turn is rendered whole by the model's chat template; a later one renders only what is
new, so that the history is never written again. Tokenising runs in threads, off the event loop: the
tokenizer lets other threads run meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import GenericAlias
from typing import Any, TypeVar

import msgspec

from holdfast.engine.chat_template import ChatTemplateError
from holdfast.engine.tokenizer import Tokenizer, read_encoder
from holdfast.server import wire
from holdfast.server.problems import Problem, bad_field
from holdfast.server.unbuilt import MESSAGE_FIELDS, refuse_unbuilt, refusing

__all__ = [
    "READ_MESSAGES",
    "ROLES",
    "ChatMessage",
    "ContentPart",
    "Prompts",
    "SessionMessage",
    "begins_with_system",
    "opens_history",
    "plain_messages",
]

T = TypeVar("T")

MESSAGES_MAX = 8192
THREADS = 2


class ContentPart(msgspec.Struct):
    """A part of a message; only text is understood."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message of a conversation, as OpenAI's clients write it."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SYSTEM_ROLES = ("system", "developer")

READ_MESSAGES = GenericAlias(list, (refusing(ChatMessage, MESSAGE_FIELDS),))
"""Such messages as they are read: with the fields that are refused by name."""


class SessionPart(ContentPart, forbid_unknown_fields=True):
    """A part of a message to a session."""


class SessionMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message to a session: the same fields, and no others."""

    role: str
    content: str | list[SessionPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None


def plain_messages(
    messages: Sequence[ChatMessage | SessionMessage], field: str = "messages"
) -> list[dict[str, Any]]:
    """Messages as chat templates know them: a role from the list, and a text."""
    if not messages:
        raise bad_field(field, "must hold at least one message", "empty_turn")
    if len(messages) > MESSAGES_MAX:
        raise bad_field(field, f"may hold at most {MESSAGES_MAX} messages")
    plain: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        place = f"{field}[{number}]"
        if message.role not in ROLES:
            raise bad_field(f"{place}.role", f"must be one of {', '.join(ROLES)}")
        if isinstance(message, ChatMessage):
            refuse_unbuilt(message, f"{place}.")
        elif message.reasoning_content:
            raise bad_field(f"{place}.reasoning_content", "is not supported yet", "unsupported")
        content = message.content
        if content is None:
            if message.role != "assistant":
                raise bad_field(f"{place}.content", "this field is required")
            content = ""
        if not isinstance(content, str):
            for part in content:
                if part.type not in ("text", "input_text") or part.text is None:
                    raise bad_field(f"{place}.content", "only parts of type text are supported yet")
            content = "".join(part.text or "" for part in content)
        entry = {"role": message.role, "content": content}
        if message.name is not None:
            entry["name"] = message.name
        plain.append(entry)
    return plain


def opens_history(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether messages are a conversation from its start, rather than what is new in one.

    They are if the assistant is among those who speak, or if a system message comes before others.
    """
    return any(message["role"] == "assistant" for message in messages) or (
        begins_with_system(messages) and any(message["role"] not in SYSTEM_ROLES for message in messages)
    )


def begins_with_system(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether the first message is the system's."""
    return bool(messages) and messages[0]["role"] in SYSTEM_ROLES


class Prompts:
    """Writes prompts for one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")
        bos = tokenizer.names.get("bos_token")
        self.bos = None if bos is None else tokenizer.token_of(bos)

    @classmethod
    def of(cls, vocabulary: wire.Vocabulary) -> Prompts:
        """Prompts for the model that an engine serves."""
        return cls(
            Tokenizer(
                read_encoder(vocabulary.encoder),
                template=vocabulary.template,
                names=vocabulary.names,
                eos_tokens=tuple(vocabulary.eos_tokens),
            )
        )

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def text(self, text: str, *, first: bool) -> list[int]:
        """Plain text; at the start of a history with the marks that belong there."""
        return await self._off_loop(lambda: self.tokenizer.encode(text, add_special_tokens=first))

    async def chat(
        self, messages: Sequence[dict[str, Any]], *, last_token: int | None, first: bool
    ) -> list[int]:
        """Messages: a whole conversation, or what follows one whose last token was `last_token`."""
        if first:
            return await self._off_loop(lambda: self.tokenizer.encode_chat(messages))
        return await self._off_loop(
            lambda: self.tokenizer.encode_continuation(messages, last_token=last_token)
        )

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self.tokenizer.template is not None

    async def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""
        return await self._off_loop(lambda: self.tokenizer.decode(tokens, skip_special_tokens=False))

    async def _off_loop(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except ChatTemplateError as error:
            raise Problem(400, "chat_template", str(error), "messages") from error
        except (TypeError, ValueError, OverflowError, UnicodeError) as error:
            raise Problem(400, "tokenizer", "the input cannot be tokenised", "input") from error
