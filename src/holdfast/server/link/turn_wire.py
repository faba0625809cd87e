"""The messages about turns between the API process and the engine process.

A turn is identified by the number of the call that started it (`StartTurn`): its output comes in `Step`
messages, one for each step of the engine, until its one `End`. Names are used through `wire`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from holdfast.server.dialects.wire_fields import SamplingFields

__all__ = [
    "AnswerEvent",
    "AnswerFields",
    "AnswerParts",
    "CallFields",
    "Delta",
    "End",
    "EndTurn",
    "GrammarFields",
    "Logprob",
    "NotedTurn",
    "Part",
    "SessionView",
    "StartTurn",
    "Step",
    "TopLogprob",
]


class GrammarFields(msgspec.Struct, frozen=True):
    """`engine.constraints.Grammar`, as it was checked and normalised."""

    kind: str
    source: str


class AnswerFields(msgspec.Struct, omit_defaults=True, frozen=True):
    """`engine.tools.answer.AnswerSpec`: how reasoning and tool calls are found in the answer."""

    calls: str | None = None
    reasoning: str | None = None
    reasoning_is_open: bool = False
    thinking_tokens: int | None = None
    tools: dict[str, dict[str, list[str]]] = {}
    seed: str = ""
    prompt_end: str = ""


class StartTurn(msgspec.Struct, tag="start", frozen=True):
    """A turn on a session, or (without one) a request of its own.

    `known` is the length of the history that the input was written for: if the history has changed, the turn
    is refused with `history_changed`. `cut` shortens `max_tokens` to what fits instead of refusing the turn.
    `timeout` in seconds ends the turn by its own policy. A finished turn of the same `name` and `fingerprint`
    is replayed instead of being run. A turn that `opens` a history is refused with `history_repeated` if the
    session has one; it has no tokens if the API process knows that already.
    """

    call: int
    name: str
    tenant: str
    tokens: list[int]
    sampling: SamplingFields
    session: str | None = None
    known: int | None = None
    goes_on: bool = False
    keeps: bool = False
    timeout: float | None = None
    choice: int = 0
    cut: bool = False
    computes_from: int | None = None
    fingerprint: str | None = None
    opens: bool = False
    grammar: GrammarFields | None = None
    answer: AnswerFields | None = None
    expect_return: float | None = None
    """Seconds until the client is expected back after this turn, with a tool's result."""
    tools: list[dict[str, Any]] | None = None
    """With a session's first turn: the session's tools from now on; None leaves them as they are."""
    note: str | None = None
    """Text of the API process's own, kept with the turn and in the journal: what a dialect shows of it."""
    volatile: bool = False
    """Whether the session stands for a conversation that its client sends whole: it is opened by its first
    turn, and is in no journal."""
    keep: int | None = None
    """With a volatile session: how many tokens of its history, or of `parent`'s, the input follows."""
    parent: str | None = None
    """The volatile session that this one is forked from."""
    steers: int | None = None
    """Cut the turn before this one after so many of its tokens (-1: all), and go on from there. The tokens
    are written to follow an answer without its end token."""
    keep_reasoning: bool | None = None
    """Whether the history keeps what the model thinks; None as the session says."""


class EndTurn(msgspec.Struct, tag="end", frozen=True):
    """Abort turn `turn`. `keep` is how many of its tokens stay: None for none, -1 for all.

    It has no answer of its own: the turn's `End` is.
    """

    turn: int
    keep: int | None
    reason: str


class CallFields(msgspec.Struct, array_like=True, frozen=True):
    """A tool call; `outcome` is `complete`, `broken` or `cut`."""

    id: str
    name: str
    arguments: str
    outcome: str = "complete"


class SessionView(msgspec.Struct, array_like=True, frozen=True):
    """What the API process needs to know to write a session's next turn."""

    name: str
    known: int
    last_token: int | None
    turns: int
    calls: list[CallFields] = []
    """The tool calls that its last turn ended in, if they are known."""


class TopLogprob(msgspec.Struct, array_like=True, frozen=True):
    """One of the most likely tokens at a position."""

    token: int
    logprob: float


class Logprob(msgspec.Struct, array_like=True, frozen=True):
    """A token's log-probability, and the most likely tokens at its position."""

    token: int
    logprob: float
    top: list[TopLogprob] = []


class Part(StrEnum):
    """What an event of an answer is; see `engine.tools.events`."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"
    ARGUMENTS = "arguments"
    CALL_END = "call_end"


class AnswerEvent(msgspec.Struct, array_like=True, frozen=True):
    """An event of an answer: a piece of text, reasoning or arguments, a call's name, or how a call ended.

    `index` is the call's; `id` comes with its name.
    """

    part: Part
    text: str
    index: int = 0
    id: str = ""


class AnswerParts(msgspec.Struct, frozen=True):
    """The parts of an answer besides its text."""

    reasoning: str = ""
    calls: list[CallFields] = []
    reasoning_tokens: int = 0


class Delta(msgspec.Struct, array_like=True, frozen=True):
    """The output of a turn since its last delta; `index` is the index of the first token.

    Where the answer is read for reasoning and calls, `text` is the rest of it, and `events` has all in order.
    """

    turn: int
    index: int
    text: str
    tokens: list[int]
    logprobs: list[Logprob] | None = None
    prompt: tuple[int, int] | None = None
    """With a turn's first delta: the tokens of its prompt, history included, and how many were cached."""
    events: list[AnswerEvent] | None = None
    settled: int | None = None
    """Where tool calls are read: how many of the turn's tokens lie outside a call that has not ended."""


class End(msgspec.Struct, frozen=True):
    """The end of a turn: `finished`, `aborted` or `failed`, and the output that stays in the history."""

    turn: int
    outcome: str
    reason: str
    text: str
    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    queue_seconds: float
    first_seconds: float | None
    total_seconds: float
    retracts: int = 0
    ahead_tokens: int = 0
    """Of the tokens computed, those that were computed before the turn was asked for."""
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob] | None = None
    view: SessionView | None = None
    answer: AnswerParts | None = None
    """With a turn whose answer is read for reasoning and calls; `text` is then the rest of it."""
    recomputed_tokens: int | None = None
    """With a turn that dropped its reasoning: how many tokens the next turn computes again."""
    arrived: float = 0.0
    """When the turn was submitted, on the clock of `marks`."""


class Step(msgspec.Struct, tag="step", frozen=True):
    """The results of one step: output, ends, and sessions that were `closed`, have `expired` or `moved`."""

    deltas: list[Delta] = []
    ends: list[End] = []
    gone: list[tuple[str, str]] = []


class NotedTurn(msgspec.Struct, frozen=True):
    """A turn of a session that was given a note: the note, and the result as it ended.

    `number` counts the session's turns from 1; `is_last` if no turn has followed.
    """

    number: int
    name: str
    note: str
    outcome: str
    reason: str
    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    answer: AnswerParts | None = None
    is_last: bool = False
