"""The figures of `bench wire`, and its two tables: rounds in process and over HTTP, and the spans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from holdfast.bench.tables import make_table
from holdfast.bench.url.load import percentile
from holdfast.bench.wire.load import Round, RoundSamples
from holdfast.bench.wire.served import Spans
from holdfast.server.telemetry.tracing import SPANS

__all__ = ["HTTP", "INSIDE", "Figure", "figures_of", "round_table", "span_figures", "span_table"]

Figure = dict[str, Any]

INSIDE, HTTP = "in process", "over HTTP"

COLUMNS = (
    ("first_token_ms", "first token, ms"),
    ("first_token_p90_ms", "p90"),
    ("first_token_p99_ms", "p99"),
    ("after_abort_ms", "after an abort, ms"),
    ("after_abort_p99_ms", "p99"),
    ("step_ms", "token gap, ms"),
    ("longest_pause_ms", "longest pause, ms"),
    ("tokens_per_second", "tokens/s"),
    ("api_us_per_token", "API us/token"),
    ("engine_us_per_token", "engine us/token"),
)


def figures_of(each: Round, system: str, samples: RoundSamples) -> Iterator[Figure]:
    """The figures of one round of one system."""

    def figure(name: str, value: float, unit: str) -> Figure:
        common = {"streams": each.streams, "history": each.history}
        return {"name": name, "value": round(value, 3), "unit": unit, "system": system, **common}

    plain = [turn for turn in samples.turns if not turn.after_abort]
    cut = [turn for turn in samples.turns if turn.after_abort]
    for name, turns in (("first_token", plain), ("after_abort", cut)):
        firsts = [1000 * turn.first for turn in turns]
        if firsts:
            yield figure(f"{name}_ms", median(firsts), "ms")
            yield figure(f"{name}_p90_ms", percentile(firsts, 0.90), "ms")
            yield figure(f"{name}_p99_ms", percentile(firsts, 0.99), "ms")
    gaps = [1000 * (turn.total - turn.first) / (turn.tokens - 1) for turn in plain if turn.tokens > 1]
    if gaps:
        yield figure("step_ms", median(gaps), "ms")
    yield figure("longest_pause_ms", 1000 * max(turn.pause for turn in plain), "ms")
    tokens = sum(turn.tokens for turn in plain)
    yield figure("tokens_per_second", tokens / samples.seconds, "tokens/s")
    for role, seconds in samples.processor.items():
        yield figure(f"{role}_us_per_token", 1e6 * seconds / tokens, "us")


def span_figures(each: Round, spans: Spans) -> Iterator[Figure]:
    """The median and the 99th percentile of each span of one round."""
    for name in SPANS:
        found = [float(value) for value in spans.get(name, ())]
        if found:
            common = {"unit": "us", "system": HTTP, "streams": each.streams, "history": each.history}
            spread = {"p99": percentile(found, 0.99), "turns": len(found)}
            yield {"name": f"span {name}", "value": median(found), **spread, **common}


def round_table(rounds: Sequence[Round], figures: Sequence[Figure], title: str) -> Table:
    """One line for each round and system."""
    caption = "medians and percentiles over all turns of a round; processor time per token by process"
    texts, numbers = ("streams", "history", "system"), [heading for _, heading in COLUMNS]
    table = make_table(title, caption, texts, numbers)
    for each in rounds:
        for system in (INSIDE, HTTP):
            found = {
                figure["name"]: figure["value"]
                for figure in figures
                if (figure["streams"], figure["history"]) == (each.streams, each.history)
                and figure["system"] == system
            }
            if found:
                cells = [f"{found[name]:.2f}" if name in found else "" for name, _ in COLUMNS]
                table.add_row(str(each.streams), str(each.history), system, *cells)
    return table


def span_table(rounds: Sequence[Round], figures: Sequence[Figure]) -> Table:
    """One line for each span, one column for each round: the median and the 99th percentile."""
    headings = [f"{each.streams} x {each.history}" for each in rounds]
    caption = "us, median / 99th percentile; columns: streams x history"
    table = make_table("the way to the first token", caption, ("span",), headings)
    for name in SPANS:
        cells = []
        for each in rounds:
            found = next(
                (
                    figure
                    for figure in figures
                    if figure["name"] == f"span {name}"
                    and (figure["streams"], figure["history"]) == (each.streams, each.history)
                ),
                None,
            )
            cells.append("" if found is None else f"{found['value']:.0f} / {found['p99']:.0f}")
        table.add_row(name, *cells)
    return table
