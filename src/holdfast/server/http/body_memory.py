"""Memory for request bodies that are still being received, bounded for all callers and for each tenant.

A body counts from its first byte to its last, or to the end of its request; one over a bound is rejected. So
slow uploads take bounded memory, and one tenant cannot exhaust it for the others. Used by the middleware.
"""

from __future__ import annotations

from collections import Counter

from holdfast.server.http.problems import Problem

__all__ = ["BodyMemory"]


class BodyMemory:
    """Bytes of unfinished bodies, in total and by tenant."""

    def __init__(self, limit: int, tenant_limit: int) -> None:
        self.limit = limit
        self.tenant_limit = tenant_limit
        self.total = 0
        self._tenants: Counter[str] = Counter()

    def take(self, tenant: str, count: int) -> None:
        """Count received bytes; raises, and counts nothing, over a bound."""
        if self.total + count > self.limit or self._tenants[tenant] + count > self.tenant_limit:
            raise Problem(
                429,
                "too_many_bodies",
                f"bodies being received exceed {self.limit} bytes for all callers or {self.tenant_limit} for "
                "this key; send fewer at a time",
            )
        self.total += count
        self._tenants[tenant] += count

    def give_back(self, tenant: str, count: int) -> None:
        """A body is complete, or its request has ended."""
        self.total -= count
        self._tenants[tenant] -= count
        assert self.total >= 0 and self._tenants[tenant] >= 0, "more was given back than taken"
        if not self._tenants[tenant]:
            del self._tenants[tenant]
