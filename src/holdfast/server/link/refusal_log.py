"""Log lines about connections that were refused: at most a few in a while, and then how many there were.

Anyone who reaches the port can cause them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["LINES_MAX", "WHILE_SECONDS", "RefusalLog"]

LINES_MAX = 10
WHILE_SECONDS = 10.0


class RefusalLog:
    """Writes refusals to a log."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._since = clock()
        self._told = 0

    def tell(self, why: str) -> None:
        """A connection was refused."""
        self.tick()
        self._told += 1
        if self._told <= LINES_MAX:
            self._log.warning("a link was refused: %s", why)

    def tick(self) -> None:
        """Say how many were left out, once the while is over."""
        now = self._clock()
        if now - self._since < WHILE_SECONDS:
            return
        if self._told > LINES_MAX:
            self._log.warning("%d more links were refused", self._told - LINES_MAX)
        self._since, self._told = now, 0
