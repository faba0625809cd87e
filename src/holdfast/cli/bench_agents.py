"""`holdfast bench agents`: coding agents on a running server, timed by their clients.

Long conversations with tool results, pauses and sub-agents. A Holdfast server is measured through its
sessions and through OpenAI's chat interface, where every turn sends the whole history; other servers through
the latter alone. Prints a table, or with `--json` one object a line. The exit status is 0 if no turn failed.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from holdfast.bench.agents.drive import measure
from holdfast.bench.agents.workload import AgentLoad
from holdfast.bench.tables import agents_table
from holdfast.bench.url.load import Sample
from holdfast.bench.url.summary import apis_of
from holdfast.cli.refusals import refusal
from holdfast.cli.remote import server_refusal
from holdfast.client import Client, HoldfastError, Retries
from holdfast.client.calls import DEFAULT_URL

__all__ = ["HELP", "agents"]

TITLE = "bench agents"
API = "Server"
DEFAULTS = AgentLoad()

HELP = (
    "Coding agents on a running server: prefix hit rate, time to first token, turns per second.\n\n"
    "Each agent takes turns with tool results as input, short answers and pauses; some have a sub-agent that "
    "forks from the conversation. The sizes are those of published traces; --scale makes them smaller.\n\n"
    "\b\n"
    "holdfast bench agents --sessions 64                 more sessions than fit: the server's --kv-tokens\n"
    "holdfast bench agents --scale 0.02 --pause 0.1      for a small model on a CPU\n"
    "holdfast bench agents --url http://HOST:PORT --api chat --model NAME"
)


def agents(
    url: Annotated[
        str, typer.Option(help="The server's address.", envvar="HOLDFAST_URL", rich_help_panel=API)
    ] = DEFAULT_URL,
    api_key: Annotated[
        str | None,
        typer.Option(help="API key of the server.", envvar="HOLDFAST_API_KEY", rich_help_panel=API),
    ] = None,
    api: Annotated[
        Literal["auto", "sessions", "chat"],
        typer.Option(help="Interface to measure; auto: all that the server has.", rich_help_panel=API),
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(help="Model name.", rich_help_panel=API, show_default="the first that it lists"),
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, help="Concurrent agents.")] = DEFAULTS.sessions,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each agent.")] = DEFAULTS.turns,
    input_tokens: Annotated[
        int, typer.Option(min=1, help="Input words of a whole session.")
    ] = DEFAULTS.input_tokens,
    output_tokens: Annotated[
        int, typer.Option(min=1, help="Output tokens of a whole session.")
    ] = DEFAULTS.output_tokens,
    scale: Annotated[float, typer.Option(min=0.0, help="Factor of the input words.")] = 1.0,
    forks: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of agents with a sub-agent.")
    ] = DEFAULTS.forks,
    fork_turns: Annotated[int, typer.Option(min=1, help="Turns of a sub-agent.")] = DEFAULTS.fork_turns,
    pause: Annotated[float, typer.Option(min=0.0, help="Mean time of a tool in seconds.")] = DEFAULTS.pause,
    seed: Annotated[int, typer.Option(help="Seed of the plan and the words.")] = DEFAULTS.seed,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Measure a server from outside."""
    size = max(turns, round(input_tokens * scale))
    load = AgentLoad(sessions, turns, size, output_tokens, forks, fork_turns, pause, seed)
    try:
        with Client(url, api_key, retries=Retries(attempts=2)) as client:
            name = model if model is not None else client.models()[0]
            figures = [
                figure
                for each in apis_of(client, api)
                for figure in _measure(client.url, each, name, api_key, load)
            ]
    except HoldfastError as error:
        raise server_refusal(TITLE, error) from error
    except IndexError as error:
        raise refusal(TITLE, f"{url} lists no model; name one with --model") from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(130) from interrupt
    if as_json:
        for figure in figures:
            typer.echo(json.dumps(figure))
    else:
        Console().print(agents_table(figures, url, name, load))
    if any(figure["value"] for figure in figures if figure["name"] == "errors"):
        raise typer.Exit(1)


def _measure(url: str, api: str, model: str, api_key: str | None, load: AgentLoad) -> list[dict[str, Any]]:
    """The figures of one interface; failed turns are printed as they occur."""
    done, notes = 0, Console(stderr=True)
    with notes.status(f"bench agents {api}") as status:

        def told(sample: Sample) -> None:
            nonlocal done
            done += 1
            status.update(f"bench agents {api}: {done} turns of {load.sessions} agents")
            if sample.error is not None:
                notes.print(f"turn {sample.turn + 1}: {sample.error}", style="red", markup=False)

        return measure(url, api, model, api_key, load, told)
