"""Split-K attention of one-token rows over paged KV in eight bits on Hopper: `source/scaled_attention.cu`.

As `attention` for bfloat16 caches: persistent programs take pieces from a `PieceQueue`. `takes_scaled_queue`
says which shapes have a kernel; all others, and rows of several tokens, fall back to Triton.
`attend_scaled_queue` is called by `kernels/triton/attention.py`, the rest through `holdfast.kernels`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch

from holdfast.kernels.batch import KEY_BLOCK, Pages, PieceQueue
from holdfast.kernels.cuda.attention import (
    ALIGNMENT,
    BARRIER_BYTES,
    DIMS,
    FETCHED,
    GROUPS,
    LAST_BYTES,
    LINE_BYTES,
    STAGES_MOST,
    compiled,
    queue_arguments,
    queue_source,
)
from holdfast.kernels.cuda.driver import (
    HOPPER,
    SWIZZLE_64_BYTES,
    SWIZZLE_128_BYTES,
    Kernel,
    Machine,
    Map,
    index_of,
    map_of,
)
from holdfast.kernels.scaled import ScaledCache

__all__ = ["ScaledShape", "attend_scaled_queue", "scaled_queue_kernel", "takes_scaled_queue"]

SOURCE = HOPPER.with_name("scaled_attention.cu")
COLUMNS = 8
"""Most query heads that share a key head: columns of the kernel's matrix."""


class ScaledShape(NamedTuple):
    """The compile-time constants of a kernel."""

    dim: int
    group: int
    kv_heads: int
    page_size: int

    @property
    def stage_bytes(self) -> int:
        """Bytes of the codes and scales of a block's keys and values."""
        return 2 * KEY_BLOCK * (self.dim + 1)

    @property
    def sums_bytes(self) -> int:
        """Bytes of the reductions of all warps."""
        return GROUPS * 4 * COLUMNS * (self.dim + 4) * 4

    def stages(self, machine: Machine) -> int:
        """Stages (blocks) that fit a program's shared memory."""
        room = machine.shared_memory - ALIGNMENT - LAST_BYTES - self.sums_bytes
        return min(STAGES_MOST, room // (self.stage_bytes + BARRIER_BYTES + LINE_BYTES))

    def shared(self, stages: int) -> int:
        """Dynamic shared memory of a launch; lines and flags are static."""
        return ALIGNMENT + stages * (self.stage_bytes + BARRIER_BYTES) + self.sums_bytes


def takes_scaled_queue(
    heads: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether a kernel for queries of this type is available on the device; compiles it."""
    if dtype != torch.bfloat16 or dim not in DIMS or page_size % FETCHED:
        return False
    if heads % kv_heads or heads // kv_heads > COLUMNS:
        return False
    shape = ScaledShape(dim, heads // kv_heads, kv_heads, page_size)
    return scaled_queue_kernel(shape, index_of(device)) is not None


def scaled_source(shape: ScaledShape, stages: int) -> str:
    """The source of a shape: its constants and the file."""
    return queue_source(
        shape,
        stages,
        SOURCE.read_text(encoding="utf-8"),
        f'static_assert(PLACE + SCALES == {shape.stage_bytes} && NARROW == {COLUMNS}, "Python");',
        f'static_assert(GROUPS * SUMS == {shape.sums_bytes}, "Python");',
    )


def attend_scaled_queue(
    query: torch.Tensor,
    key: ScaledCache,
    value: ScaledCache,
    out: torch.Tensor,
    pages: Pages,
    queue: PieceQueue,
    scale: float,
    sinks: torch.Tensor | None,
) -> None:
    """Attention of all rows of the queue, each of one token, into `out`; for shapes that have a kernel."""
    _, heads, dim = query.shape
    kv_heads = key.codes.shape[2]
    assert key.codes.dtype == value.codes.dtype == torch.uint8
    assert key.scales.stride() == value.scales.stride() and key.scales.stride(2) == 1
    assert kv_heads == 1 or key.scales.stride(1) == pages.page_size
    sixteens, rest = divmod(key.scales.stride(0), 16)
    unaligned = key.scales.data_ptr() % 16 or value.scales.data_ptr() % 16
    assert rest == 0 and not unaligned, "the copy engine fetches 16 bytes"
    arguments = queue_arguments(query, kv_heads, out, pages, queue, scale, sinks)
    shape = ScaledShape(dim, heads // kv_heads, kv_heads, pages.page_size)
    kernel = scaled_queue_kernel(shape, query.device.index)
    assert kernel is not None, "takes_scaled_queue supports this shape"
    kernel.launch(
        queue.programs,
        (
            *(_blocks(cache.codes, KEY_BLOCK) for cache in (key, value)),
            *(_blocks(cache.codes, FETCHED) for cache in (key, value)),
        ),
        *arguments,
        ctypes.c_void_p(key.scales.data_ptr()),
        ctypes.c_void_p(value.scales.data_ptr()),
        ctypes.c_int(sixteens),
    )


def _blocks(codes: torch.Tensor, keys: int) -> Map:
    """The tensor map of blocks of `keys` tokens of one head within a page; an element is two codes."""
    units, page_size, kv_heads, dim = codes.shape
    unit, token, head, _ = codes.stride()
    return map_of(
        codes.data_ptr(),
        (dim // 2, page_size, kv_heads, units),
        (token // 2, head // 2, unit // 2),
        (dim // 2, min(keys, page_size), 1, 1),
        SWIZZLE_128_BYTES if dim == 128 else SWIZZLE_64_BYTES,
    )


@cache
def scaled_queue_kernel(shape: ScaledShape, index: int | None) -> Kernel | None:
    """The kernel of a shape on a device, or None where it is unavailable; the reason is logged."""
    return compiled(shape, index, lambda stages: scaled_source(shape, stages))
