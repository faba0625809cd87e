"""What one process has at a time, a journal or a directory: held until it is closed, or the process ends.

Used by the journal and by the disk tier's files.
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
    """Another process has it, and keeps it."""


def hold(descriptor: int, name: Path, patience: float) -> None:
    """Hold what is open here, after waiting so many seconds for another process that has it.

    Where that one keeps it, the descriptor is closed. Any other error is the file system's.
    """
    deadline = time.monotonic() + patience
    waited = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise InUse(f"{name} is in use by another process") from error
        if not waited:
            waited = True
            log.warning("another process has %s; waiting for it to end", name)
        time.sleep(POLL_SECONDS)
