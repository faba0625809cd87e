"""The options that set up an engine, shared by all commands that start one.

One table, in the order of the help. `takes_engine_options` gives a command all of them, each also as an
environment variable (`--page-size` is HOLDFAST_PAGE_SIZE), and hands it those that were given; what was not
given keeps the engine's own default.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from holdfast.engine.options import EngineOptions

__all__ = ["ENGINE_OPTIONS", "EngineOption", "parse_bytes", "takes_engine_options"]

PANEL = "Engine"

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str | int) -> int:
    """A number of bytes: plain, or with K, M, G or T (powers of 1024), `iB` or `B` allowed after it."""
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", text.upper())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 512M or 4GiB")
    return int(float(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True, slots=True)
class EngineOption:
    """One option: the field of `EngineOptions` that it fills, the type that is parsed, and its help."""

    name: str
    kind: Any
    help: str
    parser: Callable[[str], Any] | None = None
    flags: tuple[str, ...] = ()

    def annotation(self) -> Any:
        """What the parser of the command line reads it from."""
        variable = f"HOLDFAST_{self.name.upper()}"
        shown = _default_of(self.name)
        option: Any = typer.Option(
            *self.flags,
            envvar=variable,
            help=self.help,
            parser=self.parser,
            metavar="SIZE" if self.parser is parse_bytes else None,
            show_default=shown,
            rich_help_panel=PANEL,
        )
        return Annotated[self.kind | None, option]


def _default_of(name: str) -> str | bool:
    default = next(field.default for field in fields(EngineOptions) if field.name == name)
    return False if default is None or isinstance(default, bool) else str(default)


ENGINE_OPTIONS: tuple[EngineOption, ...] = (
    EngineOption("device", str, "auto, cpu or cuda."),
    EngineOption("dtype", str, "auto, float32, bfloat16 or float16."),
    EngineOption("load_format", str, "auto, or dummy for random weights."),
    EngineOption("context_length", int, "Most tokens of a session; the model's own if left out."),
    EngineOption("page_size", int, "Tokens in a page of memory."),
    EngineOption("kv_tokens", int, "Tokens of full-attention memory; from the free memory if left out."),
    EngineOption("window_tokens", int, "Tokens of sliding-window memory."),
    EngineOption("state_slots", int, "Slots of recurrent state."),
    EngineOption("session_tokens", int, "Expected length of a session, for sharing out memory."),
    EngineOption("memory_fraction", float, "Share of the free memory to take."),
    EngineOption("host_memory", str, "Memory on the host for sessions at rest, such as 4GiB.", parse_bytes),
    EngineOption("max_running", int, "Turns that run at once."),
    EngineOption("chunk_tokens", int, "Most tokens of one turn's prompt in a step."),
    EngineOption("max_sessions", int, "Sessions that may be open."),
    EngineOption("session_ttl", float, "Seconds after which an idle session is closed."),
    EngineOption(
        "overlap", bool, "Plan a step while the one before runs.", flags=("--overlap/--no-overlap",)
    ),
    EngineOption("audit", str, "on, or strict: recount all memory after every step."),
)

Command = TypeVar("Command", bound=Callable[..., None])


def takes_engine_options(command: Command) -> Command:
    """Give a command every engine option; those that were given arrive in its `engine_options`."""
    own = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in own.parameters.values()
        if parameter.name != "engine_options"
    ]
    parameters += [
        inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option.annotation()
        )
        for option in ENGINE_OPTIONS
    ]

    def run(**arguments: Any) -> None:
        given = {option.name: arguments.pop(option.name) for option in ENGINE_OPTIONS}
        chosen = {name: value for name, value in given.items() if value is not None}
        command(**arguments, engine_options=chosen)

    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run  # type: ignore[return-value]
