"""What the API process and the engine process say to each other.

Typed structs in MessagePack, one message a frame, over a Unix socket that only their user may open. Nothing
is ever pickled. A command carries the number of the call that it belongs to; the engine answers each call
once, with `Done` or `Declined`. A turn is known by the number of the call that started it: what it says comes
in `Step` messages, one for each step of the engine, until its one `End`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.server.dialects import wire_fields

SamplingFields = wire_fields.SamplingFields


class Configure(msgspec.Struct, tag="configure", frozen=True):
    """The first message: which model to load, and how. `options` are fields of `EngineOptions`."""

    model: str
    options: dict[str, Any]
    log_level: str = "info"
    log_format: str = "text"


class OpenSession(msgspec.Struct, tag="open", frozen=True):
    """Open a session; `ttl` in seconds, None for the server's own."""

    call: int
    session: str
    tenant: str
    ttl: float | None = None
    system: str | None = None
    metadata: dict[str, Any] = {}


class StartTurn(msgspec.Struct, tag="start", frozen=True):
    """A turn on a session, or (without one) a request of its own.

    `known` is the length of the history that the input was written for: if it has changed meanwhile, the turn
    is refused with `history_changed`. `cut` shortens `max_tokens` to what fits instead of refusing the turn.
    `timeout` in seconds ends the turn by its own policy. A finished turn of the same `name` and `fingerprint`
    is answered again instead of being run. A turn that `opens` a history is refused with `history_repeated`
    where there is one; it brings no tokens if that is known beforehand.
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


class EndTurn(msgspec.Struct, tag="end", frozen=True):
    """Nobody listens to turn `turn` any more, or somebody asked to stop it: end it.

    `keep` is how many of its tokens stay: None for none, -1 for all. Never answered: the turn's `End` is.
    """

    turn: int
    keep: int | None
    reason: str


class Interrupt(msgspec.Struct, tag="interrupt", frozen=True):
    """Cut into the turn in flight (or the last one, if none is), by its name where one is given."""

    call: int
    session: str
    turn: str | None
    keep: int | None
    request_id: str | None = None


class Rewind(msgspec.Struct, tag="rewind", frozen=True):
    """Go back so that `turns` turns remain."""

    call: int
    session: str
    turns: int
    request_id: str | None = None


class Fork(msgspec.Struct, tag="fork", frozen=True):
    """A second session from the end of turn `turns`, or of the last.

    Without `anew` none is made: the answer is the one that `request_id` has made before.
    """

    call: int
    session: str
    child: str
    turns: int | None
    request_id: str | None = None
    anew: bool = True


class CloseSession(msgspec.Struct, tag="close", frozen=True):
    """Close a session; answered when everything it held has come back."""

    call: int
    session: str


class MoveSession(msgspec.Struct, tag="move", frozen=True):
    """Move an idle session: to `host` or `disk`, to the nearest of them (None), or back to the `device`."""

    call: int
    session: str
    to: str | None


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """A question: `memory` (with a tenant's name what that one may know), `picture`, `session` and `leased`
    (with the session's name), `sessions` (with the names of some), `flush`."""

    call: int
    what: str
    name: str | None = None
    names: list[str] = []


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """End the engine process; turns in flight are rolled back, and sessions written to disk.

    A second one, with `at_once`, cuts the writing short.
    """

    at_once: bool = False


Command = (
    Configure
    | OpenSession
    | StartTurn
    | EndTurn
    | Interrupt
    | Rewind
    | Fork
    | CloseSession
    | MoveSession
    | Ask
    | Stop
)


class SessionView(msgspec.Struct, array_like=True, frozen=True):
    """What the API process needs to write a session's next turn."""

    name: str
    known: int
    last_token: int | None
    turns: int


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """How far the start has come, or the end."""

    stage: str
    done: int
    total: int


class ModelFacts(msgspec.Struct, frozen=True):
    """What a client may know of the model, and what the routes need to write requests for it."""

    path: str
    architecture: str
    vocabulary: int
    context_length: int
    tokens_max: int
    device: str
    dtype: str
    defaults: dict[str, Any]
    eos_tokens: list[int]
    plan: list[str]
    fingerprint: str


class StoredSession(msgspec.Struct, frozen=True):
    """A session that came back from a journal; `created` is the time of day."""

    view: SessionView
    tenant: str
    system: str | None
    metadata: dict[str, Any]
    created: float


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokenizer of the model, so that the API process need not open the model itself."""

    encoder: str
    template: str | None
    names: dict[str, str]
    eos_tokens: list[int]


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The engine serves; `sessions` came back from a journal."""

    facts: ModelFacts
    vocabulary: Vocabulary
    sessions: list[StoredSession] = []


class Unable(msgspec.Struct, tag="unable", frozen=True):
    """The engine cannot start, and why: trying again would not help.

    `model`: for what is wrong with the model's files, rather than with how it was asked to start.
    """

    message: str
    model: bool = False


class Done(msgspec.Struct, tag="done", frozen=True):
    """A call was carried out. A turn that is `replayed` was carried out before: its end is told again."""

    call: int
    view: SessionView | None = None
    answer: Any = None
    replayed: bool = False


class Declined(msgspec.Struct, tag="declined", frozen=True):
    """A call was refused and changed nothing."""

    call: int
    code: str
    message: str
    param: str | None = None
    view: SessionView | None = None


class TopLogprob(msgspec.Struct, array_like=True, frozen=True):
    """A token that might have come instead."""

    token: int
    logprob: float


class Logprob(msgspec.Struct, array_like=True, frozen=True):
    """A token's log-probability, and those of the most likely ones in its place."""

    token: int
    logprob: float
    top: list[TopLogprob] = []


class Delta(msgspec.Struct, array_like=True, frozen=True):
    """What a turn has said since its last delta; `index` is the place of the first of these tokens."""

    turn: int
    index: int
    text: str
    tokens: list[int]
    logprobs: list[Logprob] | None = None
    prompt: tuple[int, int] | None = None
    """With a turn's first delta: how many tokens its prompt has, history included, and how many of them were
    in memory already."""


class End(msgspec.Struct, frozen=True):
    """A turn is over: `finished`, `aborted` or `failed`, and what of it stands."""

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
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob] | None = None
    view: SessionView | None = None


class Step(msgspec.Struct, tag="step", frozen=True):
    """What one step brought: words, ends, and sessions that are no more, `closed` or `expired`."""

    deltas: list[Delta] = []
    ends: list[End] = []
    gone: list[tuple[str, str]] = []


class Pulse(msgspec.Struct, tag="pulse", frozen=True):
    """A sign of life, with running totals and gauges that come from the ledger."""

    step: int
    running: int
    queued: int
    sessions: int
    counters: dict[str, int]
    holders: list[tuple[str, str, str, int]]
    """(component, tier, holder kind, units)."""
    findings: int
    loop_counts: dict[str, list[int]] = {}
    """What held the loop between steps, in buckets of `engine.loop_times`, by kind of work."""
    loop_seconds: dict[str, float] = {}


Report = Progress | Ready | Unable | Done | Declined | Step | Pulse

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode(message: Command | Report) -> bytes:
    """The frame of a message."""
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    """What the API process asks for."""
    return _commands.decode(frame)


def decode_report(frame: bytes) -> Report:
    """What the engine process tells."""
    return _reports.decode(frame)
