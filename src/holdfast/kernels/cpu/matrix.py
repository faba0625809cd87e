"""Quantised matrices for the C kernels: packing, products, row lookup.

`PackedMatrix` owns its bytes and multiplies float32 activations, which the kernel quantises to 8 bits in
groups of 32. Built by `models.linear` where `available()`.
"""

from __future__ import annotations

import ctypes
from enum import Enum

import torch
from torch import Tensor

from holdfast.kernels.cpu.library import library
from holdfast.kernels.cpu.structures import MatrixStructure

GROUP = 32
PANEL = 16


class Table(Enum):
    """What 4-bit codes stand for, by the numbers of `holdfast_cpu.h`."""

    E2M1 = 1
    """Twice the value of a 4-bit float, plus 12."""
    IQ4 = 2
    """The values of GGUF's IQ4 formats, plus 128."""


def available() -> bool:
    """Whether the C kernels are available on this machine."""
    return library() is not None


class PackedMatrix:
    """A matrix [outputs, inputs] of 4-bit or 8-bit codes: `w = code * scale + minimum` in groups of 32.

    With `table` a 4-bit code stands for an entry of one of the kernels' tables.
    """

    __slots__ = ("_bias", "_blocks", "_library", "bits", "inputs", "outputs", "structure")

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        minimum: Tensor,
        bias: Tensor | None,
        bits: int,
        *,
        table: Table | None = None,
    ) -> None:
        """`codes` uint8 [outputs, inputs], below 2^`bits`; scale and minimum [outputs, inputs / 32]."""
        loaded = library()
        assert loaded is not None, "the C kernels are not available"
        assert codes.dtype == torch.uint8 and bits in (4, 8) and (table is None or bits == 4)
        self.outputs, self.inputs = codes.shape
        self.bits = bits
        groups, panels = self.inputs // GROUP, -(-self.outputs // PANEL)
        assert self.inputs % GROUP == 0 and scale.shape == minimum.shape == (self.outputs, groups)
        self._library = loaded
        self._blocks = _aligned(panels * groups * (PANEL * GROUP * bits // 8 + 4 * PANEL))
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        codes, scale, minimum = codes.contiguous(), scale.float().contiguous(), minimum.float().contiguous()
        loaded.hf_pack(
            self._blocks.data_ptr(),
            codes.data_ptr(),
            scale.data_ptr(),
            minimum.data_ptr(),
            self.outputs,
            self.inputs,
            bits,
        )
        self.structure = MatrixStructure(
            self._blocks.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self.outputs,
            self.inputs,
            bits,
            0 if table is None else table.value,
        )

    @property
    def bytes(self) -> int:
        return self._blocks.nbytes

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


def pack_eight_bit(weight: Tensor, bias: Tensor | None = None) -> PackedMatrix:
    """A weight quantised to 8 bits in groups of 32; exact for weights that came in such groups."""
    grouped = weight.float().unflatten(1, (-1, GROUP))
    scale = (grouped.abs().amax(dim=-1) / 127.0).to(torch.float16).float()
    inverse = torch.where(scale > 0, scale, 1.0).reciprocal()
    codes = (
        (grouped * inverse.unsqueeze(-1)).round_().clamp_(-127, 127).add_(128.0).flatten(1).to(torch.uint8)
    )
    return PackedMatrix(codes, scale, -128.0 * scale, bias, 8)


def pack_four_bit(codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None) -> PackedMatrix:
    """A weight `(code - 8) * scale + zero`, exact."""
    return PackedMatrix(codes.to(torch.uint8), scale, zero - 8.0 * scale, bias, 4)


def pack_e2m1(codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> PackedMatrix:
    """A weight of 4-bit floats, `value(code) * scale`; exact for scales that are powers of two."""
    half = 0.5 * scale
    return PackedMatrix(codes.to(torch.uint8), half, -12.0 * half, bias, 4, table=Table.E2M1)


def pack_iq4(codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> PackedMatrix:
    """A weight of GGUF's IQ4 formats, `value(code) * scale`; exact for scales in half precision."""
    return PackedMatrix(codes.to(torch.uint8), scale, -128.0 * scale, bias, 4, table=Table.IQ4)


def _aligned(size: int) -> Tensor:
    """Uninitialised bytes aligned to 64, so that a block's codes never straddle cache lines."""
    whole = torch.empty(size + 64, dtype=torch.uint8)
    shift = -whole.data_ptr() % 64
    return whole[shift : shift + size]
