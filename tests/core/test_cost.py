"""What a step costs: counted in calls, ledger transitions and looks at tables, never in time.

The same eight turns are played beside ten idle sessions and beside ten thousand: every count is the same.
"""

import gc
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from holdfast.core.layout import Component, Tier, named_layout
from holdfast.core.ledger import Kind, Ledger
from holdfast.core.plan import RowResult, StepResult
from holdfast.core.policy import Policy
from holdfast.core.scheduler import Scheduler
from holdfast.core.turn import TurnRequest

IDLE_FEW, IDLE_MANY = 10, 10_000
ACTIVE = 8


class CountedTable(dict):
    """A table that counts how many of its entries are walked."""

    def __init__(self, entries: dict, name: str, walked: Counter) -> None:
        super().__init__(entries)
        self.name = name
        self.walked = walked

    def _count(self, entries: Iterator) -> Iterator:
        for entry in entries:
            self.walked[self.name] += 1
            yield entry

    def __iter__(self) -> Iterator:
        return self._count(super().__iter__())

    def values(self) -> Iterator:
        return self._count(super().values().__iter__())

    def items(self) -> Iterator:
        return self._count(super().items().__iter__())

    def keys(self) -> Iterator:
        return self._count(super().keys().__iter__())


def make_scheduler(sessions: int) -> Scheduler:
    """A hybrid server on which every session fits, and memory is never short."""
    layout = named_layout("hybrid", 16)
    units = 4 * (sessions + ACTIVE)
    ledger = Ledger(layout, {(c, Tier.DEVICE): units for c in layout.components})
    return Scheduler(ledger, Policy(session_ttl=1e9, running_max=64, looked_at_max=64))


def step(scheduler: Scheduler, now: float) -> None:
    """One plan, and what a model that always says 7 makes of it."""
    plan = scheduler.plan(4096, now)
    result = StepResult([RowResult([7] if row.sample else []) for row in plan.rows])
    scheduler.settle(plan, result, now)


def settle_down(scheduler: Scheduler, now: float) -> None:
    """Step until nothing runs, waits or seals."""
    registry = scheduler.registry
    while registry.running or registry.queue or registry.seals:
        step(scheduler, now)


def fill(scheduler: Scheduler, count: int) -> None:
    """Sessions that have had one turn, and hold a page, a state and nothing else."""
    for first in range(0, count, 50):
        for number in range(first, min(first + 50, count)):
            scheduler.open(f"idle {number}", "red", 0.0)
            scheduler.submit(f"idle {number}", TurnRequest(f"t{number}", (number % 1000, 5, 6), 2), 0.0)
        settle_down(scheduler, 0.0)


def play(scheduler: Scheduler) -> list[tuple[str, int]]:
    """Turns on eight sessions: opened, chatting, interrupted, closed; returns what it cost."""
    counts: Counter = Counter()

    def count(frame, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            counts[event] += 1

    def work(now: float) -> None:
        for number in range(ACTIVE):
            scheduler.submit(f"s{number}", TurnRequest(f"of {number} at {now}", (number, 1, 2, 3), 6), now)
        for _ in range(4):
            step(scheduler, now)
        scheduler.interrupt("s0", now, keep=1)
        settle_down(scheduler, now)

    for number in range(ACTIVE):
        scheduler.open(f"s{number}", "red", 1.0)
    work(1.0)
    scheduler.audit._due = (
        1 << 30
    )  # What the audit does is paid for by rows, and is counted by its own tests.
    registry, ledger = scheduler.registry, scheduler.registry.ledger
    tables = ((registry, ("sessions", "tenants")), (registry.queues, ("resting", "checkpointed")))
    for owner, names in tables:
        for name in names:
            setattr(owner, name, CountedTable(getattr(owner, name), name, counts))
    ledger.live = CountedTable(ledger.live, "live Holds", counts)
    serial = ledger.serial
    deadlines = len(registry.deadlines)
    gc.disable()  # Whoever watches collections would be counted with the work.
    sys.setprofile(count)
    for now in (2.0, 3.0, 4.0):
        work(now)
    sys.setprofile(None)
    gc.enable()
    counts["fresh Holds"] = ledger.serial - serial
    counts["deadlines"] = len(registry.deadlines) - deadlines
    counts["computed"] = registry.counters.computed_tokens
    return sorted(counts.items())


@pytest.mark.no_cover
def test_a_step_costs_the_same_beside_ten_and_beside_ten_thousand_idle_sessions() -> None:
    costs = []
    for idle in (IDLE_FEW, IDLE_MANY):
        scheduler = make_scheduler(idle)
        fill(scheduler, idle)
        pool = scheduler.registry.ledger.pool(Component.STATE)
        assert pool.by_kind[Kind.SESSION] == len(scheduler.registry.resting) == idle
        before = scheduler.registry.counters.computed_tokens
        cost = dict(play(scheduler))
        cost["computed"] -= before
        costs.append(cost)
    assert costs[0] == costs[1]
    assert costs[0]["call"] > 1000, "something was counted"
    assert costs[0]["deadlines"] == 0, "turns leave nothing behind in the heap"
    for table in ("sessions", "resting", "checkpointed", "tenants", "live Holds"):
        assert costs[0].get(table, 0) == 0, f"{table} are never walked"


def test_a_walk_through_a_table_would_be_seen() -> None:
    walked: Counter = Counter()
    table = CountedTable({"a": 1, "b": 2, "c": 3}, "sessions", walked)
    assert list(table) == ["a", "b", "c"] and walked["sessions"] == 3
    assert list(table.values()) == [1, 2, 3] and walked["sessions"] == 6
    assert dict(table.items()) == {"a": 1, "b": 2, "c": 3} and next(iter(table.keys())) == "a"
    assert table["b"] == 2 and "c" in table and walked["sessions"] == 10
