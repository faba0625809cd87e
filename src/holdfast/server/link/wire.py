"""The messages between the API process and the engine process.

Typed structs in MessagePack, one message a frame, over a Unix socket that only their user may open, or over
TCP with TLS (`tls.py`). Nothing is pickled. A command carries the number of its call; the engine answers each
call once, with `Done` or `Declined`. A turn is identified by the number of the call that started it: its
output comes in `Step` messages, one for each step of the engine, until its one `End`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from holdfast.server.dialects import wire_fields
from holdfast.server.link import cluster_wire

SamplingFields = wire_fields.SamplingFields
Abandon = cluster_wire.Abandon
Claim = cluster_wire.Claim
Content = cluster_wire.Content
Drain = cluster_wire.Drain
FetchMissed = cluster_wire.FetchMissed
GiveMissed = cluster_wire.GiveMissed
HandOver = cluster_wire.HandOver
KeepMissed = cluster_wire.KeepMissed
Missed = cluster_wire.Missed
Stage = cluster_wire.Stage

Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]

PROTOCOL = 5
"""The version of these messages; over TCP both ends must have the same."""

CALL_BITS = 36
"""Bits of a call's number below the prefix that tells API processes of one engine apart."""


class Greeting(msgspec.Struct, tag="greeting", frozen=True):
    """The first message over TCP: who asks. `model` is the digest of the model that it serves, if any yet.

    `client` is the same for all links of one API process, `link` the address that it connects to. Its calls
    have numbers with the prefix `calls`.
    """

    protocol: int
    client: str
    calls: int
    model: str = ""
    link: str = ""
    engine: bool = False
    """Whether it is another engine, which is told of nothing but the answers to its calls."""


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """A heartbeat of the API process, over TCP."""


class Configure(msgspec.Struct, tag="configure", frozen=True):
    """The first message: the model to load. `options` are fields of `EngineOptions`."""

    model: str
    options: dict[str, Any]
    log_level: str = "info"
    log_format: str = "text"


class OpenSession(msgspec.Struct, tag="open", frozen=True):
    """Open a session; `ttl` in seconds, None for the default."""

    call: int
    session: str
    tenant: str
    ttl: float | None = None
    system: str | None = None
    metadata: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    """The session's tools, in OpenAI's form, as they were checked."""
    settings: dict[str, Any] = {}
    """How it is kept: `pin`, `priority`, `keep_reasoning`, as far as they were given."""


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


class Hear(msgspec.Struct, tag="hear", frozen=True):
    """Compute the input of a session's next turn ahead: `tokens`, all that is known of it; none take it back.

    `known` is the length of the history that they were written for. `soon` only says that a turn is expected.
    """

    call: int
    session: str
    tokens: list[int]
    known: int | None = None
    soon: bool = False


class Interrupt(msgspec.Struct, tag="interrupt", frozen=True):
    """Interrupt the turn in flight, or else the last one; `turn` is the turn that is meant, if given."""

    call: int
    session: str
    turn: str | None
    keep: int | None
    request_id: str | None = None


class Rewind(msgspec.Struct, tag="rewind", frozen=True):
    """Rewind to the end of turn `turns`: that many remain."""

    call: int
    session: str
    turns: int
    request_id: str | None = None


class Compact(msgspec.Struct, tag="compact", frozen=True):
    """Replace turns `first` to `last` by one of `tokens`, named `turn`, without an answer.

    The tokens are written to follow an answer without its end token.
    """

    call: int
    session: str
    first: int
    last: int
    tokens: list[Token]
    turn: str
    request_id: str | None = None


class Fork(msgspec.Struct, tag="fork", frozen=True):
    """Fork a session at the end of turn `turns`, or of the last.

    Without `anew` no session is made: only the answer to an earlier fork with `request_id` is repeated.
    """

    call: int
    session: str
    child: str
    turns: int | None
    request_id: str | None = None
    anew: bool = True


class CloseSession(msgspec.Struct, tag="close", frozen=True):
    """Close a session; answered when that is durable and its memory is free."""

    call: int
    session: str


class UpdateSession(msgspec.Struct, tag="update", frozen=True):
    """Replace a session's metadata, or change its settings: those of `OpenSession`, and `ttl`."""

    call: int
    session: str
    metadata: dict[str, Any] | None = None
    settings: dict[str, Any] = {}


class MoveSession(msgspec.Struct, tag="move", frozen=True):
    """Move an idle session's memory to `host` or `disk`, the nearest of them (None), or the `device`."""

    call: int
    session: str
    to: Annotated[str, msgspec.Meta(pattern="^(host|disk|device)$")] | None


class Question(StrEnum):
    """What the API process may ask."""

    MEMORY = "memory"
    PICTURE = "picture"
    SESSIONS = "sessions"
    SESSION = "session"
    LEASED = "leased"
    TURNS = "turns"
    TOKENS = "tokens"
    STORED = "stored"
    LIVES = "lives"
    FLUSH = "flush"


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """A question: `memory` (of all, or as tenant `name` may see it), `picture`, `session`, `leased` and
    `tokens` (of session `name`), `turns` (of session `name`: those with notes, or those in `names` alone),
    `sessions` (of `names`), `stored` (session `name` as a `StoredSession`; None if it is not here), `lives`
    (of the engines that share the journal), and `flush`."""

    call: int
    what: Question
    name: str | None = None
    names: list[str] = []


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """End the engine process: roll back turns in flight, and write sessions to disk.

    A second `Stop`, with `at_once`, cuts the writing short.
    """

    at_once: bool = False


Command = (
    Configure
    | OpenSession
    | StartTurn
    | EndTurn
    | Hear
    | Interrupt
    | Rewind
    | Compact
    | Fork
    | CloseSession
    | UpdateSession
    | MoveSession
    | cluster_wire.ClusterCommand
    | Ask
    | Stop
    | Greeting
    | Beat
)


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


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """Progress of the start-up, or of the shutdown."""

    stage: str
    done: int
    total: int


class ModelFacts(msgspec.Struct, frozen=True):
    """What clients and routes need to know about the model."""

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
    constrains: bool = False
    """Whether turns may have grammars."""
    calls: str | None = None
    """How the model writes tool calls: a name in `engine.tools.formats`."""
    reasoning: str | None = None
    """How the model marks its reasoning, likewise."""


class StoredSession(msgspec.Struct, frozen=True):
    """A session that was recovered from a journal; `created` is a Unix time."""

    view: SessionView
    tenant: str
    system: str | None
    metadata: dict[str, Any]
    created: float
    tools: list[dict[str, Any]] = []


class Found(msgspec.Struct, frozen=True):
    """Where a session is: here, as it is `stored`, or at the engine whose name is `engine`."""

    stored: StoredSession | None = None
    engine: str | None = None


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokenizer of the model; the API process does not open the model itself."""

    encoder: str
    template: str | None
    names: dict[str, str]
    eos_tokens: list[int]
    response_template: Any = None


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The engine serves; `sessions` were recovered from its journal.

    An engine that shares its journal with others tells its sessions later, in portions (`Elsewhere`).
    """

    facts: ModelFacts
    vocabulary: Vocabulary
    sessions: list[StoredSession] = []


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The answer to a `Greeting`, followed by `Ready`: which engine this is. `life` is new at each start.

    `journal` names the journal that it shares with other engines; empty if it has one of its own. A greeting
    that is refused is answered with `Unable`.
    """

    protocol: int
    engine: str
    life: str
    model: str
    options: dict[str, Any] = {}
    journal: str = ""


class Elsewhere(msgspec.Struct, tag="elsewhere", frozen=True):
    """Sessions that another API process has opened or changed, or taken a turn on."""

    stored: list[StoredSession] = []
    views: list[SessionView] = []


class Unable(msgspec.Struct, tag="unable", frozen=True):
    """The engine cannot start, nor with a retry: `message` says why. `model`: its files, not an option."""

    message: str
    model: bool = False


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


class Done(msgspec.Struct, tag="done", frozen=True):
    """A call was carried out. A turn that is `replayed` was carried out before: its output is repeated."""

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


class Pulse(msgspec.Struct, tag="pulse", frozen=True):
    """A heartbeat, with counters and gauges."""

    step: int
    running: int
    queued: int
    sessions: int
    counters: dict[str, int]
    holders: list[tuple[str, str, str, int]]
    """(component, tier, holder kind, units)."""
    findings: int
    loop_counts: dict[str, list[int]] = {}
    """Histograms of work between steps, in buckets of `engine.loop_times`, by kind of work."""
    loop_seconds: dict[str, float] = {}
    draining: bool = False
    """Whether the engine ends, and takes nothing new."""
    graphs: tuple[int, int] | None = None  # CUDA graphs that are captured, and that there are to be.
    drafts: dict[str, int] = {}  # Gauges of the draft model, by the name of their metric.
    leased: dict[str, int] = {}  # Units of the prefix tree that leases keep, by component.


Report = Progress | Ready | Unable | Done | Declined | Step | Pulse | Welcome | Elsewhere | GiveMissed

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode(message: Command | Report) -> bytes:
    """The frame of a message."""
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    """The command in a frame."""
    return _commands.decode(frame)


def decode_report(frame: bytes) -> Report:
    """The report in a frame."""
    return _reports.decode(frame)
