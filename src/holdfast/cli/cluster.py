"""`holdfast cluster`: the engines behind a server: their state, drains, moves and events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli.remote import server_refusal
from holdfast.cli.terminal import printable
from holdfast.client import Client, HoldfastError, calls
from holdfast.client.calls import DEFAULT_URL

__all__ = ["app"]

app = typer.Typer(
    help="Look at the engines behind a server, drain them, and move sessions between them.",
    no_args_is_help=True,
    add_completion=False,
)

URL = Annotated[str, typer.Option(help="The server's address.", envvar="HOLDFAST_URL")]
API_KEY = Annotated[str | None, typer.Option(help="Admin key of the server.", envvar="HOLDFAST_API_KEY")]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]

COLUMNS: tuple[tuple[str, str], ...] = (
    ("engine", "engine"),
    ("state", "state"),
    ("sessions", "sessions"),
    ("units free", "units_free"),
    ("units", "units"),
    ("running", "running"),
    ("waiting", "waiting"),
    ("life", "life"),
    ("life state", "life_state"),
    ("epoch", "epoch"),
    ("address", "address"),
)
"""The columns of the table, and the fields that they show."""


def _asked(url: str, key: str | None, ask: Callable[[Client], Any]) -> Any:
    """The answer of a server; an error is printed as one line."""
    try:
        with Client(url, api_key=key) as client:
            return ask(client)
    except HoldfastError as error:
        raise server_refusal("cluster", error) from error


@app.command()
def status(url: URL = DEFAULT_URL, api_key: API_KEY = None, as_json: AS_JSON = False) -> None:
    """Show the engines: sessions, free memory, turns, and their lives in the journal."""
    found = _asked(url, api_key, lambda client: client.ask(calls.cluster("GET")))
    if as_json:
        for row in found["engines"]:
            typer.echo(json.dumps(row))
        return
    table = Table(box=None, pad_edge=False)
    for heading, field in COLUMNS:
        numeric = field not in ("engine", "state", "life_state", "address")
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=True)
    for row in found["engines"]:
        table.add_row(*(printable(str(row.get(field, "-"))) for _, field in COLUMNS))
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    if found["fault"] is not None:
        console.print(f"lives are not shown: {printable(found['fault'])}")
    if found["unclaimed"]:
        console.print(f"{found['unclaimed']} sessions of ended engines are claimed when they are needed")


@app.command()
def drain(
    engine: Annotated[str, typer.Argument(help="The engine's name.")],
    url: URL = DEFAULT_URL,
    api_key: API_KEY = None,
) -> None:
    """Let an engine hand its sessions over, finish its turns, and end."""
    _asked(url, api_key, lambda client: client.ask(calls.cluster("POST", "drain", {"engine": engine})))
    typer.echo(f"{printable(engine)} drains")


@app.command()
def move(
    session: Annotated[str, typer.Argument(help="The session's name.")],
    engine: Annotated[str, typer.Argument(help="The engine that is to have it.")],
    tenant: Annotated[str | None, typer.Option(help="Whose session it is.")] = None,
    url: URL = DEFAULT_URL,
    api_key: API_KEY = None,
) -> None:
    """Move a session at rest to another engine, with its memory."""
    body = {"session": session, "engine": engine, **({} if tenant is None else {"tenant": tenant})}
    _show_move(_asked(url, api_key, lambda client: client.ask(calls.cluster("POST", "move", body))))


@app.command()
def rebalance(url: URL = DEFAULT_URL, api_key: API_KEY = None) -> None:
    """Move sessions at rest away from engines whose memory is more than nine tenths used."""
    found = _asked(url, api_key, lambda client: client.ask(calls.cluster("POST", "rebalance", {})))
    for moved in found["moved"]:
        _show_move(moved)
    typer.echo(f"{len(found['moved'])} sessions moved")


def _show_move(moved: dict[str, Any]) -> None:
    where = f"{moved['from']} to {moved['to']}"
    typer.echo(f"{printable(moved['session'])} from {printable(where)}, {moved['bytes']} bytes of memory")


@app.command()
def events(url: URL = DEFAULT_URL, api_key: API_KEY = None, as_json: AS_JSON = False) -> None:
    """Show recent events of engines and sessions, as seen by this server."""
    found = _asked(url, api_key, lambda client: client.ask(calls.cluster("GET", "events")))
    for event in found["events"]:
        if as_json:
            typer.echo(json.dumps(event))
            continue
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.pop("at")))
        more = " ".join(f"{name}={value}" for name, value in event.items() if name != "event")
        typer.echo(printable(f"{at}  {event['event']:<10} {more}"))
