"""Gives large files and buffers back to the system in a thread of its own: that takes long.

The system frees the pages of a removed file, or of a buffer, one by one: some 10 ms for 100 MB, and a step of
the engine waits as long if its loop does it. Used by the disk tier's files and its reader.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

__all__ = ["release_tensors", "remove_file"]

LARGE_BYTES = 8 << 20
"""What has less is released at once."""


def release_tensors(tensors: dict[str, list[Tensor]]) -> None:
    """Empty a dictionary of tensors that nothing else refers to."""
    _release(tensors.clear, sum(tensor.nbytes for rows in tensors.values() for tensor in rows))


def remove_file(path: Path) -> None:
    """Remove a file if it exists: its name at once, its content soon."""
    descriptor: int | None = None
    with suppress(OSError):  # It is removed without, or that tells why it cannot be.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        path.unlink(missing_ok=True)
    finally:
        if descriptor is not None:
            opened = descriptor
            _release(lambda: os.close(opened), os.fstat(opened).st_size)


def _release(act: Callable[[], None], size: int) -> None:
    if size < LARGE_BYTES:
        act()
        return
    try:
        threading.Thread(target=act, name="holdfast-release", daemon=True).start()
    except RuntimeError:  # The system has no thread for it.
        act()
