"""Products of up to 192 tokens with bfloat16 weights on Hopper: `source/product.cu`.

`product` returns None where the kernel does not apply or is not faster: other GPUs and types, small or very
tall weights, one token by a tall weight, a machine without NVRTC, or CUDA kernels switched off.
`takes_products` says whether a device has the kernel at all. Same results as `kernels/torch/linear.py`.
Called by `kernels/triton/linear.py`, `takes_products` through `holdfast.kernels`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch

from holdfast.kernels.cuda.driver import (
    HOPPER,
    Kernel,
    Machine,
    Map,
    compile_source,
    falling_back_to,
    index_of,
    machine_of,
    map_of,
)
from holdfast.kernels.torch.activation import Activation

SOURCE, PROJECTION = HOPPER.with_name("product.cu"), HOPPER.with_name("projection.cu")

TOKENS_MOST = 192
"""With more tokens a product is bound by the tensor cores, and cuBLAS is faster."""

ROWS_LEAST = 48
ROWS_MOST = {1: 256, 2: 256, 3: 192}
"""Weight rows per program: fewer do not pay for a ring of stages, more do not fit the registers."""

SPLIT_BELOW = 64
"""Rows below which two programs share a tile (split-K): x is then fetched half as often."""

LOW_BLOCKS, LOW_ROWS = 3, 96
"""Token blocks that one warp group takes where a tile of few rows is shared: three groups are slower."""

TRANSPOSED_ROWS = 64
"""Rows of a shared tile that are the first operand of the instruction (transposed), all tokens the second."""

DEPTH = 64
DEPTH_LEAST = 1024
STAGES_MOST = 8
STAGES_LEAST = 3
BARRIER_BYTES = 16
ALIGNMENT = 1024

ACTIVATIONS: dict[Activation | None, int] = {
    None: 0,
    "swiglu": 1,
    "geglu": 2,
    "swiglu_clamped": 3,
    "relu_squared": 4,
}
PLAIN = (None, "relu_squared")


class Cut(NamedTuple):
    """The tiling of a product: warp groups, 64-token blocks per group, weight rows per program, splits of the
    depth, stages, and whether the weight is the first operand (transposed).
    """

    groups: int
    blocks: int
    rows: int
    splits: int
    stages: int
    transposed: bool = False

    @property
    def tokens(self) -> int:
        return 64 * self.groups * self.blocks

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage: 64 columns of the tokens and of the rows."""
        return (self.tokens + self.rows) * DEPTH * 2

    @property
    def shared(self) -> int:
        return ALIGNMENT + self.stages * (self.stage_bytes + BARRIER_BYTES)


def cut_of(tokens: int, outputs: int, depth: int, gated: bool, machine: Machine) -> Cut | None:
    """One wave of programs over all outputs; None where cuBLAS is faster."""
    if not 0 < tokens <= TOKENS_MOST or depth < DEPTH_LEAST or depth % DEPTH or outputs % 8:
        return None
    groups, blocks = -(-tokens // 64), 1
    splits, rows = 1, _rows(outputs, machine.processors, gated)
    if rows < SPLIT_BELOW:
        splits, rows = 2, _rows(outputs, machine.processors // 2, gated)
    if not ROWS_LEAST <= rows <= ROWS_MOST[groups] or (tokens == 1 and splits == 1):
        return None
    transposed = splits > 1 and rows == TRANSPOSED_ROWS and groups > 1
    if transposed or (splits > 1 and groups == LOW_BLOCKS and rows <= LOW_ROWS):
        groups, blocks = 1, groups
    cut = Cut(groups, blocks, rows, splits, 0, transposed)
    stages = min(STAGES_MOST, (machine.shared_memory - ALIGNMENT) // (cut.stage_bytes + BARRIER_BYTES))
    return cut._replace(stages=stages) if stages >= STAGES_LEAST else None


def _rows(outputs: int, programs: int, gated: bool) -> int:
    """Weight rows per program: a multiple of eight, of each half of a gated weight."""
    return (16 if gated else 8) * -(-outputs // (8 * programs))


def source_of(cut: Cut, activation: Activation | None) -> str:
    """The source of a tiling: its constants, its instruction and the files."""
    columns = cut.tokens if cut.transposed else cut.rows
    sums = columns // 2
    listed = ", ".join(f"%{index}" for index in range(sums))
    bound = ", ".join(f'"+f"(d[{index}])' for index in range(sums))
    given = {
        "GROUPS": cut.groups,
        "BLOCKS": cut.blocks,
        "ROWS": cut.rows,
        "SPLITS": cut.splits,
        "TURNED": int(cut.transposed),
        "STAGES": cut.stages,
        "ACTIVATION": ACTIVATIONS[activation],
    }
    return "\n".join(
        (
            HOPPER.read_text(encoding="utf-8"),
            *(f"#define {name} {value}" for name, value in given.items()),
            f"__device__ __forceinline__ void multiply(float (&d)[{sums}], u64 a, u64 b, int add) {{",
            f'asm volatile("{{.reg .pred p; setp.ne.b32 p, %{sums + 2}, 0; "',
            f'"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "',
            f'"{{{listed}}}, %{sums}, %{sums + 1}, p, 1, 1, 0, 0;}}"',
            f': {bound} : "l"(a), "l"(b), "r"(add)); }}',
            PROJECTION.read_text(encoding="utf-8"),
            SOURCE.read_text(encoding="utf-8"),
        )
    )


def takes_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device has this kernel for products of few tokens."""
    return dtype == torch.bfloat16 and machine_of(index_of(device)) is not None


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The product and its activation, in `out` if given, or None where another kernel runs."""
    if x.dtype != torch.bfloat16 or not (readable(x) and readable(weight)):
        return None
    machine = machine_of(x.device.index)
    if machine is None:
        return None
    gated = activation not in PLAIN
    tokens, depth = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    cut = cut_of(tokens, outputs, depth, gated, machine)
    kernel = None if cut is None else _kernel(cut, activation, x.device.index)
    if cut is None or kernel is None:
        return None
    tile = cut.rows // 2 if gated else cut.rows
    tiles = map_of(weight.data_ptr(), (depth, weight.shape[0]), (weight.stride(0),), (DEPTH, tile))
    return launch_product(kernel, -(-outputs // tile) * cut.splits, x, outputs, bias, maps=(tiles,), out=out)


def launch_product(
    kernel: Kernel,
    programs: int,
    x: torch.Tensor,
    outputs: int,
    bias: torch.Tensor | None,
    maps: tuple[Map, ...] = (),
    tensors: tuple[torch.Tensor, ...] = (),
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch a product kernel on x; the weight is behind `maps` or in `tensors`."""
    tokens, depth = x.shape
    if out is None:
        out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    seen = 8 * -(-tokens // 8)
    kernel.launch(
        programs,
        (map_of(x.data_ptr(), (depth, tokens), (x.stride(0),), (DEPTH, seen)), *maps),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
        ctypes.c_void_p(None if bias is None else bias.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int(tokens),
        ctypes.c_int(outputs),
        ctypes.c_int(depth),
        ctypes.c_int(seen * DEPTH * 2),
    )
    return out


def readable(x: torch.Tensor) -> bool:
    """Whether the copy engine can read it: unit stride along the rows, aligned to 16 bytes."""
    return (
        x.dim() == 2
        and x.dtype == torch.bfloat16
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
    )


@cache
def _kernel(cut: Cut, activation: Activation | None, index: int) -> Kernel | None:
    """The kernel of a tiling on a device, or None where it is unavailable; the reason is logged."""
    with falling_back_to("Triton or cuBLAS"):
        image = compile_source(source_of(cut, activation))
        with torch.cuda.device(index):
            return Kernel(image, "product", 128 * cut.groups + 32, cut.shared, cut.splits)
    return None
