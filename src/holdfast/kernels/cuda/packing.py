"""Weights of 4 and 8 bits in the order of the kernels on Hopper: `source/codes.cu`.

A weight becomes bricks of 16 rows by 64 columns, each one run of memory in which a lane finds the operands of
its matrix instructions. Nothing is rounded, and a packed weight takes the place of its codes. Used by `codes`
and `wide`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.quantised import INT4_ZERO, Codes, QuantisedWeight

SIDE, SLAB = 64, 16
"""Rows and columns of a block; rows of a slab."""
WHOLE_ROW = 1 << 20
"""The group of weights with one scale a row."""
PACKED_AT_ONCE = 1 << 25
"""Most elements that are packed at once."""

_KINDS = {Codes.INT4: 0, Codes.E2M1: 1, Codes.INT8: 2, Codes.E4M3: 3}
_SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.uint8: 3}

_E2M1_BITS = ((6, 7, 8, 15), (9, 10, 11, 18), (3, 4, 5, 12), (0, 13, 14, 1))
"""Where the fraction, both bits of the exponent and the sign of a 4-bit float lie, by pair.

Those of the second number of a pair lie 16 bits higher, modulo 32.
"""


class Form(NamedTuple):
    """What a kernel knows of a weight's codes and scales when it is compiled."""

    kind: int
    scales: int
    zeros: bool
    group: int

    @classmethod
    def of(cls, weight: QuantisedWeight | PackedCodes) -> Form:
        depth = weight.depth if isinstance(weight, PackedCodes) else weight.inputs
        group = WHOLE_ROW if weight.group == depth else weight.group
        return cls(_KINDS[weight.kind], _SCALES[weight.scales.dtype], weight.zeros is not None, group)

    @property
    def pieces(self) -> int:
        """Bricks of 4-bit codes that take as much memory as one of these."""
        return 1 if self.kind < 2 else 2

    @property
    def constants(self) -> dict[str, int]:
        """Those of the sources."""
        return {"KIND": self.kind, "SCALES": self.scales, "ZEROS": int(self.zeros), "GROUP": self.group}


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A quantised weight [rows, depth], or of several experts, arranged for the kernels.

    `words` are [experts, slabs of 16 rows, blocks of 64 columns, words]; `scales` and `zeros` have those of a
    lane in a block together. With `gated` 64 rows are 32 of each half.
    """

    kind: Codes
    words: Tensor
    scales: Tensor
    group: int
    rows: int
    depth: int
    gated: bool
    experts: int | None = None
    zeros: Tensor | None = None
    factors: Tensor | None = None
    permutation: Tensor | None = None

    @property
    def outputs(self) -> int:
        """The outputs of a product, after a gated activation."""
        return self.rows // 2 if self.gated else self.rows

    @property
    def bytes(self) -> int:
        tensors = (self.words, self.scales, self.zeros, self.factors, self.permutation)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def tiles(self) -> int:
        """Blocks of 64 rows."""
        return self.words.shape[1] * SLAB // SIDE


def packable(weight: QuantisedWeight, *, gated: bool) -> bool:
    """Whether the kernels take a weight of this shape."""
    group, depth, rows = weight.group, weight.inputs, weight.outputs
    fits = depth % SIDE == 0 and (group in (16, 32) or group % SIDE == 0)
    return fits and rows % (16 if gated else 8) == 0 and weight.scales.dtype in _SCALES


def arranged(weight: QuantisedWeight, *, gated: bool) -> PackedCodes:
    """The weight in the order of the kernels, on its own device."""
    several = weight.codes.dim() == 3
    experts = [weight.expert(index) for index in range(weight.codes.shape[0])] if several else [weight]
    rows, depth = weight.outputs, weight.inputs
    order = row_order(rows, gated, weight.codes.device)
    tiles, blocks = order.numel() // SIDE, depth // SIDE
    words = torch.empty(
        (len(experts), 4 * tiles, blocks, SLAB * SIDE * weight.kind.bits // 32),
        dtype=torch.int32,
        device=weight.codes.device,
    )
    at_once = max(1, PACKED_AT_ONCE // (SIDE * depth))
    for expert, each in enumerate(experts):
        for first in range(0, tiles, at_once):
            picked = order[first * SIDE : (first + at_once) * SIDE]
            words[expert, 4 * first : 4 * (first + at_once)] = _words(
                each.codes[picked], weight.kind, _dealt(weight.group)
            )

    def by_lane(tensor: Tensor | None) -> Tensor | None:
        """[experts, rows, groups] as [experts, slabs, runs, rows of eight, groups in 64 columns, halves]."""
        if tensor is None:
            return None
        wide = tensor if several else tensor[None]
        in_run = max(1, SIDE // weight.group)
        parts = wide[:, order].view(len(experts), 4 * tiles, 2, 8, -1, in_run)
        return parts.permute(0, 1, 4, 3, 5, 2).contiguous()

    scales = by_lane(weight.scales)
    assert scales is not None
    single = [weight.factors, weight.permutation]
    factors, permutation = (each if each is None or several else each[None] for each in single)
    return PackedCodes(
        weight.kind,
        words,
        scales,
        weight.group,
        rows,
        depth,
        gated,
        len(experts) if several else None,
        by_lane(weight.zeros),
        factors,
        permutation,
    )


def _dealt(group: int) -> int:
    """How many neighbouring columns a lane has at a time."""
    return 4 if group == 16 else 8


def row_order(rows: int, gated: bool, device: torch.device) -> Tensor:
    """The weight's rows, tile by tile, an even number of tiles; padding repeats the last row."""
    outputs = rows // 2 if gated else rows
    of_tile = SIDE // 2 if gated else SIDE
    at = torch.arange(-(-outputs // (2 * of_tile)) * 2 * SIDE, device=device)
    if not gated:
        return at.clamp(max=rows - 1)
    output = (at // SIDE * of_tile + at % of_tile).clamp(max=outputs - 1)
    return output + (at % SIDE // of_tile) * outputs


def _words(codes: Tensor, kind: Codes, dealt: int) -> Tensor:
    """Words [slabs, blocks, words] of some rows.

    A lane has two rows eight apart of a slab, and four columns in each of four steps: `dealt` neighbours at a
    time, so that a step lies within a group.
    """
    if kind.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    wide = codes.view(torch.uint8).to(torch.int64)
    # [slab, half, row, block, run, lane of four, step of the run, eight, neighbour]
    in_run = dealt // 4
    parts = wide.view(-1, 2, 8, wide.shape[1] // SIDE, 4 // in_run, 4, in_run, 2, 2)
    # [slab, block, row, lane of four, step, eight, half, neighbour]
    lanes = parts.permute(0, 3, 2, 5, 4, 6, 7, 1, 8).flatten(4, 5)
    if kind.bits == 8:
        shifts = torch.tensor([[0, 16], [8, 24]], device=codes.device)
        made = (lanes << shifts).sum(dim=(-1, -2))  # [..., step, eight]
        # Two steps of a lane are 16 bytes; those of all lanes lie together.
        made = made.reshape(*made.shape[:2], 32, 2, 4).transpose(2, 3)
    elif kind is Codes.INT4:
        shifts = torch.tensor([[[0, 16], [4, 20]], [[8, 24], [12, 28]]], device=codes.device)
        made = (lanes << shifts).sum(dim=(-1, -2, -3))
    else:
        places = torch.tensor(_E2M1_BITS, device=codes.device).view(2, 2, 1, 4)
        places = (places + torch.tensor([0, 16], device=codes.device).view(2, 1)) % 32
        bits = lanes[..., None] >> torch.arange(4, device=codes.device) & 1
        made = (bits << places).sum(dim=(-1, -2, -3, -4))
    flat = made.reshape(made.shape[0], made.shape[1], -1)
    return torch.where(flat >= 1 << 31, flat - (1 << 32), flat).to(torch.int32)


def unpack(packed: PackedCodes) -> Tensor:
    """The weight [experts, rows, depth] in float32 as the kernels unpack it; the reference for tests."""
    experts, slabs, blocks = packed.words.shape[:3]
    words = packed.words.to(torch.int64) & 0xFFFFFFFF
    if packed.kind.bits == 8:
        words = words.view(experts, slabs, blocks, 2, 32, 2, 2).transpose(3, 4)
        words = words.reshape(experts, slabs, blocks, 32, 4, 2)
        pairs = [words[..., pair // 2] >> 8 * (pair % 2) & 0x00FF00FF for pair in range(4)]
    else:
        words = words.view(experts, slabs, blocks, 32, 4)
        pairs = [_pair_of(words, pair, packed.kind) for pair in range(4)]
    both = torch.stack([torch.stack((pair & 0xFFFF, pair >> 16), dim=-1) for pair in pairs], dim=-2)
    # [expert, slab, block, row, lane of four, run, step of the run, eight, half, neighbour]
    in_run = _dealt(packed.group) // 4
    parts = _numbers(both, packed.kind).view(experts, slabs, blocks, 8, 4, 4 // in_run, in_run, 2, 2, 2)
    values = parts.permute(0, 1, 8, 3, 2, 5, 4, 6, 7, 9).reshape(experts, slabs * SLAB, blocks * SIDE)

    def spread(by_lane: Tensor) -> Tensor:
        ordered = by_lane.permute(0, 1, 5, 3, 2, 4).reshape(experts, slabs * SLAB, -1)
        return ordered.repeat_interleave(packed.group, dim=-1)

    if packed.kind is Codes.INT4:
        values = values - (INT4_ZERO if packed.zeros is None else spread(packed.zeros).float())
    scales = packed.scales
    values = values * spread(
        torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
    )
    order = row_order(packed.rows, packed.gated, values.device)
    weight = torch.empty(experts, packed.rows, packed.depth, device=values.device)
    weight[:, order] = values
    return weight if packed.factors is None else weight * packed.factors[..., None]


def _pair_of(words: Tensor, pair: int, kind: Codes) -> Tensor:
    """Two numbers in the halves of a word: 4-bit integers, or floats where bfloat16 has their bits."""
    if kind is Codes.INT4:
        return words >> 4 * pair & 0x000F000F
    if pair == 3:
        return words >> 6 & 0x01800180 | words << 6 & 0x00400040 | words << 14 & 0x80008000
    right = (0, 3, 29)[pair]
    return (words >> right | words << (32 - right)) & 0x81C081C0


def _numbers(bits: Tensor, kind: Codes) -> Tensor:
    """The numbers of codes in float32."""
    if kind is Codes.INT8:
        return torch.where(bits > 127, bits - 256, bits).float()
    if kind is Codes.INT4:
        return bits.float()
    power = 126
    if kind is Codes.E4M3:
        bits, power = bits << 8 & 0x8000 | bits << 4 & 0x07F0, 120
    magnitude = (bits & 0x7FFF).to(torch.int16).view(torch.bfloat16).double() * 2.0**power
    return torch.where(bits > 0x7FFF, -magnitude, magnitude).float()
