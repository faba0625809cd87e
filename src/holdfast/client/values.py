"""The values of the client: arguments and results.

Each `from_body` reads a JSON object of the server and ignores unknown fields, so that newer servers may add
some. Used by both clients and their callers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, TypedDict

from holdfast.client.errors import ProtocolError

__all__ = [
    "LISTENING",
    "AnswerOptions",
    "Body",
    "Generated",
    "Keep",
    "Message",
    "Prompt",
    "Said",
    "Sampling",
    "SessionChange",
    "SessionSettings",
    "SessionView",
    "Timing",
    "Tool",
    "ToolCall",
    "ToolOutput",
    "TurnEvent",
    "TurnEventKind",
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

Tool = Mapping[str, Any]
"""A function that the model may call, in OpenAI's form."""

ToolOutput = str | int | float | bool | Mapping[str, Any] | Sequence[Any] | None
"""The result of a tool: text, or a value that JSON can hold."""

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


class AnswerOptions(TypedDict, total=False):
    """Constraints, tools and reasoning of the answer, as the server declares them."""

    response_format: Mapping[str, Any]
    grammar: Mapping[str, Any]
    tools: Sequence[Tool]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    thinking: bool
    thinking_tokens: int
    reasoning_effort: str
    keep_reasoning: bool
    expect_return_seconds: float


class SessionSettings(TypedDict, total=False):
    """How a session is kept: `pin` on the device, `priority` from -4 to 4, reasoning of its turns."""

    pin: bool
    priority: int
    keep_reasoning: bool


class SessionChange(SessionSettings, total=False):
    """What changes of a session; `ttl` in seconds of idleness, None for the server's default."""

    ttl: float | None
    metadata: Mapping[str, Any]


class TurnFields(Sampling, TurnOptions, AnswerOptions, total=False):
    """All fields of a turn besides its input and its id."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a turn: the prompt with its history, its cached and its computed part, the completion.

    `reasoning_tokens` are part of the completion; where the session dropped them, its next turn computes
    `recomputed_tokens` again. Of the computed tokens, `ahead_tokens` were computed while the input was still
    being said.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    ahead_tokens: int = 0
    recomputed_tokens: int = 0

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Usage:
        """From a turn, or from an OpenAI completion, which has fewer fields."""
        details = body.get("prompt_tokens_details") or {}
        prompt = int(body["prompt_tokens"])
        completion = int(body["completion_tokens"])
        cached = int(body.get("cached_tokens", details.get("cached_tokens") or 0))
        computed = int(body.get("computed_tokens", prompt - cached))
        reasoning, ahead = int(body.get("reasoning_tokens") or 0), int(body.get("ahead_tokens") or 0)
        recomputed = int(body.get("recomputed_tokens") or 0)
        return cls(prompt, cached, computed, completion, reasoning, ahead, recomputed)


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
class ToolCall:
    """A tool call of the model; `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str

    def parsed(self) -> dict[str, Any]:
        """The arguments as a dictionary."""
        try:
            arguments = json.loads(self.arguments)
        except ValueError as error:
            raise ProtocolError(f"the arguments of {self.name} are not JSON") from error
        if not isinstance(arguments, dict):
            raise ProtocolError(f"the arguments of {self.name} are not a JSON object")
        return arguments

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> ToolCall:
        """From OpenAI's form, or from the event of a stream."""
        function = body.get("function", body)
        return cls(str(body["id"]), str(function["name"]), str(function.get("arguments", "")))


class TurnEventKind(StrEnum):
    """The kind of an event in a turn's stream."""

    TEXT = "delta"
    REASONING = "reasoning.delta"
    CALL = "tool_call"
    ARGUMENTS = "tool_call.delta"
    CALL_DONE = "tool_call.done"


@dataclass(frozen=True, slots=True)
class TurnEvent:
    """A piece of a turn: `text` of the answer, of the reasoning, or of a call's arguments.

    `call` comes with CALL (its arguments are still empty) and with CALL_DONE. `index` counts the turn's calls
    from zero. `outcome` of CALL_DONE is `complete`, `broken` or `cut`.
    """

    kind: TurnEventKind
    text: str = ""
    call: ToolCall | None = None
    index: int = 0
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The result of a turn. `tool_calls` are the complete ones; `reasoning` is the model's reasoning."""

    turn_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timing: Timing
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

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
                str(body.get("reasoning") or ""),
                _calls(body.get("tool_calls")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"cannot read the result of a turn: {error!r}") from error


LISTENING = "LISTENING"
"""The state of a session that computes the input of its next turn ahead."""


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session as the server describes it; `memory` is by component.

    `tool_calls` are the calls of its last turn, whose results it waits for.
    """

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
    tool_calls: tuple[ToolCall, ...] = ()
    pin: bool = False
    priority: int = 0
    keep_reasoning: bool = True
    tokens_heard: int = 0
    """Tokens of the next turn's input that were heard, while the state is LISTENING."""
    tokens_ahead: int = 0
    """How many of those are computed."""

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
                _calls(body.get("tool_calls")),
                bool(body.get("pin", False)),
                int(body.get("priority") or 0),
                bool(body.get("keep_reasoning", True)),
                int(tokens.get("heard") or 0),
                int(tokens.get("ahead") or 0),
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


def _calls(listed: Iterable[Mapping[str, Any]] | None) -> tuple[ToolCall, ...]:
    """The tool calls that an object lists."""
    return tuple(ToolCall.from_body(body) for body in listed or ())
