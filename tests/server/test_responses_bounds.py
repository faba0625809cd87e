"""What the server keeps of responses is bounded, and one tenant's do not push out another's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.server.closed_sessions import ClosedSessions
from holdfast.server.hidden_sessions import HiddenSessions
from holdfast.server.http.keys import Caller
from holdfast.server.link import wire
from holdfast.server.responses import running, store
from holdfast.server.responses.events import written
from holdfast.server.responses.form import Note
from holdfast.server.responses.ids import Place
from holdfast.server.responses.running import Recent
from holdfast.server.responses.store import ResponseStore, Spot


@dataclass
class Ended:
    """A response that is over."""

    tenant: str
    name: str
    events: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)

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


def test_events_that_come_after_a_response_was_kept_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response is kept before it tells its end, and forgotten after that."""
    monkeypatch.setattr(running, "EVENTS_MAX", 100)
    recent = Recent()
    added = [Ended("ann", f"a{number}", 1) for number in range(1000)]
    for each in added:
        recent.add(each)  # type: ignore[arg-type]
        each.events += 7
        each.ended.set()
    kept = [each for each in added if recent.get(each.key) is not None]
    assert kept == added[-len(kept) :] and 100 // 9 <= len(kept) <= 100 // 9 + 1


def test_long_events_count_by_their_size() -> None:
    log = [written({"type": "a", "text": "x" * (10 * running.EVENT_BYTES)}), written({"type": "b"})]
    made = running.Running.__new__(running.Running)
    made._log = log
    assert made.events == 12


def test_what_is_left_of_closed_sessions_is_bounded_by_all_that_is_kept() -> None:
    closed = ClosedSessions(100_000)
    turn = wire.NotedTurn(1, "t", "{}", "finished", "stop", "", 1, 0, 1)
    thought = wire.AnswerParts("x" * 20_000, [wire.CallFields("c", "f", "y" * 20_000)])
    for number in range(10):
        closed.keep("ann", f"~{number}", {}, [msgspec.structs.replace(turn, answer=thought)])
        closed.keep("bob", f"~{number}", {"items": "z" * 40_000}, [turn])
    for tenant in ("ann", "bob"):
        found = [closed.find(tenant, f"~{number}") is not None for number in range(10)]
        assert found == [False] * 8 + [True] * 2
    for _ in range(10):
        closed.keep("eve", "~1", {"items": "z" * 40_000}, [turn])
    assert closed.find("eve", "~1") is not None and closed.find("eve", "~0") is None
    closed.keep("eve", "~0", {"items": "z" * 40_000}, [turn])
    assert closed.find("eve", "~1") is not None, "one that is kept again counts once"


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
        self.sessions = self

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


class Leaving(ResponseStore):
    """Responses whose turn is taken back; the question whether it stands is answered late."""

    def __init__(self) -> None:
        super().__init__(Closing())  # type: ignore[arg-type]
        self.asked, self.answer = asyncio.Event(), asyncio.Event()

    async def _spot(self, caller: Caller, creation: Any) -> Spot:
        record: Any = SimpleNamespace(name="~1")
        return Spot(record, Place("s" * 17, "t" * 16), [], made=False, anew=False)

    async def _begin(self, caller: Caller, spot: Spot, creation: Any) -> tuple[Any, Note]:
        return Feed(), Note(0.0, {}, [])

    async def _stands(self, spot: Spot, place: Place) -> bool:
        self.asked.set()
        await self.answer.wait()
        return False


class Feed:
    """A turn that was aborted before its first token."""

    end = wire.End(1, "aborted", "disconnected", "", [], 3, 0, 3, 0.0, None, 0.0)

    def write_with(self, _writer: object) -> None:
        """There will be nothing to write."""

    async def deltas(self) -> AsyncIterator[Any]:
        nothing: tuple[Any, ...] = ()
        for delta in nothing:
            yield delta


def test_a_response_is_known_at_every_moment_of_its_end() -> None:
    async def play() -> list[str | None]:
        kept, ann = Leaving(), Caller("ann", False)
        creation: Any = SimpleNamespace(items=[], told={}, background=False, streams=True)
        seen = (await kept.start(ann, creation, lambda _: [])).place

        def status() -> str | None:
            found = kept.running(ann, seen)
            return None if found is None else str(found.current()["status"])

        before = status()
        await kept.asked.wait()
        meanwhile = status()
        kept.answer.set()
        await asyncio.gather(*kept._tasks)
        return [before, meanwhile, status()]

    assert asyncio.run(play()) == ["in_progress", "in_progress", "cancelled"]
