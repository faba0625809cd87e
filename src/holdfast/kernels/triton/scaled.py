# mypy: allow-untyped-defs, allow-incomplete-defs
"""Encoding and decoding of `ScaledCache` inside Triton kernels, and its arguments at a launch.

Same results as `kernels/torch/scaled.py`. Used by `rotary`, `attention` and `pieces` of this package.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.kernels.scaled import KvCache, ScaledCache


@triton.jit
def scale_of(peak):
    """The biased exponent of the smallest power of two with which no code saturates, within its limits."""
    bits = (peak * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((bits + 0x7FFFFF) >> 23, 112), 134)


@triton.jit
def factor_of(exponent):
    """A power of two in float32, from its biased exponent."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode(x, exponent):
    """The codes of x [heads, columns] in float32, with a scale for each head. NaN stays NaN.

    Rounded by integer arithmetic, since the interpreter's conversion to e4m3 does not round to nearest.
    """
    scaled = x * factor_of(254 - exponent)[:, None]
    bits = scaled.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Exponent and three bits of mantissa, rounded to nearest, ties to even; 126 is the largest number.
    code = tl.minimum(((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3), 126)
    # Below 2^-6 codes are multiples of 2^-9, which is the last place of numbers at 2^14.
    small = (tl.abs(scaled) + 16384.0).to(tl.int32, bitcast=True) & 0x7FFFFF
    code = tl.where(size < 0x3C800000, small, code)
    code = tl.where(size > 0x7F800000, 127, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode(codes, KIND: tl.constexpr):
    """Codes as numbers, without their scale."""
    return codes.to(tl.float8e4nv, bitcast=True).to(KIND)


@triton.jit
def prepare_queries(queries):
    """Queries [rows, columns] as operands of products with decoded keys, and a factor for each row.

    Keys are exact in float16, in which e4m3 is decoded by one instruction. A row of queries is divided by a
    power of two so that it is exact in float16 too, whatever its range. Float32 queries stay float32.
    """
    if queries.dtype == tl.float32:
        operands = queries
        factor = tl.full([queries.shape[0]], 1.0, tl.float32)
    else:
        wide = queries.to(tl.float32)
        bits = tl.max(tl.abs(wide), axis=1).to(tl.int32, bitcast=True) >> 23
        bits = tl.minimum(tl.maximum(bits, 1), 253)
        operands = (wide * factor_of(254 - bits)[:, None]).to(tl.float16)
        factor = factor_of(bits)
    return operands, factor


class Launched(NamedTuple):
    """The keys and values of a layer as arguments of a kernel."""

    key: torch.Tensor
    value: torch.Tensor
    key_scales: torch.Tensor
    value_scales: torch.Tensor
    scaled: bool

    @property
    def strides(self) -> tuple[int, ...]:
        """Unit, token and head of keys and of values, then unit and head of scales."""
        return (*self.key.stride()[:3], *self.value.stride()[:3], *self.key_scales.stride()[:2])

    @property
    def element_size(self) -> int:
        """Bytes of a stored number."""
        return self.key.element_size()


def launched(key: KvCache, value: KvCache) -> Launched:
    """The arguments of two caches; without scales, other tensors take their place and are not read."""
    if isinstance(key, ScaledCache) and isinstance(value, ScaledCache):
        assert key.scales.stride() == value.scales.stride()
        assert key.scales.shape[-1] == 1 or key.scales.stride(-1) == 1, "the scales of a head are adjacent"
        return Launched(key.codes, value.codes, key.scales, value.scales, True)
    assert isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor), "both have scales, or neither"
    return Launched(key, value, key, value, False)
