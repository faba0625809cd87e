"""`holdfast sim`: a seeded simulation of a server with faults, on the real core, without a model or a device.

Exit status: 0 without findings, 1 with a finding (and the command that replays it), 3 if the core or the
simulator crashed. With `--json` the last line is the summary. Progress goes to standard error.
"""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.cli.option_groups import with_groups
from holdfast.cli.planting import (
    NO_MUTANT,
    MutantOptions,
    list_all,
    planting,
    reached_field,
    say_reached,
)
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


@dataclass(frozen=True, slots=True)
class WorldOptions:
    """The simulated worlds."""

    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same run.")] = 1
    steps: Annotated[int, typer.Option(min=1, help="Scheduler steps over all worlds.")] = 10_000
    layout: Annotated[str, typer.Option(help=f"Memory layout: {', '.join(LAYOUT_NAMES)}, or {ALL}.")] = ALL
    page_size: Annotated[
        int | None,
        typer.Option(min=1, max=PAGE_SIZE_MAX, help="Page size.", show_default="1, 3, 16, 64"),
    ] = None
    faults: Annotated[float, typer.Option(min=0.0, max=1.0, help="Probability of a fault.")] = 0.05
    workload: Annotated[str, typer.Option(help=f"Workload: {', '.join(WORKLOADS)}, or {ALL}.")] = ALL
    world: Annotated[int | None, typer.Option(hidden=True, help="Run this world of the run alone.")] = None

    def chosen(self) -> Options:
        """As the runner takes them; an unknown layout or workload is a parse error."""
        _require("layout", self.layout, LAYOUT_NAMES)
        _require("workload", self.workload, tuple(WORKLOADS))
        return Options(
            self.seed,
            self.steps,
            LAYOUT_NAMES if self.layout == ALL else (self.layout,),
            PAGE_SIZES if self.page_size is None else (self.page_size,),
            tuple(WORKLOADS) if self.workload == ALL else (self.workload,),
            self.faults,
        )

    @property
    def replay(self) -> str:
        """The command that runs all of these worlds again."""
        size = f" --page-size {self.page_size}" if self.page_size is not None else ""
        return (
            f"holdfast sim --seed {self.seed} --steps {self.steps} --layout {self.layout}{size} "
            f"--faults {self.faults} --workload {self.workload}"
        )


@dataclass(frozen=True, slots=True)
class ExploreOptions:
    """An exploration instead of a simulation."""

    exhaustive: Annotated[
        bool, typer.Option("--explore", help="Explore all interleavings of events in tiny worlds instead.")
    ] = False
    states: Annotated[int, typer.Option(min=1, help="With --explore: number of states to visit.")] = 10_000


WORLDS = WorldOptions()
SIMULATE = ExploreOptions()


@app.command(help="Simulate a server on the real core with injected faults, and audit after every step.")
@with_groups
def sim(
    worlds: WorldOptions = WORLDS,
    mutants: MutantOptions = NO_MUTANT,
    explored: ExploreOptions = SIMULATE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Run a simulation or an exploration, or list the mutants."""
    if mutants.list_mutants:
        list_all(MUTANTS, ("name", "story", "level", "what"), as_json)
        return
    options = worlds.chosen()
    notes = Console(stderr=True)
    exploring = explored.exhaustive
    replay = f"holdfast sim --explore --states {explored.states}" if exploring else worlds.replay
    replay += mutants.replay
    try:
        with planting(MUTANTS, mutants.mutant) as patcher:
            if exploring:
                found = _explore(explored.states, replay, patcher, notes, as_json)
            else:
                summary = _simulate(options, worlds.world, notes)
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
        typer.echo(json.dumps(summary.as_json() | reached_field(patcher)))
        return finding is not None
    if finding is not None:
        _print_finding(finding, replay)
    typer.echo(
        f"{summary.steps} steps in {summary.worlds} worlds, {summary.turns} turns, {summary.faults} faults, "
        f"{int(finding is not None)} findings, state {summary.state_hash}"
    )
    say_reached(patcher, finding is not None)
    return finding is not None


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
        typer.echo(json.dumps(done.as_json() | reached_field(patcher)))
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
