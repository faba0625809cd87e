"""Available memory, with and without a container's limit."""

from pathlib import Path

import pytest

from holdfast.models.available import available_bytes

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GiB free."""
    write(tmp_path / "proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:   {8 << 20} kB\nHugePages_Total: 0\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


def new_group(root: Path, limit: str, taken: int, files: int) -> None:
    write(root / "sys/fs/cgroup/memory.max", f"{limit}\n")
    write(root / "sys/fs/cgroup/memory.current", f"{taken}\n")
    write(root / "sys/fs/cgroup/memory.stat", f"anon 5\ninactive_file {files}\n")


def test_what_the_system_has_free(root: Path) -> None:
    assert available_bytes(root) == 8 * GIB


def test_a_container_may_have_less(root: Path) -> None:
    """The page cache counts as used, but can be reclaimed."""
    new_group(root, str(4 * GIB), 3 * GIB, 2 * GIB)
    assert available_bytes(root) == 3 * GIB


def test_a_group_that_is_over_its_limit_has_nothing(root: Path) -> None:
    new_group(root, str(GIB), 2 * GIB, 0)
    assert available_bytes(root) == 0


@pytest.mark.parametrize("limit", ["max", str(64 * GIB)])
def test_a_limit_that_is_none(root: Path, limit: str) -> None:
    new_group(root, limit, GIB, 0)
    assert available_bytes(root) == 8 * GIB


def test_groups_of_the_older_kind(root: Path) -> None:
    place = root / "sys/fs/cgroup/memory"
    write(place / "memory.limit_in_bytes", str(2 * GIB))
    write(place / "memory.usage_in_bytes", str(GIB))
    write(place / "memory.stat", f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n")
    assert available_bytes(root) == GIB + GIB // 2


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) >= 1 << 28
    write(tmp_path / "proc/meminfo", "MemFree: 5 kB\n")
    assert available_bytes(tmp_path) >= 1 << 28, "kernels before 3.14"
