"""Encoding and decoding of `ScaledCache` in torch: the reference of the other packages."""

from __future__ import annotations

import torch

from holdfast.kernels.scaled import BIAS, EXPONENT_LEAST, EXPONENT_MOST, LARGEST, KvCache, ScaledCache

MANTISSA_BITS = 23


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of x [..., dim], uint8, and the scale of each head [...], uint8. NaN stays NaN."""
    x = x.float()
    peak = x.abs().amax(dim=-1) * (1.0 / LARGEST)
    # The exponent of the smallest power of two that is not below the peak.
    exponent = (peak.view(torch.int32) + ((1 << MANTISSA_BITS) - 1)) >> MANTISSA_BITS
    exponent = exponent.clamp(BIAS + EXPONENT_LEAST, BIAS + EXPONENT_MOST)
    factor = ((2 * BIAS - exponent) << MANTISSA_BITS).view(torch.float32)
    scaled = (x * factor.unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), exponent.to(torch.uint8)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers of codes [..., dim] and their scales [...], in float32."""
    factor = (scales.to(torch.int32) << MANTISSA_BITS).view(torch.float32)
    return codes.view(torch.float8_e4m3fn).float() * factor.unsqueeze(-1)


def units_of(cache: KvCache, units: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copies of some units [n, page_size, kv_heads, dim] in `dtype`."""
    if not isinstance(cache, ScaledCache):
        return cache.index_select(0, units).to(dtype)
    scales = cache.scales.index_select(0, units).transpose(1, 2)
    return decode(cache.codes.index_select(0, units), scales).to(dtype)
