"""The text processes as the event loop sees them: jobs that wait, one process for each lane.

A lane has one process and does one job at a time. Tenants take turns, so that many jobs of one do not keep
another waiting for more than a job. A process that dies is replaced, and its job tried once more; one that
takes too long is killed, and its job refused. A process starts with the first job of its lane.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from asyncio.subprocess import SubprocessStreamProtocol
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from holdfast.server.http.problems import Problem
from holdfast.server.text import jobs

__all__ = ["JOB_SECONDS", "Lane", "TextProcess", "TextProcessLost"]

log = logging.getLogger("holdfast.server")

JOB_SECONDS = 60.0
"""How long a job may take before its process is killed."""
ATTEMPTS = 2
STREAM_BYTES = 1 << 20
"""How much of an answer is taken from the pipe before it is read."""
PORTION_BYTES = 1 << 18
"""How much is written to a process before other work gets its turn."""
WAITING_BYTES_MAX = 64 << 20
"""How much may wait in a lane for one tenant."""


class TextProcessLost(Exception):
    """A text process ended, or could not be started."""


class Worker(Protocol):
    """What a lane needs of a process."""

    async def ask(self, content: bytes) -> jobs.Answer:
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
                sys.executable,
                "-m",
                "holdfast.server.text.process",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None,
            )
        except OSError as error:
            raise TextProcessLost(f"a text process cannot be started: {error.strerror}") from error
        assert protocol.stdin is not None and protocol.stdout is not None, "both are pipes"
        started = cls(transport, protocol.stdout, protocol.stdin)
        try:
            await started.ask(jobs.frame(setup))
        except BaseException:
            started.kill()
            raise
        return started

    async def ask(self, content: bytes) -> jobs.Answer:
        """The answer to a job; raises `TextProcessLost`."""
        source, sink = self._source, self._sink
        if sink.is_closing():
            raise TextProcessLost("a text process ended")
        try:
            view = memoryview(content)
            for start in range(0, len(content), PORTION_BYTES):
                sink.write(view[start : start + PORTION_BYTES])
                await sink.drain()
            header = await source.readexactly(jobs.HEADER)
            return jobs.decode_answer(await source.readexactly(int.from_bytes(header, "big")))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise TextProcessLost("a text process ended") from error

    def kill(self) -> None:
        """End it at once."""
        self._transport.close()


@dataclass(slots=True, eq=False)
class _Waiting:
    """A job and whoever waits for its answer."""

    content: bytes
    answer: asyncio.Future[jobs.Answer]


class Lane:
    """Jobs of one kind, done one after the other."""

    def __init__(self, start: Callable[[], Awaitable[Worker]], seconds: float = JOB_SECONDS) -> None:
        self._start = start
        self._seconds = seconds
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._bytes: dict[str, int] = {}
        self._worker: Worker | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def ask(self, job: jobs.Job, tenant: str) -> jobs.Answer:
        """The answer to a job, in its turn."""
        if self._closed:
            raise _unavailable()
        content = jobs.frame(job)
        if self._bytes.get(tenant, 0) + len(content) > WAITING_BYTES_MAX:
            raise Problem(
                429, "too_many_inputs", f"{WAITING_BYTES_MAX} bytes of this key wait to be tokenised"
            )
        entry = _Waiting(content, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(entry)
        self._bytes[tenant] = self._bytes.get(tenant, 0) + len(content)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await entry.answer

    def warm_up(self) -> None:
        """Start the process before its first job."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        """End the process; those who wait are told."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        self._drop()
        for entries in self._waiting.values():
            for entry in entries:
                _tell(entry, _unavailable())
        self._waiting.clear()

    def _next(self) -> _Waiting | None:
        """The job whose turn it is: of the tenant that has waited longest since its last."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            entries = self._waiting.pop(tenant)
            entry = entries.popleft()
            if entries:
                self._waiting[tenant] = entries
            left = self._bytes[tenant] - len(entry.content)
            if left:
                self._bytes[tenant] = left
            else:
                del self._bytes[tenant]
            if not entry.answer.done():  # Nobody waits for one whose client has gone.
                return entry
        return None

    async def _run(self) -> None:
        """Do all jobs that wait; at least start the process."""
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
        """Do one job, twice if its process dies. Whatever goes wrong, the job has one answer."""
        try:
            await self._attempt(entry)
        except Exception as error:
            log.error("a job of a text process failed", exc_info=error)
            self._drop()
        finally:
            _tell(entry, _unavailable())

    async def _attempt(self, entry: _Waiting) -> None:
        for _ in range(ATTEMPTS):
            try:
                if self._worker is None:
                    self._worker = await self._start()
                async with asyncio.timeout(self._seconds):
                    answer = await self._worker.ask(entry.content)
            except TimeoutError:
                log.warning("an input took more than %.0f s; its process was killed", self._seconds)
                self._drop()
                _tell(entry, Problem(400, "tokenizer", "input: takes too long to be tokenised", "input"))
                return
            except TextProcessLost as error:
                log.warning("%s; its job is tried again", error)
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
    return Problem(503, "tokenizer_unavailable", "the tokenizer is not there; try again", retry_after=1)


def _tell(entry: _Waiting, problem: Problem) -> None:
    if not entry.answer.done():
        entry.answer.set_exception(problem)
