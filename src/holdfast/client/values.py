"""The values of the client: arguments and results.

Each `from_body` reads a JSON object of the server and ignores unknown fields, so that newer servers may add
some. Used by both clients and their callers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from holdfast.client.errors import ProtocolError

__all__ = [
    "Body",
    "Generated",
    "Keep",
    "Message",
    "Prompt",
    "Said",
    "Sampling",
    "SessionView",
    "Timing",
    "TurnFields",
    "TurnOptions",
    "TurnResult",
    "Usage",
]

Body = dict[str, Any]
Message = Mapping[str, Any]
Said = str | Sequence[int] | Sequence[Message]
"""The input of a turn: text, token ids, or chat messages."""

Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
"""Prompts of one-shot completions: one or more texts or lists of token ids."""

Keep = int | Literal["heard", "all", "none"]
"""What an interrupt keeps: a number of tokens, those handed to the caller so far, all, or none."""


class Sampling(TypedDict, total=False):
    """Sampling fields of the server's declaration that have a type here; others are sent as they are given.

    Fields left out are the checkpoint's defaults.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool


class TurnOptions(TypedDict, total=False):
    """Turn options of the server's declaration."""

    on_abort: Literal["rollback", "keep"]
    timeout: float | None
    append_history: bool


class TurnFields(Sampling, TurnOptions, total=False):
    """All fields of a turn besides its input and its id."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a turn: the prompt with its history, its cached and its computed part, the completion."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Usage:
        """From a turn, or from an OpenAI completion, which has fewer fields."""
        details = body.get("prompt_tokens_details") or {}
        prompt = int(body["prompt_tokens"])
        completion = int(body["completion_tokens"])
        cached = int(body.get("cached_tokens", details.get("cached_tokens") or 0))
        return cls(prompt, cached, int(body.get("computed_tokens", prompt - cached)), completion)


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of a turn on the server in milliseconds; None if the event did not happen."""

    queue_ms: float | None
    ttft_ms: float | None
    total_ms: float | None

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Timing:
        return cls(body.get("queue_ms"), body.get("ttft_ms"), body.get("total_ms"))


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The result of a turn."""

    turn_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timing: Timing

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> TurnResult:
        try:
            return cls(
                str(body["turn_id"]),
                str(body["text"]),
                tuple(body["token_ids"]),
                str(body["finish_reason"]),
                Usage.from_body(body["usage"]),
                Timing.from_body(body.get("timing") or {}),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"cannot read the result of a turn: {error!r}") from error


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session as the server describes it; `memory` is by component."""

    id: str
    state: str
    tier: str
    turns: int
    tokens_known: int
    tokens_computed: int
    idle_seconds: float
    ttl: float | None
    created: float
    metadata: Mapping[str, Any]
    memory: Mapping[str, Any]

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> SessionView:
        try:
            tokens = body["tokens"]
            return cls(
                str(body["id"]),
                str(body["state"]),
                str(body.get("tier", "device")),
                int(body["turns"]),
                int(tokens["known"]),
                int(tokens["computed"]),
                float(body.get("idle_seconds") or 0.0),
                body.get("ttl"),
                float(body.get("created") or 0.0),
                body.get("metadata") or {},
                body.get("memory") or {},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"cannot read the description of a session: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Generated:
    """The completions of one or more prompts in order, and their total usage."""

    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """The text of the only, or the first, prompt."""
        return self.texts[0]

    @property
    def finish_reason(self) -> str:
        """Why the only, or the first, text ended."""
        return self.finish_reasons[0]

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Generated:
        try:
            choices = sorted(body["choices"], key=lambda choice: int(choice["index"]))
            return cls(
                tuple(str(choice["text"]) for choice in choices),
                tuple(str(choice["finish_reason"]) for choice in choices),
                Usage.from_body(body["usage"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"cannot read the completion: {error!r}") from error
