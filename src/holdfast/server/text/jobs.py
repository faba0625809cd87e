"""What the API process asks of its text processes, and what they answer.

MessagePack in frames over a pipe: four bytes for the length, then the message. One job at a time, and one
answer for each.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.server.link import wire

__all__ = [
    "HEADER",
    "Answer",
    "Body",
    "Chat",
    "Job",
    "Read",
    "Refused",
    "Setup",
    "Spell",
    "Spelled",
    "Started",
    "Text",
    "Tokens",
    "decode_answer",
    "decode_job",
    "frame",
]

HEADER = 4
"""Bytes that say how long a message is."""


class Setup(msgspec.Struct, tag="setup", frozen=True):
    """The first message: the vocabulary, and what a job may take.

    A job may make at most `tokens_max` tokens, take `memory_bytes` more than the process has at its start,
    render for `render_seconds` and compute for `job_seconds`.
    """

    vocabulary: wire.Vocabulary
    tokens_max: int
    memory_bytes: int
    render_seconds: float
    job_seconds: float
    nice: int = 0


class Text(msgspec.Struct, tag="text", frozen=True):
    """The tokens of a text; with the marks of a beginning if it is the `first` of a history."""

    text: str
    first: bool


class Chat(msgspec.Struct, tag="chat", frozen=True):
    """The tokens of messages: a whole conversation, or what follows one that ended with `last_token`."""

    messages: list[dict[str, Any]]
    last_token: int | None
    first: bool


class Spell(msgspec.Struct, tag="spell", frozen=True):
    """The text of tokens."""

    tokens: list[int]


class Body(msgspec.Struct, tag="body", frozen=True):
    """A JSON text: read it, and count its values."""

    content: bytes
    values_max: int


Job = Setup | Text | Chat | Spell | Body


class Started(msgspec.Struct, tag="started", frozen=True):
    """The vocabulary is there."""


class Tokens(msgspec.Struct, tag="tokens", frozen=True):
    """What was asked for, as tokens."""

    tokens: list[int]


class Spelled(msgspec.Struct, tag="spelled", frozen=True):
    """What was asked for, as text."""

    text: str


class Read(msgspec.Struct, tag="read", frozen=True):
    """A JSON text as MessagePack: valid, of a known size, and without escapes, which take longest to read."""

    content: bytes


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """A job that cannot be done, and why: `context_length_exceeded` with the count of tokens if known, a body
    with the field that holds most."""

    code: str
    message: str
    tokens: int | None = None
    param: str | None = None


Answer = Started | Tokens | Spelled | Read | Refused

_encoder = msgspec.msgpack.Encoder()
_jobs: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def frame(message: Job | Answer) -> bytes:
    """A message with its length before it."""
    written = _encoder.encode(message)
    return len(written).to_bytes(HEADER, "big") + written


def decode_job(content: bytes) -> Job:
    """What the API process asks for."""
    return _jobs.decode(content)


def decode_answer(content: bytes) -> Answer:
    """What a text process answers."""
    return _answers.decode(content)
