"""Few threads, and the processes of ranks as forks."""

from collections.abc import Iterator

import pytest
import torch

from tests.ranks.forked import forked_ranks, recording_ranks

__all__ = ["few_threads", "forked_ranks", "recording_ranks"]


@pytest.fixture(autouse=True, scope="session")
def few_threads() -> Iterator[None]:
    """Small products are faster on one thread, and other tests need the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
