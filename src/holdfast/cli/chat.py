"""`holdfast chat`: talk to a model in the terminal, in this process or on a server.

Checks the options before anything is loaded. `terminal` is the user interface; `chat_local` loads a model,
`chat_remote` uses a server and needs no torch: only one of them is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from holdfast.cli.answer_options import AnswerAsked, AnswerOptions
from holdfast.cli.options import (
    NAMED_MODEL,
    chosen_model,
    on_the_line,
    require_companions,
    takes_options,
)
from holdfast.cli.refusals import WRONG, refusal
from holdfast.cli.remote import server_refusal
from holdfast.client.errors import HoldfastError
from holdfast.engine.options import OptionError, make_options
from holdfast.engine.sampling import Sampling, SamplingError
from holdfast.engine.start.pull import DEFAULT_MODEL

__all__ = ["app"]

app = typer.Typer(add_completion=False)

HELP = (
    "Talk to a model in the terminal.\n\n"
    "\b\n"
    "Ctrl-C    interrupts the model: the text shown so far stays, the rest is discarded\n"
    "/rewind   removes turns; /fork continues in a copy\n"
    "/memory   shows who holds the memory; /help lists everything\n\n"
    "Tool calls are shown with their arguments; you type the results.\n\n"
    "\b\n"
    "holdfast chat                       the default model, downloaded once\n"
    "holdfast chat DIRECTORY             a local model, in this process\n"
    "holdfast chat --url 127.0.0.1:8000  the model of a server\n"
    "holdfast chat --tools tools.json    with tools, in OpenAI's form"
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
        str | None,
        typer.Option(help="URL of a server to use instead of a local model.", envvar="HOLDFAST_URL"),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key for that server.", envvar="HOLDFAST_API_KEY")
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(help="System prompt.", envvar="HOLDFAST_SYSTEM", show_envvar=False),
    ] = None,
    answer_options: dict[str, Any] | None = None,
    sampling_options: dict[str, Any] | None = None,
    engine_options: dict[str, object] | None = None,
) -> None:
    """Talk."""
    stated = sampling_options or {}
    model = chosen_model(context, model, named_model)
    if url is not None and (named_model is not None or on_the_line(context, "model")):
        if on_the_line(context, "url"):
            problem = f"--url uses the model of a server: leave out {model}, or --url"
            raise refusal("chat", problem, WRONG)
        url = None
    try:
        _require_sampling(stated)
        asked = AnswerAsked.read(AnswerOptions(**(answer_options or {})))
        if url is not None:
            _at_server(url, api_key, system, stated, asked)
        else:
            _here(model, system, stated, asked, engine_options or {})
    except OptionError as error:
        raise refusal("chat", error.typed, WRONG) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(130) from interrupt


def _require_sampling(stated: dict[str, Any]) -> None:
    """Raise `OptionError` for invalid sampling, before every turn is rejected."""
    try:
        Sampling(**stated)
    except SamplingError as error:
        raise OptionError(error.param, str(error).removeprefix(f"{error.param} ")) from error


def _here(
    model: str,
    system: str | None,
    stated: dict[str, Any],
    asked: AnswerAsked,
    engine_options: dict[str, object],
) -> None:
    """Chat with a local model; raises `OptionError` for invalid engine options."""
    require_companions(engine_options)
    make_options(**engine_options)
    local = import_module("holdfast.cli.chat_local")
    try:
        local.run(model, system, stated, asked, engine_options)
    except local.Unusable as error:
        raise refusal("chat", str(error)) from error


def _at_server(
    url: str, api_key: str | None, system: str | None, stated: dict[str, Any], asked: AnswerAsked
) -> None:
    """Chat with the model of a server."""
    remote = import_module("holdfast.cli.chat_remote")
    try:
        remote.run(url, api_key, system, stated, asked)
    except HoldfastError as error:
        raise server_refusal("chat", error) from error
