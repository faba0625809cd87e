"""The disk tier's thread: it writes and reads files one after another, in the order of submission.

Finished jobs wait, in that order, until they are taken. An error of a job is stored in the job and never ends
the thread. Called by the disk tier alone.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from torch import Tensor

from holdfast.engine.tiers.files import BadFile, Header, Snapshot

log = logging.getLogger("holdfast.disk")

POLL_SECONDS = 0.1
"""How often `stop` asks whether it has been cancelled."""
ABORT_SECONDS = 2.0
"""How long `stop` waits for the thread after the file in progress was aborted."""


class JobKind(Enum):
    """The operation of a job on its file."""

    WRITE = auto()
    READ = auto()


@dataclass(slots=True)
class Job:
    """One file to write or to read. `moves` are the numbers of the core's moves that wait for it.

    `snapshot` is what to read, or the file that a part is appended to; None where a file is written whole.
    """

    kind: JobKind
    session: str
    file: str
    header: Header
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """What is written."""
    rows: dict[str, list[Tensor]] = field(default_factory=dict)
    """What was read: the rows of each tensor, in the file's parts."""
    moves: list[int] = field(default_factory=list)
    bytes: int = 0
    snapshot: Snapshot | None = None
    error: str | None = None
    disk_full: bool = False
    """Whether the error is that the disk has no room."""
    damaged: bool = False
    """Whether the error is that the file is missing or damaged."""


class DiskThread:
    """A thread with a queue of jobs, and a queue of those that have finished."""

    def __init__(self, carry_out: Callable[[Job], None]) -> None:
        self.pending = 0
        """Jobs that were submitted and have not been taken."""
        self._carry_out = carry_out
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._awaited: deque[Job] = deque()
        self._thread = threading.Thread(target=self._work, name="holdfast-disk", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._carry_out(job)
            except Exception as error:  # noqa: BLE001
                job.error = str(error) or type(error).__name__
                job.disk_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
                job.damaged = isinstance(error, BadFile | FileNotFoundError)
            self._done.put(job)

    def submit(self, job: Job) -> None:
        """Queue a job after all others."""
        self.pending += 1
        self._jobs.put(job)

    def take_finished(self) -> Iterator[Job]:
        """The jobs that have finished, in the order of submission."""
        while self._awaited or not self._done.empty():
            job = self._awaited.popleft() if self._awaited else self._done.get()
            self.pending -= 1
            yield job

    def wait(self, seconds: float) -> None:
        """Wait until a job has finished, or time is up; returns at once if none is pending."""
        if self.pending and not self._awaited:
            try:
                self._awaited.append(self._done.get(timeout=seconds))
            except queue.Empty:
                log.debug("no job of the disk's thread has finished yet")

    def stop(self, cancelled: Callable[[], bool], abort: Callable[[], None]) -> None:
        """Let the thread end after its last job; once cancelled, `abort` the file and wait no longer."""
        self._jobs.put(None)
        while self._thread.is_alive() and not cancelled():
            self._thread.join(POLL_SECONDS)
        abort()
        self._thread.join(ABORT_SECONDS)
