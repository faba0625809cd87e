"""The messages that a client sends over `/v1/realtime`, and the input that waits for its commit."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import msgspec

from holdfast.server.dialects.requests import make_body
from holdfast.server.dialects.tables import REALTIME
from holdfast.server.http.bodies import Reading, parse_large
from holdfast.server.http.problems import Problem, bad_field
from holdfast.server.limits import MESSAGES_MAX
from holdfast.server.prompts import SessionMessage
from holdfast.server.routes.realtime_openai.protocol import misunderstood
from holdfast.server.routes.sessions import SAMPLING, Count, Priority, SamplingBody

__all__ = [
    "DECODED",
    "AppendMessage",
    "ChangeMessage",
    "CloseMessage",
    "CommitMessage",
    "ForkMessage",
    "InterruptMessage",
    "OpenMessage",
    "PendingInput",
    "ReplaceMessage",
    "RewindMessage",
    "Said",
    "read_message",
]

Seq = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Message(msgspec.Struct, tag_field="type", forbid_unknown_fields=True):
    """A message of a client."""


class OpenMessage(Message, tag="session.open"):
    """Open a session, or attach to an open one."""

    id: str | None = None
    ttl: float | None = None
    metadata: dict[str, Any] | None = None
    system: str | None = None
    tools: list[dict[str, Any]] | None = None
    pin: bool | None = None
    priority: Priority | None = None
    keep_reasoning: bool | None = None
    resume_after_seq: Seq | None = None


class AppendMessage(Message, tag="input.append"):
    """More input of the turn to come."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[SessionMessage] | None = None


class ReplaceMessage(Message, tag="input.replace"):
    """Something else from a character of the appended text on."""

    text: str
    start: Count


class CommitMessage(Message, tag="input.commit"):
    """Start a turn with the appended input."""

    turn_id: str | None = None
    sampling: SamplingBody = msgspec.field(default_factory=SamplingBody)
    mode: Literal["after", "interrupt", "steer"] = "after"
    keep_tokens: Count | None = None


class InterruptMessage(Message, tag="response.interrupt"):
    """Interrupt a turn; keep some of its tokens, all, or none."""

    turn_id: str
    keep_tokens: Count | None = None
    keep: Literal["all", "none"] | None = None


class RewindMessage(Message, tag="session.rewind"):
    """Rewind so that `to_turn` turns remain."""

    to_turn: Count
    request_id: str | None = None


class ForkMessage(Message, tag="session.fork"):
    """A second session, from the last turn or an older one."""

    id: str | None = None
    at_turn: Count | None = None
    request_id: str | None = None


class ChangeMessage(Message, tag="session.change"):
    """Change settings of the session; omitted ones stay."""

    ttl: float | msgspec.UnsetType | None = msgspec.UNSET
    metadata: dict[str, Any] | None = None
    pin: bool | None = None
    priority: Priority | None = None
    keep_reasoning: bool | None = None


class CloseMessage(Message, tag="session.close"):
    """Close the session; the connection may open another."""


COMMIT = make_body(CommitMessage, REALTIME.turn, REALTIME.answer, nested={"sampling": SAMPLING})

Said = (
    OpenMessage
    | AppendMessage
    | ReplaceMessage
    | CommitMessage
    | InterruptMessage
    | RewindMessage
    | ForkMessage
    | ChangeMessage
    | CloseMessage
)

DECODED: Any = (
    OpenMessage
    | AppendMessage
    | ReplaceMessage
    | COMMIT.read
    | InterruptMessage
    | RewindMessage
    | ForkMessage
    | ChangeMessage
    | CloseMessage
)
"""The union that decodes messages: the commit with its table's fields."""


async def read_message(text: str, reading: Reading) -> Said:
    """Decode a message; an invalid one is a problem that names the field."""
    try:
        content = text.encode("utf-8", "surrogatepass")
        return cast(Said, await parse_large(content, DECODED, reading))
    except Problem as problem:
        raise misunderstood(text, problem) from None


class PendingInput:
    """Input that is not committed yet: text, token ids or messages."""

    def __init__(self, bytes_max: int, tokens_max: int, vocabulary: int) -> None:
        self._bytes_max = bytes_max
        self._tokens_max = tokens_max
        self._vocabulary = vocabulary
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._messages: list[SessionMessage] = []
        self._bytes = 0
        self.refused = False
        """Whether its commit was rejected: it may be committed again; the next append starts anew."""

    @property
    def _kind(self) -> str | None:
        """The field that the input so far came in."""
        if self.refused:
            return None
        kinds = {"text": self._texts, "token_ids": self._tokens, "messages": self._messages}
        return next((name for name, held in kinds.items() if held), None)

    def append(self, message: AppendMessage) -> None:
        """Append, or start anew after a rejected commit; an invalid append changes nothing."""
        given = [name for name in ("text", "token_ids", "messages") if getattr(message, name) is not None]
        if len(given) != 1:
            raise bad_field("text", "give one of text, token_ids and messages")
        if self._kind not in (None, given[0]):
            raise bad_field(given[0], f"this turn's input is {self._kind} so far")
        self._require_room(message)
        if self.refused:
            self.clear()
        if message.text:
            self._texts.append(message.text)
            self._bytes += len(message.text.encode())
        self._tokens += message.token_ids or []
        self._messages += message.messages or []

    def replace(self, message: ReplaceMessage) -> None:
        """Let the text be another from a character on; an invalid revision changes nothing."""
        if self._kind not in (None, "text"):
            raise bad_field("text", f"this turn's input is {self._kind} so far: only text can be replaced")
        text = "" if self.refused else "".join(self._texts)
        if message.start > len(text):
            raise bad_field("start", f"the input has {len(text)} characters", "unknown_position")
        text = text[: message.start] + message.text
        if len(text.encode()) > self._bytes_max:
            raise bad_field("text", f"the input may take at most {self._bytes_max} bytes")
        self.clear()
        self._texts, self._bytes = [text] if text else [], len(text.encode())

    def _require_room(self, message: AppendMessage) -> None:
        bytes_before, tokens_before, messages_before = (
            (0, 0, 0) if self.refused else (self._bytes, len(self._tokens), len(self._messages))
        )
        if message.text is not None and bytes_before + len(message.text.encode()) > self._bytes_max:
            raise bad_field("text", f"the input may take at most {self._bytes_max} bytes")
        tokens = message.token_ids
        if tokens is not None:
            if tokens_before + len(tokens) > self._tokens_max:
                raise bad_field("token_ids", f"the input may hold at most {self._tokens_max} tokens")
            if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
                raise bad_field("token_ids", f"must be from 0 to {self._vocabulary - 1}")
        if message.messages is not None and messages_before + len(message.messages) > MESSAGES_MAX:
            raise bad_field("messages", f"the input may hold at most {MESSAGES_MAX} messages")

    def said(self) -> str | list[int | SessionMessage]:
        """All of it."""
        return [*self._tokens, *self._messages] or "".join(self._texts)

    def clear(self) -> None:
        """Discard it."""
        self._texts, self._tokens, self._messages, self._bytes, self.refused = [], [], [], 0, False
