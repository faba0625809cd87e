"""The processes of ranks as forks of a process that has imported torch: a new interpreter takes seconds.

They are processes like any other, with memory and sockets of their own, and `kill -9` ends them.
`test_processes` starts ranks as they are started otherwise. The process that forks has no other threads;
a test has some, whose locks a fork of it would inherit.
"""

import multiprocessing
import os
import socket
import subprocess
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess

import pytest

from holdfast.engine.ranks import crew, follower
from holdfast.engine.step import executor, graphs
from tests.engine.test_graphs import Replayed

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["holdfast.engine.ranks.follower"])


class Forked:
    """What a crew uses of `subprocess.Popen`."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()


def be_rank(stream: socket.socket) -> None:
    """A rank on its end of a stream. Its parent is not the engine's process."""
    follower._die_with = lambda parent: None  # type: ignore[assignment]
    os._exit(follower.main(stream.detach()))


def fork(descriptor: int, target: Callable[[socket.socket], None] = be_rank) -> Forked:
    """Start a rank on its end of a stream."""
    with socket.socket(fileno=os.dup(descriptor)) as stream:
        process = CONTEXT.Process(target=target, args=(stream,), daemon=True)
        process.start()
    return Forked(process)


def record(step: Callable[[], graphs.Outcome]) -> tuple[graphs.Recorded, graphs.Outcome]:
    """A step that is run again in place of a graph."""
    replayed = Replayed(step)
    return replayed, replayed.outcome


def record_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Have a few shapes, and steps that are run again in place of graphs."""
    patch.setattr(graphs, "MIXED_TOKENS", (8, 32))
    patch.setattr(graphs, "MIXED_ROWS", (4, 6))
    patch.setattr(executor, "record_cuda", lambda: record)


def be_recording_rank(stream: socket.socket) -> None:
    """A rank that records steps."""
    record_on_cpu(pytest.MonkeyPatch())
    be_rank(stream)


def fork_recording(descriptor: int) -> Forked:
    """Start a rank that records steps."""
    return fork(descriptor, be_recording_rank)


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forks."""
    monkeypatch.setattr(crew, "spawn", fork)


@pytest.fixture
def recording_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forks; this one and they record steps in place of graphs."""
    monkeypatch.setattr(crew, "spawn", fork_recording)
    record_on_cpu(monkeypatch)
