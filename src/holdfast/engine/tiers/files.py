"""Spill files: a session's memory as a safetensors file that says what it is, and proves it.

The header names the model and the layout that the memory belongs to, the tokens that it was computed from
(their number and a digest) and a checksum of every tensor. A file that is damaged, of another model or of
another history is a `BadFile`, never a wrong answer. `Files` is all that touches the disk: a file appears
whole, after it and its directory were synced, or not at all. Called by the disk tier's thread.
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

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from holdfast.engine.lock import hold

log = logging.getLogger("holdfast.disk")

FORMAT = "holdfast-session-1"
SUFFIX = ".session.safetensors"
HEADER_BYTES_MAX = 1 << 20
PIECE_BYTES = 64 << 20
SAMPLES = 16
SAMPLE_BYTES = 1 << 14


class BadFile(RuntimeError):
    """A file cannot be used: what it holds is not what was asked for, or cannot be trusted."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds: whose memory, in which form, of which tokens."""

    model: str
    layout: str
    length: int
    tokens: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A session's file that is whole: what it holds, and how large it is."""

    file: str
    length: int
    tokens: str
    bytes: int


class Files:
    """The files of one directory, by name. Once they are `given_up`, none is written any more."""

    def __init__(self, directory: Path, patience: float = 0.0) -> None:
        """Hold a directory, after waiting so many seconds for another process that has it, or raise `InUse`.

        Two engines would take each other's files for what a death left behind.
        """
        self.directory = directory
        self.given_up = False
        directory.mkdir(parents=True, exist_ok=True)
        self._held: int | None = os.open(directory, os.O_RDONLY)
        try:
            hold(self._held, directory, patience)
        except OSError as error:
            log.warning("%s cannot be held: no other engine may use it meanwhile (%s)", directory, error)

    def close(self) -> None:
        """Let go of the directory."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def write(self, name: str, content: bytes) -> None:
        """Let a file appear, whole and synced, or raise and leave none."""
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

    def room(self) -> int:
        """How many bytes the disk has left for this user; more than any, where it does not say."""
        try:
            found = os.statvfs(self.directory)
        except OSError:
            return sys.maxsize
        return found.f_bavail * found.f_frsize

    def put(self, descriptor: int, content: bytes) -> None:
        """Write all bytes of a file that is open, or raise if that is given up meanwhile.

        Each piece is on the disk before the next one is written, so that nobody waits for more than one.
        """
        view = memoryview(content)
        while view:
            if self.given_up:
                raise OSError(errno.ECANCELED, "there was no time to write it")
            view = view[os.write(descriptor, view[:PIECE_BYTES]) :]
            if view:
                os.fdatasync(descriptor)

    def read(self, name: str) -> bytes:
        """All bytes of a file."""
        return (self.directory / name).read_bytes()

    def read_head(self, name: str) -> bytes:
        """The length of the header, and the header, of a file."""
        with (self.directory / name).open("rb") as file:
            size = file.read(8)
            return size + file.read(min(int.from_bytes(size, "little"), HEADER_BYTES_MAX))

    def remove(self, name: str) -> None:
        """Let a file be gone; none is no error. One that the disk keeps is swept away by a later engine."""
        try:
            (self.directory / name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("a file that is of no use any more cannot be removed: %s", error)

    def names(self) -> list[str]:
        """The spill files that there are, and what is left of some."""
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
    """A file's bytes."""
    described = {name: str(value) for name, value in asdict(header).items()}
    sums = {f"checksum {name}": str(_checksum(tensor)) for name, tensor in tensors.items()}
    return save(dict(tensors), {"format": FORMAT, **described, **sums})


def check_header(content: bytes, expected: Header) -> dict[str, str]:
    """The header's facts, of a file or of its beginning; `BadFile` unless they are the expected ones."""
    size = int.from_bytes(content[:8], "little")
    try:
        facts: dict[str, str] = dict(json.loads(content[8 : 8 + size])["__metadata__"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadFile("the header cannot be read") from error
    wanted = {"format": FORMAT} | {name: str(value) for name, value in asdict(expected).items()}
    for name, value in wanted.items():
        if facts.get(name) != value:
            raise BadFile(f"its {name} is another")
    return facts


def decode(content: bytes, expected: Header) -> dict[str, Tensor]:
    """The tensors of a file that is what was expected and adds up; `BadFile` otherwise."""
    facts = check_header(content, expected)
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise BadFile("it is cut short or damaged") from error
    for name, tensor in tensors.items():
        if facts.get(f"checksum {name}") != str(_checksum(tensor)):
            raise BadFile(f"the checksum of {name} is wrong")
    if len(tensors) != sum(name.startswith("checksum ") for name in facts):
        raise BadFile("a tensor is missing")
    return tensors


def _checksum(tensor: Tensor) -> int:
    flat = tensor.contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


def weights_identity(path: Path) -> str:
    """A name for a model on disk: its description, and samples of its weights."""
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
