"""A turn as a route asks for it of the service: input, sampling and options, whatever the dialect."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.engine.sampling import Sampling
from holdfast.engine.text.chat_template import PromptEnd
from holdfast.server.dialects.answer_options import AnswerOptions
from holdfast.server.dialects.turn_options import TurnOptions
from holdfast.server.link import wire

__all__ = ["PLAIN_ANSWER", "Input", "SessionGiven", "TurnAsked", "fingerprint_of", "wire_sampling"]


NO_OPTIONS = TurnOptions()
PLAIN_ANSWER = AnswerOptions()


@dataclass(frozen=True, slots=True)
class Input:
    """The input of a turn: exactly one of text, messages and tokens, or none where generation continues."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[int] | None = None
    templated: bool = True
    """Whether text is a user message for the chat template, or a raw prompt."""
    prompt_end: PromptEnd = PromptEnd.ANSWER
    """Where the prompt of messages ends."""


@dataclass(frozen=True, slots=True)
class SessionGiven:
    """The fields of a new session; `ttl` in seconds, `tools` in OpenAI's form.

    `settings` are the given ones of `engine.session_settings`.
    """

    ttl: float | None = None
    system: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TurnAsked:
    """A turn to start. `fields` maps declared field names to those of the client's dialect."""

    input: Input
    sampling: Sampling
    name: str
    options: TurnOptions = NO_OPTIONS
    answer: AnswerOptions = PLAIN_ANSWER
    reads: bool = True
    """Whether reasoning and tool calls are found in the answer; a plain completion is text alone."""
    cut: bool = False
    goes_on: bool = False
    computes_from: int | None = None
    fingerprint: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    steers: int | None = None
    """The turn before is cut after so many of its tokens (-1: all), and this one goes on from there."""
    note: str | None = None
    """Text that is kept with the turn of a session, for the dialect that wrote it."""


def fingerprint_of(body: Any) -> str:
    """A digest of a body, to tell a repeated request from another one with the same id."""
    return hashlib.sha256(msgspec.json.encode(body)).hexdigest()


def wire_sampling(sampling: Sampling) -> wire.SamplingFields:
    """Sampling as it is sent to the engine process."""
    return msgspec.convert(sampling, wire.SamplingFields, from_attributes=True)
