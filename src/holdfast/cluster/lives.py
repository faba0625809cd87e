"""The life of a server: its states, its lease, and when others may declare it dead.

    LIVE -> DRAINING -> ENDED     by the server itself
    LIVE, DRAINING -> DEAD        by another; final

A life is one run of one server. It writes while its row is LIVE or DRAINING, and takes sessions over while it
is LIVE. Leases serve liveness alone: a wrong verdict costs recomputation, and the fence of each write keeps
history safe. Times are those of the store's clock. Used by the store's rules and by PostgreSQL's statements.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "ALIVE",
    "GONE_SECONDS",
    "LEASE_SECONDS",
    "RENEW_SECONDS",
    "Life",
    "LifeState",
    "is_lapsed",
]

LEASE_SECONDS = 10.0
"""How long a life is alive after its last sign of life, if its connection stays open."""

GONE_SECONDS = 1.0
"""How long a life may go without a renewal of which the store, or a peer, has lost the connection.

If both have, it is over at once: a process that was killed takes all of its connections along.
"""

RENEW_SECONDS = 0.5
"""How often a life without commits is renewed."""


class LifeState(StrEnum):
    """The states of a life."""

    LIVE = "live"
    DRAINING = "draining"
    ENDED = "ended"
    DEAD = "dead"


ALIVE = frozenset((LifeState.LIVE, LifeState.DRAINING))
"""A life in one of these states may write; the sessions of any other are free."""


@dataclass(slots=True)
class Life:
    """The row of a life: `lease` is when it is over unless renewed, `batch` the number of its last commit."""

    name: str
    lease: float
    state: LifeState = LifeState.LIVE
    batch: int = 0


def is_lapsed(lease: float, connected: bool, heard: bool, now: float) -> bool:
    """Whether a life may be declared dead: its lease is over, or it is silent, or gone for two witnesses.

    `connected`: to the store; `heard`: by the peer that asks.
    """
    if not connected and not heard:
        return True
    silent = lease < now + LEASE_SECONDS - GONE_SECONDS
    return lease < now or (silent and not (connected and heard))
