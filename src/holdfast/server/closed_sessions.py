"""The text of hidden sessions that were closed for room, so that a dialect can render them anew.

A hidden session closed for another (`hidden_sessions`) loses its history on the engine and in the
journal. The inputs and answers of its turns are kept here, in this process, up to a number of characters per
tenant; the oldest closed sessions are discarded first. A response of such a session can be
retrieved, and one that continues it begins with its items in a new session. Used by `service` and by
the store of responses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.server.link import wire

__all__ = ["KEPT_MAX", "ClosedSession", "ClosedSessions"]

KEPT_MAX = 64 << 20
"""Characters that are kept for a tenant's closed sessions."""
TURN_SIZE = 1024
"""What a turn counts for beside its texts."""


@dataclass(slots=True)
class ClosedSession:
    """The rest of a session: its metadata, and its turns with notes."""

    tenant: str
    name: str
    metadata: dict[str, Any]
    turns: list[wire.NotedTurn]
    size: int = field(init=False)
    """About how many characters it takes."""

    def __post_init__(self) -> None:
        described = len(msgspec.json.encode(self.metadata)) if self.metadata else 0
        self.size = described + sum(map(_size_of, self.turns))


class ClosedSessions:
    """The closed sessions of all tenants, at most `most` characters for each."""

    def __init__(self, most: int = KEPT_MAX) -> None:
        self._most = most
        self._tenants: dict[str, OrderedDict[str, ClosedSession]] = {}
        self._sizes: dict[str, int] = {}

    def keep(self, tenant: str, name: str, metadata: dict[str, Any], turns: Sequence[wire.NotedTurn]) -> None:
        """Keep what is left of a session; the oldest make room. One that is too large is not kept."""
        closed = ClosedSession(tenant, name, metadata, list(turns))
        if not turns or closed.size > self._most:
            return
        mine = self._tenants.setdefault(tenant, OrderedDict())
        if name in mine:
            self.forget(mine[name])
        mine[name] = closed
        self._sizes[tenant] = self._sizes.get(tenant, 0) + closed.size
        while self._sizes[tenant] > self._most:
            self.forget(next(iter(mine.values())))

    def find(self, tenant: str, name: str) -> ClosedSession | None:
        """The kept data of a session, or None."""
        return self._tenants.get(tenant, OrderedDict()).get(name)

    def forget(self, closed: ClosedSession) -> None:
        """Keep nothing of a session any more."""
        del self._tenants[closed.tenant][closed.name]
        self._sizes[closed.tenant] -= closed.size


def _size_of(turn: wire.NotedTurn) -> int:
    size = TURN_SIZE + len(turn.note) + 2 * len(turn.text)
    if turn.answer is not None:
        calls = sum(len(call.name) + len(call.arguments) for call in turn.answer.calls)
        size += len(turn.answer.reasoning) + calls
    return size
