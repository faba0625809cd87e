"""Documents match the code: state diagrams are generated from its tables, and links have a target."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path

import pytest

from holdfast.core.session import LIFE_TABLE, PLACE_TABLE
from holdfast.core.turn import TURN_TABLE

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- tables:begin -->", "<!-- tables:end -->"
LINK = re.compile(r"\]\((?!https?:)([^)]+)\)")
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), ROOT / "tests" / "README.md"])
SOURCE = re.compile(r"(?<![\w/.])((?:[a-z_]+/)+[a-z_0-9]+\.py)\b")
MODULE = re.compile(r"\bpython3? -m ((?:holdfast|tests)[\w.]*)")
SOURCE_ROOTS = ("", "src", "src/holdfast", "src/holdfast/models", "tests")
TURN_LINES_MAX = 50


def draw(title: str, table: dict[tuple[Enum, str], Enum]) -> str:
    """A state table as a Mermaid diagram."""
    lines = [f"{title}:", "", "```mermaid", "stateDiagram-v2"]
    lines += [f"    {before.name} --> {after.name}: {event}" for (before, event), after in table.items()]
    return "\n".join([*lines, "```"])


def drawn() -> str:
    parts = (
        ("What a session is doing", LIFE_TABLE),
        ("Where its memory is", PLACE_TABLE),
        ("A turn", TURN_TABLE),
    )
    return "\n\n".join(draw(title, table) for title, table in parts)  # type: ignore[arg-type]


def test_the_state_diagrams_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    shown = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == drawn(), "paste this between the marks:\n" + drawn()


def test_the_way_of_one_turn_stays_short() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("\n## One turn, end to end\n")[2].partition("\n## ")[0]
    assert 0 < len(section.splitlines()) <= TURN_LINES_MAX


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings: lower case, punctuation removed, hyphens for spaces."""
    headings = HEADING.findall(CODE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def has_target(page: Path, text: str, link: str) -> bool:
    """Whether the file of a link exists, and has the heading that its anchor names."""
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists():
        return False
    return not anchor or anchor in anchors(text if target == page else target.read_text())


def broken_links(page: Path, text: str) -> list[str]:
    """Links of a page to a file or heading that does not exist."""
    return [link for link in LINK.findall(CODE.sub("", text)) if not has_target(page, text, link)]


def test_broken_links_are_found() -> None:
    links = "[a](#a-page-here) [b](#no-heading) [c](nowhere.md) [d](api.md#no)"
    text = f"# A page, here\n```\n# no heading\n```\n{links}"
    assert broken_links(ROOT / "docs" / "page.md", text) == ["#no-heading", "nowhere.md", "api.md#no"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_a_target(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_source_files_and_modules_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    files = [
        name
        for name in SOURCE.findall(text)
        if not any((ROOT / root / name).is_file() for root in SOURCE_ROOTS)
    ]
    assert not files, f"{page.name} names files that do not exist: {files}"
    modules = [name for name in MODULE.findall(text) if not is_runnable(name)]
    assert not modules, f"{page.name} runs modules that do not exist: {modules}"


def is_runnable(module: str) -> bool:
    """Whether `python -m` finds a module of the package or of the tests."""
    place = ROOT / ("src" if module.startswith("holdfast") else "") / module.replace(".", "/")
    return place.with_suffix(".py").is_file() or (place / "__main__.py").is_file()


def test_missing_files_and_modules_are_noticed() -> None:
    assert SOURCE.findall("see `core/nowhere.py` and core/hold.py.") == ["core/nowhere.py", "core/hold.py"]
    assert MODULE.findall("run `python -m holdfast.bench.gpu --x`, python3 -m tests.gpu") == [
        "holdfast.bench.gpu",
        "tests.gpu",
    ]
    assert is_runnable("holdfast.bench.gpu") and not is_runnable("holdfast.bench.nowhere")
