"""The options that set up an engine and a server, shared by all commands that start one.

One table for each, in the order of the help. `takes_options` gives a command those that it has a parameter
for (`engine_options`, `server_options`), each also as an environment variable (`--page-size` is
HOLDFAST_PAGE_SIZE) and as a key of the configuration file, and hands it what was stated; what was not keeps
the engine's or the server's own default.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from holdfast.cli.config import ConfigError, find_config, read_config
from holdfast.engine.options import CHOICES, EngineOptions, OptionError
from holdfast.server.options import LOG_LEVELS, ServerOptions

__all__ = [
    "COMPANIONS",
    "ENGINE_OPTIONS",
    "NAMED_MODEL",
    "SERVER_OPTIONS",
    "Option",
    "chosen_model",
    "on_the_line",
    "option_kinds",
    "parse_bytes",
    "require_companions",
    "takes_options",
    "write_bytes",
]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str | int) -> int:
    """A number of bytes: plain, or with K, M, G or T (powers of 1024), `iB` or `B` allowed after it."""
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", text.upper())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 512M or 4GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def write_bytes(count: int) -> str:
    """A number of bytes as `parse_bytes` reads it, with the largest unit that says it exactly."""
    unit = next((unit for unit, size in reversed(_UNITS.items()) if count and count % size == 0), "")
    return f"{count // _UNITS[unit]}{unit}"


@dataclass(frozen=True, slots=True)
class Option:
    """One option: the field that it fills, the type that is parsed, and its help.

    `variable` is the environment variable where that is not HOLDFAST_ and the name. `choices` are what a
    shell offers; the engine or the server is who refuses what is none of them.
    """

    name: str
    kind: Any
    help: str
    parser: Callable[[str], Any] | None = None
    flags: tuple[str, ...] = ()
    variable: str | None = None
    choices: tuple[str, ...] = ()

    def annotation(self, panel: str, default: object) -> Any:
        """What the parser of the command line reads it from."""
        option: Any = typer.Option(
            *self.flags,
            envvar=self.variable or f"HOLDFAST_{self.name.upper()}",
            help=self.help,
            parser=self.parser,
            metavar="SIZE" if self.parser is parse_bytes else None,
            show_default=self._shown(default),
            show_envvar=False,
            autocompletion=(lambda: list(self.choices)) if self.choices else None,
            rich_help_panel=panel,
        )
        return Annotated[self.kind | None, option]

    def _shown(self, default: object) -> str | bool:
        """The default as the help shows it; False where there is none, or where it is not to do something."""
        if default is None or default is False or default == ():
            return False
        if default is True:
            return self.name.replace("_", "-")
        return (
            write_bytes(default) if self.parser is parse_bytes and isinstance(default, int) else str(default)
        )


ENGINE_OPTIONS: tuple[Option, ...] = (
    Option("device", str, "auto, cpu, cuda, or one of several such as cuda:1.", choices=CHOICES["device"]),
    Option("dtype", str, "auto, float32, bfloat16 or float16.", choices=CHOICES["dtype"]),
    Option("load_format", str, "auto, or dummy for random weights.", choices=CHOICES["load_format"]),
    Option(
        "context_length",
        int,
        "Most tokens of a session; the model's own if left out, and no more than its positions carry to.",
    ),
    Option("page_size", int, "Tokens in a page of memory."),
    Option("kv_tokens", int, "Tokens of full-attention memory; from the free memory if left out."),
    Option("window_tokens", int, "Tokens of sliding-window memory; from the free memory if left out."),
    Option("state_slots", int, "Slots of recurrent state; from the free memory if left out."),
    Option("session_tokens", int, "Expected length of a session, for sharing out memory."),
    Option(
        "memory_fraction",
        float,
        "Share of the free memory to take; 0.25 on a CPU and 0.95 on a GPU if left out.",
    ),
    Option("host_memory", str, "Memory on the host for sessions at rest, such as 4GiB.", parse_bytes),
    Option("max_running", int, "Turns that run at once."),
    Option("chunk_tokens", int, "Most tokens of one turn's prompt in a step."),
    Option("step_tokens", int, "Most tokens of all turns in a step."),
    Option("max_queue", int, "Turns that may wait; one more is refused with 429."),
    Option("max_sessions", int, "Sessions that may be open; a request without one counts while it lasts."),
    Option("tenant_device", float, "Part of the device's memory that one tenant may hold, 1 for all of it."),
    Option("tenant_host", float, "Part of the host's memory that one tenant may hold."),
    Option("tenant_disk", float, "Part of the disk's memory that one tenant may hold."),
    Option("session_ttl", float, "Seconds after which an idle session is closed."),
    Option("checkpoints", int, "Older turns of a session that it can be rewound to without computing."),
    Option(
        "leave_history",
        bool,
        "Leave the history of a closed session in the prefix tree.",
        flags=("--leave-history/--no-leave-history",),
    ),
    Option("journal", str, "File that sessions are written to, so that they outlive the process."),
    Option(
        "durability",
        str,
        "What an answer waits for: off, commit (survives a crash) or fsync (a power cut).",
        choices=CHOICES["durability"],
    ),
    Option("disk", str, "Directory for the memory of sessions at rest."),
    Option(
        "disk_limit",
        str,
        "Most that may lie there, such as 100GiB; 80 % of what is free if left out.",
        parse_bytes,
    ),
    Option("snapshot_seconds", float, "How long a session rests before its memory is written there."),
    Option(
        "overlap",
        bool,
        "Plan a step while the one before runs; on a GPU if left out.",
        flags=("--overlap/--no-overlap",),
    ),
    Option(
        "pack_weights",
        bool,
        "Keep weights in twelve bits too, for small steps; on a Hopper GPU with room for it if left out.",
        flags=("--pack-weights/--no-pack-weights",),
    ),
    Option(
        "fast_start",
        bool,
        "Start without capturing graphs: sooner ready, slower afterwards. For GPUs.",
        flags=("--fast-start/--no-fast-start",),
    ),
    Option(
        "speculate",
        str,
        "none, or ngram: guess what repeats earlier text, and check it.",
        choices=CHOICES["speculate"],
    ),
    Option("audit", str, "on, or strict: recount all memory after every step.", choices=CHOICES["audit"]),
    Option("cache", str, "Directory for fetched models and compiled kernels; ~/.cache/holdfast if left out."),
    Option(
        "cpu_kernels",
        bool,
        "Use the C kernels on a CPU.",
        flags=("--cpu-kernels/--no-cpu-kernels",),
    ),
    Option(
        "cuda_kernels",
        bool,
        "Use the CUDA kernels on a Hopper GPU.",
        flags=("--cuda-kernels/--no-cuda-kernels",),
    ),
    Option("c_compiler", str, "C compiler for the C kernels.", variable="CC"),
)

SERVER_OPTIONS: tuple[Option, ...] = (
    Option("host", str, "Address to listen on; anything but loopback needs keys."),
    Option("port", int, "Port to listen on; 0 takes a free one."),
    Option(
        "api_keys",
        str,
        "File of one key a line, `name:key` or the key alone; each is a tenant. What follows a key, such as "
        "device=0.5 host=0.25, is what it may hold. HOLDFAST_API_KEYS holds the same, separated by commas.",
        variable="HOLDFAST_API_KEYS_FILE",
    ),
    Option("admin_key", str, "Key of /metrics and the admin calls; better in the environment than here."),
    Option(
        "allow_anonymous",
        bool,
        "Listen beyond this machine without keys: whoever reaches the port may use the model.",
        flags=("--allow-anonymous",),
    ),
    Option("served_model_name", str, "What /v1/models calls the model."),
    Option("cors_origin", list[str], "Origin of web pages that may call the server; may be repeated."),
    Option(
        "allowed_host",
        list[str],
        "Host name that the server answers to beside its own address and localhost, * for any; may be "
        "repeated. Checked where there are no keys, and wherever it is given.",
    ),
    Option("log_level", str, f"{', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}.", choices=LOG_LEVELS),
    Option("log_format", str, "text, or json: one object a line.", choices=("text", "json")),
    Option("body_limit", str, "Largest body of a request.", parse_bytes),
    Option("bodies_limit", str, "Most bytes of all bodies that are being received.", parse_bytes),
    Option("message_limit", str, "Largest message over a WebSocket.", parse_bytes),
    Option("header_seconds", float, "How long the headers of a request may take to arrive."),
    Option("body_seconds", float, "How long the body of a request may take to arrive."),
    Option("drain_seconds", float, "How long a stopping server waits for the turns in flight."),
    Option("hang_seconds", float, "Silence of the engine after which it is started again."),
    Option(
        "tenant_sessions",
        int,
        "Sessions that one key may have open; half of --max-sessions if left out and there are several keys.",
    ),
    Option("seed", int, "Seed that turns without one of their own get theirs from; by chance if left out."),
    Option("storm", bool, "Let the admin start a storm of sessions from the page.", flags=("--storm",)),
)

GROUPS: Mapping[str, tuple[str, tuple[Option, ...], type[Any]]] = {
    "engine_options": ("Engine", ENGINE_OPTIONS, EngineOptions),
    "server_options": ("Server", SERVER_OPTIONS, ServerOptions),
}

COMPANIONS = {"durability": "journal", "disk_limit": "disk", "snapshot_seconds": "disk"}
"""Options that mean nothing without another one."""

MODEL = "model"
NAMED_MODEL = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="The same as the argument.", show_default=False),
]

Command = TypeVar("Command", bound=Callable[..., None])


def option_kinds() -> dict[str, Any]:
    """Every key that a configuration file may have at its top, with the type of its value."""
    kinds: dict[str, Any] = {MODEL: str}
    for _, options, _ in GROUPS.values():
        kinds |= {option.name: int | str if option.parser else option.kind for option in options}
    return kinds


def _load_config(context: typer.Context, stated: Path | None) -> Path | None:
    """Read the configuration file: its values stand in for what neither line nor environment says."""
    try:
        path = find_config(stated)
        if path is not None:
            context.default_map = {
                **(context.default_map or {}),
                **read_config(path, option_kinds(), section=(context.command.name or "").split()[-1:]),
            }
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    return path


CONFIG = Annotated[
    Path | None,
    typer.Option(
        envvar="HOLDFAST_CONFIG",
        callback=_load_config,
        is_eager=True,
        metavar="FILE",
        show_default="./holdfast.toml, or ~/.config/holdfast/holdfast.toml",
        help="TOML file with options, named as here. A line of the command goes before the environment "
        "(--page-size is HOLDFAST_PAGE_SIZE), which goes before the file.",
    ),
]


def on_the_line(context: typer.Context, name: str) -> bool:
    """Whether a value was typed; what the environment or a file says gives way to that."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def chosen_model(context: typer.Context, model: str, named: str | None) -> str:
    """The model that is meant, by the argument or by `--model`; two that were typed must be the same."""
    if named is None:
        return model
    if on_the_line(context, MODEL) and model != named:
        raise typer.BadParameter(f"--model names {named}, but the line names {model} too: leave one out")
    return named


def require_companions(stated: Mapping[str, Any]) -> None:
    """Refuse an option whose companion is missing: whoever states it expects something of it."""
    for name, companion in COMPANIONS.items():
        if name in stated and companion not in stated:
            raise OptionError(name, f"means nothing without --{companion.replace('_', '-')}")


def _default_of(owner: type[Any], name: str) -> object:
    return next(field.default for field in fields(owner) if field.name == name)


def takes_options(command: Command) -> Command:
    """Give a command every option of the groups that it has a parameter for, and `--config`."""
    own = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    groups = {name: GROUPS[name] for name in own.parameters if name in GROUPS}
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        parameter.replace(annotation=hints[parameter.name], kind=keyword_only)
        for parameter in own.parameters.values()
        if parameter.name not in groups
    ]
    parameters.append(inspect.Parameter("config", keyword_only, default=None, annotation=CONFIG))
    for panel, options, owner in groups.values():
        for option in options:
            annotation = option.annotation(panel, _default_of(owner, option.name))
            parameters.append(
                inspect.Parameter(option.name, keyword_only, default=None, annotation=annotation)
            )

    def run(**arguments: Any) -> None:
        del arguments["config"]
        for group, (_, options, _) in groups.items():
            stated = {option.name: arguments.pop(option.name) for option in options}
            arguments[group] = {name: value for name, value in stated.items() if value is not None}
        command(**arguments)

    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run  # type: ignore[return-value]
