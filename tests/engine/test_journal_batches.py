"""A write-ahead log that lost what was committed: it is told what is missing, and nothing else is refused."""

import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.engine.durable import journal_batches
from holdfast.engine.durable.journal import Durability, Journal, JournalError
from holdfast.engine.durable.journal_batches import list_path, read_list
from holdfast.engine.durable.journal_reading import read_sessions
from holdfast.engine.durable.records import Closed, Record, Requested
from holdfast.engine.options import OptionError
from tests.engine.conftest import Make
from tests.engine.test_journal import crash, ended, opened, write
from tests.engine.tiny import greedy, word


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.journal"


def die(path: Path, *batches: list[Record], durability: Durability = "commit") -> None:
    """Write batches, each a transaction, and die without any goodbyes: the write-ahead log is left."""
    child = os.fork()
    if child == 0:
        journal = Journal(path, durability, "v")
        for batch in batches:
            for record in batch:
                journal.append(record)
            journal.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def half(log: Path) -> None:
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])


def first_bit(log: Path) -> None:
    """A bit of the first frame."""
    content = bytearray(log.read_bytes())
    content[32 + 24 + 9] ^= 1
    log.write_bytes(bytes(content))


def last_bit(log: Path) -> None:
    content = bytearray(log.read_bytes())
    content[-1] ^= 1
    log.write_bytes(bytes(content))


def gone(log: Path) -> None:
    log.unlink()


def copied(path: Path, to: Path) -> Path:
    """All files of a journal, elsewhere: what shared memory says of the log must not help."""
    to.mkdir()
    for file in (path, log_of(path), list_path(path)):
        shutil.copy(file, to / file.name)
    return to / path.name


@pytest.mark.parametrize("harm", [half, first_bit, last_bit, gone])
def test_a_damaged_log_is_refused_and_says_what_is_missing(
    path: Path, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    write(path, opened("a"), ended("a", 1))
    die(
        path,
        [opened("b"), ended("a", 2)],
        [ended("b", 3)],
        [Requested("b", "q", "rewind 0", ""), ended("a", 4)],
    )
    whole = copied(path, tmp_path / "whole")
    damaged = copied(path, tmp_path / "damaged")
    harm(log_of(damaged))
    before = [file.read_bytes() for file in (damaged, log_of(damaged)) if file.exists()]
    for _ in range(2):
        with pytest.raises(JournalError, match=r"has lost its last \d acknowledged transactions") as caught:
            Journal(damaged, "commit", "v")
        told = str(caught.value)
        assert "session a: " in told and "turn t4" in told
        assert "restore a copy of sessions.journal and sessions.journal-wal" in told
        assert "remove sessions.journal.batches to continue" in told
    assert [file.read_bytes() for file in (damaged, log_of(damaged)) if file.exists()][
        : len(before)
    ] == before
    list_path(damaged).unlink()
    assert [session.id for session in write(damaged)][:1] == ["a"], "it goes on with what is left"
    found = {session.id: [turn.turn_id for turn in session.turns] for session in write(whole)}
    assert found == {"a": ["t1", "t2", "t4"], "b": ["t3"]}, "the same files without the damage are whole"


def test_an_engine_refuses_a_journal_that_lost_a_turn(make: Make, path: Path, tmp_path: Path) -> None:
    engine = make(journal=str(path))
    session = engine.session(id="talk")
    session.say([word("the"), word("river")], greedy(3)).wait()
    turn = session.say([word("runs")], greedy(3)).wait().id
    copy = copied(path, tmp_path / "copy")
    last_bit(log_of(copy))
    with pytest.raises(OptionError, match=f"cannot be used: .*session talk: turn {turn}") as caught:
        make(journal=str(copy))
    assert caught.value.option == "journal"


@pytest.mark.parametrize("point", ["before append", "mid-record", "after write", "after fsync"])
def test_a_death_at_any_point_of_a_transaction_is_no_alarm(path: Path, point: str) -> None:
    write(path, opened(), ended("s", 1))
    crash(path, ended("s", 2), point=point)
    (session,) = write(path)
    assert len(session.turns) == (2 if point == "after fsync" else 1)


def test_a_restored_copy_is_no_alarm(path: Path, tmp_path: Path) -> None:
    """The list stays where the newer journal was; it names another run than the copy."""
    write(path, opened(), ended("s", 1))
    saved = tmp_path / "saved"
    shutil.copy(path, saved)
    write(path, ended("s", 2))
    die(path, [ended("s", 3)])
    for file in (log_of(path), path.with_name(path.name + "-shm")):
        file.unlink()
    shutil.copy(saved, path)
    (session,) = write(path)
    assert [turn.turn_id for turn in session.turns] == ["t1"]


@pytest.mark.parametrize("list_of", ["none", "empty", "torn", "foreign", "unreadable"])
def test_a_list_that_says_nothing_keeps_nobody_out(path: Path, list_of: str) -> None:
    write(path, opened(), ended("s", 1))
    die(path, [ended("s", 2)], [ended("s", 3)])
    listed = list_path(path)
    content = listed.read_bytes()
    if list_of == "none":
        listed.unlink()
    else:
        listed.write_bytes(
            {
                "empty": b"",
                "torn": content[:-7],
                "foreign": b"Dear diary\n",
                "unreadable": bytes([content[0] ^ 1]) + content[1:],
            }[list_of]
        )
    (session,) = write(path)
    assert [turn.turn_id for turn in session.turns] == ["t1", "t2", "t3"]


@pytest.mark.parametrize("durability", ["off", "commit", "fsync"])
def test_what_a_machine_that_went_down_may_lose_is_told_and_not_refused(
    path: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, opened(), ended("s", 1))
    die(path, [ended("s", 2)], durability=durability)
    half(log_of(path))
    path.with_name(path.name + "-shm").unlink()
    monkeypatch.setattr(journal_batches, "boot_id", lambda: "another life")
    if durability == "fsync":
        with pytest.raises(JournalError, match="session s: turn t2"):
            Journal(path, durability, "v")
        return
    (session,) = write(path)
    assert [turn.turn_id for turn in session.turns] == ["t1"]
    assert "session s: turn t2. The machine crashed" in caplog.text


def test_the_list_is_private_bounded_and_under_the_journal_s_own_name(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_batches, "BYTES_MAX", 2000)
    monkeypatch.setattr(journal_batches, "LINES_KEPT", 5)
    link = path.with_name("link")
    link.symlink_to(path)
    sizes = []
    with Journal(link, "commit", "v") as journal:
        journal.append(opened())
        for number in range(100):
            journal.append(ended("s", number))
            assert journal.flush()
            sizes.append(list_path(path).stat().st_size)
    assert max(sizes) < 4000
    listed = read_list(link)
    assert listed is not None and max(listed.batches) == 100
    assert listed.batches[100] == [("s", "turn t99")]
    assert list_path(path).stat().st_mode & 0o077 == 0
    assert not list_path(path.with_name("link.batches")).exists()


def test_a_list_that_cannot_be_written_stops_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Journal(path, "commit", "v") as journal:

        def full(descriptor: int, content: bytes) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(journal_batches.os, "write", full)
        for record in (opened(), ended("s", 1), ended("s", 2), opened("t"), Closed("t", "closed")):
            journal.append(record)
            assert journal.flush()
    monkeypatch.undo()
    assert caplog.text.count("damage could go undetected") == 1
    assert len(write(path)[0].turns) == 2


def test_a_number_that_is_none_is_damage(path: Path) -> None:
    write(path, opened())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE facts SET value = 'many' WHERE name = 'batch'")
        connection.commit()
    with pytest.raises(JournalError, match="the number of its last batch is invalid"):
        Journal(path, "commit", "v")
    assert [session.id for session in read_sessions(path)] == ["s"]
