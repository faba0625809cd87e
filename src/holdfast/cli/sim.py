"""`holdfast sim`: a seeded simulation of a server with faults, on the real core, without a model or a device.

Exit status: 0 without findings, 1 with a finding (and the command that replays it), 3 if the core or the
simulator crashed. With `--json` the last line is the summary. Progress goes to standard error.
"""

from __future__ import annotations

import json
import traceback
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from holdfast.cli.planting import planting
from holdfast.core.layout import LAYOUT_NAMES, PAGE_SIZE_MAX
from holdfast.sim.explore import Exploration, explore
from holdfast.sim.found import Crashed
from holdfast.sim.mutants import MUTANTS, Patcher
from holdfast.sim.runner import PAGE_SIZES, Finding, Options, Summary, simulate
from holdfast.sim.workloads import WORKLOADS

__all__ = ["app"]

FOUND = 1
CRASHED = 3
ALL = "all"

app = typer.Typer(add_completion=False)


@app.command(help="Simulate a server on the real core with injected faults, and audit after every step.")
def sim(
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same run.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Scheduler steps over all worlds.")] = 10_000,
    layout: Annotated[str, typer.Option(help=f"Memory layout: {', '.join(LAYOUT_NAMES)}, or {ALL}.")] = ALL,
    page_size: Annotated[
        int | None,
        typer.Option(min=1, max=PAGE_SIZE_MAX, help="Page size.", show_default="1, 3, 16, 64"),
    ] = None,
    faults: Annotated[float, typer.Option(min=0.0, max=1.0, help="Probability of a fault.")] = 0.05,
    workload: Annotated[str, typer.Option(help=f"Workload: {', '.join(WORKLOADS)}, or {ALL}.")] = ALL,
    mutant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Plant a known bug, which the simulation must find.")
    ] = None,
    list_mutants: Annotated[bool, typer.Option("--list-mutants", help="List the known bugs.")] = False,
    exhaustive: Annotated[
        bool, typer.Option("--explore", help="Explore all interleavings of events in tiny worlds instead.")
    ] = False,
    states: Annotated[int, typer.Option(min=1, help="With --explore: number of states to visit.")] = 10_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    world: Annotated[int | None, typer.Option(hidden=True, help="Run this world of the run alone.")] = None,
) -> None:
    """Run a simulation or an exploration, or list the mutants."""
    if list_mutants:
        _list_mutants(as_json)
        return
    _require("layout", layout, LAYOUT_NAMES)
    _require("workload", workload, tuple(WORKLOADS))
    planted = planting(MUTANTS, mutant)
    notes = Console(stderr=True)
    options = Options(
        seed,
        steps,
        LAYOUT_NAMES if layout == ALL else (layout,),
        PAGE_SIZES if page_size is None else (page_size,),
        tuple(WORKLOADS) if workload == ALL else (workload,),
        faults,
    )
    replay = _replay_line(options, layout, page_size, workload)
    if exhaustive:
        replay = f"holdfast sim --explore --states {states}"
    if mutant is not None:
        replay += f" --mutant {mutant}"
    try:
        with planted as patcher:
            if exhaustive:
                found = _explore(states, replay, patcher, notes, as_json)
            else:
                summary = _simulate(options, world, notes)
                found = _report(summary, replay, patcher, as_json)
    except Crashed as crash:
        notes.print("".join(traceback.format_exception(crash.__cause__)), markup=False, highlight=False)
        notes.print(f"crash:  {crash}", markup=False, highlight=False, soft_wrap=True)
        notes.print(f"replay: {replay}{crash.replay}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(CRASHED) from crash
    if found:
        raise typer.Exit(FOUND)


def _require(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in (*known, ALL):
        raise typer.BadParameter(f"unknown {name} {value!r}; known: {', '.join(known)}, {ALL}")


def _replay_line(options: Options, layout: str, page_size: int | None, workload: str) -> str:
    size = f" --page-size {page_size}" if page_size is not None else ""
    return (
        f"holdfast sim --seed {options.seed} --steps {options.steps} --layout {layout}{size} "
        f"--faults {options.faults} --workload {workload}"
    )


def _simulate(options: Options, world: int | None, notes: Console) -> Summary:
    """Run with a progress bar on a terminal, or a line for each tenth elsewhere."""
    columns = (TextColumn("sim"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=notes, disable=not notes.is_terminal) as bar:
        task = bar.add_task("", total=options.steps)
        tenth = 0

        def progress(summary: Summary) -> None:
            nonlocal tenth
            done = f"{summary.worlds} worlds, {summary.turns} turns, {summary.faults} faults"
            bar.update(task, completed=summary.steps, description=done)
            if not notes.is_terminal and summary.steps * 10 // options.steps > tenth:
                tenth = summary.steps * 10 // options.steps
                notes.print(f"sim: {summary.steps} of {options.steps} steps, {done}", highlight=False)

        return simulate(options, world, progress)


def _report(summary: Summary, replay: str, patcher: Patcher | None, as_json: bool) -> bool:
    """Print the result of a simulation; returns whether there was a finding."""
    finding = summary.finding
    if as_json:
        if finding is not None:
            typer.echo(json.dumps(_finding_line(finding, replay)))
        typer.echo(json.dumps(summary.as_json() | _reached(patcher)))
        return finding is not None
    if finding is not None:
        _print_finding(finding, replay)
    typer.echo(
        f"{summary.steps} steps in {summary.worlds} worlds, {summary.turns} turns, {summary.faults} faults, "
        f"{int(finding is not None)} findings, state {summary.state_hash}"
    )
    if patcher is not None:
        typer.echo(f"the mutant was reached {patcher.reached} times, and {'' if finding else 'not '}caught")
    return finding is not None


def _reached(patcher: Patcher | None) -> dict[str, object]:
    return {} if patcher is None else {"mutant_reached": patcher.reached}


def _finding_line(finding: Finding, replay: str) -> dict[str, object]:
    place = finding.place
    return {
        "name": "finding",
        "value": 1,
        "unit": "findings",
        "kind": finding.kind,
        "holder": finding.holder,
        "detail": finding.detail,
        "world": place.number,
        "step": finding.step,
        "layout": place.setup.layout,
        "page_size": place.setup.page_size,
        "workload": place.setup.workload,
        "replay": f"{replay} --world {place.number}",
    }


def _print_finding(finding: Finding, replay: str) -> None:
    place = finding.place
    setup = place.setup
    typer.echo(f"finding: {finding.kind}: {finding.detail}")
    typer.echo(f"who:     {finding.holder}")
    typer.echo(
        f"when:    step {finding.step} of world {place.number} "
        f"({setup.layout}, page size {setup.page_size}, {setup.workload})"
    )
    typer.echo(f"replay:  {replay} --world {place.number}")


def _explore(states: int, replay: str, patcher: Patcher | None, notes: Console, as_json: bool) -> bool:
    """Visit states breadth first and print the result; returns whether there was a finding."""

    def progress(done: Exploration) -> None:
        line = f"explore: {done.states} of {states} states, {done.transitions} transitions"
        notes.print(line, highlight=False, end="\r" if notes.is_terminal else "\n")

    done = explore(states, progress)
    finding = done.finding
    if as_json:
        typer.echo(json.dumps(done.as_json() | _reached(patcher)))
        return finding is not None
    if finding is not None:
        typer.echo(f"finding: {finding.kind}: {finding.detail}")
        typer.echo(f"who:     {finding.holder}")
        typer.echo(f"when:    {finding.setting}; then {', '.join(finding.path)}")
        typer.echo(f"replay:  {replay}")
    typer.echo(
        f"{done.states} states, {done.transitions} transitions, up to {done.depth} events deep, "
        f"{int(finding is not None)} findings, state {done.state_hash}"
    )
    return finding is not None


def _list_mutants(as_json: bool) -> None:
    if as_json:
        for mutant in MUTANTS.values():
            line = {"name": mutant.name, "story": mutant.story, "level": mutant.level, "what": mutant.what}
            typer.echo(json.dumps(line))
        return
    table = Table(title=f"{len(MUTANTS)} mutants")
    for heading in ("name", "story", "level", "what goes wrong"):
        table.add_column(heading)
    for mutant in MUTANTS.values():
        table.add_row(mutant.name, mutant.story, mutant.level, mutant.what)
    Console().print(table)
