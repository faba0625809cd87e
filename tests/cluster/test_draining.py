"""Where the sessions of a draining engine go: by the memory that they need, with a pause after a failure.

The engine and its sessions are real; the journal's answers, the other engines' heartbeats and the hand-overs
are scripted.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.errors import JournalUnavailable
from holdfast.engine.durable.store import Home
from holdfast.engine.engine import Engine
from holdfast.engine.sampling import Sampling
from holdfast.server.link import draining, wire
from holdfast.server.link.draining import AT_ONCE, Drain, Leaving
from holdfast.server.link.hand_overs import UnknownEngine

PAGE = 16


def answered(value: Any) -> Future[Any]:
    found: Future[Any] = Future()
    found.set_result(value)
    return found


class Claims:
    """Answers questions to the store at once."""

    def __init__(self, names: list[str]) -> None:
        homes = [Home(number, name, f"{name}:7000", True) for number, name in enumerate(names, 1)]
        self.store = SimpleNamespace(drain=lambda: True, others=lambda: homes)

    def ask(self, act: Callable[[], Any], told: Callable[[Future[Any]], None]) -> None:
        told(answered(act()))


class Begun:
    """Hand-overs that have begun, and end when the test says."""

    pending = 0

    def __init__(self) -> None:
        self.moves: list[tuple[Leaving, str, str]] = []

    def begin(self, leaving: Leaving, session: str, engine: str) -> None:
        self.moves.append((leaving, session, engine))


class Drained:
    """An engine with so many sessions of 10 pages each that drains to engines with so much free memory."""

    def __init__(self, engine: Engine, sessions: int, free: dict[str, int]) -> None:
        self.engine = engine
        for number in range(sessions):
            turn = engine.session(id=f"s{number}").say([5] * (10 * PAGE - 2), Sampling(max_tokens=2))
            assert turn.usage.completion_tokens == 2
            assert engine.loop.scheduler.registry.sessions[f"s{number}"].sequence.computed > 9 * PAGE
        self.begun = Begun()

        def look(address: str) -> Future[wire.Pulse | None]:
            holders = [("full", "device", "FREE", free[address.partition(":")[0]])]
            return answered(wire.Pulse(1, 0, 0, 0, {}, holders, 0))

        sender: Any = SimpleNamespace(look=look)
        claims: Any = Claims(list(free))
        begun: Any = self.begun
        self.drain = Drain(engine.loop, claims, begun, sender)
        self.drain.begin()

    def hand_over(self, session_count: int) -> list[str]:
        """Let so many sessions leave, one after the other: where they went."""
        went: list[str] = []
        for _ in range(session_count):
            self.drain.poll()
            leaving, session, engine = self.begun.moves.pop(0)
            went.append(engine)
            leaving.done(session, 0)
            del self.engine.loop.session_log.sessions[session]
        return went


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine("echo", page_size=PAGE, kv_tokens=8192, context_length=1024) as made:
        yield made
        made.loop.session_log.sessions.clear()


def test_sessions_are_spread_by_the_memory_that_they_need(engine: Engine) -> None:
    drained = Drained(engine, 12, {"roomy": 200, "small": 150})
    went = Counter(drained.hand_over(12))
    assert went == {"roomy": 9, "small": 3}, "five for the 50 pages more, and every other one"
    assert drained.drain.over


def test_a_failure_is_followed_by_a_pause(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [engine.loop.now()]
    monkeypatch.setattr(engine.loop, "now", lambda: now[0])
    drained = Drained(engine, 6, {"one": 500})
    drained.drain.poll()
    assert len(drained.begun.moves) == AT_ONCE
    leaving, session, _ = drained.begun.moves.pop(0)
    leaving.refused(JournalUnavailable("the database is away"))
    for _ in range(100):
        drained.drain.poll()
    assert len(drained.begun.moves) == AT_ONCE - 1, "nothing begins"
    now[0] += draining.PAUSE_SECONDS
    drained.drain.poll()
    assert [each[1] for each in drained.begun.moves].count(session) == 1, "it is tried again"
    assert not drained.drain.over


def test_an_engine_that_takes_nothing_any_more_is_left_out(engine: Engine) -> None:
    drained = Drained(engine, 1, {"gone": 500, "there": 100})
    drained.drain.poll()
    (leaving, _, first) = drained.begun.moves.pop()
    leaving.refused(UnknownEngine("engine gone takes no sessions any more"))
    drained.drain._resumes = 0.0
    drained.drain.poll()
    (leaving, _, second) = drained.begun.moves.pop()
    assert (first, second) == ("gone", "there")
    leaving.refused(UnknownEngine("engine there takes no sessions any more"))
    assert drained.drain.over, "nobody is left"
