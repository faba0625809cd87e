"""A file holds the memory that its header names, however long the copy between steps takes."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast.core.layout import Component, Tier
from holdfast.core.session import Session as CoreSession
from holdfast.core.tiers import whole_units
from holdfast.engine.engine import Engine, Session
from holdfast.engine.step.executor import Executor
from holdfast.engine.tiers import background, host, portions
from holdfast.engine.tiers.back_off import Cause
from holdfast.engine.tiers.writing import SnapshotWriter
from tests.engine.conftest import Make
from tests.engine.direct import direct
from tests.engine.slow_copies import Queued
from tests.engine.test_disk_tier import options, run, said
from tests.engine.tiny import greedy


def two_sessions(engine: Engine) -> tuple[Session, CoreSession]:
    """A session of one page, and a longer one, both idle."""
    engine.session(id="other").say(said(0, 600), greedy(3)).wait()
    session = engine.session(id="s")
    session.say(said(1, 3), greedy(2)).wait()
    run(engine)
    return session, engine.loop.scheduler.registry.sessions["s"]


def begin_both(engine: Engine) -> SnapshotWriter:
    """Begin to write both: the short one waits until the longer one is copied, a unit a step."""
    assert engine.loop.disk is not None
    writer, sessions = engine.loop.disk.writer, engine.loop.scheduler.registry.sessions
    for name in ("other", "s"):
        assert writer.write(sessions[name], Cause.BACKGROUND) is not None
    return writer


def next_answers(session: Session, turns: int) -> list[list[int]]:
    """What short turns say, and one after them."""
    short = [session.say(said(5 + turn, 1), greedy(1)).token_ids for turn in range(turns)]
    return [*short, session.say(said(8), greedy(9)).token_ids]


@pytest.fixture(autouse=True)
def a_unit_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "PORTION_BYTES", 1)
    monkeypatch.setattr(background, "SCAN_SECONDS", 0.0)


def test_a_state_that_is_in_its_first_slot_again_is_not_the_one_of_the_header(
    make: Make, tmp_path: Path
) -> None:
    """Two short turns take and give back a slot each, and stay in the same page."""
    expected = next_answers(two_sessions(make())[0], 2)
    engine = make(**options(tmp_path, checkpoints=0, seal_seconds=0.0))
    session, found = two_sessions(engine)
    writer, units = begin_both(engine), whole_units(found.sequence, None)
    for turn in range(2):
        assert session.say(said(5 + turn, 1), greedy(1)).token_ids == expected[turn]
        while not found.at_rest or found.sequence.computed < found.sequence.known:
            engine.drive()
    assert writer.gathering and whole_units(found.sequence, None) == units, "as if nothing had happened"
    run(engine)
    engine.loop.shut_down(hurried=lambda: True)
    engine = make(**options(tmp_path))
    assert next_answers(engine.resume("s"), 0) == expected[2:]


def test_units_of_the_host_are_not_those_of_the_device(make: Make, tmp_path: Path) -> None:
    """A session comes back into units of the same numbers, and others write to those of the host."""
    expected = next_answers(two_sessions(make())[0], 0)
    engine = make(**options(tmp_path, host_memory=32 << 20))
    _, found = two_sessions(engine)
    for name in ("other", "s"):
        assert direct(engine.loop, "spill", name, Tier.HOST)
        run(engine)
    writer, units = begin_both(engine), whole_units(found.sequence, found.parcel)
    assert direct(engine.loop, "restore", "s")
    while found.sequence.away:
        engine.drive()
    assert writer.gathering
    assert whole_units(found.sequence, None)[Component.FULL] == units[Component.FULL]
    found.sequence.drop_copy()
    executor = engine.loop.executor
    assert isinstance(executor, Executor) and executor.host is not None
    for storage in (*executor.host.storage("full"), *executor.host.storage("state")):
        storage.fill_(7.0)
    run(engine)
    engine.loop.shut_down(hurried=lambda: True)
    engine = make(**options(tmp_path))
    assert next_answers(engine.resume("s"), 0) == expected


class Device(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def in_main_memory(units: int, outward: bool, patience: int = 0) -> tuple[portions.Transfer, Tensor, Queued]:
    """A transfer of so many units of 16 bytes, all ones, what it fills, and its copier."""
    storage, rows, copier = torch.zeros(units, 4), torch.zeros(units, 4), Queued(patience)
    source, copied = (storage, rows) if outward else (rows, storage)
    source.fill_(1.0)
    pieces = portions.pieces_of(storage, list(range(units)), rows)
    return portions.Transfer(pieces, portions.Copiers(copier, copier), outward), copied, copier


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, units: int, outward: bool) -> tuple[portions.Transfer, Queued]:
    """A transfer of so many units of 16 bytes, two in a piece."""
    monkeypatch.setattr(torch, "empty_like", lambda like, pin_memory: torch.zeros(like.shape))
    monkeypatch.setattr(portions, "PORTION_BYTES", 32)
    monkeypatch.setattr(portions, "RETURN_BYTES", 96)
    storage, copier = torch.zeros(units, 4).as_subclass(Device), Queued(1 << 30)
    pieces = portions.pieces_of(storage, list(range(units)), torch.zeros(units, 4))
    return portions.Transfer(pieces, portions.Copiers(copier, Queued(0)), outward), copier


@pytest.mark.parametrize("outward", [True, False])
def test_a_portion_in_main_memory_is_small_either_way(monkeypatch: pytest.MonkeyPatch, outward: bool) -> None:
    monkeypatch.setattr(portions, "PORTION_BYTES", 32)
    transfer, copied, copier = in_main_memory(8, outward, patience=2)
    for portion in range(1, 5):
        assert not transfer.advance() and not transfer.advance(), "nothing is begun while a copy goes on"
        assert len(copier.copies) == portion
        copier.copies[-1].synchronize()
        assert int(copied.nan_to_num().sum()) == portion * 8, "two units of four numbers"
    assert transfer.advance()


@pytest.mark.parametrize("outward", [True, False])
def test_who_gives_up_a_copy_in_main_memory_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, outward: bool
) -> None:
    """The next step may use its units."""
    monkeypatch.setattr(portions, "PORTION_BYTES", 32)
    transfer, _, copier = in_main_memory(8, outward, patience=1 << 30)
    assert not transfer.advance()
    transfer.abandon()
    assert [copy.over for copy in copier.copies] == [True] and transfer.advance()


def test_a_step_without_work_waits_for_the_portion_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer, _, copier = in_main_memory(1, outward=True, patience=4)
    transfer.wait(60.0)
    assert not copier.copies, "nothing is under way"
    assert not transfer.advance()
    transfer.wait(0.0)
    assert not copier.copies[0].over
    transfer.wait(60.0)
    assert copier.copies[0].over and transfer.advance()


def test_units_without_bytes_are_not_copied() -> None:
    assert not list(portions.pieces_of(torch.zeros(4, 0), [1, 2], torch.zeros(2, 0)))


def test_in_main_memory_another_thread_copies_not_the_loop(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = next_answers(two_sessions(make())[0], 0)
    threads = set[str]()
    original = host.copy_units

    def noted(copies: Sequence[host.StorageCopy]) -> None:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        original(copies)

    monkeypatch.setattr(host, "copy_units", noted)
    monkeypatch.setattr(host, "INLINE_BYTES_MAX", 0)
    engine = make(**options(tmp_path))
    two_sessions(engine)
    assert direct(engine.loop, "spill", "s", Tier.DISK)
    run(engine)
    assert threads == {"holdfast-copies"}
    threads.clear()
    assert next_answers(engine.resume("s"), 0) == expected
    assert threads == {"holdfast-copies"}


def test_a_turn_that_comes_during_a_copy_makes_it_useless(make: Make, tmp_path: Path) -> None:
    """The copy reads in its last moment, when the turn has written: the file would hold what it left."""
    expected = next_answers(two_sessions(make())[0], 1)
    engine = make(**options(tmp_path, checkpoints=0, seal_seconds=0.0))
    session, found = two_sessions(engine)
    assert engine.loop.disk is not None
    writer, copier = engine.loop.disk.writer, Queued(1 << 30)
    writer._memory._copiers = portions.Copiers(copier, copier)
    job = writer.write(found, Cause.BACKGROUND)
    assert job is not None and len(copier.copies) == 1
    copier.patience = 0
    assert session.say(said(5, 1), greedy(1)).token_ids == expected[0]
    run(engine)
    assert copier.copies[0].over and not job.tensors and job.header.length < found.sequence.computed
    assert session.say(said(8), greedy(9)).token_ids == expected[1]


@pytest.mark.parametrize(("outward", "portion"), [(True, 1), (False, 3)])
def test_a_portion_of_a_gpu_is_as_large_as_stated(
    monkeypatch: pytest.MonkeyPatch, outward: bool, portion: int
) -> None:
    """More comes back at a time than leaves: a turn waits for it."""
    transfer, copier = on_a_gpu(monkeypatch, 8, outward)
    for step in range(-(-4 // portion)):
        assert not transfer.advance() and not transfer.advance(), "nothing is begun while a copy goes on"
        assert len(copier.copies) == min(4, (step + 1) * portion)
        for copy in copier.copies:
            copy.synchronize()
    assert transfer.advance()


@pytest.mark.parametrize("outward", [False, True])
def test_pinned_memory_is_used_again_when_nothing_writes_to_it(
    monkeypatch: pytest.MonkeyPatch, outward: bool
) -> None:
    """A copy that is given up goes on: whoever gets its memory next would find it changed."""
    transfer, copier = on_a_gpu(monkeypatch, 8, outward)
    assert not transfer.advance() and copier.copies
    transfer.abandon()
    assert all(copy.over for copy in copier.copies) and transfer.advance()
