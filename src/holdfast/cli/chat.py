"""`holdfast chat`: talk to a model in the terminal, in this process or at a server.

Owns the options. What is typed and shown is in `terminal`; `chat_local` loads a model, `chat_remote` talks to
a server and needs no torch: only the one that is used is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from holdfast.cli.options import NAMED_MODEL, chosen_model, on_the_line, takes_options
from holdfast.cli.refusals import refusal
from holdfast.cli.remote import server_refusal
from holdfast.client.calls import base_url
from holdfast.client.errors import HoldfastError
from holdfast.engine.pull import DEFAULT_MODEL

__all__ = ["app"]

app = typer.Typer(add_completion=False)

PLEASANT: dict[str, Any] = {"temperature": 0.2, "top_p": 0.9}
"""Sampling where neither the user nor the model says anything, as the makers of SmolLM2 recommend for it.
Requests to a server without sampling are sampled plainly, as other servers do it; a person wants sense."""

SAMPLING = "Answers"

HELP = (
    "Talk to a model in the terminal.\n\n"
    "\b\n"
    "Ctrl-C    interrupts the model: what was shown stays, the rest never was\n"
    "/rewind   takes turns back; /fork goes on in a copy\n"
    "/memory   shows who holds the memory; /help lists everything\n\n"
    "\b\n"
    "holdfast chat                       the small model that is fetched once\n"
    "holdfast chat DIRECTORY             a model of your own, in this process\n"
    "holdfast chat --url 127.0.0.1:8000  the model of a server"
)


@app.command(help=HELP)
@takes_options
def chat(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A directory, a .gguf file, or a name; not with --url.",
            envvar="HOLDFAST_MODEL",
        ),
    ] = DEFAULT_MODEL,
    named_model: NAMED_MODEL = None,
    url: Annotated[
        str | None, typer.Option(help="Talk to the server at this address instead.", envvar="HOLDFAST_URL")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key for that server.", envvar="HOLDFAST_API_KEY")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer.", rich_help_panel=SAMPLING)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 is greedy.", show_default="the model's own, or 0.2", rich_help_panel=SAMPLING),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Share of the probability to draw from.",
            show_default="the model's own, or 0.9",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same answers.", rich_help_panel=SAMPLING)
    ] = None,
    engine_options: dict[str, object] | None = None,
) -> None:
    """Talk."""
    asked = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    stated = {name: value for name, value in asked.items() if value is not None}
    model = chosen_model(context, model, named_model)
    if url is not None and (named_model is not None or on_the_line(context, "model")):
        if on_the_line(context, "url"):
            raise refusal("chat", f"--url talks to the model of a server: leave {model} out, or --url")
        url = None
    try:
        if url is not None:
            _at_server(url, api_key, system, stated)
        else:
            _here(model, system, stated, engine_options or {})
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(130) from interrupt


def _here(model: str, system: str | None, stated: dict[str, Any], engine_options: dict[str, object]) -> None:
    """Load a model and talk to it."""
    local = import_module("holdfast.cli.chat_local")
    try:
        local.run(model, system, stated, PLEASANT, engine_options)
    except local.Unusable as error:
        raise refusal("chat", str(error)) from error


def _at_server(url: str, api_key: str | None, system: str | None, stated: dict[str, Any]) -> None:
    """Talk to the model of a server."""
    try:
        address = base_url(url)
    except ValueError as error:
        raise refusal("chat", str(error)) from error
    remote = import_module("holdfast.cli.chat_remote")
    try:
        remote.run(address, api_key, system, stated, PLEASANT)
    except HoldfastError as error:
        raise server_refusal("chat", error) from error
