"""Memory in files: it comes back as it went, and is never believed when it is damaged."""

import errno
import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.core.layout import Tier
from holdfast.core.session import Place
from holdfast.engine.durable.journal import Journal
from holdfast.engine.durable.records import StoredSession
from holdfast.engine.engine import Engine, Session
from holdfast.engine.options import OptionError
from holdfast.engine.tiers import background
from holdfast.engine.tiers import files as snapshot_files
from holdfast.engine.tiers.back_off import FAULT_SECONDS
from holdfast.engine.tiers.files import SnapshotFiles
from tests.engine.conftest import Make
from tests.engine.direct import direct
from tests.engine.tiny import WORDS, greedy, word

LIMIT = 2 << 20


@pytest.fixture(autouse=True)
def scan_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle sessions are scanned in every step."""
    monkeypatch.setattr(background, "SCAN_SECONDS", 0.0)


def said(turn: int, count: int = 21) -> list[int]:
    return [word(WORDS[(turn * 3 + place) % len(WORDS)]) for place in range(count)]


def options(path: Path, **more: object) -> dict[str, object]:
    """A journal and a disk; nothing is written in the background unless it is asked for."""
    return {
        "journal": str(path / "sessions.journal"),
        "disk": str(path / "disk"),
        "disk_limit": LIMIT,
        "snapshot_seconds": 1e9,
        **more,
    }


def state(engine: Engine, name: str = "s") -> str:
    return engine.loop.scheduler.registry.find(name).state


def run(engine: Engine) -> None:
    while engine.loop.busy:
        engine.drive()


def to_disk(engine: Engine, name: str = "s") -> None:
    run(engine)
    assert direct(engine.loop, "spill", name, Tier.DISK)
    run(engine)
    assert state(engine, name) == "SPILLED"
    parcel = engine.loop.scheduler.registry.find(name).parcel
    assert parcel is not None and parcel.tier is Tier.DISK


def files(path: Path) -> list[Path]:
    return sorted((path / "disk").iterdir())


def talk(session: Session, turns: range) -> list[list[int]]:
    return [session.say(said(turn), greedy(9)).token_ids for turn in turns]


def conversation(make: Make) -> list[list[int]]:
    """Six turns of a session that nothing happens to."""
    return talk(make().session(), range(6))


def costs_only_itself(session: Session, turn: int, expected: list[int]) -> None:
    """A turn says what it should, and computes nothing of the history."""
    engine = session._engine
    known = engine.known_tokens(session.id)
    answer = session.say(said(turn), greedy(9))
    assert answer.token_ids == expected
    assert answer.usage.cached_tokens == known
    assert answer.usage.computed_tokens <= 21 + 9


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_there_and_back_by_hand(make_any: Make, tmp_path: Path, overlap: bool) -> None:
    expected = make_any.once(conversation)[:6]
    engine = make_any(**options(tmp_path, overlap=overlap, host_memory=1 << 20))
    session = engine.session(id="s")
    assert talk(session, range(2)) == expected[:2]
    to_disk(engine)
    assert len(files(tmp_path)) == 1
    costs_only_itself(session, 2, expected[2])
    to_disk(engine)
    assert len(files(tmp_path)) == 1, "the old file is gone"
    assert direct(engine.loop, "restore", "s")
    run(engine)
    assert state(engine) == "IDLE"
    costs_only_itself(session, 3, expected[3])
    run(engine)
    assert direct(engine.loop, "spill", "s", Tier.HOST)
    run(engine)
    assert state(engine) == "SPILLED"
    costs_only_itself(session, 4, expected[4])
    session.close()
    assert files(tmp_path) == []


def test_a_restart_computes_only_what_is_new(make_any: Make, tmp_path: Path) -> None:
    """A hybrid session that is restored reuses everything, as does every other."""
    plain = make_any().session()
    expected = talk(plain, range(5))
    engine = make_any(**options(tmp_path))
    session, other = engine.session(id="s"), engine.session(id="other")
    talk(session, range(2))
    talk(other, range(3))
    to_disk(engine, "other")
    shown: list[tuple[int, int]] = []
    engine.loop.shut_down(lambda done, total: shown.append((done, total)))
    assert shown == [(1, 1)], "the other one is on disk already"
    engine = make_any(**options(tmp_path))
    assert (state(engine, "s"), state(engine, "other")) == ("SPILLED", "SPILLED")
    costs_only_itself(engine.resume("s"), 2, expected[2])
    costs_only_itself(engine.resume("other"), 3, expected[3])
    engine.resume("s").rewind(1)
    assert engine.resume("s").say(said(1), greedy(9)).token_ids == expected[1]


def test_a_fork_that_leans_on_the_tree_survives_alone(make_any: Make, tmp_path: Path) -> None:
    engine = make_any(**options(tmp_path))
    parent = engine.session(id="parent")
    talk(parent, range(2))
    child = parent.fork()
    run(engine)
    assert direct(engine.loop, "spill", child.id, Tier.DISK)
    run(engine)
    engine.loop.shut_down()
    engine = make_any(**options(tmp_path))
    expected = make_any.once(conversation)[:3]
    costs_only_itself(engine.resume(child.id), 2, expected[2])
    costs_only_itself(engine.resume("parent"), 2, expected[2])


def test_idle_sessions_are_written_in_the_background(make_any: Make, tmp_path: Path) -> None:
    """So a death costs only what came after."""
    expected = make_any.once(conversation)[:3]
    engine = make_any(**options(tmp_path))
    session = engine.session(id="s")
    talk(session, range(2))
    run(engine)
    assert files(tmp_path) == [], "it has not been idle for long"
    assert engine.loop.disk is not None
    engine.loop.disk.background.idle_seconds = 0.0
    run(engine)
    assert len(files(tmp_path)) == 1
    assert state(engine) == "IDLE", "its memory stays where it is"
    before = files(tmp_path)
    session.say(said(2, 3), greedy(2)).wait()
    run(engine)
    assert files(tmp_path) == before, "a few more tokens are not worth another file"
    session.rewind(2)
    session.say(said(2), greedy(9)).wait()
    journal = engine.loop.session_log.journal
    assert journal is not None
    journal._connection.close()  # The process is gone: nothing is written any more.
    os.close(journal._lock)
    engine.loop.session_log.journal = None
    copy = tmp_path / "copy"
    (tmp_path / "disk").rename(copy)
    engine.close()
    copy.rename(tmp_path / "disk")
    engine = make_any(**options(tmp_path))
    known = engine.known_tokens("s")
    turn = engine.resume("s").say(said(3), greedy(9))
    assert turn.usage.prompt_tokens == known + 21
    assert turn.usage.cached_tokens == 60
    other = make_any().session()
    assert talk(other, range(3)) == expected
    assert other.say(said(3), greedy(9)).token_ids == turn.token_ids


# --- pressure ---


def test_pressure_moves_sessions_down_and_every_one_answers(make_any: Make, tmp_path: Path) -> None:
    """Many more sessions than fit on the device, a host that holds a few, and a disk for the rest."""
    pages = {"kv_tokens": 256, "window_tokens": 256, "state_slots": 8, "session_tokens": 128}
    engine = make_any(**options(tmp_path, snapshot_seconds=0.0, host_memory=48 << 10, max_running=2, **pages))
    expected = make_any.once(conversation)[:3]
    sessions = [engine.session(id=f"s{number}") for number in range(10)]
    computed = 0
    for turn in range(3):
        for session in sessions:
            answer = session.say(said(turn), greedy(9))
            assert answer.token_ids == expected[turn]
            computed += answer.usage.computed_tokens
            run(engine)
    registry = engine.loop.scheduler.registry
    assert registry.counters.dropped == 0, "nothing was ever computed again"
    assert computed <= 10 * 3 * 30
    tiers = [session.parcel.tier for session in registry.sessions.values() if session.parcel is not None]
    assert Tier.DISK in tiers and Tier.HOST in tiers
    report = engine.memory()["pools"]
    assert isinstance(report, list)
    assert {pool["tier"] for pool in report} == {"device", "host", "disk"}
    assert all(sum(pool["holders"].values()) == pool["units"] for pool in report)


def test_first_prompts_go_along_and_come_back(make_any: Make) -> None:
    """More sessions than fit, each with a first prompt of its own, which the tree keeps for others too."""
    pages = {"kv_tokens": 256, "window_tokens": 256, "state_slots": 8, "session_tokens": 128}
    engine = make_any(host_memory=1 << 20, max_running=2, **pages)
    sessions = [engine.session(id=f"s{number}") for number in range(5)]
    for number, session in enumerate(sessions):
        session.say([word(WORDS[number]), *said(0, 83)], greedy(5)).wait()
        run(engine)
    for turn in range(2):
        for session in sessions:
            known = engine.known_tokens(session.id)
            answer = session.say(said(turn), greedy(3))
            assert len(answer.token_ids) == 3 and answer.usage.cached_tokens == known
            run(engine)
    registry = engine.loop.scheduler.registry
    if engine.loop.setup.memory_plan.layout.full:
        assert registry.counters.spills >= 5
    assert registry.counters.dropped == 0, "nothing was computed again"


def test_the_limit_is_kept(make: Make, tmp_path: Path) -> None:
    engine = make(**options(tmp_path, snapshot_seconds=0.0))
    disk = engine.loop.disk
    assert disk is not None
    sessions = [engine.session(id=f"s{number}") for number in range(6)]
    for session in sessions:
        talk(session, range(2))
        run(engine)
    assert len(files(tmp_path)) == 6
    to_disk(engine, "s0")
    each = disk.store.snapshots["s0"].bytes
    disk.store.limit = disk.store.used
    talk(engine.session(id="new"), range(2))
    run(engine)
    assert "new" not in disk.store.snapshots and len(disk.store.snapshots) == 6, (
        "a precaution pushes nothing out"
    )
    disk.store.limit = 2 * each
    to_disk(engine, "new")
    assert set(disk.store.snapshots) == {"s0", "new"} and len(files(tmp_path)) == 2
    disk.store.limit = each
    assert direct(engine.loop, "spill", "s5", Tier.DISK)
    run(engine)
    assert state(engine, "s5") == "IDLE", "there is no room for it"
    assert set(disk.store.snapshots) == {"s0", "new"}, "what is nowhere else stays"
    assert len(files(tmp_path)) == 2
    expected = make.once(conversation)[:3]
    costs_only_itself(engine.resume("s0"), 2, expected[2])


# --- faults ---


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(place: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 16
        path.write_bytes(bytes(content))

    return damage


def forge(path: Path) -> None:
    """Another session's history, of the same length."""
    content = path.read_bytes()
    start = content.index(b'"tokens":"') + 10
    path.write_bytes(content[:start] + b"0" * 64 + content[start + 64 :])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "torn": truncate,
    "header": flip(0.0),
    "facts": flip(0.002),
    "first bit": flip(0.5),
    "last bit": flip(1.0),
    "stale": forge,
}


@pytest.mark.parametrize(
    ("damage", "restarted"),
    [
        pytest.param(
            *(damage, restarted),
            id=f"{damage}{' restarted' * restarted}",
            marks=() if place % 2 == restarted else pytest.mark.soak,
        )
        for place, damage in enumerate(DAMAGES)
        for restarted in (False, True)
    ],
)
def test_a_damaged_file_is_computed_again(
    make: Make, tmp_path: Path, damage: str, restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected = make.once(conversation)[:4]
    engine = make(**options(tmp_path))
    session = engine.session(id="s")
    talk(session, range(2))
    to_disk(engine)
    if restarted:
        engine.close()
    (file,) = files(tmp_path)
    DAMAGES[damage](file)
    if restarted:
        engine = make(**options(tmp_path))
        session = engine.resume("s")
    with caplog.at_level(logging.WARNING, "holdfast.disk"):
        turn = session.say(said(2), greedy(9))
        assert turn.token_ids == expected[2]
    assert turn.usage.cached_tokens < 60 and turn.usage.computed_tokens > 30
    assert "recomputed" in caplog.text and "cannot be used" in caplog.text
    run(engine)
    assert files(tmp_path) == [], "it is of no use to anybody"
    to_disk(engine)
    costs_only_itself(session, 3, expected[3])


def test_a_file_of_another_model_or_another_form_is_not_used(
    directories: dict[str, Path], make: Make, tmp_path: Path
) -> None:
    expected = make.once(conversation)[:3]
    engine = make(**options(tmp_path))
    talk(engine.session(id="s"), range(2))
    engine.close()
    engine = make(**options(tmp_path, page_size=32))
    assert state(engine) == "IDLE"
    turn = engine.resume("s").say(said(2), greedy(9))
    assert turn.token_ids == expected[2] and turn.usage.cached_tokens == 0
    engine.close()
    for directory in directories.values():  # The same words, other weights.
        path = directory / "config.json"
        path.write_text(path.read_text() + "\n")
    engine = make(**options(tmp_path, page_size=32))
    assert state(engine) == "IDLE"
    assert engine.resume("s").turns == 3


class FaultyFiles(SnapshotFiles):
    """A disk that is full, or tears what it writes, when it is told to."""

    fault = ""

    def put(self, descriptor: int, content: bytes) -> None:
        if self.fault == "full":
            os.write(descriptor, content[: len(content) // 3])
            raise OSError(28, "No space left on device")
        if self.fault == "torn":
            content = content[: len(content) // 3]
        super().put(descriptor, content)


@pytest.mark.parametrize("fault", ["full", "torn"])
def test_a_disk_that_cannot_be_written_costs_nothing_but_work(
    make_any: Make, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {"kv_tokens": 256, "window_tokens": 256, "state_slots": 8, "max_running": 2}
    engine = make_any(**options(tmp_path, **pages))
    expected = make_any.once(conversation)[:3]
    disk = engine.loop.disk
    assert disk is not None
    disk.store.files.close()
    disk.store.files = FaultyFiles(tmp_path / "disk")
    now = [0.0]
    monkeypatch.setattr(disk.store.back_off, "clock", lambda: engine.loop.now() + now[0])
    disk.store.files.fault = fault
    sessions = [engine.session(id=f"s{number}") for number in range(5)]
    for turn in range(2):
        for session in sessions:
            assert session.say(said(turn), greedy(9)).token_ids == expected[turn]
    run(engine)
    if fault == "full":
        assert files(tmp_path) == [], "half a file is none"
    disk.store.files.fault = ""
    now[0] += 2 * FAULT_SECONDS
    for session in sessions:
        assert session.say(said(2), greedy(9)).token_ids == expected[2]
        run(engine)
        if engine.loop.scheduler.registry.find(session.id).place is Place.HOME:
            to_disk(engine, session.id)
    other = make_any.once(conversation)[:4]
    for session in sessions[-2:]:
        costs_only_itself(session, 3, other[3])


def test_closing_while_a_file_is_written_or_read_leaves_nothing(make: Make, tmp_path: Path) -> None:
    engine = make(**options(tmp_path))
    for name in ("a", "b"):
        talk(engine.session(id=name), range(2))
    run(engine)
    direct(engine.loop, "spill", "a", Tier.DISK)
    engine.drive()
    engine.resume("a").close()
    to_disk(engine, "b")
    direct(engine.loop, "restore", "b")
    engine.drive()
    engine.resume("b").close()
    run(engine)
    engine.drive()
    assert files(tmp_path) == []


def test_what_a_death_left_behind_is_swept_away(make: Make, tmp_path: Path) -> None:
    engine = make(**options(tmp_path))
    talk(engine.session(id="s"), range(2))
    engine.close()
    (kept,) = files(tmp_path)
    for name in ("aa-7.session.safetensors", "bb-9.session.safetensors.partial"):
        (tmp_path / "disk" / name).write_bytes(b"left")
    (tmp_path / "disk" / "notes.txt").write_text("of somebody else")
    engine = make(**options(tmp_path))
    assert files(tmp_path) == sorted([kept, tmp_path / "disk" / "notes.txt"])
    assert state(engine) == "SPILLED"
    talk(engine.resume("s"), range(2, 3))
    to_disk(engine)
    assert kept in files(tmp_path), "what is new is appended to it"
    talk(engine.session(id="t"), range(1))
    to_disk(engine, "t")
    assert len(files(tmp_path)) == 3, "a new file has a name that no other has"


def test_without_a_journal_files_last_as_long_as_the_engine(make: Make, tmp_path: Path) -> None:
    expected = make.once(conversation)[:3]
    engine = make(disk=str(tmp_path / "disk"), disk_limit=LIMIT)
    session = engine.session(id="s")
    talk(session, range(2))
    to_disk(engine)
    costs_only_itself(session, 2, expected[2])
    engine.close()
    assert files(tmp_path) == []


def test_a_conversation_is_moved_by_hand(make: Make, tmp_path: Path) -> None:
    engine = make(disk=str(tmp_path / "disk"), disk_limit=LIMIT, host_memory=1 << 20)
    session = engine.session(id="s")
    talk(session, range(2))
    for tier in ("disk", "host", None):
        assert session.spill(tier)
        assert state(engine) == "SPILLED"
        assert session.restore()
        assert state(engine) == "IDLE"
    assert not make().session().spill("disk"), "there is no such tier"


def test_a_file_goes_with_the_history_that_it_is_of(make_any: Make, tmp_path: Path) -> None:
    engine = make_any(**options(tmp_path, snapshot_seconds=0.0))
    session = engine.session(id="s")
    talk(session, range(3))
    run(engine)
    to_disk(engine)
    (file,) = files(tmp_path)
    session.rewind(1)
    disk = engine.loop.disk
    assert disk is not None
    left = disk.store.snapshots.get("s")
    assert (left is not None) == file.exists(), "only parts of what is left stay"
    assert left is None or left.length <= engine.known_tokens("s")
    run(engine)
    expected = make_any().session()
    talk(expected, range(1))
    assert talk(session, range(5, 6)) == talk(expected, range(5, 6))


def test_while_the_journal_is_at_fault_nothing_waits_for_the_disk(make: Make, tmp_path: Path) -> None:
    engine = make(**options(tmp_path))
    talk(engine.session(id="s"), range(2))
    run(engine)
    journal = engine.loop.session_log.journal
    assert journal is not None
    journal._connection.execute("PRAGMA query_only = ON")
    assert direct(engine.loop, "spill", "s", Tier.DISK)
    for _ in range(200):
        engine.drive()
        if state(engine) == "IDLE":
            break
    assert engine.loop.session_log.fault is not None
    assert state(engine) == "IDLE", "it stays where it is"
    assert not direct(engine.loop, "spill", "s", Tier.DISK)
    journal._connection.execute("PRAGMA query_only = OFF")
    run(engine)
    to_disk(engine)
    expected = make.once(conversation)[:3]
    costs_only_itself(engine.resume("s"), 2, expected[2])


def test_an_end_in_a_hurry_leaves_what_was_written_and_computes_the_rest_again(
    make_any: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = make_any.once(conversation)[:3]
    engine = make_any(**options(tmp_path))
    names = ("a", "b", "c")
    for name in names:
        talk(engine.session(id=name), range(2))
    shown: list[tuple[int, int]] = []
    with caplog.at_level(logging.WARNING, "holdfast.disk"):
        engine.loop.shut_down(lambda done, total: shown.append((done, total)), lambda: len(shown) == 2)
    assert shown == [(1, 3), (2, 3)]
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 3 sessions were not written before the engine ended; they will be recomputed"
    ]
    assert len(files(tmp_path)) == 2
    engine = make_any(**options(tmp_path))
    costs_only_itself(engine.resume("a"), 2, expected[2])
    costs_only_itself(engine.resume("b"), 2, expected[2])
    turn = engine.resume("c").say(said(2), greedy(9))
    assert (turn.token_ids, turn.usage.cached_tokens) == (expected[2], 0)


def test_a_file_that_is_aborted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_files, "WRITE_BYTES", 1000)
    given = SnapshotFiles(tmp_path)
    given.write("whole", b"x" * 2500)
    assert given.read("whole") == b"x" * 2500
    synced = os.fdatasync

    def abort(descriptor: int) -> None:
        synced(descriptor)
        given.abort()

    monkeypatch.setattr(os, "fdatasync", abort)
    with pytest.raises(OSError, match="ended before it was written"):
        given.write("half", b"x" * 2500)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_a_directory_is_one_engines_alone(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second engine would sweep the first one's files away. It lets go of its own journal, too."""
    monkeypatch.setattr("holdfast.engine.durable.recovery.LOCK_SECONDS", 0.1)
    first = make(**options(tmp_path))
    session = first.session(id="s")
    talk(session, range(2))
    to_disk(first)
    (tmp_path / "other").symlink_to(tmp_path / "disk")
    mine = {"journal": str(tmp_path / "mine.journal"), "disk": str(tmp_path / "other")}
    with pytest.raises(OptionError, match="in use by another process") as caught:
        make(**options(tmp_path, **mine))
    assert caught.value.option == "disk"
    assert len(files(tmp_path)) == 1
    costs_only_itself(session, 2, make.once(conversation)[:3][2])
    first.close()
    make(**options(tmp_path, **mine)).close()
    assert not files(tmp_path), "nobody has it any more"


def test_a_journal_that_cannot_be_read_lets_go_of_the_directory(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.durable.recovery.LOCK_SECONDS", 0.1)
    with monkeypatch.context() as broken:
        broken.setattr(Journal, "sessions", failing_read)
        with pytest.raises(OptionError) as caught:
            make(**options(tmp_path))
    assert caught.value.option == "journal"
    make(**options(tmp_path)).close()


def failing_read(journal: Journal) -> list[StoredSession]:
    raise sqlite3.DatabaseError(f"{journal.path} is malformed")


def test_a_file_system_without_locks_is_warned_of(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some network file systems cannot lock a directory: snapshots are written there all the same."""

    def refuse(descriptor: int, path: Path, timeout: float) -> None:
        raise OSError(errno.EBADF, f"no lock on {descriptor} within {timeout}", str(path))

    monkeypatch.setattr(snapshot_files, "lock", refuse)
    with caplog.at_level(logging.WARNING, "holdfast.disk"):
        engine = make(**options(tmp_path))
    assert "cannot be locked" in caplog.text
    talk(engine.session(id="s"), range(1))
    to_disk(engine)
    assert len(files(tmp_path)) == 1
