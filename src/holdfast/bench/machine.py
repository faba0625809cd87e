"""What else the machine does while something is measured.

Foreign load is the processor time that went neither to this process nor to its children, in cores; what a
virtual machine wanted and did not get is part of it. A figure that was taken beside much of it says little.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["ForeignLoad"]

_TICKS = os.sysconf("SC_CLK_TCK")


class ForeignLoad:
    """Counts foreign load from its making on; zero where the system does not tell."""

    __slots__ = ("_began", "_busy", "_own")

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._busy = _busy_seconds()
        self._own = _own_seconds()

    def cores(self) -> float:
        """The mean number of cores that others kept busy."""
        seconds = time.perf_counter() - self._began
        busy, own = _busy_seconds() - self._busy, _own_seconds() - self._own
        return max(0.0, busy - own) / seconds if seconds > 0 else 0.0


def _busy_seconds() -> float:
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return 0.0
    user, nice, system, _, _, interrupts, soft, stolen, *_ = (int(value) for value in first[1:])
    return (user + nice + system + interrupts + soft + stolen) / _TICKS


def _own_seconds() -> float:
    """Processor time of this process and all that descend from it, as far as they still run."""
    times: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in brackets may hold anything; what follows it does not.
            values = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # A process that is gone.
        times[int(entry.parent.name)] = (int(values[1]), (int(values[11]) + int(values[12])) / _TICKS)
    own = {os.getpid()}
    while True:
        found = {process for process, (parent, _) in times.items() if parent in own} - own
        if not found:
            return sum(times[process][1] for process in own if process in times)
        own |= found
