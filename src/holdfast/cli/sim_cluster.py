"""`holdfast sim-cluster`: a seeded simulation of a cluster with faults, on the real rules of ownership.

Exit status: 0 without findings, 1 with a finding (and the command that replays it). `--routing` compares
routing policies instead. With `--json` every line is an object, the last one the summary.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from holdfast.cli.option_groups import with_groups
from holdfast.cli.planting import (
    NO_MUTANT,
    MutantOptions,
    list_all,
    planting,
    reached_field,
    say_reached,
)
from holdfast.sim.cluster.mutants import CLUSTER_MUTANTS
from holdfast.sim.cluster.routing import Routed, compare
from holdfast.sim.cluster.world import Options, Result, simulate
from holdfast.sim.planting import Patcher

__all__ = ["app"]

FOUND = 1
SIZES = (10, 100, 1000)

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class WorldOptions:
    """The simulated cluster."""

    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same run.")] = 1
    events: Annotated[int, typer.Option(min=1, help="Events with faults; a quiet end follows.")] = 1_000_000
    replicas: Annotated[int, typer.Option(min=2, help="Replicas at the start.")] = 1000
    sessions: Annotated[int, typer.Option(min=1, help="Clients, each with a session.")] = 20_000
    faults: Annotated[float, typer.Option(min=0.0, help="Mean number of faults in a second.")] = 20.0
    loss: Annotated[float, typer.Option(min=0.0, max=0.5, help="Share of messages that are lost.")] = 0.002
    think: Annotated[float, typer.Option(min=0.01, help="Seconds between the turns of a client.")] = 4.0
    tenants: Annotated[int, typer.Option(min=1, help="Tenants, each with a limit of sessions.")] = 50


WORLD = WorldOptions()


@app.command(help="Simulate a cluster of replicas with injected faults, on the real rules of ownership.")
@with_groups
def sim_cluster(
    world: WorldOptions = WORLD,
    mutants: MutantOptions = NO_MUTANT,
    routing: Annotated[
        bool,
        typer.Option("--routing", help="Compare routing policies at 10, 100 and 1,000 replicas instead."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Run a simulation, compare routing policies, or list the mutants."""
    if mutants.list_mutants:
        list_all(CLUSTER_MUTANTS, ("name", "level", "what"), as_json)
        return
    if routing:
        _print_routing(compare(SIZES, world.seed), as_json)
        return
    options = Options(**asdict(world))
    with planting(CLUSTER_MUTANTS, mutants.mutant) as patcher:
        result = simulate(options)
    _report(result, _replay_line(options) + mutants.replay, patcher, as_json)
    if result.finding is not None:
        raise typer.Exit(FOUND)


def _replay_line(options: Options) -> str:
    return (
        f"holdfast sim-cluster --seed {options.seed} --events {options.events} --replicas {options.replicas} "
        f"--sessions {options.sessions} --faults {options.faults} --loss {options.loss} "
        f"--think {options.think} --tenants {options.tenants}"
    )


def _report(result: Result, replay: str, patcher: Patcher | None, as_json: bool) -> None:
    finding = result.finding
    if as_json:
        typer.echo(json.dumps({**result.as_json(), **reached_field(patcher), "replay": replay}))
        return
    if finding is not None:
        typer.echo(f"finding: {finding.kind}: {finding.detail}")
        typer.echo(f"when:    event {finding.event}, after {finding.time:.3f} s")
        typer.echo(f"replay:  {replay}")
    store = result.store
    typer.echo(
        f"{result.events} events in {result.seconds:.0f} simulated seconds, {result.acknowledged} requests "
        f"acknowledged, {result.repeated} repeated, {sum(result.faults.values())} faults, "
        f"{store['deaths']} deaths, {store['claims']} claims, {store['handed over']} sessions handed over, "
        f"{store['refused']} writes refused, {int(finding is not None)} findings"
    )
    say_reached(patcher, finding is not None)


def _print_routing(rows: list[Routed], as_json: bool) -> None:
    if as_json:
        for row in rows:
            typer.echo(json.dumps({"name": "routing", **row._asdict()}))
        return
    typer.echo("| workload | replicas | policy | prefix hits | load, highest/mean | moved, GB/1000 turns |")
    typer.echo("|---|---:|---|---:|---:|---:|")
    for row in rows:
        typer.echo(
            f"| {row.workload} | {row.replicas} | {row.policy} | {100 * row.hits:.0f} % | {row.spread:.2f} | "
            f"{row.moved:.1f} |"
        )
