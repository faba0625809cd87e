"""Rotary positions: the frequencies of a `Rope`, and the table of cosines and sines for the kernels.

Frequencies and angles are float32 whatever the model's dtype. Layers that share a `Rope` share one table;
`blocks` builds it once per `Rope`, for the context length that the model is loaded with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from holdfast.models.available import available_bytes
from holdfast.models.config import Rope

_BYTES_WHILE_MADE = 10
"""Peak bytes per element of a table: angles (half as many), their cosines and sines, and the table."""


def inverse_frequencies(rope: Rope) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 of half the rotated dimensions, and the factor on cosine and sine."""
    exponents = torch.arange(0, rope.dimensions, 2, dtype=torch.float32) / rope.dimensions
    inverse = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "default":
            return inverse, 1.0
        case "linear":
            return inverse / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, inverse), 1.0
        case "yarn":
            return _yarn(rope, inverse)
        case "factors":
            return inverse / torch.tensor(rope.factors, dtype=torch.float32), 1.0


def _llama3(rope: Rope, inverse: Tensor) -> Tensor:
    """Llama 3 scaling: long wavelengths are divided by the factor, short ones kept, those between blended."""
    wavelength = 2.0 * math.pi / inverse
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    kept_share = ((rope.original_context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return inverse * kept_share + inverse / rope.factor * (1.0 - kept_share)


def _yarn(rope: Rope, inverse: Tensor) -> tuple[Tensor, float]:
    """YaRN: blends by rotations within the original context, and scales attention."""

    def dimension_of(rotations: float) -> float:
        turns = math.log(rope.original_context / (rotations * 2.0 * math.pi))
        return rope.dimensions * turns / (2.0 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dimensions - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(rope.dimensions // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    blended = inverse * (1.0 - ramp) + inverse / rope.factor * ramp

    def magnitude(strength: float) -> float:
        return 0.1 * strength * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0

    if rope.attention_factor is not None:
        return blended, rope.attention_factor
    if rope.mscale and rope.mscale_all_dimensions:
        return blended, magnitude(rope.mscale) / magnitude(rope.mscale_all_dimensions)
    return blended, magnitude(1.0)


def rotary_table(rope: Rope, positions: int, device: torch.device) -> Tensor:
    """Cosines, then sines, of every position: float32 [positions, rotated dimensions]."""
    needed = positions * rope.dimensions * _BYTES_WHILE_MADE
    if needed > available_bytes():
        raise MemoryError(f"a table of {positions} positions takes {needed} bytes while it is made")
    inverse, factor = inverse_frequencies(rope)
    turns = torch.arange(positions, dtype=torch.float32)[:, None] * inverse
    return (torch.cat((turns.cos(), turns.sin()), dim=-1) * factor).to(device)
