"""Requests of the API process to its text processes, and the answers.

MessagePack in frames over a pipe: the lengths of the message and of the content that is attached to it, then
both. One job at a time, and one answer for each.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, TypeVar

import msgspec

from holdfast.server.link import wire

__all__ = [
    "LENGTHS",
    "NOTHING",
    "Answer",
    "AnswerTo",
    "Asks",
    "Attached",
    "Body",
    "Chat",
    "ConstraintFields",
    "Found",
    "Frame",
    "Job",
    "Read",
    "Refused",
    "Setup",
    "Spell",
    "Spelled",
    "Started",
    "Stretch",
    "Text",
    "Tokens",
    "TrailFields",
    "Written",
    "decode_answer",
    "decode_job",
    "frame",
]

LENGTHS = struct.Struct(">II")
"""The header of a message: its length, and the length of what is attached to it."""
NOTHING = memoryview(b"")

M = TypeVar("M", bound=msgspec.Struct)


class Attached(msgspec.Struct, frozen=True):
    """A message with megabytes of content, which is sent behind the message and not encoded in it."""

    content: memoryview


class Setup(msgspec.Struct, tag="setup", frozen=True):
    """The first message: the vocabulary, and what a job may take.

    A job may make at most `tokens_max` tokens, take `memory_bytes` more than the process has at its start,
    render for `render_seconds` and compute for `job_seconds`. `calls` and `reasoning` name the model's
    formats.
    """

    vocabulary: wire.Vocabulary
    tokens_max: int
    memory_bytes: int
    render_seconds: float
    job_seconds: float
    nice: int = 0
    calls: str | None = None
    reasoning: str | None = None
    secret: bytes = b""
    """What rendered texts depend on: the same in all processes whose texts are compared."""


class Text(msgspec.Struct, tag="text", frozen=True):
    """The tokens of a text; with the marks of a beginning if it is the `first` of a history."""

    text: str
    first: bool


class ConstraintFields(msgspec.Struct, frozen=True):
    """A grammar as the client wrote it: its kind, and the field that problems name."""

    kind: str
    value: Any
    field: str


class Asks(msgspec.Struct, omit_defaults=True, frozen=True):
    """A turn's requirements of its answer. Without `reads`, all of the answer is text: a plain completion."""

    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    template_kwargs: dict[str, Any] = {}
    constraint: ConstraintFields | None = None
    separate_reasoning: bool = True
    thinking_tokens: int | None = None
    reads: bool = True


class Stretch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """A part of a conversation's text: its length and its digest, or the tokens that were generated there.

    `before` is the token before them.
    """

    characters: int = 0
    digest: bytes = b""
    tokens: list[int] = []
    before: int | None = None


class TrailFields(msgspec.Struct, array_like=True, frozen=True):
    """A session's text in stretches (see `trails`); those from `merge[0]` to `merge[1]` are to be merged."""

    stretches: list[Stretch]
    merge: tuple[int, int] = (0, 0)


class Chat(msgspec.Struct, tag="chat", frozen=True):
    """The tokens of messages: a whole conversation, or the continuation of one that ended with `last_token`.

    `system` comes before the messages of a whole conversation. `calls` are those that the conversation ended
    in. `tools` of a one-shot request that must not be called are not shown to the model. With `trails` (of
    sessions that may have the beginning of a whole conversation; see `trails`) only the tokens after the
    longest common beginning are answered, and where it ends. With `history` (the tokens of the session that
    the messages are for, packed) only those after the history. `prompt_end` is the name of a `PromptEnd`.
    """

    messages: list[dict[str, Any]]
    last_token: int | None
    first: bool
    system: str | None = None
    calls: list[wire.CallFields] = []
    asks: Asks = Asks()
    one_shot: bool = False
    trails: list[TrailFields] | None = None
    history: bytes | None = None
    prompt_end: str = "answer"


class AnswerTo(msgspec.Struct, tag="answer_to", frozen=True):
    """The grammar and the specification of the answer to a prompt that ends in these tokens."""

    tail: list[int]
    asks: Asks


class Spell(msgspec.Struct, tag="spell", frozen=True):
    """The text of tokens."""

    tokens: list[int]


class Body(Attached, tag="body", frozen=True):
    """A JSON text: read it, and count its values."""

    values_max: int


Job = Setup | Text | Chat | AnswerTo | Spell | Body


class Started(msgspec.Struct, tag="started", frozen=True):
    """The vocabulary is there."""


class Tokens(msgspec.Struct, tag="tokens", frozen=True):
    """The result as tokens."""

    tokens: list[int]


class Found(msgspec.Struct, omit_defaults=True, frozen=True):
    """Where a conversation goes on: after `stretches` of trail `trail`; None if none has its beginning.

    `said` is the last stretch of the trail, which was tokens, if it was found. If the conversation `is_all`
    there, it ends after one stretch more than the answered tokens follow. `merged` stands for the stretches
    that were to be merged, if they were found. `input` is the text of the answered tokens in stretches, and
    `ends` after how many tokens each ends; the last is what opens the answer, if that `is_known`.
    """

    input: list[Stretch]
    ends: list[int]
    is_known: bool = False
    trail: int | None = None
    stretches: int = 0
    is_all: bool = False
    said: Stretch | None = None
    merged: Stretch | None = None


class Written(msgspec.Struct, tag="written", frozen=True):
    """A turn's tokens, its grammar, and how its answer is read."""

    tokens: list[int]
    grammar: wire.GrammarFields | None = None
    answer: wire.AnswerFields | None = None
    found: Found | None = None


class Spelled(msgspec.Struct, tag="spelled", frozen=True):
    """The result as text."""

    text: str


class Read(Attached, tag="read", frozen=True):
    """A JSON text as MessagePack: valid, of a known size, and without escapes, which take longest to read."""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """A job that cannot be done, and why: `context_length_exceeded` with the count of tokens if known, a body
    with the field that holds most."""

    code: str
    message: str
    tokens: int | None = None
    param: str | None = None


Answer = Started | Tokens | Written | Spelled | Read | Refused

_encoder = msgspec.msgpack.Encoder()
_jobs: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class Frame(NamedTuple):
    """A message as it is sent: behind its header, and what is attached to it."""

    message: bytes
    attached: memoryview

    @property
    def size(self) -> int:
        """Bytes of both."""
        return len(self.message) + len(self.attached)


def frame(message: Job | Answer) -> Frame:
    """A message with its header before it; its content is attached as it is."""
    attached = message.content if isinstance(message, Attached) else NOTHING
    written = _encoder.encode(_with_content(message, NOTHING))
    return Frame(LENGTHS.pack(len(written), len(attached)) + written, attached)


def decode_job(message: bytes, attached: memoryview) -> Job:
    """A request of the API process."""
    return _with_content(_jobs.decode(message), attached)


def decode_answer(message: bytes, attached: memoryview) -> Answer:
    """An answer of a text process."""
    return _with_content(_answers.decode(message), attached)


def _with_content(message: M, content: memoryview) -> M:
    return msgspec.structs.replace(message, content=content) if isinstance(message, Attached) else message
