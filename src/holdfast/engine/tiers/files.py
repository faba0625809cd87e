"""Snapshot files: a session's memory as a safetensors file that says what it holds, with checksums.

The header names the model, the memory's layout and types, the number and digest of the tokens that the memory
was computed from, and a checksum of every tensor. A file that is damaged or does not match is a `BadFile`,
never a wrong answer. `SnapshotFiles` does all disk access: a file appears complete, after it and its
directory were synced, or not at all. Called by the disk tier and its thread.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from holdfast.engine.lock import lock

log = logging.getLogger("holdfast.disk")

FORMAT = "holdfast-session-1"
SUFFIX = ".session.safetensors"
HEADER_BYTES_MAX = 1 << 20
WRITE_BYTES = 64 << 20
"""Bytes of one write, each synced before the next."""
SAMPLES = 16
SAMPLE_BYTES = 1 << 14


class BadFile(RuntimeError):
    """A file is damaged, or does not match its session."""


class MemoryForm(NamedTuple):
    """The form of a model's memory: the digest of its layout, and types other than the model's own."""

    layout: str
    types: str = ""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds: the memory of which model, in which layout, of which tokens.

    `types` are the types of keys, values and states where they are not the model's own; files without any
    lack the entry.
    """

    model: str
    layout: str
    length: int
    tokens: str
    types: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The complete file of a session: what it holds, and its size."""

    file: str
    length: int
    tokens: str
    bytes: int


class SnapshotFiles:
    """The files of one directory, by name."""

    def __init__(self, directory: Path, lock_timeout: float = 0.0) -> None:
        """Lock a directory, waiting up to `lock_timeout` seconds for another process, or raise `InUse`.

        Without the lock, a second engine would remove the first one's files as orphans.
        """
        self.directory = directory
        self._aborted = False
        directory.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = os.open(directory, os.O_RDONLY)
        try:
            lock(self._lock, directory, lock_timeout)
        except OSError as error:
            log.warning("%s cannot be locked: let no other engine use it meanwhile (%s)", directory, error)

    def close(self) -> None:
        """Release the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def abort(self) -> None:
        """Let the file in progress, and every later one, fail."""
        self._aborted = True

    def write(self, name: str, content: bytes) -> None:
        """Write a file that appears complete and synced, or raise and leave none."""
        path = self.directory / name
        partial = path.with_name(name + ".partial")
        try:
            with _opened(partial, os.O_CREAT | os.O_TRUNC | os.O_WRONLY) as descriptor:
                self.put(descriptor, content)
                os.fsync(descriptor)
            partial.rename(path)
            with _opened(self.directory, os.O_RDONLY) as descriptor:
                os.fsync(descriptor)
        except Exception:
            partial.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise

    def put(self, descriptor: int, content: bytes) -> None:
        """Write all bytes to an open file, or raise once aborted.

        Each piece is synced before the next is written, so that an abort waits for one piece at most.
        """
        view = memoryview(content)
        while view:
            if self._aborted:
                raise OSError(errno.ECANCELED, "the engine ended before it was written")
            view = view[os.write(descriptor, view[:WRITE_BYTES]) :]
            if view:
                os.fdatasync(descriptor)

    def free_bytes(self) -> int:
        """The free space of the disk for this user; unlimited where the system does not say."""
        try:
            found = os.statvfs(self.directory)
        except OSError:
            return sys.maxsize
        return found.f_bavail * found.f_frsize

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.directory / name).is_file()

    def read(self, name: str) -> bytes:
        """All bytes of a file."""
        return (self.directory / name).read_bytes()

    def read_head(self, name: str) -> bytes:
        """The header of a file, after its length."""
        with (self.directory / name).open("rb") as file:
            size = file.read(8)
            return size + file.read(min(int.from_bytes(size, "little"), HEADER_BYTES_MAX))

    def remove(self, name: str) -> None:
        """Remove a file if it exists. One that cannot be removed is an orphan for a later engine."""
        try:
            (self.directory / name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("an unused snapshot cannot be removed: %s", error)

    def names(self) -> list[str]:
        """All snapshot files, including partial ones."""
        found = [*self.directory.glob("*" + SUFFIX), *self.directory.glob("*" + SUFFIX + ".partial")]
        return sorted(path.name for path in found)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def encode(header: Header, tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a file."""
    described = {name: str(value) for name, value in asdict(header).items() if value != ""}
    sums = {f"checksum {name}": str(_checksum(tensor)) for name, tensor in tensors.items()}
    return save(dict(tensors), {"format": FORMAT, **described, **sums})


def check_header(content: bytes, expected: Header) -> dict[str, str]:
    """The metadata of a file or of its beginning; `BadFile` unless it matches the expected header."""
    size = int.from_bytes(content[:8], "little")
    try:
        facts: dict[str, str] = dict(json.loads(content[8 : 8 + size])["__metadata__"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadFile("the header cannot be read") from error
    wanted = {"format": FORMAT} | {name: str(value) for name, value in asdict(expected).items()}
    for name, value in wanted.items():
        if facts.get(name, "") != value:
            raise BadFile(f"{name} does not match")
    return facts


def decode(content: bytes, expected: Header) -> dict[str, Tensor]:
    """The tensors of a file that matches the expected header and its checksums; `BadFile` otherwise."""
    facts = check_header(content, expected)
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise BadFile("it is truncated or damaged") from error
    for name, tensor in tensors.items():
        if facts.get(f"checksum {name}") != str(_checksum(tensor)):
            raise BadFile(f"the checksum of {name} does not match")
    if len(tensors) != sum(name.startswith("checksum ") for name in facts):
        raise BadFile("a tensor is missing")
    return tensors


def _checksum(tensor: Tensor) -> int:
    flat = tensor.contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


def weights_identity(path: Path) -> str:
    """A digest of a model on disk: its configuration, and samples of its weights."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    found = hashlib.sha256()
    if (path / "config.json").is_file():
        found.update((path / "config.json").read_bytes())
    for each in files:
        size = each.stat().st_size
        found.update(f"{each.name} {size}".encode())
        with each.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()


def layout_identity(page_size: int, layout: object, memory_shape: object, dtype: torch.dtype) -> str:
    """A digest of the form of a model's memory."""
    form = (page_size, layout, memory_shape, dtype)
    return hashlib.sha256(repr(form).encode()).hexdigest()
