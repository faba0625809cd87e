"""Products with weights of 4 and 8 bits on Hopper: `source/codes.cu`.

`pack` arranges a quantised weight for the kernels, in place of its codes (`packing`). `product` takes up to
64 tokens; for more `expanded` has the weight in bfloat16, some rows at a time. `expert_product` takes one of
the two products of a mixture of experts, `expanded_experts` has the weights of some. `pack` returns None
where the kernels do not apply: other GPUs and shapes, a machine without NVRTC, or CUDA kernels switched off.
Same results as `kernels/torch/quantised.py`. Called by `kernels/triton/codes.py` and `holdfast.kernels`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.cuda import wide
from holdfast.kernels.cuda.driver import (
    HOPPER,
    Kernel,
    compile_source,
    falling_back_to,
    index_of,
    machine_of,
)
from holdfast.kernels.cuda.packing import SIDE, SLAB, Form, PackedCodes, arranged, packable
from holdfast.kernels.cuda.products import ACTIVATIONS, PLAIN, PROJECTION, readable
from holdfast.kernels.cuda.wide import WideCut
from holdfast.kernels.quantised import QuantisedWeight
from holdfast.kernels.torch.activation import Activation

SOURCE, FEW, STREAM, PICKS = (
    HOPPER.with_name(name) for name in ("codes.cu", "codes_few.cu", "codes_stream.cu", "codes_picks.cu")
)

EXPAND = "expand"
"""The kernel that every source has."""
COLUMNS = (8, 16, 32, 64)
"""Token counts that kernels are compiled for."""
FEW_TOKENS = COLUMNS[-1]
NARROW = 16
"""Most tokens of the kernel in which a program takes all columns of its rows."""
LARGE, LARGE_NARROW = 1 << 25, 8
"""Elements of weights from which on it is faster with so many tokens at most."""
EXPANDED_AT_ONCE = 1 << 26
"""Most elements that are dequantised at once."""


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


NARROW_SHAPES = {8: Shape(1, 8, 2), 16: Shape(1, 8, 2)}
"""By tokens. More rows share their inputs, more columns split the depth."""
PICKS_SHAPES = {8: Shape(1, 4, 4), 16: Shape(1, 4, 3), 32: Shape(2, 4, 1), 64: Shape(2, 4, 1)}
"""By the picks of a block: an expert's weights are small."""
STREAM_PICKS = 32
"""Most picks of a step for which programs take tile after tile: most of its time is beginning and ending."""
STREAM_SHAPE = Shape(1, 8, 2)
"""Beside the warp that fetches."""
STREAM_BYTES = 112 << 10
"""Shared memory of such a program, so that a multiprocessor runs two."""
STREAM_SUMS = 2
"""Tiles whose sums lie apart in it."""
PLACES_MOST = 8
"""Of a ring, as in the source."""
BARRIERS_BYTES, PADDING = 16 * PLACES_MOST, 128


class Cut(NamedTuple):
    """The compile-time parameters of a kernel for few tokens, or for the picks of experts."""

    form: Form
    tokens: int
    activation: Activation | None
    experts: bool = False
    shared: bool = False
    """Whether outputs are multiplied by the shares of their picks, in float32."""
    streams: bool = False
    """Whether one warp of a program fetches for the others, tile after tile."""

    @property
    def cluster(self) -> int:
        return 1

    @property
    def name(self) -> str:
        if self.streams:
            return "stream"
        return "narrow" if self.tokens <= NARROW else "picks"

    @property
    def source(self) -> Path:
        return {"stream": STREAM, "narrow": FEW, "picks": PICKS}[self.name]

    @property
    def shape(self) -> Shape:
        if self.streams:
            return STREAM_SHAPE
        return (PICKS_SHAPES if self.experts else NARROW_SHAPES)[self.tokens]

    @property
    def warps(self) -> int:
        """Those that multiply."""
        return self.shape.row_warps * self.shape.depth_warps

    @property
    def threads(self) -> int:
        return 32 * (self.warps + self.streams)

    @property
    def slabs(self) -> int:
        """Those of a tile, but for many picks."""
        return 2 if self.activation not in PLAIN or self.tokens > COLUMNS[0] else 1

    @property
    def _sum_bytes(self) -> int:
        """Bytes of the sums of all warps of a tile, but for many picks."""
        return self.warps * self.tokens * (SLAB * self.slabs + 4) * 4

    @property
    def room(self) -> int:
        """Bytes of the ring of `stream`."""
        return STREAM_BYTES - STREAM_SUMS * self._sum_bytes - BARRIERS_BYTES - PADDING

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: inputs of some units, and sums, which `narrow` has in their place."""
        if self.streams:
            return STREAM_BYTES
        rows, depth, _ = self.shape
        if self.name == "narrow":
            ahead = 8 // (self.slabs * self.form.pieces)
            return max(depth * self.tokens * ahead * SIDE * 2, self._sum_bytes)
        inputs = depth * 2 * self.tokens * (72 if self.tokens > 32 else 96) * 2
        return inputs + depth * self.tokens * (SIDE * rows + 4) * 4

    def tiles(self, weight: PackedCodes) -> int:
        """Those that share the rows of a weight."""
        rows = SIDE * self.shape.row_warps if self.name == "picks" else SLAB * self.slabs
        return -(-weight.outputs // (rows // 2 if weight.gated else rows))


def columns_of(tokens: int) -> int:
    """The token count of the kernel that takes so many."""
    return next(each for each in COLUMNS if each >= tokens)


def pack(weight: QuantisedWeight, *, gated: bool = False) -> PackedCodes | None:
    """The weight for the kernels on its device; None where they do not apply."""
    index = index_of(weight.codes.device)
    if machine_of(index) is None or not packable(weight, gated=gated):
        return None
    cut = _expanding(Form.of(weight), gated=gated, experts=weight.codes.dim() == 3)
    return None if _kernel(cut, cut.name, index) is None else arranged(weight, gated=gated)


def cut_of(weight: PackedCodes, tokens: int, activation: Activation | None, processors: int) -> Cut | WideCut:
    """The kernel of a product, not of experts."""
    form, columns = Form.of(weight), columns_of(tokens)
    large = weight.rows * weight.depth >= LARGE
    if tokens <= (LARGE_NARROW if large else NARROW):
        return Cut(form, columns, activation)
    return WideCut(form, columns, activation, wide.tiling_of(weight.tiles, weight.depth, processors))


def source_of(cut: Cut | WideCut) -> str:
    """The source of a kernel: its constants and the files."""
    given = {**cut.form.constants, "TOKENS": cut.tokens, "ACTIVATION": ACTIVATIONS[cut.activation]}
    if isinstance(cut, WideCut):
        given |= {"ROW_WARPS": cut.threads // 32, "K_WARPS": 1, "BESIDE": 1, "EXPERTS": 0, "SHARED": 0}
        given |= cut.constants
        last, before = wide.SOURCE, cut.instruction
    else:
        rows, depth, beside = cut.shape
        given |= {"ROW_WARPS": rows, "K_WARPS": depth, "BESIDE": beside}
        given |= {"EXPERTS": int(cut.experts), "SHARED": int(cut.shared), "ROOM": cut.room}
        last, before = cut.source, ""
    defined = "\n".join(f"#define {name} {value}" for name, value in given.items())
    *files, kernel = (path.read_text(encoding="utf-8") for path in (PROJECTION, SOURCE, last))
    return "\n".join((HOPPER.read_text(encoding="utf-8"), defined, *files, before, kernel))


@cache
def _kernel(cut: Cut | WideCut, name: str, index: int | None) -> Kernel | None:
    """A kernel on a device, or None where it is unavailable; the reason is logged."""
    with falling_back_to("Triton"):
        image = compile_source(source_of(cut))
        with torch.cuda.device(index):
            if name == EXPAND:
                assert isinstance(cut, Cut)
                return Kernel(image, name, 32 * cut.warps, 0, 1)
            return Kernel(image, name, cut.threads, cut.shared_bytes, cut.cluster)
    return None


def _compiled(cut: Cut | WideCut, device: torch.device) -> Kernel:
    kernel = _kernel(cut, cut.name, device.index)
    if kernel is None:
        raise RuntimeError("a CUDA kernel of quantised weights could not be compiled; the log says why")
    return kernel


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _launch(
    cut: Cut,
    tiles: int,
    x: Tensor,
    weight: PackedCodes,
    bias: Tensor | None,
    out: Tensor,
    picks: SortedPicks | None = None,
) -> None:
    order, block_expert, shares, divide = (None, None, None, 1) if picks is None else picks
    codes = (weight.words, weight.scales, weight.zeros, weight.factors)
    tensors = (x, *codes, bias, out, order, block_expert, shares)
    tokens = x.shape[0] if picks is None else picks.shares.numel()
    numbers = [tokens, weight.outputs, weight.depth, x.stride(0), divide, weight.tiles]
    programs = tiles
    if cut.streams:
        machine = machine_of(x.device.index)
        assert machine is not None
        programs = min(tiles, machine.processors * cut.shape.beside)
        numbers.append(tiles)
    kernel = _compiled(cut, x.device)
    kernel.launch(programs, (), *map(_at, tensors), *map(ctypes.c_int, numbers))


def _launch_wide(cut: WideCut, x: Tensor, weight: PackedCodes, bias: Tensor | None, out: Tensor) -> None:
    tensors = (x, weight.factors, bias, out)
    numbers = (x.shape[0], weight.outputs, weight.depth, x.stride(0))
    kernel = _compiled(cut, x.device)
    programs, maps = cut.programs(weight), cut.maps(weight)
    kernel.launch(programs, maps, *map(_at, tensors), *map(ctypes.c_int, numbers))


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
    cut = cut_of(weight, tokens, activation, machine.processors)
    if isinstance(cut, WideCut):
        _launch_wide(cut, x, weight, bias, out)
    else:
        _launch(cut, cut.tiles(weight), x, weight, bias, out)
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
    assert block in COLUMNS, "blocks of picks have a size that kernels are compiled for"
    streams = block == COLUMNS[0] and picks.shares.numel() <= STREAM_PICKS
    shared = out.dtype == torch.float32
    cut = Cut(Form.of(weight), block, activation, experts=True, shared=shared, streams=streams)
    _launch(cut, cut.tiles(weight) * blocks, x, weight, bias, out, picks)


def expanded(weight: PackedCodes, first: int, count: int) -> Tensor:
    """Some tiles of a weight in bfloat16 [rows, depth]; of a gated one the gate rows, then the up rows."""
    of_tile = SIDE // 2 if weight.gated else SIDE
    rows = min(count * of_tile, weight.outputs - first * of_tile) * (2 if weight.gated else 1)
    return _expanded(weight, first, count, range(1), rows)[0]


def expanded_experts(weight: PackedCodes, some: range) -> Tensor:
    """The weights of some experts in bfloat16 [experts, rows, depth]."""
    return _expanded(weight, 0, weight.tiles, some, weight.rows)


def _expanding(form: Form, *, gated: bool, experts: bool) -> Cut:
    """The kernel with which `expand` is compiled."""
    return Cut(form, COLUMNS[0], "swiglu" if gated else None, experts)


def _expanded(weight: PackedCodes, first: int, count: int, some: range, rows: int) -> Tensor:
    cut = _expanding(Form.of(weight), gated=weight.gated, experts=weight.experts is not None)
    device = weight.words.device
    kernel = _kernel(cut, EXPAND, device.index)
    assert kernel is not None, "pack has compiled it"
    out = torch.empty(len(some), rows, weight.depth, dtype=torch.bfloat16, device=device)
    programs = -(-len(some) * count * (weight.depth // SIDE) // cut.warps)
    codes = (weight.words, weight.scales, weight.zeros, weight.factors)
    tensors = (*(None if each is None else each[some.start :] for each in codes), out)
    numbers = (first, count, len(some), weight.outputs, weight.depth, weight.tiles)
    kernel.launch(programs, (), *map(_at, tensors), *map(ctypes.c_int, numbers))
    return out
