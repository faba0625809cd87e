"""Linear projections behind one call, for every weight format.

A layer calls `linear(x)` and gets `x @ weight.T + bias` in x's dtype. `DenseLinear` keeps the weight in the
model's dtype. `PackedLinear` keeps it for the C kernels as the checkpoint has it, for every batch
size. On a machine without those, `Int4Linear` and `Int8Linear` keep quantised ones in the layout of torch's
CPU kernels, which need bfloat16 activations (float32 ones take a scalar path) and are faster for few tokens;
from `..._DENSE_FROM` tokens on a dense copy is faster, if there is one. Built by `weights`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_product

from holdfast import kernels
from holdfast.kernels.cpu.matrix import GROUP, PackedMatrix, available
from holdfast.kernels.quantised import INT4_ZERO, Codes, QuantisedWeight
from holdfast.kernels.torch.quantised import group_factors, halves

INT4_DENSE_FROM = 40
INT8_DENSE_FROM = 16
"""Token counts from which the dense product is faster than the 4-bit and the 8-bit kernel."""

REFINED = 32
"""Number of largest logits that a quantised output head recomputes exactly."""


class Linear(Protocol):
    """A projection of the last dimension."""

    @property
    def out_features(self) -> int: ...

    @property
    def bytes(self) -> int:
        """Bytes of the weights, including all copies."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """A weight matrix [out, in] and an optional bias; on some GPUs with a packed copy for few tokens.

    `gated` says that the outputs are both halves of a gated activation, which is fused into the product.
    """

    __slots__ = ("bias", "gated", "twelve", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.gated = False
        self.twelve: kernels.TwelveBits | None = None

    def pack(self) -> None:
        """Keep a packed 12-bit copy, where the device has a kernel for it."""
        self.twelve = kernels.pack_weight(self.weight, self.gated)

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def bytes(self) -> int:
        return self.weight.nbytes + (0 if self.twelve is None else self.twelve.nbytes)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The product, in `out` if given."""
        return kernels.linear(x, self.weight, self.bias, self.twelve, out)


def packed_kernels(inputs: int) -> bool:
    """Whether a quantised weight with so many inputs can be packed for the C kernels."""
    return inputs % GROUP == 0 and available()


class PackedLinear:
    """A weight in the form of the C kernels, with its bias."""

    __slots__ = ("matrix",)

    def __init__(self, matrix: PackedMatrix) -> None:
        self.matrix = matrix

    @property
    def out_features(self) -> int:
        return self.matrix.outputs

    @property
    def bytes(self) -> int:
        return self.matrix.bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.matrix(x)


class Int4Linear:
    """A 4-bit weight in groups of 32: `w = (code - 8) * scale + zero`, scale and zero in bfloat16."""

    __slots__ = ("_bias", "_dense", "_packed", "_scales", "out_features")

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None, dense: Tensor | None) -> None:
        assert weight.kind is Codes.INT4 and weight.group == GROUP
        self.out_features = weight.outputs
        codes = halves(weight.codes).to(torch.int32)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scale, minimum = group_factors(weight)
        zero = torch.zeros_like(scale) if minimum is None else minimum + INT4_ZERO * scale
        self._scales = torch.stack((scale.T, zero.T), dim=-1).to(torch.bfloat16).contiguous()
        self._bias = bias
        self._dense = dense

    @staticmethod
    def fits(weight: QuantisedWeight) -> bool:
        """Whether the kernel supports a weight."""
        four_bit = weight.kind is Codes.INT4 and weight.zeros is None and weight.factors is None
        return four_bit and weight.group == GROUP and weight.outputs % 16 == 0

    @property
    def bytes(self) -> int:
        dense = 0 if self._dense is None else self._dense.nbytes
        return int(self._packed.nbytes + self._scales.nbytes + dense)

    def __call__(self, x: Tensor) -> Tensor:
        if self._dense is not None and x.shape[0] >= INT4_DENSE_FROM:
            return dense_product(x, self._dense, self._bias)
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.to(torch.bfloat16), self._packed, GROUP, self._scales
        )
        product = product.to(x.dtype)
        return product if self._bias is None else product + self._bias

    def rows(self, outputs: Tensor) -> Tensor | None:
        """Exact weights of some outputs, where there is a dense copy."""
        return None if self._dense is None else self._dense[outputs]


class Int8Linear:
    """An 8-bit weight with one scale for each output: `w = code * scale`, scales in bfloat16."""

    __slots__ = ("_bias", "_codes", "_dense", "_scales")

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None, dense: Tensor | None) -> None:
        """`codes` [out, in] int8; `scale` [out]."""
        self._codes = codes.contiguous()
        self._scales = scale.to(torch.bfloat16)
        self._bias = bias
        self._dense = dense

    @property
    def out_features(self) -> int:
        return self._codes.shape[0]

    @property
    def bytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes + (0 if self._dense is None else self._dense.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        if self._dense is not None and x.shape[0] >= INT8_DENSE_FROM:
            return dense_product(x, self._dense, self._bias)
        product = torch._weight_int8pack_mm(x.to(torch.bfloat16), self._codes, self._scales).to(x.dtype)
        return product if self._bias is None else product + self._bias

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights of some outputs: exact with a dense copy, else dequantised."""
        if self._dense is not None:
            return self._dense[outputs]
        return self._codes[outputs].float() * self._scales[outputs].float().unsqueeze(-1)


class RefinedHead:
    """An output head that computes all logits with a quantised kernel and the largest ones again exactly.

    The kernels round to bfloat16, so the order of nearly equal logits would be arbitrary; the few that matter
    get an exact second product.
    """

    __slots__ = ("_coarse",)

    def __init__(self, coarse: Int4Linear | Int8Linear) -> None:
        self._coarse = coarse

    @property
    def out_features(self) -> int:
        return self._coarse.out_features

    @property
    def bytes(self) -> int:
        return self._coarse.bytes

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._coarse(x)
        best = logits.topk(min(REFINED, self.out_features), dim=-1).indices
        rows = self._coarse.rows(best)
        if rows is None:
            return logits
        exact = torch.matmul(rows, x.to(rows.dtype).unsqueeze(-1)).squeeze(-1)
        return logits.scatter_(1, best, exact.to(logits.dtype))


def quantise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes int8 [out, in], scale [out] in bfloat16 steps) nearest to a weight, row by row."""
    scale = (weight.abs().amax(dim=1) / 127.0).clamp(min=1e-12).to(torch.bfloat16)
    codes = (weight / scale.to(weight.dtype)[:, None]).round().clamp(-127, 127).to(torch.int8)
    return codes, scale


class Embedding:
    """Rows of the token embedding. Quantised forms share the output head's weights."""

    __slots__ = ("_multiplier", "_scales", "_table", "dtype")

    def __init__(
        self, table: Tensor | PackedMatrix, scales: Tensor | None, dtype: torch.dtype, multiplier: float
    ) -> None:
        self._table = table
        self._scales = scales
        self._multiplier = multiplier
        self.dtype = dtype

    def __call__(self, tokens: Tensor) -> Tensor:
        if isinstance(self._table, PackedMatrix):
            return self._table.rows(tokens, self._multiplier).to(self.dtype)
        # On a GPU, the embedding kernel is slow for few rows; indexing is not.
        taken = self._table[tokens] if tokens.is_cuda else torch.nn.functional.embedding(tokens, self._table)
        rows = taken.to(self.dtype)
        if self._scales is not None:
            rows = rows * self._scales[tokens].to(self.dtype)[:, None]
        return rows if self._multiplier == 1.0 else rows * self._multiplier
