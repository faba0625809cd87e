"""Files of memory that come from other engines: used as they are, or dropped."""

import os
from pathlib import Path

import pytest

from holdfast.engine.durable.recovery import recover
from holdfast.engine.durable.stores import read_sessions
from holdfast.engine.engine import Engine
from holdfast.engine.tiers import staging as staging_module
from holdfast.engine.tiers.files import Header
from holdfast.engine.tiers.staging import NotStaged, Staging
from tests.engine.conftest import Make
from tests.engine.test_disk_tier import conversation, costs_only_itself, files, options, talk, to_disk
from tests.engine.tiny import greedy


def staging_of(engine: Engine) -> Staging:
    assert engine.loop.disk is not None
    return engine.loop.disk.staging


def sent(engine: Engine, path: Path) -> tuple[Header, bytes]:
    """A session's memory as its engine would send it."""
    to_disk(engine)
    assert engine.loop.disk is not None
    store = engine.loop.disk.store
    snapshot = store.snapshots["s"]
    return store.header(snapshot.length, snapshot.tokens), (path / "disk" / snapshot.file).read_bytes()


def take(engine: Engine, place: Path) -> None:
    """Let an engine have the session of another one's journal."""
    (stored,) = read_sessions(str(place / "sessions.journal"))
    loop = engine.loop
    recover(loop.scheduler, loop.session_log, loop.disk, stored, loop.now())


def begin(staging: Staging, call: int, header: Header, size: int, content: bytes, session: str = "s") -> None:
    """Announce a file, and write some content."""
    descriptor = staging.begin(call, session, header, size)
    os.write(descriptor, content)
    os.close(descriptor)


def stage(staging: Staging, call: int, header: Header, content: bytes) -> None:
    begin(staging, call, header, len(content), content)
    staging.complete(call)


def test_memory_of_another_engine_is_used_as_it_is(make_any: Make, tmp_path: Path) -> None:
    expected = make_any.once(conversation)[:4]
    here, there = tmp_path / "here", tmp_path / "there"
    giver, taker = make_any(**options(here)), make_any(**options(there))
    assert talk(giver.session(id="s"), range(2)) == expected[:2]
    header, content = sent(giver, here)
    stage(staging_of(taker), 7, header, content)
    take(taker, here)
    costs_only_itself(taker.resume("s"), 2, expected[2])


def test_what_cannot_be_used_is_not_taken(make: Make, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    giver, taker = make(**options(here)), make(**options(there))
    expected = talk(giver.session(id="s"), range(2))
    header, content = sent(giver, here)
    staging = staging_of(taker)
    other = Header(header.model, "another layout", header.length, header.tokens)
    with pytest.raises(NotStaged, match="layout"):
        staging.begin(1, "s", other, len(content))
    with pytest.raises(NotStaged, match="no room"):
        staging.begin(1, "s", header, 1 << 40)
    for size in (0, -1, -(1 << 62)):
        with pytest.raises(NotStaged, match=f"the announced size is {size} bytes"):
            staging.begin(1, "s", header, size)
    with pytest.raises(NotStaged, match="announced"):
        staging.complete(1)
    for call, wrong in ((2, content + b"x"), (3, content[:-1])):
        begin(staging, call, header, len(content), wrong)
        with pytest.raises(NotStaged, match=f"{len(wrong)} bytes of the announced {len(content)}"):
            staging.complete(call)
    begin(staging, 4, header, len(content), bytes(len(content)))
    with pytest.raises(NotStaged, match="header"):
        staging.complete(4)
    begin(staging, 5, header, len(content), content[:100])
    staging.abandon(5)
    assert files(there) == [] and taker.loop.disk is not None and taker.loop.disk.store.used == 0
    take(taker, here)
    known = taker.known_tokens("s")
    again = taker.resume("s").say([5], greedy(2)).usage.computed_tokens
    assert again >= known > sum(map(len, expected)), "all is computed again"


def test_announcements_are_bounded(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    giver, taker = make(**options(here)), make(**options(there))
    talk(giver.session(id="s"), range(1))
    header, content = sent(giver, here)
    staging = staging_of(taker)
    monkeypatch.setattr(staging_module, "ARRIVING_MAX", 3)
    for call in range(3):
        begin(staging, call, header, len(content), b"", f"s{call}")
    with pytest.raises(NotStaged, match="same number"):
        staging.begin(2, "s", header, len(content))
    with pytest.raises(NotStaged, match="3 transfers are in progress"):
        staging.begin(3, "s", header, len(content))
    staging.abandon(0)
    stage(staging, 3, header, content)  # The file of another has made room.
    staging.close()
    assert files(there) == [] and taker.loop.disk is not None and taker.loop.disk.store.used == 0


def test_a_staged_file_whose_session_does_not_come_is_removed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    giver, taker = make(**options(here)), make(**options(there))
    talk(giver.session(id="s"), range(1))
    header, content = sent(giver, here)
    staging = staging_of(taker)
    stage(staging, 1, header, content)
    stage(staging, 2, header, content)
    assert len(files(there)) == 1, "the second one takes the place of the first"
    monkeypatch.setattr(staging_module, "STAGED_SECONDS", -1.0)
    stage(staging, 3, header, content)
    begin(staging, 4, header, len(content), b"", "other")
    assert [path.name.endswith(".partial") for path in files(there)] == [True], "what was just announced"
    staging.close()
    assert files(there) == [] and taker.loop.disk is not None and taker.loop.disk.store.used == 0
