"""Sessions that change while a part is appended to their file: one job changes a file at a time."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.engine.tiers import background
from holdfast.engine.tiers.back_off import Cause
from holdfast.engine.tiers.files import SnapshotFiles
from tests.engine.conftest import Make
from tests.engine.test_disk_parts import (
    LONG,
    disk_of,
    expected_of,
    lengths,
    long_session,
    snapshot_of,
    store_of,
)
from tests.engine.test_disk_tier import costs_only_itself, files, options, run, said, talk, to_disk
from tests.engine.tiny import greedy


@pytest.fixture(autouse=True)
def scan_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle sessions are scanned in every step."""
    monkeypatch.setattr(background, "SCAN_SECONDS", 0.0)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Whether a part was appended; its job ends when the second event is set."""
    appended, told, append = threading.Event(), threading.Event(), SnapshotFiles.append

    def wait(files: SnapshotFiles, name: str, size: int, content: bytes) -> None:
        append(files, name, size, content)
        appended.set()
        assert told.wait(60.0)

    monkeypatch.setattr(SnapshotFiles, "append", wait)
    yield appended, told
    told.set()


def test_a_part_of_a_file_that_is_gone_is_of_no_use(
    make: Make, tmp_path: Path, late: tuple[threading.Event, threading.Event]
) -> None:
    """A session is rewound to its beginning, and says the same once more, while its part is written."""
    expected = make.once(expected_of)
    engine = make(**options(tmp_path))
    session = long_session(engine)
    to_disk(engine)
    assert talk(session, range(1, 2)) == expected[1:2]
    run(engine)
    appended, told = late
    found = engine.loop.scheduler.registry.sessions["s"]
    job = disk_of(engine).writer.write(found, Cause.SPILL)
    assert job is not None and job.snapshot is not None
    assert appended.wait(60.0)
    session.rewind(0)
    session.say(said(0, LONG), greedy(3)).wait()
    assert talk(session, range(1, 2)) == expected[1:2]
    told.set()
    run(engine)
    assert job.error is None and found.sequence.tokens.digest(job.header.length) == job.header.tokens
    assert {path.name for path in files(tmp_path)} == {
        each.file for each in store_of(engine).snapshots.values()
    }
    to_disk(engine)
    costs_only_itself(session, 2, expected[2])


def test_a_second_job_of_a_session_writes_a_file_of_its_own(
    make: Make, tmp_path: Path, late: tuple[threading.Event, threading.Event]
) -> None:
    """A session goes on while its part is written: the older part is of no use, and harms nothing."""
    expected = make.once(expected_of)
    engine = make(**options(tmp_path))
    session = long_session(engine)
    to_disk(engine)
    talk(session, range(1, 2))
    run(engine)
    appended, told = late
    found = engine.loop.scheduler.registry.sessions["s"]
    writer = disk_of(engine).writer
    older = writer.write(found, Cause.SPILL)
    assert older is not None and older.snapshot is not None and appended.wait(60.0)
    talk(session, range(2, 3))
    while not writer.can_write(found):
        engine.drive()
    newer = writer.write(found, Cause.SPILL)
    assert newer is not None and newer is not older and newer.snapshot is None
    told.set()
    run(engine)
    assert store_of(engine).covers(found) and lengths(engine) == [found.sequence.computed]
    assert [path.name for path in files(tmp_path)] == [snapshot_of(engine).file]
    assert files(tmp_path)[0].stat().st_size == snapshot_of(engine).bytes == store_of(engine).used
    to_disk(engine)
    costs_only_itself(session, 3, expected[3])
