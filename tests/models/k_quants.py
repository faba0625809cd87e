"""Weights quantised to GGUF's K-quants and IQ4, which the gguf package reads but does not write.

Plain rounding by each format's rules, without the search for better scales that llama.cpp makes. Works on
blocks [blocks, groups, elements]; scales of groups are integers times a number of the block.
"""

from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

Array = NDArray[np.float32]
Octets = NDArray[np.uint8]

IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)


def _half(values: Array) -> tuple[Octets, Array]:
    """The bytes of numbers in half precision, and what they mean."""
    rounded = values.astype(np.float16)[:, None]
    return rounded.view(np.uint8), rounded.astype(np.float32)


def _divided(values: Array, by: Array) -> Array:
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)


def _nibbles(low: Octets, high: Octets) -> Octets:
    return low | high << 4


def _bits(codes: Octets, width: int, run: int) -> Octets:
    """Codes [blocks, elements] in fields of `width` bits: the first `run` ones in the lowest, and so on."""
    parts = codes.reshape(len(codes), -1, 8 // width, run)
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(parts << shifts, axis=2).reshape(len(codes), -1)


def _signed(
    blocks: Array, low: int, high: int, scale_low: int, scale_high: int
) -> tuple[Octets, Array, Octets]:
    """(bytes of the block's scale, integer scales of groups, codes from 0) without minima."""
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]
    scales = largest / low
    raw, factor = _half(np.abs(scales).max(-1) / scale_high)
    integers = np.clip(
        np.rint(_divided(scales, np.broadcast_to(factor, scales.shape))), scale_low, scale_high
    )
    step = (factor * integers)[..., None]
    codes = np.clip(np.rint(_divided(blocks, np.broadcast_to(step, blocks.shape))), low, high) - low
    return raw, integers, codes.astype(np.uint8)


def _with_minima(blocks: Array, codes_most: int, most: int) -> tuple[Octets, Octets, Octets, Octets, Octets]:
    """(bytes of the block's scale, of its minimum, scales and minima of groups, codes)."""
    least = np.minimum(blocks.min(-1), 0.0)
    scales = (blocks.max(-1) - least) / codes_most
    raw, factor = _half(scales.max(-1) / most)
    raw_minimum, minimum_factor = _half((-least).max(-1) / most)
    integers = np.clip(np.rint(_divided(scales, np.broadcast_to(factor, scales.shape))), 0, most)
    minima = np.clip(np.rint(_divided(-least, np.broadcast_to(minimum_factor, least.shape))), 0, most)
    step, offset = (factor * integers)[..., None], (minimum_factor * minima)[..., None]
    codes = np.rint(_divided(blocks + offset, np.broadcast_to(step, blocks.shape)))
    codes = np.clip(codes, 0, codes_most).astype(np.uint8)
    return raw, raw_minimum, integers.astype(np.uint8), minima.astype(np.uint8), codes


def _six_bits(scales: Octets, minima: Octets) -> Octets:
    """The 12 bytes of Q4_K and Q5_K."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    return np.concatenate((first, second, _nibbles(scales[:, 4:] & 15, minima[:, 4:] & 15)), 1)


def _q2_k(weight: Array) -> Octets:
    raw, raw_minimum, scales, minima, codes = _with_minima(weight.reshape(-1, 16, 16), 3, 15)
    fields = _bits(codes.reshape(-1, 256), 2, 32)
    return np.concatenate((_nibbles(scales, minima), fields, raw, raw_minimum), 1)


def _q3_k(weight: Array) -> Octets:
    raw, integers, codes = _signed(weight.reshape(-1, 16, 16), -4, 3, -32, 31)
    flat, scales = codes.reshape(-1, 256), (integers + 32).astype(np.uint8)
    low = _nibbles(scales[:, :8] & 15, scales[:, 8:] & 15)
    high = _bits(scales >> 4, 2, 4)
    return np.concatenate((_bits(flat >> 2, 1, 32), _bits(flat & 3, 2, 32), low, high, raw), 1)


def _q4_k(weight: Array) -> Octets:
    raw, raw_minimum, scales, minima, codes = _with_minima(weight.reshape(-1, 8, 32), 15, 63)
    fields = _bits(codes.reshape(-1, 256), 4, 32)
    return np.concatenate((raw, raw_minimum, _six_bits(scales, minima), fields), 1)


def _q5_k(weight: Array) -> Octets:
    raw, raw_minimum, scales, minima, codes = _with_minima(weight.reshape(-1, 8, 32), 31, 63)
    flat = codes.reshape(-1, 256)
    fields = (_bits(flat >> 4, 1, 32), _bits(flat & 15, 4, 32))
    return np.concatenate((raw, raw_minimum, _six_bits(scales, minima), *fields), 1)


def _q6_k(weight: Array) -> Octets:
    raw, integers, codes = _signed(weight.reshape(-1, 16, 16), -32, 31, -128, 127)
    flat = codes.reshape(-1, 256)
    scales = integers.astype(np.int8).view(np.uint8)
    return np.concatenate((_bits(flat & 15, 4, 64), _bits(flat >> 4, 2, 32), scales, raw), 1)


def _nearest(blocks: Array, scale: Array) -> Octets:
    """The codes of IQ4 [blocks, elements] nearest to the weights."""
    wanted = _divided(blocks, np.broadcast_to(scale, blocks.shape))
    return np.abs(wanted[..., None] - IQ4).argmin(-1).astype(np.uint8)


def _iq4_nl(weight: Array) -> Octets:
    blocks = weight.reshape(-1, 32)
    raw, factor = _half(np.abs(blocks).max(-1) / 113)
    return np.concatenate((raw, _bits(_nearest(blocks, factor), 4, 16)), 1)


def _iq4_xs(weight: Array) -> Octets:
    blocks = weight.reshape(-1, 8, 32)
    scales = np.abs(blocks).max(-1) / 113
    raw, factor = _half(scales.max(-1) / 31)
    integers = np.clip(np.rint(_divided(scales, np.broadcast_to(factor, scales.shape))), -32, 31)
    codes = _nearest(blocks, (factor * integers)[..., None])
    stored = (integers + 32).astype(np.uint8)
    high = _bits(stored >> 4, 2, 1)
    low = _bits(stored & 15, 4, 1)
    return np.concatenate((raw, high, low, _bits(codes.reshape(-1, 256), 4, 16)), 1)


WRITERS: dict[Kind, Callable[[Array], Octets]] = {
    Kind.Q2_K: _q2_k,
    Kind.Q3_K: _q3_k,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
    Kind.IQ4_NL: _iq4_nl,
    Kind.IQ4_XS: _iq4_xs,
}


def quantise_blocks(weight: Array, kind: Kind) -> Octets:
    """The bytes of a matrix."""
    return WRITERS[kind](weight.astype(np.float32)).reshape(weight.shape[0], -1)
