"""The disk tier's thread: it writes and reads files one after another, in the order in which it was asked.

What is done waits, in that order, until it is taken. Whatever a job raises is an error of that job, and never
the end of the thread: somebody waits for the next one. Called by the disk tier alone.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from holdfast.engine.tiers.files import Header

log = logging.getLogger("holdfast.disk")

LOOK_SECONDS = 0.1  # How often one who waits for the end looks whether there is still time.
GIVE_UP_SECONDS = 2.0  # How long a thread whose file was given up may take to notice.


@dataclass(slots=True)
class Job:
    """Something for the thread. `numbers` are the core's moves that wait for it."""

    session: str
    file: str
    header: Header
    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    writes: bool = True
    bytes: int = 0
    error: str | None = None
    full: bool = False
    """Whether the error is that the disk has no room."""


class DiskThread:
    """Jobs that are to be done, and those that are."""

    def __init__(self, carry_out: Callable[[Job], None]) -> None:
        self.under_way = 0
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
                job.full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._done.put(job)

    def give(self, job: Job) -> None:
        """Have a job done after all that were given before."""
        self.under_way += 1
        self._jobs.put(job)

    def take(self) -> Iterator[Job]:
        """The jobs that are done, in the order in which they were given."""
        while self._awaited or not self._done.empty():
            job = self._awaited.popleft() if self._awaited else self._done.get()
            self.under_way -= 1
            yield job

    def wait(self, seconds: float) -> None:
        """Let the thread get on, until there is something to take or time is up."""
        if self.under_way and not self._awaited:
            try:
                self._awaited.append(self._done.get(timeout=seconds))
            except queue.Empty:
                log.debug("the disk is still at work")

    def end(self, hurry: Callable[[], bool], give_up: Callable[[], None]) -> None:
        """Let the thread end when all is done, or in a hurry, once `give_up` was called, leave it alone."""
        self._jobs.put(None)
        while self._thread.is_alive() and not hurry():
            self._thread.join(LOOK_SECONDS)
        give_up()
        self._thread.join(GIVE_UP_SECONDS)
