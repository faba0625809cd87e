"""Snapshots that finish late, out of order or not at all: no session reads another's."""

import errno
import logging
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from holdfast.core.layout import Tier
from holdfast.core.session import Session as CoreSession
from holdfast.core.tokens import TokenLog
from holdfast.engine.engine import Engine, Session
from holdfast.engine.step.runner import DeviceLost
from holdfast.engine.tiers import back_off, background, portions
from holdfast.engine.tiers.back_off import Cause
from holdfast.engine.tiers.disk import DiskTier
from holdfast.engine.tiers.files import Header, SnapshotFiles, decode, encode
from holdfast.engine.tiers.host import StorageCopy
from holdfast.engine.tiers.session_memory import Gathering, SessionMemory
from holdfast.engine.tiers.thread import DiskThread, Job, JobKind
from tests.engine.conftest import Make
from tests.engine.direct import direct
from tests.engine.test_disk_tier import (
    conversation,
    costs_only_itself,
    files,
    options,
    run,
    said,
    state,
    talk,
    to_disk,
)
from tests.engine.tiny import greedy
from tests.ranks.forked import forked_ranks

__all__ = ["forked_ranks"]

PATIENCE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def scan_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle sessions are scanned in every step."""
    monkeypatch.setattr(background, "SCAN_SECONDS", 0.0)


class HeldFiles(SnapshotFiles):
    """A disk that writes nothing until it is released."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.released = threading.Event()

    def write(self, name: str, content: bytes) -> None:
        assert self.released.wait(PATIENCE_SECONDS)
        super().write(name, content)


def disk_of(engine: Engine) -> DiskTier:
    assert engine.loop.disk is not None
    return engine.loop.disk


def hold(engine: Engine, path: Path) -> HeldFiles:
    disk_of(engine).store.files.close()
    held = HeldFiles(path / "disk")
    disk_of(engine).store.files = held
    return held


def begin_writing(engine: Engine, name: str = "s") -> Job:
    """Have a session written in the background, as one that has been idle for a while."""
    disk = disk_of(engine)
    before, disk.background.idle_seconds = disk.background.idle_seconds, 0.0
    for _ in range(50):
        if name not in disk.writer.writing:
            engine.drive()
    disk.background.idle_seconds = before
    return disk.writer.writing[name]


def all_done(thread: DiskThread) -> list[Job]:
    """Wait for all jobs of a thread; those that are done, in order."""
    done: list[Job] = []
    while thread.pending:
        before = thread.pending
        thread.wait(PATIENCE_SECONDS)
        done += thread.take_finished()
        assert thread.pending < before, "nothing was done for a long while"
    return done


def job(name: str) -> Job:
    return Job(JobKind.WRITE, name, name, Header("", "", 0, ""))


def test_what_is_done_is_taken_in_the_order_in_which_it_was_given() -> None:
    """However often somebody has waited for a part of it."""
    started, names = threading.Semaphore(0), [str(number) for number in range(20)]

    def carry_out(_: Job) -> None:
        assert started.acquire(timeout=PATIENCE_SECONDS)

    thread = DiskThread(carry_out)
    for name in names:
        thread.submit(job(name))
    taken: list[str] = []
    while thread.pending:
        started.release(3)
        thread.wait(PATIENCE_SECONDS)
        thread.wait(PATIENCE_SECONDS)
        taken += [each.session for each in thread.take_finished()]
    assert taken == names
    thread.stop(lambda: False, lambda: None)


@pytest.mark.parametrize("backwards", [False, True], ids=["", "backwards"])
def test_an_older_file_never_takes_the_place_of_a_newer_one(
    make: Make, tmp_path: Path, backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that is being written goes on and is moved to disk: what it comes back from is the newer."""
    expected = make.once(conversation)[:3]
    engine, session = talked(make, tmp_path, 1)
    disk, held = disk_of(engine), hold(engine, tmp_path)
    older = begin_writing(engine)
    talk(session, range(1, 2))
    for _ in range(50):
        if state(engine) == "IDLE" and direct(engine.loop, "spill", "s", Tier.DISK):
            break
        engine.drive()
    engine.drive()
    newer = disk.writer.writing["s"]
    assert newer is not older and newer.header.length > older.header.length
    held.released.set()
    done = all_done(disk._thread)
    assert done == [older, newer]
    disk._thread.pending += 2

    def take() -> Iterator[Job]:
        while done:
            disk._thread.pending -= 1
            yield done.pop() if backwards else done.pop(0)

    monkeypatch.setattr(disk._thread, "take_finished", take)
    engine.drive()
    monkeypatch.undo()
    run(engine)
    assert state(engine) == "SPILLED"
    assert [path.name for path in files(tmp_path)] == [newer.file]
    costs_only_itself(session, 2, expected[2])


def test_a_file_of_something_else_is_not_read(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = make.once(conversation)[:3]
    engine = make(**options(tmp_path))
    session, other = engine.session(id="s"), engine.session(id="other")
    talk(session, range(2))
    talk(other, range(1, 3))
    to_disk(engine, "s")
    to_disk(engine, "other")
    disk = disk_of(engine)
    assert disk.store.snapshots["s"].length == disk.store.snapshots["other"].length
    disk.store.snapshots["s"] = disk.store.snapshots["other"]
    with caplog.at_level(logging.WARNING, "holdfast.disk"):
        turn = session.say(said(2), greedy(9))
        assert turn.token_ids == expected[2]
    assert turn.usage.cached_tokens < 60
    assert "session s is recomputed: its snapshot cannot be used" in caplog.text
    assert "s" not in disk.store.snapshots


@pytest.mark.parametrize(
    ("ranks", "change", "problem"),
    [
        (1, lambda rows: None, "it has no tensor full.0"),
        (1, lambda rows: rows[:1], "it lacks pages"),
        (1, lambda rows: rows[..., :1], "its tensor full.0 is ["),
        (1, lambda rows: rows.to(torch.float16), "of torch.float16, not"),
        (2, lambda rows: rows[..., :1], "its tensor 1.full.0 is ["),
    ],
    ids=["missing", "few rows", "narrow rows", "other dtype", "narrow rows of another rank"],
)
def test_a_file_whose_tensors_do_not_fit_costs_computing_it_again(
    make: Make,
    forked_ranks: None,
    tmp_path: Path,
    ranks: int,
    change: Callable[[torch.Tensor], torch.Tensor | None],
    problem: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its header and its checksums say that it is good, and the tensors of the last rank are not."""
    expected = make.once(conversation)[:3]
    engine = make(**options(tmp_path), tensor_parallel=ranks)
    session = engine.session(id="s")
    talk(session, range(2))
    to_disk(engine)
    store = disk_of(engine).store
    snapshot, prefix = store.snapshots["s"], "1." if ranks == 2 else ""
    header = store.header(snapshot.length, snapshot.tokens)
    tensors = decode(store.files.read(snapshot.file), header)
    changed = change(tensors.pop(f"{prefix}full.0"))
    if changed is not None:
        tensors[f"{prefix}full.0"] = changed.clone()
    store.files.write(snapshot.file, encode(header, tensors))
    with caplog.at_level(logging.WARNING, "holdfast.disk"):
        turn = session.say(said(2), greedy(9))
        assert turn.token_ids == expected[2]
    assert turn.usage.cached_tokens < 60
    assert "session s is recomputed: its snapshot cannot be used: it" in caplog.text
    assert problem in caplog.text
    assert "s" not in store.snapshots


# --- no room on the device ---


def talked(make: Make, folder: Path, turns: int) -> tuple[Engine, Session]:
    """An engine with a disk, and a session of it that has had some turns."""
    engine = make(**options(folder))
    session = engine.session(id="s")
    talk(session, range(turns))
    return engine, session


def fails_once(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Let the device have no room when the disk tier copies units first; the copies."""
    real, calls = portions.Transfer._copy, []

    def fails(transfer: portions.Transfer, piece: portions.Piece, rows: torch.Tensor) -> StorageCopy:
        calls.append(piece)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return real(transfer, piece, rows)

    monkeypatch.setattr(portions.Transfer, "_copy", fails)
    return calls


@pytest.mark.parametrize("asked", ["by hand", "in the background"])
def test_no_room_for_a_copy_leaves_a_session_where_it_is(
    make: Make, tmp_path: Path, asked: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = make.once(conversation)[:3]
    engine, session = talked(make, tmp_path, 2)
    run(engine)
    calls = fails_once(monkeypatch)
    with caplog.at_level(logging.WARNING, "holdfast.disk"):
        if asked == "by hand":
            assert direct(engine.loop, "spill", "s", Tier.DISK)
        else:
            disk_of(engine).background.idle_seconds = 0.0
        run(engine)
    assert len(calls) == 1 and state(engine) == "IDLE" and files(tmp_path) == []
    assert "session s could not be copied for the disk: out of memory" in caplog.text
    costs_only_itself(session, 2, expected[2])


def test_no_room_to_put_a_file_back_costs_computing_it_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = make.once(conversation)[:4]
    engine, session = talked(make, tmp_path, 2)
    to_disk(engine)
    calls = fails_once(monkeypatch)
    with caplog.at_level(logging.WARNING, "holdfast.disk"):
        turn = session.say(said(2), greedy(9))
        assert turn.token_ids == expected[2]
    assert len(calls) == 1 and turn.usage.cached_tokens < 60
    assert "session s is recomputed: it could not be restored: out of memory" in caplog.text
    assert len(files(tmp_path)) == 1, "the file is as good as before"
    to_disk(engine)
    costs_only_itself(session, 3, expected[3])


@pytest.mark.parametrize("units", [1, 3])
def test_a_session_is_copied_a_few_units_at_a_time(
    make_any: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, units: int
) -> None:
    """A device that has room for little beside its pools has some for that."""
    expected = make_any.once(conversation)[:4]
    engine = make_any(**options(tmp_path, page_size=4))
    memory = engine.loop.executor.memory
    sizes = {storage[0].nbytes for name in ("full", "window", "state") for storage in memory.storage(name)}
    copied = in_portions(monkeypatch, units * min(sizes))
    session = engine.session(id="s")
    assert talk(session, range(3)) == expected[:3]
    run(engine)
    to_disk(engine)
    turn = session.say(said(3), greedy(9))
    assert turn.token_ids == expected[3] and turn.usage.cached_tokens > 60
    assert 0 < max(copied) <= units and len(copied) > 4


def in_portions(monkeypatch: pytest.MonkeyPatch, size: int) -> list[int]:
    """Let the disk tier copy that many bytes between two steps; the units of each copy."""
    copied: list[int] = []
    real = portions.Transfer._copy

    def noted(transfer: portions.Transfer, piece: portions.Piece, rows: torch.Tensor) -> StorageCopy:
        copied.append(len(piece.units))
        return real(transfer, piece, rows)

    monkeypatch.setattr(portions, "PORTION_BYTES", size)
    monkeypatch.setattr(portions, "RETURN_BYTES", size)
    monkeypatch.setattr(portions.Transfer, "_copy", noted)
    return copied


def test_answers_go_on_between_the_portions(
    make_any: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = talk(make_any().session(), range(4))
    engine = make_any(**options(tmp_path, page_size=4))
    session, other = engine.session(id="s"), engine.session(id="other")
    assert talk(session, range(3)) == expected[:3]
    run(engine)
    copied = in_portions(monkeypatch, 1)
    assert direct(engine.loop, "spill", "s", Tier.DISK)
    engine.drive()
    assert len(copied) == 1 and state(engine) == "SPILLING", "one unit a step"
    assert talk(other, range(1)) == expected[:1]
    assert 1 < len(copied) <= 1 + 9 + 9
    run(engine)
    assert state(engine) == "SPILLED" and len(files(tmp_path)) == 1
    gathered = len(copied)
    turn = session.say(said(3), greedy(9))
    talk(other, range(1, 2))
    assert turn.token_ids == expected[3] and turn.usage.cached_tokens > 60
    assert len(copied) > gathered


@pytest.mark.parametrize("what", ["turn", "close"])
def test_a_session_that_goes_on_is_not_written(
    make_any: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    expected = talk(make_any().session(), range(4))
    engine = make_any(**options(tmp_path, page_size=4))
    session = engine.session(id="s")
    assert talk(session, range(3)) == expected[:3]
    run(engine)
    copied = in_portions(monkeypatch, 1)
    assert direct(engine.loop, "spill", "s", Tier.DISK)
    engine.drive()
    assert len(copied) == 1 and disk_of(engine).writer.gathering
    if what == "turn":
        costs_only_itself(session, 3, expected[3])
    else:
        session.close()
    run(engine)
    assert not disk_of(engine).writer.gathering and not disk_of(engine).writer.writing
    assert files(tmp_path) == [] and disk_of(engine).store.used == 0


def test_a_session_that_is_closed_on_its_way_back_is_copied_no_further(
    make_any: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_any(**options(tmp_path, page_size=4))
    session = engine.session(id="s")
    talk(session, range(3))
    to_disk(engine)
    copied = in_portions(monkeypatch, 1)
    assert direct(engine.loop, "restore", "s")
    for _ in range(200):
        if not copied:
            engine.drive()
    assert state(engine) == "RESTORING" and len(copied) >= 1
    done = len(copied)
    session.close()
    run(engine)
    assert len(copied) == done and not disk_of(engine).busy


# --- no room on the disk ---


def test_a_disk_without_room_makes_nobody_wait(make_any: Make, tmp_path: Path) -> None:
    """Its pool has units still, but not a byte may be written: memory is had by computing again."""
    pages = {"kv_tokens": 256, "window_tokens": 256, "state_slots": 8, "session_tokens": 128}
    engine = make_any(**options(tmp_path, max_running=2, **pages))
    expected = make_any.once(conversation)[:2]
    disk_of(engine).store.limit = 1
    sessions = [engine.session(id=f"s{number}") for number in range(8)]
    for turn in range(2):
        for session in sessions:
            answer = session.say(said(turn), greedy(9))
            for _ in range(200):
                if not answer.done:
                    engine.drive()
            assert answer.done and answer.token_ids == expected[turn]
            run(engine)
    counters = engine.loop.scheduler.registry.counters
    assert counters.dropped >= 1 and counters.spills == 0, "what was begun never arrived"
    assert files(tmp_path) == []


@pytest.mark.parametrize("room", ["a file goes", "time goes by"])
def test_a_disk_that_had_no_room_is_asked_again(
    make: Make, tmp_path: Path, room: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(back_off, "FULL_SECONDS", 600.0)
    expected = make.once(conversation)[:3]
    engine = make(**options(tmp_path))
    sessions = {name: engine.session(id=name) for name in ("a", "b")}
    for session in sessions.values():
        talk(session, range(2))
    to_disk(engine, "a")
    disk = disk_of(engine)
    disk.store.limit = disk.store.used
    with caplog.at_level(logging.WARNING, "holdfast.disk"):
        assert direct(engine.loop, "spill", "b", Tier.DISK)
        run(engine)
    assert [record.getMessage().partition(" for ")[0] for record in caplog.records] == ["no room on disk"]
    assert state(engine, "b") == "IDLE"
    assert not direct(engine.loop, "spill", "b", Tier.DISK), "not now"
    if room == "a file goes":
        sessions["a"].close()
    else:
        disk.store.limit *= 2
        assert not direct(engine.loop, "spill", "b", Tier.DISK), "not yet"
        monkeypatch.setattr(disk.store.back_off, "clock", lambda: engine.loop.now() + 601.0)
    to_disk(engine, "b")
    costs_only_itself(sessions["b"], 2, expected[2])


def count_copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sessions whose memory is copied for the disk from now on."""
    copied: list[str] = []
    gather = SessionMemory.gather

    def noted(memory: SessionMemory, session: CoreSession, page: int) -> Gathering:
        copied.append(session.id)
        return gather(memory, session, page)

    monkeypatch.setattr(SessionMemory, "gather", noted)
    return copied


def test_an_idle_engine_that_has_lost_its_device_ends(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it is started again before the next turn, which would fail."""
    engine = make(**options(tmp_path))
    talk(engine.session(id="s"), range(2))
    run(engine)

    def lost(memory: SessionMemory, session: CoreSession, page: int) -> Gathering:
        raise DeviceLost("rank 1 has ended")

    disk_of(engine).background.idle_seconds = 0.0
    with monkeypatch.context() as patch:
        patch.setattr(SessionMemory, "gather", lost)
        with pytest.raises(DeviceLost):
            run(engine)


@pytest.mark.parametrize("why", ["the limit", "the disk"])
def test_nothing_is_copied_for_a_disk_without_room(
    make_any: Make, tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_any(**options(tmp_path, snapshot_seconds=0.0))
    disk = disk_of(engine)
    copied = count_copies(monkeypatch)
    room = disk.store.files.free_bytes
    if why == "the limit":
        limit, disk.store.limit = disk.store.limit, 1
    else:
        limit = disk.store.limit
        monkeypatch.setattr(disk.store.files, "free_bytes", lambda: 1)
    talk(engine.session(id="s"), range(2))
    for _ in range(20):
        engine.drive()
        direct(engine.loop, "spill", "s", Tier.DISK)
        run(engine)
    assert copied == [] and files(tmp_path) == []
    disk.store.limit = limit
    monkeypatch.setattr(disk.store.files, "free_bytes", room)
    monkeypatch.setattr(disk.store.back_off, "clock", lambda: engine.loop.now() + 2 * back_off.FULL_SECONDS)
    run(engine)
    assert copied == ["s"], "and once, when there is room"
    assert disk.store.used == disk.store.snapshots["s"].bytes > 0


def test_a_disk_that_says_that_it_is_full_is_asked_less_and_less(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(**options(tmp_path, snapshot_seconds=0.0))
    disk = disk_of(engine)
    copied = count_copies(monkeypatch)
    now = [0.0]
    monkeypatch.setattr(disk.store.back_off, "clock", lambda: engine.loop.now() + now[0])

    def full(_descriptor: int, _content: bytes) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    put = disk.store.files.put
    monkeypatch.setattr(disk.store.files, "put", full)
    talk(engine.session(id="s"), range(2))
    asked = []
    for _ in range(60):
        run(engine)
        asked.append(len(copied))
        now[0] += back_off.FULL_SECONDS + 1.0
    assert asked[0] == 1 and 4 <= asked[-1] <= 7, "after one, two, four, eight… times as long"
    monkeypatch.setattr(disk.store.files, "put", put)
    now[0] += back_off.BACK_OFF_MAX * back_off.FULL_SECONDS + 1.0
    run(engine)
    assert "s" in disk.store.snapshots and disk.store.back_off._failures == 0


def test_a_history_is_hashed_once_however_often_it_is_a_candidate(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(**options(tmp_path))
    session = engine.session(id="s")
    talk(session, range(3))
    run(engine)
    begin_writing(engine, "s")
    run(engine)
    found = engine.loop.scheduler.registry.sessions["s"]
    disk, tokens = disk_of(engine), found.sequence.tokens
    hashed: list[int] = []
    digest = type(tokens).digest

    def counted(log: TokenLog, length: int) -> str:
        known = max((each for each, _ in log._digests if each <= length), default=0)
        hashed.append(length - known)
        return digest(log, length)

    monkeypatch.setattr(TokenLog, "digest", counted)
    for _ in range(50):
        assert disk.store.covers(found)
    assert len(hashed) == 50 and sum(hashed) == 0
    before = len(tokens)
    talk(session, range(3, 4))
    run(engine)
    assert disk.writer.write(found, Cause.SPILL) is not None
    run(engine)
    assert disk.store.covers(found)
    assert 0 < sum(hashed) <= len(tokens) - before + 1, "what is new, once"


def test_no_file_goes_for_one_that_would_not_fit_even_so(make: Make, tmp_path: Path) -> None:
    engine = make(**options(tmp_path))
    talk(engine.session(id="small"), range(1))
    talk(engine.session(id="large"), range(6))
    disk = disk_of(engine)
    begin_writing(engine, "small")
    run(engine)
    disk.store.limit = disk.store.used + 1
    assert direct(engine.loop, "spill", "large", Tier.DISK)
    run(engine)
    assert state(engine, "large") == "IDLE" and list(disk.store.snapshots) == ["small"]
    assert len(files(tmp_path)) == 1


# --- the end of an engine ---


def test_an_end_writes_what_little_is_new(make_any: Make, tmp_path: Path) -> None:
    """In the background a few tokens are not worth a file; at the end every session is written as it is."""
    expected = make_any().session()
    engine = make_any(**options(tmp_path))
    session = engine.session(id="s")
    for each in (expected, session):
        each.say(said(0, 200), greedy(3)).wait()
    begin_writing(engine)
    run(engine)
    covered = disk_of(engine).store.snapshots["s"].length
    for each in (expected, session):
        each.say(said(1, 4), greedy(2)).wait()
    run(engine)
    assert disk_of(engine).store.snapshots["s"].length == covered
    engine.close()
    engine = make_any(**options(tmp_path))
    costs_only_itself(engine.resume("s"), 2, expected.say(said(2), greedy(9)).token_ids)


@pytest.mark.parametrize("collected", ["before", "after"])
def test_a_file_of_a_history_that_is_gone_is_not_kept(make: Make, tmp_path: Path, collected: str) -> None:
    """A session is rewound while it is written; the file is done before, or after, it has gone on."""
    expected = make().session()
    talk(expected, range(1))
    talk(expected, range(5, 8))
    engine, session = talked(make, tmp_path, 3)
    held = hold(engine, tmp_path)
    begin_writing(engine)
    session.rewind(1)
    if collected == "before":
        held.released.set()
        run(engine)
        assert files(tmp_path) == []
    talk(session, range(5, 8))
    held.released.set()
    run(engine)
    assert files(tmp_path) == [] and not disk_of(engine).store.snapshots
    engine.close()
    engine = make(**options(tmp_path))
    costs_only_itself(engine.resume("s"), 8, talk(expected, range(8, 9))[0])


# --- what a job raises ---


def test_whatever_a_job_raises_is_an_error_of_that_job() -> None:
    def carry_out(each: Job) -> None:
        if each.session == "bad":
            raise MemoryError

    thread = DiskThread(carry_out)
    for name in ("good", "bad", "better"):
        thread.submit(job(name))
    done = [(each.session, each.error) for each in all_done(thread)]
    assert done == [("good", None), ("bad", "MemoryError"), ("better", None)]
    thread.stop(lambda: False, lambda: None)


def test_no_memory_to_write_a_file_leaves_a_session_where_it_is(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make.once(conversation)[:3]
    engine, session = talked(make, tmp_path, 2)
    run(engine)

    def fails(*_: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr("holdfast.engine.tiers.disk.encode", fails)
    assert direct(engine.loop, "spill", "s", Tier.DISK)
    for _ in range(200):
        if engine.loop.busy:
            engine.drive()
    assert not engine.loop.busy and state(engine) == "IDLE"
    monkeypatch.undo()
    costs_only_itself(session, 2, expected[2])


@pytest.mark.parametrize("synced", ["file", "directory"])
def test_a_file_that_cannot_be_synced_is_none(
    tmp_path: Path, synced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fails(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == (synced == "directory"):
            raise OSError(5, "Input/output error")
        real(descriptor)

    given = SnapshotFiles(tmp_path)
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output"):
        given.write("half", b"x" * 1000)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_lets_no_file_go(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sessions go on and are closed, an engine starts, and whatever was left is swept away when it can be."""
    engine = make(**options(tmp_path))
    for name in ("s", "other"):
        talk(engine.session(id=name), range(2))
        to_disk(engine, name)
    useless = files(tmp_path)
    with monkeypatch.context() as patched:

        def refuse(path: Path, missing_ok: bool = False) -> None:
            raise PermissionError(errno.EROFS, "read-only file system", str(path))

        patched.setattr(Path, "unlink", refuse)
        with caplog.at_level(logging.WARNING, "holdfast.disk"):
            engine.resume("other").close()
            session = engine.resume("s")
            session.rewind(1)
        assert engine.sessions() == ["s"]
        assert "cannot be removed" in caplog.text
        engine.close()
        engine = make(**options(tmp_path))
        assert engine.sessions() == ["s"]
        engine.close()
    assert set(files(tmp_path)) >= set(useless)
    make(**options(tmp_path))
    assert not set(files(tmp_path)) & set(useless)


def test_a_row_that_names_a_file_that_is_none_of_its_own(make: Make, tmp_path: Path) -> None:
    """A session that cannot come back keeps its file, whatever that is called."""
    engine = make(**options(tmp_path))
    talk(engine.session(id="s"), range(2))
    engine.close()
    (file,) = files(tmp_path)
    (tmp_path / "disk" / file).rename(tmp_path / "disk" / "strange")
    with sqlite3.connect(tmp_path / "sessions.journal") as journal:
        journal.execute("UPDATE snapshots SET file = 'strange'")
        journal.execute("UPDATE sessions SET tenant = x'00'")
    journal.close()
    engine = make(**options(tmp_path))
    assert engine.sessions() == []
    assert (tmp_path / "disk" / "strange").is_file()


def test_a_row_that_names_what_can_be_no_file(make: Make, tmp_path: Path) -> None:
    engine = make(**options(tmp_path))
    expected = make.once(conversation)[:3]
    talk(engine.session(id="s"), range(2))
    engine.close()
    with sqlite3.connect(tmp_path / "sessions.journal") as journal:
        journal.execute("UPDATE snapshots SET file = 'a' || char(0) || 'b'")
    journal.close()
    engine = make(**options(tmp_path))
    assert talk(engine.resume("s"), range(2, 3)) == expected[2:]
