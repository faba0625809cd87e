"""Chooses the implementation: Triton for tensors on a CUDA device, plain torch for all others.

`implementation` is for `holdfast.kernels` alone. Triton is imported with the first CUDA tensor, so a machine
without a GPU needs no Triton. `configure` applies the engine's kernel settings.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch

from holdfast.kernels import settings
from holdfast.kernels.cpu.library import library
from holdfast.kernels.cuda.attention import queue_kernel
from holdfast.kernels.cuda.driver import machine_of
from holdfast.kernels.cuda.scaled_attention import scaled_queue_kernel


@cache
def _load(package: str) -> ModuleType:
    return importlib.import_module(f"holdfast.kernels.{package}")


def implementation(tensor: torch.Tensor) -> ModuleType:
    """The package whose functions run on a tensor."""
    return _load("triton" if tensor.is_cuda else "torch")


def configure(chosen: settings.KernelSettings) -> None:
    """Apply settings; availability that was decided under other settings is decided anew."""
    if chosen == settings.chosen():
        return
    settings.choose(chosen)
    for decided in (library, machine_of, queue_kernel, scaled_queue_kernel):
        decided.cache_clear()
