"""`docs/clients.md` shows what the last run of `make clients` found, for the versions that are pinned now."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.clients.shown import FAILED, PASSED, RESULTS, STORIES, Results, drawn

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "tests" / "clients"
BEGIN, END = "<!-- clients:begin -->", "<!-- clients:end -->"
PIN = re.compile(r"^([\w-]+)(?:\[[\w,]+\])?==(\S+)", re.MULTILINE)


def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def pinned() -> dict[str, set[str]]:
    """The versions of the clients' packages; openai has one in each of two environments."""
    versions: dict[str, set[str]] = {}
    for path in CLIENTS.glob("requirements*.txt"):
        for name, version in PIN.findall(path.read_text()):
            versions.setdefault(name, set()).add(version)
    for name, version in json.loads((CLIENTS / "node" / "package.json").read_text())["dependencies"].items():
        versions[f"npm:{name}"] = {version}
    return versions


def test_the_page_shows_the_results() -> None:
    text = (ROOT / "docs" / "clients.md").read_text()
    shown = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == drawn(results()), "paste this between the marks:\n" + drawn(results())


def test_the_results_are_those_of_the_pinned_versions() -> None:
    versions = pinned()
    found = {package: entry["version"] for package, entry in results().items()}
    assert {package: version for package, version in found.items() if version not in versions[package]} == {}


def test_every_story_passed() -> None:
    rows = [
        (package, interface, story)
        for package, entry in results().items()
        for interface, stories in entry["interfaces"].items()
        for story, outcome in stories.items()
        if outcome != PASSED
    ]
    assert rows == []


class Item:
    """A test with marks."""

    def __init__(self, *marks: pytest.MarkDecorator) -> None:
        self._marks = [mark.mark for mark in marks]

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [mark for mark in self._marks if mark.name == name]


def note(path: Path, *outcomes: tuple[str, bool]) -> dict[str, Any]:
    """Write the outcomes of tests of pytest's own package, and read the file."""
    run = Results(path)
    for story, passed in outcomes:
        run.note(Item(pytest.mark.shows("pytest", "chat", story)), passed)  # type: ignore[arg-type]
    run.write()
    kept: dict[str, Any] = json.loads(path.read_text())
    return kept


def test_one_failure_fails_a_story(tmp_path: Path) -> None:
    turns, restart = STORIES[0], STORIES[-1]
    path = tmp_path / "passed.json"
    kept = note(path, (turns, True), (turns, False), (turns, True), (restart, True))
    assert kept["pytest"]["interfaces"] == {"chat": {turns: FAILED, restart: PASSED}}
    assert "| **no** |" in drawn(kept)
    kept = note(path, (turns, True))
    assert kept["pytest"]["interfaces"] == {"chat": {turns: PASSED, restart: PASSED}}


def test_another_version_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "passed.json"
    path.write_text(json.dumps({"pytest": {"version": "0", "interfaces": {"chat": {STORIES[1]: PASSED}}}}))
    kept = note(path, (STORIES[0], True))
    assert kept["pytest"]["version"] == pytest.__version__
    assert kept["pytest"]["interfaces"] == {"chat": {STORIES[0]: PASSED}}
