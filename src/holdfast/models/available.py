"""The memory that this machine can still allocate: free memory of the system, or less in a container.

Called where weights are placed and pools are sized.
"""

from __future__ import annotations

import os
from pathlib import Path

_LIMITS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""cgroup v2 and v1: directory, limit, usage, and the page cache that can be reclaimed."""


def available_bytes(root: Path = Path("/")) -> int:
    """Available memory, with the page cache counted as free."""
    try:
        free = int(_fields(root / "proc/meminfo")["MemAvailable:"]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min([free, *_left_by_limits(root)])


def _left_by_limits(root: Path) -> list[int]:
    """The memory left by the cgroup limits of this process; empty without limits."""
    left = []
    for place, limit, taken, files in _LIMITS:
        try:
            most = int((root / place / limit).read_text(encoding="ascii"))
            now = int((root / place / taken).read_text(encoding="ascii"))
            given_back = int(_fields(root / place / "memory.stat").get(files, "0"))
        except (OSError, ValueError):
            continue  # No such cgroup, or its limit is `max`.
        left.append(max(0, most - now + given_back))
    return left


def _fields(path: Path) -> dict[str, str]:
    """The first two words of each line, as key and value."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {words[0]: words[1] for words in lines if len(words) > 1}
