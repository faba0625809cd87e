"""Turns of sessions whose clients may disconnect, so that a turn that follows a disconnect is not refused.

A session has one turn at a time: a second one gets 409. A client that closes its connection and takes the
next turn at once has ended the first turn, but the server may not have heard of it: the new turn comes on
another connection. So before a turn is refused, the clients of the turns before it are asked whether they are
still connected. A turn whose client is gone is ended, as it would have been a moment later, and the new one
starts.

A turn whose client is connected is never ended here. A disconnect may come a moment after the new turn
(packets of two connections, a proxy between): a conflict waits `GRACE_SECONDS` for it. Used by `service`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from holdfast.server.link.engine_client import TurnFeed

__all__ = ["Occupant", "Occupants", "Watched"]

GRACE_SECONDS = 0.05
"""How long a conflict waits for the disconnect of the client whose turn is in flight."""

LOOK_SECONDS = 0.005

START_SECONDS = 5.0
"""How long to wait for the start of a turn whose client has disconnected, to end it."""


class Watched(Protocol):
    """A client that may disconnect."""

    @property
    def gone(self) -> bool:
        """Whether it has disconnected."""


class Occupant:
    """A turn in flight on a session, from before its start; `client` is None if it outlives its client."""

    __slots__ = ("client", "feed", "known", "others", "session")

    def __init__(self, session: str, client: Watched | None, others: list[Occupant]) -> None:
        self.session = session
        self.client = client
        self.others = others
        """Turns of the session that were in flight at any time of its start: one of them refuses it."""
        self.feed: TurnFeed | None = None
        self.known = asyncio.Event()
        """Set when its start has succeeded or failed."""

    @property
    def gone(self) -> bool:
        """Whether its client has disconnected."""
        return self.client is not None and self.client.gone


class Occupants:
    """The turns in flight on all sessions."""

    def __init__(self, leave: Callable[[TurnFeed], None]) -> None:
        """`leave` ends a turn whose client has disconnected."""
        self._leave = leave
        self._of: dict[str, list[Occupant]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def enter(self, session: str, client: Watched | None) -> Occupant:
        """A turn is to be started; turns before it whose clients are gone are ended."""
        mine = self._of.setdefault(session, [])
        occupant = Occupant(session, client, list(mine))
        for other in mine:
            self._end_gone(other)
            if not other.known.is_set():
                other.others.append(occupant)
        mine.append(occupant)
        return occupant

    def started(self, occupant: Occupant, feed: TurnFeed) -> None:
        """The turn has started."""
        occupant.feed = feed
        occupant.known.set()
        if feed.over:
            self.remove(occupant)

    def remove(self, occupant: Occupant) -> None:
        """The turn is over, or did not start."""
        occupant.known.set()
        mine = self._of.get(occupant.session, [])
        if occupant in mine:
            mine.remove(occupant)
        if not mine:
            self._of.pop(occupant.session, None)

    def turn_ended(self, feed: TurnFeed) -> None:
        """A turn has had its end."""
        for occupant in list(self._of.get(feed.session or "", ())):
            if occupant.feed is feed:
                self.remove(occupant)

    async def vacated(self, occupant: Occupant) -> bool:
        """Whether a turn that may have refused this one has lost its client; it is ended."""
        if occupant.gone:
            return False  # Nobody waits for it; the turns that it waited for may wait for it.
        before, occupant.others = occupant.others, []
        loop = asyncio.get_running_loop()
        deadline = loop.time() + GRACE_SECONDS
        while not (gone := [other for other in before if other.gone]):
            if loop.time() >= deadline or all(other.client is None for other in before):
                return False
            await asyncio.sleep(LOOK_SECONDS)
        occupant.others += [other for other in before if other not in gone]
        for other in gone:
            try:
                await asyncio.wait_for(other.known.wait(), START_SECONDS)
            except TimeoutError:
                return False
            self._end_gone(other)
        return True

    def _end_gone(self, other: Occupant) -> None:
        if other.feed is not None and not other.feed.over and other.gone:
            self._leave(other.feed)
