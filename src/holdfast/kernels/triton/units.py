# mypy: allow-untyped-defs, allow-incomplete-defs
"""Copies of whole units in one launch, as untyped words; and of a step's few words.

A unit's bytes for all layers are contiguous, so a copy is a flat run of words. Kernels address pinned host
memory directly, so a tier copy is one launch too; it has few programs, which saturate the bus and leave the
device to concurrent steps. Same functions and results as `kernels/torch/units.py`. Called through
`holdfast.kernels`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.kernels.triton.launch import ceiling

BLOCK = 2048
MOVERS = 8
"""Programs of a copy between device and host: enough to saturate the bus, as measured on an H200."""


@triton.jit(do_not_specialize=["units"])
def _copy(
    source,
    target,
    source_units,
    target_units,
    source_stride,
    target_stride,
    words,
    units,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(words, BLOCK)
    for work in tl.range(tl.program_id(0), units * blocks, tl.num_programs(0)):
        index = work // blocks
        first = tl.load(source_units + index).to(tl.int64)
        second = tl.load(target_units + index).to(tl.int64)
        places = (work % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = places < words
        moved = tl.load(source + first * source_stride + places, mask=inside)
        tl.store(target + second * target_stride + places, moved, mask=inside)


def _words(storage: torch.Tensor) -> torch.Tensor:
    """Storage as [units, words] of the widest integers that fit."""
    assert storage.is_contiguous(), "units are contiguous runs of words"
    flat = storage.reshape(storage.shape[0], -1).view(torch.uint8)
    size = flat.shape[1]
    for dtype in (torch.int64, torch.int32, torch.int16):
        if size % dtype.itemsize == 0 and storage.data_ptr() % dtype.itemsize == 0:
            return flat.view(dtype)
    return flat


def _run(
    source: torch.Tensor,
    sources: torch.Tensor,
    target: torch.Tensor,
    targets: torch.Tensor,
    programs: int | None,
) -> None:
    units = sources.numel()
    if not units:
        return
    first, second = _words(source), _words(target)
    assert first.dtype == second.dtype
    assert first.shape[1] == second.shape[1]
    work = units * ceiling(first.shape[1], BLOCK)
    _copy[(work if programs is None else min(work, programs),)](
        first, second, sources, targets, first.stride(0), second.stride(0), first.shape[1], units,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


def copy_units(storage: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    _run(storage, sources, storage, destinations, None)


def move_units(
    source: torch.Tensor, sources: torch.Tensor, target: torch.Tensor, destinations: torch.Tensor
) -> None:
    _run(source, sources, target, destinations, MOVERS)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["source", "target"])
def _carry(source, target, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    tl.store(target + places, tl.load(source + places, mask=inside), mask=inside)


def carry(source: torch.Tensor, target: torch.Tensor) -> None:
    assert source.is_contiguous() and target.is_contiguous()
    count = source.numel()
    if count:
        _carry[(ceiling(count, BLOCK),)](source, target, count, BLOCK=BLOCK, num_warps=8)
