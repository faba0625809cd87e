"""Triton's interpreter for the kernel tests, and one thread for their small tensors.

The interpreter must be asked for before Triton is imported, and then holds for the whole process. Where there
is a device it is not asked for: other tests compile for it, and `benchmarks/gpu_kernels.py` has the checks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def interpreter() -> None:
    """What a test needs that runs Triton kernels on CPU tensors."""
    if not INTERPRETED:
        pytest.skip("Triton compiles for the device here; benchmarks/gpu_kernels.py checks its kernels")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
