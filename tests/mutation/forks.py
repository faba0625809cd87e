"""Work in forked processes: each begins with everything its parent has loaded, and takes its mess along.

A child that computes for too long, or takes too much memory, ends; its parent hears why.
"""

import os
import resource
import selectors
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

MEMORY_BYTES = 2 << 30
"""What a child may take beside what it begins with."""

Key = TypeVar("Key")
Work = Callable[[], str | None]


def in_forks(
    works: Iterable[tuple[Key, Work]], jobs: int, cpu_seconds: Callable[[Key], int]
) -> Iterator[tuple[Key, str | None]]:
    """Do all works, `jobs` at a time, and yield what each returned, in the order in which they end."""
    pending = iter(works)
    running: dict[int, tuple[int, Key]] = {}
    with selectors.DefaultSelector() as selector:
        while True:
            while len(running) < jobs and (following := next(pending, None)) is not None:
                key, work = following
                process, pipe = _fork(work, cpu_seconds(key))
                running[pipe] = (process, key)
                selector.register(pipe, selectors.EVENT_READ)
            if not running:
                return
            for event, _ in selector.select():
                pipe = event.fd
                process, key = running.pop(pipe)
                selector.unregister(pipe)
                yield key, _result(process, pipe)


def _fork(work: Work, cpu_seconds: int) -> tuple[int, int]:
    """Begin to do something in a child; returns its process and where its result will be read."""
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return process, reader
    os.close(reader)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    try:
        result = work()
        said = "survived" if result is None else f"noticed {result}"
    except BaseException as error:  # noqa: BLE001 - whatever is raised is the result
        said = f"noticed {type(error).__name__}: {str(error)[:200]}"
    os.write(writer, said.encode(errors="replace")[:4000])
    os._exit(0)


def _result(process: int, pipe: int) -> str | None:
    with os.fdopen(pipe, "rb") as reader:
        said = reader.read().decode(errors="replace")
    _, status = os.waitpid(process, 0)
    if said == "survived":
        return None
    if os.WIFSIGNALED(status):
        return "out of time" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "a signal"
    return said.removeprefix("noticed ") or "the process ended"
