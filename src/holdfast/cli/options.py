"""The options that set up an engine and a server, shared by all commands that start one.

One table for each, in the order of the help. `takes_options` gives a command those that it has a parameter
for (`engine_options`, `server_options`, `sampling_options`), each also as an environment variable
(`--page-size` is HOLDFAST_PAGE_SIZE) and as a key of the configuration file. The command gets the values
given; the others keep the engine's or the server's default.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from holdfast.cli.answer_options import CHOICES as TOOL_CHOICES
from holdfast.cli.answer_options import AnswerOptions
from holdfast.cli.config import ConfigError, find_config, read_config
from holdfast.cli.option_groups import presented
from holdfast.cli.sampling_options import CHAT_DEFAULTS, SAMPLING_FIELDS
from holdfast.engine.options import CHOICES, EngineOptions, OptionError
from holdfast.engine.sampling import Sampling
from holdfast.replicas.plan import ClusterOptions, written
from holdfast.server.options import LOG_LEVELS, EngineProcessOptions, ServerOptions

__all__ = [
    "ANSWER_OPTIONS",
    "CLUSTER_OPTIONS",
    "COMPANIONS",
    "ENGINE_OPTIONS",
    "NAMED_MODEL",
    "PROCESS_OPTIONS",
    "SAMPLING_OPTIONS",
    "SERVED_MODEL",
    "SERVER_OPTIONS",
    "Option",
    "as_arguments",
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
    """A number of bytes in the largest exact unit."""
    unit = next((unit for unit, size in reversed(_UNITS.items()) if count and count % size == 0), "")
    return f"{count // _UNITS[unit]}{unit}"


@dataclass(frozen=True, slots=True)
class Option:
    """One option: the field that it fills, the type that is parsed, and its help.

    `variable` is the environment variable if it is not HOLDFAST_ and the name. `choices` are for shell
    completion; the engine or the server rejects other values. `default` replaces the field's own default in
    the help.
    """

    name: str
    kind: Any
    help: str
    parser: Callable[[str], Any] | None = None
    flags: tuple[str, ...] = ()
    variable: str | None = None
    choices: tuple[str, ...] = ()
    default: str = ""

    def annotation(self, panel: str, default: object) -> Any:
        """The annotation that Typer reads."""
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
        """The default as the help shows it; False where there is none, or where it is off."""
        if self.default:
            return self.default
        if default is None or default is False or default == ():
            return False
        if default is True:
            return self.name.replace("_", "-")
        return (
            write_bytes(default) if self.parser is parse_bytes and isinstance(default, int) else str(default)
        )


ENGINE_OPTIONS: tuple[Option, ...] = (
    Option("device", str, "Device: auto, cpu, cuda, or one GPU such as cuda:1.", choices=CHOICES["device"]),
    Option(
        "tensor_parallel",
        int,
        "Number of processes that the model is divided over, each with its own GPU or some CPU cores.",
    ),
    Option(
        "dtype",
        str,
        "Data type of weights and activations: auto, float32, bfloat16 or float16.",
        choices=CHOICES["dtype"],
    ),
    Option(
        "kv_dtype",
        str,
        "Data type of the KV cache: auto (the model's), float32, bfloat16, float16, or fp8 (8 bits).",
        choices=CHOICES["kv_dtype"],
    ),
    Option(
        "state_dtype",
        str,
        "Data type of recurrent states that no turn computes with: auto, float32, or int8 (8 bits).",
        choices=CHOICES["state_dtype"],
    ),
    Option(
        "load_format", str, "Weights to load: auto, or dummy for random ones.", choices=CHOICES["load_format"]
    ),
    Option(
        "context_length",
        int,
        "Maximum session length in tokens (default and limit: the model's).",
    ),
    Option("page_size", int, "Tokens per page of KV cache.", default="16 on a CPU, 64 on a GPU"),
    Option(
        "kv_tokens", int, "Size of the full-attention KV cache in tokens (default: from the free memory)."
    ),
    Option(
        "window_tokens", int, "Size of the sliding-window KV cache in tokens (default: from the free memory)."
    ),
    Option("state_slots", int, "Number of recurrent-state slots (default: from the free memory)."),
    Option("session_tokens", int, "Expected session length in tokens, to divide memory between pools."),
    Option(
        "memory_fraction",
        float,
        "Share of the free memory to use (default: 0.25 on a CPU, 0.95 on a GPU).",
    ),
    Option("host_memory", str, "Host memory for idle sessions, such as 4GiB.", parse_bytes),
    Option(
        "max_running",
        int,
        "Maximum number of running turns.",
        default="64 on a CPU, up to 256 on a GPU, by its memory",
    ),
    Option(
        "chunk_tokens",
        int,
        "Maximum prompt tokens of one turn in a step (chunked prefill).",
        default="512 on a CPU, a whole step on a GPU",
    ),
    Option(
        "step_tokens",
        int,
        "Maximum tokens of all turns in a step.",
        default="1024 on a CPU, up to 8192 on a GPU, by its speed and memory",
    ),
    Option(
        "mixed_tokens",
        int,
        "Maximum tokens of a step while answers are generated, or twice the running turns if that is more.",
        default="step-tokens on a CPU, 192 to 512 on a GPU, by its kernels",
    ),
    Option("max_queue", int, "Maximum number of queued turns; further ones get 429."),
    Option("max_sessions", int, "Maximum number of open sessions; a one-shot request counts while it runs."),
    Option("tenant_device", float, "Share of the device memory that one tenant may hold; 1 for all."),
    Option("tenant_host", float, "Share of the host memory that one tenant may hold."),
    Option("tenant_disk", float, "Share of the disk tier that one tenant may hold."),
    Option("tenant_pinned", float, "Share of a tenant's device memory that its pinned sessions may keep."),
    Option("session_ttl", float, "Idle time in seconds after which a session is closed."),
    Option(
        "checkpoints",
        int,
        "Older turns of a session to keep checkpoints of, for rewinding without recomputation.",
        default="8",
    ),
    Option(
        "leave_history",
        bool,
        "Keep the history of a closed session in the prefix tree.",
        flags=("--leave-history/--no-leave-history",),
    ),
    Option("journal", str, "Journal, a file or postgresql://user@host/db: sessions in it survive a restart."),
    Option(
        "durability",
        str,
        "Durability of acknowledged turns: off, commit (survives a crash) or fsync (a power cut).",
        choices=CHOICES["durability"],
    ),
    Option("disk", str, "Directory of the disk tier, for the memory of idle sessions."),
    Option(
        "disk_limit",
        str,
        "Size limit of the disk tier, such as 100GiB (default: 80 % of the free space).",
        parse_bytes,
    ),
    Option(
        "snapshot_seconds", float, "Idle time in seconds after which a session is written to the disk tier."
    ),
    Option(
        "overlap",
        bool,
        "Overlap scheduling with the running step (default: on a GPU, unless tokens are drafted).",
        flags=("--overlap/--no-overlap",),
    ),
    Option(
        "pack_weights",
        bool,
        "Keep a 12-bit copy of the weights for small batches (default: on a Hopper GPU with enough memory).",
        flags=("--pack-weights/--no-pack-weights",),
    ),
    Option(
        "fast_start",
        bool,
        "Capture no CUDA graphs, not even while serving: less work at the start, slower afterwards.",
        flags=("--fast-start/--no-fast-start",),
    ),
    Option(
        "speculate",
        str,
        "Speculative decoding: none; ngram (from the text so far); mtp (the checkpoint's prediction head).",
        choices=CHOICES["speculate"],
    ),
    Option(
        "draft",
        str,
        "Small model of the same vocabulary that drafts tokens (speculative decoding), or an EAGLE-3 head: a "
        "name or a path.",
    ),
    Option(
        "draft_tokens",
        int,
        "Cache of the draft model or head, in tokens (default: a sixteenth of the free memory at most).",
    ),
    Option(
        "tool_parser",
        str,
        "Format of the model's tool calls: auto, none, or a name such as hermes or qwen3-coder.",
        choices=CHOICES["tool_parser"],
    ),
    Option(
        "reasoning_parser",
        str,
        "Format of the model's reasoning: auto, none, or a name such as think.",
        choices=CHOICES["reasoning_parser"],
    ),
    Option(
        "audit",
        str,
        "Memory audit: on, or strict (a full census after every step).",
        choices=CHOICES["audit"],
    ),
    Option(
        "cache",
        str,
        "Directory for downloaded models and compiled kernels (default: ~/.cache/holdfast).",
    ),
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
    Option("host", str, "Address to listen on; other than loopback needs keys."),
    Option("port", int, "Port to listen on; 0 takes a free one."),
    Option(
        "api_keys",
        str,
        "Key file, one `name:key` or key a line; each name is a tenant. Memory shares may follow a key, such "
        "as device=0.5 host=0.25. HOLDFAST_API_KEYS holds the same, separated by commas.",
        variable="HOLDFAST_API_KEYS_FILE",
    ),
    Option("admin_key", str, "Admin key, for /metrics and admin calls; better set in the environment."),
    Option(
        "allow_anonymous",
        bool,
        "Listen on a public address without keys.",
        flags=("--allow-anonymous",),
    ),
    Option("served_model_name", str, "Model name in /v1/models."),
    Option("cors_origin", list[str], "Allowed CORS origin; may be repeated."),
    Option(
        "allowed_host",
        list[str],
        "Accepted Host header besides the own address and localhost, * for any; may be repeated. Checked "
        "without keys, and wherever it is given.",
    ),
    Option("log_level", str, f"{', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}.", choices=LOG_LEVELS),
    Option("log_format", str, "text, or json: one object a line.", choices=("text", "json")),
    Option("body_limit", str, "Maximum size of a request body.", parse_bytes),
    Option("bodies_limit", str, "Maximum size of all request bodies being received.", parse_bytes),
    Option("message_limit", str, "Maximum size of a WebSocket message.", parse_bytes),
    Option("header_seconds", float, "Timeout for the headers of a request."),
    Option("body_seconds", float, "Timeout for the body of a request."),
    Option("drain_seconds", float, "Time in seconds for running turns to end at shutdown."),
    Option("hang_seconds", float, "Time without a heartbeat after which the engine is restarted."),
    Option(
        "tenant_sessions",
        int,
        "Maximum number of open sessions per key (default: half of --max-sessions if there are several).",
    ),
    Option(
        "found_sessions",
        int,
        "Maximum number of hidden sessions for chats that send their whole history; 0 turns them off.",
    ),
    Option(
        "response_ttl",
        float,
        "Time in seconds that stored responses and conversations are kept after their last use.",
    ),
    Option("seed", int, "Seed that turns without one derive theirs from (default: random)."),
    Option(
        "storm", bool, "Allow the admin to start a load test of sessions from the page.", flags=("--storm",)
    ),
)

LINK_OPTIONS: tuple[Option, ...] = (
    Option(
        "link_keys", str, "Key file of the links between API processes and engines (`holdfast link-keys`)."
    ),
    Option("link_seconds", float, "Time without a heartbeat after which a link is lost."),
)

SERVER_OPTIONS += (
    Option(
        "engine",
        list[str],
        "HOST:PORT of a `holdfast engine`; may be repeated. This server has no engine of its own then.",
    ),
    *LINK_OPTIONS,
)

PROCESS_OPTIONS: tuple[Option, ...] = (
    Option("listen", str, "HOST:PORT to listen on for API processes; port 0 takes a free one."),
    *LINK_OPTIONS,
    Option("engine_id", str, "Name of the engine in reports (default: the host's name and the port)."),
    Option("advertise", str, "HOST:PORT where other engines reach this one (default: where it listens)."),
    Option(
        "tenant_sessions",
        int,
        "Maximum number of open sessions per key over all engines that share a journal in PostgreSQL.",
    ),
    *(
        option
        for option in SERVER_OPTIONS
        if option.name in ("api_keys", "drain_seconds", "log_level", "log_format")
    ),
)

CLUSTER_OPTIONS: tuple[Option, ...] = (
    Option(
        "replicas",
        int,
        "Number of engines on Ray, one per GPU; needs `pip install 'holdfast\\[cluster]'`.",
    ),
    Option("max_replicas", int, "Number of engines under load (default: --replicas)."),
    Option("api_replicas", int, "Number of API processes (default: 2, or 1 beside one engine)."),
    Option("replica_cpus", float, "Processors that Ray reserves for an engine."),
    Option(
        "ray_address",
        str,
        "HOST:PORT of a Ray cluster to join, or auto (default: a cluster on this machine that ends with the "
        "command).",
    ),
)

SAMPLING_OPTIONS: tuple[Option, ...] = tuple(
    Option(
        field.name,
        field.kind,
        field.meaning,
        default=f"the model's own, or {CHAT_DEFAULTS[field.name]}" if field.name in CHAT_DEFAULTS else "",
    )
    for field in SAMPLING_FIELDS
)

ANSWER_OPTIONS: tuple[Option, ...] = (
    Option("tools", str, "JSON file with the tools that the model may call, in OpenAI's form."),
    Option(
        "tool_choice",
        str,
        "Tool calls in answers to your messages: auto, none, required, or a tool's name.",
        choices=TOOL_CHOICES,
    ),
    Option(
        "response_format",
        str,
        "JSON file that answers must match: OpenAI's response_format, or a JSON schema.",
    ),
    Option(
        "thinking",
        bool,
        "Whether the model reasons before it answers, if its chat template can switch it.",
        flags=("--thinking/--no-thinking",),
    ),
    Option(
        "thinking_tokens", int, "Maximum number of reasoning tokens; then the end of the reasoning is forced."
    ),
    Option(
        "show_thinking",
        bool,
        "Show reasoning while it is generated, not folded into one line.",
        flags=("--show-thinking/--fold-thinking",),
    ),
)

GROUPS: Mapping[str, tuple[str, tuple[Option, ...], type[Any]]] = {
    "answer_options": ("Answers", ANSWER_OPTIONS, AnswerOptions),
    "sampling_options": ("Answers", SAMPLING_OPTIONS, Sampling),
    "engine_options": ("Engine", ENGINE_OPTIONS, EngineOptions),
    "server_options": ("Server", SERVER_OPTIONS, ServerOptions),
    "cluster_options": ("Cluster", CLUSTER_OPTIONS, ClusterOptions),
    "process_options": ("Process", PROCESS_OPTIONS, EngineProcessOptions),
}

COMPANIONS = {
    "durability": "journal",
    "disk_limit": "disk",
    "snapshot_seconds": "disk",
}
"""Options that need another one."""

MODEL = "model"
SERVED_MODEL = Annotated[
    str,
    typer.Argument(help="Model directory, .gguf file, model name, or echo.", envvar="HOLDFAST_MODEL"),
]
NAMED_MODEL = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="The same as the MODEL argument.", show_default=False),
]

Command = TypeVar("Command", bound=Callable[..., None])


def option_kinds() -> dict[str, Any]:
    """Every key that a configuration file may have at its top, with the type of its value."""
    kinds: dict[str, Any] = {MODEL: str}
    for options in (ENGINE_OPTIONS, SERVER_OPTIONS, CLUSTER_OPTIONS):
        kinds |= {option.name: int | str if option.parser else option.kind for option in options}
    return kinds


def _load_config(context: typer.Context, stated: Path | None) -> Path | None:
    """Read the configuration file into defaults below the environment and the command line."""
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
        help="TOML file with options. The command line overrides the environment (--page-size is "
        "HOLDFAST_PAGE_SIZE), which overrides the file.",
    ),
]


def on_the_line(context: typer.Context, name: str) -> bool:
    """Whether a value was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def chosen_model(context: typer.Context, model: str, named: str | None) -> str:
    """The model of the argument or of `--model`; if both are given, they must be the same."""
    if named is None:
        return model
    if on_the_line(context, MODEL) and model != named:
        raise typer.BadParameter(f"--model is {named}, but the argument is {model}: leave one out")
    return named


def require_companions(stated: Mapping[str, Any]) -> None:
    """Reject an option without the one that it needs."""
    for name, companion in COMPANIONS.items():
        if name in stated and companion not in stated:
            raise OptionError(name, f"needs --{companion.replace('_', '-')}")


def as_arguments(stated: Mapping[str, Any]) -> list[str]:
    """Engine options as `serve` takes them."""
    names = {option.name for option in ENGINE_OPTIONS}
    assert stated.keys() <= names, "they are options of the engine"
    return written(stated)


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

    return presented(command, run, parameters)
