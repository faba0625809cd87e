"""Verbs that find something overdue: a turn past its deadline, a session that has rested too long.

What was due before a verb has happened before it: in memory, in the journal, and for whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.core.errors import JournalUnavailable, SessionExpired
from holdfast.engine.durable.journal_reading import read_sessions
from holdfast.engine.echo import open_echo
from holdfast.engine.engine import Engine
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import make_options
from holdfast.engine.sampling import Sampling
from tests.engine.direct import direct, submit


class Clock:
    """The time of a loop, as a test sets it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_loop(tmp_path: Path, clock: Clock) -> Callable[..., EngineLoop]:
    def opened(**options: object) -> EngineLoop:
        chosen = make_options(journal=str(tmp_path / "journal"), overlap=False, **options)
        return open_echo("echo", chosen, clock=clock)

    return opened


def run(loop: EngineLoop) -> None:
    while loop.busy:
        loop.step()


def say(loop: EngineLoop, turn: str, count: int, deadline: float | None = None) -> None:
    timeout = None if deadline is None else deadline - loop.now()
    sampling = Sampling(max_tokens=count, ignore_eos=True)
    submit(loop, "s", turn, (1, 2, 3), sampling, keeps=True, timeout=timeout)


def in_memory(loop: EngineLoop) -> dict[str, list[int]]:
    return {name: session.boundaries for name, session in loop.scheduler.registry.sessions.items()}


def in_journal(path: Path) -> dict[str, list[int]]:
    ends: dict[str, list[int]] = {}
    for stored in read_sessions(path):
        ends[stored.id] = []
        for turn in stored.turns:
            ends[stored.id].append(sum(ends[stored.id][-1:]) + len(turn.input) + len(turn.output))
    return ends


VERBS: dict[str, Callable[[EngineLoop], object]] = {
    "fork": lambda loop: direct(loop, "fork", "s", "f"),
    "fork of the first turn": lambda loop: direct(loop, "fork", "s", "f", 1),
    "rewind to where it is": lambda loop: direct(loop, "rewind", "s", 2),
    "rewind": lambda loop: direct(loop, "rewind", "s", 1),
    "interrupt": lambda loop: direct(loop, "interrupt", "s", 2),
    "open": lambda loop: direct(loop, "open", "f", "red"),
}


@pytest.mark.parametrize("found", ["", "by another verb"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_turn_that_is_overdue_ends_before_a_verb(
    open_loop: Callable[..., EngineLoop], tmp_path: Path, clock: Clock, verb: str, found: str
) -> None:
    loop = open_loop()
    direct(loop, "open", "s", "red")
    direct(loop, "open", "other", "red")
    say(loop, "t1", 50)
    run(loop)
    say(loop, "t2", 500, deadline=clock.now + 5)
    for _ in range(10):
        loop.step()
    clock.now += 6
    if found:
        direct(loop, "spill", "other")
    VERBS[verb](loop)
    run(loop)
    say(loop, "t3", 5)
    run(loop)
    known = in_memory(loop)
    loop.shut_down()
    assert in_journal(tmp_path / "journal") == known


def test_the_name_of_a_session_that_rested_too_long(
    open_loop: Callable[..., EngineLoop], tmp_path: Path, clock: Clock
) -> None:
    engine = Engine(open_loop(session_ttl=10.0))
    engine.session(id="s", system="Be long.")
    clock.now += 11
    engine.session(id="s", system="Be brief.")
    assert engine.sessions() == ["s"]
    assert engine.resume("s").id == "s"
    (stored,) = read_sessions(tmp_path / "journal")
    assert (stored.id, stored.about.system) == ("s", "Be brief.")
    engine.close()


def test_closing_what_rested_too_long_is_no_error(open_loop: Callable[..., EngineLoop], clock: Clock) -> None:
    engine = Engine(open_loop(session_ttl=10.0))
    one = engine.session(id="one")
    engine.session(id="two")
    clock.now += 11
    one.close()
    one.close()
    with pytest.raises(SessionExpired):
        one.rewind(0)
    engine.session(id="three")
    clock.now += 11
    engine.close()
    assert not engine.loop.scheduler.registry.sessions


def test_closing_waits_for_no_journal(open_loop: Callable[..., EngineLoop]) -> None:
    engine = Engine(open_loop())
    session = engine.session(id="s")
    assert engine.loop.session_log.journal is not None
    engine.loop.session_log.journal.fault = "the disk is full"
    with pytest.raises(JournalUnavailable):
        session.close()
    assert engine.sessions() == ["s"], "it keeps its memory"
    engine.loop.session_log.journal.fault = None
    session.close()
    assert engine.sessions() == []
