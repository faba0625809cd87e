"""The storage of sequences: one tensor per component, with a view per layer.

Storage is unit-major, so that a unit is one contiguous run of bytes, and copying or spilling it is one
transfer. A layer gets a strided view of all units. `Memory` only allocates; ownership is the core's, and
units are never cleared. Built by the engine, read and written by the layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.models.layout import MemoryShape


@dataclass(frozen=True, slots=True)
class UnitCounts:
    """How many pages and slots to allocate; zero for a component that the model does not have."""

    full: int = 0
    window: int = 0
    state: int = 0


@dataclass(frozen=True, slots=True)
class KvViews:
    """One layer's part of every page of a component, each [units, page_size, kv_heads, head_dim]."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class StateViews:
    """One layer's part of every state slot."""

    convolution: Tensor
    """[slots, channels, kernel - 1] in the model's dtype."""
    recurrent: Tensor
    """[slots, heads, head_dim, state_dim] float32."""


class Memory:
    """All KV pages and state slots of one model on one device.

    full, window  [units, layers, 2, page_size, kv_heads, head_dim]
    convolution   [slots, layers, channels, kernel - 1]
    recurrent     [slots, layers, heads, head_dim, state_dim] float32
    """

    __slots__ = (
        "convolution",
        "full",
        "full_layers",
        "page_size",
        "recurrent",
        "state_layers",
        "window",
        "window_layers",
    )

    def __init__(
        self, shape: MemoryShape, counts: UnitCounts, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert page_size >= 1
        self.page_size = page_size
        self.full: Tensor | None = None
        self.window: Tensor | None = None
        self.convolution: Tensor | None = None
        self.recurrent: Tensor | None = None

        def zeros(*sizes: int, kind: torch.dtype = dtype) -> Tensor:
            return _zeros(sizes, kind, device)

        if shape.full is not None:
            kv = shape.full
            self.full = zeros(counts.full, kv.layers, 2, page_size, kv.kv_heads, kv.head_dim)
        if shape.window is not None:
            kv = shape.window
            self.window = zeros(counts.window, kv.layers, 2, page_size, kv.kv_heads, kv.head_dim)
        if shape.state is not None:
            state = shape.state
            self.convolution = zeros(
                counts.state, state.layers, state.convolution_channels, state.convolution_width
            )
            self.recurrent = zeros(
                counts.state, state.layers, state.heads, state.head_dim, state.state_dim, kind=torch.float32
            )
        self.full_layers = tuple(KvViews(kv[:, 0], kv[:, 1]) for kv in _layer_views(self.full))
        self.window_layers = tuple(KvViews(kv[:, 0], kv[:, 1]) for kv in _layer_views(self.window))
        self.state_layers = tuple(
            StateViews(convolution, recurrent)
            for convolution, recurrent in zip(
                _layer_views(self.convolution), _layer_views(self.recurrent), strict=True
            )
        )

    def storage(self, component: str) -> tuple[Tensor, ...]:
        """The tensors whose first dimension is the units of a component."""
        tensors = {
            "full": (self.full,),
            "window": (self.window,),
            "state": (self.convolution, self.recurrent),
        }[component]
        return tuple(tensor for tensor in tensors if tensor is not None)


def _zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU their memory is allocated lazily, on first write."""
    if device.type != "cpu":
        return torch.zeros(sizes, dtype=dtype, device=device)
    lazy = np.zeros(math.prod(sizes) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(lazy).view(dtype).view(sizes)


def _layer_views(storage: Tensor | None) -> tuple[Tensor, ...]:
    if storage is None:
        return ()
    return tuple(storage[:, layer] for layer in range(storage.shape[1]))
