"""`holdfast link-keys`: write the key file that engines and API processes share."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.refusals import refusal

__all__ = ["app"]

app = typer.Typer(add_completion=False)

HELP = (
    "Write a key file for links between servers and engines.\n\n"
    "Every engine (holdfast engine) and every server that uses it (holdfast serve --engine) needs the same "
    "file; every process that has it may join. Only its owner may read it."
)


@app.command(help=HELP)
def link_keys(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; must not exist yet.")],
) -> None:
    """Write a key file."""
    tls = import_module("holdfast.server.link.tls")
    try:
        tls.write_keys(path)
    except tls.KeysNotMade as error:
        raise refusal("link-keys", str(error)) from error
    typer.echo(path)
