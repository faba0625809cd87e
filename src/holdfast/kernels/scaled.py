"""A KV cache in eight bits: e4m3 codes, and a power of two for the keys or values of each token and head.

A stored number is its code times that power of two. The power is the smallest with which no code saturates,
within limits that make every stored number exact in float16 and in bfloat16: kernels may multiply it in
wherever that is cheapest. It is chosen when a token is written and never changes. The C and Triton packages
and `kernels/torch/scaled.py` read and write this form.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["BIAS", "EXPONENT_LEAST", "EXPONENT_MOST", "LARGEST", "KvCache", "ScaledCache", "stored"]

LARGEST = 448.0
"""The largest code."""
EXPONENT_LEAST, EXPONENT_MOST = -15, 7
"""The smallest code times 2^-15 is the smallest float16, and 448 times 2^7 is below the largest."""
BIAS = 127
"""Added to the exponent of a scale to make a byte of it (E8M0)."""


class ScaledCache(NamedTuple):
    """The keys or values of one layer, of all units.

    `codes` uint8 [units, page_size, kv_heads, dim] are the bits of float8_e4m3fn; `scales` uint8
    [units, kv_heads, page_size] are exponents plus 127.
    """

    codes: torch.Tensor
    scales: torch.Tensor


KvCache = torch.Tensor | ScaledCache
"""The keys or values of one layer: numbers [units, page_size, kv_heads, dim], or codes and scales."""


def stored(cache: KvCache) -> torch.Tensor:
    """The tensor [units, page_size, kv_heads, dim] of a cache: its numbers or its codes."""
    return cache.codes if isinstance(cache, ScaledCache) else cache
