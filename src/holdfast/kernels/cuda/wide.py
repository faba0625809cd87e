"""Products of more than a few tokens with packed weights of 4 and 8 bits: `source/codes_wide.cu`.

A program's tiling depends on the weight's shape: rows share the inputs, and a cluster of programs that split
the depth shares rows. Used by `codes`, which compiles and launches.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from holdfast.kernels.cuda.driver import HOPPER, NO_SWIZZLE, Map, map_of
from holdfast.kernels.cuda.packing import SIDE, SLAB, Form, PackedCodes
from holdfast.kernels.torch.activation import Activation

SOURCE = HOPPER.with_name("codes_wide.cu")


class Tiling(NamedTuple):
    """Warp groups of a program, blocks of 64 rows of each, and programs that split the depth."""

    groups: int
    stacked: int
    splits: int


SPLITS = (1, 2, 4, 8)
TILINGS = (
    *(Tiling(groups, 1, splits) for groups in (2, 3, 4) for splits in SPLITS),
    *(Tiling(groups, 2, splits) for groups in (2, 3) for splits in SPLITS),
)
"""Those that fit the registers."""

# As measured on an H200, whose 132 multiprocessors run fewer programs if these form clusters.
H200_PROCESSORS = 132
RUN_AT_ONCE = {1: 132, 2: 132, 4: 112, 8: 96}
"""Programs that run at a time, by the programs of a cluster."""
BEGINNING, OF_PAIR, OF_BRICK = 5.0, 0.17, 0.0325
"""Microseconds of a program, of each pair of blocks of columns, and of each slab in one of them."""

TOGETHER, KEPT = 2, 3
"""Blocks of columns that arrive together, and of how many arrivals inputs are kept, as in the source."""
RINGS = (6, 5, 4, 3, 2)
"""Of how many arrivals there may be room for the weight."""
SHARED_MOST = 227 << 10
"""Bytes of shared memory that a program may have."""
ALIGNMENT = 1024
BOX = 128
"""The copy engine brings multiples of these bytes."""
BRICK = 512
"""Bytes of the 4-bit codes of a slab in a block of columns."""
SCALE_BYTES = (2, 2, 4, 1)
"""By the number of a type in `Form.scales`."""
BARRIER_BYTES = 8


@lru_cache
def tiling_of(tiles: int, depth: int, processors: int) -> Tiling:
    """The fastest tiling of a weight of so many blocks of 64 rows, by the times of its parts."""
    pairs = -(-depth // (TOGETHER * SIDE))

    def microseconds(each: Tiling) -> float:
        stacks = each.groups * each.stacked
        programs = -(-tiles // stacks) * each.splits
        waves = math.ceil(programs * H200_PROCESSORS / (processors * RUN_AT_ONCE[each.splits]))
        of_pair = OF_PAIR + OF_BRICK * TOGETHER * (SIDE // SLAB) * stacks
        return waves * (BEGINNING + -(-pairs // each.splits) * of_pair)

    return min((each for each in TILINGS if each.splits <= pairs), key=microseconds)


class WideCut(NamedTuple):
    """The compile-time parameters of the kernel."""

    form: Form
    tokens: int
    activation: Activation | None
    tiling: Tiling

    @property
    def name(self) -> str:
        return "wide"

    @property
    def threads(self) -> int:
        return 128 * self.tiling.groups

    @property
    def cluster(self) -> int:
        return self.tiling.splits

    @property
    def slabs(self) -> int:
        """Those of a program."""
        return SIDE // SLAB * self.tiling.groups * self.tiling.stacked

    @property
    def runs(self) -> int:
        """Runs of scales that arrive together."""
        return 1 if self.form.group % (TOGETHER * SIDE) == 0 else TOGETHER

    @property
    def run_bytes(self) -> tuple[int, int]:
        """Bytes of a run of scales of a slab, and of its zero points."""
        parts = max(1, SIDE // self.form.group)
        return SLAB * parts * SCALE_BYTES[self.form.scales], SLAB * parts if self.form.zeros else 0

    @property
    def ring(self) -> int:
        """Of how many arrivals there is room for the weight."""
        return next(ring for ring in RINGS if self._shared_bytes(ring) <= SHARED_MOST)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: inputs and the ring, later the sums."""
        return self._shared_bytes(self.ring)

    def _shared_bytes(self, ring: int) -> int:
        sizes = (TOGETHER * BRICK * self.form.pieces, *(self.runs * each for each in self.run_bytes))
        place = sum(size * self._in_box(size) for size in sizes if size)
        inputs = KEPT * TOGETHER * self.tokens * SIDE * 2
        sums = self.tokens * (SLAB * self.slabs + 4) * 4
        return ALIGNMENT + max(inputs + ring * (place + BARRIER_BYTES), sums)

    def _in_box(self, size: int) -> int:
        """The slabs of a box, of so many bytes each: the program's, and more if that is too few bytes."""
        return -(-self.slabs * size // BOX) * BOX // size

    @property
    def constants(self) -> dict[str, int]:
        """Those of this source alone."""
        groups, stacked, splits = self.tiling
        return {"WARP_GROUPS": groups, "STACKED": stacked, "SPLITS": splits, "RING": self.ring}

    @property
    def instruction(self) -> str:
        """`multiply_all`: it adds 16 columns of 64 rows by all tokens to the sums, or begins them."""
        sums = self.tokens // 2
        listed = ", ".join(f"%{index}" for index in range(sums))
        operands = ", ".join(f"%{sums + index}" for index in range(4))
        bound = ", ".join(f'"+f"(d[{index}])' for index in range(sums))
        return "\n".join(
            (
                f"__device__ __forceinline__ void multiply_all(float (&d)[{sums}], const u32 (&a)[4], u64 b,",
                "                                             int add) {",
                f'asm volatile("{{.reg .pred p; setp.ne.b32 p, %{sums + 5}, 0; "',
                f'"wgmma.mma_async.sync.aligned.m64n{self.tokens}k16.f32.bf16.bf16 "',
                f'"{{{listed}}}, {{{operands}}}, %{sums + 4}, p, 1, 1, 0;}}"',
                f': {bound} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); }}',
            )
        )

    def programs(self, weight: PackedCodes) -> int:
        """Those of a product."""
        of_program = SLAB * self.slabs // (2 if weight.gated else 1)
        return -(-weight.outputs // of_program) * self.tiling.splits

    def maps(self, weight: PackedCodes) -> tuple[Map, Map, Map]:
        """The codes, scales and zero points as the copy engine reads them: of a program's slabs at once."""
        slabs, blocks, groups = weight.words.shape[1], weight.words.shape[2], weight.scales.shape[2]

        def runs_of(tensor: Tensor, size: int, runs: int, together: int) -> Map:
            elements, box = size // 2, (size // 2, together, self._in_box(size * together))
            strides = (elements, elements * runs)
            return map_of(tensor.data_ptr(), (elements, runs, slabs), strides, box, NO_SWIZZLE)

        codes = runs_of(weight.words, BRICK, blocks * self.form.pieces, TOGETHER * self.form.pieces)
        of_scales, of_zeros = self.run_bytes
        scales = runs_of(weight.scales, of_scales, groups, self.runs)
        zeros = scales if weight.zeros is None else runs_of(weight.zeros, of_zeros, groups, self.runs)
        return codes, scales, zeros
