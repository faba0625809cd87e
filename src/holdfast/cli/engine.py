"""`holdfast engine`: run an engine process alone, for API processes that connect over TCP.

Reads and checks the options, then imports and runs the engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

from holdfast.cli.options import NAMED_MODEL, SERVED_MODEL, chosen_model, require_companions, takes_options
from holdfast.cli.refusals import UNUSABLE, WRONG, refusal
from holdfast.cli.starting import starting
from holdfast.engine.options import OptionError, make_options
from holdfast.engine.start.pull import DEFAULT_MODEL
from holdfast.server.options import EngineProcessOptions

__all__ = ["app"]

app = typer.Typer(add_completion=False)

HELP = (
    "Run an engine alone, for servers that connect to it.\n\n"
    "It serves no HTTP. Servers on this or other machines (holdfast serve --engine) send it their turns over "
    "TLS; they need the same key file. Ctrl-C or SIGTERM stops it after the running turns.\n\n"
    "\b\n"
    "holdfast link-keys link.pem\n"
    "holdfast engine DIRECTORY --listen 0.0.0.0:7000 --link-keys link.pem\n"
    "holdfast serve --engine 10.0.0.2:7000 --engine 10.0.0.3:7000 --link-keys link.pem"
)


@app.command(help=HELP)
@takes_options
def engine(
    context: typer.Context,
    model: SERVED_MODEL = DEFAULT_MODEL,
    named_model: NAMED_MODEL = None,
    engine_options: dict[str, Any] | None = None,
    process_options: dict[str, Any] | None = None,
) -> None:
    """Run an engine."""
    model = chosen_model(context, model, named_model)
    stated = engine_options or {}
    try:
        process = EngineProcessOptions(**(process_options or {}))
        require_companions(stated)
        make_options(**stated)
    except OptionError as error:
        raise refusal("engine", error.typed, WRONG) from error
    raise typer.Exit(_run(model, stated, process))


def _run(model: str, stated: dict[str, Any], process: EngineProcessOptions) -> int:
    """Run until a signal arrives; an error at the start is printed as one line."""
    running = import_module("holdfast.server.link.engine_process")
    unusable = import_module("holdfast.models.fields").ConfigurationError
    with starting("engine", model) as progress:
        try:
            return int(running.run(model, stated, process, progress))
        except unusable as error:
            raise refusal("engine", str(error), UNUSABLE) from error
