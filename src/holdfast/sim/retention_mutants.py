"""Planted bugs of retention: pins, and the order of eviction. See planting.py."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core import policy
from holdfast.core.ledger import Account
from holdfast.core.pressure import Pressure
from holdfast.core.retention import Retention
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Session
from holdfast.sim.planting import Mutant, Patcher


def pins_are_forgotten(patcher: Patcher) -> None:
    """A pinned session gives way like any other."""

    def faulty(self: Pressure, account: Account, resting: Iterable[Session]) -> set[Session]:  # noqa: ARG001
        if any(session.retention.pinned for session in resting):
            patcher.reach()
        return set()

    patcher.replace(Pressure, "pinned_sessions", faulty)


def the_highest_priority_leaves_first(patcher: Patcher) -> None:
    """Sessions of one tenant give way in the wrong order of their priorities."""
    original = policy.spill_order

    def faulty(resting: Iterable[Session], now: float) -> list[Session]:
        ordered = original(resting, now)
        if len({session.retention.priority for session in ordered}) > 1:
            patcher.reach()
        return sorted(ordered, key=lambda session: -session.retention.priority)

    patcher.replace(policy, "spill_order", faulty)


def a_fork_is_kept_by_default(patcher: Patcher) -> None:
    """A fork does not inherit how its parent is kept."""
    original = Scheduler.fork

    def faulty(
        self: Scheduler,
        session_id: str,
        new_id: str,
        now: float,
        turns: int | None = None,
        known: int | None = None,
    ) -> Session:
        child = original(self, session_id, new_id, now, turns, known)
        default = Retention(self.registry.policy.session_ttl)
        if child.retention != default:
            patcher.reach()
            child.retention = default
        return child

    patcher.replace(Scheduler, "fork", faulty)


RETENTION_MUTANTS = tuple(
    Mutant(name, story, "scheduler", one, plant)
    for name, story, one, plant in (
        ("pins-are-forgotten", "B16", True, pins_are_forgotten),
        ("the-highest-priority-leaves-first", "B16", True, the_highest_priority_leaves_first),
        ("a-fork-is-kept-by-default", "B15", True, a_fork_is_kept_by_default),
    )
)
