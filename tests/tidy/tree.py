"""The files of the repository as Sources: what the rules are applied to."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.tidy.imports import Source

ROOT = Path(__file__).resolve().parents[2]
# The folders that the repository consists of. A list, and not a walk from the root, because environments,
# caches and scratch files lie beside them.
FOLDERS = (".ci", "docs", "src", "tests")
# Folders below them that the tools make: compiled modules, and the packages that `make clients` installs.
MADE = ("__pycache__", "node_modules")


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """The Python files below `folders`, in the order of their paths."""
    paths = sorted(path for folder in folders for path in _files(ROOT / folder) if path.suffix == ".py")
    return tuple(Source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths)


@cache
def texts() -> tuple[Source, ...]:
    """Every text file of the repository: those in its folders and those at its root."""
    nested = (path for folder in FOLDERS for path in _files(ROOT / folder))
    paths = sorted(path for path in (*nested, *ROOT.iterdir()) if _is_text(path))
    return tuple(Source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths)


def _files(folder: Path) -> Iterator[Path]:
    """The files below a folder that belong to the repository."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in MADE and not name.endswith(".egg-info")]
        yield from (Path(place) / name for name in names)


def _is_text(path: Path) -> bool:
    # A worktree has a file of that name, with a path of the machine.
    return path.is_file() and path.name != ".git" and b"\0" not in path.read_bytes()
