"""A turn: one request on a session, from its arrival to its one end.

The request is frozen (`TurnRequest`), its progress is here, its memory is the sequence's. A turn
ends exactly once. While rows of it are in flight it cannot be cut, so an abort, a retraction or a failure is
noted as its `ending` and carried out when the last of those rows has settled.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast.core.errors import IllegalTransition
from holdfast.core.ledger import Holder


class TurnState(StrEnum):
    """Where a turn is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


class TurnEvent(StrEnum):
    """What may happen to a turn."""

    ADMIT = "admit"
    RETRACT = "retract"
    FINISH = "finish"
    ABORT = "abort"
    FAIL = "fail"


TURN_TABLE: dict[tuple[TurnState, TurnEvent], TurnState] = {
    (TurnState.QUEUED, TurnEvent.ADMIT): TurnState.RUNNING,
    (TurnState.QUEUED, TurnEvent.ABORT): TurnState.ABORTED,
    (TurnState.QUEUED, TurnEvent.FAIL): TurnState.FAILED,
    (TurnState.RUNNING, TurnEvent.RETRACT): TurnState.QUEUED,
    (TurnState.RUNNING, TurnEvent.FINISH): TurnState.FINISHED,
    (TurnState.RUNNING, TurnEvent.ABORT): TurnState.ABORTED,
    (TurnState.RUNNING, TurnEvent.FAIL): TurnState.FAILED,
}

OVER = frozenset({TurnState.FINISHED, TurnState.ABORTED, TurnState.FAILED})


class Ending:
    """How a turn is to end once none of its rows is in flight.

    `keep` is the number of generated tokens that stay: None rolls everything back, `KEEP_ALL` keeps all. A
    retraction is no end for the client: the turn goes back to the queue. After a row went wrong, memory that
    rows in flight have written is not `trusted`.
    """

    __slots__ = ("event", "keep", "reason", "trusted")

    def __init__(self, event: TurnEvent, reason: str, keep: int | None = None, trusted: bool = True) -> None:
        self.event = event
        self.reason = reason
        self.keep = keep
        self.trusted = trusted


KEEP_ALL = -1
NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """The part of a client's request that the core needs.

    With `max_tokens` 0 the turn computes its input and samples nothing: it finishes when all is computed.
    `goes_on` allows an empty input: generation continues from the history. `on_abort` is for an abandoned
    turn: None rolls it back, a number keeps that many tokens.
    From `computes_from` on the turn computes all tokens itself, without cache hits in the prefix tree.
    `expect_return` is a hint: the next turn is expected so many seconds after this one has finished.
    """

    turn_id: str
    tokens: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    goes_on: bool = False
    on_abort: int | None = None
    deadline: float | None = None
    computes_from: int | None = None
    expect_return: float | None = None


class Turn:
    """A request and how far it has come.

    `awaiting` tokens are being sampled by rows in flight. When the turn finished, no row had been planned for
    its last `unsealed` tokens: seals compute them. While `is_open`, its input may still change; `revised` is
    the length of the log up to which it agrees with the input, if rows in flight keep it from being changed.
    Of the tokens `computed`, `computed_ahead` were computed before the turn was committed.
    """

    __slots__ = (
        "admitted",
        "arrived",
        "awaiting",
        "cached",
        "computed",
        "computed_ahead",
        "ending",
        "failures",
        "first_token",
        "generated",
        "holder",
        "is_open",
        "known_before",
        "number",
        "publish_at",
        "request",
        "retracts",
        "revised",
        "session_id",
        "settled",
        "state",
        "unsealed",
    )

    def __init__(
        self,
        request: TurnRequest,
        session_id: str,
        number: int,
        arrived: float,
        holder: Holder,
        is_open: bool = False,
    ) -> None:
        self.request = request
        self.session_id = session_id
        self.number = number
        self.arrived = arrived
        self.admitted: float | None = None
        self.holder = holder
        self.state = TurnState.QUEUED
        self.is_open = is_open
        self.revised = NEVER
        self.computed_ahead = 0
        self.known_before = 0
        self.publish_at = NEVER
        self.generated = 0
        self.awaiting = 0
        self.cached = 0
        self.computed = 0
        self.failures = 0
        self.retracts = 0
        self.settled: int | None = None
        """Most generated tokens that `KEEP_ALL` keeps, where more would end inside a tool call."""
        self.first_token: float | None = None
        self.ending: Ending | None = None
        self.unsealed = 1

    def on(self, event: TurnEvent) -> None:
        """Follow the table; an event that cannot happen here is a fault."""
        after = TURN_TABLE.get((self.state, event))
        if after is None:
            raise IllegalTransition(f"turn {self.request.turn_id}: {event} while {self.state.value}")
        self.state = after

    def will_end(self, event: TurnEvent, reason: str, keep: int | None = None) -> None:
        """Note how the turn is to end, instead of what was noted before.

        Where one of its rows has gone wrong, rows that are still in flight stay untrusted.
        """
        trusted = self.ending is None or self.ending.trusted
        self.ending = Ending(event, reason, keep, trusted)

    @property
    def input_end(self) -> int:
        """The length of the history with this turn's input."""
        return self.known_before + len(self.request.tokens)

    @property
    def over(self) -> bool:
        """Whether the turn has had its one end."""
        return self.state in OVER
