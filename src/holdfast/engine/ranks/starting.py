"""Whether a model can be divided over ranks, and which device each rank has."""

from __future__ import annotations

import torch

from holdfast.engine.options import EngineOptions, OptionError
from holdfast.engine.ranks.crew import Crew
from holdfast.models.checkpoint import Checkpoint, unit_of
from holdfast.models.ranks import Ranks
from holdfast.models.sharding import Indivisible, local_config

__all__ = ["start_ranks"]

OPTION = "tensor_parallel"


def start_ranks(
    path: str, checkpoint: Checkpoint, options: EngineOptions, device: torch.device
) -> Crew | None:
    """Start the other ranks of a model, or reject what it cannot be divided into; None for a single rank."""
    size = options.tensor_parallel
    if size == 1:
        return None
    try:
        for rank in range(size):
            local_config(checkpoint.config, Ranks(rank, size), unit_of(checkpoint))
    except Indivisible as error:
        raise OptionError(OPTION, f"{size} cannot be used with this model: {error}") from error
    return Crew.start(path, options, _devices(device, size))


def _devices(device: torch.device, size: int) -> list[torch.device]:
    """The device of each rank. CPU ranks share the cores."""
    if device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
        return [device] * size
    found = torch.cuda.device_count()
    if size > found:
        raise OptionError(OPTION, f"{size} needs as many GPUs: torch finds {found} here")
    return [torch.device("cuda", rank) for rank in range(size)]
