"""Loading a model as options say: its kernels, its placement and its packing.

Used by `startup` and, for the parts of other ranks, by `ranks.follower`.
"""

from __future__ import annotations

import torch

from holdfast.engine.options import EngineOptions
from holdfast.engine.start.pull import cache_directory
from holdfast.kernels import KernelSettings, configure
from holdfast.models.checkpoint import Checkpoint, choose_placement, load_model
from holdfast.models.model import Model
from holdfast.models.ranks import Group
from holdfast.models.weights import Progress

__all__ = ["configure_kernels", "load_weights"]


def configure_kernels(options: EngineOptions) -> None:
    """Switch our C and CUDA kernels; before any of them is used."""
    cache = cache_directory(options.cache)
    configure(KernelSettings(options.cpu_kernels, options.cuda_kernels, options.c_compiler, cache))


def load_weights(
    checkpoint: Checkpoint,
    options: EngineOptions,
    device: torch.device,
    progress: Progress | None = None,
    group: Group | None = None,
) -> Model:
    """Load a model; with a `group`, this rank's part of it."""
    return load_model(
        checkpoint,
        choose_placement(checkpoint, device, options.dtype),
        load_format=options.load_format,
        context_length=options.context_length,
        pack_weights=False if options.fast_start and options.pack_weights is None else options.pack_weights,
        progress=progress,
        group=group,
    )
