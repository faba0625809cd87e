"""The examples of the documents run as they stand, one after the other."""

import re
from pathlib import Path

import pytest

from holdfast.engine.pull import PullError, pull

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["docs/sessions.md"])
def test_examples_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        pull("smollm2")
    except PullError as error:
        pytest.skip(str(error))
    examples = EXAMPLE.findall((ROOT / page).read_text())
    assert examples, f"{page} has no example"
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, page, "exec"), names)
    assert capsys.readouterr().out.strip(), "the examples say nothing"
