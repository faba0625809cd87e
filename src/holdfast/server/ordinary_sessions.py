"""SGLang's ordinary sessions: trees of requests that the API process keeps, without memory on the engine.

Each request of such a session is a one-shot request with the tokens of its ancestors in front (see
`branching`); the prefix tree makes that cheap. A session's idle time counts from the end of its last request.
Streaming sessions are the engine's and are in `SessionTable`. Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from holdfast.server.branching import BranchingSession
from holdfast.server.sessions import GONE

__all__ = ["Branches", "OrdinarySessions"]

SESSION_TOKENS_MAX = 1 << 21
"""Tokens that the requests of one ordinary session may hold; each holds those of all its ancestors."""

GONE_KEPT = 4096


@dataclass(slots=True, eq=False)
class Branches:
    """One ordinary session."""

    tenant: str
    name: str
    ttl: float
    tree: BranchingSession = field(default_factory=lambda: BranchingSession(SESSION_TOKENS_MAX))
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from the moment a request is composed until it is in the tree."""
    used: float = field(default_factory=time.monotonic)
    running: int = 0
    closed: bool = False

    @property
    def expired(self) -> bool:
        """Whether its idle time is over."""
        return not self.running and not self.lock.locked() and time.monotonic() - self.used > self.ttl


class OrdinarySessions:
    """All ordinary sessions by tenant and name, and why recent ones ended."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[str, str], Branches] = {}
        self._gone: dict[tuple[str, str], str] = {}

    def add(self, tenant: str, name: str, ttl: float) -> None:
        """Open a session; its name must be free."""
        key = (tenant, name)
        assert key not in self._sessions, "the name is taken"
        self._gone.pop(key, None)
        self._sessions[key] = Branches(tenant, name, ttl)

    def count(self, tenant: str) -> int:
        """How many sessions a tenant has; expired ones are removed first."""
        for branches in [each for each in self._sessions.values() if each.expired]:
            self.remove(branches, "expired")
        return sum(owner == tenant for owner, _ in self._sessions)

    def tokens(self, tenant: str) -> int:
        """How many tokens a tenant's sessions hold."""
        return sum(each.tree.held for (owner, _), each in self._sessions.items() if owner == tenant)

    def find(self, tenant: str, name: str) -> Branches | None:
        """An open session; None if there is none."""
        branches = self._sessions.get((tenant, name))
        if branches is not None and branches.expired:
            self.remove(branches, "expired")
            return None
        return branches

    def gone(self, tenant: str, name: str) -> str | None:
        """Why a session of that name ended, a key of `sessions.GONE`."""
        return self._gone.get((tenant, name))

    def remove(self, branches: Branches, why: str) -> None:
        """End a session."""
        assert why in GONE, "a reason that clients can be told"
        branches.closed = True
        key = (branches.tenant, branches.name)
        del self._sessions[key]
        self._gone[key] = why
        while len(self._gone) > GONE_KEPT:
            del self._gone[next(iter(self._gone))]
