"""Retention: how long an idle session stays open, and how long its memory stays on the device.

A value of the session, set when it is opened and changed by `Scheduler.retain`; a fork inherits it. Rules of
eviction (`pressure`):

    rank    sessions without a pin are evicted before pinned ones; of each, the lowest priority first
    limit   a tenant's pins count up to a fraction of its share of the device (`Policy.pinned_share`); a
            pinned session beyond it is evicted like any other
    promise a pin reserves nothing: pinned sessions are evicted before a turn is refused or retracted
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["DEFAULT", "PRIORITY_MAX", "Retention"]

PRIORITY_MAX = 4
"""The highest priority; the lowest is its negative."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How a session is kept. `ttl` is in seconds of idleness, None for the server's default."""

    ttl: float | None = None
    pinned: bool = False
    priority: int = 0

    def with_default(self, ttl: float) -> Retention:
        """The same with a time to live, if it has none."""
        return self if self.ttl is not None else replace(self, ttl=ttl)


DEFAULT = Retention()
