"""`holdfast bench sessions`: many conversations with a running server, as their clients feel it.

Drives a Holdfast server through its sessions and, beside it as the baseline, the same conversations through
OpenAI's chat interface, where every turn sends the whole history again; any other OpenAI-compatible server
through the latter alone. With `--here` there is no server: an engine in this process holds more sessions than
fit on its device. Prints a table, or with `--json` one object a line. A turn that fails is counted and shown;
the exit status is 0 if none did.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli.bench_beside import found_model
from holdfast.cli.load import ChatDoor, Door, Load, Sample, SessionsDoor, percentile, run_load
from holdfast.cli.refusals import refusal
from holdfast.cli.remote import server_refusal
from holdfast.client import Client, HoldfastError, NotFound, Retries
from holdfast.client.calls import DEFAULT_URL
from holdfast.engine.options import OptionError
from holdfast.engine.pull import PullError
from holdfast.models.fields import ConfigurationError

__all__ = ["HELP", "sessions", "summarise"]

Figure = dict[str, Any]

SHARES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
API = "Server"
HERE = "Without a server"
DEFAULTS = Load()

HELP = (
    "Many conversations with a running server: how soon its clients hear something, and how much it says.\n\n"
    "Of a Holdfast server, its sessions beside the same conversations over the chat interface, which sends "
    "the whole history with every turn; of any other OpenAI-compatible server the latter alone.\n\n"
    "\b\n"
    "holdfast bench sessions --sessions 64 --turns 20\n"
    "holdfast bench sessions --aborts 0.3          a storm: a third of all turns is cut short\n"
    "holdfast bench sessions --idle 1000           with so many sessions at rest\n"
    "holdfast bench sessions --here smollm2        no server: ten times as many sessions as fit\n"
    "holdfast bench sessions --url http://HOST:PORT --api chat --model NAME"
)


def sessions(
    url: Annotated[
        str, typer.Option(help="The server's address.", envvar="HOLDFAST_URL", rich_help_panel=API)
    ] = DEFAULT_URL,
    api_key: Annotated[
        str | None, typer.Option(help="Key for it.", envvar="HOLDFAST_API_KEY", rich_help_panel=API)
    ] = None,
    api: Annotated[
        Literal["auto", "sessions", "chat"],
        typer.Option(help="How to talk to it; auto: in every way that it knows.", rich_help_panel=API),
    ] = "auto",
    model: Annotated[
        str | None, typer.Option(help="Of several models, this one.", rich_help_panel=API)
    ] = None,
    conversations: Annotated[
        int, typer.Option("--sessions", min=1, help="Conversations at the same time.")
    ] = DEFAULTS.sessions,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each.")] = DEFAULTS.turns,
    input_tokens: Annotated[int, typer.Option(min=1, help="Words said in a turn.")] = DEFAULTS.input_tokens,
    output_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of an answer.")
    ] = DEFAULTS.output_tokens,
    aborts: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of turns that are cut short.")
    ] = DEFAULTS.aborts,
    idle: Annotated[int, typer.Option(min=0, help="Further conversations that say nothing.")] = DEFAULTS.idle,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for answers of full length; not every server knows how.")
    ] = DEFAULTS.ignore_eos,
    seed: Annotated[int, typer.Option(help="The same seed says the same.")] = DEFAULTS.seed,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    here: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Load a model (or random-bamba: without weights) in this process, open ten times as many "
            "sessions as fit, and restore a long one from host memory and disk.",
            rich_help_panel=HERE,
        ),
    ] = None,
    history: Annotated[
        int, typer.Option(min=64, help="Tokens of the long session.", rich_help_panel=HERE)
    ] = 6000,
    fit: Annotated[int, typer.Option(min=1, help="Sessions that fit.", rich_help_panel=HERE)] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.", rich_help_panel=HERE)] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the engine.", rich_help_panel=HERE)] = 1,
) -> None:
    """Measure a server from outside, or an engine here."""
    if here is not None:
        sizes = (history, fit, turns, input_tokens, output_tokens)
        _measure_here(here, sizes, rounds, threads, as_json)
        return
    load = Load(conversations, turns, input_tokens, output_tokens, aborts, idle, ignore_eos, seed)
    notes = Console(stderr=True)
    try:
        with Client(url, api_key, retries=Retries(attempts=2)) as client:
            name = model if model is not None else client.models()[0]
            figures = [
                figure
                for way in _ways(client, api)
                for figure in _measure(client, way, name, api_key, load, notes)
            ]
    except HoldfastError as error:
        raise server_refusal("bench sessions", error) from error
    except IndexError as error:
        raise refusal("bench sessions", f"{url} lists no model; name one with --model") from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(130) from interrupt
    if as_json:
        for figure in figures:
            typer.echo(json.dumps(figure))
    else:
        Console().print(_table(figures, url, name, load))
    if any(figure["value"] for figure in figures if figure["name"] in ("errors", "findings")):
        raise typer.Exit(1)


def _measure_here(
    model: str, asked: tuple[int, int, int, int, int], rounds: int, threads: int, as_json: bool
) -> None:
    """More sessions than fit, in this process; `asked` are history, fit, turns, tokens in and tokens out."""
    history, fit, turns, given, wanted = asked
    notes = Console(stderr=True)
    crowd = import_module("holdfast.cli.compare.crowd")  # It loads torch, which nothing else here needs.
    try:
        with found_model(model) as (path, loading), notes.status("bench sessions") as status:

            def told(line: str) -> None:
                status.update(line)
                if not notes.is_terminal:
                    notes.print(line, highlight=False, markup=False)

            options = {"load_format": "dummy"} if loading else {}
            sizes = crowd.Sizes(history=history, fit=fit, turns=turns, given=given, wanted=wanted)
            figures = crowd.measure(str(path), options, sizes, rounds, threads, told)
    except OptionError as error:
        problem = f"{model} cannot be asked for so many tokens: {error}; a shorter --history needs fewer"
        raise refusal("bench sessions", problem) from error
    except (PullError, ConfigurationError) as error:
        raise refusal("bench sessions", str(error)) from error
    if as_json:
        for figure in figures:
            typer.echo(json.dumps(figure))
        return
    first = figures[0]
    table = Table(
        title=f"holdfast bench sessions: {model}, {threads} threads",
        caption=f"{first['sessions']} sessions, {fit} of which fit; medians over {rounds} rounds; "
        f"others kept {first['foreign_load']} cores busy",
    )
    for heading in ("name", "value", "least", "most", "unit"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("name", "unit") else "right")
    for figure in figures:
        cells = [f"{figure[key]:,.2f}" for key in ("value", "min", "max")]
        table.add_row(figure["name"], *cells, figure["unit"])
    Console().print(table)


def _ways(client: Client, api: str) -> tuple[str, ...]:
    """In which ways a server is talked to."""
    if api != "auto":
        return (api,)
    try:
        client.sessions()
    except NotFound:
        return ("chat",)
    return ("sessions", "chat")


def _measure(
    client: Client, way: str, model: str, api_key: str | None, load: Load, notes: Console
) -> Iterator[Figure]:
    """Run a load one way, and sum it up."""
    count = load.sessions * load.turns
    with notes.status(f"bench {way}") as status:
        done = 0

        def told(sample: Sample) -> None:
            nonlocal done
            done += 1
            status.update(f"bench {way}: {done} of {count} turns")
            if sample.error is not None:
                notes.print(f"turn {sample.turn + 1}: {sample.error}", style="red", markup=False)

        async def run() -> tuple[list[Sample], float]:
            door: Door = (
                SessionsDoor(client.url, api_key)
                if way == "sessions"
                else ChatDoor(client.url, api_key, model)
            )
            try:
                return await run_load(door, load, told)
            finally:
                await door.close()

        samples, seconds = asyncio.run(run())
    yield from summarise(samples, seconds, way, model, load)
    if way == "sessions":
        yield _figure("findings", len(client.memory()["findings"]), "findings", way, model, load)


def _figure(name: str, value: float, unit: str, way: str, model: str, load: Load, **more: object) -> Figure:
    return {"name": name, "value": value, "unit": unit, **more, **asdict(load), "model": model, "system": way}


def summarise(samples: list[Sample], seconds: float, way: str, model: str, load: Load) -> Iterator[Figure]:
    """What the samples come to: medians and percentiles in milliseconds, rates, and what failed."""
    good = [sample for sample in samples if sample.error is None]
    whole = [sample for sample in good if not sample.cut]
    late = [sample for sample in whole if sample.turn]
    timings = {
        "ttft": [sample.first for sample in good if sample.first is not None],
        "ttft_later_turns": [sample.first for sample in late if sample.first is not None],
        "inter_token": [sample.between for sample in whole if sample.between is not None],
        "turn": [sample.total for sample in whole],
    }
    for name, values in timings.items():
        if values:
            shares = {key: round(percentile(values, share) * 1e3, 3) for key, share in SHARES.items()}
            mean = round(statistics.fmean(values) * 1e3, 3)
            more = {**shares, "mean": mean, "max": round(max(values) * 1e3, 3), "count": len(values)}
            yield _figure(name, shares["p50"], "ms", way, model, load, **more)
    tokens = sum(sample.tokens for sample in good)
    yield _figure("throughput", round(tokens / seconds, 2), "tokens/s", way, model, load)
    yield _figure("turns", round(len(good) / seconds, 2), "turns/s", way, model, load)
    computed = sum(sample.prompt_tokens - sample.cached_tokens for sample in late)
    if late:
        yield _figure("prompt_computed", round(computed / len(late), 2), "tokens/turn", way, model, load)
    yield _figure("cut_short", sum(sample.cut for sample in good), "turns", way, model, load)
    yield _figure("errors", len(samples) - len(good), "turns", way, model, load)


def _table(figures: list[Figure], url: str, model: str, load: Load) -> Table:
    sizes = (
        f"{load.sessions} conversations of {load.turns} turns, {load.input_tokens} words in, "
        f"{load.output_tokens} tokens out, {load.aborts:.0%} cut short, {load.idle} idle"
    )
    table = Table(
        title=f"holdfast bench sessions: {model} at {url}",
        caption=f"of times the median; {sizes}",
    )
    for heading in ("name", "by"):
        table.add_column(heading, no_wrap=True)
    for heading in ("value", "p90", "p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    for figure in sorted(figures, key=lambda figure: _place(figures, figure["name"])):
        cells = [f"{figure[key]:.10g}" if key in figure else "" for key in ("value", "p90", "p99")]
        table.add_row(f"{figure['name']} ({figure['unit']})", figure["system"], *cells)
    return table


def _place(figures: list[Figure], name: str) -> int:
    """The same quantity of both ways stands in neighbouring lines."""
    return next(place for place, figure in enumerate(figures) if figure["name"] == name)
