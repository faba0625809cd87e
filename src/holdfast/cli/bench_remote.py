"""Shared parts of the benchmarks of a running server: options, errors, and progress."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from holdfast.bench.url.load import Sample
from holdfast.bench.url.summary import apis_of
from holdfast.cli.refusals import refusal
from holdfast.cli.remote import server_refusal
from holdfast.client import Client, HoldfastError, Retries
from holdfast.client.calls import DEFAULT_URL

__all__ = ["TARGET", "Target", "measure_apis", "print_figures", "print_table", "turns_shown"]

Figure = dict[str, Any]

PANEL = "Server"


@dataclass(frozen=True, slots=True)
class Target:
    """The server that is measured."""

    url: Annotated[
        str, typer.Option(help="The server's address.", envvar="HOLDFAST_URL", rich_help_panel=PANEL)
    ] = DEFAULT_URL
    api_key: Annotated[
        str | None,
        typer.Option(help="API key of the server.", envvar="HOLDFAST_API_KEY", rich_help_panel=PANEL),
    ] = None
    api: Annotated[
        Literal["auto", "sessions", "chat"],
        typer.Option(help="Interface to measure; auto: all that the server has.", rich_help_panel=PANEL),
    ] = "auto"
    model: Annotated[
        str | None,
        typer.Option(help="Model name.", rich_help_panel=PANEL, show_default="the first that it lists"),
    ] = None


TARGET = Target()


def measure_apis(
    title: str, target: Target, measure: Callable[[Client, str, str], Sequence[Figure]]
) -> tuple[list[Figure], str]:
    """The figures of each interface of a server, and the model's name; a server that fails ends the command.

    `measure` gets the client, the name of an interface and that of the model.
    """
    try:
        with Client(target.url, target.api_key, retries=Retries(attempts=2)) as client:
            name = target.model if target.model is not None else client.models()[0]
            found = [figure for each in apis_of(client, target.api) for figure in measure(client, each, name)]
            return found, name
    except HoldfastError as error:
        raise server_refusal(title, error) from error
    except IndexError as error:
        raise refusal(title, f"{target.url} lists no model; name one with --model") from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(130) from interrupt


@contextmanager
def turns_shown(title: str, of: str) -> Iterator[Callable[[Sample], None]]:
    """A line that counts turns as they end; failed ones are printed as they occur."""
    done, notes = 0, Console(stderr=True)
    with notes.status(title) as status:

        def told(sample: Sample) -> None:
            nonlocal done
            done += 1
            status.update(f"{title}: {done} {of}")
            if sample.error is not None:
                notes.print(f"turn {sample.turn + 1}: {sample.error}", style="red", markup=False)

        yield told


def print_table(table: Table) -> None:
    """Print a table: as wide as the terminal, or 180 columns in a file or a pipe."""
    screen = Console()
    (screen if screen.is_terminal else Console(width=180)).print(table)


def print_figures(
    figures: Sequence[Figure], table: Callable[[], Table] | None, failures: Sequence[str]
) -> None:
    """Print a table, or one object a line; the exit status is 1 if one of the `failures` is not zero."""
    if table is None:
        for figure in figures:
            typer.echo(json.dumps(figure))
    else:
        Console().print(table())
    if any(figure["value"] for figure in figures if figure["name"] in failures):
        raise typer.Exit(1)
