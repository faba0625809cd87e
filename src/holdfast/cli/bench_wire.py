"""`holdfast bench wire`: where the time of a turn goes between a client's socket and the engine.

Starts a server, drives it over HTTP with bare sockets, and runs the same turns on the same engine in process.
Prints two tables, or with `--json` one object a line.
"""

from __future__ import annotations

import json
import os
from dataclasses import astuple, dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from holdfast.cli.bench_remote import print_table
from holdfast.cli.option_groups import with_groups
from holdfast.cli.options import as_arguments, takes_options
from holdfast.cli.progress import status_line
from holdfast.cli.refusals import refusal
from holdfast.engine.options import OptionError, make_options

__all__ = ["HELP", "wire"]

TITLE = "bench wire"
STREAMS = (1, 16, 64, 256)
HISTORIES = (1024, 8192, 32_000)
TURN_ROOM = 4096
"""Tokens of the context beyond the longest history."""

HELP = (
    "Latency of a turn from the client's socket to the engine and back, in spans, beside the same turns in "
    "process.\n\n"
    "Each history is measured with one stream, and each number of streams with the first history. Engine "
    "options are those of serve.\n\n"
    "\b\n"
    "holdfast bench wire                                  no model: the cost of the server itself\n"
    "holdfast bench wire DIRECTORY --load-format dummy    a model's steps, with random weights"
)


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """The turns of each stream."""

    turns: Annotated[int, typer.Option(min=1, help="Turns of each stream.")] = 8
    aborts: Annotated[int, typer.Option(min=0, help="Aborted turns of each stream.")] = 4
    input_tokens: Annotated[int, typer.Option(min=1, help="Input tokens of each turn.")] = 32
    output_tokens: Annotated[int, typer.Option(min=4, help="Output tokens of each turn.")] = 32


TALK = TurnOptions()


@takes_options
@with_groups
def wire(
    model: Annotated[str, typer.Argument(help="Model directory, .gguf file, model name, or echo.")] = "echo",
    streams: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Streams at once. Repeatable.", show_default="1, 16, 64 and 256"),
    ] = None,
    history: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of history. Repeatable.", show_default="1024, 8192 and 32000"),
    ] = None,
    talk: TurnOptions = TALK,
    in_process: Annotated[bool, typer.Option(help="Run the same turns in process first.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    engine_options: dict[str, Any] | None = None,
) -> None:
    """Measure the way of a turn."""
    lengths, counts = sorted(set(history or HISTORIES)), sorted(set(streams or STREAMS))
    stated = dict(engine_options or {})
    stated.setdefault("context_length", lengths[-1] + TURN_ROOM)
    stated.setdefault("max_running", max(counts))
    try:
        make_options(**stated)
    except OptionError as error:
        raise refusal(TITLE, error.typed) from error
    load = import_module("holdfast.bench.wire.load")
    rounds = [load.Round(1, length) for length in lengths]
    rounds += [load.Round(count, lengths[0]) for count in counts if count != 1]
    workload = load.Workload(rounds, *astuple(talk))
    _measure(model, stated, workload, in_process, as_json)


def _measure(model: str, stated: dict[str, Any], workload: Any, in_process: bool, as_json: bool) -> None:
    """Run the rounds, and print their figures."""
    shown = import_module("holdfast.bench.wire.figures")
    figures: list[dict[str, Any]] = []
    try:
        with status_line(TITLE) as progress:
            if in_process:
                run_inside = import_module("holdfast.bench.wire.inside").run_inside
                for each, samples in zip(
                    workload.rounds, run_inside(model, stated, workload, progress), strict=True
                ):
                    figures += shown.figures_of(each, shown.INSIDE, samples)
            run_served = import_module("holdfast.bench.wire.served").run_served
            with TemporaryDirectory() as folder:
                spans_file = Path(folder) / "spans.jsonl"
                os.environ["HOLDFAST_SPANS"] = str(spans_file)  # For the server that is started.
                served = run_served([model, *as_arguments(stated)], workload, spans_file, progress)
            for each, (samples, spans) in zip(workload.rounds, served, strict=True):
                figures += [*shown.figures_of(each, shown.HTTP, samples), *shown.span_figures(each, spans)]
    except (RuntimeError, OSError) as error:
        raise refusal(TITLE, str(error)) from error
    if as_json:
        for figure in figures:
            typer.echo(json.dumps({**figure, "model": model}))
        return
    print_table(shown.round_table(workload.rounds, figures, f"holdfast {TITLE}: {model}"))
    print_table(shown.span_table(workload.rounds, figures))
