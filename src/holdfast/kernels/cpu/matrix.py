"""Matrices for the C kernels: products and row lookup.

`PackedMatrix` owns its bytes and multiplies float32 activations. With quantised weights the kernel rounds
them to 8 bits in groups of 32; with others it adds float32 products. Its parts are made by `packing`; built
by `models` where `available()`, those that are not quantised where `widens()`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.cpu.library import library
from holdfast.kernels.cpu.structures import Form, MatrixPartStructure, MatrixStructure

GROUP = 32
PANEL = 16


def available() -> bool:
    """Whether the C kernels are available on this machine."""
    return library() is not None


def widens() -> bool:
    """Whether the C kernels multiply weights that are not quantised with the processor's vectors."""
    loaded = library()
    return loaded is not None and bool(loaded.hf_widens())


class PackedPart(NamedTuple):
    """Packed outputs of one form."""

    form: Form
    blocks: Tensor
    outputs: int
    inputs: int

    @property
    def panels(self) -> int:
        return -(-self.outputs // PANEL)


class PackedMatrix:
    """A matrix [outputs, inputs] of parts that follow each other, which may have different forms."""

    __slots__ = ("_bias", "_library", "_structures", "inputs", "outputs", "parts", "structure")

    def __init__(self, parts: Sequence[PackedPart], bias: Tensor | None = None) -> None:
        """Each part but the last has a multiple of 16 outputs."""
        loaded = library()
        assert loaded is not None, "the C kernels are not available"
        assert all(part.outputs % PANEL == 0 for part in parts[:-1])
        assert len({part.inputs for part in parts}) == 1
        self.outputs, self.inputs = sum(part.outputs for part in parts), parts[0].inputs
        self.parts = tuple(parts)
        self._library = loaded
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._structures = (MatrixPartStructure * len(parts))(
            *(MatrixPartStructure(part.blocks.data_ptr(), part.form.value, part.panels) for part in parts)
        )
        self.structure = MatrixStructure(
            ctypes.addressof(self._structures),
            None if self._bias is None else self._bias.data_ptr(),
            self.outputs,
            self.inputs,
            len(parts),
            0,
        )

    @property
    def bytes(self) -> int:
        return sum(part.blocks.nbytes for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        """`x @ w.T + bias` for x [rows, inputs], in x's dtype."""
        given = x if x.dtype == torch.float32 and x.stride(-1) == 1 else x.float().contiguous()
        out = torch.empty((x.shape[0], self.outputs), dtype=torch.float32)
        failed = self._library.hf_linear(
            ctypes.byref(self.structure),
            given.data_ptr(),
            given.stride(0),
            given.shape[0],
            out.data_ptr(),
            self.outputs,
        )
        if failed:
            raise MemoryError("no memory for a product")
        return out.to(x.dtype)

    def rows(self, indices: Tensor, multiplier: float = 1.0) -> Tensor:
        """Rows of the matrix in float32, times a factor; `indices` int64 [n]."""
        indices = indices.contiguous()
        out = torch.empty((indices.shape[0], self.inputs), dtype=torch.float32)
        outside = self._library.hf_rows(
            ctypes.byref(self.structure), indices.data_ptr(), indices.shape[0], multiplier, out.data_ptr()
        )
        if outside:
            raise IndexError(f"a row is out of range: the matrix has {self.outputs}")
        return out
