# mypy: allow-untyped-defs, allow-incomplete-defs
"""The gated delta rule as Triton kernels.

One-token rows: one program per row, head and part of the head. Longer rows take two launches. The first
inverts the unit-triangular system of every chunk, all chunks at once: the inverse is built from blocks of
one, two, four ... tokens, two matrix products per doubling, which is as stable as substitution and has no
sequential loop over rows. The second walks the chunks of a row with the state in registers. A source slot may
also be the destination: each program reads its part of the state before it writes it. Same function and
results as `kernels/torch/gated_delta.py`. Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.kernels.batch import Batch
from holdfast.kernels.torch.gated_delta import NORM_EPS
from holdfast.kernels.triton.launch import (
    Blocks,
    ceiling,
    find_row,
    power_of_two,
    precision,
    processors,
    tiles,
)

STEP = Blocks(chunk=1, elements=8192, warps=4, stages=1)
SOLVE = Blocks(chunk=64, elements=0, warps=4, stages=1)
SOLVE_PRECISION = "tf32x3"
SCAN = Blocks(chunk=32, elements=8192, warps=4, stages=3)


@triton.jit
def _unit(rows, eps, NORMALISE: tl.constexpr):
    """Rows [n, dim] as float32, scaled to unit length where asked."""
    rows = rows.to(tl.float32)
    if NORMALISE:
        rows = rows * tl.rsqrt(tl.sum(rows * rows, axis=1) + eps)[:, None]
    return rows


@triton.jit
def _delta_step(
    query, key, value, g, beta, state, source, destination, row_start, out,
    query_token, query_head, key_token, key_head, value_token, value_head, g_token, beta_token,
    state_slot, state_head, state_dim, scale, eps,
    HEADS: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    NORMALISE: tl.constexpr, SKIP: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """One token of one row."""
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
    group = head // REPEAT
    keys = tl.load(key + token * key_token + group * key_head + sizes, mask=in_sizes, other=0.0).to(
        tl.float32
    )
    reads = tl.load(query + token * query_token + group * query_head + sizes, mask=in_sizes, other=0.0)
    reads = reads.to(tl.float32)
    if NORMALISE:
        keys = keys * tl.rsqrt(tl.sum(keys * keys, axis=0) + eps)
        reads = reads * tl.rsqrt(tl.sum(reads * reads, axis=0) + eps)
    wanted = tl.load(value + token * value_token + head * value_head + dims, mask=in_dims, other=0.0)
    rate = tl.load(beta + token * beta_token + head).to(tl.float32)
    held = held * tl.exp(tl.load(g + token * g_token + head).to(tl.float32))
    told = tl.sum(held * keys[None, :], axis=1)
    held += ((wanted.to(tl.float32) - told) * rate)[:, None] * keys[None, :]
    tl.store(state + target * state_slot + places, held.to(state.dtype.element_ty), mask=inside)
    result = tl.sum(held * (reads * scale)[None, :], axis=1)
    tl.store(out + (token * HEADS + head) * DIM + dims, result.to(out.dtype.element_ty), mask=in_dims)


@triton.jit(do_not_specialize=["rows"])
def _delta_systems(
    key, g, beta, row_start, inverses, key_token, key_head, g_token, beta_token, rows, eps,
    HEADS: tl.constexpr, REPEAT: tl.constexpr, SIZE: tl.constexpr, NORMALISE: tl.constexpr,
    SKIP: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    SOLVE: tl.constexpr,
):  # fmt: skip
    """The inverse of one chunk's system, [CHUNK, CHUNK]."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = find_row(row_start, rows, tile, CHUNK)
    start = tl.load(row_start + row).to(tl.int64)
    count = (tl.load(row_start + row + 1) - start).to(tl.int32)
    first = (tile - (start // CHUNK + row)).to(tl.int32) * CHUNK
    if (first >= count) | (SKIP & (count == 1)):
        return
    within = tl.arange(0, CHUNK)
    sizes = tl.arange(0, BLOCK_SIZE)
    real = first + within < count
    lines = start + first + within
    loaded = real[:, None] & (sizes < SIZE)[None, :]
    places = lines[:, None] * key_token + head // REPEAT * key_head + sizes[None, :]
    raw = tl.load(key + places, mask=loaded, other=0.0)
    keys = _unit(raw, eps, NORMALISE).to(raw.dtype)
    passed = tl.cumsum(tl.load(g + lines * g_token + head, mask=real, other=0.0).to(tl.float32), axis=0)
    rate = tl.load(beta + lines * beta_token + head, mask=real, other=0.0).to(tl.float32)
    ahead = within[:, None]
    behind = within[None, :]
    gaps = tl.where(ahead > behind, passed[:, None] - passed[None, :], float("-inf"))
    system = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * tl.exp(gaps) * rate[:, None]
    inverse = tl.where(ahead == behind, 1.0, 0.0)
    size: tl.constexpr = CHUNK
    block = 1
    while block < size:
        # Blocks on the diagonal are inverted; merge each even one with the odd one after it.
        joint = (ahead // (2 * block) == behind // (2 * block)) & (ahead // block % 2 == 1)
        joint = joint & (behind // block % 2 == 0)
        link = tl.where(joint, system, 0.0)
        half = tl.dot(inverse, link, input_precision=SOLVE)
        inverse -= tl.dot(half, inverse, input_precision=SOLVE)
        block *= 2
    at = (tile.to(tl.int64) * HEADS + head) * CHUNK * CHUNK
    tl.store(inverses + at + ahead * CHUNK + behind, inverse.to(inverses.dtype.element_ty))


@triton.jit
def _delta_chunks(
    query, key, value, g, beta, inverses, state, source, destination, row_start, out,
    query_token, query_head, key_token, key_head, value_token, value_head, g_token, beta_token,
    state_slot, state_head, state_dim, scale, eps,
    HEADS: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    NORMALISE: tl.constexpr, SKIP: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
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
    within = tl.arange(0, CHUNK)
    tile = start // CHUNK + row
    query += head // REPEAT * query_head
    key += head // REPEAT * key_head
    for begin in tl.range(0, count, CHUNK):
        real = begin + within < count
        lines = start + begin + within
        loaded = real[:, None] & in_sizes[None, :]
        raw = tl.load(key + lines[:, None] * key_token + sizes[None, :], mask=loaded, other=0.0)
        keys = _unit(raw, eps, NORMALISE)
        reads = tl.load(query + lines[:, None] * query_token + sizes[None, :], mask=loaded, other=0.0)
        reads = (_unit(reads, eps, NORMALISE) * scale).to(raw.dtype)
        decay = tl.load(g + lines * g_token + head, mask=real, other=0.0).to(tl.float32)
        passed = tl.cumsum(decay, axis=0)
        # Summed separately: the last tokens matter most, and their distance to the end must be exact.
        whole = tl.sum(tl.where(within == CHUNK - 1, passed, 0.0), axis=0)
        rate = tl.load(beta + lines * beta_token + head, mask=real, other=0.0).to(tl.float32)
        value_places = lines[:, None] * value_token + head * value_head + dims[None, :]
        values = tl.load(value + value_places, mask=real[:, None] & in_dims[None, :], other=0.0).to(
            tl.float32
        )
        at = ((tile + begin // CHUNK) * HEADS + head) * CHUNK * CHUNK
        inverse = tl.load(inverses + at + within[:, None] * CHUNK + within[None, :])
        columns = tl.trans(held).to(raw.dtype)
        told = tl.dot(keys.to(raw.dtype), columns, input_precision=PRECISION) * tl.exp(passed)[:, None]
        right = ((values - told) * rate[:, None]).to(inverse.dtype)
        corrections = tl.dot(inverse, right, input_precision=PRECISION).to(raw.dtype)
        gaps = tl.where(within[:, None] >= within[None, :], passed[:, None] - passed[None, :], float("-inf"))
        scores = tl.dot(reads, tl.trans(keys.to(raw.dtype)), input_precision=PRECISION) * tl.exp(gaps)
        result = tl.dot(reads, columns, input_precision=PRECISION) * tl.exp(passed)[:, None]
        result = tl.dot(scores.to(raw.dtype), corrections, result, input_precision=PRECISION)
        out_places = (lines[:, None] * HEADS + head) * DIM + dims[None, :]
        tl.store(out + out_places, result.to(out.dtype.element_ty), mask=real[:, None] & in_dims[None, :])
        weighted = (keys * tl.exp(whole - passed)[:, None]).to(raw.dtype)
        held = held * tl.exp(whole)
        held = tl.dot(tl.trans(corrections), weighted, held, input_precision=PRECISION)
    tl.store(state + target * state_slot + places, held.to(state.dtype.element_ty), mask=inside)


def gated_delta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    delta_state: torch.Tensor,
    batch: Batch,
    *,
    scale: float | None = None,
    normalise: bool = False,
) -> torch.Tensor:
    tokens, heads, dim = value.shape
    size = key.shape[2]
    for tensor in (query, key, value, g, beta, delta_state):
        assert tensor.stride(-1) == 1, "the innermost elements must be adjacent"
    out = torch.empty(tokens, heads, dim, dtype=value.dtype, device=value.device)
    if not tokens:
        return out
    states = (delta_state, batch.state_source, batch.state_destination, batch.row_start, out)
    strides = (
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        g.stride(0), beta.stride(0), *delta_state.stride()[:3],
        size**-0.5 if scale is None else scale, NORM_EPS,
    )  # fmt: skip
    block_size = power_of_two(size, 16)
    flags: dict[str, object] = {
        "HEADS": heads, "REPEAT": heads // key.shape[1], "SIZE": size, "NORMALISE": normalise,
        "SKIP": 0 < batch.rows_of_one < batch.rows, "BLOCK_SIZE": block_size,
    }  # fmt: skip
    if batch.rows_of_one:
        block_dim = min(power_of_two(dim), max(1, STEP.elements // block_size))
        _delta_step[(batch.rows, heads, ceiling(dim, block_dim))](
            query,
            key,
            value,
            g,
            beta,
            *states,
            *strides,
            **flags,
            DIM=dim,
            BLOCK_DIM=block_dim,
            num_warps=STEP.warps,
        )
    if not batch.one_token_rows:
        chunk = min(SCAN.chunk, power_of_two(batch.count_max, 16))
        flags |= {"CHUNK": chunk, "PRECISION": precision(key.dtype)}
        tile_count = tiles(tokens, batch.rows, chunk)
        inverses = torch.empty(tile_count, heads, chunk, chunk, dtype=key.dtype, device=key.device)
        _delta_systems[(tile_count, heads)](
            key, g, beta, batch.row_start, inverses,
            key.stride(0), key.stride(1), g.stride(0), beta.stride(0), batch.rows, NORM_EPS,
            **flags, SOLVE="ieee" if key.dtype == torch.float32 else SOLVE_PRECISION,
            num_warps=SOLVE.warps,
        )  # fmt: skip
        # Smaller parts of the state where the rows alone do not fill the device.
        full = batch.rows * heads * dim * block_size >= SCAN.elements * processors(key.device.index)
        elements = SCAN.elements if full and key.dtype != torch.float32 else SCAN.elements // 2
        block_dim = min(power_of_two(dim, 16), max(16, elements // block_size))
        _delta_chunks[(batch.rows, heads, ceiling(dim, block_dim))](
            query, key, value, g, beta, inverses, *states, *strides, **flags, DIM=dim, BLOCK_DIM=block_dim,
            num_warps=SCAN.warps, num_stages=1 if key.dtype == torch.float32 else SCAN.stages,
        )  # fmt: skip
    return out
