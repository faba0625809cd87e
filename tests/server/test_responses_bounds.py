"""What the server keeps of responses is bounded, and one tenant's do not push out another's."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from holdfast.server.hidden_sessions import HiddenSessions
from holdfast.server.http.keys import Caller
from holdfast.server.responses import running, store
from holdfast.server.responses.running import Recent
from holdfast.server.responses.store import ResponseStore


@dataclass
class Ended:
    """A response that is over."""

    tenant: str
    name: str
    events: int

    @property
    def key(self) -> tuple[str, str]:
        return self.tenant, self.name


def test_the_oldest_of_the_tenant_that_has_most_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "EVENTS_MAX", 100)
    recent = Recent()
    added = [Ended("ann", "a", 9), *(Ended("bob", f"b{number}", 29) for number in range(4))]
    for each in added:
        recent.add(each)  # type: ignore[arg-type]
    assert [recent.get(each.key) is each for each in added] == [True, False, True, True, True]
    assert recent.drop(("ann", "a")) and not recent.drop(("ann", "a"))
    assert recent.drop(("bob", "b3")) and recent.get(("bob", "b3")) is None


def test_one_that_is_too_large_alone_is_still_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "EVENTS_MAX", 10)
    recent = Recent()
    for number in range(3):
        recent.add(Ended("ann", f"a{number}", 50))  # type: ignore[arg-type]
    assert [recent.get(("ann", f"a{number}")) is not None for number in range(3)] == [False, False, True]


class Table:
    """The hidden sessions of two tenants."""

    def __init__(self) -> None:
        self.names = {"ann": ["~1", "~2", "~3"], "bob": ["~1"]}
        self.removed: Any = None

    def subscribe(self, removed: Any) -> None:
        self.removed = removed

    def hidden_of(self, tenant: str) -> list[Any]:
        return [type("Record", (), {"tenant": tenant, "name": name})() for name in self.names[tenant]]


class Closing:
    """A service that closes sessions."""

    def __init__(self) -> None:
        self.table = Table()
        self.hidden = HiddenSessions(self.table)  # type: ignore[arg-type]

    async def give_way(self, record: Any) -> None:
        self.table.names[record.tenant].remove(record.name)
        self.table.removed(f"{record.tenant}/{record.name}", "closed")


def test_old_sessions_make_space_for_new_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "NOTES_MAX", 100)
    service = Closing()
    kept = ResponseStore(service)  # type: ignore[arg-type]
    for name in service.table.names["ann"]:
        kept._sizes.setdefault("ann", store.Counter())[name] = 30
    kept._sizes["bob"] = store.Counter({"~1": 99})
    asyncio.run(kept._make_space(Caller("ann", False), 35))
    assert service.table.names == {"ann": ["~2", "~3"], "bob": ["~1"]}
    asyncio.run(kept._make_space(Caller("ann", False), 500))
    assert service.table.names == {"ann": [], "bob": ["~1"]}, "the engine refuses what is too large alone"
