"""Products with quantised weights, in torch: the weight is dequantised piece by piece, then multiplied.

The reference of the other implementations, and what runs where no kernel exists. At most `PIECE` elements of
a weight are dequantised at once. Called through `holdfast.kernels`; weight loading calls `dequantise` too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from holdfast.kernels.quantised import SUPER_BLOCK, UNSIGNED, Codes, QuantisedWeight
from holdfast.kernels.torch.activation import PLAIN_EXPERTS, ExpertForm, activate

PIECE = 1 << 24
"""Most elements of a weight that are dequantised at once."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of 4-bit floats."""

IQ4 = (
    *(-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0),
    *(1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
)
"""The values of GGUF's IQ4 formats."""


def halves(codes: Tensor) -> Tensor:
    """4-bit codes one by one, uint8: the low half of a byte, then the high one."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def scale_values(scales: Tensor) -> Tensor:
    """Scales in float32; of exponents by their bits, so that exponent 0 is zero."""
    if scales.dtype == torch.uint8:
        return (scales.to(torch.int32) << 23).view(torch.float32)
    return scales.float()


def group_factors(weight: QuantisedWeight) -> tuple[Tensor, Tensor | None]:
    """(scale, minimum) of each group in float32; None without minima."""
    if weight.super_scales is None:
        return scale_values(weight.scales), None if weight.minima is None else weight.minima.float()
    repeats = SUPER_BLOCK // weight.group
    scale = weight.scales.float() * weight.super_scales.float().repeat_interleave(repeats, dim=-1)
    if weight.minima is None or weight.super_minima is None:
        return scale, None
    return scale, weight.minima.float() * weight.super_minima.float().repeat_interleave(repeats, dim=-1)


def values(weight: QuantisedWeight) -> Tensor:
    """The weight in float32, its columns in the order of the codes."""
    codes = halves(weight.codes) if weight.kind.in_a_byte == 2 else weight.codes
    match weight.kind:
        case Codes.E2M1 | Codes.IQ4:
            table = E2M1 if weight.kind is Codes.E2M1 else IQ4
            numbers = torch.tensor(table, device=codes.device)[codes.to(torch.int32)]
        case Codes.E4M3:
            numbers = codes.view(torch.float8_e4m3fn).float()
        case _:
            numbers = codes.float()
    grouped: Tensor = numbers.unflatten(-1, (-1, weight.group))
    scale, minimum = group_factors(weight)
    if weight.zeros is not None:
        grouped = grouped - weight.zeros.float()[..., None]
    elif weight.kind in UNSIGNED and minimum is None:
        grouped = grouped - (1 << weight.kind.bits - 1)
    grouped = grouped * scale[..., None]
    if minimum is not None:
        grouped = grouped + minimum[..., None]
    dense: Tensor = grouped.flatten(-2)
    return dense if weight.factors is None else dense * weight.factors[..., None]


def dequantise(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """The dense weight [outputs, inputs], its columns in the order of the inputs."""
    outputs, inputs = weight.outputs, weight.inputs
    dense = torch.empty(outputs, inputs, dtype=dtype, device=weight.codes.device)
    for rows in pieces(outputs, inputs):
        part = values(weight.rows(rows)).to(dtype)
        if weight.permutation is None:
            dense[rows] = part
        else:
            dense[rows] = torch.empty_like(part).index_copy_(1, weight.permutation.long(), part)
    return dense


def pieces(outputs: int, inputs: int) -> list[slice]:
    """Row ranges of at most `PIECE` elements each, one row at least."""
    step = max(1, PIECE // inputs)
    return [slice(begin, min(begin + step, outputs)) for begin in range(0, outputs, step)]


def linear_quantised(x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    if weight.permutation is not None:
        x = x[:, weight.permutation.long()]
    parts = [
        linear(x, values(weight.rows(rows)).to(x.dtype)) for rows in pieces(weight.outputs, weight.inputs)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return out if bias is None else out + bias


def experts_quantised(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: QuantisedWeight,
    w2: QuantisedWeight,
    form: ExpertForm = PLAIN_EXPERTS,
) -> Tensor:
    activation, clamp, bias13, bias2 = form
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        tokens, picks = (ids == expert).nonzero(as_tuple=True)
        inner = linear_quantised(x[tokens], w13.expert(expert), None if bias13 is None else bias13[expert])
        inner = activate(inner, activation, clamp)
        result = linear_quantised(inner, w2.expert(expert), None if bias2 is None else bias2[expert])
        out.index_add_(0, tokens, result.float() * weights[tokens, picks].float()[:, None])
    return out.to(x.dtype)
