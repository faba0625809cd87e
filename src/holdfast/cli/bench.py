"""`holdfast bench`: measure, and show each figure beside its baseline.

`core` measures the memory core alone, without torch; `throughput`, `turns` and `abort` compare Holdfast with
other systems; `sessions` and `agents` measure a running server, `wire` one that it starts. Each prints a
table, or with `--json` one object a line; progress goes to standard error. A missed target does not change
the exit status.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from holdfast.bench.beside.cases import Case, abort, prefill, throughput, turns
from holdfast.bench.beside.http import BenchError
from holdfast.bench.beside.run import Limits, Others, compare
from holdfast.bench.beside.systems import CONTEXT
from holdfast.bench.core.registry import MEASUREMENTS
from holdfast.bench.core.report import Figure, Settings
from holdfast.bench.models import RANDOM_BAMBA, find_model
from holdfast.bench.tables import comparison_table, core_table
from holdfast.cli import bench_agents, bench_sessions, bench_wire
from holdfast.cli.bench_remote import print_table
from holdfast.cli.option_groups import with_groups
from holdfast.cli.progress import status_line
from holdfast.cli.pull import CACHE
from holdfast.cli.refusals import refusal
from holdfast.core.layout import PAGE_SIZE_MAX
from holdfast.engine.start.pull import PullError

__all__ = ["app"]

HELP = "Measure, and show each figure beside its baseline."

app = typer.Typer(help=HELP, no_args_is_help=True, add_completion=False)


@app.callback()
def _no_common_options() -> None:
    """Measure, and show each figure beside its baseline."""


app.command("sessions", help=bench_sessions.HELP)(bench_sessions.sessions)
app.command("agents", help=bench_agents.HELP)(bench_agents.agents)
app.command("wire", help=bench_wire.HELP)(bench_wire.wire)


@app.command("core")
def core(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Measure only this: {', '.join(MEASUREMENTS)}. Repeatable."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each measurement.")] = 3,
    page_size: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=PAGE_SIZE_MAX, help="Page size to measure. Repeatable.", show_default="1 and 64"
        ),
    ] = None,
) -> None:
    """The memory core alone: turns, sessions, the prefix tree and the audit; no model, no device."""
    names = list(only or MEASUREMENTS)
    unknown = [name for name in names if name not in MEASUREMENTS]
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known: {', '.join(MEASUREMENTS)}")
    settings = Settings(repeats, tuple(page_size) if page_size else Settings().page_sizes)
    figures: list[Figure] = []
    with status_line("bench core") as progress:
        for name in names:
            for figure in MEASUREMENTS[name](settings, progress):
                figures.append(figure)
                if as_json:
                    typer.echo(json.dumps(figure.as_json()))
    if not as_json:
        print_table(core_table(figures))


Model = Annotated[str, typer.Argument(help="A packaged model, a .gguf file or a model directory.")]
AnyModel = Annotated[
    str,
    typer.Argument(
        help=f"A packaged model, a .gguf file, a model directory, or {RANDOM_BAMBA} (random weights)."
    ),
]
Given = Annotated[int, typer.Option("--input-tokens", min=1, help="Input tokens of each prompt or turn.")]
Wanted = Annotated[int, typer.Option("--output-tokens", min=2, help="Output tokens of each answer.")]


@dataclass(frozen=True, slots=True)
class Systems:
    """The systems beside Holdfast."""

    llama_server: Annotated[
        Path | None,
        typer.Option("--llama-server", help="Path of a llama-server to measure too.", exists=True),
    ] = None
    alone: Annotated[bool, typer.Option("--alone", help="Leave transformers out.")] = False


@dataclass(frozen=True, slots=True)
class Running:
    """How long it runs, and how its figures are printed."""

    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds, after a short warm-up round.")] = 3
    minutes: Annotated[
        float, typer.Option(min=0.0, help="Time limit; rounds that do not fit are skipped.")
    ] = 6.0
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each system.", show_default="all cores")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False

    @property
    def limits(self) -> Limits:
        """Rounds, time and threads."""
        return Limits(self.rounds, self.minutes, self.threads or len(os.sched_getaffinity(0)))


SYSTEMS, RUNNING = Systems(), Running()


@app.command("throughput")
@with_groups
def throughput_command(
    model: Model = "smollm2",
    systems: Systems = SYSTEMS,
    streams: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Concurrent streams. Repeatable.", show_default="1 and 16"),
    ] = None,
    given: Given = 64,
    wanted: Wanted = 128,
    prompts: Annotated[
        list[int] | None,
        typer.Option("--prefill", min=1, help="Prompt length to prefill. Repeatable.", show_default="512"),
    ] = None,
    speculate: Annotated[bool, typer.Option(help="Measure Holdfast with --speculate ngram too.")] = False,
    running: Running = RUNNING,
) -> None:
    """Tokens per second: decoding concurrent streams, and prefilling prompts."""
    cases = [throughput(count, given, wanted) for count in streams or (1, 16)]
    cases += [prefill(length) for length in prompts or (512,)]
    second = ("--speculate", "ngram") if speculate else ()
    others = Others(not systems.alone, systems.llama_server, second)
    _compare("throughput", cases, model, others, running)


@app.command("turns")
@with_groups
def turns_command(
    model: Model = "smollm2",
    systems: Systems = SYSTEMS,
    last: Annotated[int, typer.Option("--turns", min=2, help="Turns of the conversation.")] = 20,
    given: Given = 32,
    wanted: Wanted = 32,
    running: Running = RUNNING,
) -> None:
    """Time to the first token of each turn as a conversation grows."""
    shown = sorted({2, max(2, last // 2), last})
    case = turns(last, given, wanted, shown)
    others = Others(not systems.alone, systems.llama_server)
    _compare("turns", [case], model, others, running)


@app.command("abort")
@with_groups
def abort_command(
    model: AnyModel = "smollm2",
    systems: Systems = SYSTEMS,
    history: Annotated[
        int,
        typer.Option(min=0, help="Tokens at the start of the conversation; prefilling them is timed too."),
    ] = 0,
    turn: Annotated[int, typer.Option(min=3, help="The number of the first aborted turn.")] = 10,
    given: Given = 32,
    wanted: Wanted = 32,
    running: Running = RUNNING,
) -> None:
    """Time to the first token of the turn after an aborted one, beside a normal turn."""
    context = max(CONTEXT, history + (turn + 16) * (given + 2 * wanted))
    others = Others(not systems.alone and model != RANDOM_BAMBA, systems.llama_server, context=context)
    case = abort(turn, given, wanted, history)
    _compare("abort", [case], model, others, running)


def _compare(title: str, cases: Sequence[Case], model: str, others: Others, running: Running) -> None:
    """Measure and print; the exit status is that of the signal that ended it, or 1 if a system failed."""
    limits = running.limits
    # The started server inherits the first; the second turns off the progress bars of transformers.
    os.environ["OMP_NUM_THREADS"] = str(limits.threads)
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        with find_model(model, os.environ.get(CACHE)) as found, status_line(f"bench {title}") as progress:
            compared = compare(cases, found, others, limits, progress)
    except (BenchError, PullError) as error:
        raise refusal(f"bench {title}", str(error)) from error
    measured = compared.measured
    if running.as_json:
        common = {"model": compared.model, "threads": limits.threads}
        for figure in measured.figures:
            typer.echo(json.dumps({**figure, **common}))
    elif measured.figures:
        print_table(comparison_table(title, measured.figures, compared.model, limits.threads))
    if measured.ended is not None:
        typer.echo(f"bench {title}: {measured.ended}", err=True)
    if compared.signal_number or measured.failed:
        raise typer.Exit(128 + compared.signal_number if compared.signal_number else 1)
