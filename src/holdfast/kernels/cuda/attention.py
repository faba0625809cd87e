"""Split-K attention over paged bfloat16 KV on Hopper: `source/attention.cu`.

Persistent programs take pieces from a `PieceQueue`, so that the keys of decode rows and of short inputs
beside them are read once, in one launch. Long prefill steps use it too. `takes_queue` says which shapes have
a kernel; all others fall back to Triton. `attend_queue` is called by `kernels/triton/attention.py`, the rest
through `holdfast.kernels`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Protocol

import torch

from holdfast.kernels.batch import KEY_BLOCK, QUEUE_FIELDS, Pages, PieceQueue, queue_lines, queue_room
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

SOURCE, QUEUE = HOPPER.with_name("attention.cu"), HOPPER.with_name("queue.cu")

DIMS = (64, 128)
GROUP_MOST = 16
ROWS = 64
"""Rows of the matrix of a warp group: tokens times query heads that share a key head."""

GROUPS = 2
THREADS = 128 * GROUPS + 128
FETCHED = 16
"""Keys per fetch where a block is not full."""

STAGES_MOST = 12
STAGES_LEAST = 3
ALIGNMENT = 1024
BARRIER_BYTES = 16
LINE_BYTES = 2 * 4 * QUEUE_FIELDS
"""Bytes of the lines of two pieces, kept beside each stage."""

LAST_BYTES = 16
"""Flags: which groups were the last to finish a tile."""


class Staged(Protocol):
    """The shape of a kernel whose blocks of keys pass through a ring of stages in shared memory."""

    def stages(self, machine: Machine) -> int:
        """Stages that fit a program's shared memory."""

    def shared(self, stages: int) -> int:
        """Dynamic shared memory of a launch."""


class Shape(NamedTuple):
    """The compile-time constants of a kernel."""

    dim: int
    group: int
    kv_heads: int
    page_size: int

    @property
    def stage_bytes(self) -> int:
        """Bytes of a block's keys and values."""
        return 2 * KEY_BLOCK * self.dim * 2

    def stages(self, machine: Machine) -> int:
        """Stages (blocks) that fit a program's shared memory."""
        room = machine.shared_memory - ALIGNMENT - LAST_BYTES
        return min(STAGES_MOST, room // (self.stage_bytes + BARRIER_BYTES + LINE_BYTES))

    def shared(self, stages: int) -> int:
        """Dynamic shared memory of a launch; lines and flags are static."""
        return ALIGNMENT + stages * (self.stage_bytes + BARRIER_BYTES)


def tile_tokens(heads: int, kv_heads: int) -> int:
    """Most tokens of a tile."""
    return GROUPS * max(1, ROWS // max(1, heads // kv_heads))


def takes_queue(
    heads: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether a kernel for these shapes is available on the device; compiles it."""
    if dtype != torch.bfloat16 or dim not in DIMS or page_size % FETCHED:
        return False
    if heads % kv_heads or heads // kv_heads > GROUP_MOST:
        return False
    return queue_kernel(Shape(dim, heads // kv_heads, kv_heads, page_size), index_of(device)) is not None


def build_queue(
    tokens: int, rows: int, heads: int, kv_heads: int, dim: int, device: torch.device
) -> PieceQueue:
    """A queue for steps of at most this many tokens and rows, of shapes that `takes_queue` supports."""
    machine = machine_of(index_of(device))
    assert machine is not None, "takes_queue supports this device"
    queries, programs = tile_tokens(heads, kv_heads), machine.processors
    lines = queue_lines(tokens, rows, queries, kv_heads, programs)
    room = queue_room(tokens, queries, kv_heads, programs)

    def counters(*sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=torch.int32, device=device)

    return PieceQueue(
        listed=counters(lines, QUEUE_FIELDS),
        arrived=counters(lines * kv_heads * GROUPS),
        partial=torch.empty(room, heads, dim + 2, dtype=torch.float32, device=device),
        taken=counters(2),
        queries=queries,
        kv_heads=kv_heads,
        programs=programs,
    )


def source_of(shape: Shape, stages: int) -> str:
    """The source of a shape: its constants, instructions and the file."""
    instructions = (_instruction("score", KEY_BLOCK, "add", 0), _instruction("gather", shape.dim, "1", 1))
    return queue_source(shape, stages, *instructions, SOURCE.read_text(encoding="utf-8"))


def queue_source(constants: tuple[int, int, int, int], stages: int, *parts: str) -> str:
    """The source of a kernel that takes pieces from a queue.

    `constants` are the width of a head, the query heads that share one, the key heads, and the page size.
    """
    given = dict(zip(("DIM", "GROUP", "KV_HEADS", "PAGE", "STAGES"), (*constants, stages), strict=True))
    return "\n".join(
        (
            HOPPER.read_text(encoding="utf-8"),
            *(f"#define {name} {value}" for name, value in given.items()),
            QUEUE.read_text(encoding="utf-8"),
            *parts,
            f'static_assert(KEYS == {KEY_BLOCK} && GROUPS == {GROUPS} && FETCHED == {FETCHED}, "Python");',
        )
    )


def _instruction(name: str, columns: int, add: str, transposed: int) -> str:
    """sums[64 x columns] (+)= a[64 x 16] b, a in registers; a transposed b has adjacent columns."""
    sums = columns // 2
    listed = ", ".join(f"%{index}" for index in range(sums))
    bound = ", ".join(f'"+f"(sums[{index}])' for index in range(sums))
    places = ", ".join(f"%{sums + index}" for index in range(4))
    taken = "u32 a0, u32 a1, u32 a2, u32 a3, u64 b" + (", int add" if add == "add" else "")
    return "\n".join(
        (
            f"__device__ __forceinline__ void {name}(float (&sums)[{sums}], {taken}) {{",
            f'asm volatile("{{.reg .pred p; setp.ne.b32 p, %{sums + 5}, 0; "',
            f'"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "',
            f'"{{{listed}}}, {{{places}}}, %{sums + 4}, p, 1, 1, {transposed};}}"',
            f': {bound} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"({add})); }}',
        )
    )


def attend_queue(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    pages: Pages,
    queue: PieceQueue,
    scale: float,
    sinks: torch.Tensor | None,
) -> None:
    """Attention of all tiles of the queue, into `out`; for shapes that `takes_queue` supports."""
    _, heads, dim = query.shape
    kv_heads = key_cache.shape[2]
    assert key_cache.dtype == value_cache.dtype == torch.bfloat16
    arguments = queue_arguments(query, kv_heads, out, pages, queue, scale, sinks)
    kernel = queue_kernel(Shape(dim, heads // kv_heads, kv_heads, pages.page_size), query.device.index)
    assert kernel is not None, "takes_queue supports this shape"
    blocks = (
        *(_blocks(cache, KEY_BLOCK, dim // 64) for cache in (key_cache, value_cache)),
        *(_blocks(cache, FETCHED, 1) for cache in (key_cache, value_cache)),
    )
    kernel.launch(queue.programs, blocks, *arguments)


def queue_arguments(
    query: torch.Tensor,
    kv_heads: int,
    out: torch.Tensor,
    pages: Pages,
    queue: PieceQueue,
    scale: float,
    sinks: torch.Tensor | None,
) -> tuple[ctypes.c_void_p | ctypes.c_int | ctypes.c_float, ...]:
    """The arguments of a kernel after the keys and values; checks that the queue has room for the step."""
    tokens, heads, dim = query.shape
    lines = queue.listed.shape[0]
    assert query.dtype == torch.bfloat16
    assert query.is_contiguous() and out.is_contiguous() and queue.listed.is_contiguous()
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    assert queue.kv_heads == kv_heads and queue.queries == tile_tokens(heads, kv_heads)
    assert queue.arrived.numel() >= lines * kv_heads * GROUPS
    room = queue_room(tokens, queue.queries, kv_heads, queue.programs)
    assert queue.partial.numel() >= room * heads * (dim + 2)
    return (
        ctypes.c_void_p(query.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_void_p(None if sinks is None else sinks.data_ptr()),
        ctypes.c_void_p(pages.table.data_ptr()),
        ctypes.c_void_p(queue.listed.data_ptr()),
        ctypes.c_void_p(queue.arrived.data_ptr()),
        ctypes.c_void_p(queue.partial.data_ptr()),
        ctypes.c_void_p(queue.taken.data_ptr()),
        ctypes.c_int(lines),
        ctypes.c_int(pages.table.stride(0)),
        ctypes.c_float(scale),
    )


def _blocks(cache: torch.Tensor, keys: int, halves: int) -> Map:
    """The tensor map of blocks of `keys` tokens of one head within a page, in halves of 64 columns."""
    units, page_size, kv_heads, dim = cache.shape
    unit, token, head, _ = cache.stride()
    return map_of(
        cache.data_ptr(),
        (64, page_size, dim // 64, kv_heads, units),
        (token, 64, head, unit),
        (64, min(keys, page_size), halves, 1, 1),
    )


@cache
def queue_kernel(shape: Shape, index: int | None) -> Kernel | None:
    """The kernel of a shape on a device, or None where it is unavailable; the reason is logged."""
    return compiled(shape, index, lambda stages: source_of(shape, stages))


def compiled(shape: Staged, index: int | None, source: Callable[[int], str]) -> Kernel | None:
    """The kernel with as many stages as fit; None where it is unavailable, and the reason is logged."""
    machine = machine_of(index)
    if machine is None:
        return None
    stages = shape.stages(machine)
    if stages < STAGES_LEAST:
        return None
    with falling_back_to("Triton"):
        image = compile_source(source(stages))
        with torch.cuda.device(index):
            return Kernel(image, "attend", THREADS, shape.shared(stages), 1)
    return None
