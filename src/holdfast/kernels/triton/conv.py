# mypy: allow-untyped-defs, allow-incomplete-defs
"""Causal depthwise convolution with a carried state as Triton kernels.

One-token rows: output and new state in one launch. Ragged rows: the first launch computes all outputs and
only reads states, the second writes the new states, so that a state whose source is its destination is read
completely before it changes. Same function and results as `kernels/torch/conv.py`. Called through
`holdfast.kernels`.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from holdfast.kernels.batch import Batch
from holdfast.kernels.triton.launch import (
    ceiling,
    find_row,
    launch_next,
    overlap,
    power_of_two,
    tiles,
    wait_for_inputs,
)

# Tokens and channels per tile, as measured on an H200 for short and for long rows.
SHORT_TILE = (8, 256)
LONG_TILE = (32, 128)
LONG = 256


@triton.jit
def _finish(value, bias, channels, inside, HAS_BIAS: tl.constexpr, SILU: tl.constexpr):
    if HAS_BIAS:
        value += tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        value = value * tl.sigmoid(value)
    return value


@triton.jit
def _conv_step(
    x, weight, bias, state, source, destination, out, x_stride, state_slot, state_channel, channel_count,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token of one row; the state shifts by one."""
    launch_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < channel_count
    origin = tl.load(source + row).to(tl.int64)
    target = tl.load(destination + row).to(tl.int64)
    newest = tl.load(x + row * x_stride + channels, mask=inside, other=0.0)
    total = newest.to(tl.float32) * tl.load(weight + channels * TAPS + TAPS - 1, mask=inside, other=0.0)
    known = inside & (origin >= 0)
    for tap in tl.static_range(TAPS - 1):
        place = channels * state_channel + tap
        held = tl.load(state + origin * state_slot + place, mask=known, other=0.0)
        total += held.to(tl.float32) * tl.load(weight + channels * TAPS + tap, mask=inside, other=0.0)
        # The element just read moves one place down; all threads have read it by now.
        tl.debug_barrier()
        if tap > 0:
            tl.store(state + target * state_slot + place - 1, held, mask=inside)
    moved = newest.to(state.dtype.element_ty)
    tl.store(state + target * state_slot + channels * state_channel + TAPS - 2, moved, mask=inside)
    total = _finish(total, bias, channels, inside, HAS_BIAS, SILU)
    tl.store(out + row * channel_count + channels, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _conv_tile(
    x, weight, bias, state, source, row_start, out, x_stride, state_slot, state_channel, channel_count, rows,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A run of tokens of one row; taps before the row come from its state."""
    tile = tl.program_id(0)
    row = find_row(row_start, rows, tile, TOKENS)
    start = tl.load(row_start + row)
    count = tl.load(row_start + row + 1) - start
    first = (tile - (start // TOKENS + row)) * TOKENS
    if first >= count:
        return
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < channel_count
    steps = first + tl.arange(0, TOKENS)
    origin = tl.load(source + row).to(tl.int64)
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        places = steps - (TAPS - 1) + tap
        new = (places >= 0) & (places < count)
        lines = (start + places).to(tl.int64) * x_stride
        value = tl.load(
            x + lines[:, None] + channels[None, :], mask=new[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        if first == 0:
            old = (places < 0) & (origin >= 0)
            held = tl.load(
                state
                + origin * state_slot
                + channels[None, :] * state_channel
                + (places + TAPS - 1)[:, None],
                mask=old[:, None] & inside[None, :],
                other=0.0,
            )
            value += held.to(tl.float32)
        factor = tl.load(weight + channels * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        total += value * factor[None, :]
    total = _finish(total, bias, channels[None, :], inside[None, :], HAS_BIAS, SILU)
    tl.store(
        out + (start + steps).to(tl.int64)[:, None] * channel_count + channels[None, :],
        total.to(out.dtype.element_ty),
        mask=(steps < count)[:, None] & inside[None, :],
    )


@triton.jit
def _conv_states(
    x, state, source, destination, row_start, x_stride, state_slot, state_channel, channel_count,
    TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last inputs of one row, from the old state where the row is shorter than the state."""
    row = tl.program_id(0)
    start = tl.load(row_start + row)
    count = tl.load(row_start + row + 1) - start
    if count == 0:
        return
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < channel_count
    origin = tl.load(source + row).to(tl.int64)
    target = tl.load(destination + row).to(tl.int64)
    for tap in tl.static_range(TAPS - 1):
        place = count - (TAPS - 1) + tap
        line = (start + place).to(tl.int64) * x_stride
        new = tl.load(x + line + channels, mask=inside & (place >= 0), other=0.0).to(state.dtype.element_ty)
        # An old element lies `count` places further on, so it is read before it is overwritten.
        held = tl.load(
            state + origin * state_slot + channels * state_channel + place + TAPS - 1,
            mask=inside & (place < 0) & (origin >= 0),
            other=0.0,
        )
        moved = tl.where(place >= 0, new, held)
        tl.debug_barrier()
        tl.store(state + target * state_slot + channels * state_channel + tap, moved, mask=inside)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    batch: Batch,
    *,
    activation: Literal["silu"] | None = "silu",
) -> torch.Tensor:
    tokens, channels = x.shape
    taps = weight.shape[1]
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert conv_state.stride(2) == 1 or taps == 2
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    block = min(256, power_of_two(channels))
    blocks = ceiling(channels, block)
    states = (x.stride(0), conv_state.stride(0), conv_state.stride(1), channels)
    flags: dict[str, object] = {"TAPS": taps, "HAS_BIAS": bias is not None, "SILU": activation == "silu"}
    offset = x if bias is None else bias
    if batch.one_token_rows:
        _conv_step[(tokens, blocks)](
            x, weight, offset, conv_state, batch.state_source, batch.state_destination, out, *states,
            **flags, BLOCK=block, num_warps=2, **overlap(x),
        )  # fmt: skip
        return out
    height, width = LONG_TILE if batch.count_max >= LONG else SHORT_TILE
    wide = min(width, power_of_two(channels))
    _conv_tile[(tiles(tokens, batch.rows, height), ceiling(channels, wide))](
        x, weight, offset, conv_state, batch.state_source, batch.row_start, out, *states, batch.rows,
        **flags, TOKENS=height, BLOCK=wide, num_warps=4,
    )  # fmt: skip
    _conv_states[(batch.rows, blocks)](
        x, conv_state, batch.state_source, batch.state_destination, batch.row_start, *states,
        TAPS=taps, BLOCK=block, num_warps=2,
    )  # fmt: skip
    return out
