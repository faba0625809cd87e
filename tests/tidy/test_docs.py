"""The documents say what the code says: tables of states are drawn from the code, links lead somewhere."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path

import pytest

from holdfast.core.session import LIFE_TABLE, PLACE_TABLE
from holdfast.core.turn import TURN_TABLE

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- tables:begin -->", "<!-- tables:end -->"
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def draw(title: str, table: dict[tuple[Enum, str], Enum]) -> str:
    """A table of states as a diagram in text."""
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


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("docs/**/*.md")) + sorted(ROOT.glob("*.md")), ids=lambda p: p.name
)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to what is not there: {missing}"
