"""The journal's file: what is written comes back whole, in every life that a session may have."""

import gzip
import json
import os
import resource
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path

import pytest

from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.durable import journal_rows, journal_tables
from holdfast.engine.durable.answers import StoredAnswer, StoredCall, calls_in, details_of
from holdfast.engine.durable.journal import Journal, JournalError
from holdfast.engine.durable.journal_reading import load, open_for_reading
from holdfast.engine.durable.places import is_database
from holdfast.engine.durable.records import (
    TURNS_KEPT,
    Closed,
    Ended,
    FinishedTurn,
    Forked,
    Opened,
    Record,
    Requested,
    Retained,
    Retooled,
    SnapshotDropped,
    SnapshotWritten,
    StoredSession,
    Truncated,
)
from holdfast.engine.durable.store import Probe, Store
from holdfast.engine.durable.stores import open_store, read_log, read_sessions
from holdfast.engine.start import lock
from holdfast.engine.tools.answer import AnswerSpec
from tests.databases import STORES, new_place, run_sql

VERSION_3 = Path(__file__).with_name("journals") / "version_3.journal.gz"
ANSWERED = StoredAnswer("hm", (StoredCall("c1", "f", '{"a": 1}', "complete", 3),), 2)


def opened(name: str = "s") -> Opened:
    return Opened(name, "red", 60.0, '{"caller": 7}', "Be brief.", 1000.0)


def ended(name: str, number: int, said: tuple[int, ...] = (1, 2, 3), heard: int = 4) -> Ended:
    tokens = [100 * number + place for place in range(heard)]
    turn = FinishedTurn(f"t{number}", f"body {number}", "finished", "stop", "words", tokens, 3, 0, 3)
    return Ended(name, said, turn)


def write(path: str | Path, *records: Record) -> list[StoredSession]:
    """Write records as a server does that starts and ends; returns the sessions.

    A database has to be read first: only what a life knows of its sessions can be changed.
    """
    with closing(open_store(str(path), "commit", "v", lock_timeout=20.0)) as journal:
        found = list(journal.sessions()) if is_database(path) else []
        for record in records:
            journal.append(record)
        assert journal.flush()
        while is_database(path) and journal.compact():
            continue
        if is_database(path):
            return read_sessions(path) if records else found
        return list(journal.sessions())


def store_at(place: str, probe: Probe | None = None) -> Store:
    """A journal that is open for writing and was read."""
    if is_database(place):
        module = import_module("holdfast.engine.durable.postgres.store")
        opened: Store = module.PostgresJournal(place, "commit", "v", probe, lock_timeout=20.0)
        list(opened.sessions())
        return opened
    return Journal(Path(place), "commit", "v", probe)


def history(session: StoredSession) -> list[int]:
    return [token for turn in session.turns for token in (*turn.input, *turn.output)]


def rows(path: str | Path, table: str) -> int:
    return int(run_sql(str(path), f"SELECT count(*) FROM {table}")[0][0])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "sessions.journal"


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, path: Path) -> str:
    """A journal of each store in turn."""
    return new_place(request.param, path)


def test_a_session_comes_back_as_it_was(place: str, path: Path) -> None:
    write(place, opened(), ended("s", 1), ended("s", 2, (), 2), Requested("s", "q", "rewind 1", ""))
    (session,) = read_sessions(place)
    assert (session.id, session.tenant) == ("s", "red")
    assert session.about == (60.0, '{"caller": 7}', "Be brief.", 1000.0, None, "[]", "{}")
    assert [(turn.turn_id, turn.input, turn.output) for turn in session.turns] == [
        ("t1", [1, 2, 3], [100, 101, 102, 103]),
        ("t2", [], [200, 201]),
    ]
    assert session.tokens == 9
    assert session.finished == [ended("s", 1).turn, ended("s", 2, (), 2).turn]
    assert session.requests == {"q": ("rewind 1", "")}
    assert is_database(place) or path.stat().st_mode & 0o077 == 0, "conversations are their owner's alone"


def test_a_file_of_a_session_is_known_until_it_is_not(place: str) -> None:
    kept = SnapshotWritten("s", "a.safetensors", 7, 4096)
    (session,) = write(place, opened(), ended("s", 1), kept)
    assert session.snapshot == kept
    (session,) = write(place, SnapshotDropped("s"))
    assert session.snapshot is None


def test_cuts_forks_and_closes(place: str) -> None:
    turns = [ended("s", number) for number in (1, 2, 3)]
    sessions = write(
        place,
        opened(),
        *turns,
        Forked("f", "s", 2, 1001.0),
        Truncated("s", 3, 1),
        Forked("g", "s", 3, 1002.0),
        Truncated("s", 1, None),
        ended("f", 4),
        Forked("h", "f", 0, 1003.0),
    )
    by_name = {session.id: [len(turn.output) for turn in session.turns] for session in sessions}
    assert by_name == {"s": [4], "f": [4, 4, 4], "g": [4, 4, 1], "h": []}
    ends = {session.id: history(session)[-1:] for session in sessions}
    assert ends == {"s": [103], "f": [403], "g": [300], "h": []}
    assert {session.about.parent for session in sessions} == {None, "s", "f"}
    remaining = write(place, Closed("s", "closed"), Closed("h", "closed"))
    assert {session.id: history(session)[-1:] for session in remaining} == {"f": [403], "g": [300]}


def test_a_fork_writes_no_history_again_and_orphans_are_swept_away(place: str) -> None:
    write(place, opened(), *(ended("s", number) for number in range(20)))
    write(place, *(Forked(f"f{number}", "s", 20, 1.0) for number in range(100)))
    assert rows(place, "turns") == 20
    write(place, Truncated("s", 3, None), *(Closed(f"f{number}", "closed") for number in range(99)))
    assert rows(place, "turns") == 20, "one fork still leans on all of them"
    write(place, Closed("f99", "closed"))
    write(place)
    assert rows(place, "turns") == 3


def test_what_a_client_may_ask_for_again_is_bounded(place: str) -> None:
    many = [ended("s", number) for number in range(3 * TURNS_KEPT)]
    asked = [Requested("s", f"q{number}", "rewind 0", "") for number in range(3 * TURNS_KEPT)]
    (session,) = write(place, opened(), *many, *asked)
    assert [turn.turn_id for turn in session.finished] == [each.turn.turn_id for each in many[-TURNS_KEPT:]]
    assert list(session.requests) == [each.request_id for each in asked[-TURNS_KEPT:]]
    assert len(session.turns) == len(many), "history is not"


def test_the_log_says_what_happened_and_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_rows, "LOG_KEPT", 5)
    write(path, opened("o"), opened(), ended("s", 1), Truncated("s", 1, 2), Forked("f", "s", 1, 1.0))
    write(path, SnapshotWritten("s", "a", 5, 9), Requested("s", "q", "rewind 1", ""), Closed("s", "expired"))
    assert read_log(path, "s") == [
        ("cutback", "1 turn left, 2 tokens of the last kept"),
        ("snapped", "5 tokens, 9 bytes in a"),
        ("requested", "rewind 1 (q)"),
        ("closed", "expired"),
    ]
    assert read_log(path, "o") == []


# --- faults ---


def test_a_full_disk_keeps_everything_until_there_is_room(path: Path) -> None:
    with Journal(path, "commit", "v") as journal:
        journal.append(opened())
        assert journal.flush()
        size = journal._connection.execute("PRAGMA page_count").fetchone()[0]
        journal._connection.execute(f"PRAGMA max_page_count = {size}")
        for number in range(40):
            journal.append(ended("s", number, tuple(range(500))))
        assert not journal.flush()
        assert journal.fault is not None and "full" in journal.fault
        assert journal.pending
        assert read_sessions(path)[0].turns == [], "all of it or nothing"
        journal.append(ended("s", 40))
        assert not journal.flush()
        journal._connection.execute("PRAGMA max_page_count = 1000000")
        assert journal.flush()
        assert journal.fault is None and not journal.pending
    assert [turn.turn_id for turn in read_sessions(path)[0].turns] == [f"t{number}" for number in range(41)]


def test_a_record_that_cannot_be_written_leaves_no_transaction_open(path: Path) -> None:
    with Journal(path, "commit", "v") as journal:
        journal.append(opened())
        assert journal.flush()
        journal.append(ended("s", 1))
        journal.append(opened("\ud800"))
        for _ in range(3):
            with pytest.raises(UnicodeEncodeError):
                journal.flush()
            assert not journal._connection.in_transaction
        assert read_sessions(path)[0].turns == [], "all of it or nothing"
        journal._pending.pop()
        assert journal.flush()
    assert len(read_sessions(path)[0].turns) == 1


def crash(path: str | Path, *records: Record, point: str) -> None:
    """Write records and die at a point, without any of the goodbyes."""
    child = os.fork()
    if child == 0:
        journal = store_at(str(path), lambda here: os._exit(9) if here == point else None)
        for record in records:
            journal.append(record)
        journal.flush()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize(
    ("point", "there"),
    [("before append", 1), ("mid-record", 1), ("after write", 1), ("after fsync", 3)],
)
def test_a_death_leaves_whole_transactions(place: str, point: str, there: int) -> None:
    write(place, opened(), ended("s", 1))
    crash(place, ended("s", 2), ended("s", 3), point=point)
    (session,) = write(place)
    assert len(session.turns) == there
    assert len(session.finished) == there


def test_a_torn_write_costs_what_was_never_acknowledged(path: Path) -> None:
    """The last bytes are missing, or are not what was written: the last whole transaction counts."""
    write(path, opened(), ended("s", 1))
    crash(path, ended("s", 2), point="after fsync")
    log = path.with_name(path.name + "-wal")
    whole = log.read_bytes()
    for torn in (whole[:-100], whole[:-1] + bytes([whole[-1] ^ 1])):
        log.write_bytes(torn)
        path.with_name(path.name + "-shm").unlink(missing_ok=True)
        saved = path.read_bytes()
        (session,) = write(path)
        assert [turn.turn_id for turn in session.turns] == ["t1"]
        path.write_bytes(saved)


def test_a_row_that_was_changed_is_never_believed(place: str) -> None:
    write(place, opened(), *(ended("s", number) for number in (1, 2, 3)), Forked("f", "s", 1, 1.0))
    run_sql(place, "UPDATE turns SET output = x'04000000' WHERE turn_id = 't2'")
    sessions = {session.id: session for session in write(place)}
    assert [turn.turn_id for turn in sessions["s"].turns] == ["t1"]
    assert sessions["s"].damaged and not sessions["f"].damaged


def change(path: str | Path, statement: str, *values: object) -> None:
    """Damage a journal."""
    if not values:
        run_sql(str(path), statement)
        return
    connection = sqlite3.connect(path)
    connection.execute(statement, values)
    connection.commit()
    connection.close()


DAMAGES = {
    "words": ("UPDATE turns SET output = x'00000000' WHERE turn_id = 't3'", ["t1", "t2"]),
    "place": ("UPDATE turns SET depth = 1 WHERE turn_id = 't3'", ["t1", "t2"]),
    "no place": ("UPDATE turns SET depth = 0 WHERE turn_id = 't3'", ["t1", "t2"]),
    "a place before all": ("UPDATE turns SET depth = -3 WHERE turn_id = 't1'", []),
    "the place before it": ("UPDATE turns SET depth = 2 WHERE turn_id = 't3'", ["t1", "t2"]),
    "link": ("UPDATE turns SET before = (SELECT min(number) FROM turns) WHERE turn_id = 't3'", ["t1"]),
    "gap": ("DELETE FROM turns WHERE turn_id = 't2'", []),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_session_goes_on_from_where_it_is_whole(place: str, damage: str) -> None:
    """What is said afterwards is there after the next restart, too, and can be cut and forked."""
    write(place, opened(), *(ended("s", number) for number in (1, 2, 3, 4)))
    statement, whole = DAMAGES[damage]
    change(place, statement)
    (before,) = read_sessions(place)
    assert before.damaged
    kept = [turn.turn_id for turn in before.turns]
    assert kept == whole
    with closing(open_store(place, "commit", "v")) as journal:
        (session,) = journal.sessions()
        assert [turn.turn_id for turn in session.turns] == kept
        for record in (ended("s", 5), ended("s", 6), Forked("f", "s", len(kept) + 1, 1.0)):
            journal.append(record)
        assert journal.flush()
    after = {session.id: session for session in read_sessions(place)}
    assert not after["s"].damaged
    assert [turn.turn_id for turn in after["s"].turns] == [*kept, "t5", "t6"]
    assert [turn.turn_id for turn in after["f"].turns] == [*kept, "t5"]
    write(place, Truncated("s", 0, None))
    assert [session.turns for session in read_sessions(place) if session.id == "s"] == [[]]


def test_answers_and_notes_that_cannot_be_read_are_forgotten(place: str) -> None:
    write(place, opened(), ended("s", 1), ended("s", 2))
    change(place, "UPDATE finished SET result = '{\"turn_id\": 7' WHERE turn_id = 't1'")
    change(place, "UPDATE sessions SET metadata = '{half'")
    (session,) = write(place)
    assert [turn.turn_id for turn in session.finished] == ["t2"]
    assert (session.about.metadata, len(session.turns), session.damaged) == ("{}", 2, False)


def test_a_journal_of_other_words_is_refused(place: str) -> None:
    write(place, opened())
    with pytest.raises(JournalError, match="another vocabulary"):
        open_store(place, "commit", "w")
    assert len(write(place)) == 1, "the refused one let go of it"


def test_one_writer_at_a_time(place: str) -> None:
    with closing(open_store(place, "commit", "v")), pytest.raises(JournalError, match="in use"):
        open_store(place, "commit", "v")
    write(place)


def test_one_writer_at_a_time_under_all_names_of_a_journal(path: Path) -> None:
    link = path.parent / "elsewhere" / "link.journal"
    link.parent.mkdir(parents=True)
    link.symlink_to(path)
    with Journal(link, "commit", "v"), pytest.raises(JournalError, match="in use"):
        Journal(path, "commit", "v")
    with Journal(path, "commit", "v"), pytest.raises(JournalError, match="in use"):
        Journal(link, "commit", "v")
    assert [each.name for each in link.parent.iterdir()] == ["link.journal"]


def test_a_reader_sees_one_moment_of_a_journal_that_is_written(path: Path) -> None:
    write(path, opened("a"), ended("a", 1), opened("b"), ended("b", 2))
    with closing(open_for_reading(path)) as connection:
        sessions = load(connection)
        found = [next(sessions)]
        write(path, Closed("b", "closed"))
        found += sessions
    assert [(each.id, len(each.turns), each.damaged, each.unusable) for each in found] == [
        ("a", 1, False, ""),
        ("b", 1, False, ""),
    ]
    assert [each.id for each in read_sessions(path)] == ["a"]


def test_a_writer_that_is_about_to_end_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = Journal(path, "commit", "v")
    first.append(opened())
    monkeypatch.setattr(lock.time, "sleep", lambda _seconds: first.close())
    with Journal(path, "commit", "v", lock_timeout=60.0) as second:
        assert [session.id for session in second.load()] == ["s"]
    assert "waiting up to" in caplog.text


# --- versions ---


def test_a_newer_journal_is_refused(path: Path) -> None:
    write(path, opened())
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(JournalError, match="version 99"):
        Journal(path, "commit", "v")
    with pytest.raises(JournalError, match="version 99"):
        read_sessions(path)


def as_version_1(path: Path) -> None:
    """What a journal looked like before rows leaned on each other's sums."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("ALTER TABLE turns DROP COLUMN details")
        for column in ("origin", "tenant_sum", "about_sum", "head_sum", "tools", "settings"):
            connection.execute(f"ALTER TABLE sessions DROP COLUMN {column}")
        for table in ("finished", "requests"):
            connection.execute(f"ALTER TABLE {table} DROP COLUMN checksum")
        rows = connection.execute("SELECT number, turn_id, input, output, finish FROM turns").fetchall()
        for number, turn_id, said_in, said_out, finish in rows:
            found = zlib.crc32(said_in + said_out, zlib.crc32(f"{turn_id} {finish}".encode()))
            connection.execute("UPDATE turns SET checksum = ? WHERE number = ?", (found, number))
        connection.execute("PRAGMA user_version = 1")


def test_a_journal_of_version_1_keeps_all_that_was_whole(path: Path) -> None:
    write(path, opened(), *(ended("s", number) for number in range(1, 301)))
    write(path, Forked("f", "s", 200, 1.0), ended("f", 7), Requested("s", "q", "rewind 1", ""), opened("new"))
    write(path, opened("bad"), *(ended("bad", number) for number in (401, 402, 403)))
    whole = {session.id: session for session in read_sessions(path)}
    as_version_1(path)
    change(path, "UPDATE turns SET output = x'01000000' WHERE turn_id = 't402'")
    with pytest.raises(
        JournalError, match="has version 1; start a server on it once to upgrade it to version 5"
    ):
        read_sessions(path)
    found = {session.id: session for session in write(path)}
    assert [turn.turn_id for turn in found["bad"].turns] == ["t401"] and found["bad"].damaged
    assert found.keys() == whole.keys()
    assert all(found[name] == whole[name] for name in ("s", "f", "new"))
    assert [session.damaged for session in read_sessions(path)] == [False] * 4, "also of the one that was cut"


def test_a_journal_of_version_3_is_upgraded(path: Path) -> None:
    """The file was written by the program before version 4."""
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.decompress(VERSION_3.read_bytes()))
    sessions = {session.id: session for session in write(path)}
    assert {name: [turn.turn_id for turn in session.turns] for name, session in sessions.items()} == {
        "s": ["t1", "t2"],
        "f": ["t1", "t3"],
        "plain": [],
    }
    assert history(sessions["s"]) == [1, 2, 1, 100, 101, 102, 103, 1, 2, 2, 200, 201, 202]
    assert sessions["s"].finished[0].answer is None and sessions["s"].finished[0].text == "words 1"
    assert all(session.about.tools == "[]" and not session.damaged for session in sessions.values())
    (call,) = ANSWERED.calls
    details = details_of(None, AnswerSpec("hermes"), ANSWERED)
    turn = replace(ended("s", 3).turn, answer=ANSWERED)
    found = {session.id: session for session in write(path, Ended("s", (7,), turn, details))}
    assert found["s"].finished[-1] == turn
    assert [list(calls_in(turn.details, 4)) for turn in found["s"].turns] == [[], [], [call]]


def test_a_journal_of_version_4_is_upgraded(path: Path) -> None:
    tools = '[{"type": "function", "function": {"name": "f"}}]'
    write(path, replace(opened(), tools=tools), ended("s", 1), opened("plain"))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("ALTER TABLE sessions DROP COLUMN settings")
        connection.execute("PRAGMA user_version = 4")
    sessions = write(path, Retained("s", 7.0, '{"pin": true}'))
    assert {
        each.id: (each.about.ttl, each.about.settings, each.about.tools, each.damaged) for each in sessions
    } == {
        "s": (7.0, '{"pin": true}', tools, False),
        "plain": (60.0, "{}", "[]", False),
    }


def test_settings_come_back_and_go_to_forks(path: Path) -> None:
    kept = '{"pin": true, "priority": -2}'
    write(path, replace(opened(), settings='{"priority": 1}'), ended("s", 1), opened("other"))
    write(path, Forked("early", "s", 1, 1.0), Retained("s", None, kept), Forked("late", "s", 1, 2.0))
    found = {each.id: (each.about.ttl, each.about.settings) for each in read_sessions(path)}
    assert found == {
        "s": (None, kept),
        "other": (60.0, "{}"),
        "early": (60.0, '{"priority": 1}'),
        "late": (None, kept),
    }
    assert ("retained", f"ttl None, {kept}") in read_log(path, "s")
    change(path, "UPDATE sessions SET settings = '{}' WHERE id = 's'")
    damaged = {each.id: each for each in write(path, Forked("worse", "s", 1, 3.0))}
    assert damaged["s"].about.settings == "{}"
    assert (damaged["worse"].about.settings, damaged["worse"].about.metadata) == ("{}", "{}")


def test_tools_and_calls_come_back_and_go_to_forks(path: Path) -> None:
    tools = '[{"type": "function", "function": {"name": "f"}}]'
    details = details_of(Grammar(Kind.REGEX, "a+"), AnswerSpec("hermes", seed="t1"), ANSWERED)
    turn = replace(ended("s", 1).turn, answer=ANSWERED)
    write(path, replace(opened(), tools=tools), Ended("s", (1,), turn, details), Forked("f", "s", 1, 1.0))
    write(path, Truncated("f", 1, 2))
    found = {session.id: session for session in read_sessions(path)}
    assert found["s"].about.tools == found["f"].about.tools == tools
    assert found["s"].finished == [turn] and not found["f"].finished
    assert [
        len(calls_in(found[name].turns[0].details, len(found[name].turns[0].output))) for name in "sf"
    ] == [
        1,
        0,
    ], "a call that was cut off is no call"
    asked = json.loads(found["f"].turns[0].details)
    assert asked["grammar"] == {"kind": "regex", "source": "a+"} and asked["answer"]["calls"] == "hermes"


def test_tools_may_change(path: Path) -> None:
    write(path, opened(), Retooled("s", "[1]"), Forked("f", "s", 0, 1.0), Retooled("f", "[]"))
    assert [session.about.tools for session in write(path, Retooled("gone", "[2]"))] == ["[]", "[1]"]
    change(path, "UPDATE sessions SET metadata = '{}' WHERE id = 's'")
    write(path, Retooled("s", "[3]"))
    damaged = {session.id: session for session in read_sessions(path)}["s"]
    assert damaged.about.tools == "[]", "a damaged description stays damaged"


@pytest.mark.parametrize("damage", ["tools = '{}'", "tools = '[1'", "tools = '[2]'", "tools = x'ff'"])
def test_damaged_tools_are_dropped(path: Path, damage: str) -> None:
    write(path, replace(opened(), tools="[1]"), ended("s", 1))
    change(path, f"UPDATE sessions SET {damage}")
    (session,) = read_sessions(path)
    assert session.about.tools == "[]" and len(session.turns) == 1


def test_damaged_details_end_the_history(place: str) -> None:
    write(place, opened(), ended("s", 1), replace(ended("s", 2), details='{"calls": []}'))
    change(place, "UPDATE turns SET details = '{}' WHERE turn_id = 't2'")
    (session,) = read_sessions(place)
    assert [turn.turn_id for turn in session.turns] == ["t1"] and session.damaged


@pytest.mark.parametrize(
    "value", [1, {}, {"reasoning": 1, "calls": [], "reasoning_tokens": 0}, {**asdict(ANSWERED), "calls": [1]}]
)
def test_a_wrong_answer_drops_the_result(place: str, value: object) -> None:
    write(place, opened(), Ended("s", (1,), replace(ended("s", 1).turn, answer=value)))  # type: ignore[arg-type]
    (session,) = read_sessions(place)
    assert session.finished == [] and len(session.turns) == 1


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk on which no file can grow beyond that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("version", [0, 1])
def test_a_full_disk_is_not_taken_for_damage_while_tables_are_made(path: Path, version: int) -> None:
    if version == 1:
        write(path, opened(), *(ended("s", number, tuple(range(500))) for number in range(40)))
        as_version_1(path)
    with files_of_at_most(40_000), pytest.raises(sqlite3.OperationalError, match="disk"):
        Journal(path, "commit", "v")
    assert [len(session.turns) for session in write(path)] == [40] * version


def test_an_older_journal_is_brought_up_step_by_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, opened(), ended("s", 1))

    def add_column(connection: sqlite3.Connection) -> None:
        connection.execute("ALTER TABLE facts ADD COLUMN since TEXT")

    def fill_it(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE facts SET since = 'then'")
        if fails:
            raise OSError("the disk is full")

    monkeypatch.setattr(journal_tables, "SCHEMA", 7)
    added = journal_tables.CREATE.replace("value TEXT NOT NULL", "value TEXT NOT NULL, since TEXT", 1)
    monkeypatch.setattr(journal_tables, "CREATE", added)
    monkeypatch.setattr(journal_tables, "UPGRADES", {5: add_column, 6: fill_it})
    fails = True
    with pytest.raises(OSError, match="full"):
        write(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (6,), "each step whole or not at all"
        assert set(connection.execute("SELECT since FROM facts").fetchall()) == {(None,)}
    fails = False
    (session,) = write(path)
    assert history(session) == [1, 2, 3, 100, 101, 102, 103]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (7,)
        assert ("then",) in connection.execute("SELECT since FROM facts").fetchall()


@pytest.mark.parametrize("durability", ["off", "commit", "fsync"])
def test_every_setting_writes_the_same(place: str, durability: str) -> None:
    with closing(open_store(place, durability, "v")) as journal:  # type: ignore[arg-type]
        journal.append(opened())
        journal.append(ended("s", 1))
    assert len(read_sessions(place)[0].turns) == 1


class NoRoomToShare(sqlite3.Connection):
    """As on a file system that is mounted for reading: what readers share with a writer cannot be set up."""

    def execute(self, *_: object) -> sqlite3.Cursor:
        raise sqlite3.OperationalError("unable to open database file")


def test_a_journal_is_read_where_nothing_can_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, opened(), ended("s", 1))
    connect = sqlite3.connect

    def connect_there(place: str, uri: bool = False) -> sqlite3.Connection:
        kind = NoRoomToShare if place.endswith("?mode=ro") else sqlite3.Connection
        return connect(place, uri=uri, factory=kind)

    monkeypatch.setattr(sqlite3, "connect", connect_there)
    with pytest.raises(sqlite3.OperationalError):
        read_sessions(path)
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    (session,) = read_sessions(path)
    assert session.tokens == 7
    path.with_name(f"{path.name}-wal").write_bytes(b"changes")
    with pytest.raises(JournalError, match=r"its last changes are in sessions.journal-wal: copy both"):
        read_sessions(path)
