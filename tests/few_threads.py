"""One thread for torch: a fixture that folders of tests with small models share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def few_threads() -> Iterator[None]:
    """Small products are faster on one thread, and other tests need the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
