"""The on-disk cache of kernels compiled on this machine.

Each file ends with a SHA-256 of its contents: a file that a full disk or a power cut truncated is a cache
miss. Loaders of shared objects and cubins ignore trailing bytes. Used by the C and CUDA packages.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DIGEST_BYTES = 32


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Of processes that start together, one compiles, and the others find its file.

    Where a file system has no locks, each compiles.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def keep(target: Path, image: bytes) -> None:
    """Write a compiled file atomically; raises OSError where it cannot be written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as place:
        made = Path(place) / target.name
        made.write_bytes(image + hashlib.sha256(image).digest())
        made.replace(target)


def kept(target: Path) -> bytes | None:
    """The cached file; None where it is missing or truncated."""
    try:
        data = target.read_bytes()
    except OSError:
        return None
    image, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    return image if hashlib.sha256(image).digest() == digest else None
