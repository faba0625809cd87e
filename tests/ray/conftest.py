"""Tests that start a Ray cluster are skipped where Ray is not installed: `make cluster-test` installs it."""

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder without Ray."""
    if find_spec("ray") is not None:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="Ray is not installed: make cluster-test"))
