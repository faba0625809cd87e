"""Which client passed which story: tests say what they show, and `make clients` writes down what they showed.

A test has the mark `shows(package, interface, *stories)`. With `--results FILE` a run writes the version of
each package and the outcome of each story there. A story of a client has passed if all tests that show it
have. `docs/clients.md` shows the file as the table that `drawn` draws.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

STORIES = (
    "two turns",
    "tool round",
    "two rounds",
    "parallel calls",
    "streamed calls",
    "structured output",
    "interruption",
    "restart",
)
HERE = Path(__file__).parent
RESULTS = HERE / "passed.json"
PACKAGES = HERE / "node" / "node_modules"
PASSED, FAILED = "passed", "failed"


def shows(package: str, interface: str, *stories: str) -> pytest.MarkDecorator:
    """The mark of a test that shows stories of a client. Packages of npm are written `npm:NAME`."""
    unknown = set(stories) - set(STORIES)
    assert stories and not unknown, f"no such story: {unknown}"
    return pytest.mark.shows(package, interface, *stories)


def installed(package: str) -> str:
    """The version of a package in this environment."""
    if not package.startswith("npm:"):
        return version(package)
    found: str = json.loads((PACKAGES / package.removeprefix("npm:") / "package.json").read_text())["version"]
    return found


class Results:
    """The outcomes of one run, by package, interface and story."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[tuple[str, str], dict[str, str]] = {}

    def note(self, item: pytest.Item, passed: bool) -> None:
        """One test has ended."""
        for mark in item.iter_markers("shows"):
            package, interface, *stories = mark.args
            row = self._rows.setdefault((package, interface), {})
            for story in stories:
                if not passed or story not in row:
                    row[story] = PASSED if passed else FAILED

    def write(self) -> None:
        """Add what this run showed to the file; another version of a package begins its rows again."""
        kept: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}
        for (package, interface), row in self._rows.items():
            found = installed(package)
            entry = kept.get(package)
            if entry is None or entry["version"] != found:
                entry = kept[package] = {"version": found, "interfaces": {}}
            shown = {**entry["interfaces"].get(interface, {}), **row}
            entry["interfaces"][interface] = {story: shown[story] for story in STORIES if story in shown}
        ordered = {
            package: {**kept[package], "interfaces": dict(sorted(kept[package]["interfaces"].items()))}
            for package in sorted(kept, key=lambda name: (name.startswith("npm:"), name))
        }
        self._path.write_text(json.dumps(ordered, indent=1) + "\n")


def drawn(results: dict[str, Any]) -> str:
    """The table of `docs/clients.md`."""
    lines = [
        "| client | interface | " + " | ".join(STORIES) + " |",
        "| --- | --- |" + " --- |" * len(STORIES),
    ]
    marks = {PASSED: "yes", FAILED: "**no**", "": ""}
    for package, entry in results.items():
        name, place = package.removeprefix("npm:"), " (npm)" if package.startswith("npm:") else ""
        for interface, row in entry["interfaces"].items():
            cells = [marks[row.get(story, "")] for story in STORIES]
            lines.append(f"| {name} {entry['version']}{place} | {interface} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
