"""Files of several parts: a session that leaves again writes what is new, and every part is checked."""

import errno
import logging
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.core.layout import Tier
from holdfast.engine.durable.records import Record, SnapshotWritten
from holdfast.engine.durable.stores import read_sessions
from holdfast.engine.engine import Engine, Session
from holdfast.engine.tiers import background, parts, writing
from holdfast.engine.tiers.back_off import Cause
from holdfast.engine.tiers.disk import DiskTier
from holdfast.engine.tiers.files import BadFile, Snapshot, SnapshotFiles
from holdfast.engine.tiers.session_memory import own_rows
from holdfast.engine.tiers.snapshots import SnapshotStore
from tests.engine.conftest import Make
from tests.engine.direct import direct
from tests.engine.test_disk_tier import costs_only_itself, files, options, run, said, talk, to_disk
from tests.engine.test_staged_files import sent, stage, staging_of, take
from tests.engine.tiny import WORDS, greedy
from tests.preloaded.commands import Command

ROOT = Path(__file__).parents[2]
LONG = 600
WITHOUT_TENSORS = '{"__metadata__": {"length": "1"}, "full.0": {"data_offsets": [0, %s]}}'


def test_the_rows_of_parts_are_not_joined() -> None:
    """Joined rows would take the memory of the file again."""
    parts = [torch.arange(6.0).view(3, 2), torch.empty(0, 2), 6 + torch.arange(4.0).view(2, 2)]
    for count, lengths in ((5, [3, 2]), (4, [2, 2]), (2, [2]), (1, [1]), (0, [])):
        rows = own_rows({"full.0": parts}, "full.0", torch.empty(9, 2), count)
        assert [len(each) for each in rows] == lengths
        flat = [number for each in rows for number in each.flatten().tolist()]
        assert flat == list(range(10))[10 - 2 * count :]
        memory = {each.untyped_storage().data_ptr() for each in parts}
        assert {each.untyped_storage().data_ptr() for each in rows} <= memory
    with pytest.raises(BadFile, match=r"is \[5, 2\] of torch.float32, not \[6, 2\] of torch.float32"):
        own_rows({"full.0": parts}, "full.0", torch.empty(9, 2), 6)


@pytest.fixture(autouse=True)
def scan_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle sessions are scanned in every step."""
    monkeypatch.setattr(background, "SCAN_SECONDS", 0.0)


def disk_of(engine: Engine) -> DiskTier:
    assert engine.loop.disk is not None
    return engine.loop.disk


def store_of(engine: Engine) -> SnapshotStore:
    return disk_of(engine).store


def snapshot_of(engine: Engine) -> Snapshot:
    return store_of(engine).snapshots["s"]


def lengths(engine: Engine) -> list[int]:
    """How many tokens the file of the session held after each of its parts."""
    return [part.length for part in snapshot_of(engine).parts]


def expected_of(make: Make) -> list[list[int]]:
    """A long first turn and five short ones of a session that nothing happens to."""
    session = make().session()
    return [session.say(said(0, LONG), greedy(3)).token_ids, *talk(session, range(1, 6))]


def long_session(engine: Engine) -> Session:
    session = engine.session(id="s")
    session.say(said(0, LONG), greedy(3)).wait()
    return session


def left_twice(make: Make, path: Path, **more: object) -> tuple[Engine, Session]:
    """A session with a file of three parts, on disk; the last two are short."""
    engine = make(**options(path, **more))
    session = long_session(engine)
    for turn in range(1, 3):
        to_disk(engine)
        talk(session, range(turn, turn + 1))
    to_disk(engine)
    assert len(lengths(engine)) == 3 and len(files(path)) == 1
    return engine, session


# --- what is written ---


def test_leaving_again_writes_only_new_pages(make: Make, tmp_path: Path) -> None:
    """After a turn of 64 tokens of a long session: its pages, and the one that was partly filled."""
    engine = make(**options(tmp_path))
    session = long_session(engine)
    to_disk(engine)
    written = store_of(engine).files.bytes_written
    assert written == snapshot_of(engine).bytes == files(tmp_path)[0].stat().st_size
    before = snapshot_of(engine).length
    session.say(said(1, 60), greedy(4)).wait()
    to_disk(engine)
    memory = engine.loop.executor.memory
    page = sum(storage[0].nbytes for storage in memory.storage("full"))
    state = sum(storage[0].nbytes for storage in memory.storage("state"))
    page_size = engine.loop.scheduler.registry.ledger.layout.page_size
    pages = -(-snapshot_of(engine).length // page_size) - before // page_size
    assert pages <= 6
    added = store_of(engine).files.bytes_written - written
    head = len(store_of(engine).files.read_head(snapshot_of(engine).file, written))
    assert added == pages * page + state + head
    assert added < written // 2
    assert lengths(engine) == [before, snapshot_of(engine).length]
    assert snapshot_of(engine).bytes == store_of(engine).used == files(tmp_path)[0].stat().st_size


def test_every_layout_comes_back_from_parts(make_any: Make, tmp_path: Path) -> None:
    expected = make_any.once(expected_of)
    engine = make_any(**options(tmp_path))
    session = long_session(engine)
    for turn in range(1, 5):
        to_disk(engine)
        costs_only_itself(session, turn, expected[turn])
    to_disk(engine)
    assert len(files(tmp_path)) == 1
    engine.close()
    engine = make_any(**options(tmp_path))
    costs_only_itself(engine.resume("s"), 5, expected[5])


@pytest.mark.parametrize("page_size", [4, 16])
def test_each_page_is_read_from_the_last_part_that_has_it(
    make_any: Make, tmp_path: Path, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that end inside a page and at its end; windows that have moved past the parts before."""
    monkeypatch.setattr(writing, "WASTE_MAX", 100.0)
    expected = make_any().session()
    engine = make_any(**options(tmp_path, page_size=page_size))
    session = engine.session(id="s")
    for turn, count in enumerate((40, 1, 3, 70, 2, 16, 5)):
        answer = expected.say(said(turn, count), greedy(2)).token_ids
        asked = session.say(said(turn, count), greedy(2))
        assert asked.token_ids == answer and asked.usage.computed_tokens <= count + 2
        to_disk(engine)
        assert len(lengths(engine)) == turn + 1
    costs_only_itself(session, 8, expected.say(said(8), greedy(9)).token_ids)


def test_a_file_in_the_background_is_appended_to(make: Make, tmp_path: Path) -> None:
    """From the device, and from the host."""
    expected = make.once(expected_of)
    engine = make(**options(tmp_path, snapshot_seconds=0.0, host_memory=32 << 20))
    session = long_session(engine)
    run(engine)
    first = snapshot_of(engine)
    talk(session, range(1, 5))
    run(engine)
    assert direct(engine.loop, "spill", "s", Tier.HOST)
    run(engine)
    found = engine.loop.scheduler.registry.sessions["s"]
    assert disk_of(engine).writer.write(found, Cause.BACKGROUND) is not None
    run(engine)
    assert snapshot_of(engine).length == found.sequence.computed
    assert snapshot_of(engine).parts[0] == first and snapshot_of(engine).file == first.file
    costs_only_itself(session, 5, expected[5])


@pytest.mark.parametrize("why", ["parts", "waste"])
def test_a_file_is_written_anew_when_it_has_many_parts_or_much_waste(
    make: Make, tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "parts":
        monkeypatch.setattr("holdfast.engine.tiers.snapshots.PARTS_MAX", 3)
    else:
        monkeypatch.setattr(writing, "WASTE_MAX", 0.0)
    expected = make.once(expected_of)
    engine = make(**options(tmp_path))
    session = long_session(engine)
    counts = []
    for turn in range(1, 5):
        to_disk(engine)
        counts.append(len(lengths(engine)))
        assert [path.name for path in files(tmp_path)] == [snapshot_of(engine).file]
        assert files(tmp_path)[0].stat().st_size == snapshot_of(engine).bytes == store_of(engine).used
        costs_only_itself(session, turn, expected[turn])
    assert counts == ([1, 2, 3, 1] if why == "parts" else [1, 1, 1, 1])


def test_a_disk_with_room_for_a_part_alone_gets_a_part(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "WASTE_MAX", 0.0)
    engine = make(**options(tmp_path))
    session = long_session(engine)
    to_disk(engine)
    whole = snapshot_of(engine).bytes
    store_of(engine).limit = whole + whole // 2
    talk(session, range(1, 2))
    to_disk(engine)
    assert len(lengths(engine)) == 2
    assert whole < snapshot_of(engine).bytes == store_of(engine).used <= store_of(engine).limit


def test_room_is_looked_for_before_anything_is_copied(make: Make, tmp_path: Path) -> None:
    engine = make(**options(tmp_path))
    session = long_session(engine)
    to_disk(engine)
    before = snapshot_of(engine)
    store_of(engine).limit = store_of(engine).used + 100
    talk(session, range(1, 2))
    run(engine)
    found = engine.loop.scheduler.registry.sessions["s"]
    assert disk_of(engine).writer.write(found, Cause.SPILL) is None
    assert not disk_of(engine).writer.gathering and snapshot_of(engine) is before
    assert store_of(engine).files.bytes_written == before.bytes


def test_a_file_that_is_appended_to_makes_no_room_for_others(make: Make, tmp_path: Path) -> None:
    engine = make(**options(tmp_path))
    session, other = long_session(engine), engine.session(id="other")
    to_disk(engine)
    talk(session, range(1, 2))
    talk(other, range(2))
    run(engine)
    sessions = engine.loop.scheduler.registry.sessions
    writer = disk_of(engine).writer
    assert writer.write(sessions["s"], Cause.SPILL) is not None
    store_of(engine).limit = store_of(engine).used
    assert writer.write(sessions["other"], Cause.SPILL) is None
    run(engine)
    assert len(lengths(engine)) == 2
    assert not store_of(engine).extended


# --- histories that are cut ---


def test_a_rewind_keeps_the_parts_before_it(make: Make, tmp_path: Path) -> None:
    expected = make.once(expected_of)
    engine, session = left_twice(make, tmp_path)
    before = lengths(engine)
    session.rewind(2)
    assert lengths(engine) == before[:2]
    (stored,) = read_sessions(str(tmp_path / "sessions.journal"))
    assert stored.snapshot is not None and stored.snapshot.length == before[1]
    other = make().session()
    other.say(said(0, LONG), greedy(3)).wait()
    talk(other, range(1, 2))
    assert talk(session, range(7, 8)) == talk(other, range(7, 8))
    to_disk(engine)
    assert lengths(engine)[:2] == before[:2] and len(lengths(engine)) == 3
    costs_only_itself(session, 8, talk(other, range(8, 9))[0])
    to_disk(engine)
    session.rewind(2)
    session.say(said(9, 1), greedy(1)).wait()
    to_disk(engine)
    assert files(tmp_path)[0].stat().st_size == snapshot_of(engine).bytes, "what was cut is gone"
    session.rewind(0)
    assert files(tmp_path) == [] and store_of(engine).used == 0
    assert expected


def test_a_fork_and_a_compaction_of_a_session_with_parts(make: Make, tmp_path: Path) -> None:
    expected = make.once(expected_of)
    engine, session = left_twice(make, tmp_path)
    before = lengths(engine)
    child = session.fork(at_turn=2)
    assert child.say(said(2), greedy(9)).token_ids == expected[2]
    assert lengths(engine) == before, "a child has a file of its own"
    session.compact(2, 2, WORDS[0])
    assert lengths(engine) == before[:1]
    session.say(said(6), greedy(9)).wait()
    to_disk(engine)
    engine.close()
    engine = make(**options(tmp_path))
    known = engine.known_tokens("s")
    assert engine.resume("s").say(said(7), greedy(9)).usage.cached_tokens == known


# --- faults ---


PLACES = ("header", "facts", "content", "torn")
DAMAGES = [(part, where, bool((part + PLACES.index(where)) % 2)) for part in range(3) for where in PLACES]


def flip(place: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[place] ^= 16
        path.write_bytes(bytes(content))

    return damage


@pytest.mark.parametrize(("part", "where", "restarted"), DAMAGES)
def test_damage_in_any_part_is_computed_again(
    make: Make,
    tmp_path: Path,
    part: int,
    where: str,
    restarted: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = make.once(expected_of)
    engine, session = left_twice(make, tmp_path)
    ends = [each.bytes for each in snapshot_of(engine).parts]
    begin, end = ([0, *ends][part], ends[part])
    (file,) = files(tmp_path)
    if restarted:
        engine.close()
    if where == "torn":
        file.write_bytes(file.read_bytes()[: (begin + end) // 2])
    elif where == "facts":
        place = file.read_bytes().index(b'"tokens":"', begin) + 12
        flip(place)(file)
    else:
        flip(begin + 1 if where == "header" else end - 3)(file)
    if restarted:
        engine = make(**options(tmp_path))
        session = engine.resume("s")
    with caplog.at_level(logging.WARNING, "holdfast.disk"):
        turn = session.say(said(3), greedy(9))
        assert turn.token_ids == expected[3]
    assert turn.usage.cached_tokens < LONG + 60
    if where in ("header", "torn", "content") or not restarted or part == 0:
        assert "cannot be used" in caplog.text
    to_disk(engine)
    costs_only_itself(session, 4, expected[4])


def test_a_row_past_the_history_uses_the_parts_that_match(make: Make, tmp_path: Path) -> None:
    """A process dies after a cut, before the row of its file: the earlier parts are good."""
    engine, session = left_twice(make, tmp_path)
    snapshot = snapshot_of(engine)
    session.rewind(2)
    engine.loop.session_log.append(
        parts_row := writing.SnapshotWritten("s", snapshot.file, snapshot.length, snapshot.bytes)
    )
    engine.loop.session_log.sync()
    store_of(engine).snapshots["s"] = snapshot  # What the row says.
    keep_file(engine)
    engine = make(**options(tmp_path))
    assert lengths(engine) == [part.length for part in snapshot.parts[:2]]
    assert files(tmp_path)[0].stat().st_size == snapshot_of(engine).bytes < parts_row.bytes
    known = engine.known_tokens("s")
    assert engine.resume("s").say(said(7), greedy(9)).usage.cached_tokens == known


def keep_file(engine: Engine) -> None:
    """End an engine at once: nothing more is written."""
    engine.loop.shut_down(hurried=lambda: True)


class FaultyFiles(SnapshotFiles):
    """A disk that fails in the middle of what it writes when it is told to."""

    error: OSError | None = None

    def put(self, descriptor: int, content: bytes) -> None:
        if self.error is not None:
            os.write(descriptor, content[: len(content) // 2])
            raise self.error
        super().put(descriptor, content)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_part_that_cannot_be_written_leaves_the_parts_before_it(
    make: Make, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make.once(expected_of)
    engine = make(**options(tmp_path))
    session, store = long_session(engine), store_of(engine)
    to_disk(engine)
    before = snapshot_of(engine)
    store.files.close()
    faulty = store.files = FaultyFiles(tmp_path / "disk")
    talk(session, range(1, 2))
    faulty.error = OSError(number, "failed")
    assert direct(engine.loop, "spill", "s", Tier.DISK)
    run(engine)
    assert snapshot_of(engine) is before and files(tmp_path)[0].stat().st_size == before.bytes
    assert engine.loop.scheduler.registry.sessions["s"].state == "IDLE" and store.used == before.bytes
    faulty.error = None
    monkeypatch.setattr(store.back_off, "clock", lambda: engine.loop.now() + 600.0)
    to_disk(engine)
    assert lengths(engine) == [before.length, snapshot_of(engine).length]
    costs_only_itself(session, 2, expected[2])


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"short")])
def test_a_file_that_cannot_be_appended_to_is_written_anew(
    make: Make, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    expected = make.once(expected_of)
    engine = make(**options(tmp_path))
    session = long_session(engine)
    to_disk(engine)
    talk(session, range(1, 2))
    run(engine)
    damage(files(tmp_path)[0])
    assert direct(engine.loop, "spill", "s", Tier.DISK)
    run(engine)
    assert "s" not in store_of(engine).snapshots and files(tmp_path) == []
    to_disk(engine)
    assert len(lengths(engine)) == 1
    costs_only_itself(session, 2, expected[2])


def test_a_part_of_a_session_that_is_closed_or_cut_meanwhile_is_removed(make: Make, tmp_path: Path) -> None:
    engine = make(**options(tmp_path))
    session = long_session(engine)
    to_disk(engine)
    before = snapshot_of(engine)
    talk(session, range(1, 2))
    run(engine)
    found = engine.loop.scheduler.registry.sessions["s"]
    writer = disk_of(engine).writer
    assert writer.write(found, Cause.SPILL) is not None
    session.rewind(1)
    run(engine)
    assert snapshot_of(engine) == before and files(tmp_path)[0].stat().st_size == before.bytes
    talk(session, range(2, 3))
    run(engine)
    assert writer.write(found, Cause.SPILL) is not None
    session.close()
    run(engine)
    engine.drive()
    assert files(tmp_path) == [] and store_of(engine).used == 0 and not store_of(engine).extended


# --- other engines, and deaths ---


def test_a_file_of_parts_moves_to_another_engine(make_any: Make, tmp_path: Path) -> None:
    expected = make_any.once(expected_of)
    here, there = tmp_path / "here", tmp_path / "there"
    giver, taker = make_any(**options(here)), make_any(**options(there))
    session = long_session(giver)
    to_disk(giver)
    talk(session, range(1, 2))
    header, content = sent(giver, here)
    count = len(lengths(giver))
    stage(staging_of(taker), 7, header, content)
    take(taker, here)
    assert len(lengths(taker)) == count
    costs_only_itself(taker.resume("s"), 2, expected[2])
    to_disk(taker)
    costs_only_itself(taker.resume("s"), 3, expected[3])


def test_parts_past_the_history_do_not_move_to_another_engine(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session is rewound after its file was sent: the parts before that are used, and have the row."""
    here, there = tmp_path / "here", tmp_path / "there"
    giver, taker = make(**options(here)), make(**options(there))
    session = long_session(giver)
    to_disk(giver)
    before = snapshot_of(giver).length
    talk(session, range(1, 2))
    header, content = sent(giver, here)
    session.rewind(1)
    stage(staging_of(taker), 7, header, content)
    rows: list[Record] = []
    monkeypatch.setattr(type(taker.loop.session_log), "append", lambda _, record: rows.append(record))
    take(taker, here)
    snapshot = snapshot_of(taker)
    assert lengths(taker) == [before]
    assert files(there)[0].stat().st_size == snapshot.bytes < len(content)
    assert rows[-1] == SnapshotWritten("s", snapshot.file, before, snapshot.bytes)


def test_parts_that_do_not_follow_each_other_are_refused(make: Make, tmp_path: Path) -> None:
    engine, _ = left_twice(make, tmp_path)
    store, snapshot = store_of(engine), snapshot_of(engine)
    (file,) = files(tmp_path)
    content = file.read_bytes()
    first, second, third = (each.bytes for each in snapshot.parts)
    expected = store.header(0, "")

    def refused(changed: bytes, match: str) -> None:
        file.write_bytes(changed)
        with pytest.raises(BadFile, match=match):
            parts.read_parts(store.files, file.name, len(changed), expected)

    refused(content[:first] + content[second:third], "after does not match")
    refused(content[first:], "after does not match")
    refused(content[:second] + content[:first], "nothing new")
    refused(content[:-1], "truncated")
    refused(b"", "truncated")
    refused(content[:second] + b"\x10" + bytes(40), "cannot be read")
    for header in ("[" * 100_000, "1", *(WITHOUT_TENSORS % end for end in ("Infinity", "null", '"1"', "[]"))):
        refused(len(header).to_bytes(8, "little") + header.encode(), "cannot be read")
    header = WITHOUT_TENSORS % ("-1" + "0" * 30)
    refused(len(header).to_bytes(8, "little") + header.encode(), "ends before")
    file.write_bytes(content)
    assert parts.read_parts(store.files, file.name, third, expected) == snapshot
    with pytest.raises(BadFile, match="truncated"):
        parts.read_parts(store.files, file.name, third + 1, expected)


@pytest.mark.parametrize("point", ["half a part", "a part without a row"])
def test_a_death_between_parts_costs_the_last_part_alone(make: Make, tmp_path: Path, point: str) -> None:
    """A process is killed while it appends, or before the row: the parts before it are used."""
    expected = make.once(expected_of)
    process = Command(
        *(str(make.directory), str(tmp_path), point),
        module="tests.engine.part_victim",
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()
    covered = int(out)
    (file,) = files(tmp_path)
    size = file.stat().st_size
    engine = make(**options(tmp_path))
    assert lengths(engine) == [covered]
    assert file.stat().st_size == snapshot_of(engine).bytes < size
    known = engine.known_tokens("s")
    turn = engine.resume("s").say(said(2), greedy(9))
    assert turn.token_ids == expected[2] and turn.usage.cached_tokens == covered
    assert turn.usage.computed_tokens <= known - covered + 21 + 9
    to_disk(engine)
    assert len(lengths(engine)) == 2
    costs_only_itself(engine.resume("s"), 3, expected[3])
