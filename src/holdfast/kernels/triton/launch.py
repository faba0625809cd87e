# mypy: allow-untyped-defs, allow-incomplete-defs
"""What all Triton kernels share: block sizes, strides, the device's width, and tiles of ragged rows.

A ragged batch is cut into tiles of B tokens that never cross a row: row r owns the tiles from
`row_start[r] // B + r` on, which is monotone and leaves enough room for each row, so that the grid
(`tiles`) follows from host-side counts and each program finds its row by bisection. Only the modules of this
package use it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

INTERPRETED_PROCESSORS = 4  # the width that is assumed where there is no device, so that splits are tested


class Blocks(NamedTuple):
    """How a recurrence is cut: tokens a chunk, elements of the state a program, warps, stages of loads."""

    chunk: int
    elements: int
    warps: int
    stages: int


@cache
def processors(index: int | None) -> int:
    """How many multiprocessors the device has."""
    if index is None:
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


SHARED_MEMORY = 160 << 10
"""What a program's blocks may take, as measured on an H200; other GPUs have as little as 99 KiB."""


@cache
def roomy(index: int | None) -> bool:
    """Whether a program has as much shared memory as the largest blocks take."""
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
    """How many tiles a grid needs for a ragged batch."""
    return tokens // block + rows


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, width] with unit stride along the width; a view where the strides allow it."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def precision(dtype: torch.dtype) -> str:
    """The precision of matrix products: float32 inputs are multiplied as float32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def overlap(x: torch.Tensor) -> dict[str, bool]:
    """Launch flags of a kernel that may begin before the one before it has ended (Hopper and later).

    Such a kernel calls `launch_next`, and `wait_for_inputs` before it reads anything that a kernel wrote, or
    writes anything at all. At least one of its programs must wait, whatever its inputs: the kernel after it
    waits for this one alone.
    """
    if x.is_cuda and _overlaps(x.device.index):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@cache
def _overlaps(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9


@triton.jit
def launch_next(OVERLAP: tl.constexpr):
    """The next kernel may begin, as far as it does not need this one."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait for all that the kernels before have written."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def find_row(row_start, rows, tile, BLOCK: tl.constexpr):
    """The row that owns a tile; for a tile that no row owns, any row in which it lies past the end."""
    low = 0
    high = rows
    while low + 1 < high:
        middle = (low + high) // 2
        base = tl.load(row_start + middle) // BLOCK + middle
        low = tl.where(base <= tile, middle, low)
        high = tl.where(base <= tile, high, middle)
    return low
