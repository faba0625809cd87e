"""The messages between the API process and the engine process.

Typed structs in MessagePack, one message a frame, over a Unix socket that only their user may open, or over
TCP with TLS (`tls.py`). Nothing is pickled. A command carries the number of its call; the engine answers each
call once, with `Done` or `Declined`. Messages about turns are in `turn_wire`, those between engines in
`cluster_wire`; all names are used through this module.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from holdfast.server.dialects import wire_fields
from holdfast.server.link import cluster_wire, turn_wire

SamplingFields = wire_fields.SamplingFields
Abandon = cluster_wire.Abandon
Claim = cluster_wire.Claim
Content = cluster_wire.Content
Drain = cluster_wire.Drain
FetchMissed = cluster_wire.FetchMissed
GiveMissed = cluster_wire.GiveMissed
HandOver = cluster_wire.HandOver
KeepMissed = cluster_wire.KeepMissed
LocalFile = cluster_wire.LocalFile
Missed = cluster_wire.Missed
Stage = cluster_wire.Stage

AnswerEvent = turn_wire.AnswerEvent
AnswerFields = turn_wire.AnswerFields
AnswerParts = turn_wire.AnswerParts
CallFields = turn_wire.CallFields
Delta = turn_wire.Delta
End = turn_wire.End
EndTurn = turn_wire.EndTurn
GrammarFields = turn_wire.GrammarFields
Logprob = turn_wire.Logprob
NotedTurn = turn_wire.NotedTurn
Part = turn_wire.Part
SessionView = turn_wire.SessionView
StartTurn = turn_wire.StartTurn
Step = turn_wire.Step
TopLogprob = turn_wire.TopLogprob

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
