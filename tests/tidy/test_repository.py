"""The rules of the house, applied to the tree as it stands; each test names a rule and lists its offences."""

import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache

import pytest

from tests.tidy.imports import (
    ENVIRONMENT_READERS,
    MAY_IMPORT,
    MAY_IMPORT_EXTRAS,
    PACKAGE,
    Source,
    imported_modules,
)
from tests.tidy.rules import PYTHON_RULES, SOURCE_RULES, TEXT_RULES, Offence, Rule
from tests.tidy.tree import ROOT, sources, texts


@cache
def undeclared() -> Rule:
    """A rule: nothing is imported that is only a dependency of a dependency; extras are for some packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    standard = {*sys.stdlib_module_names, PACKAGE, "opentelemetry"}

    def imports_are_declared(file: Source) -> Iterator[Offence]:
        wanted = [*project["dependencies"]]
        for extra in MAY_IMPORT_EXTRAS.get(file.package, ()):
            wanted += project["optional-dependencies"][extra]
        declared = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in wanted}
        for line, name in imported_modules(file.nodes):
            if name.split(".")[0] not in standard | declared:
                yield Offence(file.path, line, f"imports {name}, which its package does not declare")

    return imports_are_declared


@cache
def offences() -> dict[Rule, list[str]]:
    """The offences against each rule for Python; a file is parsed once for all of them."""
    files = sources("src", "tests")
    everywhere, below_src = PYTHON_RULES, (*SOURCE_RULES, undeclared())
    seen = {file.path.partition("/")[0] for file in files}
    assert seen == {"src", "tests"}, "the rules would pass for want of anything to look at"
    found: dict[Rule, list[str]] = {rule: [] for rule in (*everywhere, *below_src)}
    for file in files:
        for rule in (*everywhere, *(below_src if file.path.startswith("src/") else ())):
            found[rule] += map(str, rule(file))
    return found


def check(rule: Rule, found: list[str]) -> None:
    assert not found, "\n".join([rule.__doc__ or rule.__name__, *found])


@pytest.mark.parametrize("rule", SOURCE_RULES, ids=lambda rule: rule.__name__)
def test_source(rule: Rule) -> None:
    check(rule, offences()[rule])


@pytest.mark.parametrize("rule", PYTHON_RULES, ids=lambda rule: rule.__name__)
def test_source_and_tests(rule: Rule) -> None:
    check(rule, offences()[rule])


@pytest.mark.parametrize("rule", TEXT_RULES, ids=lambda rule: rule.__name__)
def test_every_text_file(rule: Rule) -> None:
    check(rule, [str(offence) for file in texts() for offence in rule(file)])


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


def test_every_package_that_is_imported_is_declared() -> None:
    check(undeclared(), offences()[undeclared()])


def test_a_package_that_is_not_declared_is_an_offence() -> None:
    found = [str(each) for each in undeclared()(Source(f"src/{PACKAGE}/core/x.py", "import numpy, pip\n"))]
    assert len(found) == 1 and "pip" in found[0]


def test_environment_readers_read_the_environment() -> None:
    """A module that no longer does leaves the list."""
    texts_of = {file.module: file.text for file in sources("src")}
    assert [module for module in ENVIRONMENT_READERS if "os.environ" not in texts_of.get(module, "")] == []


def test_transformers_is_not_a_dependency() -> None:
    """It takes 120 MB and seconds to import; benchmarks and tests alone need it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not any(line.startswith("transformers") for line in project["dependencies"])
    assert any(line.startswith("transformers") for line in project["optional-dependencies"]["bench"])
