"""The journal's thread: order, what is durable, faults that pass, and compaction between batches."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.engine.durable import journal as journal_module
from holdfast.engine.durable import journal_compaction
from holdfast.engine.durable.journal import Journal
from holdfast.engine.durable.journal_reading import read_sessions
from holdfast.engine.durable.journal_writer import JournalWriter, Settled
from holdfast.engine.durable.records import Closed, Forked, JournalError, Record, StoredSession, Truncated
from holdfast.engine.durable.store import Durability
from tests.engine.test_journal import ended, opened, rows, write

WAIT_SECONDS = 30.0


class ScriptedStore:
    """A store that keeps records when it is told to, and says how it was called."""

    durability: Durability = "commit"
    place = "nowhere"

    def __init__(self) -> None:
        self.refused: frozenset[str] = frozenset()
        self.renewed = 0
        self.rest: float | None = None
        self.fault: str | None = None
        self.may_write = threading.Semaphore(0)
        self.broken = False
        self.kept: list[list[Record]] = []
        self.tidied = 0
        self.portions = 3
        self.threads: set[str] = set()
        self._pending: list[Record] = []

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def append(self, record: Record) -> None:
        self._pending.append(record)

    def flush(self) -> bool:
        self.threads.add(threading.current_thread().name)
        assert self.may_write.acquire(timeout=WAIT_SECONDS)
        if self.broken:
            self.fault = "the disk is full"
            return False
        self.fault = None
        self.kept.append(self._pending)
        self._pending = []
        return True

    def sessions(self) -> Iterator[StoredSession]:
        yield from ()

    def adopt_vocabulary(self) -> None:
        """It has none."""

    def take_refused(self) -> frozenset[str]:
        refused, self.refused = self.refused, frozenset()
        return refused

    def keep_alive(self) -> float | None:
        self.renewed += 1
        return self.rest

    def close(self) -> None:
        """It holds nothing."""

    def compact(self) -> bool:
        self.tidied += 1
        return self.tidied % self.portions != 0


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


@pytest.fixture
def writer(store: ScriptedStore) -> Iterator[JournalWriter]:
    made = JournalWriter(store)
    yield made
    store.broken = False
    store.may_write.release(1000)
    made.close()


def until_durable(writer: JournalWriter, number: int) -> list[Settled]:
    settled: list[Settled] = []
    while not settled or settled[-1].ticket < number:
        assert writer.writing or writer.durable >= number
        writer.wait(WAIT_SECONDS)
        settled += writer.take_settled()
    return settled


def test_whoever_submits_goes_on_and_is_told_in_order(store: ScriptedStore, writer: JournalWriter) -> None:
    assert [writer.submit([opened(f"s{number}")]) for number in range(3)] == [1, 2, 3]
    assert (writer.take_settled(), writer.writing, store.kept) == ([], True, [])
    store.may_write.release(3)
    until_durable(writer, 3)
    assert [record.session for batch in store.kept for record in batch] == ["s0", "s1", "s2"]
    assert not writer.writing
    assert store.threads == {"holdfast-journal"}
    writer.wait(WAIT_SECONDS)  # Nothing is due: it returns at once.


def test_batches_that_came_meanwhile_are_one_transaction(store: ScriptedStore, writer: JournalWriter) -> None:
    writer.submit([opened("first")])
    while not store.threads:
        writer.wait(0.01)
    for number in range(20):
        writer.submit([ended("first", number)])
    store.may_write.release(2)
    until_durable(writer, 21)
    assert [len(batch) for batch in store.kept] == [1, 20]


def test_what_cannot_be_written_is_written_when_it_can(store: ScriptedStore, writer: JournalWriter) -> None:
    store.broken = True
    writer.submit([opened("s")])
    store.may_write.release()
    writer.wait(WAIT_SECONDS)
    assert store.fault == "the disk is full", "whoever waits is told of a fault"
    writer.submit([ended("s", 1)])
    store.may_write.release(3)
    assert writer.take_settled() == []
    store.broken = False
    store.may_write.release(1000)
    until_durable(writer, 2)
    assert store.fault is None
    assert [type(record).__name__ for batch in store.kept for record in batch] == ["Opened", "Ended"]


def test_an_error_of_any_kind_is_a_fault_and_not_the_end_of_the_thread(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "commit", "v")
    writer = JournalWriter(journal)
    writer.submit([opened("s"), opened("\ud800")])
    while journal.fault is None:
        writer.wait(0.05)
    assert writer.take_settled() == [] and writer.writing
    writer.close()
    journal._pending.pop()
    journal.close()
    assert [session.id for session in read_sessions(tmp_path / "journal")] == ["s"]


def test_the_end_waits_for_what_was_submitted(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "commit", "v")
    writer = JournalWriter(journal)
    for number in range(50):
        writer.submit([opened(f"s{number}")])
    writer.close()
    assert writer.durable == 50
    journal.close()
    assert len(read_sessions(tmp_path / "journal")) == 50


def test_the_store_is_tidied_in_portions_when_nothing_is_to_be_written(
    store: ScriptedStore, writer: JournalWriter
) -> None:
    store.portions = 1_000_000
    store.may_write.release(1000)
    writer.submit([opened("s")])
    until_durable(writer, 1)
    while store.tidied < 5:
        writer.wait(0.01)
    writer.submit([ended("s", 1)])
    until_durable(writer, 2)
    assert len(store.kept) == 2, "a batch waits for one portion at most"
    store.portions = 1


def test_sessions_that_the_store_refuses_are_named_with_their_batch(
    store: ScriptedStore, writer: JournalWriter
) -> None:
    writer.submit([opened("mine"), opened("theirs")])
    store.refused = frozenset({"theirs"})
    store.may_write.release(1000)
    assert until_durable(writer, 1) == [Settled(1, frozenset({"theirs"}))]
    writer.submit([ended("mine", 1)])
    assert until_durable(writer, 2) == [Settled(2, frozenset())]


def test_a_lease_is_renewed_while_nothing_is_written_and_its_loss_is_told(store: ScriptedStore) -> None:
    store.rest = 0.001
    writer = JournalWriter(store)
    while store.renewed < 5:
        writer._poll.poll(1)
    store.refused = frozenset({"s"})
    while not (settled := writer.take_settled()):
        writer._poll.poll(1000)
    assert settled == [Settled(0, frozenset({"s"}))]
    writer.close()


# --- compaction ---


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.journal"


def test_a_portion_looks_at_a_bounded_number_of_turns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the histories are, and however much is swept away, no statement reads more than that."""
    monkeypatch.setattr(journal_module, "UNLINKED_MAX", 1)
    monkeypatch.setattr(journal_compaction, "PORTION", 32)
    write(path, opened("long"), *(ended("long", number) for number in range(300)))
    write(path, opened("gone"), *(ended("gone", number) for number in range(300)))
    with Journal(path, "commit", "v") as journal:
        journal.append(Closed("gone", "closed"))
        assert journal.flush()
        left = [rows(path, "turns")]
        while journal.compact():
            left.append(rows(path, "turns"))
        assert left[0] == 600 and left[-1] == 300
        assert max(before - after for before, after in pairwise(left)) <= 32
        assert len(left) >= 600 // 32
        assert not journal.compact(), "there is nothing more to sweep"
    assert [len(session.turns) for session in read_sessions(path)] == [300]


@pytest.mark.parametrize("portion", [1, 3, 1000])
def test_what_is_written_between_two_portions_is_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch, portion: int
) -> None:
    monkeypatch.setattr(journal_module, "UNLINKED_MAX", 1)
    monkeypatch.setattr(journal_compaction, "PORTION", portion)
    names = ["a", "b", "c"]
    write(path, *(opened(name) for name in names))
    for number in range(6):
        write(path, *(ended(name, number) for name in names))
    meanwhile: list[list[Record]] = [
        [ended("a", 6), ended("b", 6)],
        [Forked("f", "a", 3, 1.0)],
        [Truncated("a", 2, None), ended("a", 7)],
        [Closed("c", "closed"), ended("f", 8)],
        [opened("d"), ended("d", 9), Truncated("b", 5, 1)],
    ]
    with Journal(path, "commit", "v") as journal:
        journal.append(Truncated("b", 6, 2))
        assert journal.flush()
        going_on = True
        while going_on or meanwhile:
            going_on = journal.compact()
            if meanwhile:
                for record in meanwhile.pop(0):
                    journal.append(record)
                assert journal.flush()
    found = {session.id: [turn.turn_id for turn in session.turns] for session in read_sessions(path)}
    first = [f"t{number}" for number in range(6)]
    assert found == {
        "a": ["t0", "t1", "t7"],
        "b": first[:5],
        "f": ["t0", "t1", "t2", "t8"],
        "d": ["t9"],
    }
    assert not any(session.damaged for session in read_sessions(path))
    write(path)
    assert rows(path, "turns") == 3 + 5 + 2 + 1, "the next start sweeps what came meanwhile"


def test_a_compaction_that_cannot_be_written_is_given_up(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_module, "UNLINKED_MAX", 1)
    write(path, opened(), ended("s", 1), ended("s", 2))
    with Journal(path, "commit", "v") as journal:
        journal.append(Truncated("s", 1, None))
        assert journal.flush()
        journal._connection.execute("PRAGMA query_only = ON")
        while journal.compact():
            assert not journal._connection.in_transaction
        journal._connection.execute("PRAGMA query_only = OFF")
        assert "could not be compacted" in caplog.text
        journal.append(ended("s", 3))
        assert journal.flush()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert [turn.turn_id for turn in read_sessions(path)[0].turns] == ["t1", "t3"]


def test_a_question_waits_for_the_batches_before_it(writer: JournalWriter, store: ScriptedStore) -> None:
    store.broken = True
    writer.submit([opened("a")])
    future = writer.ask(lambda: (threading.current_thread().name, len(store.kept)))
    store.may_write.release(3)
    while store.fault is None:
        writer.wait(0.01)
    assert not future.done(), "the batch before it is not stored"
    store.broken = False
    store.may_write.release(1000)
    assert future.result(timeout=WAIT_SECONDS) == ("holdfast-journal", 1)
    store.refused = frozenset({"a"})
    assert writer.ask(lambda: 7).result(timeout=WAIT_SECONDS) == 7
    while not (settled := [each for each in writer.take_settled() if each.refused]):
        writer.wait(0.01)
    assert settled == [Settled(1, frozenset({"a"}))], "what it refused is told"


def test_a_question_that_cannot_be_asked_any_more_is_an_error(store: ScriptedStore) -> None:
    writer = JournalWriter(store)
    store.broken = True
    writer.submit([opened("a")])
    future = writer.ask(lambda: 7)
    store.may_write.release(1000)
    writer.close()
    with pytest.raises(JournalError, match="closed"):
        future.result(timeout=WAIT_SECONDS)
