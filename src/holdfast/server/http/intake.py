"""How many bytes of request bodies are in memory before their requests are whole.

A body counts from its first byte until its last, or until its request is over; one that would go beyond the
bound of all, or of its tenant, is refused. So clients that send long bodies and never end them take a bounded
part of memory, and one tenant's cannot keep the others' out. Used by the gate alone.
"""

from __future__ import annotations

from collections import Counter

from holdfast.server.http.problems import Problem

__all__ = ["Intake"]


class Intake:
    """Bytes in unfinished bodies, of all tenants and of each."""

    def __init__(self, limit: int, tenant_limit: int) -> None:
        self.limit = limit
        self.tenant_limit = tenant_limit
        self.total = 0
        self._tenants: Counter[str] = Counter()

    def take(self, tenant: str, count: int) -> None:
        """More of a body has come; raises, and counts nothing, where there is no room for it."""
        if self.total + count > self.limit or self._tenants[tenant] + count > self.tenant_limit:
            raise Problem(
                429,
                "too_many_bodies",
                f"the bodies that are being received are longer than {self.limit} bytes for all callers or "
                f"{self.tenant_limit} for this one; send fewer at a time",
            )
        self.total += count
        self._tenants[tenant] += count

    def give_back(self, tenant: str, count: int) -> None:
        """A body is whole, or its request is over."""
        self.total -= count
        self._tenants[tenant] -= count
        assert self.total >= 0 and self._tenants[tenant] >= 0, "more was given back than taken"
        if not self._tenants[tenant]:
            del self._tenants[tenant]
