"""The storage of sequences: one tensor per component, with a view per layer.

Storage is unit-major, so that a unit is one contiguous run of bytes, and copying or spilling it is one
transfer. A layer gets a strided view of all units. `Memory` only allocates; ownership is the core's, and
units are never cleared. Built by the engine, read and written by the layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast import kernels
from holdfast.kernels import KvCache, ScaledCache
from holdfast.models.layout import MemoryShape, PageShape, StateShape
from holdfast.models.resting import Places, RestingStates

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class UnitCounts:
    """How many pages and slots to allocate; zero for a component that the model does not have.

    `running` are slots of states in full precision, where states rest in eight bits.
    """

    full: int = 0
    window: int = 0
    state: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True)
class MemoryTypes:
    """The types of stored numbers: `plain` for convolution states, `kv` for keys and values.

    In float8_e4m3fn each token and head of keys and of values has a scale beside its page. With `rested`
    states are in eight bits while no turn computes with them.
    """

    plain: torch.dtype
    kv: torch.dtype
    rested: bool = False

    @classmethod
    def of(cls, dtype: torch.dtype) -> MemoryTypes:
        """The types of a model's own dtype."""
        return cls(dtype, dtype)

    @property
    def scaled(self) -> bool:
        """Whether keys and values have scales."""
        return self.kv == FP8

    def page_bytes(self, shape: PageShape, page_size: int) -> int:
        """Bytes of a page, scales included."""
        return shape.bytes_per_page(page_size, self.kv.itemsize, 1 if self.scaled else 0)

    def slot_bytes(self, shape: StateShape) -> int:
        """Bytes of a state slot, as the core counts it: at rest."""
        each = self.plain.itemsize
        return shape.bytes_per_rested_slot(each) if self.rested else shape.bytes_per_slot(each)

    def __str__(self) -> str:
        """What differs from the plain types, in the words of options; nothing where all is plain."""
        parts = []
        if self.kv != self.plain:
            parts.append(f"kv {'fp8_e4m3' if self.scaled else str(self.kv).removeprefix('torch.')}")
        if self.rested:
            parts.append("idle states int8")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class KvViews:
    """One layer's part of every page of a component."""

    key: KvCache
    value: KvCache


@dataclass(frozen=True, slots=True)
class StateViews:
    """One layer's part of every state slot."""

    convolution: Tensor
    """[slots, channels, kernel - 1] in the model's dtype."""
    recurrent: Tensor
    """[slots, heads, head_dim, state_dim] float32."""


class Memory:
    """All KV pages and state slots of one model on one device.

    full, window  [units, layers, 2, page_size, kv_heads, head_dim]; the bits of fp8 as uint8
    scales        [units, layers, 2, kv_heads, page_size] uint8, of each of them in fp8
    convolution   [slots, layers, channels, kernel - 1]
    recurrent     [slots, layers, heads, head_dim, state_dim] float32

    Where states rest in eight bits, these two have running slots, and the core's slots are in `rested`:
    convolutions as above, int8 codes of the recurrent part, and a float32 scale for each of its rows.
    """

    __slots__ = (
        "_tell",
        "convolution",
        "full",
        "full_layers",
        "full_scales",
        "page_size",
        "recurrent",
        "rested",
        "resting",
        "state_layers",
        "types",
        "window",
        "window_layers",
        "window_scales",
    )

    def __init__(
        self, shape: MemoryShape, counts: UnitCounts, page_size: int, types: MemoryTypes, device: torch.device
    ) -> None:
        assert page_size >= 1
        self.page_size = page_size
        self.types = types
        self.convolution: Tensor | None = None
        self.recurrent: Tensor | None = None

        def zeros(*sizes: int, kind: torch.dtype = types.plain) -> Tensor:
            return _zeros(sizes, kind, device)

        def pages(kv: PageShape | None, units: int) -> tuple[Tensor | None, Tensor | None]:
            if kv is None:
                return None, None
            kind = torch.uint8 if types.scaled else types.kv
            numbers = zeros(units, kv.layers, 2, page_size, kv.kv_heads, kv.head_dim, kind=kind)
            if not types.scaled:
                return numbers, None
            return numbers, zeros(units, kv.layers, 2, kv.kv_heads, page_size, kind=torch.uint8)

        self.full, self.full_scales = pages(shape.full, counts.full)
        self.window, self.window_scales = pages(shape.window, counts.window)
        self.rested: tuple[Tensor, ...] = ()
        self._tell: Callable[[bool, Places], None] | None = None
        self.resting: RestingStates | None = None
        if shape.state is not None:
            state, running = shape.state, counts.running if types.rested else counts.state
            convolution = (state.layers, state.convolution_channels, state.convolution_width)
            recurrent = (state.layers, state.heads, state.head_dim, state.state_dim)
            self.convolution = zeros(running, *convolution)
            self.recurrent = zeros(running, *recurrent, kind=torch.float32)
            if types.rested:
                self.rested = (
                    zeros(counts.state, *convolution),
                    zeros(counts.state, *recurrent, kind=torch.int8),
                    zeros(counts.state, *recurrent[:-1], kind=torch.float32),
                )
                # The last running slot is for padding.
                self.resting = RestingStates(max(0, running - 1), self.put_to_rest, self.wake)
        self.full_layers = _kv_views(self.full, self.full_scales)
        self.window_layers = _kv_views(self.window, self.window_scales)
        self.state_layers = tuple(
            StateViews(convolution, recurrent)
            for convolution, recurrent in zip(
                _layer_views(self.convolution), _layer_views(self.recurrent), strict=True
            )
        )

    def storage(self, component: str) -> tuple[Tensor, ...]:
        """The tensors whose first dimension is the units of a component."""
        tensors = {
            "full": (self.full, self.full_scales),
            "window": (self.window, self.window_scales),
            "state": self.rested if self.types.rested else (self.convolution, self.recurrent),
        }[component]
        return tuple(tensor for tensor in tensors if tensor is not None)

    def settle(self, component: str, units: Sequence[int]) -> None:
        """Let the storage of these units hold what they hold, before somebody reads it."""
        if component == "state" and self.resting is not None:
            self.resting.settle(units)

    def overwritten(self, component: str, units: Sequence[int]) -> None:
        """The storage of these units is written by others than steps."""
        if component == "state" and self.resting is not None:
            self.resting.forget(units)

    def follow(self, tell: Callable[[bool, Places], None]) -> None:
        """Call `tell` before states wake (True) or are put to rest, for other ranks."""
        self._tell = tell

    def put_to_rest(self, states: Places) -> None:
        """Copy states from running slots to where they rest."""
        if self._tell is not None:
            self._tell(False, states)
        slots, places = self._indices(states)
        convolutions, codes, scales = self.rested
        assert self.convolution is not None and self.recurrent is not None
        kernels.move_units(self.convolution, slots, convolutions, places)
        kernels.rest_states(self.recurrent, slots, codes, scales, places)

    def wake(self, states: Places) -> None:
        """Copy states from where they rest to running slots."""
        if self._tell is not None:
            self._tell(True, states)
        places, slots = self._indices(states)
        convolutions, codes, scales = self.rested
        assert self.convolution is not None and self.recurrent is not None
        kernels.move_units(convolutions, places, self.convolution, slots)
        kernels.wake_states(codes, scales, places, self.recurrent, slots)

    def _indices(self, pairs: Places) -> tuple[Tensor, Tensor]:
        indices = torch.tensor(pairs, dtype=torch.int64).T.contiguous()
        first, second = indices.to(self.rested[0].device, non_blocking=True)
        return first, second


def _zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU their memory is allocated lazily, on first write."""
    if device.type != "cpu" or not math.prod(sizes):
        return torch.zeros(sizes, dtype=dtype, device=device)
    lazy = np.zeros(math.prod(sizes) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(lazy).view(dtype).view(sizes)


def _kv_views(numbers: Tensor | None, scales: Tensor | None) -> tuple[KvViews, ...]:
    if scales is None:
        return tuple(KvViews(kv[:, 0], kv[:, 1]) for kv in _layer_views(numbers))
    return tuple(
        KvViews(ScaledCache(kv[:, 0], scale[:, 0]), ScaledCache(kv[:, 1], scale[:, 1]))
        for kv, scale in zip(_layer_views(numbers), _layer_views(scales), strict=True)
    )


def _layer_views(storage: Tensor | None) -> tuple[Tensor, ...]:
    if storage is None:
        return ()
    return tuple(storage[:, layer] for layer in range(storage.shape[1]))
