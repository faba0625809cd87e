"""The latest events of a cluster that an API process has seen, for its operator."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

__all__ = ["ClusterEvents"]

EVENTS_KEPT = 512


class ClusterEvents:
    """Events, oldest first: engines that come, go and drain, sessions that are taken over and moved."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)

    def add(self, event: str, engine: str, **more: Any) -> None:
        """Something has happened."""
        self._events.append({"at": round(time.time(), 3), "event": event, "engine": engine, **more})

    def all(self) -> list[dict[str, Any]]:
        """All that are kept."""
        return list(self._events)
