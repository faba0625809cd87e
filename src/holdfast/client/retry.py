"""When a call is sent again, and how long to wait before it.

Every call that changes something carries an id of its own, so the server applies it once however often it
arrives: all calls may be repeated. What is worth repeating is a connection that failed, 429 and 503.
`Attempts` counts for one call; it decides, and never sleeps: the callers do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from holdfast.client.errors import (
    BadArgument,
    Conflict,
    ConnectionFailed,
    HoldfastError,
    RequestFailed,
    TooManyRequests,
    Unavailable,
)

__all__ = ["Attempts", "Retries"]

BUSY = frozenset({"session_busy", "turn_exists"})
"""Codes of a conflict with one's own earlier attempt, which the server has not seen the end of yet."""


@dataclass(frozen=True, slots=True)
class Retries:
    """How patient a client is: attempts in all, the first wait, and the longest one."""

    attempts: int = 8
    first_seconds: float = 0.25
    longest_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0.0 <= self.first_seconds <= self.longest_seconds:
            raise BadArgument("attempts must be at least 1 and 0 <= first_seconds <= longest_seconds")

    def pause(self, failures: int, retry_after: float | None, chance: float) -> float:
        """Seconds to wait after so many failures: doubling, jittered, and what the server asks for."""
        assert failures >= 1 and 0.0 <= chance <= 1.0
        doubled = min(self.longest_seconds, self.first_seconds * 2.0 ** min(failures - 1, 30))
        jittered = doubled * (0.5 + 0.5 * chance)
        return min(self.longest_seconds, max(jittered, retry_after or 0.0))


class Attempts:
    """The attempts at one call."""

    __slots__ = ("failures", "lost", "retries")

    def __init__(self, retries: Retries) -> None:
        self.retries = retries
        self.failures = 0
        self.lost = False
        """Whether an attempt may have reached the server without its answer reaching us."""

    def after(self, error: HoldfastError) -> float:
        """Seconds to wait before the next attempt; raises the error where another one is no use."""
        self.failures += 1
        if self.failures >= self.retries.attempts or not self._passing(error):
            raise error
        self.lost = self.lost or isinstance(error, ConnectionFailed)
        wished = error.retry_after if isinstance(error, TooManyRequests | Unavailable) else None
        return self.retries.pause(self.failures, wished, random.random())

    def carried_out(self, error: HoldfastError, codes: tuple[str, ...]) -> bool:
        """Whether a refusal says that an attempt whose answer was lost has been carried out."""
        return self.lost and isinstance(error, RequestFailed) and error.code in codes

    def progress(self) -> None:
        """The server has said something new: patience begins anew."""
        self.failures = 0

    def _passing(self, error: HoldfastError) -> bool:
        if isinstance(error, Conflict):
            return self.lost and error.code in BUSY
        return isinstance(error, ConnectionFailed | TooManyRequests | Unavailable)
