"""Prometheus metrics. Gauges of memory come from the ledger, with each pulse of the engine.

Counters and histograms of turns are taken in the API process, so they include queueing. Labels never carry
values that a client chose: no session ids, no keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from holdfast.engine.reports.loop_times import BOUNDS
from holdfast.server.link import wire

if TYPE_CHECKING:
    from holdfast.server.link.engine_client import LoopTime, TurnFeed

__all__ = ["Metrics"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

TOTALS = {
    "retracts": "Turns that gave their memory back and were queued again.",
    "spills": "Sessions moved off the device.",
    "dropped": "Sessions whose memory was given up, to be computed again.",
    "computed_tokens": "Tokens computed by the model.",
    "cached_tokens": "Tokens of prompts that were in memory already.",
    "generated_tokens": "Tokens sampled.",
    "drafted_tokens": "Tokens proposed by speculation.",
    "accepted_tokens": "Proposed tokens that the model confirmed.",
    "steps": "Steps of the engine.",
    "audit_findings": "Findings of the audit.",
}

DRAFT_GAUGES = {
    "draft_pages_held": "Pages of the draft model's cache that sessions hold.",
    "draft_pages_free": "Pages of the draft model's cache that are free.",
    "draft_sessions": "Sessions with memory of the draft model.",
    "draft_sessions_resting": "Sessions that do not draft for now, because drafts did not pay.",
}
"""Shown where the engine has a draft model."""


class LedgerCollector(Collector):
    """Gauges of the engine's last pulse, and the totals of all pulses."""

    def __init__(
        self,
        pulse: Callable[[], wire.Pulse | None],
        totals: Callable[[], Mapping[str, int]],
        up: Callable[[], bool],
    ) -> None:
        self._pulse = pulse
        self._totals = totals
        self._up = up

    def collect(self) -> Iterable[Metric]:
        """The metrics of the ledger."""
        yield GaugeMetricFamily("holdfast_engine_up", "Whether the engine serves.", value=float(self._up()))
        totals = self._totals()
        for name, help_text in TOTALS.items():
            yield CounterMetricFamily(f"holdfast_{name}", help_text, value=totals.get(name, 0))
        pulse = self._pulse()
        if pulse is None:
            return
        units = GaugeMetricFamily(
            "holdfast_units", "Units of memory by holder.", labels=("component", "tier", "holder")
        )
        for component, tier, kind, count in pulse.holders:
            units.add_metric((component, tier, kind), count)
        yield units
        yield GaugeMetricFamily("holdfast_turns_running", "Turns being computed.", value=pulse.running)
        yield GaugeMetricFamily("holdfast_turns_queued", "Turns waiting for memory.", value=pulse.queued)
        yield GaugeMetricFamily("holdfast_sessions", "Sessions open.", value=pulse.sessions)
        if pulse.graphs is not None:
            captured, total = pulse.graphs
            yield GaugeMetricFamily("holdfast_graphs_captured", "CUDA graphs captured.", value=captured)
            yield GaugeMetricFamily("holdfast_graphs", "CUDA graphs to be captured in all.", value=total)
        for name, help_text in DRAFT_GAUGES.items():
            if name in pulse.drafts:
                yield GaugeMetricFamily(f"holdfast_{name}", help_text, value=pulse.drafts[name])


class LoopCollector(Collector):
    """Work between two steps of the engine's loop, from the pulses."""

    def __init__(self, loop_times: Callable[[], Mapping[str, LoopTime]]) -> None:
        self._loop_times = loop_times

    def collect(self) -> Iterable[Metric]:
        """One histogram, with the kind of work as its label."""
        family = HistogramMetricFamily(
            "holdfast_loop_held_seconds",
            "How long work between two steps held the engine's loop, by kind of work.",
            labels=("work",),
        )
        bounds = [*map(str, BOUNDS), "+Inf"]
        for work, (counts, seconds) in sorted(self._loop_times().items()):
            family.add_metric((work,), list(zip(bounds, accumulate(counts), strict=True)), seconds)
        yield family


class Metrics:
    """All metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.turns = Counter("holdfast_turns", "Turns by outcome.", ("outcome",), registry=self.registry)
        self.first = Histogram(
            "holdfast_time_to_first_token_seconds",
            "From a turn's arrival to its first token.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.between = Histogram(
            "holdfast_inter_token_seconds",
            "Mean time between the tokens of a turn.",
            buckets=TOKEN_SECONDS,
            registry=self.registry,
        )
        self.total = Histogram(
            "holdfast_turn_seconds",
            "From a turn's arrival to its end.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.queue = Histogram(
            "holdfast_queue_seconds", "How long turns waited.", buckets=SECONDS, registry=self.registry
        )
        self.reasoning = Counter(
            "holdfast_reasoning_tokens",
            "Tokens generated while the model reasoned.",
            registry=self.registry,
        )
        self.calls = Counter(
            "holdfast_tool_calls", "Tool calls by how they ended.", ("outcome",), registry=self.registry
        )
        self.conversations = Counter(
            "holdfast_conversations",
            "Chats sent whole, by whether their session was found, forked, or is new.",
            ("how",),
            registry=self.registry,
        )
        self.found_sessions = Gauge(
            "holdfast_found_sessions", "Hidden sessions of chats sent whole.", registry=self.registry
        )
        self.restarts = Counter("holdfast_engine_restarts", "Engine processes lost.", registry=self.registry)
        self.started = time.time()

    def watch(
        self,
        pulse: Callable[[], wire.Pulse | None],
        totals: Callable[[], Mapping[str, int]],
        up: Callable[[], bool],
    ) -> None:
        """Take gauges and counters from the engine's pulses."""
        self.registry.register(LedgerCollector(pulse, totals, up))

    def watch_loop(self, loop_times: Callable[[], Mapping[str, LoopTime]]) -> None:
        """Take the histogram of work between steps from the engine's pulses."""
        self.registry.register(LoopCollector(loop_times))

    def page(self) -> bytes:
        """The /metrics page."""
        return generate_latest(self.registry)

    def turn_ended(self, feed: TurnFeed) -> None:
        """Count an ended turn."""
        end = feed.end
        if end is None:
            self.turns.labels("lost").inc()
            return
        self.turns.labels(end.outcome).inc()
        if end.answer is not None:
            self.reasoning.inc(end.answer.reasoning_tokens)
            for call in end.answer.calls:
                self.calls.labels(call.outcome).inc()
        self.total.observe(end.total_seconds)
        self.queue.observe(end.queue_seconds)
        if end.first_seconds is not None:
            self.first.observe(end.first_seconds)
            if len(end.tokens) > 1:
                self.between.observe((end.total_seconds - end.first_seconds) / (len(end.tokens) - 1))

    def engine_lost(self) -> None:
        """Count an engine process that died."""
        self.restarts.inc()
