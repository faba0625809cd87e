"""`holdfast bench sessions`: many conversations with a running server, timed by their clients.

A Holdfast server is measured through its sessions and, as the baseline, through OpenAI's chat interface,
where every turn sends the whole history; other OpenAI-compatible servers through the latter alone. With
`--here` there is no server: an engine in this process holds more sessions than fit on its device. Prints a
table, or with `--json` one object a line. The exit status is 0 if no turn failed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer

from holdfast.bench.models import find_model
from holdfast.bench.tables import crowd_table, sessions_table
from holdfast.bench.url.load import Load
from holdfast.bench.url.summary import measure_api
from holdfast.cli.bench_remote import TARGET, Target, measure_apis, print_figures, turns_shown
from holdfast.cli.option_groups import with_groups
from holdfast.cli.progress import status_line
from holdfast.cli.pull import CACHE
from holdfast.cli.refusals import refusal
from holdfast.client import Client
from holdfast.engine.options import OptionError
from holdfast.engine.start.pull import PullError
from holdfast.models.fields import ConfigurationError

__all__ = ["HELP", "sessions"]

Figure = dict[str, Any]

TITLE = "bench sessions"
HERE = "Without a server"
DEFAULTS = Load()

HELP = (
    "Many conversations with a running server: time to first token, time between tokens, throughput.\n\n"
    "A Holdfast server is measured through its sessions and through the chat interface, which sends the "
    "whole history with every turn; any other OpenAI-compatible server through the chat interface alone.\n\n"
    "\b\n"
    "holdfast bench sessions --sessions 64 --turns 20\n"
    "holdfast bench sessions --aborts 0.3          abort 30 % of all turns\n"
    "holdfast bench sessions --idle 1000           with 1,000 idle sessions\n"
    "holdfast bench sessions --here smollm2        no server: ten times as many sessions as fit\n"
    "holdfast bench sessions --url http://HOST:PORT --api chat --model NAME"
)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The size of the load."""

    conversations: Annotated[int, typer.Option("--sessions", min=1, help="Concurrent conversations.")] = (
        DEFAULTS.sessions
    )
    turns: Annotated[int, typer.Option(min=1, help="Turns of each conversation.")] = DEFAULTS.turns
    input_tokens: Annotated[int, typer.Option(min=1, help="Input words of a turn.")] = DEFAULTS.input_tokens
    output_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = (
        DEFAULTS.output_tokens
    )
    aborts: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of turns that are aborted.")] = (
        DEFAULTS.aborts
    )
    idle: Annotated[int, typer.Option(min=0, help="Additional idle conversations.")] = DEFAULTS.idle
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for answers of full length; not every server supports it.")
    ] = DEFAULTS.ignore_eos
    seed: Annotated[int, typer.Option(help="Seed of the inputs and of the aborts.")] = DEFAULTS.seed

    @property
    def load(self) -> Load:
        """The load of a server."""
        return Load(
            sessions=self.conversations,
            turns=self.turns,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            aborts=self.aborts,
            idle=self.idle,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class InProcess:
    """A model that is loaded for the measurement, if any."""

    here: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Load a model (or random-bamba: random weights) in this process, open ten times as many "
            "sessions as fit, and restore a long one from host memory and disk.",
            rich_help_panel=HERE,
        ),
    ] = None
    history: Annotated[
        int, typer.Option(min=64, help="Tokens of the long session.", rich_help_panel=HERE)
    ] = 6000
    fit: Annotated[
        int, typer.Option(min=1, help="Sessions that fit on the device.", rich_help_panel=HERE)
    ] = 4
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.", rich_help_panel=HERE)] = 3
    threads: Annotated[int, typer.Option(min=1, help="Threads of the engine.", rich_help_panel=HERE)] = 1


SIZES, IN_PROCESS = LoadOptions(), InProcess()


@with_groups
def sessions(
    target: Target = TARGET,
    sizes: LoadOptions = SIZES,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    inside: InProcess = IN_PROCESS,
) -> None:
    """Measure a server from outside, or an engine in this process."""
    if inside.here is not None:
        _measure_here(inside.here, inside, sizes, as_json)
        return
    load = sizes.load

    def measured(client: Client, api: str, name: str) -> list[Figure]:
        with turns_shown(f"bench {api}", f"of {load.sessions * load.turns} turns") as told:
            return list(measure_api(client, api, name, target.api_key, load, told))

    figures, name = measure_apis(TITLE, target, measured)
    table = None if as_json else lambda: sessions_table(figures, target.url, name, load)
    print_figures(figures, table, ("errors", "findings"))


def _measure_here(model: str, inside: InProcess, sizes: LoadOptions, as_json: bool) -> None:
    """More sessions than fit on the device, in this process."""
    try:
        with find_model(model, os.environ.get(CACHE)) as found, status_line(TITLE) as progress:
            crowd = import_module("holdfast.bench.cpu.crowd")  # Imports torch, which nothing else here needs.
            sized = crowd.Sizes(
                history=inside.history,
                fit=inside.fit,
                turns=sizes.turns,
                given=sizes.input_tokens,
                wanted=sizes.output_tokens,
            )
            figures = crowd.measure(found, sized, inside.rounds, inside.threads, progress)
    except OptionError as error:
        problem = f"{model} cannot hold so many tokens: {error}; try a shorter --history"
        raise refusal(TITLE, problem) from error
    except (PullError, ConfigurationError) as error:
        raise refusal(TITLE, str(error)) from error
    print_figures(figures, None if as_json else lambda: crowd_table(figures, model, inside.rounds), ())
