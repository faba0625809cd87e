"""Processor time on this machine: of one process tree, and of everything else (foreign load).

Foreign load is the processor time of other processes in cores, with the time that a hypervisor stole. Figures
measured under a high foreign load are unreliable. All of it is read from /proc.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["ForeignLoad", "processor_seconds", "run_queue_seconds"]

_TICKS = os.sysconf("SC_CLK_TCK")


class ForeignLoad:
    """Measures foreign load since its construction; zero on systems without /proc."""

    __slots__ = ("_began", "_busy", "_own")

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._busy = _busy_seconds()
        self._own = processor_seconds(os.getpid())

    def cores(self) -> float:
        """The mean number of cores that other processes kept busy."""
        seconds = time.perf_counter() - self._began
        busy = _busy_seconds() - self._busy
        own = processor_seconds(os.getpid()) - self._own
        return max(0.0, busy - own) / seconds if seconds > 0 else 0.0


def processor_seconds(pid: int) -> float:
    """Processor time of a process and its living descendants."""
    times = _process_times()
    return sum(times[process][1] for process in _descendants(pid, times) if process in times)


def run_queue_seconds(pid: int) -> float:
    """How long the threads of a process and its descendants were runnable without a processor."""
    total = 0
    for process in _descendants(pid, _process_times()):
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{process}/task").iterdir():
                total += int((task / "schedstat").read_text().split()[1])
    return total / 1e9


def _busy_seconds() -> float:
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return 0.0
    user, nice, system, _, _, interrupts, soft, stolen, *_ = (int(value) for value in first[1:])
    return (user + nice + system + interrupts + soft + stolen) / _TICKS


def _process_times() -> dict[int, tuple[int, float]]:
    """Parent and processor time of every process, by process id."""
    times: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in brackets may contain spaces and brackets; the fields after it do not.
            values = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # The process has ended.
        times[int(entry.parent.name)] = (int(values[1]), (int(values[11]) + int(values[12])) / _TICKS)
    return times


def _descendants(pid: int, times: dict[int, tuple[int, float]]) -> set[int]:
    """A process with its children, their children and so on."""
    tree = {pid}
    while True:
        found = {process for process, (parent, _) in times.items() if parent in tree} - tree
        if not found:
            return tree
        tree |= found
