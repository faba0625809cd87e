"""`holdfast bench throughput`, `turns` and `abort`: Holdfast beside other systems in one run, on the CPU.

transformers runs beside it unless told otherwise; llama-server where its path is given. Each prints a table,
or with `--json` one object a line; what happens meanwhile goes to standard error. When its minutes are over,
or a signal comes, a command stops what it started and shows what it has measured until then.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli.compare.measurements import (
    INTERRUPTED,
    Case,
    Measured,
    abort,
    prefill,
    run,
    throughput,
    turns,
)
from holdfast.cli.compare.random_model import RANDOM_BAMBA, write_random_bamba
from holdfast.cli.compare.systems import CONTEXT, Holdfast, LlamaServer, System
from holdfast.cli.compare.wire import BenchError
from holdfast.cli.refusals import refusal
from holdfast.engine.pull import PullError, pull

__all__ = ["abort_command", "throughput_command", "turns_command"]

Model = Annotated[str, typer.Argument(help="A packaged model, a .gguf file or a model directory.")]
AnyModel = Annotated[
    str,
    typer.Argument(
        help=f"A packaged model, a .gguf file, a model directory, or {RANDOM_BAMBA}: without weights."
    ),
]
Alone = Annotated[
    bool, typer.Option("--alone", help="Measure Holdfast alone, and not transformers beside it.")
]
LlamaPath = Annotated[
    Path | None, typer.Option("--llama-server", help="A llama-server to run beside.", exists=True)
]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds, after a short one that warms up.")]
Minutes = Annotated[
    float, typer.Option(min=0.0, help="No longer than this; rounds that do not fit are left out.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of each system; all cores if left out.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Given = Annotated[int, typer.Option("--input-tokens", min=1, help="Tokens in.")]
Wanted = Annotated[int, typer.Option("--output-tokens", min=2, help="Tokens out.")]


def throughput_command(
    model: Model = "smollm2",
    llama_server: LlamaPath = None,
    streams: Annotated[list[int] | None, typer.Option(min=1, help="Streams at once.")] = None,
    given: Given = 64,
    wanted: Wanted = 128,
    prompts: Annotated[
        list[int] | None, typer.Option("--prefill", min=1, help="Lengths of prompts to prefill.")
    ] = None,
    speculate: Annotated[bool, typer.Option(help="Also measure Holdfast with --speculate ngram.")] = False,
    rounds: Rounds = 3,
    minutes: Minutes = 6.0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Tokens a second: some streams at once, and prompts."""
    cases = [throughput(count, given, wanted) for count in streams or (1, 16)]
    cases += [prefill(length) for length in prompts or (512,)]
    beside = Beside(llama_server, more=("--speculate", "ngram") if speculate else ())
    _measure("throughput", cases, model, beside, Run(rounds, minutes, threads, as_json))


def turns_command(
    model: Model = "smollm2",
    llama_server: LlamaPath = None,
    last: Annotated[int, typer.Option("--turns", min=2, help="Turns of a conversation.")] = 20,
    given: Given = 32,
    wanted: Wanted = 32,
    rounds: Rounds = 3,
    minutes: Minutes = 6.0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """The first token of each turn as a conversation grows longer."""
    shown = sorted({2, max(2, last // 2), last})
    case = turns(last, given, wanted, shown)
    _measure("turns", [case], model, Beside(llama_server), Run(rounds, minutes, threads, as_json))


def abort_command(
    model: AnyModel = "smollm2",
    llama_server: LlamaPath = None,
    alone: Alone = False,
    history: Annotated[
        int,
        typer.Option(min=0, help="Tokens that the conversation begins with; computing them is shown too."),
    ] = 0,
    turn: Annotated[int, typer.Option(min=3, help="The turn that is left in its middle.")] = 10,
    given: Given = 32,
    wanted: Wanted = 32,
    rounds: Rounds = 3,
    minutes: Minutes = 6.0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """The turn after one that its client has left, beside a normal one."""
    context = max(CONTEXT, history + (turn + 16) * (given + 2 * wanted))
    beside = Beside(llama_server, transformers=not alone and model != RANDOM_BAMBA, context=context)
    case = abort(turn, given, wanted, history)
    _measure("abort", [case], model, beside, Run(rounds, minutes, threads, as_json))


@dataclass(frozen=True, slots=True)
class Beside:
    """What runs beside Holdfast, and with how long a context; `more` are options of a second Holdfast."""

    llama_server: Path | None
    transformers: bool = True
    more: tuple[str, ...] = ()
    context: int = CONTEXT


@dataclass(frozen=True, slots=True)
class Run:
    """How long to measure, with how many threads (all cores if None), and how to show it."""

    rounds: int
    minutes: float
    threads: int | None
    as_json: bool


def _measure(title: str, cases: Sequence[Case], model: str, beside: Beside, how: Run) -> None:
    threads = how.threads or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(threads)  # Inherited by our server; the others are told directly.
    notes = Console(stderr=True)
    try:
        with found_model(model) as (path, loading):
            systems = _systems(cases, path, loading, beside, threads)
            measured, signal_number = asyncio.run(_run(cases, systems, how, notes))
    except (BenchError, PullError) as error:
        raise refusal(f"bench {title}", str(error)) from error
    if how.as_json:
        for figure in measured.figures:
            typer.echo(json.dumps({**figure, "model": path.name, "threads": threads}))
    elif measured.figures:
        screen = Console()
        wide = screen if screen.is_terminal else Console(width=180)
        wide.print(_table(title, measured.figures, path.name, threads))
    if measured.ended is not None:
        notes.print(f"bench {title}: {measured.ended}", highlight=False, markup=False)
    if signal_number or measured.failed:
        raise typer.Exit(128 + signal_number if signal_number else 1)


@contextmanager
def found_model(name: str) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Where a model lies, and the options that it is loaded with; one that is made here goes again."""
    if name == RANDOM_BAMBA:
        with tempfile.TemporaryDirectory() as folder:
            yield write_random_bamba(Path(folder) / name), ("--load-format", "dummy")
    else:
        yield Path(name) if Path(name).exists() else pull(name, cache=os.environ.get("HOLDFAST_CACHE")), ()


def _systems(
    cases: Sequence[Case], path: Path, loading: tuple[str, ...], beside: Beside, threads: int
) -> list[System]:
    systems: list[System] = [Holdfast(str(path), options=loading, context=beside.context)]
    if beside.more:
        name = f"holdfast {' '.join(beside.more)}"
        systems.append(Holdfast(str(path), name, (*loading, *beside.more), beside.context))
    if beside.transformers:
        os.environ.setdefault("TQDM_DISABLE", "1")  # Their reader draws bars otherwise.
        # transformers takes seconds to import, and only these commands need it.
        theirs = importlib.import_module("holdfast.cli.compare.transformers_system")
        systems.append(theirs.Transformers(path, threads))
        if any(case.parameters.get("streams", 1) > 1 for case in cases):
            systems.append(theirs.ContinuousBatching(path, threads))
    if beside.llama_server is not None:
        systems.append(LlamaServer(beside.llama_server, path, threads, beside.context))
    return systems


async def _run(
    cases: Sequence[Case], systems: Sequence[System], how: Run, notes: Console
) -> tuple[Measured, int]:
    """What was measured until the end, and the number of the signal that brought it about, or 0.

    The first signal ends the measuring; those that come while the systems are being stopped change nothing.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    signals: list[int] = []

    def end(number: int) -> None:
        signals.append(number)
        if len(signals) == 1 and not time_over.cancelled():
            task.cancel()

    time_over = loop.call_later(60 * how.minutes, task.cancel)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    started: list[System] = []
    with notes.status("bench") as status:

        def told(line: str) -> None:
            if notes.is_terminal:
                status.update(line)
            else:
                notes.print(line, highlight=False, markup=False, soft_wrap=True)

        try:
            for system in systems:
                told(f"starting {system.name}")
                started.append(system)
                await system.start()
            measured = await run(cases, systems, how.rounds, told, time_over.when() - loop.time())
        except asyncio.CancelledError:
            measured = Measured([], INTERRUPTED)
        finally:
            time_over.cancel()
            for system in started:
                await system.stop()
    if measured.ended == INTERRUPTED and not signals:
        measured = replace(measured, ended=f"ended after {how.minutes:g} minutes")
    return measured, signals[0] if signals else 0


def _table(title: str, figures: Sequence[dict[str, Any]], model: str, threads: int) -> Table:
    systems = list(dict.fromkeys(figure["system"] for figure in figures))
    table = Table(
        title=f"holdfast bench {title}: {model}, {threads} threads",
        caption="median (least-most) over the rounds; to: median of the rounds' ratios, ours to theirs; "
        "foreign: cores that others kept busy",
    )
    for heading in ("name", "parameters", "unit"):
        table.add_column(heading)
    for heading in (*systems, *(f"to {name}" for name in systems[1:]), "foreign"):
        table.add_column(heading, justify="right")
    common = {"name", "value", "unit", "system", "min", "max", "rounds", "foreign_load"}
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for figure in figures:
        parameters = {
            key: value for key, value in figure.items() if key not in common and not key.startswith("ratio")
        }
        shown = ", ".join(f"{key.removesuffix('_tokens')} {value}" for key, value in parameters.items())
        rows.setdefault((figure["name"], shown), {})[figure["system"]] = figure
    for (name, shown), found in rows.items():
        cells = [_cell(found[system]) if system in found else "" for system in systems]
        first = next(iter(found.values()))
        ratios = [str(first.get(f"ratio_to_{system}", "")) for system in systems[1:]]
        foreign = max(figure["foreign_load"] for figure in found.values())
        table.add_row(name, shown, first["unit"], *cells, *ratios, f"{foreign:.2f}")
    return table


def _cell(figure: dict[str, Any]) -> str:
    digits = 2 if figure["unit"] == "ratio" else 1
    low, high = (f"{figure[key]:,.{digits - 1}f}" for key in ("min", "max"))
    return f"{figure['value']:,.{digits}f} ({low}-{high})"
