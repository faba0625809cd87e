"""Rates and latency percentiles of the last minute, for the page.

Computed from snapshots of the metrics and the engine's pulses, taken once a second while there are viewers.
Percentiles are interpolated in the histograms' buckets.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from prometheus_client import Histogram

from holdfast.server.service import Service

__all__ = ["Figures", "quantile"]

WINDOW_SECONDS = 60.0
SHOWN = (0.5, 0.95, 0.99)
COUNTED = (
    "generated_tokens",
    "computed_tokens",
    "cached_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "retracts",
    "spills",
    "dropped",
)

Buckets = tuple[tuple[float, float], ...]
"""(upper bound in seconds, how many are at most that)."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The running totals at a moment."""

    at: float
    counters: dict[str, int]
    latencies: dict[str, Buckets]


def buckets_of(histogram: Histogram) -> Buckets:
    """The cumulative counts of a histogram."""
    return tuple(
        (float(sample.labels["le"]), sample.value)
        for metric in histogram.collect()
        for sample in metric.samples
        if sample.name.endswith("_bucket")
    )


def quantile(buckets: Buckets, part: float) -> float | None:
    """A quantile interpolated in buckets; None without values."""
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    wanted = part * total
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted:
            if bound == float("inf") or count == below:
                return low
            return low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low


class Figures:
    """Snapshots of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._snapshots: deque[Snapshot] = deque()

    def note(self) -> None:
        """Take a snapshot."""
        metrics, pulse = self._service.metrics, self._service.link.pulse
        now = time.monotonic()
        self._snapshots.append(
            Snapshot(
                now,
                dict(pulse.counters) if pulse is not None else {},
                {
                    "first_token": buckets_of(metrics.first),
                    "between_tokens": buckets_of(metrics.between),
                    "turn": buckets_of(metrics.total),
                    "queue": buckets_of(metrics.queue),
                },
            )
        )
        while now - self._snapshots[0].at > WINDOW_SECONDS:
            self._snapshots.popleft()

    def shown(self) -> dict[str, Any]:
        """The figures as the page shows them."""
        pulse = self._service.link.pulse
        shown: dict[str, Any] = {
            "running": 0 if pulse is None else pulse.running,
            "queued": 0 if pulse is None else pulse.queued,
            "sessions": 0 if pulse is None else pulse.sessions,
            "restarts": self._service.supervisor.restarts,
            "rates": {},
            "latency": {},
        }
        if len(self._snapshots) < 2:
            return shown
        first, before, last = self._snapshots[0], self._snapshots[-2], self._snapshots[-1]
        elapsed = max(1e-3, last.at - before.at)
        for name in COUNTED:
            grown = last.counters.get(name, 0) - before.counters.get(name, 0)
            shown["rates"][name] = round(max(0, grown) / elapsed, 2)
        for name, now in last.latencies.items():
            window = tuple(
                (bound, count - then)
                for (bound, count), (_, then) in zip(now, first.latencies[name], strict=True)
            )
            values = [quantile(window, part) for part in SHOWN]
            shown["latency"][name] = {
                "count": int(window[-1][1]),
                **{
                    f"p{part * 100:.0f}": None if value is None else round(value * 1000, 2)
                    for part, value in zip(SHOWN, values, strict=True)
                },
            }
        return shown
