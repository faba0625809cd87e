"""Every row of the failure catalogue that the core answers for has a story here, named after it."""

import re
from pathlib import Path

ROWS = (
    [f"A{row}" for row in range(1, 6)]
    + ["B1", "B4", "B5", "B6", "B7", "B9", "B10", "B11", "B12", "B13", "B14", "B18"]
    + [f"C{row}" for row in range(1, 10)]
)


def test_every_row_has_its_story() -> None:
    stories = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("test_[abc].py")))
    told = set(re.findall(r"^def test_([ABC]\d+)_", stories, re.MULTILINE))
    assert told == set(ROWS)
