"""Steps and the journal, on both stores: no SQL in the loop's thread; a refused session is given up."""

import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import SessionMoved
from holdfast.core.events import Event, EventKind
from holdfast.engine.dispatch import MOVED
from holdfast.engine.durable import session_log
from holdfast.engine.durable.places import is_database
from holdfast.engine.durable.stores import read_sessions
from holdfast.engine.engine import Engine
from tests.databases import STORES, new_place, run_sql
from tests.engine.conftest import Make, maker
from tests.engine.direct import direct, submit
from tests.engine.tiny import greedy, word

SAID = [word("the"), word("river"), word("runs")]


@pytest.fixture
def make(directories: dict[str, Path]) -> Iterator[Make]:
    yield from maker(directories["llama"])


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A journal of each store in turn."""
    return new_place(request.param, tmp_path / "sessions.journal")


def count_statements(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that execute SQL from now on, one for each statement."""
    threads: list[str] = []

    def note(*_: object) -> None:
        threads.append(threading.current_thread().name)

    journal: Any = engine.loop.session_log.journal
    if not is_database(journal.place):
        journal._connection.set_trace_callback(note)
    else:
        connection = import_module("psycopg").Connection
        execute = connection.execute

        def noted(self: Any, *arguments: Any, **more: Any) -> Any:
            note()
            return execute(self, *arguments, **more)

        monkeypatch.setattr(connection, "execute", noted)
    return threads


def test_no_statement_runs_in_the_loop(make: Make, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(journal=place)
    loop, events = engine.loop, []
    threads = count_statements(engine, monkeypatch)
    names = [f"s{number}" for number in range(6)]
    for name in names:
        direct(loop, "open", name, "local")
    for number in range(3):
        for name in names:
            submit(loop, name, f"t{number}", SAID, greedy(5), events.append, fingerprint="body")
        while loop.busy:
            loop.step()
    direct(loop, "rewind", "s0", 1)
    direct(loop, "fork", "s1", "f", 2)
    direct(loop, "interrupt", "s2", 2)
    direct(loop, "close", "s3")
    while loop.busy:
        loop.step()
    assert sum(event.kind is EventKind.FINISHED for event in events) == 18
    assert threads and set(threads) == {"holdfast-journal"}


def test_turns_wait_for_a_journal_with_too_many_records(
    make: Make, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of what waits to be written does not depend on the store."""
    engine = make(journal=place)
    journal: Any = engine.loop.session_log.journal
    gate = threading.Event()
    journal._probe = lambda _: gate.wait(60)
    monkeypatch.setattr(session_log, "UNWRITTEN_MAX", 2)
    for number in range(4):
        direct(engine.loop, "open", f"s{number}", "local")
        engine.loop.flush_journal()
        if number == 2:
            break
    with pytest.raises(session_log.JournalUnavailable, match="more than 2 journal records wait"):
        direct(engine.loop, "open", "more", "local")
    gate.set()
    while engine.loop.busy:
        engine.loop.step()
    assert len(read_sessions(place)) == 3


# --- sessions of another server ---


@pytest.fixture
def moved(make: Make, tmp_path: Path) -> tuple[Engine, str]:
    """An engine with two sessions, one of which belongs to another server by now."""
    place = new_place("postgres", tmp_path)
    engine = make(journal=place)
    for name in ("mine", "theirs"):
        engine.session(id=name).say(SAID, greedy(4)).wait()
    run_sql(place, "UPDATE sessions SET epoch = epoch + 1 WHERE id = 'theirs'")
    return engine, place


def run(engine: Engine) -> None:
    while engine.loop.busy:
        engine.loop.step()


def test_a_turn_of_a_session_that_moved_fails_and_others_are_acknowledged(moved: tuple[Engine, str]) -> None:
    engine, place = moved
    events: dict[str, list[Event]] = {"mine": [], "theirs": []}
    for name, heard in events.items():
        submit(engine.loop, name, "t", SAID, greedy(4), heard.append, fingerprint="body")
    run(engine)
    assert events["mine"][-1].kind is EventKind.FINISHED
    end = events["theirs"][-1]
    assert (end.kind, end.reason) == (EventKind.FAILED, MOVED)
    assert sum(event.kind is not EventKind.TOKENS for event in events["theirs"]) == 1
    assert engine.sessions() == ["mine"], "it is given up"
    stored = {session.id: len(session.turns) for session in read_sessions(place)}
    assert stored == {"mine": 2, "theirs": 1}, "nothing of it was written, its end neither"


@pytest.mark.parametrize("verb", ["rewind", "fork", "close", "interrupt"])
def test_a_verb_on_a_session_that_moved_is_refused(moved: tuple[Engine, str], verb: str) -> None:
    engine, place = moved
    arguments = {"rewind": (0,), "fork": ("child",), "interrupt": (1,)}.get(verb, ())
    direct(engine.loop, verb, "theirs", *arguments)
    with pytest.raises(SessionMoved, match="belongs to another server"):
        run(engine)
    run(engine)
    assert "theirs" not in engine.sessions()
    assert {session.id: len(session.turns) for session in read_sessions(place)} == {"mine": 1, "theirs": 1}
