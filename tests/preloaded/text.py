"""Text processes as forks: a new interpreter imports for 0.3 seconds of processor time.

In a preloaded server they are forks of the server (`fork_text_processes`), in a test that has the service in
its own process forks of the nursery (`start_from_nursery`). What the service waits for, how it asks them and
how it kills them stay as they are.
"""

import asyncio
import os
import subprocess
from typing import Any, Protocol

from holdfast.server.text import jobs, lanes
from tests.preloaded.commands import Command
from tests.preloaded.engine import Forked, be

MODULE = "holdfast.server.text.process"


class Process(Protocol):
    """A process that can be killed, and is reaped."""

    def kill(self) -> None:
        """End it at once."""
        ...


class Transport:
    """What `TextProcess` uses of `asyncio.SubprocessTransport`."""

    def __init__(self, process: Process, pipes: tuple[asyncio.BaseTransport, asyncio.BaseTransport]) -> None:
        self._process = process
        self._pipes = pipes

    def close(self) -> None:
        """End the process at once."""
        self._process.kill()
        for pipe in self._pipes:
            pipe.close()


def fork() -> tuple[Forked, int, int]:
    """A fork of this process that reads from a pipe and writes to another, and our ends of both."""
    theirs_in, ours_in = os.pipe()
    ours_out, theirs_out = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(theirs_in, 0)
        os.dup2(theirs_out, 1)
        be(MODULE, lanes.COMMAND)
    os.close(theirs_in)
    os.close(theirs_out)
    return Forked(pid), ours_in, ours_out


class Apart(Command):
    """A fork of the nursery, which is reaped where it is killed."""

    def kill(self) -> None:
        super().kill()
        self.wait()


def ask_nursery() -> tuple[Apart, int, int]:
    """A fork of the nursery that does so."""
    process = Apart(module=MODULE, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        return process, os.dup(process.stdin.fileno()), os.dup(process.stdout.fileno())


async def _started(setup: jobs.Setup, process: Process, sink: int, source: int) -> lanes.TextProcess:
    """The text process at the other ends of two pipes, once it has the vocabulary."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(lanes.STREAM_BYTES)
    reading, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(source, "rb", 0)
    )
    writing, flow = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(sink, "wb", 0)
    )
    transport: Any = Transport(process, (reading, writing))
    started = lanes.TextProcess(transport, reader, asyncio.StreamWriter(writing, flow, None, loop))
    try:
        await started.ask(jobs.frame(setup))
    except BaseException:
        started.kill()
        raise
    return started


async def start(setup: jobs.Setup) -> lanes.TextProcess:
    """Start a process as a fork of this one, as `TextProcess.start` does."""
    return await _started(setup, *fork())


async def start_from_nursery(setup: jobs.Setup) -> lanes.TextProcess:
    """Start a process as a fork of the nursery, as `TextProcess.start` does."""
    return await _started(setup, *ask_nursery())


def fork_text_processes() -> None:
    """Have this server fork its text processes."""
    lanes.TextProcess.start = start  # type: ignore[method-assign,assignment]
