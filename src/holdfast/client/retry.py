"""Retries: which errors are retried, and the backoff between attempts.

Every call with side effects carries an idempotency key, so all calls may be retried. Failed connections, 429
and 503 are. `Attempts` counts the attempts of one call and decides; its callers sleep.
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
"""Codes of a conflict with an earlier attempt that the server is still working on."""


@dataclass(frozen=True, slots=True)
class Retries:
    """Retry policy: total attempts, first and longest delay in seconds."""

    attempts: int = 8
    first_seconds: float = 0.25
    longest_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0.0 <= self.first_seconds <= self.longest_seconds:
            raise BadArgument("attempts must be at least 1 and 0 <= first_seconds <= longest_seconds")

    def pause(self, failures: int, retry_after: float | None, chance: float) -> float:
        """Delay after `failures`: exponential backoff with jitter, at least `retry_after`."""
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
        """Whether an attempt may have been carried out although its answer was lost."""

    def after(self, error: HoldfastError) -> float:
        """Seconds to wait before the next attempt; raises the error if it is not retried."""
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
        """New data has arrived: reset the count of failures."""
        self.failures = 0

    def _passing(self, error: HoldfastError) -> bool:
        if isinstance(error, Conflict):
            return self.lost and error.code in BUSY
        return isinstance(error, ConnectionFailed | TooManyRequests | Unavailable)
