"""Which implementation runs: Triton for tensors on a CUDA device, plain torch for all others.

`implementation` is for `holdfast.kernels` alone. The Triton package is imported when the first CUDA tensor
arrives, so that a machine without a GPU neither needs Triton nor waits for its import.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch


@cache
def _load(package: str) -> ModuleType:
    return importlib.import_module(f"holdfast.kernels.{package}")


def implementation(tensor: torch.Tensor) -> ModuleType:
    return _load("triton" if tensor.is_cuda else "torch")
