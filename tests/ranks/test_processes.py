"""Processes of ranks that die or stall: the group ends, a supervisor starts it again, and nothing is left."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.engine.engine import Engine
from holdfast.engine.ranks import crew
from holdfast.engine.ranks.crew import RankLost
from holdfast.engine.step.executor import Executor
from holdfast.engine.step.graphs import StepGraphs
from tests.engine.tiny import greedy, tiny_engine, write_model
from tests.server.serving import Server

FOLLOWER = "holdfast.engine.ranks.follower"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), "bamba")


def follower_of(process: int) -> int:
    """The process of rank 1 of an engine."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    (found,) = [int(child) for child in children if FOLLOWER in Path(f"/proc/{child}/cmdline").read_text()]
    return found


def state_of(process: int) -> str:
    """The state of a process in a letter; Z if it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def wait_for(process: int, state: str) -> None:
    """Wait until a process is in a state."""
    deadline = time.monotonic() + 30
    while state_of(process) != state:
        assert time.monotonic() < deadline, f"process {process} is {state_of(process)}, not {state}"
        time.sleep(0.01)


def wait_gone(process: int) -> None:
    """Wait until a process has ended, whether or not its parent has heard of it."""
    wait_for(process, "Z")


def stop(process: int) -> None:
    """Stop a process."""
    os.kill(process, signal.SIGSTOP)
    wait_for(process, "T")


def loaded(server: Server) -> list[threading.Thread]:
    """Turns of several sessions that would take a while."""

    def talk(name: str) -> None:
        server.post(f"/v1/sessions/{name}/turns", {"input": "the river", "sampling": {"max_tokens": 900}})

    threads = [threading.Thread(target=talk, args=(server.open(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    return threads


@pytest.fixture
def server(directory: Path, tmp_path: Path) -> Iterator[Server]:
    """A server of two ranks."""
    started = Server(
        directory,
        *("--load-format", "dummy", "--device", "cpu", "--tensor-parallel", "2", "--audit", "strict"),
        *("--kv-tokens", "4096", "--state-slots", "32", "--journal", str(tmp_path / "journal.db")),
    )
    yield started
    if started.process.poll() is None:
        started.stop()


def test_kill_9_of_a_rank_under_load_restarts_the_group(server: Server, directory: Path) -> None:
    """Both the rank that follows and the one that leads: sessions come back from the journal."""
    alone = tiny_engine(directory)
    assert any("divided over 2 processes" in line for line in server.lines)
    name = server.open("kept")
    asked = {"sampling": {"max_tokens": 8, "temperature": 0, "ignore_eos": True}}
    first = server.say(name, [20, 30, 40], **asked)["token_ids"]
    for leads in (False, True):
        leader = server.engine_pid()
        follower = follower_of(leader)
        threads = loaded(server)
        os.kill(leader if leads else follower, signal.SIGKILL)
        for thread in threads:
            thread.join()
        wait_gone(leader)
        wait_gone(follower)
        server.wait_ready()
        assert follower_of(server.engine_pid()) != follower
    second = server.say(name, [50, 60], **asked)["token_ids"]
    session = alone.session()
    expected = [session.say(tokens, greedy(8)).wait().token_ids for tokens in ([20, 30, 40], [50, 60])]
    alone.close()
    assert [first, second] == expected
    assert "holdfast_engine_restarts_total 2.0" in server.get("/metrics").text
    leader, follower = server.engine_pid(), follower_of(server.engine_pid())
    assert server.stop() == 0
    wait_gone(leader)
    wait_gone(follower)


def broken(engine: Engine) -> None:
    """An engine whose ranks are gone says so, and leaves no process."""
    turn = engine.session().say([20, 30, 40], greedy(400))
    with pytest.raises(RankLost):
        turn.wait()
    for process in engine.loop.executor.guard.lead._processes:  # type: ignore[union-attr]
        wait_gone(process.pid)
    with pytest.raises(RankLost):
        engine.loop.step()


def test_a_rank_that_dies_ends_the_engine(directory: Path, forked_ranks: None) -> None:
    engine = tiny_engine(directory, tensor_parallel=2)
    (process,) = engine.loop.executor.guard.lead._processes  # type: ignore[union-attr]
    os.kill(process.pid, signal.SIGKILL)
    broken(engine)


def test_a_rank_that_stalls_ends_the_engine(
    directory: Path, forked_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "SUM_SECONDS", 3.0)
    engine = tiny_engine(directory, tensor_parallel=2)
    (process,) = engine.loop.executor.guard.lead._processes  # type: ignore[union-attr]
    stop(process.pid)
    broken(engine)


def test_a_rank_that_reads_nothing_ends_the_engine(
    directory: Path, forked_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is told fills its stream before any sum waits for it."""
    engine = tiny_engine(directory, tensor_parallel=2)
    lead = engine.loop.executor.guard.lead
    (process,) = lead._processes  # type: ignore[union-attr]
    stop(process.pid)
    monkeypatch.setattr(crew, "SUM_SECONDS", 0.1)
    with pytest.raises(RankLost, match="rank 1 does not read"):
        lead.fence([0] * (4 << 20))  # type: ignore[union-attr]
    wait_gone(process.pid)
    with pytest.raises(RankLost, match="rank 1 does not read"):
        lead.fence([0])  # type: ignore[union-attr]


def test_a_capture_that_fails_ends_the_engine(
    directory: Path, recording_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank is in the middle of it, and would take the next step for its rest."""
    engine = tiny_engine(directory, tensor_parallel=2, max_running=6)
    executor = engine.loop.executor
    assert isinstance(executor, Executor)
    executor.capture(first_only=True)

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory for a graph")

    monkeypatch.setattr(StepGraphs, "capture", fails)
    with pytest.raises(RankLost, match="a step failed on some of the ranks"):
        engine.loop.capturing.when_idle()


def test_ranks_end_in_order_with_their_engine(
    directory: Path, forked_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "STOP_SECONDS", 60.0)
    engine = tiny_engine(directory, tensor_parallel=2)
    engine.session().say([20, 30, 40], greedy(4)).wait()
    engine.close()
    assert [process.poll() for process in engine.loop.executor.guard.lead._processes] == [0]  # type: ignore[union-attr]


def test_a_closed_engine_says_so(directory: Path, forked_ranks: None) -> None:
    engine = tiny_engine(directory, tensor_parallel=2)
    engine.close()
    turn = engine.session().say([20, 30, 40], greedy(4))
    with pytest.raises(RankLost, match="the engine is closed"):
        turn.wait()
