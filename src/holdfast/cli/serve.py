"""`holdfast serve`: start the server.

Reads and checks the options, then imports and runs the server.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

from holdfast.cli.options import (
    NAMED_MODEL,
    SERVED_MODEL,
    chosen_model,
    on_the_line,
    require_companions,
    takes_options,
)
from holdfast.cli.refusals import UNUSABLE, WRONG, refusal
from holdfast.cli.serve_cluster import serve_cluster
from holdfast.cli.starting import starting
from holdfast.engine.options import OptionError, make_options
from holdfast.engine.start.pull import DEFAULT_MODEL
from holdfast.replicas.plan import ClusterOptions
from holdfast.server.options import ServerOptions

__all__ = ["app"]

app = typer.Typer(add_completion=False)

REPEATED = ("cors_origin", "allowed_host", "engine")
"""Options of the server that may be given several times."""

HELP = (
    "Serve a model over HTTP.\n\n"
    "Serves OpenAI's API (/v1/chat/completions, /v1/completions), sessions that stay in memory "
    "(/v1/sessions, /v1/realtime) and SGLang's API (/generate). Ctrl-C or SIGTERM stops it after the running "
    "turns.\n\n"
    "\b\n"
    "holdfast serve                 a small model (downloaded once)\n"
    "holdfast serve DIRECTORY       a local model\n"
    "holdfast serve echo            no model: repeats its input\n"
    "holdfast serve --host 0.0.0.0 --api-keys keys.txt\n"
    "holdfast serve --engine HOST:PORT --link-keys link.pem\n"
    "holdfast serve DIRECTORY --replicas 3 --journal postgresql://…\n\n"
    "holdfast chat --url chats through it, holdfast top watches it."
)


@app.command(help=HELP)
@takes_options
def serve(
    context: typer.Context,
    model: SERVED_MODEL = DEFAULT_MODEL,
    named_model: NAMED_MODEL = None,
    engine_options: dict[str, Any] | None = None,
    server_options: dict[str, Any] | None = None,
    cluster_options: dict[str, Any] | None = None,
) -> None:
    """Serve."""
    model = chosen_model(context, model, named_model)
    engine = engine_options or {}
    try:
        cluster = ClusterOptions(**(cluster_options or {}))
        if cluster.replicas is not None:
            require_companions(engine)
            stated = {name: _value(name, value) for name, value in (server_options or {}).items()}
            raise typer.Exit(serve_cluster(model, cluster, engine, stated, on_the_line(context, "admin_key")))
        server = make_server_options(server_options or {})
        if server.engine:
            _require_no_engine(context, engine)
            engine = {}
        require_companions(engine)
        make_options(**engine)
    except OptionError as error:
        raise refusal("serve", error.typed, WRONG) from error
    raise typer.Exit(_run(model, engine, server))


def _require_no_engine(context: typer.Context, engine: dict[str, Any]) -> None:
    """Reject a model, or options of an engine, of a server that has none of its own."""
    given = [name for name in ("model", "named_model", *engine) if on_the_line(context, name)]
    if given:
        shown = "model" if given[0] == "named_model" else given[0]
        raise OptionError(
            shown, "is an engine option: give it to `holdfast engine`, not to a server with --engine"
        )


def _run(model: str, engine: dict[str, Any], server: ServerOptions) -> int:
    """Serve until a signal arrives; an error at the start is printed as one line."""
    serving = import_module("holdfast.server.serve")
    unable = import_module("holdfast.server.link.supervisor").EngineUnable
    with starting("serve", model) as progress:
        try:
            return int(serving.run(model, engine, server, progress))
        except unable as error:
            raise refusal("serve", str(error), UNUSABLE if error.model else WRONG) from error


def make_server_options(stated: dict[str, Any]) -> ServerOptions:
    """The options of the server; raises `OptionError` for invalid values."""
    return ServerOptions(**{name: _value(name, value) for name, value in stated.items()})


def _value(name: str, value: Any) -> Any:
    return tuple(value) if name in REPEATED else value
