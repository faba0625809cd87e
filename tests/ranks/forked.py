"""The processes of ranks as forks of a process that has imported torch: a new interpreter takes seconds.

They are processes like any other, with memory and sockets of their own, and `kill -9` ends them.
`test_processes` starts ranks as they are started otherwise. The process that forks has no other threads;
a test has some, whose locks a fork of it would inherit.
"""

import multiprocessing
import os
import socket
import subprocess
from multiprocessing.context import ForkServerProcess

import pytest

from holdfast.engine.ranks import crew, follower

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


def fork(descriptor: int) -> Forked:
    """Start a rank on its end of a stream."""
    with socket.socket(fileno=os.dup(descriptor)) as stream:
        process = CONTEXT.Process(target=be_rank, args=(stream,), daemon=True)
        process.start()
    return Forked(process)


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forks."""
    monkeypatch.setattr(crew, "spawn", fork)
