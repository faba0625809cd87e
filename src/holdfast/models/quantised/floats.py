"""Weights in 4-bit and 8-bit floats: MXFP4, NVFP4 and fp8.

As in `integers`: bytes are rearranged, nothing is rounded, and faults are recorded by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.kernels.quantised import Codes, QuantisedWeight
from holdfast.models.quantised.forms import BLOCK, Form, Layout
from holdfast.models.quantised.integers import FLOATS, Parts, group_of

_ONE: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))


def read_mxfp4_experts(
    parts: Parts, name: str, experts: int, outputs: int, inputs: int
) -> QuantisedWeight | None:
    """gpt-oss: blocks [experts, outputs, inputs / 32, 16] and their exponents."""
    if inputs % 32:
        parts.reject(f"{name}_blocks has rows of {inputs}, which groups of 32 do not divide")
        return None
    blocks = parts.part(f"{name}_blocks", ((experts, outputs, inputs // 32, 16),), (torch.uint8,))
    scales = parts.part(f"{name}_scales", ((experts, outputs, inputs // 32),), (torch.uint8,))
    if blocks is None or scales is None or not _finite(parts, f"{name}_scales", scales):
        return None
    return QuantisedWeight(Codes.E2M1, blocks.flatten(2), scales, 32)


def read_mxfp4(parts: Parts, module: str, form: Form, outputs: int, inputs: int) -> QuantisedWeight | None:
    """compressed-tensors' mxfp4-pack-quantized."""
    group = group_of(parts, f"{module}.weight_packed", form, inputs)
    if group is None:
        return None
    codes = parts.part(f"{module}.weight_packed", ((outputs, inputs // 2),), (torch.uint8,))
    scales = parts.part(f"{module}.weight_scale", ((outputs, inputs // group),), (torch.uint8,))
    if codes is None or scales is None or not _finite(parts, f"{module}.weight_scale", scales):
        return None
    return QuantisedWeight(Codes.E2M1, codes, scales, group)


def _finite(parts: Parts, name: str, scales: Tensor) -> bool:
    """Whether no exponent stands for NaN."""
    if (scales == 255).any():
        parts.reject(f"{name} has exponents of 255, which are not numbers")
        return False
    return True


def read_nvfp4(parts: Parts, module: str, form: Form, outputs: int, inputs: int) -> QuantisedWeight | None:
    """NVFP4: a scale in fp8 for 16 elements, and one for the weight: a divisor, or ModelOpt's factor."""
    codes_name = module + form.layout.ending
    group = group_of(parts, codes_name, form, inputs)
    if group is None:
        return None
    divides = form.layout is Layout.NVFP4
    factor_name = f"{module}.weight_global_scale" if divides else f"{module}.weight_scale_2"
    codes = parts.part(codes_name, ((outputs, inputs // 2),), (torch.uint8,))
    scales = parts.part(f"{module}.weight_scale", ((outputs, inputs // group),), (torch.float8_e4m3fn,))
    factor = parts.part(factor_name, _ONE, FLOATS)
    if codes is None or scales is None or factor is None:
        return None
    value = factor.float().reshape(())
    if not torch.isfinite(value) or value <= 0:
        parts.reject(f"{factor_name} is {value.item()}, not a number above zero")
        return None
    factors = (1.0 / value if divides else value).expand(outputs).contiguous()
    # bfloat16 holds every fp8 number.
    return QuantisedWeight(Codes.E2M1, codes, scales.to(torch.bfloat16), group, factors=factors)


def read_fp8(parts: Parts, module: str, form: Form, outputs: int, inputs: int) -> QuantisedWeight | None:
    """fp8 with a scale for all, for each row, or for each block; blocks' scales are repeated for each row.

    None without a record where blocks do not divide the rows: such a weight is read dense.
    """
    group = inputs if form.group is None else BLOCK
    if inputs % group:
        return None
    shapes: tuple[tuple[int, ...], ...] = ((-(-outputs // BLOCK), inputs // group),)
    if form.group is None:
        shapes = (*_ONE, (outputs, 1))
    codes = parts.part(f"{module}.weight", ((outputs, inputs),), (torch.float8_e4m3fn,))
    suffix = "_scale" if parts.has(f"{module}.weight_scale") else "_scale_inv"
    scales = parts.part(f"{module}.weight{suffix}", shapes, FLOATS)
    if codes is None or scales is None:
        return None
    spread = scales.float().reshape(-1, inputs // group)
    if form.group is not None:
        spread = spread.repeat_interleave(BLOCK, 0)[:outputs]
    spread = spread.expand(outputs, inputs // group).contiguous()
    return QuantisedWeight(Codes.E4M3, codes.view(torch.uint8), spread, group)
