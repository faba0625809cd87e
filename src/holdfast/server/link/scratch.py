"""A private directory for the engine's socket, and the removal of those that killed servers left behind.

Each directory holds a file that its server keeps locked; the system lets go of the lock however the process
ends. So a directory whose lock can be taken belongs to nobody. The file gets its name after it was locked: no
directory of a server that is just starting looks abandoned. Used by the supervisor alone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

__all__ = ["Scratch"]

log = logging.getLogger("holdfast.server")

PREFIX = "holdfast-"
LOCK = "lock"


class Scratch:
    """A directory that only this user may enter; it goes with this process, or with the next start."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        fresh = self.path / f"{LOCK}.new"
        self._lock = os.open(fresh, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self.path / LOCK)
        remove_abandoned(self.path.parent)

    def remove(self) -> None:
        """Remove the directory with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the directories there whose servers have died."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # Another server has removed it, or has not finished making it.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # Its server lives.
        else:
            shutil.rmtree(path, ignore_errors=True)
            log.info("removed a directory that a killed server left", extra={"fields": {"path": str(path)}})
        finally:
            os.close(lock)
