"""A private directory for the engine's socket, and the removal of directories that killed servers left.

Each directory holds a file that its server keeps locked; the operating system releases the lock however the
process ends. So a directory whose lock is free is abandoned. The file gets its name after it was locked, so
that the directory of a server that is just starting never looks abandoned. Used by the supervisor alone.
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
    """A directory that only this user may enter; removed with this process, or at the next start."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        fresh = self.path / f"{LOCK}.new"
        self._lock = os.open(fresh, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self.path / LOCK)
        remove_abandoned(self.path.parent)

    def remove(self) -> None:
        """Remove the directory and its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned(parent: Path) -> None:
    """Remove directories in `parent` whose servers have died."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # Removed by another server, or not complete yet.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # Its server is running.
        else:
            shutil.rmtree(path, ignore_errors=True)
            log.info("removed the directory of a killed server", extra={"fields": {"path": str(path)}})
        finally:
            os.close(lock)
