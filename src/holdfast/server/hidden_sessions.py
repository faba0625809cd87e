"""Which hidden session gives way when the server has no room for one more session.

Sessions that a dialect keeps for its clients (responses, conversations) count towards `--max-sessions`. No
client has named them, so they give way to any session that is opened: the longest idle one of the tenant that
asks, then that of a tenant that has more than its share, the largest first. A tenant's share is the same part
of all sessions for every tenant that has some. A session with a response in flight is `busy` and stays. What
those that gave way have said is `closed` for a while. Memory that is short closes no session: it is spilled,
or computed again. Used by `service` and by the stores of responses and conversations.
"""

from __future__ import annotations

from holdfast.server.closed_sessions import ClosedSessions
from holdfast.server.sessions import SessionRecord, SessionTable

__all__ = ["Claim", "HiddenSessions"]

Claim = tuple[str, str]
"""The tenant and the name of a session."""


class HiddenSessions:
    """The hidden sessions of all tenants, and which of them are in use."""

    def __init__(self, table: SessionTable) -> None:
        self._table = table
        self.busy: set[Claim] = set()
        self.closed = ClosedSessions()

    def oldest(self, tenant: str) -> SessionRecord | None:
        """The hidden session of a tenant that was not used for longest; None if all are in use."""
        idle = (each for each in self._table.hidden_of(tenant) if (tenant, each.name) not in self.busy)
        return next(idle, None)

    def victim(self, tenant: str) -> SessionRecord | None:
        """The hidden session that gives way to one of this tenant's; None if there is none."""
        own = self.oldest(tenant)
        if own is not None:
            return own
        held = self._table.counts()
        share = sum(held.values()) / max(1, len(held.keys() | {tenant}))
        larger = sorted((each for each in held if held[each] > share), key=lambda each: -held[each])
        found = (self.oldest(each) for each in larger)
        return next((each for each in found if each is not None), None)
