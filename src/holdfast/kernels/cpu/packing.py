"""Weights in the forms of the C kernels.

`pack` rearranges the codes of a `QuantisedWeight`; scales and minima that are not in bytes become half
precision, the rest is exact. `pack_numbers` rearranges a weight that is not quantised, in its own type.
`eight_bit` quantises what has no form of its own. Called by `models` where the C kernels are available.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.kernels.cpu.library import library
from holdfast.kernels.cpu.matrix import GROUP, PANEL, PackedMatrix, PackedPart
from holdfast.kernels.cpu.structures import Form, UnpackedStructure
from holdfast.kernels.quantised import Codes, QuantisedWeight, joined
from holdfast.kernels.torch.quantised import group_factors, halves, values

_HALF_MOST = 65504.0
"""The largest number in half precision."""

_PLAIN = {
    (Codes.INT4, False): Form.Q4_0,
    (Codes.INT4, True): Form.Q4_1,
    (Codes.INT5, False): Form.Q5_0,
    (Codes.INT5, True): Form.Q5_1,
    (Codes.INT8, False): Form.Q8_0,
    (Codes.E2M1, False): Form.E2M1,
    (Codes.IQ4, False): Form.IQ4_NL,
}
"""The forms with a scale for 32 inputs, without and with minima."""

_NUMBERS = {torch.bfloat16: Form.BF16, torch.float16: Form.F16, torch.float32: Form.F32}
"""The forms of weights that are not quantised."""

_SUPER = {
    (Codes.INT2, 16, True): Form.Q2_K,
    (Codes.INT3, 16, False): Form.Q3_K,
    (Codes.INT4, 32, True): Form.Q4_K,
    (Codes.INT5, 32, True): Form.Q5_K,
    (Codes.INT6, 16, False): Form.Q6_K,
    (Codes.IQ4, 32, False): Form.IQ4_XS,
}
"""The forms with super-blocks: kind, group, minima."""


def pack(weight: QuantisedWeight) -> PackedPart | None:
    """The weight for the C kernels, columns in the order of the codes; None where they have no such form."""
    if weight.inputs % GROUP:
        return None
    codes = halves(weight.codes) if weight.kind.in_a_byte == 2 else weight.codes.contiguous()
    if weight.super_scales is None:
        return _pack_plain(weight, codes)
    form = _SUPER.get((weight.kind, weight.group, weight.minima is not None))
    if form is None or weight.factors is not None:
        return None
    minima = None if weight.super_minima is None else weight.super_minima.float()
    return _packed(form, codes, weight.super_scales.float(), minima, weight.scales, weight.minima)


def _pack_plain(weight: QuantisedWeight, codes: Tensor) -> PackedPart | None:
    form = _PLAIN.get((weight.kind, weight.minima is not None or weight.zeros is not None))
    if form is None or weight.group % GROUP:
        return None
    scale, minimum = group_factors(weight)
    if weight.zeros is not None:
        minimum = -weight.zeros.float() * scale
    if weight.factors is not None:
        scale = scale * weight.factors[:, None]
        minimum = None if minimum is None else minimum * weight.factors[:, None]
    # What a file has in half precision stays as it is, infinities of damaged files too.
    stored = weight.scales.dtype == torch.float16 and weight.zeros is None and weight.factors is None
    if not stored and not _in_half_precision(scale, minimum):
        return None
    if weight.kind is Codes.E2M1:
        scale = 0.5 * scale  # the kernels' table has twice the values
    if weight.kind is Codes.INT8:
        codes = codes.view(torch.uint8) ^ 0x80
    repeats = weight.group // GROUP
    minimum = None if minimum is None else minimum.repeat_interleave(repeats, dim=1)
    return _packed(form, codes, scale.repeat_interleave(repeats, dim=1), minimum, None, None)


def pack_numbers(weight: Tensor) -> PackedPart:
    """A weight [outputs, inputs] that is not quantised, as it is; of other types in float32."""
    form = _NUMBERS.get(weight.dtype)
    return _packed(form or Form.F32, weight if form else weight.float(), None, None, None, None)


def _in_half_precision(*factors: Tensor | None) -> bool:
    """Whether numbers are within the range of half precision."""
    return all(each is None or float(each.abs().max()) < _HALF_MOST for each in factors)


def _packed(
    form: Form,
    codes: Tensor,
    scales: Tensor | None,
    minima: Tensor | None,
    group_scales: Tensor | None,
    group_minima: Tensor | None,
) -> PackedPart:
    loaded = library()
    assert loaded is not None, "the C kernels are not available"
    outputs, inputs = codes.shape
    given = [
        None if tensor is None else tensor.contiguous()
        for tensor in (codes, scales, minima, group_scales, group_minima)
    ]
    blocks = _aligned(loaded.hf_packed_bytes(form.value, outputs, inputs))
    addresses = (None if tensor is None else tensor.data_ptr() for tensor in given)
    loaded.hf_pack(
        ctypes.byref(UnpackedStructure(*addresses, outputs, inputs, form.value, 0)), blocks.data_ptr()
    )
    return PackedPart(form, blocks, outputs, inputs)


def eight_bit(weight: Tensor) -> QuantisedWeight:
    """A weight quantised to 8 bits in groups of 32; exact for weights that came in such groups."""
    grouped = weight.float().unflatten(1, (-1, GROUP))
    scale = (grouped.abs().amax(dim=-1) / 127.0).to(torch.float16)
    wide = scale.float()
    inverse = torch.where(wide > 0, wide, 1.0).reciprocal()
    codes = (grouped * inverse.unsqueeze(-1)).round_().clamp_(-127, 127).flatten(1).to(torch.int8)
    return QuantisedWeight(Codes.INT8, codes, scale, GROUP)


def pack_matrix(
    weights: Sequence[QuantisedWeight | Tensor], order: Tensor | None = None, bias: Tensor | None = None
) -> PackedMatrix:
    """Weights that follow each other as one matrix, outputs reordered by `order`; tensors are not quantised.

    They keep their forms, unless the order mixes different ones or one ends within 16 outputs: then all are
    quantised to 8 bits, or held in a type that has the values of all where one is not quantised.
    """
    merged = [weights[0]]
    for weight in weights[1:]:
        both = _as_one(merged[-1], weight)
        merged[-1:] = [merged[-1], weight] if both is None else [both]
    parts: list[PackedPart | None] = [None]
    if len(merged) == 1:
        merged = [merged[0] if order is None else _reordered(merged[0], order)]
        parts = [_pack_either(merged[0])]
    elif order is None and all(_outputs(weight) % PANEL == 0 for weight in merged[:-1]):
        parts = [_pack_either(weight) for weight in merged]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        dense = _dense(merged)
        if order is not None and len(merged) > 1:
            dense = dense[order]
        quantised = all(isinstance(weight, QuantisedWeight) for weight in merged)
        only = _pack_either(eight_bit(dense) if quantised else dense)
        assert only is not None, "8 bits fit every weight of the kernels' groups"
        found = [only]
    return PackedMatrix(found, bias)


def _pack_either(weight: QuantisedWeight | Tensor) -> PackedPart | None:
    return pack_numbers(weight) if isinstance(weight, Tensor) else pack(weight)


def _as_one(
    first: QuantisedWeight | Tensor, second: QuantisedWeight | Tensor
) -> QuantisedWeight | Tensor | None:
    """Two weights of one form as one; None where their forms differ."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.cat((first, second)) if first.dtype == second.dtype else None
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return None
    return joined([first, second])


def _reordered(weight: QuantisedWeight | Tensor, order: Tensor) -> QuantisedWeight | Tensor:
    return weight[order] if isinstance(weight, Tensor) else weight.rows(order)


def _outputs(weight: QuantisedWeight | Tensor) -> int:
    return weight.shape[0] if isinstance(weight, Tensor) else weight.outputs


def _dense(weights: Sequence[QuantisedWeight | Tensor]) -> Tensor:
    """All values, in a type that has those of each."""
    return torch.cat([weight if isinstance(weight, Tensor) else values(weight) for weight in weights])


def _aligned(size: int) -> Tensor:
    """Uninitialised bytes aligned to 64, so that a block's codes never straddle cache lines."""
    whole = torch.empty(size + 64, dtype=torch.uint8)
    shift = -whole.data_ptr() % 64
    return whole[shift : shift + size]
