"""How much memory this machine can still give: what the system has free, or less where a container says so.

Called where weights are placed and pools are sized.
"""

from __future__ import annotations

import os
from pathlib import Path

_LIMITS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Both kinds of control groups: where they are, the limit, what is taken, and what files could give back."""


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that can still be had, files in the page cache counted as free."""
    try:
        free = int(_fields(root / "proc/meminfo")["MemAvailable:"]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min([free, *_left_by_limits(root)])


def _left_by_limits(root: Path) -> list[int]:
    """What limits on this process and those beside it leave; none where there are none."""
    left = []
    for place, limit, taken, files in _LIMITS:
        try:
            most = int((root / place / limit).read_text(encoding="ascii"))
            now = int((root / place / taken).read_text(encoding="ascii"))
            given_back = int(_fields(root / place / "memory.stat").get(files, "0"))
        except (OSError, ValueError):
            continue  # No such group, or its limit is the word `max`.
        left.append(max(0, most - now + given_back))
    return left


def _fields(path: Path) -> dict[str, str]:
    """The first word of each line, and the second."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {words[0]: words[1] for words in lines if len(words) > 1}
