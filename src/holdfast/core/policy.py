"""Policy: limits, the order of the queue, and the order in which sessions give way.

Pure functions: nothing here changes anything.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from holdfast.core.layout import Tier
from holdfast.core.ledger import Pool
from holdfast.core.session import Session
from holdfast.core.turn import Turn
from holdfast.core.waiting import Waiting

COMPARED_MAX = 64


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of each tier's memory a tenant may hold, from above 0 to 1: all of it."""

    device: float = 1.0
    host: float = 1.0
    disk: float = 1.0

    def of(self, tier: Tier) -> float:
        """The part of one tier."""
        return {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.DISK: self.disk}[tier]


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits and trade-offs of a server. Times are in seconds, sizes in tokens.

    `checkpoints` is how many resume points a session may keep past its last turn. A turn that waits for
    `age_seconds` counts as one priority higher, which prevents starvation. A step computes at most
    `listening_tokens` of open turns, and about `mixed_tokens` in all while answers are generated
    (step_size.py); a row has at most `drafts_max` drafts. With `durable_turns` a turn's mark is
    kept until the turn is reported as durable. A tenant's quota is its entry in `shares`, or `share`; its
    pins count up to `pinned_share` of that on the device. The last token of a turn waits `seal_seconds` for a
    turn that follows at once, which its row in flight would delay. Spilled memory is prefetched
    `prefetch_seconds` before the expected turn.
    """

    context_length: int = 8192
    vocabulary: int = 1 << 31
    chunk_tokens: int = 2048
    mixed_tokens: int = 1 << 31
    drafts_max: int = 12
    listening_tokens: int = 256
    running_max: int = 256
    queue_max: int = 4096
    looked_at_max: int = 32
    sessions_max: int = 1 << 16
    tenant_sessions_max: int = 1 << 16
    session_ttl: float = 3600.0
    checkpoints: int = 4
    age_seconds: float = 2.0
    leave_history: bool = False
    durable_turns: bool = False
    seal_seconds: float = 0.0
    prefetch_seconds: float = 2.0
    share: Share = Share()
    pinned_share: float = 0.25
    shares: Mapping[str, Share] = field(default_factory=dict)

    def limit(self, tenant: str, pool: Pool) -> int:
        """How many units of a pool a tenant may hold."""
        return int(pool.size * self.shares.get(tenant, self.share).of(pool.tier))


def queue_order(
    waiting: Waiting,
    now: float,
    policy: Policy,
    cached: Callable[[Turn], int],
    passed: Collection[str] = (),
) -> list[Turn]:
    """Waiting turns in the order in which to admit them, less those of tenants that are passed over.

    Priority with age first; among equals those that find most of their prompt in memory, then the oldest.
    Only as many are looked at as can matter in one step, oldest first, however many wait.
    """

    def urgency(turn: Turn) -> int:
        return turn.request.priority + int((now - turn.arrived) / policy.age_seconds)

    merged = heapq.merge(*waiting.by_priority(passed), key=lambda turn: (-urgency(turn), turn.number))
    oldest = islice(merged, policy.looked_at_max)
    return sorted(oldest, key=lambda turn: (-urgency(turn), -cached(turn), turn.number))


def retraction_victim(running: list[Session]) -> Session | None:
    """The turn to retract: the one that loses least, never the oldest, never an ending one."""
    best: tuple[int, int] | None = None
    victim: Session | None = None
    for session in running[1:]:
        turn = session.turn
        assert turn is not None, "a running session has a turn"
        if turn.ending is not None:
            continue
        loss = session.sequence.computed - turn.known_before
        if best is None or (loss, -turn.number) < best:
            best, victim = (loss, -turn.number), session
    return victim


def spill_order(resting: Iterable[Session], now: float) -> list[Session]:
    """Sessions at rest in the order in which to take their memory: by priority, the lowest first.

    Of equals those come first that stay away longest. Those whose turn waits are needed next: they come last,
    the turn that came first at the end.
    """
    ranks: dict[int, tuple[list[Session], list[Session]]] = {}
    for session in resting:
        idle, waiting = ranks.setdefault(session.retention.priority, ([], []))
        (idle if session.turn is None else waiting).append(session)
    order: list[Session] = []
    for _, (idle, waiting) in sorted(ranks.items()):
        order += _by_absence(idle, now)
        order += sorted(waiting, key=_arrival, reverse=True)
    return order


def absence(session: Session, now: float) -> float:
    """How long an idle session is expected to stay away.

    Until its next turn is expected, or, without such a hint, for about as long as it has been idle.
    """
    return session.expected - now if session.expected > now else now - session.idle_since


def _arrival(session: Session) -> int:
    """When the turn of a session came, in order of numbers."""
    assert session.turn is not None
    return session.turn.number


def _by_absence(listed: list[Session], now: float) -> list[Session]:
    """Sessions of one priority, those first that stay away longest.

    Times (`absence`) count by powers of two: of equals those that the host has a whole copy of come first,
    then those without a hint, then those that are cheapest to bring back. Only as many are compared as can
    matter at once, longest away first.
    """

    def value(session: Session) -> tuple[int, bool, bool, int]:
        sequence = session.sequence
        leased = sequence.lease.length if sequence.lease is not None else 0
        hinted = session.expected > now
        copied = sequence.copy is not None and sequence.copy.is_whole(sequence.computed)
        return -int(absence(session, now) + 1).bit_length(), not copied, hinted, sequence.computed - leased

    hinted = [session for session in listed if session.expected > now]
    if hinted:
        hinted.sort(key=attrgetter("expected"), reverse=True)
        listed = [session for session in listed if session.expected <= now]
    compared, others = listed[:COMPARED_MAX], listed[COMPARED_MAX:]
    # Those that are not compared have been idle for no longer than this.
    idle = now - others[0].idle_since if others else 0.0
    slow = [session for session in hinted if session.expected - now >= idle]
    first = sorted([*compared, *slow[:COMPARED_MAX]], key=value)
    return [*first, *slow[COMPARED_MAX:], *others, *hinted[len(slow) :]]
