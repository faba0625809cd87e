"""Damaged journals: what one session lost no other loses, and no damaged file is taken for an empty one."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.engine.durable import journal
from holdfast.engine.durable.journal import Journal, JournalError
from holdfast.engine.durable.journal_reading import read_sessions
from holdfast.engine.durable.records import (
    SCHEMA,
    About,
    Closed,
    Forked,
    Opened,
    Record,
    Requested,
    SnapshotWritten,
    StoredSession,
    Truncated,
)
from holdfast.engine.engine import Engine
from holdfast.engine.options import OptionError
from tests.engine.conftest import Make
from tests.engine.test_journal import as_version_1, change, ended, opened, rows, write
from tests.engine.tiny import greedy, word

HEADER = 100  # Bytes at the start of a file, where SQLite counts how often it was opened for writing.
SAID = [word("the"), word("river"), word("runs")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.journal"


def settle(path: Path) -> bytearray:
    """Everything in one file, and its content."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return bytearray(path.read_bytes())


def two(path: Path) -> None:
    """A journal of two sessions that have everything."""
    for name in ("s", "other"):
        write(
            path,
            Opened(name, f"{name}-owner", 60.0, '{"caller": 7}', "Be brief.", 1000.0),
            ended(name, 1),
            ended(name, 2),
            Requested(name, "q1", "rewind 1", ""),
            Requested(name, "q2", "rewind 2", ""),
            SnapshotWritten(name, f"{name}.file", 7, 4096),
        )


def by_name(sessions: list[StoredSession]) -> dict[str, StoredSession]:
    return {session.id: session for session in sessions}


BAD = "CAST(x'7bff7d' AS TEXT)"  # Three bytes that are no text.

PARTS = {
    "ttl": (f"UPDATE sessions SET ttl = {BAD} WHERE id = 's'", "ttl", None),
    "negative ttl": ("UPDATE sessions SET ttl = -4.0 WHERE id = 's'", "ttl", None),
    "metadata": (f"UPDATE sessions SET metadata = {BAD} WHERE id = 's'", "metadata", "{}"),
    "no object": ("UPDATE sessions SET metadata = '[7]' WHERE id = 's'", "metadata", "{}"),
    "a number": ("UPDATE sessions SET metadata = x'37' WHERE id = 's'", "metadata", "{}"),
    "system": (f"UPDATE sessions SET system = {BAD} WHERE id = 's'", "system", None),
    "created": (f"UPDATE sessions SET created = {BAD} WHERE id = 's'", "created", 0.0),
    "parent": (f"UPDATE sessions SET parent = {BAD} WHERE id = 's'", "parent", None),
    "request": (
        f"UPDATE requests SET asked = {BAD} WHERE session = 's' AND request_id = 'q1'",
        "requests",
        {"q2": ("rewind 2", "")},
    ),
    "file": (f"UPDATE snapshots SET file = {BAD} WHERE session = 's'", "snapshot", None),
    "path": ("UPDATE snapshots SET file = '../elsewhere' WHERE session = 's'", "snapshot", None),
    "whole path": ("UPDATE snapshots SET file = '/elsewhere' WHERE session = 's'", "snapshot", None),
    "length": ("UPDATE snapshots SET length = 'seven' WHERE session = 's'", "snapshot", None),
    "bytes": ("UPDATE snapshots SET bytes = -1 WHERE session = 's'", "snapshot", None),
}


@pytest.mark.parametrize("part", PARTS)
def test_what_is_damaged_of_a_session_is_forgotten_and_nothing_else(
    path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    two(path)
    whole = by_name(read_sessions(path))
    statement, field, instead = PARTS[part]
    change(path, statement)
    found = by_name(write(path))
    assert found["other"] == whole["other"]
    expected = whole["s"]
    if field in About._fields:
        expected.about = expected.about._replace(**{field: instead})
    else:
        setattr(expected, field, instead)
    assert found["s"] == expected
    assert "session s: " in caplog.text and "was dropped" in caplog.text
    assert by_name(read_sessions(path)) == found


ANSWERS = {
    "bytes": BAD,
    "half": "'{\"turn_id\": 7'",
    "no object": "'[1, 2]'",
    "another": "replace(result, 't1', 't9')",
    "a token": "replace(result, '101', '1.1')",
    "no tokens": "replace(result, '[100, 101, 102, 103]', '3')",
    "half a character": "replace(result, 'words', '\\ud800')",
    "blob": "CAST(result AS BLOB)",
}


@pytest.mark.parametrize("damage", ANSWERS)
def test_an_answer_that_cannot_be_read_is_forgotten(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    two(path)
    change(path, f"UPDATE finished SET result = {ANSWERS[damage]} WHERE session = 's' AND turn_id = 't1'")
    found = by_name(write(path))
    assert [answer.turn_id for answer in found["s"].finished] == ["t2"]
    assert [answer.turn_id for answer in found["other"].finished] == ["t1", "t2"]
    assert (len(found["s"].turns), found["s"].damaged) == (2, False)
    assert "session s: the result of turn 't1' is damaged" in caplog.text


TURNS = {
    "id": f"turn_id = {BAD}",
    "finish": f"finish = {BAD}",
    "finish of another kind": "finish = x'73746f70'",
    "input": "input = 7",
    "output": f"output = {BAD}",
    "place": f"depth = {BAD}",
    "link": "before = number",
    "link to a later one": "before = number + 1",
}


@pytest.mark.parametrize("damage", TURNS)
def test_a_turn_that_cannot_be_read_ends_its_history(path: Path, damage: str) -> None:
    """Links that go in a circle are walked once; what is said afterwards is there after the next restart."""
    write(path, opened(), *(ended("s", number) for number in (1, 2, 3, 4)))
    change(path, f"UPDATE turns SET {TURNS[damage]} WHERE turn_id = 't3'")
    with Journal(path, "commit", "v") as journal:
        (session,) = journal.load()
        assert session.damaged
        kept = [turn.turn_id for turn in session.turns]
        assert kept == ["t1", "t2"][: len(kept)]
        journal.append(ended("s", 5))
        assert journal.flush()
    (after,) = read_sessions(path)
    assert [turn.turn_id for turn in after.turns] == [*kept, "t5"]
    write(path, Truncated("s", 0, None))
    assert read_sessions(path)[0].turns == []


def test_a_session_of_nobody_is_not_given_to_anybody(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    two(path)
    change(path, f"UPDATE sessions SET tenant = {BAD} WHERE id = 's'")
    found = by_name(write(path))
    assert (found["s"].unusable, found["other"].unusable) == ("its tenant is damaged", "")
    assert len(found["s"].turns) == 2
    change(path, f"UPDATE sessions SET id = {BAD} WHERE id = 's'")
    assert list(by_name(write(path))) == ["other"]
    assert "with a damaged name stays in the journal: '{\\udcff}'" in caplog.text
    assert len(by_name(read_sessions(path))["other"].turns) == 2


# --- rows that can be read, and are not what was written ---

LAST = "(SELECT head FROM sessions WHERE id = '{}')"

UNTOLD = {
    "another's": f"head = {LAST.format('other')}",
    "an earlier one": "head = (SELECT before FROM turns WHERE number = head)",
    "none": "head = NULL",
    "one that is not there": "head = head + 64",
    "no number": f"head = {BAD}",
    "as it was": "head_sum = head_sum + 1",
}


@pytest.mark.parametrize("damage", UNTOLD)
def test_a_history_whose_end_cannot_be_told_is_left_where_it_is(path: Path, damage: str) -> None:
    two(path)
    whole = by_name(read_sessions(path))
    before = settle(path)
    change(path, f"UPDATE sessions SET {UNTOLD[damage]} WHERE id = 's'")
    for _ in range(2):
        found = by_name(write(path))
        assert (found["s"].turns, found["other"]) == ([], whole["other"])
        assert found["s"].unusable == "the link to its last turn is damaged"
        assert rows(path, "turns") == 4
    path.write_bytes(before)
    assert by_name(read_sessions(path)) == whole


def test_a_history_without_its_last_turn_is_left_where_it_is(path: Path) -> None:
    two(path)
    change(path, "DELETE FROM turns WHERE number = (SELECT head FROM sessions WHERE id = 's')")
    for _ in range(2):
        assert by_name(write(path))["s"].unusable == "the link to its last turn is damaged"
        assert rows(path, "turns") == 3


def test_what_a_damaged_session_may_need_is_not_swept_away(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "UNLINKED_MAX", 1)
    two(path)
    change(path, "UPDATE sessions SET head = NULL WHERE id = 's'")
    with Journal(path, "commit", "v") as written:
        written.load()
        written.append(Closed("other", "closed"))
        assert written.flush()
    assert rows(path, "turns") == 4
    change(path, "UPDATE sessions SET head = 2 WHERE id = 's'")
    (mended,) = write(path)
    assert len(mended.turns) == 2 and rows(path, "turns") == 2


def renamed(path: Path, name: bytes, instead: bytes) -> None:
    """Another name in the row of a session, which stays where it is."""
    content = settle(path)
    with closing(sqlite3.connect(path)) as connection:
        page = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sessions'").fetchone()[0]
        size = connection.execute("PRAGMA page_size").fetchone()[0]
    place = content.index(name, size * (page - 1), size * page)
    content[place : place + len(name)] = instead
    path.write_bytes(bytes(content))


FIVE = [f"red/{letter}" for letter in "abcde"]
UNFOUND = "the journal's index does not find it"


def five(path: Path) -> None:
    write(path, *(opened(name) for name in FIVE))
    write(path, *(ended(name, number) for name in FIVE for number in (1, 2)))


def test_sessions_that_a_changed_name_hides_are_left_where_they_are(path: Path) -> None:
    five(path)
    whole = by_name(read_sessions(path))
    renamed(path, b"red/c", b"zed/c")
    for start in range(2):
        with Journal(path, "commit", "v") as written:
            found = by_name(written.load())
            assert [found[name].unusable for name in FIVE if name != "red/c"] == ["", "", UNFOUND, UNFOUND]
            assert found["zed/c"].unusable and found["zed/c"].damaged
            written.append(ended("red/a", 3 + start))
            written.append(Truncated("red/b", 1 - start, None))
            assert written.flush()
    assert rows(path, "turns") == 12, "nothing is swept away"
    renamed(path, b"zed/c", b"red/c")
    mended = by_name(write(path))
    assert [turn.turn_id for turn in mended["red/a"].turns] == ["t1", "t2", "t3", "t4"]
    assert mended["red/b"].turns == []
    assert all(mended[name] == whole[name] for name in ("red/c", "red/d", "red/e"))


@pytest.mark.parametrize(
    "record",
    [ended("red/d", 3), Truncated("red/e", 0, None), Forked("f", "red/d", 1, 1.0), Closed("red/d", "closed")],
)
def test_what_a_session_that_cannot_be_found_would_lose_is_not_acknowledged(
    path: Path, record: Record
) -> None:
    five(path)
    renamed(path, b"red/c", b"zed/c")
    with Journal(path, "commit", "v") as written:
        written.append(record)
        assert not written.flush()
        assert written.fault is not None and "does not find" in written.fault
        written._pending.clear()
    assert rows(path, "turns") == 10


def test_a_name_that_two_rows_have_is_nobodys(path: Path) -> None:
    five(path)
    renamed(path, b"red/c", b"red/b")
    found = [session for session in write(path) if session.id == "red/b"]
    assert [session.damaged and bool(session.unusable) for session in found] == [True, True]
    assert rows(path, "turns") == 10


def test_a_session_that_was_never_written_may_be_closed(path: Path) -> None:
    assert write(path, opened(), Closed("never", "closed")) == write(path)


COLUMNS = "turn_id, input, output, finish, checksum"
SECOND = f"(SELECT before FROM turns WHERE number = {LAST})"
LINKS = {
    "before the last": f"before = {SECOND.format('other')} WHERE number = {LAST.format('s')}",
    "in its place": f"({COLUMNS}) = (SELECT {COLUMNS} FROM turns WHERE number = {SECOND.format('other')}) "
    f"WHERE number = {SECOND.format('s')}",
}


@pytest.mark.parametrize("damage", LINKS)
def test_no_turn_of_another_session_gets_into_a_history(path: Path, damage: str) -> None:
    """Whole turns, and as many as there should be, but of somebody else."""
    for name, first in (("other", 91), ("s", 1)):
        write(path, opened(name), *(ended(name, first + place) for place in range(3)))
    change(path, f"UPDATE turns SET {LINKS[damage]}")
    found = by_name(write(path))
    assert [turn.turn_id for turn in found["s"].turns] in ([], ["t1"]) and found["s"].damaged
    assert not found["other"].damaged


def test_forks_share_their_origin(path: Path) -> None:
    write(path, opened(), ended("s", 1), ended("s", 2), Forked("f", "s", 1, 1.0), Forked("g", "f", 0, 2.0))
    write(path, ended("f", 3), ended("g", 4), Closed("s", "closed"), Forked("h", "f", 2, 3.0))
    write(path, Forked("empty", "f", 0, 4.0))
    found = by_name(read_sessions(path))
    told = {name: [turn.turn_id for turn in session.turns] for name, session in found.items()}
    assert told == {"f": ["t1", "t3"], "g": ["t4"], "h": ["t1", "t3"], "empty": []}
    assert not any(session.damaged for session in found.values())


@pytest.mark.parametrize(
    "part", ["ttl = 61.0", "metadata = '{\"caller\": 8}'", "system = 'Be brave.'", "parent = 'other'"]
)
def test_a_description_that_was_changed_is_forgotten(
    path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    two(path)
    change(path, f"UPDATE sessions SET {part} WHERE id = 's'")
    found = by_name(write(path))["s"]
    assert found.about == (None, "{}", None, 1000.0, None, "[]", "{}")
    assert (len(found.turns), found.damaged, found.unusable) == (2, False, "")
    assert (
        "session s: the time to live, metadata, system text, parent, tools or settings is damaged"
        in caplog.text
    )


@pytest.mark.parametrize("part", ["system = 'Be brave.'", f"metadata = {BAD}", "created = 7.0"])
def test_a_fork_does_not_make_a_damaged_description_whole(path: Path, part: str) -> None:
    write(path, opened(), ended("s", 1), Forked("whole", "s", 1, 1.0))
    change(path, f"UPDATE sessions SET {part} WHERE id = 's'")
    found = by_name(write(path, Forked("f", "s", 1, 1.0), Forked("g", "whole", 1, 1.0)))
    described = {name: each.about[:3] for name, each in found.items()}
    assert described["f"] == (None, "{}", None)
    assert described["g"] == described["whole"] == (60.0, '{"caller": 7}', "Be brief.")
    assert (len(found["f"].turns), found["f"].damaged, found["f"].unusable) == (1, False, "")


def test_a_fork_of_what_was_no_text_in_version_1_can_be_written(path: Path) -> None:
    write(path, opened(), ended("s", 1))
    as_version_1(path)
    change(path, f"UPDATE sessions SET metadata = {BAD}")
    found = by_name(write(path, Forked("f", "s", 1, 1.0)))
    assert (found["f"].about[1:3], len(found["f"].turns)) == (("{}", "Be brief."), 1)


def test_a_new_session_has_no_answers_of_one_that_had_its_name(path: Path) -> None:
    two(path)
    change(path, "UPDATE sessions SET id = 'r' WHERE id = 's'")
    change(path, "UPDATE sessions SET id = 'q' WHERE id = 'other'")
    found = by_name(write(path, opened("s"), Forked("other", "s", 0, 1.0)))
    for name in ("s", "other"):
        assert (found[name].finished, found[name].requests, found[name].snapshot) == ([], {}, None)


def test_nothing_is_given_to_an_owner_that_was_changed(path: Path) -> None:
    two(path)
    change(path, "UPDATE sessions SET tenant = 'other-owner' WHERE id = 's'")
    found = by_name(write(path))
    assert (found["s"].tenant, found["s"].unusable) == ("", "its tenant is damaged")
    assert found["other"].unusable == ""


def test_what_was_changed_is_not_answered_again(path: Path) -> None:
    two(path)
    change(path, "UPDATE finished SET result = replace(result, 'words', 'sword') WHERE session = 's'")
    change(path, "DELETE FROM finished WHERE session = 's' AND turn_id = 't1'")
    change(path, "UPDATE finished SET session = 's' WHERE session = 'other' AND turn_id = 't1'")
    change(path, "UPDATE requests SET answer = 'x' WHERE session = 's' AND request_id = 'q1'")
    found = by_name(write(path))["s"]
    assert found.finished == [] and found.requests == {"q2": ("rewind 2", "")}


# --- the whole file ---


def test_an_engine_starts_without_the_one_answer_that_it_cannot_read(make: Make, path: Path) -> None:
    engine = make(journal=str(path))
    known: dict[str, list[int]] = {}
    for name in ("a", "b"):
        engine.session(id=name).say(SAID, greedy(3)).wait()
        known[name] = history(engine, name)
    engine.close()
    content = settle(path)
    content[content.index(b'"outcome"') + 2] ^= 0x80
    path.write_bytes(bytes(content))
    engine = make(journal=str(path))
    assert {name: history(engine, name) for name in engine.sessions()} == known
    assert sorted(len(entry.finished) for entry in engine.loop.session_log.sessions.values()) == [0, 1]


def history(engine: Engine, name: str) -> list[int]:
    tokens = engine.loop.scheduler.registry.find(name).sequence.tokens
    return tokens.slice(0, len(tokens))


def half(path: Path) -> None:
    path.write_bytes(bytes(settle(path)[: path.stat().st_size // 2]))


def other_words(path: Path) -> None:
    path.write_text("Dear diary, " * 1000)


def empty_page(path: Path) -> None:
    """The first page of a table is gone."""
    content = settle(path)
    with closing(sqlite3.connect(path)) as connection:
        page = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'log'").fetchone()[0]
        size = connection.execute("PRAGMA page_size").fetchone()[0]
    content[size * (page - 1) : size * page] = bytes(size)
    path.write_bytes(bytes(content))


def other_column(path: Path) -> None:
    content = settle(path)
    place = content.index(b"created REAL")
    content[place] ^= 1
    path.write_bytes(bytes(content))


def no_key(path: Path) -> None:
    """One bit of what SQLite knows of a table: its number is no key any more, and of another type."""
    content = settle(path)
    place = content.index(b"PRIMARY KEY, before")
    content[place + 4] ^= 8
    path.write_bytes(bytes(content))


def no_name(path: Path) -> None:
    """What SQLite says of the table cannot be read."""
    content = settle(path)
    place = content.index(b"CREATE TABLE turns")
    content[place : place + 18] = b"CREATE TABLE \xf3urns"
    path.write_bytes(bytes(content))


def no_version(path: Path) -> None:
    change(path, "PRAGMA user_version = -7")


@pytest.mark.parametrize("harm", [half, other_words, empty_page, other_column, no_key, no_name, no_version])
def test_a_damaged_file_is_refused_and_left_alone(
    make: Make, path: Path, harm: Callable[[Path], None]
) -> None:
    engine = make(journal=str(path))
    engine.session(id="a").say(SAID, greedy(3)).wait()
    engine.close()
    settle(path)
    harm(path)
    before = path.read_bytes()[HEADER:]
    for _ in range(2):
        with pytest.raises(OptionError, match=r"damaged.*restore a copy of it, or move it away") as caught:
            make(journal=str(path))
        assert caught.value.option == "journal"
    with pytest.raises((JournalError, sqlite3.Error, UnicodeDecodeError)):
        Journal(path, "commit", "v").load()
    assert path.read_bytes()[HEADER:] == before
    path.unlink()
    assert make(journal=str(path)).sessions() == [], "the lock was let go"


@pytest.mark.parametrize("version", [0, 1, SCHEMA])
def test_a_database_of_another_program_is_refused_and_left_alone(
    make: Make, path: Path, version: int
) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE invoices (number INTEGER PRIMARY KEY, sum REAL)")
        other.execute("INSERT INTO invoices VALUES (1, 9.5)")
        other.execute(f"PRAGMA user_version = {version}")
        other.commit()
    before = path.read_bytes()
    with pytest.raises(OptionError, match="a database of another program; name another file") as caught:
        make(journal=str(path))
    assert caught.value.option == "journal"
    assert path.read_bytes() == before


def test_nothing_is_shown_of_tables_that_are_others(path: Path) -> None:
    two(path)
    no_key(path)
    with pytest.raises(JournalError, match="the columns of table turns do not match"):
        read_sessions(path)
