"""Files of another engine on this machine, which need no network: the kernel copies them.

The sender names an open descriptor of its own (`name_local`). The receiver opens the same file through
`/proc` (`open_local`), if it is on the same machine and may: device, inode and owner must match, so that in
another container, where process numbers mean other processes, nothing else is opened. Then the kernel copies
the bytes, or shares them where the file system can. Used by `snapshot_sender` and `snapshot_receiver`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.server.link import wire

__all__ = ["FileEnded", "copy_file", "name_local", "open_local"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""A random number of the running kernel: the same for all containers of a machine."""

COPY_BYTES = 4 << 20
"""Bytes that the kernel copies at a time."""

CANNOT_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of `copy_file_range` between file systems that cannot do it."""


class FileEnded(RuntimeError):
    """A file is shorter than it was said to be."""


def _machine() -> str:
    """The identity of this machine; empty where it has none."""
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""


def name_local(descriptor: int) -> wire.LocalFile | None:
    """The name by which other processes of this machine find an open file; None if it has none."""
    machine = _machine()
    if not machine:
        return None
    found = os.fstat(descriptor)
    return wire.LocalFile(machine, os.getpid(), descriptor, found.st_dev, found.st_ino)


def open_local(file: wire.LocalFile, size: int) -> int | None:
    """A descriptor of a file of at least `size` bytes; None if this process cannot or must not open it."""
    if not file.machine or file.machine != _machine():
        return None
    path = f"/proc/{file.process}/fd/{file.descriptor}"
    try:
        if not _is_meant(os.stat(path), file, size):  # noqa: PTH116
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    if _is_meant(os.fstat(descriptor), file, size):
        return descriptor
    os.close(descriptor)
    return None


def _is_meant(found: os.stat_result, file: wire.LocalFile, size: int) -> bool:
    """Whether what was found is the sender's file, and a file of this user."""
    is_same = (found.st_dev, found.st_ino) == (file.device, file.inode)
    return is_same and stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_size >= size


def copy_file(source: int, target: int, size: int, copied: Callable[[int], None]) -> None:
    """Append the first `size` bytes of a file to another; `copied` hears of each piece, and may raise."""
    done = 0
    while done < size:
        count = _copy_piece(source, target, done, min(COPY_BYTES, size - done))
        if not count:
            raise FileEnded(f"it ended after {done} bytes of {size}")
        done += count
        copied(done)


def _copy_piece(source: int, target: int, place: int, count: int) -> int:
    try:
        return os.copy_file_range(source, target, count, place)
    except OSError as error:
        if error.errno not in CANNOT_COPY:
            raise
    return os.sendfile(target, source, place, count)
