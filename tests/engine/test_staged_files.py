"""Files of memory that come from other engines in portions: used as they are, or dropped."""

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

PORTION = 1000


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


def stage(staging: Staging, call: int, header: Header, content: bytes) -> bool:
    staging.begin(call, "s", header, len(content))
    complete = [
        staging.write(call, content[first : first + PORTION]) for first in range(0, len(content), PORTION)
    ]
    assert complete == [False] * (len(complete) - 1) + [True]
    return complete[-1]


def test_memory_of_another_engine_is_used_as_it_is(make_any: Make, tmp_path: Path) -> None:
    expected = make_any.once(conversation)[:4]
    here, there = tmp_path / "here", tmp_path / "there"
    giver, taker = make_any(**options(here)), make_any(**options(there))
    assert talk(giver.session(id="s"), range(2)) == expected[:2]
    header, content = sent(giver, here)
    assert stage(staging_of(taker), 7, header, content)
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
        staging.write(1, content)
    staging.begin(2, "s", header, len(content) - 1)
    with pytest.raises(NotStaged, match="longer"):
        staging.write(2, content)
    staging.begin(3, "s", header, len(content))
    with pytest.raises(NotStaged, match="header"):
        staging.write(3, bytes(len(content)))
    staging.begin(4, "s", header, len(content))
    staging.write(4, content[:100])
    staging.abandon(4)
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
        staging.begin(call, f"s{call}", header, len(content))
    with pytest.raises(NotStaged, match="same number"):
        staging.begin(2, "s", header, len(content))
    with pytest.raises(NotStaged, match="3 transfers are in progress"):
        staging.begin(3, "s", header, len(content))
    staging.abandon(0)
    assert stage(staging, 3, header, content), "the file of another has made room"
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
    staging.begin(3, "other", header, len(content))
    monkeypatch.undo()
    staging.begin(4, "third", header, len(content))
    assert [path.name.endswith(".partial") for path in files(there)] == [False, True], "the third is left"
    staging.close()
    assert files(there) == [] and taker.loop.disk is not None and taker.loop.disk.store.used == 0
