"""Exclusive locks on the journal and on the directory of snapshots: one process at a time has each.

A lock is `flock` on an open descriptor, so the kernel releases it when the process dies. The package
`filelock` is not used: its import costs 32 ms, it needs a lock file in a directory, and without `flock` it
falls back to lock files that outlive a killed process (decision 19).
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

log = logging.getLogger("holdfast.lock")

POLL_SECONDS = 0.05


class InUse(RuntimeError):
    """Another process holds the lock."""


def lock(descriptor: int, path: Path, timeout: float) -> None:
    """Lock an open file or directory, waiting up to `timeout` seconds for another process.

    Raises `InUse` and closes the descriptor when time is up. Any other error is the file system's.
    """
    deadline = time.monotonic() + timeout
    waited = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise InUse(f"{path} is in use by another process") from error
        if not waited:
            waited = True
            log.warning("%s is in use by another process; waiting up to %g s for it", path, timeout)
        time.sleep(POLL_SECONDS)
