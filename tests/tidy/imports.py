"""Who may import whom, and what a file imports.

Owns the direction of imports between the packages and the list of what the core must not touch. Imports run
downwards only: cli -> bench, replicas -> server -> engine -> (models -> kernels), core, cluster; cli -> sim
-> core, cluster; bench -> client.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import lru_cache

PACKAGE = "holdfast"

# What each package may import of the others. The empty name is the top-level module itself.
MAY_IMPORT: dict[str, set[str]] = {
    "": {"engine"},
    "cli": {
        "",
        "bench",
        "server",
        "engine",
        "models",
        "kernels",
        "core",
        "cluster",
        "sim",
        "client",
        "replicas",
    },
    "replicas": {"", "server", "engine", "cluster"},
    "bench": {"", "server", "engine", "models", "kernels", "core", "client"},
    "server": {"", "engine", "models", "core", "cluster"},
    "engine": {"models", "kernels", "core", "cluster"},
    "models": {"kernels"},
    "kernels": set(),
    "sim": {"core", "cluster"},
    "client": {""},
    "core": set(),
    "cluster": set(),
}

# Packages without a clock, chance or I/O.
PURE = {"core", "cluster"}

# Modules of the standard library that reach for the clock, chance, the environment, files, threads, other
# processes or the network. Whatever the core, or another pure package, needs of them arrives as an argument.
CORE_DENIED = {
    "_thread", "asyncio", "concurrent", "contextvars", "ctypes", "curses", "datetime", "email", "fcntl",
    "fileinput", "ftplib", "getpass", "glob", "http", "imaplib", "importlib", "io", "linecache", "locale",
    "logging", "mmap", "multiprocessing", "os", "pathlib", "platform", "posix", "pty", "queue", "random",
    "resource", "sched", "secrets", "select", "selectors", "shutil", "signal", "site", "smtplib", "socket",
    "socketserver", "sqlite3", "ssl", "subprocess", "syslog", "tempfile", "termios", "threading", "time",
    "timeit", "tty", "urllib", "uuid", "wsgiref", "zoneinfo",
}  # fmt: skip
CORE_DENIED_BUILTINS = {"open", "input", "print", "breakpoint"}

# Packages that machines without the server do not have.
WEB = {
    "fastapi", "httpx", "msgspec", "openai", "prometheus_client", "pydantic", "rich", "starlette", "typer",
    "uvicorn", "uvloop", "websockets",
}  # fmt: skip
TENSORS = {"gguf", "safetensors", "torch", "transformers", "triton"}

# By package or room: what its files must not import. transformers is for benchmarks and tests alone.
THIRD_PARTY_DENIED: dict[str, set[str]] = {
    "sim": WEB | TENSORS,
    "kernels": WEB | {"transformers"},
    "models": WEB | {"transformers"},
    "engine": WEB | {"transformers"},
    "server": {"transformers"},
    "cli": {"transformers"},
    "client": TENSORS,
    "bench.core": WEB | TENSORS,
    "bench.gpu": WEB | {"transformers"},
    "bench.loops": WEB | {"transformers"},
    "bench.small_models": WEB,
    "bench.cpu.host_step": WEB,
}

# The extras of pyproject.toml that a package may import from; the others have the main dependencies alone.
MAY_IMPORT_EXTRAS: dict[str, set[str]] = {
    "server": {"otel"},
    "engine": {"cluster"},
    "replicas": {"cluster"},
    "bench": {"bench", "test"},
}


# Modules outside `cli` that read environment variables.
ENVIRONMENT_READERS = {
    "holdfast.engine.start.pull",  # XDG_CACHE_HOME; the environment of pip
    "holdfast.replicas.engine_runner",  # that of its child
    "holdfast.replicas.haproxy",  # to become HAProxy
    "holdfast.replicas.surroundings",  # Ray Serve's variables
    "holdfast.server.http.keys",  # HOLDFAST_API_KEYS
    "holdfast.server.telemetry.tracing",  # OpenTelemetry's variables
}


class Source:
    """A text file as the rules see it: its path from the root and its text; for Python, module and tree."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text

    @property
    def tree(self) -> ast.Module:
        return _tree(self)

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        """The nodes of the tree, from the root downwards."""
        return _nodes(self)

    @property
    def module(self) -> str:
        """The dotted name that the path gives the file, from below `src` where it lies there."""
        parts = self.path.removesuffix(".py").removesuffix("/__init__").split("/")
        return ".".join(parts[1:] if parts[0] == "src" else parts)

    @property
    def package(self) -> str:
        """The package below `holdfast` that the file belongs to; empty for the top-level module."""
        parts = self.module.split(".")
        assert parts[0] == PACKAGE, f"{self.path} is not below src/{PACKAGE}"
        return parts[1] if len(parts) > 1 else ""


@lru_cache(maxsize=1)
def _tree(source: Source) -> ast.Module:
    """Only the last is kept: the trees of all files would take hundreds of megabytes."""
    return ast.parse(source.text, filename=source.path)


@lru_cache(maxsize=1)
def _nodes(source: Source) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(source.tree))


def dotted_name(node: ast.expr) -> str:
    """Return `a.b.c` for a chain of names, and an empty string for anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute) if owner := dotted_name(value):
            return f"{owner}.{attribute}"
    return ""


def name_matches(module: str, names: Iterable[str]) -> bool:
    """Whether the first part of the dotted `module` is among `names`."""
    return module.partition(".")[0] in names


def imported_modules(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of everything imported anywhere in the file.

    `from a import b` yields `a.b`, because b may be a module. A relative import yields a name that starts
    with a dot. A literal given to `import_module` counts as an import.
    """
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                stem = "." * level + (module or "")
                yield from ((node.lineno, f"{stem}.{alias.name}") for alias in names)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if dotted_name(function).split(".")[-1] == "import_module":
                    yield node.lineno, name
