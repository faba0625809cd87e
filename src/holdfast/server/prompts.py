"""Prompts: chat messages and text to token ids.

A conversation's first turn is rendered whole by the model's chat template; later turns render only the new
messages. Rendering and tokenising run in text processes (`server/text/lanes.py`), since they would block the
event loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.engine.answer_builder import TAIL_TOKENS
from holdfast.engine.portions import Portions
from holdfast.engine.text.control_tokens import SECRET_BYTES
from holdfast.server.dialects.refused import MESSAGE_FIELDS
from holdfast.server.dialects.requests import make_body, refuse_unbuilt
from holdfast.server.http.problems import STATUS_OF_CODE, Problem, bad_field
from holdfast.server.limits import MESSAGES_MAX, Room, too_long, values_max
from holdfast.server.link import wire
from holdfast.server.text import jobs
from holdfast.server.text.lanes import JOB_SECONDS, Lane, TextProcess
from holdfast.server.text.process import tokenizer_of

__all__ = [
    "CHAT_MESSAGE",
    "ROLES",
    "ChatMessage",
    "ContentPart",
    "Prompts",
    "SessionMessage",
    "begins_with_system",
    "opens_history",
    "plain_messages",
]

SMALL_CHARACTERS = 1 << 14
"""Inputs up to this size are tokenised in a few milliseconds, by a process of their own."""
PORTION = 64
"""Messages in one portion."""

MEMORY_BYTES = 512 << 20
"""Memory limit of a text process for a job, besides TOKEN_BYTES per token of the context."""
TOKEN_BYTES = 1 << 10
RENDER_SECONDS = 10.0
LARGE_NICE = 5
WAITLESS_BYTES = 4 << 20
"""JSON bodies up to this size do not wait for a process to start."""

PARAM_OF_CODE = {"chat_template": "messages", "tokenizer": "input"}
"""The field at fault, by the code of a refusal."""


class ContentPart(msgspec.Struct):
    """A part of a message; only text is supported."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message of a conversation, as OpenAI's clients write it."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SYSTEM_ROLES = ("system", "developer")

CHAT_MESSAGE = make_body(ChatMessage, refused=MESSAGE_FIELDS)


class SessionPart(ContentPart, forbid_unknown_fields=True):
    """A part of a message to a session."""


class SessionMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message to a session: the same fields, and no others."""

    role: str
    content: str | list[SessionPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


def plain_messages(
    messages: Sequence[ChatMessage | SessionMessage], field: str = "messages"
) -> Portions[list[dict[str, Any]]]:
    """Messages as chat templates take them: a role from the list and a text. In portions."""
    if not messages:
        raise bad_field(field, "must hold at least one message", "empty_turn")
    if len(messages) > MESSAGES_MAX:
        raise bad_field(field, f"may hold at most {MESSAGES_MAX} messages")
    plain: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        if number % PORTION == PORTION - 1:
            yield
        place = f"{field}[{number}]"
        if message.role not in ROLES:
            raise bad_field(f"{place}.role", f"must be one of {', '.join(ROLES)}")
        if isinstance(message, ChatMessage):
            refuse_unbuilt(message, f"{place}.")
        entry: dict[str, Any] = {"role": message.role, "content": _text_of(message, place)}
        if message.name is not None:
            entry["name"] = message.name
        _add_calls(entry, message, place)
        plain.append(entry)
    return plain


def _text_of(message: ChatMessage | SessionMessage, place: str) -> str:
    """The text of a message; only the assistant's may have none."""
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise bad_field(f"{place}.content", "this field is required")
        return ""
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in ("text", "input_text") or part.text is None:
            raise bad_field(f"{place}.content", "only parts of type text are supported yet")
    return "".join(part.text or "" for part in content)


def _add_calls(entry: dict[str, Any], message: ChatMessage | SessionMessage, place: str) -> None:
    """The tool calls, the call that is answered and the reasoning, where the role has them."""
    for name, role in (
        ("tool_calls", "assistant"),
        ("tool_call_id", "tool"),
        ("reasoning_content", "assistant"),
        ("reasoning", "assistant"),
    ):
        value = getattr(message, name)
        if value:
            if message.role != role:
                raise bad_field(f"{place}.{name}", f"only messages of role {role} have this field")
            entry[name] = value
    if message.role == "tool" and not message.tool_call_id:
        raise bad_field(f"{place}.tool_call_id", "this field is required")


def opens_history(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether messages are a whole conversation rather than only new messages.

    They are if one is the assistant's, or if a system message comes before others.
    """
    return any(message["role"] == "assistant" for message in messages) or (
        begins_with_system(messages) and any(message["role"] not in SYSTEM_ROLES for message in messages)
    )


def begins_with_system(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether the first message is the system's."""
    return bool(messages) and messages[0]["role"] in SYSTEM_ROLES


class Prompts:
    """Renders and tokenises prompts of one model.

    Inputs that cannot fit the context are rejected by their size. All others go to text processes: one for
    small inputs, one for large ones, so that small ones do not wait for large ones.
    """

    def __init__(
        self,
        vocabulary: wire.Vocabulary,
        context_length: int,
        *,
        calls: str | None = None,
        reasoning: str | None = None,
    ) -> None:
        """`calls` and `reasoning` name the model's formats."""
        self.tokenizer = tokenizer_of(vocabulary)
        self.room = Room(context_length, context_length * self.tokenizer.bytes_per_token)
        bos = self.tokenizer.names.get("bos_token")
        self.bos = None if bos is None else self.tokenizer.token_of(bos)
        memory = MEMORY_BYTES + TOKEN_BYTES * context_length
        secret = secrets.token_bytes(SECRET_BYTES)
        small = jobs.Setup(
            vocabulary,
            context_length,
            memory,
            RENDER_SECONDS,
            JOB_SECONDS,
            calls=calls,
            reasoning=reasoning,
            secret=secret,
        )
        large = msgspec.structs.replace(small, nice=LARGE_NICE)
        self._small = Lane(lambda: TextProcess.start(small))
        self._large = Lane(lambda: TextProcess.start(large))

    def warm_up(self) -> None:
        """Start the process for small inputs."""
        self._small.warm_up()

    def close(self) -> None:
        """End the processes."""
        self._small.close()
        self._large.close()

    async def text(self, text: str, *, first: bool, tenant: str = "") -> list[int]:
        """Tokenise plain text; with the special tokens of a beginning if it is `first`."""
        self._require_length(len(text))
        return await self._tokens(jobs.Text(text, first), len(text), tenant)

    async def chat(self, job: jobs.Chat, tenant: str = "") -> jobs.Written:
        """Render and tokenise a whole conversation, or the messages that follow one."""
        size = sum(map(_characters_of, job.messages)) + len(job.system or "") + _characters(job.asks.tools)
        self._require_length(size)
        return await self._written(job, size + _constraint_size(job.asks), tenant)

    async def answer_to(self, tokens: list[int], asks: jobs.Asks, tenant: str = "") -> jobs.Written:
        """The answer's requirements of a turn with a prompt of tokens."""
        job = jobs.AnswerTo(tokens[-TAIL_TOKENS:], asks)
        return await self._written(job, _characters(asks.tools) + _constraint_size(asks), tenant)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self.tokenizer.template is not None

    async def decode(self, tokens: list[int], tenant: str = "") -> str:
        """The text of tokens."""
        answer = await self._ask(jobs.Spell(tokens), len(tokens), tenant)
        assert isinstance(answer, jobs.Spelled)
        return answer.text

    async def read_body(self, content: memoryview, tenant: str = "") -> memoryview:
        """A large JSON body as MessagePack; raises the problem with it.

        The first one does not wait for the process of large inputs to start: the other one reads it.
        """
        size = len(content)
        if size <= WAITLESS_BYTES and not self._large.is_up:
            self._large.warm_up()
            size = 0
        answer = await self._ask(jobs.Body(content, values_max(self.room)), size, tenant)
        assert isinstance(answer, jobs.Read)
        return answer.content

    def begins_with_mark(self, text: str, tokens: Sequence[int]) -> bool:
        """Whether the tokenizer has put the mark of a beginning before a text."""
        mark = self.tokenizer.names.get("bos_token", "")
        return self.bos is not None and tokens[:1] == [self.bos] and not text.startswith(mark)

    def require_tokens(self, tokens: Sequence[int], vocabulary: int) -> None:
        """Raise for token ids of a client that exceed the context or the vocabulary."""
        if len(tokens) > self.room.tokens:
            raise self.too_long(len(tokens))
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise bad_field("input", f"token ids must be from 0 to {vocabulary - 1}")

    def too_long(self, tokens: int | None = None) -> Problem:
        """An input that exceeds the context; `tokens` is its length where it is known."""
        return too_long(self.room, "input", tokens)

    def _require_length(self, characters: int) -> None:
        """Raise for a text too long to fit the context."""
        if characters > self.room.text_bytes:
            raise self.too_long()

    async def _written(self, job: jobs.Job, size: int, tenant: str) -> jobs.Written:
        answer = await self._ask(job, size, tenant)
        assert isinstance(answer, jobs.Written)
        return answer

    async def _tokens(self, job: jobs.Job, size: int, tenant: str) -> list[int]:
        answer = await self._ask(job, size, tenant)
        assert isinstance(answer, jobs.Tokens)
        return answer.tokens

    async def _ask(self, job: jobs.Job, size: int, tenant: str) -> jobs.Answer:
        lane = self._small if size <= SMALL_CHARACTERS else self._large
        try:
            answer = await lane.ask(job, tenant)
        except (TypeError, ValueError, OverflowError) as error:
            raise Problem(400, "tokenizer", "input: cannot be tokenised", "input") from error
        if isinstance(answer, jobs.Refused):
            if answer.code == "context_length_exceeded":
                raise self.too_long(answer.tokens)
            param = answer.param or PARAM_OF_CODE.get(answer.code)
            named = param is None or answer.message.startswith(param)
            message = answer.message if named else f"{param}: {answer.message}"
            raise Problem(STATUS_OF_CODE.get(answer.code, 400), answer.code, message, param)
        return answer


def _constraint_size(asks: jobs.Asks) -> int:
    return 0 if asks.constraint is None else _characters(asks.constraint.value)


def _characters_of(message: Mapping[str, Any]) -> int:
    """The characters of a message: most have only texts."""
    return sum([len(value) if isinstance(value, str) else _characters(value) for value in message.values()])


def _characters(value: Any) -> int:
    """The characters of tools, a schema, or part of a message."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_characters(key) + _characters(inner) for key, inner in value.items())
    return sum(map(_characters, value)) if isinstance(value, list) else 0
