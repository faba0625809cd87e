"""Linear projections and experts with quantised weights, in the form that the device multiplies.

On a GPU the codes stay as they are, on Hopper in the order of its kernels. On a CPU with C kernels they are
packed for those: 4-bit integers in groups of 32 or a multiple, int8 and MXFP4 with the codes as stored and
the scales in half precision; NVFP4, whose groups are smaller, and fp8 in 8-bit groups of 32. Elsewhere the
weight is dequantised piece by piece in every product. Built by `weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holdfast import kernels
from holdfast.kernels.cpu.matrix import GROUP, PackedMatrix, available
from holdfast.kernels.cpu.packing import eight_bit, pack
from holdfast.kernels.quantised import Codes, QuantisedWeight
from holdfast.kernels.torch.quantised import dequantise, values
from holdfast.models.linear import Linear, PackedLinear

if TYPE_CHECKING:
    from holdfast.models.weights import Placement


class QuantisedLinear:
    """A projection whose weight keeps the codes of its checkpoint.

    With `gated` the outputs are both halves of a gated activation, which some kernels apply too.
    """

    __slots__ = ("_bias", "out_features", "weight")

    def __init__(
        self, weight: QuantisedWeight, bias: Tensor | None, placement: Placement, *, gated: bool = False
    ) -> None:
        self.out_features = weight.outputs
        self._bias = bias
        self.weight: QuantisedWeight | kernels.PackedCodes = weight.to(placement.device)
        if placement.dtype == torch.bfloat16:
            self.weight = kernels.pack_codes(self.weight, gated=gated) or self.weight

    @property
    def bytes(self) -> int:
        return self.weight.bytes

    @property
    def activates(self) -> bool:
        """Whether a gated activation has to be applied with the product."""
        return isinstance(self.weight, kernels.PackedCodes) and self.weight.gated

    def __call__(self, x: Tensor, activation: kernels.Activation | None = None) -> Tensor:
        if isinstance(self.weight, kernels.PackedCodes):
            return kernels.linear_codes(x, self.weight, self._bias, activation)
        assert activation is None
        return kernels.linear_quantised(x, self.weight, self._bias)


class PermutedLinear:
    """A projection whose inputs are permuted first (act-order)."""

    __slots__ = ("_order", "inner")

    def __init__(self, inner: Linear, order: Tensor) -> None:
        self.inner = inner
        self._order = order.long()

    @property
    def out_features(self) -> int:
        return self.inner.out_features

    @property
    def bytes(self) -> int:
        return self.inner.bytes + self._order.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x[:, self._order])


class JoinedLinear:
    """Projections of the same input whose weights have different forms, one after another."""

    __slots__ = ("_bias", "_order", "parts")

    def __init__(self, parts: Sequence[Linear], order: Tensor | None, bias: Tensor | None) -> None:
        """Outputs are reordered by `order`, then `bias` is added."""
        self.parts = tuple(parts)
        self._order = order
        self._bias = bias

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.cat([part(x) for part in self.parts], dim=-1)
        if self._order is not None:
            out = out[:, self._order]
        return out if self._bias is None else out + self._bias


def linear_of(
    weight: QuantisedWeight, bias: Tensor | None, placement: Placement, *, gated: bool = False
) -> Linear:
    """A projection where the model lies."""
    matrix = packed(weight, bias) if placement.device.type == "cpu" else None
    if matrix is None:
        return QuantisedLinear(weight, bias, placement, gated=gated)
    if weight.permutation is None:
        return PackedLinear(matrix)
    return PermutedLinear(PackedLinear(matrix), weight.permutation)


def experts_of(
    weight: QuantisedWeight, device: torch.device, dtype: torch.dtype, *, keep: bool
) -> Tensor | QuantisedWeight | tuple[PackedMatrix, ...]:
    """The weights of all experts: dense unless `keep`, packed for the C kernels, or as they are."""
    count = weight.codes.shape[0]
    if not keep:
        dense = torch.empty(count, weight.outputs, weight.inputs, dtype=dtype, device=device)
        for expert in range(count):
            dense[expert] = dequantise(weight.expert(expert), dtype)
        return dense
    if device.type == "cpu" and weight.permutation is None:
        matrices = [packed(weight.expert(expert), None) for expert in range(count)]
        found = tuple(matrix for matrix in matrices if matrix is not None)
        if len(found) == count:
            return found
    return weight.to(device)


def packed(weight: QuantisedWeight, bias: Tensor | None) -> PackedMatrix | None:
    """The matrix of the C kernels, columns in the order of the codes; None where they have no such form."""
    if not available() or weight.inputs % GROUP:
        return None
    if weight.group % GROUP or weight.kind is Codes.E4M3:
        weight = eight_bit(values(weight))
    part = pack(weight)
    return None if part is None else PackedMatrix([part], bias)
