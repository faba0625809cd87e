"""The prefix tree under a trace of 2,000 requests with shared prefixes and a full pool.

A request is a list of token ids. All of it is timed: packing the list into the tree's key, match, lease,
eviction, taking units, moving them into the tree, and releasing the lease.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from holdfast.bench.core import anchors
from holdfast.bench.core.report import Check, Figure, Parameter, Settings
from holdfast.bench.core.sessions import ROOT, World
from holdfast.bench.core.workloads import trace_requests
from holdfast.bench.figures import Progress
from holdfast.bench.timing import clock, collector_off
from holdfast.core.layout import Component
from holdfast.core.ledger import Kind
from holdfast.core.tokens import TOKEN_BYTES, pack


@dataclass(slots=True)
class Replay:
    """The counts of one pass over the trace."""

    requests: int = 0
    tokens: int = 0
    matched_tokens: int = 0
    evicted_tokens: int = 0
    evictions: int = 0
    nanoseconds: int = 0

    @property
    def hit_rate(self) -> float:
        """Matched tokens over all tokens, including those of partial pages."""
        return self.matched_tokens / self.tokens

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests * 1e9 / self.nanoseconds


def measure_tree_trace(settings: Settings, progress: Progress) -> Iterator[Figure]:
    """Requests per second of the trace, by page size."""
    progress("tree_trace: making the requests")
    requests = list(trace_requests())
    for page_size in settings.page_sizes:
        runs: list[Replay] = []
        for repeat in range(settings.repeats):
            progress(f"tree_trace: page size {page_size}, run {repeat + 1} of {settings.repeats}")
            runs.append(replay(page_size, requests))
        rate = median(run.rate for run in runs)
        observed: dict[str, Parameter] = {
            "hit_rate": runs[0].hit_rate,
            "evicted_tokens": runs[0].evicted_tokens,
            "evictions": runs[0].evictions,
            "requests": runs[0].requests,
            "tokens": runs[0].tokens,
            "token_packing": "timed",
        }
        checks = _checks(page_size, rate, runs[0])
        yield Figure("tree_trace", rate, "requests/s", {"page_size": page_size}, checks, observed=observed)
        theirs = anchors.baseline_tree_trace(page_size)
        if theirs is not None:
            yield theirs


def _checks(page_size: int, rate: float, run: Replay) -> tuple[Check, ...]:
    if page_size not in anchors.TREE_TRACE:
        return (Check("tree_trace", rate, "requests/s"),)
    their_rate, their_hit_rate, their_evicted = anchors.TREE_TRACE[page_size]
    slack = their_evicted * anchors.TREE_EVICTED_SLACK
    return (
        Check("tree_trace", rate, "requests/s", their_rate, at_least=anchors.TREE_RATE_MIN[page_size]),
        Check(
            "hit_rate", run.hit_rate, "share", their_hit_rate, at_least=anchors.TREE_HIT_RATE_MIN[page_size]
        ),
        Check(
            "evicted_tokens",
            run.evicted_tokens,
            "tokens",
            their_evicted,
            at_least=their_evicted - slack,
            at_most=their_evicted + slack,
        ),
    )


def replay(page_size: int, requests: list[list[int]]) -> Replay:
    """Pass over the requests once, in a fresh world."""
    world = World("dense", page_size)
    ledger, tree = world.ledger, world.tree
    pool = ledger.pool(Component.FULL)
    holder = ledger.holder(Kind.TURN, "trace")
    run = Replay(len(requests), sum(map(len, requests)))
    with collector_off():
        started = clock()
        for tokens in requests:
            pages = len(tokens) // page_size
            packed = pack(tokens[: pages * page_size])
            match = tree.match(ROOT, packed, pages * page_size)
            lease = tree.lease(match, "trace")
            run.matched_tokens += match.length
            missing = pages - match.length // page_size
            if missing > len(pool.free):
                run.evictions += 1
                run.evicted_tokens += tree.evict(Component.FULL, missing - len(pool.free)) * page_size
            if missing:
                hold = ledger.take(pool, missing, holder)
                tree.extend(lease, packed[match.length * TOKEN_BYTES :], hold, None, 0)
            lease.release()
        run.nanoseconds = clock() - started
    return run
