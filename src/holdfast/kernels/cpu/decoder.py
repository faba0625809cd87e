"""A decoder's whole forward pass as one call of the C kernels.

`DecoderPass` owns the structures that the call reads and the tensors that they point into. `models.fused`
decides which models it supports.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.kernels.batch import Batch, Pages
from holdfast.kernels.cpu.attention import pages_structure
from holdfast.kernels.cpu.library import library
from holdfast.kernels.cpu.matrix import PackedMatrix
from holdfast.kernels.cpu.structures import DecoderStructure, LayerStructure


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights; the head norms are None where a family has none."""

    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: PackedMatrix
    output: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix

    def structure(self) -> LayerStructure:
        norms = (self.attention_norm, self.mlp_norm, self.query_norm, self.key_norm)
        assert all(norm is None or (norm.dtype == torch.float32 and norm.is_contiguous()) for norm in norms)
        return LayerStructure(
            *(None if norm is None else norm.data_ptr() for norm in norms),
            self.qkv.structure,
            self.output.structure,
            self.gate_up.structure,
            self.down.structure,
        )


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """What all layers share. `window` is None for full attention."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    epsilon: float
    scale: float
    residual_multiplier: float


class DecoderPass:
    """All layers of a model, then its final norm."""

    __slots__ = ("_keep", "_layers", "_library", "_structure")

    def __init__(
        self, layers: Sequence[DecoderLayer], norm: Tensor, cos_sin: Tensor, sizes: DecoderSizes
    ) -> None:
        loaded = library()
        assert loaded is not None, "the C kernels are not available"
        assert cos_sin.dtype == torch.float32 and cos_sin.is_contiguous()
        self._library = loaded
        self._keep = (tuple(layers), norm, cos_sin)
        self._layers = (LayerStructure * len(layers))(*(layer.structure() for layer in layers))
        self._structure = DecoderStructure(
            ctypes.addressof(self._layers),
            norm.data_ptr(),
            cos_sin.data_ptr(),
            len(layers),
            sizes.width,
            sizes.inner,
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            cos_sin.shape[1],
            sizes.window or 0,
            sizes.epsilon,
            sizes.scale,
            sizes.residual_multiplier,
            0,
        )

    def __call__(self, x: Tensor, batch: Batch, pages: Pages, storage: Tensor) -> Tensor:
        """The normed hidden states of x [tokens, width], which is overwritten.

        `storage` [units, layers, 2, page_size, kv_heads, head_dim] is a component of the memory.
        """
        assert x.is_contiguous() and x.shape[0] == batch.positions.shape[0] == pages.slots.shape[0]
        first = storage[:, 0]
        structure = pages_structure(batch, pages, first[:, 0], first[:, 1], storage.stride(1))
        hidden = torch.empty_like(x)
        failed = self._library.hf_decode(
            ctypes.byref(self._structure), ctypes.byref(structure), x.data_ptr(), hidden.data_ptr()
        )
        if failed:
            raise MemoryError(f"no memory for a step of {x.shape[0]} tokens")
        return hidden
