"""Events: what the scheduler reports to clients and operators, and the running totals for metrics."""

from __future__ import annotations

from enum import StrEnum

from holdfast.core.turn import Turn


class EventKind(StrEnum):
    """The kind of an event."""

    TOKENS = "tokens"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"
    CLOSED = "closed"
    SPILLED = "spilled"
    RESTORED = "restored"
    FINDING = "finding"


class Event:
    """One event of a session; a finding of the audit belongs to no session."""

    __slots__ = ("kind", "reason", "session_id", "tokens", "turn")

    def __init__(
        self, kind: EventKind, session_id: str, turn: Turn | None, tokens: list[int], reason: str
    ) -> None:
        self.kind = kind
        self.session_id = session_id
        self.turn = turn
        self.tokens = tokens
        self.reason = reason


class Counters:
    """Running totals for metrics."""

    __slots__ = (
        "accepted_tokens",
        "admitted",
        "cached_tokens",
        "computed_tokens",
        "drafted_tokens",
        "dropped",
        "generated_tokens",
        "retracts",
        "spills",
    )

    def __init__(self) -> None:
        self.admitted = 0
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.generated_tokens = 0
        self.retracts = 0
        self.spills = 0
        self.dropped = 0
