"""Products with weights of 4 and 8 bits on Hopper: `source/codes.cu`.

`pack` arranges a quantised weight for the kernels, in place of its codes: blocks of 64 rows by 64 columns,
each one run of memory, in which a lane finds the operands of its matrix instructions. Nothing is rounded.
`product` takes few tokens; for many `expanded` has the weight in bfloat16, some rows at a time.
`expert_product` takes one of the two products of a mixture of experts, `expanded_experts` has the weights of
some. `pack` returns None where the kernels do not apply: other GPUs and shapes, a machine without NVRTC, or
CUDA kernels switched off. Same results as `kernels/torch/quantised.py`. Called by `kernels/triton/codes.py`,
`pack` through `holdfast.kernels`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.cuda.driver import (
    HOPPER,
    Kernel,
    compile_source,
    falling_back_to,
    index_of,
    machine_of,
)
from holdfast.kernels.cuda.products import ACTIVATIONS, PLAIN, PROJECTION, readable
from holdfast.kernels.quantised import INT4_ZERO, Codes, QuantisedWeight
from holdfast.kernels.torch.activation import Activation

SOURCE, FEW, MORE = (HOPPER.with_name(name) for name in ("codes.cu", "codes_few.cu", "codes_more.cu"))

COLUMNS = (8, 16, 32, 64)
"""Token counts that kernels are compiled for."""
FEW_TOKENS = COLUMNS[-1]
NARROW = 16
"""Most tokens of the kernel that needs no sums of several programs."""
SIDE, SLAB = 64, 16
"""Rows and columns of a block; rows of a slab."""
WHOLE_ROW = 1 << 20
"""The group of weights with one scale a row."""
COUNTERS = 16_384
"""Most tiles of a product."""
PACKED_AT_ONCE = 1 << 25
EXPANDED_AT_ONCE = 1 << 26
"""Most elements that are packed, and dequantised, at once."""

_KINDS = {Codes.INT4: 0, Codes.E2M1: 1, Codes.INT8: 2, Codes.E4M3: 3}
_SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.uint8: 3}

_E2M1_BITS = ((6, 7, 8, 15), (9, 10, 11, 18), (3, 4, 5, 12), (0, 13, 14, 1))
"""Where the fraction, both bits of the exponent and the sign of a 4-bit float lie, by pair.

Those of the second number of a pair lie 16 bits higher, modulo 32.
"""


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


class SortedPicks(NamedTuple):
    """The picks of experts in blocks, as `sort_picks` orders them, the expert of each block, and the shares.

    A pick reads row `pick // divide` of the inputs.
    """

    order: Tensor
    block_expert: Tensor
    shares: Tensor
    divide: int


class Shape(NamedTuple):
    """The warps of a program, by blocks of rows and of columns, and its programs on a multiprocessor."""

    row_warps: int
    depth_warps: int
    beside: int


SHAPES = {8: Shape(1, 8, 2), 16: Shape(1, 8, 2), 32: Shape(2, 4, 1), 64: Shape(2, 4, 1)}
"""By tokens. More rows share their inputs, more columns split the depth."""

EXPERT_SHAPES = {8: Shape(1, 4, 4), 16: Shape(1, 4, 3), 32: Shape(2, 4, 1), 64: Shape(2, 4, 1)}
"""By the picks of a block: an expert's weights are small."""


class Cut(NamedTuple):
    """The compile-time parameters of a kernel."""

    kind: int
    scales: int
    zeros: bool
    group: int
    tokens: int
    activation: Activation | None
    experts: bool = False
    shared: bool = False
    """Whether outputs are multiplied by the shares of their picks, in float32."""

    @property
    def shape(self) -> Shape:
        return (EXPERT_SHAPES if self.experts else SHAPES)[self.tokens]

    @property
    def threads(self) -> int:
        return 32 * self.shape.row_warps * self.shape.depth_warps

    @property
    def narrow(self) -> bool:
        """Whether a program takes all columns of its rows."""
        return self.tokens <= NARROW

    @property
    def name(self) -> str:
        return "narrow" if self.narrow else "product"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: inputs of two units, and the sums of all warps."""
        if self.narrow:
            return 0
        rows, depth, _ = self.shape
        inputs = depth * 2 * self.tokens * (72 if self.tokens > 32 else 96) * 2
        return inputs + depth * self.tokens * (SIDE * rows + 4) * 4


def pack(weight: QuantisedWeight, *, gated: bool = False) -> PackedCodes | None:
    """The weight for the kernels on its device; None where they do not apply."""
    index = index_of(weight.codes.device)
    if machine_of(index) is None or not packable(weight, gated=gated):
        return None
    cut = _cut(weight, COLUMNS[0], "swiglu" if gated else None, experts=weight.codes.dim() == 3)
    return None if _kernel(cut, cut.name, index) is None else arranged(weight, gated=gated)


def packable(weight: QuantisedWeight, *, gated: bool) -> bool:
    """Whether the kernels take a weight of this shape."""
    group, depth = weight.group, weight.inputs
    rows = weight.outputs
    fits = depth % SIDE == 0 and (group in (16, 32) or group % SIDE == 0)
    tall = rows % (16 if gated else 8) == 0 and -(-rows // SIDE) <= COUNTERS
    return fits and tall and weight.scales.dtype in _SCALES


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


def _cut(
    weight: QuantisedWeight | PackedCodes,
    tokens: int,
    activation: Activation | None,
    *,
    experts: bool = False,
    shared: bool = False,
) -> Cut:
    columns = next(each for each in COLUMNS if each >= tokens)
    depth = weight.depth if isinstance(weight, PackedCodes) else weight.inputs
    group = WHOLE_ROW if weight.group == depth else weight.group
    scales = _SCALES[weight.scales.dtype]
    return Cut(
        _KINDS[weight.kind], scales, weight.zeros is not None, group, columns, activation, experts, shared
    )


def source_of(cut: Cut) -> str:
    """The source of a kernel: its constants and the files."""
    given = {
        "KIND": cut.kind,
        "SCALES": cut.scales,
        "ZEROS": int(cut.zeros),
        "GROUP": cut.group,
        "TOKENS": cut.tokens,
        "ROW_WARPS": cut.shape.row_warps,
        "K_WARPS": cut.shape.depth_warps,
        "BESIDE": cut.shape.beside,
        "ACTIVATION": ACTIVATIONS[cut.activation],
        "EXPERTS": int(cut.experts),
        "SHARED": int(cut.shared),
    }
    defined = "\n".join(f"#define {name} {value}" for name, value in given.items())
    after = (path.read_text(encoding="utf-8") for path in (PROJECTION, SOURCE, FEW if cut.narrow else MORE))
    return "\n".join((HOPPER.read_text(encoding="utf-8"), defined, *after))


@cache
def _kernel(cut: Cut, name: str, index: int | None) -> Kernel | None:
    """A kernel on a device, or None where it is unavailable; the reason is logged."""
    with falling_back_to("Triton"):
        image = compile_source(source_of(cut))
        with torch.cuda.device(index):
            return Kernel(image, name, cut.threads, cut.shared_bytes if name == cut.name else 0, 1)
    return None


@cache
def _counters(device: torch.device) -> Tensor:
    """The arrival counters of tiles; zero between launches, which never run concurrently."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _launch(
    cut: Cut,
    programs: int,
    x: Tensor,
    weight: PackedCodes,
    bias: Tensor | None,
    out: Tensor,
    picks: SortedPicks | None = None,
    partial: Tensor | None = None,
) -> None:
    kernel = _kernel(cut, cut.name, x.device.index)
    if kernel is None:
        raise RuntimeError("a CUDA kernel of quantised weights could not be compiled; the log says why")
    order, block_expert, shares, divide = (None, None, None, 1) if picks is None else picks
    codes = (weight.words, weight.scales, weight.zeros, weight.factors)
    tensors: tuple[Tensor | None, ...] = (x, *codes, bias, out, order, block_expert, shares)
    numbers = (x.shape[0], weight.outputs, weight.depth, x.stride(0), divide, weight.tiles)
    if not cut.narrow:
        tensors += (partial, None if partial is None else _counters(x.device))
    kernel.launch(programs, (), *map(_at, tensors), *map(ctypes.c_int, numbers))


def _row_tiles(weight: PackedCodes, cut: Cut) -> int:
    """How many programs share the rows of a weight."""
    rows = SIDE * cut.shape.row_warps
    if cut.narrow:
        rows = 2 * SLAB if weight.gated or cut.tokens > COLUMNS[0] else SLAB
    return -(-weight.outputs // (rows // 2 if weight.gated else rows))


def product(
    x: Tensor, weight: PackedCodes, bias: Tensor | None, activation: Activation | None = None
) -> Tensor:
    """The product of bfloat16 inputs and its activation, which is gated if the weight is."""
    assert x.dtype == torch.bfloat16 and weight.experts is None
    assert weight.gated == (activation not in PLAIN)
    tokens = x.shape[0]
    if weight.permutation is not None:
        x = x[:, weight.permutation[0]]
    elif not readable(x):
        x = x.contiguous()
    out = torch.empty(tokens, weight.outputs, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    assert tokens <= FEW_TOKENS
    machine = machine_of(x.device.index)
    assert machine is not None
    cut = _cut(weight, tokens, activation)
    programs, partial = _row_tiles(weight, cut), None
    if not cut.narrow:
        units = programs * -(-weight.depth // (SIDE * cut.shape.depth_warps))
        programs = min(units, machine.processors * cut.shape.beside)
        room = programs * 2 * SIDE * cut.shape.row_warps * cut.tokens
        partial = torch.empty(room, dtype=torch.float32, device=x.device)
    _launch(cut, programs, x, weight, bias, out, partial=partial)
    return out


def expert_product(
    x: Tensor,
    weight: PackedCodes,
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    picks: SortedPicks,
) -> None:
    """One product of picks, into `out`: with its activation, or times their shares if `out` is float32."""
    blocks = picks.block_expert.numel()
    block = picks.order.numel() // blocks
    cut = _cut(weight, block, activation, experts=True, shared=out.dtype == torch.float32)
    assert cut.tokens == block, "blocks of picks have a size that kernels are compiled for"
    _launch(cut, _row_tiles(weight, cut) * blocks, x, weight, bias, out, picks)


def expanded(weight: PackedCodes, first: int, count: int) -> Tensor:
    """Some tiles of a weight in bfloat16 [rows, depth]; of a gated one the gate rows, then the up rows."""
    of_tile = SIDE // 2 if weight.gated else SIDE
    rows = min(count * of_tile, weight.outputs - first * of_tile) * (2 if weight.gated else 1)
    return _expanded(weight, first, count, range(1), rows)[0]


def expanded_experts(weight: PackedCodes, some: range) -> Tensor:
    """The weights of some experts in bfloat16 [experts, rows, depth]."""
    return _expanded(weight, 0, weight.tiles, some, weight.rows)


def _expanded(weight: PackedCodes, first: int, count: int, some: range, rows: int) -> Tensor:
    cut = _cut(weight, COLUMNS[0], "swiglu" if weight.gated else None, experts=weight.experts is not None)
    device = weight.words.device
    kernel = _kernel(cut, "expand", device.index)
    assert kernel is not None, "pack has compiled it"
    out = torch.empty(len(some), rows, weight.depth, dtype=torch.bfloat16, device=device)
    programs = -(-len(some) * count * (weight.depth // SIDE) // (cut.threads // 32))
    codes = (weight.words, weight.scales, weight.zeros, weight.factors)
    tensors = (*(None if each is None else each[some.start :] for each in codes), out)
    numbers = (first, count, len(some), weight.outputs, weight.depth, weight.tiles)
    kernel.launch(programs, (), *map(_at, tensors), *map(ctypes.c_int, numbers))
    return out
