"""`holdfast bench agents`: coding agents on a running server, timed by their clients.

Long conversations with tool results, pauses and sub-agents. A Holdfast server is measured through its
sessions and through OpenAI's chat interface, where every turn sends the whole history; other servers through
the latter alone. With `--here` servers are started for it: Holdfast, and llama-server beside it; with
`--in-process` the load runs on an engine without a server first. Prints a table, or with `--json` one object
a line. The exit status is 0 if no turn failed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.bench.agents.drive import measure
from holdfast.bench.agents.workload import AgentLoad
from holdfast.bench.beside.http import BenchError
from holdfast.bench.models import find_model
from holdfast.bench.tables import agents_table
from holdfast.cli.bench_remote import TARGET, Target, measure_apis, print_figures, turns_shown
from holdfast.cli.option_groups import with_groups
from holdfast.cli.options import as_arguments, on_the_line, takes_options
from holdfast.cli.pull import CACHE
from holdfast.cli.refusals import refusal
from holdfast.cli.remote import server_refusal
from holdfast.client import Client, HoldfastError
from holdfast.engine.options import OptionError, make_options
from holdfast.engine.start.pull import PullError

__all__ = ["HELP", "agents"]

TITLE = "bench agents"
HERE = "Servers that it starts"
BESIDE = "holdfast.bench.agents.beside"
"""Imports torch, which nothing else here needs."""
DEFAULTS = AgentLoad()

HELP = (
    "Coding agents on a running server: prefix hit rate, time to first token, turns per second.\n\n"
    "Each agent takes turns with tool results as input, short answers and pauses; some have a sub-agent that "
    "forks from the conversation. The sizes are those of published traces; --scale makes them smaller.\n\n"
    "\b\n"
    "holdfast bench agents --sessions 64                 more sessions than fit: the server's --kv-tokens\n"
    "holdfast bench agents --scale 0.02 --pause 0.1      for a small model on a CPU\n"
    "holdfast bench agents --url http://HOST:PORT --api chat --model NAME\n"
    "holdfast bench agents --here smollm2 --llama-server PATH --scale 0.02 --pause 0.1\n"
    "holdfast bench agents --here DIRECTORY --load-format dummy --in-process --host-memory 64GiB"
)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The size of the load."""

    sessions: Annotated[int, typer.Option(min=1, help="Concurrent agents.")] = DEFAULTS.sessions
    turns: Annotated[int, typer.Option(min=1, help="Turns of each agent.")] = DEFAULTS.turns
    input_tokens: Annotated[int, typer.Option(min=1, help="Input words of a whole session.")] = (
        DEFAULTS.input_tokens
    )
    output_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of a whole session.")] = (
        DEFAULTS.output_tokens
    )
    scale: Annotated[float, typer.Option(min=0.0, help="Factor of the input words.")] = 1.0
    forks: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of agents with a sub-agent.")] = (
        DEFAULTS.forks
    )
    fork_turns: Annotated[int, typer.Option(min=1, help="Turns of a sub-agent.")] = DEFAULTS.fork_turns
    pause: Annotated[float, typer.Option(min=0.0, help="Mean time of a tool in seconds.")] = DEFAULTS.pause
    seed: Annotated[int, typer.Option(help="Seed of the plan and the words.")] = DEFAULTS.seed

    @property
    def load(self) -> AgentLoad:
        """The load; each turn has at least one word."""
        return AgentLoad(
            sessions=self.sessions,
            turns=self.turns,
            input_tokens=max(self.turns, round(self.input_tokens * self.scale)),
            output_tokens=self.output_tokens,
            forks=self.forks,
            fork_turns=self.fork_turns,
            pause=self.pause,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class Started:
    """The servers started for the measurement, if any."""

    here: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Start a server of this model and measure it.", rich_help_panel=HERE
        ),
    ] = None
    llama_server: Annotated[
        Path | None,
        typer.Option(
            help="Path of a llama-server to start and measure too.", exists=True, rich_help_panel=HERE
        ),
    ] = None
    fit: Annotated[
        int, typer.Option(min=1, help="Whole sessions that fit in each server.", rich_help_panel=HERE)
    ] = 4
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of each server.", show_default="all cores", rich_help_panel=HERE),
    ] = None
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process", help="Run the load on an engine without a server first.", rich_help_panel=HERE
        ),
    ] = False
    over_http: Annotated[
        bool, typer.Option("--http/--no-http", help="Start a server and measure it.", rich_help_panel=HERE)
    ] = True


SIZES, STARTED = LoadOptions(), Started()


@takes_options
@with_groups
def agents(
    context: typer.Context,
    target: Target = TARGET,
    sizes: LoadOptions = SIZES,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    started: Started = STARTED,
    engine_options: dict[str, Any] | None = None,
) -> None:
    """Measure a server from outside."""
    load, stated = sizes.load, dict(engine_options or {})
    if started.here is not None:
        model, options = started.here, _options(started.here, stated, load, started.fit)
        figures = _measure_here(model, options, target.api, started, load)
        place = f"room for {options['kv_tokens']:,} tokens"
        print_figures(
            figures, None if as_json else lambda: agents_table(figures, place, model, load), ("errors",)
        )
        return
    if started.llama_server is not None:
        raise refusal(TITLE, "--llama-server needs --here MODEL: both serve the same file")
    for name in ("in_process", "over_http", *stated):
        if on_the_line(context, name):
            flag = {"over_http": "http"}.get(name, name).replace("_", "-")
            raise refusal(
                TITLE, f"--{flag} needs --here MODEL: it configures the engine that the command starts"
            )

    def measured(client: Client, api: str, name: str) -> list[dict[str, Any]]:
        with turns_shown(f"{TITLE} {api}", f"turns of {load.sessions} agents") as told:
            return measure(client.url, api, name, target.api_key, load, told)

    figures, name = measure_apis(TITLE, target, measured)
    table = None if as_json else lambda: agents_table(figures, target.url, name, load)
    print_figures(figures, table, ("errors",))


def _options(model: str, stated: dict[str, Any], load: AgentLoad, fit: int) -> dict[str, Any]:
    """The engine's options, checked."""
    beside = import_module(BESIDE)
    options: dict[str, Any] = beside.sized(model, stated, load, fit)
    try:
        make_options(**options)
    except OptionError as error:
        raise refusal(TITLE, error.typed) from error
    return options


def _measure_here(
    model: str, options: dict[str, Any], api: str, started: Started, load: AgentLoad
) -> list[dict[str, Any]]:
    """The figures of engines and servers that are started for them."""
    threads = started.threads or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(threads)  # What is started inherits it.
    if started.llama_server is not None:
        options.setdefault("device", "cpu")
    try:
        with find_model(model, os.environ.get(CACHE)) as found:
            beside = import_module(BESIDE)
            measured: list[dict[str, Any]] = beside.measure_beside(
                beside.Beside(
                    found,
                    options,
                    ["--device", "auto", *as_arguments(options)],
                    api=api,
                    in_process=started.in_process,
                    over_http=started.over_http,
                    llama_server=started.llama_server,
                    threads=threads,
                ),
                load,
                started.fit,
                lambda name: turns_shown(f"{TITLE} {name}", f"turns of {load.sessions} agents"),
            )
            return measured
    except (BenchError, PullError) as error:
        raise refusal(TITLE, str(error)) from error
    except HoldfastError as error:
        raise server_refusal(TITLE, error) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(130) from interrupt
