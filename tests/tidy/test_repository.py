"""The rules of the house, applied to the tree as it stands; each test names a rule and lists its offences."""

from functools import cache
from pathlib import Path

import pytest

from tests.tidy.imports import MAY_IMPORT, PACKAGE, Source
from tests.tidy.rules import PYTHON_RULES, SOURCE_RULES, TEXT_RULES, Rule

ROOT = Path(__file__).resolve().parents[2]
# The folders that the repository consists of. A list, and not a walk from the root, because environments,
# caches and scratch files lie beside them.
FOLDERS = (".ci", "benchmarks", "docs", "src", "tests")
TEXT_SUFFIXES = {"", ".cfg", ".css", ".html", ".js", ".json", ".md", ".py", ".toml", ".txt", ".typed", ".yml"}


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
    return path.is_file() and not generated and path.suffix in TEXT_SUFFIXES


def apply(rule: Rule, files: tuple[Source, ...]) -> None:
    assert files, "no files found: the rule would pass for want of anything to look at"
    offences = [str(offence) for file in files for offence in rule(file)]
    assert not offences, "\n".join([rule.__doc__ or rule.__name__, *offences])


@pytest.mark.parametrize("rule", SOURCE_RULES, ids=lambda rule: rule.__name__)
def test_source(rule: Rule) -> None:
    apply(rule, sources("src"))


@pytest.mark.parametrize("rule", PYTHON_RULES, ids=lambda rule: rule.__name__)
def test_source_and_tests(rule: Rule) -> None:
    apply(rule, sources("src", "tests"))


@pytest.mark.parametrize("rule", TEXT_RULES, ids=lambda rule: rule.__name__)
def test_every_text_file(rule: Rule) -> None:
    apply(rule, texts())


def test_every_package_has_its_place() -> None:
    folders = {path.parent.name for path in (ROOT / "src" / PACKAGE).glob("*/__init__.py")}
    assert folders == set(MAY_IMPORT) - {""}


def test_imports_have_no_cycle() -> None:
    """The table of allowed imports is itself downwards only: following it never leads back."""
    remaining = {package: below - {""} for package, below in MAY_IMPORT.items() if package}
    while remaining:
        lowest = {package for package, below in remaining.items() if not below & remaining.keys()}
        assert lowest, f"a cycle among {sorted(remaining)}"
        for package in lowest:
            del remaining[package]


def test_root_files_are_seen() -> None:
    seen = {file.path for file in texts()}
    assert {"Makefile", "pyproject.toml", "LICENSE", ".ci/run", "src/holdfast/__init__.py"} <= seen
