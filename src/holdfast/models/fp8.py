"""Weights that a checkpoint stores in fp8, and the projections over them.

Scales come in three forms: one per weight or one per row (`weight_scale`), or one per block
(`weight_scale_inv`, blocks of 128 x 128). On a GPU with fp8 the codes stay as they are; activations are
quantised dynamically, per group or token (a single token's are not), so the checkpoint's activation scales
are not needed. Elsewhere weights are converted to the model's dtype when they are loaded. Used by `weights`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast import kernels
from holdfast.kernels.torch.fp8 import dequantise

SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""Suffixes of the names of scales."""
UNUSED = (
    r"\.(input|activation|output)_(scale|global_scale|zero_point|scale_ub)$",
    r"\.(q|k|v|kv|prob)_(scale|zero_point)$",
)
"""Scales of activations and of the KV cache, which are not quantised here by the checkpoint's scales."""
BLOCK = 128
DUMMY_SCALE = 0.01
"""Of dummy weights, whose magnitude is about one in a row."""
CAPABILITY = (8, 9)
"""The lowest compute capability for which fp8 kernels compile."""


def stays(device: torch.device) -> bool:
    """Whether weights stay in fp8 on a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def scale_shapes(shape: tuple[int, ...]) -> set[tuple[int, ...]]:
    """The valid shapes of a weight's scales; none unless it is a matrix."""
    if len(shape) != 2:
        return set()
    rows, depth = shape
    return {(), (1,), (rows, 1), (-(-rows // BLOCK), -(-depth // BLOCK))}


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """Codes [out, in] and float32 scales [row blocks, depth blocks] of size `block`."""

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor) -> Fp8Weight:
        """From a weight and its scales as stored."""
        rows, depth = codes.shape
        if scale.numel() == 1:
            return cls(codes, scale.float().reshape(1, 1), (rows, depth))
        if scale.shape == (rows, 1):
            return cls(codes, scale.float(), (1, depth))
        return cls(codes, scale.float(), (BLOCK, BLOCK))

    def dense(self) -> Tensor:
        """The weight in float32."""
        return dequantise(self.codes, self.scales, self.block)


class Fp8Linear:
    """A projection with fp8 weights."""

    __slots__ = ("_bias", "_block", "_codes", "_scales")

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, device: torch.device) -> None:
        self._codes = weight.codes.to(device).contiguous()
        self._scales = weight.scales.to(device).contiguous()
        self._block = weight.block
        self._bias = bias

    @property
    def out_features(self) -> int:
        return self._codes.shape[0]

    @property
    def bytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return kernels.linear_fp8(x, self._codes, self._scales, self._block, self._bias)


def joined(parts: list[Fp8Weight]) -> Fp8Weight | None:
    """Concatenate weights along the outputs; None where their blocks do not align."""
    depth = parts[0].codes.shape[1]
    if all(part.block == (BLOCK, BLOCK) for part in parts):
        if any(part.codes.shape[0] % BLOCK for part in parts[:-1]):
            return None
        block, scales = (BLOCK, BLOCK), [part.scales for part in parts]
    elif all(part.block[1] == depth for part in parts):
        # One scale per weight becomes one per row.
        block = (1, depth)
        scales = [part.scales.expand(part.codes.shape[0], 1) for part in parts]
    else:
        return None
    if len(parts) == 1:
        return parts[0]
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(parts[0].codes.dtype)
    return Fp8Weight(codes, torch.cat(scales), block)
