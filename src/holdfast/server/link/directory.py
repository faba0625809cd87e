"""Which engine has a session.

`Directory` is what the rest of the API process uses. `AskedDirectory` keeps what the engines themselves say:
all their sessions when a link is made, and each one that is opened later. A session that it does not know is
asked for at all engines, so an API process serves sessions that it has never heard of.

This is no ownership: two engines may each have a session of one name if it was opened at both while an API
process could not reach one of them. The first that was heard of counts, and the log says so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from holdfast.server.link import wire

__all__ = ["AskedDirectory", "Directory"]


class Directory(Protocol):
    """The owners of sessions; an engine is named by its address."""

    def owner(self, session: str) -> str | None:
        """The engine that has a session, as far as is known without asking."""

    def note(self, session: str, engine: str) -> None:
        """An engine has a session."""

    def forget(self, session: str) -> None:
        """A session has ended."""

    def owned(self, engine: str) -> frozenset[str]:
        """All sessions that an engine is known to have."""

    async def look_up(self, session: str) -> tuple[str, wire.StoredSession] | None:
        """Ask which engine has a session; None if none that can be reached."""


class AskedDirectory:
    """A directory of what the engines say."""

    def __init__(self, ask: Callable[[str], Awaitable[tuple[str, wire.StoredSession] | None]]) -> None:
        """`ask` asks all engines for a session."""
        self._ask = ask
        self._owners: dict[str, str] = {}
        self._owned: dict[str, set[str]] = {}

    def owner(self, session: str) -> str | None:
        """The engine that has a session, as far as is known without asking."""
        return self._owners.get(session)

    def note(self, session: str, engine: str) -> None:
        """An engine has a session."""
        self.forget(session)
        self._owners[session] = engine
        self._owned.setdefault(engine, set()).add(session)

    def forget(self, session: str) -> None:
        """A session has ended."""
        engine = self._owners.pop(session, None)
        if engine is not None:
            self._owned[engine].discard(session)

    def owned(self, engine: str) -> frozenset[str]:
        """All sessions that an engine is known to have."""
        return frozenset(self._owned.get(engine, ()))

    async def look_up(self, session: str) -> tuple[str, wire.StoredSession] | None:
        """Ask which engine has a session; None if none that can be reached."""
        found = await self._ask(session)
        if found is not None:
            self.note(session, found[0])
        return found
