"""The session table of the API process: names by tenant, and the state needed to write the next turn.

The engine holds the sessions. This is a mirror of each: the length of its history and its last token, so that
a turn can be tokenised without asking first; the engine rejects a turn written for another history. Names are
per tenant. One-shot requests have names that no session can have.
"""

from __future__ import annotations

import re
import secrets
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.server.http.problems import Problem, bad_field
from holdfast.server.link import wire
from holdfast.server.link.engine_client import GiveUp
from holdfast.server.seeds import SeedSequence

__all__ = [
    "SessionRecord",
    "SessionTable",
    "engine_name",
    "found_name",
    "hidden_name",
    "is_hidden",
    "is_name",
    "request_name",
    "require_name",
    "shown_name",
]

NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9_.-]{1,128}")
HIDDEN = "~"
"""The first character of the names of hidden sessions."""
GONE_KEPT = 16_384
GONE = {
    "closed": (404, "session_not_found", "the session is closed"),
    "expired": (410, "session_expired", "the session was closed after its time to live"),
    "moved": (503, "session_moved", "the session belongs to another server now; send the request again"),
    "lost": (410, "session_lost", "the session was lost when the engine was restarted; open it again"),
}
"""Why a session ended, and the error for callers who name it."""


def is_name(name: str) -> bool:
    """Whether a session or a turn may have a name."""
    return NAME.fullmatch(name) is not None


def require_name(name: str, param: str) -> str:
    """A valid name, safe in URL paths; raises a problem that does not repeat it."""
    if not is_name(name):
        needed = "must be 1 to 128 of the characters A-Z, a-z, 0-9, _, . and -, and not . or .. alone"
        raise bad_field(param, needed, "bad_name")
    return name


def hidden_name(key: str) -> str:
    """The name of a session that a dialect keeps for a client; clients neither see nor use such names."""
    return HIDDEN + key


def is_hidden(name: str) -> bool:
    """Whether a session's name is one of a dialect's own."""
    return name.startswith(HIDDEN)


def engine_name(tenant: str, name: str) -> str:
    """The engine's name of a tenant's session."""
    return f"{tenant}/{name}"


def request_name(tenant: str, rid: str) -> str:
    """The engine's name of a one-shot request; no session has such a name."""
    return f"{tenant}#{rid}"


def found_name(tenant: str) -> str:
    """An engine's name for the session of a conversation that is sent whole; clients can name no such one."""
    return f"{tenant}~{secrets.token_hex(8)}"


@dataclass(slots=True)
class SessionRecord:
    """One session as the routes see it."""

    tenant: str
    name: str
    view: wire.SessionView
    seeds: SeedSequence
    """Seeds for its turns without one."""
    system: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=time.time)
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools that its history describes, or that its first turn will; in OpenAI's form."""


class Holding:
    """The sessions of one tenant in the order of opening, and those being opened."""

    __slots__ = ("hidden", "names", "numbers", "opening", "order", "unopened")

    def __init__(self) -> None:
        self.numbers = 0
        self.order: list[int] = []
        """The numbers of open sessions, ascending."""
        self.names: dict[int, str] = {}
        self.opening: Counter[str] = Counter()
        """How many requests ask the engine for a session of each name."""
        self.unopened = 0
        """How many of these names have no open session."""
        self.hidden: dict[str, SessionRecord] = {}
        """Hidden sessions by name, in the order of their last use."""


class SessionTable:
    """All open sessions by engine name. The cost of a lookup does not depend on other tenants."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[int, SessionRecord]] = {}
        self._holdings: dict[str, Holding] = {}
        self._gone: dict[str, str] = {}
        self._removed: list[Callable[[str, str], None]] = []
        self._taken_up: list[Callable[[str, GiveUp], None]] = []
        self._leave: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: SessionRecord) -> None:
        """A session was opened, or came back with a restarted engine."""
        key = engine_name(record.tenant, record.name)
        self._gone.pop(key, None)
        holding = self._holding(record.tenant)
        if is_hidden(record.name):
            holding.hidden[record.name] = record
            self._records[key] = (0, record)
            return
        if key in self._records:
            number = self._records[key][0]
        else:
            holding.numbers += 1
            number = holding.numbers
            holding.order.append(number)
            holding.names[number] = key
            holding.unopened -= holding.opening[record.name] > 0
        self._records[key] = (number, record)

    def restore(self, stored: wire.StoredSession, seeds: SeedSequence) -> None:
        """A session came back with a restarted engine."""
        record = SessionRecord(stored.tenant, stored.view.name.partition("/")[2], stored.view, seeds)
        record.created = stored.created
        self._update(record, stored)
        self.add(record)

    def changed(self, stored: wire.StoredSession) -> bool:
        """Another API process has changed a session; False if it is not known here."""
        known = self.get(stored.tenant, stored.view.name.partition("/")[2])
        if known is not None:
            self._update(known, stored)
        return known is not None

    def _update(self, record: SessionRecord, stored: wire.StoredSession) -> None:
        record.view, record.system = stored.view, stored.system
        record.metadata, record.tools = stored.metadata, stored.tools

    def _holding(self, tenant: str) -> Holding:
        holding = self._holdings.get(tenant)
        if holding is None:
            holding = self._holdings[tenant] = Holding()
        return holding

    def hidden_of(self, tenant: str) -> list[SessionRecord]:
        """The hidden sessions of a tenant, least recently used first."""
        holding = self._holdings.get(tenant)
        return [] if holding is None else list(holding.hidden.values())

    def count_hidden(self, tenant: str) -> int:
        """How many hidden sessions a tenant has."""
        holding = self._holdings.get(tenant)
        return 0 if holding is None else len(holding.hidden)

    def counts(self) -> dict[str, int]:
        """How many sessions each tenant that has some has open, hidden ones included."""
        counted = {name: len(each.order) + len(each.hidden) for name, each in self._holdings.items()}
        return {tenant: count for tenant, count in counted.items() if count}

    def use_hidden(self, record: SessionRecord) -> None:
        """A hidden session is used: it is the last of its tenant's to be closed."""
        hidden = self._holding(record.tenant).hidden
        if hidden.pop(record.name, None) is not None:
            hidden[record.name] = record

    def opening(self, tenant: str, name: str) -> Callable[[], None]:
        """Reserve a name and count the session while the engine is asked to open it.

        The returned function ends the reservation; call it when the engine has answered.
        """
        if is_hidden(name):
            return lambda: None
        key, holding = engine_name(tenant, name), self._holding(tenant)
        holding.unopened += not holding.opening[name] and key not in self._records
        holding.opening[name] += 1

        def answered() -> None:
            holding.opening[name] -= 1
            if not holding.opening[name]:
                del holding.opening[name]
                holding.unopened -= key not in self._records

        return answered

    def is_taken(self, tenant: str, name: str) -> bool:
        """Whether a session of that name is open, or being opened."""
        holding = self._holdings.get(tenant)
        return engine_name(tenant, name) in self._records or (holding is not None and name in holding.opening)

    def count(self, tenant: str) -> int:
        """How many sessions a tenant has, including those being opened."""
        holding = self._holdings.get(tenant)
        return 0 if holding is None else len(holding.order) + holding.unopened

    def page(self, tenant: str, after: int, limit: int) -> tuple[list[SessionRecord], int | None]:
        """The first `limit` sessions of a tenant opened after number `after`, and the next page's `after`.

        A session that is open from the first page to the last is on exactly one of them.
        """
        holding = self._holdings.get(tenant)
        if holding is None:
            return [], None
        begin = bisect_right(holding.order, after)
        numbers = holding.order[begin : begin + limit]
        records = [self._records[holding.names[number]][1] for number in numbers]
        more = begin + limit < len(holding.order)
        return records, numbers[-1] if more else None

    def find(self, tenant: str, name: str) -> SessionRecord:
        """A tenant's session, or the problem that says why there is none."""
        require_name(name, "session_id")
        record = self.get(tenant, name)
        if record is None:
            raise self.absence(tenant, name)
        return record

    def absence(self, tenant: str, name: str) -> Problem:
        """The error for a session that is not open: why it ended, if that is known."""
        why = self._gone.get(engine_name(tenant, name))
        if why is not None:
            return Problem(*GONE[why], "session_id")
        return Problem(404, "session_not_found", "there is no such session", "session_id")

    def get(self, tenant: str, name: str) -> SessionRecord | None:
        """A tenant's session, if it is open."""
        found = self._records.get(engine_name(tenant, name))
        return None if found is None else found[1]

    def has_gone(self, tenant: str, name: str) -> bool:
        """Whether a session of that name has ended."""
        return engine_name(tenant, name) in self._gone

    def of(self, tenant: str) -> list[SessionRecord]:
        """All sessions of a tenant."""
        return self.page(tenant, 0, len(self._records))[0]

    def seen(self, view: wire.SessionView) -> None:
        """Update a session's state from the engine."""
        found = self._records.get(view.name)
        if found is not None:
            found[1].view = view

    def remove(self, key: str, why: str) -> None:
        """A session has ended; the reason is kept for a while."""
        assert why in GONE, "a reason that clients can be told"
        found = self._records.pop(key, None)
        if found is None:
            return
        number, record = found
        holding = self._holdings[record.tenant]
        if is_hidden(record.name):
            del holding.hidden[record.name]
        else:
            del holding.order[bisect_left(holding.order, number)]
            del holding.names[number]
            holding.unopened += holding.opening[record.name] > 0
            self._gone[key] = why
            while len(self._gone) > GONE_KEPT:
                del self._gone[next(iter(self._gone))]
        for listener in self._removed:
            listener(key, why)

    def subscribe(self, removed: Callable[[str, str], None]) -> None:
        """Have `removed` called with the key of each session that ends, and why."""
        self._removed.append(removed)

    def taken_up(self, key: str, give: GiveUp) -> None:
        """Another API process has the realtime client of a session now, and needs what was kept for it."""
        for listener in self._taken_up:
            listener(key, give)

    def leave(self) -> None:
        """This process ends: what it has kept for clients is left to others."""
        for listener in self._leave:
            listener()

    def give_up(self, taken_up: Callable[[str, GiveUp], None], leave: Callable[[], None]) -> None:
        """Have `taken_up` called with the key of each session whose client is at another API process now.

        `leave` is called when this process ends.
        """
        self._taken_up.append(taken_up)
        self._leave.append(leave)

    def lose_all(self, kept: set[str]) -> None:
        """The engine was restarted: sessions that did not come back are lost."""
        for key in [key for key in self._records if key not in kept]:
            self.remove(key, "lost")


def shown_name(model: str) -> str:
    """A model's name for clients."""
    return model.rstrip("/").rpartition("/")[2].removesuffix(".gguf")


def new_name(prefix: str) -> str:
    """A random name that cannot be guessed."""
    return f"{prefix}-{secrets.token_hex(8)}"
