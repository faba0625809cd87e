"""Copies of whole units (all layers of a page or state slot at once) and of a step's words, in torch.

Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch


def copy_units(storage: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    storage.index_copy_(0, destinations.long(), storage.index_select(0, sources.long()))


def move_units(
    source: torch.Tensor, sources: torch.Tensor, target: torch.Tensor, destinations: torch.Tensor
) -> None:
    target[destinations] = source[sources]


def carry(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)
