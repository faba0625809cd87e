# mypy: allow-untyped-defs, allow-incomplete-defs
"""The Mamba2 recurrence as Triton kernels.

One-token rows: one program per row, head and part of the head, bound by reading and writing the state. Longer
rows: one program per row, head and part of the head walks the chunks of the row with the state in registers;
inside a chunk all is matrix products. No partial state goes through memory, and a source slot may also be the
destination: each program reads its part of the state before it writes it. Same function and results as
`kernels/torch/mamba2.py`. Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.kernels.batch import Batch
from holdfast.kernels.parameters import Mamba2Weights
from holdfast.kernels.triton.launch import (
    Blocks,
    ceiling,
    launch_next,
    overlap,
    power_of_two,
    precision,
    wait_for_inputs,
)

STEP = Blocks(chunk=1, elements=8192, warps=4, stages=1)
SCAN = Blocks(chunk=32, elements=8192, warps=4, stages=3)


@triton.jit
def _softplus(value):
    """log(1 + exp(value)), exact to float32 for small and for large values."""
    power = tl.exp(tl.minimum(value, 20.0))
    # log(1 + p) = 2 atanh(p / (2 + p)); the sum 1 + p would lose a small p.
    ratio = power / (2.0 + power)
    square = ratio * ratio
    series = 0.33333333 + square * (0.2 + square * (0.14285714 + square * 0.11111111))
    series = 2.0 * ratio * (1.0 + square * series)
    return tl.where(value > 20.0, value, tl.where(power < 0.5, series, tl.log(1.0 + power)))


@triton.jit
def _scan_step(
    x, dt, A, B, C, D, dt_bias, state, source, destination, row_start, out,
    x_token, x_head, dt_token, B_token, B_group, C_token, C_group, state_slot, state_head, state_dim,
    least, most, HEADS: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, SKIP: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token of one row."""
    launch_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = row.to(tl.int64)
    if SKIP:
        token = tl.load(row_start + row).to(tl.int64)
        if tl.load(row_start + row + 1) - token != 1:
            return
    dims = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    sizes = tl.arange(0, BLOCK_SIZE)
    in_dims = dims < DIM
    in_sizes = sizes < SIZE
    inside = in_dims[:, None] & in_sizes[None, :]
    origin = tl.load(source + row).to(tl.int64)
    target = tl.load(destination + row).to(tl.int64)
    places = head * state_head + dims[:, None] * state_dim + sizes[None, :]
    held = tl.load(state + origin * state_slot + places, mask=inside & (origin >= 0), other=0.0).to(
        tl.float32
    )
    step = tl.load(dt + token * dt_token + head).to(tl.float32)
    if HAS_BIAS:
        step += tl.load(dt_bias + head).to(tl.float32)
    step = tl.minimum(tl.maximum(_softplus(step), least), most)
    decay = tl.exp(step * tl.load(A + head).to(tl.float32))
    value = tl.load(x + token * x_token + head * x_head + dims, mask=in_dims, other=0.0).to(tl.float32)
    group = head // REPEAT
    key = tl.load(B + token * B_token + group * B_group + sizes, mask=in_sizes, other=0.0).to(tl.float32)
    read = tl.load(C + token * C_token + group * C_group + sizes, mask=in_sizes, other=0.0).to(tl.float32)
    held = held * decay + (value * step)[:, None] * key[None, :]
    tl.store(state + target * state_slot + places, held.to(state.dtype.element_ty), mask=inside)
    result = tl.sum(held * read[None, :], axis=1)
    if HAS_D:
        result += tl.load(D + head).to(tl.float32) * value
    tl.store(out + (token * HEADS + head) * DIM + dims, result.to(out.dtype.element_ty), mask=in_dims)


@triton.jit
def _scan_chunks(
    x, dt, A, B, C, D, dt_bias, state, source, destination, row_start, out,
    x_token, x_head, dt_token, B_token, B_group, C_token, C_group, state_slot, state_head, state_dim,
    least, most, HEADS: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, SKIP: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All tokens of one row, chunk by chunk."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(row_start + row).to(tl.int64)
    count = (tl.load(row_start + row + 1) - start).to(tl.int32)
    if (count == 0) | (SKIP & (count == 1)):
        return
    dims = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    sizes = tl.arange(0, BLOCK_SIZE)
    in_dims = dims < DIM
    in_sizes = sizes < SIZE
    inside = in_dims[:, None] & in_sizes[None, :]
    origin = tl.load(source + row).to(tl.int64)
    target = tl.load(destination + row).to(tl.int64)
    places = head * state_head + dims[:, None] * state_dim + sizes[None, :]
    held = tl.load(state + origin * state_slot + places, mask=inside & (origin >= 0), other=0.0).to(
        tl.float32
    )
    rate = tl.load(A + head).to(tl.float32)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(dt_bias + head).to(tl.float32)
    skip_gain = 0.0
    if HAS_D:
        skip_gain = tl.load(D + head).to(tl.float32)
    x += start * x_token + head * x_head
    dt += start * dt_token + head
    B += start * B_token + head // REPEAT * B_group
    C += start * C_token + head // REPEAT * C_group
    out += (start * HEADS + head) * DIM
    within = tl.arange(0, CHUNK)
    for begin in tl.range(0, count, CHUNK):
        steps = begin + within
        real = steps < count
        lines = steps.to(tl.int64)
        step = tl.load(dt + lines * dt_token, mask=real, other=0.0).to(tl.float32) + bias
        # Tokens past the end have step 0: they change nothing.
        step = tl.where(real, tl.minimum(tl.maximum(_softplus(step), least), most), 0.0)
        passed = tl.cumsum(step * rate, axis=0)
        # Summed separately: the last tokens matter most, and their distance to the end must be exact.
        whole = tl.sum(tl.where(within == CHUNK - 1, passed, 0.0), axis=0)
        loaded = real[:, None] & in_sizes[None, :]
        keys = tl.load(B + lines[:, None] * B_token + sizes[None, :], mask=loaded, other=0.0)
        reads = tl.load(C + lines[:, None] * C_token + sizes[None, :], mask=loaded, other=0.0)
        value_places = lines[:, None] * x_token + dims[None, :]
        values = tl.load(x + value_places, mask=real[:, None] & in_dims[None, :], other=0.0)
        gaps = tl.where(within[:, None] >= within[None, :], passed[:, None] - passed[None, :], float("-inf"))
        scores = tl.dot(reads, tl.trans(keys), input_precision=PRECISION) * tl.exp(gaps) * step[None, :]
        carried = tl.dot(reads, tl.trans(held).to(reads.dtype), input_precision=PRECISION)
        result = carried * tl.exp(passed)[:, None]
        result = tl.dot(scores.to(values.dtype), values, result, input_precision=PRECISION)
        if HAS_D:
            result += skip_gain * values.to(tl.float32)
        out_places = lines[:, None] * (HEADS * DIM) + dims[None, :]
        tl.store(out + out_places, result.to(out.dtype.element_ty), mask=real[:, None] & in_dims[None, :])
        weighted = values.to(tl.float32) * (tl.exp(whole - passed) * step)[:, None]
        held = held * tl.exp(whole)
        held = tl.dot(tl.trans(weighted).to(keys.dtype), keys, held, input_precision=PRECISION)
    tl.store(state + target * state_slot + places, held.to(state.dtype.element_ty), mask=inside)


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    weights: Mamba2Weights,
    ssm_state: torch.Tensor,
    batch: Batch,
) -> torch.Tensor:
    tokens, heads, dim = x.shape
    groups, size = B.shape[1], B.shape[2]
    for tensor in (x, dt, B, C, ssm_state):
        assert tensor.stride(-1) == 1, "the innermost elements must be adjacent"
    out = torch.empty(tokens, heads, dim, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    arguments = (
        x, dt, weights.A, B, C, x if weights.D is None else weights.D,
        x if weights.dt_bias is None else weights.dt_bias,
        ssm_state, batch.state_source, batch.state_destination, batch.row_start, out,
        x.stride(0), x.stride(1), dt.stride(0), B.stride(0), B.stride(1), C.stride(0), C.stride(1),
        *ssm_state.stride()[:3], *weights.dt_limit,
    )  # fmt: skip
    block_size = power_of_two(size, 16)
    flags: dict[str, object] = {
        "HEADS": heads, "REPEAT": heads // groups, "DIM": dim, "SIZE": size, "HAS_D": weights.D is not None,
        "HAS_BIAS": weights.dt_bias is not None, "SKIP": 0 < batch.rows_of_one < batch.rows,
        "BLOCK_SIZE": block_size,
    }  # fmt: skip
    if batch.rows_of_one:
        block_dim = min(power_of_two(dim), max(1, STEP.elements // block_size))
        _scan_step[(batch.rows, heads, ceiling(dim, block_dim))](
            *arguments, **flags, BLOCK_DIM=block_dim, num_warps=STEP.warps, **overlap(x)
        )
    if not batch.one_token_rows:
        block_dim = min(power_of_two(dim, 16), max(16, SCAN.elements // block_size))
        chunk = min(SCAN.chunk, power_of_two(weights.chunk_size, 16), power_of_two(batch.count_max, 16))
        _scan_chunks[(batch.rows, heads, ceiling(dim, block_dim))](
            *arguments, **flags, BLOCK_DIM=block_dim, CHUNK=chunk, PRECISION=precision(x.dtype),
            num_warps=SCAN.warps, num_stages=SCAN.stages,
        )  # fmt: skip
    return out
