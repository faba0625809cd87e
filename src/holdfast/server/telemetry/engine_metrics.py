"""Metrics of several engines: those of a single server's engine, with the engine as one more label."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from holdfast.engine.reports.loop_times import BOUNDS
from holdfast.server.telemetry.metrics import DRAFT_GAUGES, TOTALS

if TYPE_CHECKING:
    from holdfast.server.link.remote_engine import RemoteEngine

__all__ = ["EnginesCollector"]

GAUGES = {
    "turns_running": ("Turns being computed.", "running"),
    "turns_queued": ("Turns waiting for memory.", "queued"),
    "sessions": ("Sessions open.", "sessions"),
}


class EnginesCollector(Collector):
    """Gauges of the last pulse of each engine, and the totals of all its pulses."""

    def __init__(self, engines: Callable[[], Mapping[str, RemoteEngine]]) -> None:
        """`engines` by address; one that was never reached has its address for its name."""
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        """The metrics of all engines."""
        engines = list(self._engines().values())
        up = GaugeMetricFamily("holdfast_engine_up", "Whether the engine serves.", labels=("engine",))
        lost = CounterMetricFamily("holdfast_link_losses", "Links that broke.", labels=("engine",))
        for engine in engines:
            up.add_metric((engine.name,), float(engine.up))
            lost.add_metric((engine.name,), engine.lost)
        yield from (up, lost)
        for name, help_text in TOTALS.items():
            family = CounterMetricFamily(f"holdfast_{name}", help_text, labels=("engine",))
            for engine in engines:
                family.add_metric((engine.name,), engine.client.totals().get(name, 0))
            yield family
        yield from self._gauges(engines)
        yield self._loop(engines)

    def _gauges(self, engines: list[RemoteEngine]) -> Iterable[Metric]:
        pulses = [(engine.name, engine.client.pulse) for engine in engines]
        known = [(name, pulse) for name, pulse in pulses if pulse is not None]
        units = GaugeMetricFamily(
            "holdfast_units",
            "Units of memory by holder.",
            labels=("engine", "component", "tier", "holder"),
        )
        for engine, pulse in known:
            for component, tier, kind, count in pulse.holders:
                units.add_metric((engine, component, tier, kind), count)
        yield units
        for name, (help_text, field) in GAUGES.items():
            family = GaugeMetricFamily(f"holdfast_{name}", help_text, labels=("engine",))
            for engine, pulse in known:
                family.add_metric((engine,), getattr(pulse, field))
            yield family
        captured = GaugeMetricFamily("holdfast_graphs_captured", "CUDA graphs captured.", labels=("engine",))
        total = GaugeMetricFamily("holdfast_graphs", "CUDA graphs to be captured in all.", labels=("engine",))
        for engine, pulse in known:
            if pulse.graphs is not None:
                captured.add_metric((engine,), pulse.graphs[0])
                total.add_metric((engine,), pulse.graphs[1])
        if captured.samples:
            yield from (captured, total)
        for name, help_text in DRAFT_GAUGES.items():
            family = GaugeMetricFamily(f"holdfast_{name}", help_text, labels=("engine",))
            for engine, pulse in known:
                if name in pulse.drafts:
                    family.add_metric((engine,), pulse.drafts[name])
            if family.samples:
                yield family

    def _loop(self, engines: list[RemoteEngine]) -> Metric:
        family = HistogramMetricFamily(
            "holdfast_loop_held_seconds",
            "How long work between two steps held the engine's loop, by kind of work.",
            labels=("engine", "work"),
        )
        bounds = [*map(str, BOUNDS), "+Inf"]
        for engine in engines:
            for work, (counts, seconds) in sorted(engine.client.loop_times().items()):
                buckets = list(zip(bounds, accumulate(counts), strict=True))
                family.add_metric((engine.name, work), buckets, seconds)
        return family
