"""Snapshot files: a session's memory in safetensors parts with headers and checksums.

The header of a part names the model, the memory's layout and types, the number and digest of the tokens that
the memory was computed from, and a checksum of every tensor. A part that is damaged or does not match is a
`BadFile`, never a wrong answer. Parts after the first hold new units (`parts`).

`SnapshotFiles` does all disk access. A file appears complete, after it and its directory were synced, or not
at all. A part is appended and synced before a row of the journal counts it: bytes past those of the row are
not read. Called by the disk tier and its thread.
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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.engine.start.lock import lock
from holdfast.engine.tiers.packing import UNREADABLE, BadPack, bytes_of, pack, unpack
from holdfast.engine.tiers.releasing import remove_file

log = logging.getLogger("holdfast.disk")

FORMAT = "holdfast-session-1"
SUFFIX = ".session.safetensors"
HEADER_BYTES_MAX = 1 << 20
WRITE_BYTES = 64 << 20
"""Bytes of one write, each synced before the next."""
SAMPLES = 16
SAMPLE_BYTES = 1 << 14


Buffer = bytes | memoryview


class BadFile(RuntimeError):
    """A file is damaged, or does not match its session."""


class MemoryForm(NamedTuple):
    """The form of a model's memory: the digest of its layout, and types other than the model's own."""

    layout: str
    types: str = ""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file: model, layout and tokens of its memory.

    `types` are the types of keys, values and states if they are not the model's own; other files lack
    the entry.
    """

    model: str
    layout: str
    length: int
    tokens: str
    types: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The file of a session: its length, tokens, and size up to the end of its last part.

    `earlier` describes the file before that part was appended; None if it is the only part.
    """

    file: str
    length: int
    tokens: str
    bytes: int
    earlier: Snapshot | None = None

    @property
    def parts(self) -> list[Snapshot]:
        """The file as it was after each of its parts, the first one first."""
        found: list[Snapshot] = []
        each: Snapshot | None = self
        while each is not None:
            found.append(each)
            each = each.earlier
        return found[::-1]

    def within(self, length: int) -> Snapshot | None:
        """The file up to the last part that holds no more than `length` tokens; None if none does."""
        each: Snapshot | None = self
        while each is not None and each.length > length:
            each = each.earlier
        return each


class SnapshotFiles:
    """The files of one directory, by name."""

    def __init__(self, directory: Path, lock_timeout: float = 0.0) -> None:
        """Lock a directory, waiting up to `lock_timeout` seconds for another process, or raise `InUse`.

        Without the lock, a second engine would remove the first one's files as orphans.
        """
        self.directory = directory
        self.bytes_written = 0
        """Bytes of all files and parts that were written."""
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

    def write(self, name: str, content: Buffer) -> None:
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

    def append(self, name: str, size: int, content: Buffer) -> None:
        """Append a part to the first `size` bytes of a file and sync it, or raise and leave those bytes."""
        with _opened(self.directory / name, os.O_WRONLY) as descriptor:
            if os.fstat(descriptor).st_size < size:
                raise BadFile(f"it has less than {size} bytes")
            try:
                os.ftruncate(descriptor, size)
                os.lseek(descriptor, size, os.SEEK_SET)
                self.put(descriptor, content)
                os.fsync(descriptor)
            except Exception:
                with suppress(OSError):  # Bytes past the last part are not read.
                    os.ftruncate(descriptor, size)
                raise

    def cut(self, name: str, size: int) -> None:
        """Truncate a file to `size` bytes. If that fails, the rest is not read."""
        try:
            if self.size(name) > size:
                os.truncate(self.directory / name, size)
        except OSError as error:
            log.warning("an unused part of a snapshot cannot be removed: %s", error)

    def put(self, descriptor: int, content: Buffer) -> None:
        """Write all bytes to an open file, or raise once aborted.

        Each piece is synced before the next is written, so that an abort waits for one piece at most.
        """
        view = memoryview(content)
        while view:
            if self._aborted:
                raise OSError(errno.ECANCELED, "the engine ended before it was written")
            written = os.write(descriptor, view[:WRITE_BYTES])
            self.bytes_written += written
            view = view[written:]
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

    def size(self, name: str) -> int:
        """How many bytes a file has."""
        return (self.directory / name).stat().st_size

    def read(self, name: str, start: int = 0, end: int | None = None) -> memoryview:
        """The bytes of a file from `start` to `end`, or to its end."""
        with (self.directory / name).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            wanted = max(0, (size if end is None else min(size, end)) - start)
            content = torch.empty(wanted, dtype=torch.uint8).numpy().data
            done = file.seek(start) - start
            while done < wanted and (count := file.readinto(content[done:])):
                done += count
            return content[:done]

    def read_head(self, name: str, start: int = 0) -> bytes:
        """The header of the part that begins at `start`, after its length."""
        with (self.directory / name).open("rb") as file:
            file.seek(start)
            size = file.read(8)
            return size + file.read(min(int.from_bytes(size, "little"), HEADER_BYTES_MAX))

    def remove(self, name: str) -> None:
        """Remove a file if it exists. If that fails, a later engine removes it as an orphan."""
        try:
            remove_file(self.directory / name)
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


def encode(header: Header, tensors: Mapping[str, Tensor], after: int = 0) -> memoryview:
    """The bytes of a part with the units that a file of the first `after` tokens lacks."""
    described = {name: str(value) for name, value in asdict(header).items() if value != ""}
    follows = {"after": str(after)} if after else {}
    sums = {f"checksum {name}": str(_checksum(tensor)) for name, tensor in tensors.items()}
    return pack(tensors, {"format": FORMAT, **described, **follows, **sums})


def check_header(content: Buffer, expected: Header, after: int = 0) -> dict[str, str]:
    """The metadata of a part or of its beginning; `BadFile` unless it matches the expected header."""
    size = int.from_bytes(content[:8], "little")
    try:
        facts: dict[str, str] = dict(json.loads(bytes(content[8 : 8 + size]))["__metadata__"])
    except UNREADABLE as error:
        raise BadFile("the header cannot be read") from error
    wanted = {"format": FORMAT} | {name: str(value) for name, value in asdict(expected).items()}
    for name, value in (wanted | {"after": str(after or "")}).items():
        if facts.get(name, "") != value:
            raise BadFile(f"{name} does not match")
    return facts


def decode(content: memoryview, expected: Header, after: int = 0) -> dict[str, Tensor]:
    """The tensors of a part that matches the expected header and its checksums; `BadFile` otherwise."""
    facts = check_header(content, expected, after)
    try:
        tensors = unpack(content)
    except BadPack as error:
        raise BadFile("it is truncated or damaged") from error
    for name, tensor in tensors.items():
        if facts.get(f"checksum {name}") != str(_checksum(tensor)):
            raise BadFile(f"the checksum of {name} does not match")
    if len(tensors) != sum(name.startswith("checksum ") for name in facts):
        raise BadFile("a tensor is missing")
    return tensors


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(bytes_of(tensor).numpy().data) if tensor.numel() else 0


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
