"""A check of kernels on memory more than 2^32 elements into its storage.

Pools of a large GPU are that large; small ones would not show an offset computed in 32 bits.
"""

from __future__ import annotations

import math

import torch

from holdfast import kernels
from holdfast.bench.gpu.key_lists import allocate_pieces, allocate_queue, has_queue
from holdfast.kernels import Mamba2Weights, Rotation
from tests.gpu.kernel_checks import Errors, error, first_state, normal, state_rows
from tests.kernels import naive
from tests.kernels.batches import NAN, fill_cache, paged_batch

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
FAR_UNITS = 2**32 // (2 * 2 * PAGE * KV_HEADS * DIM) + 100  # units of two layers
STATE_HEADS, STATE_DIM, STATE_SIZE = 16, 64, 128
FAR_SLOTS = 2**32 // (2 * STATE_HEADS * STATE_DIM * STATE_SIZE) + 100  # slots of two layers


def check_far(dtype: torch.dtype) -> Errors:
    yield from far_pages(dtype)
    yield from far_states(dtype)


def far_pages(dtype: torch.dtype) -> Errors:
    """Keys and values written, read as they are, in pieces and from a queue, and copied."""
    counts, starts = [1, 37, 1, 200, 5], [900, 512, 3000, 0, 33]
    batch, total = paged_batch(counts, starts, PAGE, device="cuda")
    pages = batch.full
    assert pages is not None
    pages.table += FAR_UNITS
    pages.slots += FAR_UNITS * PAGE
    storage, keys, values = fill_cache(
        batch, FAR_UNITS + total, KV_HEADS, DIM, dtype=dtype, generator=torch.Generator().manual_seed(1)
    )
    assert storage.stride(0) * FAR_UNITS > 2**32
    key_cache, value_cache = storage[:, 1, 0], storage[:, 1, 1]
    tokens = sum(counts)
    query, key, value = (normal(dtype, tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    unturned = Rotation(None, None, None)
    kernels.rotate_and_write(
        query, key, value, key_cache, value_cache, pages.slots, batch.positions, unturned
    )
    spans = [slice(end - count, end) for count, end in zip(counts, batch.row_start.tolist()[1:], strict=True)]
    for row, span in enumerate(spans):
        keys[row][starts[row] :] = key[span]
        values[row][starts[row] :] = value[span]
    ways = ["plain", "pieces"]
    if has_queue(dtype):
        ways.append("queue")
    for way in ways:
        batch.pieces, batch.queue = (), None
        if way == "pieces":
            batch.pieces = tuple(
                allocate_pieces(batch, KV_HEADS, *piece) for piece in ((4, 0, 64), (16, 64, 1 << 30))
            )
        elif way == "queue":
            batch.queue = allocate_queue(batch, HEADS, KV_HEADS, DIM)
        kernels.list_pieces(batch)
        torch.cuda.synchronize()  # attention would read the list before the previous kernel has written it
        actual = kernels.attend(query, key_cache, value_cache, pages, batch, scale=DIM**-0.5)
        for row, span in enumerate(spans):
            yield error(actual[span], naive.attend_row(query[span], keys[row], values[row], DIM**-0.5, None))
    source, target = pages.table[0, :1].long(), torch.tensor([FAR_UNITS - 1], device="cuda")
    kernels.copy_units(storage, source, target)
    yield 0.0 if torch.equal(storage[target].nan_to_num(), storage[source].nan_to_num()) else math.inf


def far_states(dtype: torch.dtype) -> Errors:
    """Recurrent states read from one slot and written to another, by steps and by scans."""
    A, D, bias = (normal(torch.float32, STATE_HEADS) for _ in range(3))
    A = -A.exp()
    for counts in ([1, 1, 1], [70, 1, 9]):
        sources, destinations = [FAR_SLOTS, FAR_SLOTS + 1, -1], [FAR_SLOTS + 2, FAR_SLOTS + 1, FAR_SLOTS + 3]
        batch, rows = state_rows(counts, sources, destinations)
        tokens = sum(counts)
        x = normal(dtype, tokens, STATE_HEADS, STATE_DIM)
        B, C = normal(dtype, tokens, 1, STATE_SIZE), normal(dtype, tokens, 1, STATE_SIZE)
        dt = normal(dtype, tokens, STATE_HEADS)
        storage = torch.full(
            (FAR_SLOTS + 4, 2, STATE_HEADS, STATE_DIM, STATE_SIZE), NAN, dtype=torch.float32, device="cuda"
        )
        storage[FAR_SLOTS:] = normal(torch.float32, 4, *storage.shape[1:])
        state = storage[:, 1]
        before = {slot: first_state(state, slot).clone() for slot in sources}
        actual = kernels.mamba2_scan(x, dt, B, C, Mamba2Weights(A, D, bias), state, batch)
        for span, source, destination in rows:
            expected, final = naive.mamba2_row(
                x[span], dt[span], A, B[span], C[span], D, bias, before[source]
            )
            yield error(actual[span], expected)
            yield error(state[destination], final)
        yield from far_delta(dtype, counts, sources, destinations, storage)
        yield from far_conv(dtype, counts, sources, destinations)


def far_delta(
    dtype: torch.dtype, counts: list[int], sources: list[int], destinations: list[int], storage: torch.Tensor
) -> Errors:
    batch, rows = state_rows(counts, sources, destinations)
    tokens = sum(counts)
    query, key = (normal(dtype, tokens, STATE_HEADS, STATE_SIZE) for _ in range(2))
    value = normal(dtype, tokens, STATE_HEADS, STATE_DIM)
    g = -normal(torch.float32, tokens, STATE_HEADS).exp() * 0.1
    beta = normal(torch.float32, tokens, STATE_HEADS).sigmoid()
    storage[FAR_SLOTS:] = normal(torch.float32, 4, *storage.shape[1:])
    state = storage[:, 1]
    before = {slot: first_state(state, slot).clone() for slot in sources}
    actual = kernels.gated_delta(query, key, value, g, beta, state, batch, normalise=True)
    for span, source, destination in rows:
        expected, final = naive.gated_delta_row(
            query[span], key[span], value[span], g[span], beta[span], before[source], True
        )
        yield error(actual[span], expected)
        yield error(state[destination], final)


def far_conv(dtype: torch.dtype, counts: list[int], sources: list[int], destinations: list[int]) -> Errors:
    """The taps of the convolution, in slots as large as those of the states above."""
    channels, taps = 1024, 4
    batch, rows = state_rows(counts, sources, destinations)
    wide = STATE_HEADS * STATE_DIM * STATE_SIZE
    storage = torch.full((FAR_SLOTS + 4, 2 * wide), NAN, dtype=dtype, device="cuda")
    storage[FAR_SLOTS:] = normal(dtype, 4, 2 * wide)
    state = storage[:, : channels * (taps - 1)].unflatten(1, (channels, taps - 1))
    before = {slot: first_state(state, slot).clone() for slot in sources}
    x, weight, bias = (
        normal(dtype, sum(counts), channels),
        normal(dtype, channels, taps),
        normal(dtype, channels),
    )
    actual = kernels.causal_conv(x, weight, bias, state, batch)
    for span, source, destination in rows:
        expected, final = naive.conv_row(x[span], weight, bias, before[source], True)
        yield error(actual[span], expected)
        yield error(state[destination], final)
