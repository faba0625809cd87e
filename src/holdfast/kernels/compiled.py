"""Kernels that were compiled on this machine, kept for the next start.

A kept file ends with a digest of what is before it: one that a full disk or a power cut left half written
counts as not there. Programs that load such files take no notice of bytes behind their end.
Used by the packages of C and CUDA kernels.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

_DIGEST_BYTES = 32


def kernel_directory() -> Path:
    """`kernels` in $HOLDFAST_CACHE, or in the user's cache directory: beside the models that are fetched."""
    chosen = os.environ.get("HOLDFAST_CACHE")
    if chosen:
        return Path(chosen).expanduser() / "kernels"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "holdfast" / "kernels"


def keep(target: Path, image: bytes) -> None:
    """Write a compiled file, whole or not at all; an OSError where it cannot be written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as place:
        made = Path(place) / target.name
        made.write_bytes(image + hashlib.sha256(image).digest())
        made.replace(target)


def kept(target: Path) -> bytes | None:
    """What was kept there; None where nothing is, or not all of it."""
    try:
        data = target.read_bytes()
    except OSError:
        return None
    image, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    return image if hashlib.sha256(image).digest() == digest else None
