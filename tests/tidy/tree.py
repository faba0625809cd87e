"""The files of the repository as Sources: what the rules are applied to."""

from functools import cache
from pathlib import Path

from tests.tidy.imports import Source

ROOT = Path(__file__).resolve().parents[2]
# The folders that the repository consists of. A list, and not a walk from the root, because environments,
# caches and scratch files lie beside them.
FOLDERS = (".ci", "docs", "src", "tests")


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """The Python files below `folders`, in the order of their paths."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return tuple(Source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths)


@cache
def texts() -> tuple[Source, ...]:
    """Every text file of the repository: those in its folders and those at its root."""
    nested = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    paths = sorted(path for path in (*nested, *ROOT.iterdir()) if _is_text(path))
    return tuple(Source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths)


def _is_text(path: Path) -> bool:
    generated = any(part == "__pycache__" or part.endswith(".egg-info") for part in path.parts)
    # A worktree has a file of that name, with a path of the machine.
    return path.is_file() and path.name != ".git" and not generated and b"\0" not in path.read_bytes()
