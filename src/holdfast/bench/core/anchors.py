"""The baseline's figures for the same workloads, and the targets of ours.

SGLang at cce0a12: its own session, prefix-cache and allocator classes, driven without a model on two cores
without a GPU; thread-CPU time, medians of three runs, garbage collector off. At page size 64 its Triton
allocation kernels were replaced by its torch fallbacks, which overstates the rows of a turn there.
"""

from __future__ import annotations

from holdfast.bench.core.report import BASELINE, Figure, Parameter

# (page size, tokens of history) -> microseconds of one turn, 32 tokens in and 32 out.
TURN_US = {
    (1, 1024): 1552.0,
    (1, 16384): 1603.0,
    (1, 102400): 1957.0,
    (64, 1024): 5210.0,
    (64, 16384): 5673.0,
    (64, 102400): 5902.0,
}
# (page size, tokens of the first input) -> microseconds.
OPEN_CLOSE_US = {(1, 32): 4006.0, (1, 1024): 4354.0, (64, 32): 5893.0, (64, 1024): 6306.0}
# page size -> requests/s, hit rate, evicted tokens.
TREE_TRACE = {1: (2528.0, 0.3907, 4_551_791), 64: (1545.0, 0.3859, 4_535_936)}
# page size -> milliseconds of its page check: 1,000 sessions of 288 tokens, 256 running requests.
PAGE_CHECK_MS = {1: 363.0, 64: 90.0}

TURN_US_MAX = {("dense", 1): 155.0, ("dense", 64): 520.0}
# All three components, against the baseline's dense turn: at most a fifth.
TURN_US_MAX |= {("full+window+state", 1): 310.0, ("full+window+state", 64): 1042.0}
TURN_RATIO_MAX = 1.1
OPEN_CLOSE_SHARE_MAX = {"dense": 0.1, "full+window+state": 0.2}
TREE_RATE_MIN = {1: 4_000.0, 64: 7_000.0}
TREE_HIT_RATE_MIN = {1: 0.390, 64: 0.385}
TREE_EVICTED_SLACK = 0.01
CENSUS_MS_MAX = {(64, 288): 10.0, (64, 8192): 40.0}
SLICE_MS_MAX = {1: 1.0}
AUDIT_US_MAX = {64: 10.0}


def baseline_turn(page_size: int, history: int) -> Figure | None:
    """The baseline's turn."""
    parameters: dict[str, Parameter] = {"page_size": page_size, "history": history, "layout": "dense"}
    return _baseline("turn", TURN_US.get((page_size, history)), "us", parameters)


def baseline_open_close(page_size: int, prompt: int) -> Figure | None:
    """The baseline's open, first turn and close."""
    parameters: dict[str, Parameter] = {"page_size": page_size, "prompt": prompt, "layout": "dense"}
    return _baseline("open_close", OPEN_CLOSE_US.get((page_size, prompt)), "us", parameters)


def baseline_tree_trace(page_size: int) -> Figure | None:
    """The baseline's tree trace."""
    if page_size not in TREE_TRACE:
        return None
    rate, hit_rate, evicted = TREE_TRACE[page_size]
    observed: dict[str, Parameter] = {"hit_rate": hit_rate, "evicted_tokens": evicted}
    return _baseline("tree_trace", rate, "requests/s", {"page_size": page_size}, observed)


def baseline_census(page_size: int) -> Figure | None:
    """The baseline's page check: full-attention pages alone, of rows 8k tokens wide."""
    sizes = {"page_size": page_size, "sessions": 1_000, "running": 256, "tokens_per_session": 288}
    return _baseline("census", PAGE_CHECK_MS.get(page_size), "ms", {**sizes, "layout": "dense"})


def _baseline(
    name: str,
    value: float | None,
    unit: str,
    parameters: dict[str, Parameter],
    observed: dict[str, Parameter] | None = None,
) -> Figure | None:
    """A figure of the baseline; None where it was not measured."""
    if value is None:
        return None
    return Figure(name, value, unit, parameters, system=BASELINE, observed=observed or {})
