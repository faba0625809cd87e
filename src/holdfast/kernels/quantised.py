"""One description of a quantised weight, for every format in which checkpoints store them.

Loaders (`holdfast.models.quantised`) turn each published format into a `QuantisedWeight`; the products
(`linear_quantised`, `experts`) take nothing else. So a kernel is written for the kinds of codes,
not for the formats, and a format is one function that rearranges bytes.

A weight element is `factor[o] * (scale[o, g] * (code[o, k] - zero[o, g]) + minimum[o, g])`, where
`g = k // group` and column k of the codes multiplies input `permutation[k]`. In super-blocks of 256 inputs,
scales and minima are small integers times a number for each super-block. The bytes are those of the
checkpoint: nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor


class Codes(Enum):
    """The kinds of codes. Those of 4 bits lie two in a byte, the even input in the low half; others one.

    Integers of fewer than 8 bits are unsigned. Without zeros and minima their zero point is half their range.
    """

    INT2 = "int2"
    INT3 = "int3"
    INT4 = "int4"
    INT5 = "int5"
    INT6 = "int6"
    INT8 = "int8"
    E2M1 = "e2m1"
    """4-bit floats: a sign, two bits of exponent, one of fraction."""
    IQ4 = "iq4"
    """The 16 values of GGUF's IQ4 formats."""
    E4M3 = "e4m3"
    """8-bit floats, as bytes."""

    @property
    def bits(self) -> int:
        return _BITS.get(self, 8)

    @property
    def in_a_byte(self) -> int:
        """How many lie in a byte."""
        return 2 if self.bits == 4 else 1


_BITS = {
    Codes.INT2: 2,
    Codes.INT3: 3,
    Codes.INT4: 4,
    Codes.E2M1: 4,
    Codes.IQ4: 4,
    Codes.INT5: 5,
    Codes.INT6: 6,
}

UNSIGNED = frozenset({Codes.INT2, Codes.INT3, Codes.INT4, Codes.INT5, Codes.INT6})

INT4_ZERO = 8
"""The zero point of 4-bit integers without zeros of their own."""

SUPER_BLOCK = 256
"""Inputs of a row that share a scale of scales."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight [outputs, inputs], or [experts, outputs, inputs]: then every tensor has the experts first.

    `codes` are uint8 [outputs, inputs / 2] for 4 bits, else [outputs, inputs], int8 for INT8. `scales`
    [outputs, inputs / group] are floats of 16 or 32 bits, or uint8 exponents of two with a bias of 127
    (E8M0). `zeros` are uint8 in the shape of the scales (INT4 only), `factors` float32 [outputs],
    `permutation` int32 [inputs]. `minima` (unsigned integers only) are floats in the shape of the scales.
    With `super_scales`, float16 [outputs, inputs / 256], scales are int8; then minima are uint8 and have
    `super_minima`.
    """

    kind: Codes
    codes: Tensor
    scales: Tensor
    group: int
    zeros: Tensor | None = None
    factors: Tensor | None = None
    permutation: Tensor | None = None
    minima: Tensor | None = None
    super_scales: Tensor | None = None
    super_minima: Tensor | None = None

    def __post_init__(self) -> None:
        outputs, inputs = self.outputs, self.inputs
        lead = self.codes.shape[:-2]
        assert self.codes.dtype in (torch.uint8, torch.int8) and self.group > 0 and inputs % self.group == 0
        assert self.codes.dtype == (torch.int8 if self.kind is Codes.INT8 else torch.uint8)
        assert self.scales.shape == (*lead, outputs, inputs // self.group), "one scale for each group"
        assert self.zeros is None or (self.kind is Codes.INT4 and self.zeros.shape == self.scales.shape)
        assert self.factors is None or self.factors.shape == (*lead, outputs)
        assert self.permutation is None or self.permutation.shape == (*lead, inputs)
        assert self.minima is None or (self.kind in UNSIGNED and self.minima.shape == self.scales.shape)
        assert self.minima is None or self.zeros is None
        supers = (*lead, outputs, inputs // SUPER_BLOCK)
        if self.super_scales is not None:
            assert self.scales.dtype == torch.int8 and self.super_scales.shape == supers
        assert (self.super_minima is None) == (self.super_scales is None or self.minima is None)
        assert self.super_minima is None or self.super_minima.shape == supers

    @property
    def outputs(self) -> int:
        return self.codes.shape[-2]

    @property
    def inputs(self) -> int:
        return self.codes.shape[-1] * self.kind.in_a_byte

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def to(self, device: torch.device) -> QuantisedWeight:
        """On a device, contiguous."""
        moved = {name: tensor.to(device).contiguous() for name, tensor in self._tensors().items()}
        return replace(self, **moved)  # type: ignore[arg-type]

    def rows(self, chosen: Tensor | slice) -> QuantisedWeight:
        """Some outputs of a weight, or of all experts."""
        if isinstance(chosen, Tensor):
            chosen = chosen.to(self.codes.device)
        taken = {
            name: tensor[..., chosen] if name == "factors" else tensor[..., chosen, :]
            for name, tensor in self._tensors().items()
            if name != "permutation"
        }
        return replace(self, **taken)  # type: ignore[arg-type]

    def columns(self, runs: Sequence[tuple[int, int]]) -> QuantisedWeight | None:
        """Runs (first, end) of the inputs; None where one divides a group or super-block."""
        assert self.permutation is None
        unit = self.group if self.super_scales is None else SUPER_BLOCK
        if any(edge % unit for run in runs for edge in run):
            return None
        taken: dict[str, Tensor] = {}
        for name, tensor in self._tensors().items():
            if name != "factors":
                inputs = self.inputs // tensor.shape[-1]  # that one element stands for
                parts = [tensor[..., first // inputs : end // inputs] for first, end in runs]
                taken[name] = torch.cat(parts, dim=-1)
        return replace(self, **taken)  # type: ignore[arg-type]

    def expert(self, index: int) -> QuantisedWeight:
        """One expert's weight, a view."""
        assert self.codes.dim() == 3
        taken = {name: tensor[index] for name, tensor in self._tensors().items()}
        return replace(self, **taken)  # type: ignore[arg-type]

    def _tensors(self) -> dict[str, Tensor]:
        named = {
            "codes": self.codes,
            "scales": self.scales,
            "zeros": self.zeros,
            "factors": self.factors,
            "permutation": self.permutation,
            "minima": self.minima,
            "super_scales": self.super_scales,
            "super_minima": self.super_minima,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def joined(parts: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
    """Weights concatenated along the outputs; None where their forms or permutations differ."""
    return _combined(parts, stack=False)


def stacked(parts: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
    """The weights of several experts as one; None where their forms differ."""
    return _combined(parts, stack=True)


def _combined(parts: Sequence[QuantisedWeight], *, stack: bool) -> QuantisedWeight | None:
    first = parts[0]
    if len(parts) == 1 and not stack:
        return first
    forms = {_form(part) for part in parts}
    if len(forms) != 1 or (stack and len({part.codes.shape for part in parts}) != 1):
        return None
    permutation = first.permutation
    if permutation is not None and stack:
        permutation = torch.stack([part.permutation for part in parts if part.permutation is not None])
    elif permutation is not None and not all(
        part.permutation is not None and torch.equal(part.permutation, permutation) for part in parts
    ):
        return None
    put = torch.stack if stack else torch.cat
    zeros = factors = None
    if any(part.zeros is not None for part in parts):
        zeros = put([_zeros_of(part) for part in parts])
    if any(part.factors is not None for part in parts):
        factors = put([_factors_of(part) for part in parts])
    dtype = first.scales.dtype
    if any(part.scales.dtype != dtype for part in parts):
        dtype = torch.float32
    return QuantisedWeight(
        first.kind,
        put([part.codes for part in parts]),
        put([part.scales.to(dtype) for part in parts]),
        first.group,
        zeros,
        factors,
        permutation,
        _put(put, [part.minima for part in parts]),
        _put(put, [part.super_scales for part in parts]),
        _put(put, [part.super_minima for part in parts]),
    )


def _form(part: QuantisedWeight) -> tuple[object, ...]:
    """What has to be equal in weights that become one."""
    optional = (part.permutation, part.minima, part.super_scales)
    exponents = part.scales.dtype == torch.uint8
    return (part.kind, part.group, part.inputs, exponents, *(tensor is None for tensor in optional))


def _put(put: Callable[[list[Tensor]], Tensor], tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors as one; None where the parts, of one form, have none."""
    found = [tensor for tensor in tensors if tensor is not None]
    return put(found) if found else None


def _zeros_of(part: QuantisedWeight) -> Tensor:
    if part.zeros is not None:
        return part.zeros
    return torch.full_like(part.scales, INT4_ZERO, dtype=torch.uint8)


def _factors_of(part: QuantisedWeight) -> Tensor:
    return part.scales.new_ones(part.outputs, dtype=torch.float32) if part.factors is None else part.factors
