"""Products of few tokens with tall weights packed to 12 bits, on Hopper: `source/twelve.cu`.

Products of few tokens are bound by reading weights. Eight of the sixteen bits of a bfloat16 weight are its
exponent, and nearly all weights of a row lie within sixteen exponents of the row's maximum: `pack_weight`
stores sign, mantissa and a 4-bit exponent offset, and a power of two per row. Such weights are exact; smaller
ones are rounded to the smallest magnitude, 2^-15 of the row's power (zeros get alternating signs, so that
runs of zeros sum to zero). A weight that this would change too much is not packed.

The dense weight stays for larger steps. `product` returns None where the kernel does not apply. Same results
as `kernels/torch/linear.py`. Called by `kernels/triton/linear.py`, `pack_weight` and `packed_size` through
`holdfast.kernels`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from holdfast.kernels.cuda.driver import (
    HOPPER,
    Kernel,
    Machine,
    compile_source,
    falling_back_to,
    index_of,
    machine_of,
)
from holdfast.kernels.cuda.products import (
    ACTIVATIONS,
    ALIGNMENT,
    BARRIER_BYTES,
    DEPTH_LEAST,
    PLAIN,
    PROJECTION,
    launch_product,
    readable,
)
from holdfast.kernels.torch.activation import Activation

SOURCE = HOPPER.with_name("twelve.cu")

COLUMNS = (8, 16, 32, 64, 96)
"""Token counts that kernels are compiled for. From 128 tokens on, unpacking costs as much time and energy as
the smaller reads save.
"""

DEPTH = 64
SLAB_ROWS = 16
SLAB_BYTES = SLAB_ROWS * DEPTH * 3 // 2

SLABS_LEAST = 8
"""Fewest slabs of a tile: each program fetches all of x, which is too much for a lower tile."""

SLABS_MOST, SLABS_MOST_IN_TURNS = 16, 12
GROUP_SLABS = 4
GROUPS_LEAN, COLUMNS_LEAN = 4, 64
"""From GROUPS_LEAN warp groups on, sums fit the registers only up to COLUMNS_LEAN tokens."""

STAGES_MOST = 16
STAGES_LEAST = 3

EXPONENTS = 15
"""Largest exponent distance to the row's maximum."""

TINY = 2.0**-126
PACKED_AT_ONCE = 1 << 25
ERROR_MOST = 2.0**-13
"""Largest error of packing relative to a row's norm: a ninth of the rounding error of bfloat16."""


class Tiling(NamedTuple):
    """The tiling of a weight: slabs of 16 rows per tile; `looped`: a program takes several tiles in turn."""

    slabs: int
    looped: bool = False

    def tiles(self, rows: int) -> int:
        return -(-rows // (SLAB_ROWS * self.slabs))


class Cut(NamedTuple):
    """The tiling of a kernel: warp groups, slabs of a tile, tokens, stages, and whether tiles are looped."""

    groups: int
    slabs: int
    columns: int
    stages: int
    looped: bool = False

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage: 64 columns of the tokens and of the tile."""
        return self.columns * DEPTH * 2 + -(-self.slabs * SLAB_BYTES // 1024) * 1024

    @property
    def fixed_bytes(self) -> int:
        """Shared memory beside the ring: barriers, and in a loop the sums of the previous tile."""
        sums = 1024 + self.columns * (SLAB_ROWS * self.slabs + 4) * 4
        return ALIGNMENT + STAGES_MOST * BARRIER_BYTES + (sums if self.looped else 0)

    @property
    def shared(self) -> int:
        return self.fixed_bytes + self.stages * self.stage_bytes

    @property
    def threads(self) -> int:
        """From three groups on the producer is a whole warp group, which can give its registers away."""
        return 128 * self.groups + (128 if self.groups >= 3 else 32)


@dataclass(frozen=True, slots=True)
class TwelveBits:
    """A weight [rows, depth] packed to 12 bits, tile by tile, and the power of two of each row."""

    words: torch.Tensor
    scale: torch.Tensor
    rows: int
    depth: int
    gated: bool
    tiling: Tiling

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scale.nbytes


def tiling_of(rows: int, depth: int, gated: bool, machine: Machine) -> Tiling | None:
    """One wave of programs over all rows, or several; None where the kernel does not apply."""
    if rows % (16 if gated else 8) or depth % DEPTH or depth < DEPTH_LEAST:
        return None
    slabs, looped = -(-rows // (SLAB_ROWS * machine.processors)), False
    if slabs > SLABS_MOST:
        waves = -(-slabs // SLABS_MOST_IN_TURNS)
        slabs, looped = -(-rows // (SLAB_ROWS * machine.processors * waves)), True
    return Tiling(slabs, looped) if slabs >= SLABS_LEAST else None


def cut_of(tokens: int, tiling: Tiling, machine: Machine) -> Cut | None:
    """The kernel for this many tokens; None where there is none."""
    columns = next((each for each in COLUMNS if each >= tokens), None)
    groups = -(-tiling.slabs // GROUP_SLABS)
    if columns is None or not tokens or (groups >= GROUPS_LEAN and columns > COLUMNS_LEAN):
        return None
    cut = Cut(groups, tiling.slabs, columns, 0, tiling.looped)
    stages = min(STAGES_MOST, (machine.shared_memory - cut.fixed_bytes) // cut.stage_bytes)
    return cut._replace(stages=stages) if stages >= STAGES_LEAST else None


def _tiling_on(weight: torch.Tensor, gated: bool) -> Tiling | None:
    """The tiling of a weight on its device; None where the device has no kernel for it."""
    machine = machine_of(index_of(weight.device))
    if machine is None or weight.dtype != torch.bfloat16:
        return None
    rows, depth = weight.shape
    return tiling_of(rows, depth, gated, machine)


def packed_size(weight: torch.Tensor, gated: bool) -> int:
    """Bytes of a weight packed to 12 bits; 0 where its device has no kernel for it."""
    tiling = _tiling_on(weight, gated)
    if tiling is None:
        return 0
    rows, depth = weight.shape
    return tiling.tiles(rows) * tiling.slabs * SLAB_BYTES * (depth // DEPTH) + 4 * rows


def pack_weight(weight: torch.Tensor, gated: bool) -> TwelveBits | None:
    """The packed weight; None where its device has no kernel for it, or packing would change it too much."""
    tiling = _tiling_on(weight, gated)
    return None if tiling is None else pack(weight, gated, tiling)


def pack(weight: torch.Tensor, gated: bool, tiling: Tiling) -> TwelveBits | None:
    """The packed weight, or None where packing would change it too much."""
    rows, depth = weight.shape
    tiles, tall = tiling.tiles(rows), SLAB_ROWS * tiling.slabs
    words = torch.empty((tiles, depth // DEPTH, tiling.slabs, 4, 96), dtype=torch.int32, device=weight.device)
    scale = torch.zeros(rows, dtype=torch.float32, device=weight.device)
    at_once = max(1, PACKED_AT_ONCE // (tall * depth))
    for first in range(0, tiles, at_once):
        picked = _rows_of(range(first, min(first + at_once, tiles)), rows, gated, tall, weight.device)
        codes, powers, good = _codes(weight[picked.clamp(max=rows - 1)])
        if not good:
            return None
        inside = picked < rows
        scale[picked[inside]] = powers[inside]
        words[first : first + at_once] = _words(codes, tiling.slabs)
    return TwelveBits(words, scale, rows, depth, gated, tiling)


def _rows_of(tiles: range, rows: int, gated: bool, tall: int, device: torch.device) -> torch.Tensor:
    """The weight rows of some tiles, slab by slab; `rows` marks padding."""
    at = torch.arange(tiles.start * tall, tiles.stop * tall, device=device)
    if not gated:
        return at.clamp(max=rows)
    output = at // SLAB_ROWS * 8 + at % 8
    return torch.where(output < rows // 2, output + (at % SLAB_ROWS >= 8) * (rows // 2), rows)


def _codes(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """(12-bit codes, power of two per row, whether the error is small enough).

    Codes are 16-bit: the four bits between sign and offset are the same for all weights and left zero.
    """
    bits = part.view(torch.int16).to(torch.int32) & 0xFFFF
    exponent = bits >> 7 & 0xFF
    largest = exponent.amax(dim=1, keepdim=True)
    distance = exponent - (largest - EXPONENTS)
    small = distance < 0
    signs = torch.arange(bits.shape[1], dtype=bits.dtype, device=bits.device) % 2 << 15
    signs = torch.where(bits & 0x7FFF == 0, signs, bits & 0x8000)
    codes = torch.where(small, signs, bits & 0x807F | distance << 7)
    # A row of zeros has power 0, so its products are 0.
    powers = torch.where(largest > 0, torch.exp2(largest.float() - 127), 0.0)
    lost = torch.where(small, part.float().abs() - powers * 2.0**-EXPONENTS, 0.0) / powers.clamp(min=TINY)
    length = (part.float() / powers.clamp(min=TINY)).norm(dim=1)
    return codes, powers.squeeze(1), bool((lost.norm(dim=1) <= ERROR_MOST * length).all())


def _words(codes: torch.Tensor, slabs: int) -> torch.Tensor:
    """Words [tiles, blocks of 64 columns, slabs, 4, 96]: per 16 columns 64 words of low bytes, 32 of high
    bits.

    A lane has two rows eight apart, and two adjacent columns of every eight.
    """
    parts = codes.view(-1, slabs, 2, 8, codes.shape[1] // DEPTH, 4, 2, 4, 2)
    # [tile, block, slab, step of 16, row of eight, pair of columns, eight columns, half, neighbour]
    lanes = parts.permute(0, 4, 1, 5, 3, 7, 6, 2, 8).flatten(4, 5).flatten(5, 6)
    lows = lanes[..., 0] & 0xFF | (lanes[..., 1] & 0xFF) << 8
    pairs = lanes[..., 0] & 0xFF00 | (lanes[..., 1] & 0xFF00) << 16
    highs = torch.zeros_like(pairs[..., 0])
    for pair in range(4):
        highs |= _rotated(pairs[..., pair], -4 * pair % 32)
    return torch.cat(((lows[..., 0::2] | lows[..., 1::2] << 16).flatten(-2), highs), dim=-1)


def _rotated(word: torch.Tensor, by: int) -> torch.Tensor:
    """A 32-bit word rotated left."""
    wide = word.to(torch.int64) & 0xFFFFFFFF
    wide = (wide << by | wide >> (32 - by)) & 0xFFFFFFFF
    return torch.where(wide >= 1 << 31, wide - (1 << 32), wide).to(torch.int32)


def unpack(packed: TwelveBits) -> torch.Tensor:
    """The weight as the kernel unpacks it, step by step; the reference for tests."""
    tiles, blocks, slabs = packed.words.shape[:3]
    lows = packed.words[..., :64].unflatten(-1, (32, 2)).to(torch.int64) & 0xFFFFFFFF
    highs = packed.words[..., 64:]
    made = []
    for pair in range(4):
        word = lows[..., pair // 2] >> 16 * (pair % 2)
        spread = word & 0xFF | (word & 0xFF00) << 8 | 0x38003800
        value = (_rotated(highs, 4 * pair).to(torch.int64) & 0x87008700) | spread
        made.append(torch.stack((value & 0xFFFF, value >> 16 & 0xFFFF), dim=-1))
    lanes = torch.stack(made, dim=-2).unflatten(4, (8, 4)).unflatten(-2, (2, 2))
    # [tile, block, slab, step, row, pair of columns, eight columns, half, neighbour]
    order = lanes.permute(0, 2, 7, 4, 1, 3, 6, 5, 8)
    bits = order.reshape(tiles * slabs * SLAB_ROWS, blocks * DEPTH)
    values = torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.bfloat16).float()
    picked = _rows_of(range(tiles), packed.rows, packed.gated, SLAB_ROWS * slabs, values.device)
    inside = picked < packed.rows
    weight = torch.zeros(packed.rows, packed.depth, device=values.device)
    weight[picked[inside]] = values[inside]
    return weight * packed.scale[:, None]


def source_of(cut: Cut, activation: Activation | None) -> str:
    """The source of a tiling: its constants, its instruction and the files."""
    sums = cut.columns // 2
    listed = ", ".join(f"%{index}" for index in range(sums))
    given_pairs = ", ".join(f"%{sums + index}" for index in range(4))
    bound = ", ".join(f'"+f"(d[{index}])' for index in range(sums))
    given = {
        "GROUPS": cut.groups,
        "SLABS": cut.slabs,
        "COLUMNS": cut.columns,
        "STAGES": cut.stages,
        "LOOPED": int(cut.looped),
        "ACTIVATION": ACTIVATIONS[activation],
    }
    return "\n".join(
        (
            HOPPER.read_text(encoding="utf-8"),
            *(f"#define {name} {value}" for name, value in given.items()),
            "__device__ __forceinline__",
            f"void multiply(float (&d)[{sums}], const u32 (&a)[4], u64 b, int add) {{",
            f'asm volatile("{{.reg .pred p; setp.ne.b32 p, %{sums + 5}, 0; "',
            f'"wgmma.mma_async.sync.aligned.m64n{cut.columns}k16.f32.bf16.bf16 "',
            f'"{{{listed}}}, {{{given_pairs}}}, %{sums + 4}, p, 1, 1, 0;}}"',
            f': {bound} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); }}',
            PROJECTION.read_text(encoding="utf-8"),
            SOURCE.read_text(encoding="utf-8"),
        )
    )


def product(
    x: torch.Tensor,
    weight: TwelveBits,
    bias: torch.Tensor | None,
    activation: Activation | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The product and its activation, in `out` if given, or None where another kernel runs."""
    machine = machine_of(x.device.index)
    gated = activation not in PLAIN
    if machine is None or gated != weight.gated or not readable(x):
        return None
    cut = cut_of(x.shape[0], weight.tiling, machine)
    kernel = None if cut is None else _kernel(cut, activation, x.device.index)
    if cut is None or kernel is None:
        return None
    outputs = weight.rows // 2 if gated else weight.rows
    programs = min(weight.tiling.tiles(weight.rows), machine.processors)
    return launch_product(kernel, programs, x, outputs, bias, tensors=(weight.words, weight.scale), out=out)


@cache
def _kernel(cut: Cut, activation: Activation | None, index: int) -> Kernel | None:
    """The kernel of a tiling on a device, or None where it is unavailable; the reason is logged."""
    machine = machine_of(index)
    assert machine is not None
    with falling_back_to("the dense weight"):
        image = _images(Tiling(cut.slabs, cut.looped), activation, machine)[cut.columns]
        with torch.cuda.device(index):
            return Kernel(image, "product", cut.threads, cut.shared, 1)
    return None


@cache
def _images(tiling: Tiling, activation: Activation | None, machine: Machine) -> dict[int, bytes]:
    """The kernels for all token counts, compiled in parallel: decoding soon needs them all."""
    cuts = [cut for cut in (cut_of(columns, tiling, machine) for columns in COLUMNS) if cut is not None]
    with ThreadPoolExecutor(len(cuts)) as pool:
        images = pool.map(lambda cut: compile_source(source_of(cut, activation)), cuts)
        return dict(zip((cut.columns for cut in cuts), images, strict=True))
