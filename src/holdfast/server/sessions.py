"""The sessions that the API process knows of: names by tenant, and what writing their next turn needs.

The engine holds the sessions. Here is a mirror of each: how long its history is and how it ends, so that a
turn can be written without asking first; the engine refuses one that was written for another history. Names
are a tenant's own: two tenants may use the same. One-shot requests have names that no session can have.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.server import wire
from holdfast.server.problems import Problem, bad_field
from holdfast.server.seeds import SeedSequence

__all__ = ["SessionRecord", "SessionTable", "engine_name", "request_name", "require_name"]

NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9_.-]{1,128}")
GONE_KEPT = 16_384
GONE = {
    "closed": (404, "session_not_found", "the session is closed"),
    "expired": (410, "session_expired", "the session was closed after its time to live"),
    "lost": (410, "session_lost", "the session was lost when the engine was restarted; open it again"),
}
"""Why a session is no more, and what a caller who names it is told."""


def require_name(name: str, param: str) -> str:
    """A name that may be used, in the path of an address too; raises a problem that does not repeat it."""
    if not NAME.fullmatch(name):
        needed = "must be 1 to 128 of the characters A-Z, a-z, 0-9, _, . and -, and not . or .. alone"
        raise bad_field(param, needed, "bad_name")
    return name


def engine_name(tenant: str, name: str) -> str:
    """What the engine calls a tenant's session."""
    return f"{tenant}/{name}"


def request_name(tenant: str, rid: str) -> str:
    """What the engine calls a request of its own; no session has such a name."""
    return f"{tenant}#{rid}"


@dataclass(slots=True)
class SessionRecord:
    """One session, as far as the doors need to know it."""

    tenant: str
    name: str
    view: wire.SessionView
    seeds: SeedSequence
    """Where its turns that bring no seed get theirs from."""
    system: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=time.time)


class SessionTable:
    """All open sessions, by the engine's names."""

    def __init__(self) -> None:
        self._records: dict[str, SessionRecord] = {}
        self._gone: dict[str, str] = {}
        self._opening: list[str] = []
        self.on_removed: Callable[[str, str], None] = _nobody

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: SessionRecord) -> None:
        """A session was opened."""
        name = engine_name(record.tenant, record.name)
        self._gone.pop(name, None)
        self._records[name] = record

    def opening(self, tenant: str, name: str) -> Callable[[], None]:
        """The engine is asked for a session: its name is taken, and it counts.

        What is returned ends that, to be called when the engine has answered, whoever waits for it still.
        """
        key = engine_name(tenant, name)
        self._opening.append(key)
        return lambda: self._opening.remove(key)

    def is_taken(self, tenant: str, name: str) -> bool:
        """Whether a session of that name is open, or being opened."""
        key = engine_name(tenant, name)
        return key in self._records or key in self._opening

    def count(self, tenant: str) -> int:
        """How many sessions a tenant has, those included that are being opened."""
        opening = {key for key in self._opening if key not in self._records}
        return len(self.of(tenant)) + sum(key.startswith(f"{tenant}/") for key in opening)

    def find(self, tenant: str, name: str) -> SessionRecord:
        """A tenant's session, or the problem that says why there is none."""
        require_name(name, "session_id")
        record = self._records.get(engine_name(tenant, name))
        if record is None:
            raise self.absence(tenant, name)
        return record

    def absence(self, tenant: str, name: str) -> Problem:
        """What a caller is told of a session that is not there: why it is no more, if it was."""
        why = self._gone.get(engine_name(tenant, name))
        if why is not None:
            return Problem(*GONE[why], "session_id")
        return Problem(404, "session_not_found", "there is no such session", "session_id")

    def get(self, tenant: str, name: str) -> SessionRecord | None:
        """A tenant's session, if it is open."""
        return self._records.get(engine_name(tenant, name))

    def has_gone(self, tenant: str, name: str) -> bool:
        """Whether a session of that name was there before."""
        return engine_name(tenant, name) in self._gone

    def of(self, tenant: str) -> list[SessionRecord]:
        """All sessions of a tenant."""
        return [record for record in self._records.values() if record.tenant == tenant]

    def seen(self, view: wire.SessionView) -> None:
        """The engine says how a session stands."""
        record = self._records.get(view.name)
        if record is not None:
            record.view = view

    def remove(self, key: str, why: str) -> None:
        """A session is no more; callers are told why for a while."""
        assert why in GONE, "a reason that clients can be told"
        if self._records.pop(key, None) is not None:
            self._gone[key] = why
            while len(self._gone) > GONE_KEPT:
                del self._gone[next(iter(self._gone))]
            self.on_removed(key, why)

    def lose_all(self, kept: set[str]) -> None:
        """The engine was restarted: what did not come back is lost."""
        for key in [key for key in self._records if key not in kept]:
            self.remove(key, "lost")


def new_name(prefix: str) -> str:
    """A fresh name that nobody can guess."""
    return f"{prefix}-{secrets.token_hex(8)}"


def _nobody(_key: str, _why: str) -> None:
    """Nobody listens."""
