"""Fixtures of the kernel tests: Triton's interpreter, and one thread for small tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.interpreter import INTERPRETED


@pytest.fixture
def interpreter() -> None:
    """What a test needs that runs Triton kernels on CPU tensors."""
    if not INTERPRETED:
        pytest.skip("Triton compiles for the device here; python3 -m tests.gpu checks its kernels")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
