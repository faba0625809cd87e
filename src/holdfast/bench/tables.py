"""Figures as tables for a terminal, one function for each kind of benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from holdfast.bench.agents.workload import AgentLoad
from holdfast.bench.core.report import Check, Figure, plain
from holdfast.bench.figures import OURS
from holdfast.bench.url.load import Load

__all__ = ["agents_table", "comparison_table", "core_table", "crowd_table", "make_table", "sessions_table"]

JsonFigure = dict[str, Any]

COMMON_KEYS = {"name", "value", "unit", "system", "min", "max", "rounds", "foreign_load"}
"""Keys of a figure that are not parameters."""


def make_table(title: str, caption: str | None, texts: Iterable[str], numbers: Iterable[str]) -> Table:
    """A table with columns of text, then columns of numbers aligned to the right."""
    table = Table(title=title, caption=caption)
    for heading in texts:
        table.add_column(heading)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def core_table(figures: Iterable[Figure]) -> Table:
    """`bench core`: one line for each check, beside SGLang's figure and the target."""
    caption = "thread-CPU time, medians, garbage collector off"
    table = make_table("holdfast bench core", caption, ("name", "parameters"), ())
    for heading in ("value", "unit", "SGLang", "ratio", "target", "met"):
        table.add_column(heading, justify="left" if heading in {"unit", "met"} else "right", no_wrap=True)
    for figure in figures:
        if figure.system == OURS:
            parameters = ", ".join(f"{key} {value}" for key, value in figure.parameters.items())
            for check in figure.checks:
                table.add_row(*_core_cells(figure.name, parameters, check))
    return table


def _core_cells(name: str, parameters: str, check: Check) -> tuple[str, ...]:
    shown = name if check.quantity == name else f"{name} {check.quantity}"
    met = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[check.met]
    baseline = "" if check.baseline is None else plain(check.baseline)
    ratio = "" if check.ratio is None else f"{check.ratio:.3f}"
    return shown, parameters, plain(check.value), check.unit, baseline, ratio, check.target, met


def comparison_table(title: str, figures: Sequence[JsonFigure], model: str, threads: int) -> Table:
    """`bench throughput`, `turns` and `abort`: one line for each quantity, one column for each system."""
    systems = list(dict.fromkeys(figure["system"] for figure in figures))
    table = make_table(
        f"holdfast bench {title}: {model}, {threads} threads",
        "median (min-max) over the rounds; to: median ratio of Holdfast to that system; "
        "foreign: cores used by other processes",
        ("name", "parameters", "unit"),
        (*systems, *(f"to {name}" for name in systems[1:]), "foreign"),
    )
    rows: dict[tuple[str, str], dict[str, JsonFigure]] = {}
    for figure in figures:
        parameters = {
            key: value
            for key, value in figure.items()
            if key not in COMMON_KEYS and not key.startswith("ratio")
        }
        shown = ", ".join(f"{key.removesuffix('_tokens')} {value}" for key, value in parameters.items())
        rows.setdefault((figure["name"], shown), {})[figure["system"]] = figure
    for (name, shown), found in rows.items():
        cells = [_spread_cell(found[system]) if system in found else "" for system in systems]
        first = next(iter(found.values()))
        ratios = [str(first.get(f"ratio_to_{system}", "")) for system in systems[1:]]
        foreign = max(figure["foreign_load"] for figure in found.values())
        table.add_row(name, shown, first["unit"], *cells, *ratios, f"{foreign:.2f}")
    return table


def _spread_cell(figure: JsonFigure) -> str:
    digits = 2 if figure["unit"] == "ratio" else 1
    low, high = (f"{figure[key]:,.{digits - 1}f}" for key in ("min", "max"))
    return f"{figure['value']:,.{digits}f} ({low}-{high})"


def sessions_table(figures: Sequence[JsonFigure], url: str, model: str, load: Load) -> Table:
    """`bench sessions`: one line for each quantity and API; those of one quantity are adjacent."""
    sizes = (
        f"{load.sessions} conversations of {load.turns} turns, {load.input_tokens} words in, "
        f"{load.output_tokens} tokens out, {load.aborts:.0%} aborted, {load.idle} idle"
    )
    return _load_table(figures, f"holdfast bench sessions: {model} at {url}", sizes)


def agents_table(figures: Sequence[JsonFigure], place: str, model: str, load: AgentLoad) -> Table:
    """`bench agents`: one line for each quantity and API; `place` says where the model is."""
    sizes = (
        f"{load.sessions} agents of {load.turns} turns, {load.input_tokens} words in and "
        f"{load.output_tokens} tokens out each, {load.forks:.0%} with a sub-agent, tools of {load.pause:g} s"
    )
    return _load_table(figures, f"holdfast bench agents: {model} at {place}", sizes)


def _load_table(figures: Sequence[JsonFigure], title: str, sizes: str) -> Table:
    """The figures of a load; those of one quantity are adjacent."""
    table = Table(title=title, caption=f"times are medians; {sizes}")
    for heading in ("name", "by"):
        table.add_column(heading, no_wrap=True)
    for heading in ("value", "p90", "p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    order = list(dict.fromkeys(figure["name"] for figure in figures))
    for figure in sorted(figures, key=lambda figure: order.index(figure["name"])):
        cells = [f"{figure[key]:.10g}" if key in figure else "" for key in ("value", "p90", "p99")]
        table.add_row(f"{figure['name']} ({figure['unit']})", figure["system"], *cells)
    return table


def crowd_table(figures: Sequence[JsonFigure], model: str, rounds: int) -> Table:
    """`bench sessions --here`: one line for each quantity."""
    first = figures[0]
    table = Table(
        title=f"holdfast bench sessions: {model}, {first['threads']} threads",
        caption=f"{first['sessions']} sessions, {first['fit']} of which fit; medians over {rounds} rounds; "
        f"other processes used {first['foreign_load']} cores",
    )
    for heading in ("name", "value", "min", "max", "unit"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("name", "unit") else "right")
    for figure in figures:
        cells = [f"{figure[key]:,.2f}" for key in ("value", "min", "max")]
        table.add_row(figure["name"], *cells, figure["unit"])
    return table
