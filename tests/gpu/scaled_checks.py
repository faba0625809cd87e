"""Checks of kernels over KV caches in eight bits, against float64 formulas over what is stored."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch

from holdfast import kernels
from holdfast.bench.gpu.key_lists import allocate_pieces, allocate_queue, has_queue
from holdfast.kernels import Rotation, ScaledCache, takes_scaled_queue
from holdfast.kernels import torch as reference
from holdfast.kernels.torch.scaled import decode, encode
from tests.gpu.kernel_checks import ATTENTION, Errors, error, normal, row_errors
from tests.kernels import naive
from tests.kernels.batches import fill_cache, paged_batch, scaled_caches

ROUNDING = 2.0**-4
"""Half a step of three bits of mantissa."""


def check_scaled_write(dtype: torch.dtype) -> Errors:
    """Bytes equal the reference's, except where the last place of float32 decides; no others are written."""
    for page_size, dim, half, norms in ((16, 128, 64, True), (64, 256, 32, False), (5, 80, 40, True)):
        batch, total = paged_batch([100, 1, 30], [0, 77, 900], page_size, device="cuda")
        assert batch.full is not None
        fused = normal(dtype, 131, (12 + 2 * 4) * dim) * 3
        query, key, value = (part.view(131, -1, dim) for part in fused.split([12 * dim, 4 * dim, 4 * dim], 1))
        value = value * 10.0 ** torch.linspace(-5, 3, 131, device="cuda").view(-1, 1, 1).to(dtype)
        cos_sin = normal(torch.float32, 1024, 2 * half)
        weights = [normal(dtype, dim) if norms else None for _ in range(2)]
        codes = torch.full((total, 2, page_size, 4, dim), 127, dtype=torch.uint8, device="cuda")
        scales = torch.full((total, 2, 4, page_size), 255, dtype=torch.uint8, device="cuda")
        caches = [ScaledCache(codes[:, part], scales[:, part]) for part in range(2)]
        rotation = Rotation(cos_sin, weights[0], weights[1])
        slots = batch.full.slots
        kernels.rotate_and_write(query, key, value, *caches, slots, batch.positions, rotation)
        expected = key.double() if weights[1] is None else naive.rms_norm(key, weights[1], 1e-6)
        expected = naive.rotate(expected, cos_sin, batch.positions)
        for cache, wanted in zip(caches, (expected, value.double()), strict=True):
            stored = cache.codes.flatten(0, 1)[slots], cache.scales.transpose(1, 2).flatten(0, 1)[slots]
            right = encode(wanted)
            different = (stored[0] != right[0]).float().mean() + (stored[1] != right[1]).float().mean()
            yield 0.0 if float(different) < 1e-3 else math.inf
            yield max(0.0, error(decode(*stored), wanted) - ROUNDING)
        yield 0.0 if int((scales != 255).sum()) == 2 * 131 * 4 else math.inf


def check_scaled_attend(dtype: torch.dtype) -> Errors:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    for heads, kv_heads, dim, page_size, window in (
        (8, 2, 128, 16, None),
        (14, 2, 64, 1, None),
        (16, 2, 64, 32, 128),
        (4, 2, 256, 64, 100),
        (6, 6, 80, 3, None),
        (32, 8, 128, 256, None),
        (32, 8, 128, 64, None),
    ):
        for counts, starts in ATTENTION.values():
            batch, total = paged_batch(counts, starts, page_size, window=window, device="cuda")
            storage, keys, values = fill_cache(batch, total, kv_heads, dim, generator=generator)
            key_cache, value_cache, keys, values = scaled_caches(storage, keys, values)
            query = normal(dtype, sum(counts), heads, dim)
            sinks = normal(torch.float32, heads) if window == 128 else None
            softcap = 20.0 if window == 100 else None
            pages = batch.full or batch.window
            assert pages is not None
            actual = kernels.attend(
                query, key_cache, value_cache, pages, batch,
                scale=dim**-0.5, window=window, sinks=sinks, softcap=softcap,
            )  # fmt: skip
            offsets = batch.row_start.tolist()
            for row in range(batch.rows):
                span = slice(offsets[row], offsets[row + 1])
                if span.start < span.stop:
                    expected = naive.attend_row(
                        query[span], keys[row], values[row], dim**-0.5, window, sinks, softcap
                    )
                    yield error(actual[span], expected)


def check_scaled_pieces(dtype: torch.dtype) -> Errors:
    """Keys split into pieces by the device, twice, to check that counters reset."""
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    rows_of = (
        ([1, 255, 256, 257, 9000, 64], [1] * 6),
        ([300] * 70, [1] * 70),
        ([1300, 40, 1320, 3000, 33, 700, 2], [1, 40, 32, 1, 1, 100, 2]),
        ([2500, 3], [128, 1]),
    )
    for heads, kv_heads, dim, page_size in ((32, 8, 128, 64), (14, 2, 64, 1), (8, 1, 256, 16)):
        for contexts, counts in rows_of:
            starts = [context - count for context, count in zip(contexts, counts, strict=True)]
            batch, total = paged_batch(counts, starts, page_size, device="cuda")
            storage, keys, values = fill_cache(batch, total, kv_heads, dim, generator=generator)
            key_cache, value_cache, keys, values = scaled_caches(storage, keys, values)
            assert batch.full is not None
            group = heads // kv_heads
            batch.pieces = tuple(
                allocate_pieces(batch, kv_heads, max(1, height // group), above, most)
                for height, above, most in ((16, 0, 64), (64, 64, 1 << 30))
            )
            kernels.list_pieces(batch)
            sinks = normal(torch.float32, heads) if dim == 64 else None
            query = normal(dtype, sum(counts), heads, dim)
            for _ in range(2):
                actual = kernels.attend(
                    query, key_cache, value_cache, batch.full, batch, scale=dim**-0.5, sinks=sinks
                )
                yield from row_errors(actual, query, counts, keys, values, sinks)
            yield float(sum(int(pieces.arrived.abs().sum()) for pieces in batch.pieces))


def check_scaled_queue(dtype: torch.dtype) -> Errors:
    """Keys that programs take from a queue, twice, to check that its counters reset."""
    yield 0.0
    if not has_queue(dtype):
        return
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    for heads, kv_heads, dim, page_size in (
        (32, 8, 128, 64),
        (14, 2, 64, 16),
        (64, 8, 64, 128),
        (8, 1, 128, 64),
        (40, 8, 128, 32),
        (8, 8, 128, 256),
    ):
        assert takes_scaled_queue(heads, kv_heads, dim, page_size, dtype, torch.device("cuda"))
        for contexts in (
            [1, 255, 256, 257, 9000, 64],
            [300] * 70,
            [5],
            [20000],
            [8192] * 3,
            list(range(1, 99)),
        ):
            counts = [1] * len(contexts)
            batch, total = paged_batch(counts, [each - 1 for each in contexts], page_size, device="cuda")
            storage, keys, values = fill_cache(batch, total, kv_heads, dim, generator=generator)
            key_cache, value_cache, keys, values = scaled_caches(storage, keys, values)
            assert batch.full is not None
            batch.queue = queue = allocate_queue(batch, heads, kv_heads, dim)
            kernels.list_pieces(batch)
            sinks = normal(torch.float32, heads) if dim == 64 else None
            query = normal(dtype, sum(counts), heads, dim)
            query[:, ::3] *= 100.0
            first = None
            for _ in range(2):
                actual = kernels.attend(
                    query, key_cache, value_cache, batch.full, batch, scale=dim**-0.5, sinks=sinks
                )
                yield from row_errors(actual, query, counts, keys, values, sinks)
                yield float(int(queue.arrived.abs().sum()) + int(queue.taken.abs().sum()))
                # The sum does not depend on which program takes a piece.
                yield 0.0 if first is None or torch.equal(actual, first) else math.inf
                first = actual


def check_scaled_overlap(dtype: torch.dtype) -> Errors:
    """Attention launched while the previous kernel runs waits for the keys that that one writes."""
    yield 0.0
    if not has_queue(dtype):
        return
    heads, kv_heads, dim, page_size, layers, rows = 32, 8, 128, 64, 4, 64
    batch, total = paged_batch([1] * rows, [1100 + 7 * row for row in range(rows)], page_size, device="cuda")
    pages = batch.full
    assert pages is not None
    codes, scales = encode(normal(dtype, total, layers, 2, page_size, kv_heads, dim))
    scales = scales.transpose(-1, -2).contiguous()
    poison = torch.full((), 127, dtype=torch.uint8, device="cuda")
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    weights = [normal(dtype, sum(sizes), heads * dim) * (heads * dim) ** -0.5 for _ in range(layers)]
    x = normal(dtype, rows, heads * dim)
    batch.queue = allocate_queue(batch, heads, kv_heads, dim)
    kernels.list_pieces(batch)

    def run(between: Callable[[], object]) -> torch.Tensor:
        codes[pages.slots // page_size, :, :, pages.slots % page_size] = poison
        inside = x
        for layer in range(layers):
            caches = [ScaledCache(codes[:, layer, part], scales[:, layer, part]) for part in range(2)]
            fused = kernels.linear(inside, weights[layer])
            between()
            query, key, value = (part.unflatten(1, (-1, dim)) for part in fused.split(sizes, 1))
            query = kernels.rotate_and_write(
                query, key, value, *caches, pages.slots, batch.positions, Rotation(None)
            )
            between()
            inside = kernels.attend(query, *caches, pages, batch, scale=dim**-0.5).flatten(1)
            between()
        return inside

    expected = run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = run(lambda: None)
    for _ in range(20):
        actual.fill_(math.nan)
        graph.replay()
        yield float((actual != expected).sum())


def check_resting_states(dtype: torch.dtype) -> Errors:
    """The same bytes as the reference, except where the last place of float32 decides, and back."""
    for rows, width in ((24 * 16 * 64, 128), (3 * 5, 80), (7, 256)):
        running = (
            normal(torch.float32, 6, rows, width)
            * 10.0 ** torch.linspace(-5, 5, rows, device="cuda")[:, None]
        )
        codes = torch.full((9, rows, width), 99, dtype=torch.int8, device="cuda")
        scales = torch.full((9, rows), -1.0, device="cuda")
        slots, places = torch.tensor([5, 0, 2], device="cuda"), torch.tensor([1, 8, 4], device="cuda")
        kernels.rest_states(running, slots, codes, scales, places)
        right = [tensor.cpu() for tensor in (torch.full_like(codes, 99), torch.full_like(scales, -1.0))]
        reference.rest_states(running.cpu(), slots.cpu(), right[0], right[1], places.cpu())
        yield error(scales, right[1])
        yield 0.0 if float((codes.cpu() != right[0]).float().mean()) < 1e-4 else math.inf
        back = torch.full_like(running, math.nan)
        kernels.wake_states(codes, scales, places, back, slots)
        expected = codes[places].double() * scales[places].double().unsqueeze(-1)
        yield error(back[slots], expected)
        yield 0.0 if bool(back[[1, 3, 4]].isnan().all()) else math.inf


SCALED_CHECKS = {
    "scaled write": check_scaled_write,
    "scaled attend": check_scaled_attend,
    "scaled pieces": check_scaled_pieces,
    "scaled queue": check_scaled_queue,
    "scaled overlap": check_scaled_overlap,
    "resting states": check_resting_states,
}
