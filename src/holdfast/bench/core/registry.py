"""The table of the core's measurements: adding one is a line in MEASUREMENTS.

A measurement is a generator of figures; it takes the settings and a function for its progress.
"""

from __future__ import annotations

from holdfast.bench.core.checks import measure_audit_overhead, measure_census
from holdfast.bench.core.report import Measurement
from holdfast.bench.core.steps import measure_plan_settle
from holdfast.bench.core.trace import measure_tree_trace
from holdfast.bench.core.turns import measure_open_close, measure_turn

MEASUREMENTS: dict[str, Measurement] = {
    "turn": measure_turn,
    "open_close": measure_open_close,
    "tree_trace": measure_tree_trace,
    "census": measure_census,
    "audit_overhead": measure_audit_overhead,
    "plan_settle": measure_plan_settle,
}
