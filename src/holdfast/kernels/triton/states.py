# mypy: allow-untyped-defs, allow-incomplete-defs
"""Recurrent states at rest: int8 codes, and a float32 scale for each row of a state.

A program takes a few rows of one state, of all layers and heads alike. Same functions and results as
`kernels/torch/states.py`. Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.kernels.triton.launch import ceiling, power_of_two

ROWS = 16
NEAREST = 12582912.0
"""1.5 * 2^23: adding and subtracting it rounds a small float32 to the nearest whole number, ties to even."""


@triton.jit(do_not_specialize=["rows"])
def _rest(
    running, slots, codes, scales, places, rows, width, NEAREST: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1)
    slot = tl.load(slots + unit).to(tl.int64)
    place = tl.load(places + unit).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (columns < width)[None, :]
    at = row[:, None] * width + columns[None, :]
    x = tl.load(running + slot * rows * width + at, mask=inside, other=0.0)
    broken = tl.max(tl.where(x == x, 0, 1), axis=1)  # noqa: PLR0124
    scale = tl.max(tl.abs(x), axis=1) * (1.0 / 127)
    inverse = tl.where(scale == 0.0, 0.0, 1.0 / scale)
    code = (x * inverse[:, None] + NEAREST) - NEAREST
    code = tl.where(code == code, code, 0.0)  # noqa: PLR0124
    code = tl.minimum(tl.maximum(code, -127.0), 127.0)
    tl.store(codes + place * rows * width + at, code.to(tl.int8), mask=inside)
    scale = tl.where(broken > 0, float("nan"), scale)
    tl.store(scales + place * rows + row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _wake(codes, scales, places, running, slots, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    unit = tl.program_id(1)
    slot = tl.load(slots + unit).to(tl.int64)
    place = tl.load(places + unit).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (columns < width)[None, :]
    at = row[:, None] * width + columns[None, :]
    scale = tl.load(scales + place * rows + row, mask=row < rows, other=0.0)
    code = tl.load(codes + place * rows * width + at, mask=inside, other=0).to(tl.float32)
    tl.store(running + slot * rows * width + at, code * scale[:, None], mask=inside)


def _shape(running: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> tuple[int, int]:
    """Rows of a state, and their width."""
    for tensor in (running, codes, scales):
        assert tensor.is_contiguous()
    assert running.shape[1:] == codes.shape[1:] and codes.shape[:-1] == scales.shape
    return running[0].numel() // running.shape[-1], running.shape[-1]


def rest_states(
    running: torch.Tensor,
    slots: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    places: torch.Tensor,
) -> None:
    if not slots.numel():
        return
    rows, width = _shape(running, codes, scales)
    _rest[(ceiling(rows, ROWS), slots.numel())](
        running, slots, codes, scales, places, rows, width, NEAREST=NEAREST, ROWS=ROWS,
        BLOCK=power_of_two(width), num_warps=4,
    )  # fmt: skip


def wake_states(
    codes: torch.Tensor,
    scales: torch.Tensor,
    places: torch.Tensor,
    running: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    if not slots.numel():
        return
    rows, width = _shape(running, codes, scales)
    _wake[(ceiling(rows, ROWS), slots.numel())](
        codes, scales, places, running, slots, rows, width, ROWS=ROWS, BLOCK=power_of_two(width), num_warps=4,
    )  # fmt: skip
