"""Blocks of GGUF's quantised formats as `QuantisedWeight`s: bytes are rearranged, nothing is rounded.

`read_codes` takes the bytes of a matrix. A format is one function of its blocks [outputs, blocks, bytes].
Called by `gguf`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from holdfast.kernels.quantised import Codes, QuantisedWeight

__all__ = ["read_codes"]


def read_codes(raw: Tensor, kind: GGMLQuantizationType, outputs: int, inputs: int) -> QuantisedWeight | None:
    """The weight in these bytes; None for a format without codes that products read."""
    reader = _READERS.get(kind)
    if reader is None:
        return None
    block, size = GGML_QUANT_SIZES[kind]
    return reader(raw.view(outputs, inputs // block, size))


def _halves(blocks: Tensor, start: int) -> Tensor:
    """16-bit floats at a byte offset of each block [outputs, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(packed: Tensor) -> Tensor:
    """Low nibbles of the last dimension's bytes, then the high nibbles."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """Fields of so many bits: the lowest ones of the last dimension's bytes first."""
    return torch.cat([packed >> place & (1 << bits) - 1 for place in range(0, 8, bits)], dim=-1)


def _in_pairs(codes: Tensor) -> Tensor:
    """4-bit codes [outputs, ...] two in a byte [outputs, inputs / 2]."""
    flat = codes.flatten(1)
    return flat[:, ::2] | flat[:, 1::2] << 4


def _q8_0(blocks: Tensor) -> QuantisedWeight:
    codes = blocks[..., 2:].flatten(1).view(torch.int8)
    return QuantisedWeight(Codes.INT8, codes, _halves(blocks, 0), 32)


def _q4_0(blocks: Tensor) -> QuantisedWeight:
    return QuantisedWeight(Codes.INT4, _in_pairs(_nibbles(blocks[..., 2:])), _halves(blocks, 0), 32)


def _q4_1(blocks: Tensor) -> QuantisedWeight:
    codes = _in_pairs(_nibbles(blocks[..., 4:]))
    return QuantisedWeight(Codes.INT4, codes, _halves(blocks, 0), 32, minima=_halves(blocks, 2))


def _fifth_bits(packed: Tensor) -> Tensor:
    """The bits of 4 bytes, lowest first, at the place of a code's fifth."""
    places = torch.arange(8, dtype=torch.uint8)
    return (packed[..., None] >> places & 1).flatten(-2) << 4


def _q5_0(blocks: Tensor) -> QuantisedWeight:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return QuantisedWeight(Codes.INT5, codes.flatten(1), _halves(blocks, 0), 32)


def _q5_1(blocks: Tensor) -> QuantisedWeight:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return QuantisedWeight(Codes.INT5, codes.flatten(1), _halves(blocks, 0), 32, minima=_halves(blocks, 2))


def _mxfp4(blocks: Tensor) -> QuantisedWeight:
    """An exponent with a bias of 127, then the codes of 32 4-bit floats."""
    codes = _in_pairs(_nibbles(blocks[..., 1:]))
    return QuantisedWeight(Codes.E2M1, codes, blocks[..., 0].contiguous(), 32)


def _iq4_nl(blocks: Tensor) -> QuantisedWeight:
    return QuantisedWeight(Codes.IQ4, _in_pairs(_nibbles(blocks[..., 2:])), _halves(blocks, 0), 32)


def _iq4_xs(blocks: Tensor) -> QuantisedWeight:
    """8 groups of 32 with 6-bit scales, stored as 4 and 2 bits, less 32."""
    places = torch.arange(8)
    low = blocks[..., 4:8][..., places // 2] >> (4 * (places % 2)) & 15
    high = blocks[..., 2:4][..., places // 4] >> (2 * (places % 4)) & 3
    scales = ((low | high << 4).to(torch.int8) - 32).flatten(1)
    codes = _in_pairs(_nibbles(blocks[..., 8:].unflatten(-1, (8, 16))))
    return QuantisedWeight(Codes.IQ4, codes, scales, 32, super_scales=_halves(blocks, 0))


def _q2_k(blocks: Tensor) -> QuantisedWeight:
    """16 groups of 16 with scales and minima of 4 bits in one byte; two halves of 128 codes."""
    codes = _fields(blocks[..., 16:80].unflatten(-1, (2, 32)), 2)
    return QuantisedWeight(
        Codes.INT2,
        codes.flatten(1),
        (blocks[..., :16] & 15).flatten(1).to(torch.int8),
        16,
        minima=(blocks[..., :16] >> 4).flatten(1),
        super_scales=_halves(blocks, 80),
        super_minima=-_halves(blocks, 82),
    )


def _q3_k(blocks: Tensor) -> QuantisedWeight:
    """16 groups of 16 with 6-bit scales less 32, stored as 4 and 2 bits; a code's third bit is apart."""
    low = _fields(blocks[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-2)
    high = _fields(blocks[..., :32], 1)
    scales = _nibbles(blocks[..., 96:104]) | _fields(blocks[..., 104:108], 2) << 4
    return QuantisedWeight(
        Codes.INT3,
        (low | high << 2).flatten(1),
        (scales.to(torch.int8) - 32).flatten(1),
        16,
        super_scales=_halves(blocks, 108),
    )


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """8 scales and 8 minima of 6 bits in the 12 bytes of Q4_K and Q5_K [outputs, groups]."""
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=-1)
    minima = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), dim=-1)
    return scales.flatten(1).to(torch.int8), minima.flatten(1)


def _q4_k(blocks: Tensor) -> QuantisedWeight:
    scales, minima = _six_bits(blocks[..., 4:16])
    codes = _in_pairs(_nibbles(blocks[..., 16:].unflatten(-1, (4, 32))))
    supers = (_halves(blocks, 0), -_halves(blocks, 2))
    return QuantisedWeight(
        Codes.INT4, codes, scales, 32, minima=minima, super_scales=supers[0], super_minima=supers[1]
    )


def _q5_k(blocks: Tensor) -> QuantisedWeight:
    """Q4_K with a fifth bit of each code apart."""
    scales, minima = _six_bits(blocks[..., 4:16])
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    codes = (low | _fields(blocks[..., 16:48], 1) << 4).flatten(1)
    supers = (_halves(blocks, 0), -_halves(blocks, 2))
    return QuantisedWeight(
        Codes.INT5, codes, scales, 32, minima=minima, super_scales=supers[0], super_minima=supers[1]
    )


def _q6_k(blocks: Tensor) -> QuantisedWeight:
    """16 groups of 16 with scales in bytes; two halves of 128 codes, stored as 4 and 2 bits."""
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    high = _fields(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-2)
    return QuantisedWeight(
        Codes.INT6,
        (low | high << 4).flatten(1),
        blocks[..., 192:208].contiguous().view(torch.int8).flatten(1),
        16,
        super_scales=_halves(blocks, 208),
    )


_READERS: dict[GGMLQuantizationType, Callable[[Tensor], QuantisedWeight]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.MXFP4: _mxfp4,
    GGMLQuantizationType.IQ4_NL: _iq4_nl,
    GGMLQuantizationType.IQ4_XS: _iq4_xs,
    GGMLQuantizationType.Q2_K: _q2_k,
    GGMLQuantizationType.Q3_K: _q3_k,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
