"""Queues of jobs for the text processes, one process for each lane.

A lane runs one job at a time, round-robin over tenants, so that no tenant waits for more than one job of
another. A process that dies is replaced and its job retried once; one that exceeds the time limit is killed
and its job rejected. A process starts with the first job of its lane.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import subprocess
import sys
from asyncio.subprocess import SubprocessStreamProtocol
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from holdfast.server.http.problems import Problem
from holdfast.server.text import jobs

__all__ = ["COMMAND", "JOB_SECONDS", "STREAM_BYTES", "Lane", "TextProcess", "TextProcessLost"]

log = logging.getLogger("holdfast.server")

COMMAND = (sys.executable, "-m", "holdfast.server.text.process")
JOB_SECONDS = 60.0
"""How long a job may take before its process is killed."""
ATTEMPTS = 2
STREAM_BYTES = 1 << 20
"""Buffer size of the pipe from the process."""
PORTION_BYTES = 1 << 18
"""Bytes written to a process, or read from it, before the event loop may run other tasks."""
WAITING_BYTES_MAX = 64 << 20
"""Bytes of queued jobs per tenant in a lane."""


class TextProcessLost(Exception):
    """A text process ended, or could not be started."""


class Worker(Protocol):
    """A lane's view of a process."""

    async def ask(self, frame: jobs.Frame) -> jobs.Answer:
        """The answer to a job; raises `TextProcessLost`."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


class TextProcess:
    """One process, ready for jobs."""

    def __init__(
        self, transport: asyncio.SubprocessTransport, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        self._transport = transport
        self._source = source
        self._sink = sink

    @classmethod
    async def start(cls, setup: jobs.Setup) -> TextProcess:
        """Start a process and wait until it has the vocabulary."""
        loop = asyncio.get_running_loop()
        try:
            transport, protocol = await loop.subprocess_exec(
                lambda: SubprocessStreamProtocol(STREAM_BYTES, loop),
                *COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None,
            )
        except OSError as error:
            raise TextProcessLost(f"cannot start a text process: {error.strerror}") from error
        assert protocol.stdin is not None and protocol.stdout is not None, "both are pipes"
        started = cls(transport, protocol.stdout, protocol.stdin)
        try:
            await started.ask(jobs.frame(setup))
        except BaseException:
            started.kill()
            raise
        return started

    async def ask(self, frame: jobs.Frame) -> jobs.Answer:
        """The answer to a job; raises `TextProcessLost`."""
        source, sink = self._source, self._sink
        if sink.is_closing():
            raise TextProcessLost("a text process ended")
        try:
            for part in frame:
                view = memoryview(part)
                for start in range(0, len(view), PORTION_BYTES):
                    sink.write(view[start : start + PORTION_BYTES])
                    await sink.drain()
            length, attached = jobs.LENGTHS.unpack(await source.readexactly(jobs.LENGTHS.size))
            message = await source.readexactly(length)
            return jobs.decode_answer(message, await _read_in_portions(source, attached))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise TextProcessLost("a text process ended") from error

    def kill(self) -> None:
        """End it at once."""
        self._transport.close()


async def _read_in_portions(source: asyncio.StreamReader, size: int) -> memoryview:
    """The next bytes, however many: other tasks run between portions of them.

    The memory is mapped, which is zero without being written: a `bytearray` would be written all at once.
    """
    if not size:
        return jobs.NOTHING
    content = memoryview(mmap.mmap(-1, size))
    for start in range(0, size, PORTION_BYTES):
        end = min(start + PORTION_BYTES, size)
        content[start:end] = await source.readexactly(end - start)
        await asyncio.sleep(0)
    return content


@dataclass(slots=True, eq=False)
class _Waiting:
    """A queued job and the future of its answer."""

    frame: jobs.Frame
    answer: asyncio.Future[jobs.Answer]


class Lane:
    """A queue of jobs for one process."""

    def __init__(self, start: Callable[[], Awaitable[Worker]], seconds: float = JOB_SECONDS) -> None:
        self._start = start
        self._seconds = seconds
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._bytes: dict[str, int] = {}
        self._worker: Worker | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def ask(self, job: jobs.Job, tenant: str) -> jobs.Answer:
        """Queue a job and wait for its answer."""
        if self._closed:
            raise _unavailable()
        frame = jobs.frame(job)
        if self._bytes.get(tenant, 0) + frame.size > WAITING_BYTES_MAX:
            raise Problem(
                429,
                "too_many_inputs",
                f"this key has more than {WAITING_BYTES_MAX} bytes waiting to be tokenised",
            )
        entry = _Waiting(frame, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(entry)
        self._bytes[tenant] = self._bytes.get(tenant, 0) + frame.size
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await entry.answer

    @property
    def is_up(self) -> bool:
        """Whether its process has started."""
        return self._worker is not None

    def warm_up(self) -> None:
        """Start the process before its first job."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        """End the process; queued jobs fail."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        self._drop()
        for entries in self._waiting.values():
            for entry in entries:
                _tell(entry, _unavailable())
        self._waiting.clear()

    def _next(self) -> _Waiting | None:
        """The next job, round-robin over tenants."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            entries = self._waiting.pop(tenant)
            entry = entries.popleft()
            if entries:
                self._waiting[tenant] = entries
            left = self._bytes[tenant] - entry.frame.size
            if left:
                self._bytes[tenant] = left
            else:
                del self._bytes[tenant]
            if not entry.answer.done():  # The client of a cancelled one has disconnected.
                return entry
        return None

    async def _run(self) -> None:
        """Run all queued jobs; at least start the process."""
        entry = self._next()
        while True:
            try:
                if self._worker is None:
                    self._worker = await self._start()
            except TextProcessLost as error:
                log.error("%s", error)
                if entry is not None:
                    _tell(entry, _unavailable())
            else:
                if entry is not None:
                    await self._answer(entry)
            entry = self._next()
            if entry is None:
                return

    async def _answer(self, entry: _Waiting) -> None:
        """Run one job, again if its process dies; it always gets exactly one answer."""
        try:
            await self._attempt(entry)
        except Exception as error:
            log.error("text job failed", exc_info=error)
            self._drop()
        finally:
            _tell(entry, _unavailable())

    async def _attempt(self, entry: _Waiting) -> None:
        for _ in range(ATTEMPTS):
            try:
                if self._worker is None:
                    self._worker = await self._start()
                async with asyncio.timeout(self._seconds):
                    answer = await self._worker.ask(entry.frame)
            except TimeoutError:
                log.warning("tokenising took more than %.0f s; the text process was killed", self._seconds)
                self._drop()
                _tell(entry, Problem(400, "tokenizer", "input: tokenising exceeded the time limit", "input"))
                return
            except TextProcessLost as error:
                log.warning("%s; retrying its job", error)
                self._drop()
            else:
                if not entry.answer.done():
                    entry.answer.set_result(answer)
                return
        _tell(entry, Problem(400, "tokenizer", "input: cannot be tokenised", "input"))

    def _drop(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


def _unavailable() -> Problem:
    return Problem(503, "tokenizer_unavailable", "the tokenizer is unavailable; try again", retry_after=1)


def _tell(entry: _Waiting, problem: Problem) -> None:
    if not entry.answer.done():
        entry.answer.set_exception(problem)
