"""`holdfast bench`: measure, and show each figure beside its baseline.

`bench core` measures the memory core alone: no model, no device, no torch; `throughput`, `turns` and `abort`
are in `bench_beside`, `sessions` in `bench_url`. It prints a table, or with `--json` one object a line; what
it does meanwhile goes to standard error. Targets that are missed are shown, not punished: the exit status is
0 whenever the measurement ran.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli import bench_beside, bench_url
from holdfast.core.layout import PAGE_SIZE_MAX
from holdfast.sim.bench.registry import MEASUREMENTS
from holdfast.sim.bench.report import OURS, Check, Figure, Settings, plain

__all__ = ["app"]

app = typer.Typer(
    help="Measure, and show each figure beside its baseline.", no_args_is_help=True, add_completion=False
)


@app.callback()
def _no_common_options() -> None:
    """Measure, and show each figure beside its baseline."""


app.command("sessions", help=bench_url.HELP)(bench_url.sessions)
app.command("throughput")(bench_beside.throughput_command)
app.command("turns")(bench_beside.turns_command)
app.command("abort")(bench_beside.abort_command)


@app.command("core")
def core(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"Of these alone: {', '.join(MEASUREMENTS)}.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each measurement is repeated.")] = 3,
    page_size: Annotated[
        list[int] | None,
        typer.Option(min=1, max=PAGE_SIZE_MAX, help="Of these page sizes alone.", show_default="1 and 64"),
    ] = None,
) -> None:
    """The memory core: turns, sessions, the prefix tree and the audit, with no model and no device."""
    names = list(only or MEASUREMENTS)
    unknown = [name for name in names if name not in MEASUREMENTS]
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known: {', '.join(MEASUREMENTS)}")
    settings = Settings(repeats, tuple(page_size) if page_size else Settings().page_sizes)
    figures: list[Figure] = []
    notes = Console(stderr=True)
    with notes.status("bench core") as status:

        def progress(line: str) -> None:
            if notes.is_terminal:
                status.update(f"bench core: {line}")
            else:
                notes.print(f"bench core: {line}", highlight=False)

        for name in names:
            for figure in MEASUREMENTS[name](settings, progress):
                figures.append(figure)
                if as_json:
                    typer.echo(json.dumps(figure.as_json()))
    if not as_json:
        Console().print(_table(figures))


def _table(figures: Iterable[Figure]) -> Table:
    table = Table(title="holdfast bench core", caption="thread-CPU time, medians, garbage collector off")
    for heading in ("name", "parameters"):
        table.add_column(heading)
    for heading in ("value", "unit", "SGLang", "ratio", "target", "met"):
        table.add_column(heading, justify="left" if heading in {"unit", "met"} else "right", no_wrap=True)
    for figure in figures:
        if figure.system == OURS:
            parameters = ", ".join(f"{key} {value}" for key, value in figure.parameters.items())
            for check in figure.checks:
                table.add_row(*_cells(figure.name, parameters, check))
    return table


def _cells(name: str, parameters: str, check: Check) -> tuple[str, ...]:
    shown = name if check.quantity == name else f"{name} {check.quantity}"
    met = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[check.met]
    baseline = "" if check.baseline is None else plain(check.baseline)
    ratio = "" if check.ratio is None else f"{check.ratio:.3f}"
    return shown, parameters, plain(check.value), check.unit, baseline, ratio, check.target, met
