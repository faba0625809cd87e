# mypy: allow-untyped-defs, allow-incomplete-defs
"""Helpers of all Triton kernels: block sizes, strides, the device's width, tiles of ragged rows.

A ragged batch is cut into tiles of B tokens that never cross a row: row r owns the tiles from `row_start[r]
// B + r` on, which is monotone and leaves enough room for each row, so that the grid (`tiles`) follows from
host-side counts and each program finds its row by bisection. Private to this package.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

INTERPRETED_PROCESSORS = (
    4  # the assumed number of multiprocessors without a device, so that splits are tested
)


class Blocks(NamedTuple):
    """The tiling of a recurrence: tokens per chunk, state elements per program, warps, pipeline stages."""

    chunk: int
    elements: int
    warps: int
    stages: int


@cache
def processors(index: int | None) -> int:
    """The number of multiprocessors of the device."""
    if index is None:
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


SHARED_MEMORY = 160 << 10
"""Shared memory of the largest blocks, as measured on an H200; other GPUs have as little as 99 KiB."""


@cache
def roomy(index: int | None) -> bool:
    """Whether a program has enough shared memory for the largest blocks."""
    if index is None:
        return True
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return bool(properties["max_shared_mem"] >= SHARED_MEMORY)


def power_of_two(value: int, least: int = 1) -> int:
    """The smallest power of two that is at least `value` and at least `least`."""
    return int(max(least, 1 << max(0, value - 1).bit_length()))


def ceiling(value: int, divisor: int) -> int:
    return -(-value // divisor)


def tiles(tokens: int, rows: int, block: int) -> int:
    """The grid size (number of tiles) for a ragged batch."""
    return tokens // block + rows


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, width] with unit stride along the width; a view where the strides allow it."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def precision(dtype: torch.dtype) -> str:
    """The precision of matrix products: IEEE float32 for float32 inputs."""
    return "ieee" if dtype == torch.float32 else "tf32"


def overlap(x: torch.Tensor) -> dict[str, bool]:
    """Launch flags for programmatic dependent launch: the kernel may start before the preceding one ends.

    For Hopper and later. Such a kernel calls `launch_next`, and `wait_for_inputs` before it reads anything
    that a kernel wrote, or writes anything at all. At least one of its programs must wait in any case: the
    kernel after it waits for this one alone.
    """
    if x.is_cuda and _overlaps(x.device.index):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@cache
def _overlaps(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9


@triton.jit
def launch_next(OVERLAP: tl.constexpr):
    """Allow the next kernel to start its independent part."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait for all writes of the preceding kernels."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def find_row(row_start, rows, tile, BLOCK: tl.constexpr):
    """The row that owns a tile; for an unused tile, any row whose end lies before it."""
    low = 0
    high = rows
    while low + 1 < high:
        middle = (low + high) // 2
        base = tl.load(row_start + middle) // BLOCK + middle
        low = tl.where(base <= tile, middle, low)
        high = tl.where(base <= tile, high, middle)
    return low
