"""The scheduler's time for a step: plan and settle, without an executor.

Decode rows alone, decode rows with prefill chunks, and the same with thousands of idle sessions, on which the
time must not depend.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.bench.core.report import Check, Figure, Parameter, Settings
from holdfast.bench.core.sessions import POOL_TOKENS
from holdfast.bench.core.workloads import stream
from holdfast.bench.figures import Progress
from holdfast.bench.timing import clock, collector_off, median_us
from holdfast.core.layout import Component, Tier, named_layout
from holdfast.core.ledger import Ledger
from holdfast.core.plan import RowResult, StepResult
from holdfast.core.policy import Policy
from holdfast.core.registry import Plan
from holdfast.core.scheduler import Scheduler
from holdfast.core.turn import TurnRequest

# (decode rows, chunks, idle sessions) -> the maximum milliseconds of a step.
CASES: dict[tuple[int, int, int], float] = {
    (256, 0, 0): 1.0,
    (64, 4, 0): 0.6,
    (256, 0, 10_000): 1.0,
    (64, 4, 10_000): 0.6,
}
PROMPT = 64
CHUNK_TOKENS = 512
LONG_PROMPT = 160_000
STEPS = 60
TENANT = "bench"


def measure_plan_settle(settings: Settings, progress: Progress) -> Iterator[Figure]:
    """Plan and settle of one step, by rows, chunks and idle sessions."""
    for page_size in settings.page_sizes:
        for case, target in CASES.items():
            decode_rows, chunks, idle = case
            progress(f"plan_settle: page size {page_size}, {decode_rows} rows, {chunks} chunks, {idle} idle")
            scheduler = crowded(page_size, *case)
            with collector_off():
                samples = [_sample(scheduler, decode_rows, chunks) for _ in range(STEPS * settings.repeats)]
            parameters: dict[str, Parameter] = {
                "page_size": page_size,
                "decode_rows": decode_rows,
                "chunks": chunks,
                "idle_sessions": idle,
            }
            value = median_us(samples) / 1000
            check = Check("step", value, "ms", at_most=target if page_size == 64 else None)
            yield Figure("plan_settle", value, "ms", parameters, (check,))


def crowded(page_size: int, decode_rows: int, chunks: int, idle: int) -> Scheduler:
    """A scheduler with turns that decode, turns that prefill a long prompt, and idle sessions."""
    layout = named_layout("dense", page_size)
    ledger = Ledger(layout, {(Component.FULL, Tier.DEVICE): POOL_TOKENS // page_size})
    policy = Policy(context_length=1 << 20, chunk_tokens=CHUNK_TOKENS, running_max=1024, queue_max=1 << 14)
    scheduler = Scheduler(ledger, policy)
    for number in range(idle):
        scheduler.open(f"idle {number}", TENANT, 0.0)
    for number in range(decode_rows):
        _begin(scheduler, f"decode {number}", stream(70_000 + number, PROMPT), 1 << 16)
    while scheduler.registry.queue:
        _step(scheduler, decode_rows * PROMPT)
    for number in range(chunks):
        _begin(scheduler, f"chunk {number}", stream(80_000 + number, LONG_PROMPT), 1)
    while scheduler.registry.queue:
        _step(scheduler, decode_rows + chunks * CHUNK_TOKENS)
    return scheduler


def _begin(scheduler: Scheduler, name: str, tokens: list[int], max_tokens: int) -> None:
    scheduler.open(name, TENANT, 0.0)
    scheduler.submit(name, TurnRequest(f"turn of {name}", tuple(tokens), max_tokens), 0.0)


def _results(plan: Plan) -> StepResult:
    return StepResult([RowResult([7] if row.sample else []) for row in plan.rows])


def _step(scheduler: Scheduler, budget: int) -> None:
    plan = scheduler.plan(budget, 0.0)
    scheduler.settle(plan, _results(plan), 0.0)


def _sample(scheduler: Scheduler, decode_rows: int, chunks: int) -> int:
    """The scheduler's nanoseconds for one step, without making the results."""
    begun = clock()
    plan = scheduler.plan(decode_rows + chunks * CHUNK_TOKENS, 0.0)
    planned = clock() - begun
    assert len(plan.rows) == decode_rows + chunks, "every turn has a row in every step"
    result = _results(plan)
    begun = clock()
    scheduler.settle(plan, result, 0.0)
    return planned + clock() - begun
