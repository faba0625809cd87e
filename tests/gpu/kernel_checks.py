"""Checks of kernels: each yields relative errors against a float64 formula.

A check takes the dtype of the activations. Inputs are random, unused memory is NaN, and a NaN in a result is
an infinite error.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch

from holdfast import kernels
from holdfast.bench.gpu.key_lists import allocate_pieces, allocate_queue, has_queue
from holdfast.kernels import (
    Batch,
    ExpertForm,
    Mamba2Weights,
    Rotation,
    RouterForm,
    TokenMasks,
    build_batch,
    takes_queue,
)
from holdfast.kernels import torch as reference
from holdfast.kernels.torch.sampling import waiting_times
from tests.kernels import naive
from tests.kernels.batches import NAN, fill_cache, paged_batch, relative_error

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}

Errors = Iterator[float]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error, infinite where anything is not a number."""
    value = relative_error(actual, expected)
    return value if math.isfinite(value) else math.inf


def normal(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def check_norms(dtype: torch.dtype) -> Errors:
    for width in (128, 1000, 4096, 5120):
        x, residual, weight = normal(dtype, 37, width), normal(dtype, 37, width), normal(dtype, width)
        yield error(kernels.rms_norm(x, weight, 1e-5), naive.rms_norm(x, weight, 1e-5))
        normed, total = kernels.rms_norm_residual(x, residual, weight, 1e-5, offset=1.0, multiplier=0.5)
        yield error(total, residual.double() + 0.5 * x.double())
        yield error(normed, naive.rms_norm(total, weight, 1e-5, 1.0))
    x, gate, weight = normal(dtype, 9, 8192), normal(dtype, 9, 16384)[:, :8192], normal(dtype, 8192)
    for group in (8192, 1024):
        for first in (False, True):
            actual = kernels.rms_norm_gated(x, gate, weight, 1e-5, group_size=group, norm_before_gate=first)
            yield error(actual, naive.rms_norm_gated(x, gate, weight, 1e-5, group, first))


def check_activations(dtype: torch.dtype) -> Errors:
    x = normal(dtype, 65, 2 * 1536) * 3
    yield error(kernels.swiglu(x), naive.activate(x, "swiglu"))
    yield error(kernels.geglu(x), naive.activate(x, "geglu"))
    yield error(kernels.swiglu_clamped(x), naive.activate(x, "swiglu_clamped"))
    yield error(kernels.relu_squared(x), naive.activate(x, "relu_squared"))


def check_rotary(dtype: torch.dtype) -> Errors:
    for page_size, dim, half, norms in (
        (16, 128, 64, True),
        (64, 256, 32, False),
        (1, 64, 0, True),
        (5, 80, 40, True),
    ):
        batch, total = paged_batch([100, 1, 30], [0, 77, 900], page_size, device="cuda")
        assert batch.full is not None
        fused = normal(dtype, 131, (12 + 2 * 4) * dim)
        query, key, value = (part.view(131, -1, dim) for part in fused.split([12 * dim, 4 * dim, 4 * dim], 1))
        cos_sin = normal(torch.float32, 1024, 2 * half) if half else None
        weights = [normal(dtype, dim) if norms else None for _ in range(2)]
        storage = torch.full((total, 2, 2, page_size, 4, dim), NAN, device="cuda", dtype=dtype)
        rotation = Rotation(cos_sin, weights[0], weights[1])
        key_cache, value_cache = storage[:, 1, 0], storage[:, 1, 1]
        out = kernels.rotate_and_write(
            query, key, value, key_cache, value_cache, batch.full.slots, batch.positions, rotation
        )
        for actual, part, weight in ((out, query, weights[0]), (None, key, weights[1])):
            expected = part.double() if weight is None else naive.rms_norm(part, weight, 1e-6)
            if cos_sin is not None:
                expected = naive.rotate(expected, cos_sin, batch.positions)
            if actual is None:
                actual = storage.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[1, 0, batch.full.slots]
            yield error(actual, expected)
        yield 0.0 if int((~storage.isnan()).sum()) == 2 * 131 * 4 * dim else math.inf


ATTENTION = {
    "decode": ([1] * 9, [0, 1, 63, 64, 500, 1023, 4000, 12, 130]),
    "prefill": ([200, 1000, 64], [0, 0, 0]),
    "mixed": ([1, 37, 1, 300, 1, 0, 5], [2000, 512, 0, 33, 129, 0, 3000]),
    "extend": ([32], [9000]),
}


def check_attend(dtype: torch.dtype) -> Errors:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    shapes = [
        (8, 2, 128, 16, None),
        (14, 2, 64, 1, None),
        (16, 2, 64, 32, 128),
        (4, 2, 256, 64, 100),
        (6, 6, 80, 3, None),
    ]
    shapes += [(32, 8, 128, 256, None), (8, 1, 96, 128, 700)]
    for heads, kv_heads, dim, page_size, window in shapes:
        for counts, starts in ATTENTION.values():
            batch, total = paged_batch(counts, starts, page_size, window=window, device="cuda")
            storage, keys, values = fill_cache(batch, total, kv_heads, dim, dtype=dtype, generator=generator)
            query = normal(dtype, sum(counts), heads, dim)
            sinks = normal(torch.float32, heads) if window == 128 else None
            softcap = 20.0 if window == 100 else None
            pages = batch.full or batch.window
            assert pages is not None
            actual = kernels.attend(
                query, storage[:, 1, 0], storage[:, 1, 1], pages, batch,
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


STATES = {
    "decode": ([1] * 5, [0, -1, 2, 3, 4], [0, 1, 6, 3, 7]),
    "prefill": ([150, 70], [-1, 1], [0, 2]),
    "mixed": ([1, 133, 1, 2, 64], [0, 1, -1, 3, 4], [6, 1, 2, 7, 4]),
}


def state_rows(
    counts: Sequence[int], sources: Sequence[int], destinations: Sequence[int]
) -> tuple[Batch, Iterator[tuple[slice, int, int]]]:
    batch = build_batch(
        [[0] * count for count in counts], [0] * len(counts),
        state_source=sources, state_destination=destinations, device="cuda",
    )  # fmt: skip
    offsets = batch.row_start.tolist()
    spans = [slice(begin, end) for begin, end in pairwise(offsets)]
    return batch, zip(spans, sources, destinations, strict=True)


def states_of(*shape: int) -> torch.Tensor:
    """Layer 1 of eight slots; slot 5 is poison."""
    storage = normal(torch.float32, 8, 2, *shape)
    storage[5] = NAN
    return storage[:, 1]


def first_state(states: torch.Tensor, source: int) -> torch.Tensor:
    return states[source] if source >= 0 else torch.zeros_like(states[0])


def check_conv(dtype: torch.dtype) -> Errors:
    for channels, taps in ((10240, 4), (33, 2), (700, 3)):
        weight, bias = normal(dtype, channels, taps), normal(dtype, channels)
        for counts, sources, destinations in STATES.values():
            batch, rows = state_rows(counts, sources, destinations)
            x = normal(dtype, sum(counts), channels + 8)[:, :channels]
            state = states_of(channels, taps - 1).to(dtype)
            before = state.clone()
            actual = kernels.causal_conv(x, weight, bias, state, batch)
            for span, source, destination in rows:
                expected, final = naive.conv_row(x[span], weight, bias, first_state(before, source), True)
                yield error(actual[span], expected)
                yield error(state[destination], final)
            yield 0.0 if bool(state[5].isnan().all()) else math.inf


def check_mamba2(dtype: torch.dtype) -> Errors:
    for heads, dim, groups, size in ((16, 64, 2, 128), (6, 128, 1, 256), (5, 48, 5, 16)):
        A, D, bias = (
            -normal(torch.float32, heads).exp(),
            normal(torch.float32, heads),
            normal(torch.float32, heads),
        )
        weights = Mamba2Weights(A, D, bias)
        for counts, sources, destinations in STATES.values():
            batch, rows = state_rows(counts, sources, destinations)
            tokens = sum(counts)
            fused = normal(dtype, tokens, heads * dim + 2 * groups * size)
            x, B, C = fused.split([heads * dim, groups * size, groups * size], 1)
            x, B, C = x.view(tokens, heads, dim), B.view(tokens, groups, size), C.view(tokens, groups, size)
            dt = normal(dtype, tokens, heads)
            state = states_of(heads, dim, size)
            before = state.clone()
            actual = kernels.mamba2_scan(x, dt, B, C, weights, state, batch)
            for span, source, destination in rows:
                expected, final = naive.mamba2_row(
                    x[span], dt[span], A, B[span], C[span], D, bias, first_state(before, source)
                )
                yield error(actual[span], expected)
                yield error(state[destination], final)
            yield 0.0 if bool(state[5].isnan().all()) else math.inf


def check_gated_delta(dtype: torch.dtype) -> Errors:
    for key_heads, heads, size, dim in ((2, 4, 128, 128), (3, 3, 64, 48), (1, 2, 256, 64)):
        for counts, sources, destinations in STATES.values():
            batch, rows = state_rows(counts, sources, destinations)
            tokens = sum(counts)
            query, key = normal(dtype, tokens, key_heads, size), normal(dtype, tokens, key_heads, size)
            value = normal(dtype, tokens, heads, dim)
            g = -normal(torch.float32, tokens, heads).exp() * 0.1
            beta = normal(torch.float32, tokens, heads).sigmoid()
            state = states_of(heads, dim, size)
            before = state.clone()
            actual = kernels.gated_delta(query, key, value, g, beta, state, batch, normalise=True)
            for span, source, destination in rows:
                expected, final = naive.gated_delta_row(
                    query[span],
                    key[span],
                    value[span],
                    g[span],
                    beta[span],
                    first_state(before, source),
                    True,
                )
                yield error(actual[span], expected)
                yield error(state[destination], final)
            yield 0.0 if bool(state[5].isnan().all()) else math.inf


def check_pieces(dtype: torch.dtype) -> Errors:
    """Keys split into pieces by the device, for short and long rows, twice, to check that counters reset."""
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    rows_of = (
        ([1, 255, 256, 257, 9000, 64], [1] * 6),
        ([300] * 70, [1] * 70),
        ([1300, 40, 1320, 3000, 33, 700, 2], [1, 40, 32, 1, 1, 100, 2]),
        ([2500, 3], [128, 1]),
    )
    for heads, kv_heads, dim, page_size in (
        (32, 8, 128, 64),
        (14, 2, 64, 1),
        (8, 1, 256, 16),
        (64, 8, 64, 5),
    ):
        for contexts, counts in rows_of:
            starts = [context - count for context, count in zip(contexts, counts, strict=True)]
            batch, total = paged_batch(counts, starts, page_size, device="cuda")
            storage, keys, values = fill_cache(batch, total, kv_heads, dim, dtype=dtype, generator=generator)
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
                    query, storage[:, 1, 0], storage[:, 1, 1], batch.full, batch, scale=dim**-0.5, sinks=sinks
                )
                yield from row_errors(actual, query, counts, keys, values, sinks)
            yield float(sum(int(pieces.arrived.abs().sum()) for pieces in batch.pieces))


def row_errors(
    actual: torch.Tensor,
    query: torch.Tensor,
    counts: Sequence[int],
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
) -> Errors:
    """The error of the attention of each row."""
    begin = 0
    for row, count in enumerate(counts):
        own = slice(begin, begin + count)
        expected = naive.attend_row(query[own], keys[row], values[row], query.shape[-1] ** -0.5, None, sinks)
        yield error(actual[own], expected)
        begin += count


def queue_rows() -> list[tuple[list[int], list[int]]]:
    """Contexts and counts of steps: one-token rows, short inputs, both, and rows that end with a block."""
    chance = random.Random(4)
    return [
        ([1, 255, 256, 257, 9000, 64], [1] * 6),
        ([300] * 70, [1] * 70),
        ([1300, 40, 1320, 3000, 33, 700, 2], [1, 40, 32, 1, 1, 100, 2]),
        ([2500, 3], [128, 1]),
        ([5], [1]),
        ([33], [33]),
        ([20000], [1]),
        ([20000], [32]),
        ([2200], [2200]),
        ([1500, 2100, 7], [1100, 800, 7]),
        (
            [chance.randint(40, 2000) for _ in range(60)],
            [chance.choice([1, 1, 1, 1, 2, 7, 16, 17, 32, 33]) for _ in range(60)],
        ),
        (
            [64 * chance.randint(1, 20) for _ in range(30)],
            [chance.choice([1, 1, 32, 64]) for _ in range(30)],
        ),
    ]


def check_queue(dtype: torch.dtype) -> Errors:
    """Keys that programs take from a queue, twice, to check that its counters reset."""
    yield 0.0
    if not has_queue(dtype):
        return
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    for heads, kv_heads, dim, page_size in (
        (32, 8, 128, 64),
        (14, 2, 64, 16),
        (64, 8, 64, 128),
        (16, 1, 128, 64),
        (40, 8, 128, 32),
        (24, 8, 128, 256),
    ):
        assert takes_queue(heads, kv_heads, dim, page_size, dtype, torch.device("cuda"))
        for contexts, counts in queue_rows():
            starts = [context - count for context, count in zip(contexts, counts, strict=True)]
            batch, total = paged_batch(counts, starts, page_size, device="cuda")
            storage, keys, values = fill_cache(batch, total, kv_heads, dim, dtype=dtype, generator=generator)
            assert batch.full is not None
            batch.queue = queue = allocate_queue(batch, heads, kv_heads, dim)
            kernels.list_pieces(batch)
            sinks = normal(torch.float32, heads) if dim == 64 else None
            query = normal(dtype, sum(counts), heads, dim)
            first = None
            for _ in range(2):
                actual = kernels.attend(
                    query, storage[:, 1, 0], storage[:, 1, 1], batch.full, batch, scale=dim**-0.5, sinks=sinks
                )
                yield from row_errors(actual, query, counts, keys, values, sinks)
                yield float(int(queue.arrived.abs().sum()) + int(queue.taken.abs().sum()))
                # The sum does not depend on which program takes a piece.
                yield 0.0 if first is None or torch.equal(actual, first) else math.inf
                first = actual


def check_queue_overlap(dtype: torch.dtype) -> Errors:
    """Attention launched while the previous kernel runs waits for the keys that that one writes."""
    yield 0.0
    if not has_queue(dtype):
        return
    heads, kv_heads, dim, page_size, layers = 32, 8, 128, 64, 4
    counts = [1] * 60 + [32] * 4
    batch, total = paged_batch(counts, [1100 + 7 * row for row in range(64)], page_size, device="cuda")
    pages = batch.full
    assert pages is not None
    storage = normal(dtype, total, layers, 2, page_size, kv_heads, dim)
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    weights = [normal(dtype, sum(sizes), heads * dim) * (heads * dim) ** -0.5 for _ in range(layers)]
    x, poison = normal(dtype, sum(counts), heads * dim), torch.full((), NAN, dtype=dtype, device="cuda")
    batch.queue = allocate_queue(batch, heads, kv_heads, dim)
    kernels.list_pieces(batch)

    def run(between: Callable[[], object]) -> torch.Tensor:
        storage[pages.slots // page_size, :, :, pages.slots % page_size] = poison
        inside = x
        for layer in range(layers):
            key_cache, value_cache = storage[:, layer, 0], storage[:, layer, 1]
            fused = kernels.linear(inside, weights[layer])
            between()
            query, key, value = (part.unflatten(1, (-1, dim)) for part in fused.split(sizes, 1))
            query = kernels.rotate_and_write(
                query, key, value, key_cache, value_cache, pages.slots, batch.positions, Rotation(None)
            )
            between()
            inside = kernels.attend(query, key_cache, value_cache, pages, batch, scale=dim**-0.5).flatten(1)
            between()
        return inside

    expected = run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = run(lambda: None)
    for _ in range(20):
        actual.fill_(NAN)
        graph.replay()
        yield float((actual != expected).sum())


def check_experts(dtype: torch.dtype) -> Errors:
    for tokens, hidden, inner, count, picks, activation in (
        (3, 256, 96, 16, 4, "swiglu"),
        (70, 320, 200, 8, 2, "swiglu_clamped"),
        (150, 128, 64, 60, 6, "relu_squared"),
    ):
        wide = inner if activation == "relu_squared" else 2 * inner
        x = normal(dtype, tokens, hidden)
        ids = torch.stack([torch.randperm(count, device="cuda")[:picks] for _ in range(tokens)])
        ids[ids == 3] = 1
        shares = normal(torch.float32, tokens, picks).softmax(-1)
        w13 = normal(dtype, count, wide, hidden) * hidden**-0.5
        w2 = normal(dtype, count, hidden, inner) * inner**-0.5
        b13, b2 = normal(dtype, count, wide), normal(dtype, count, hidden)
        form = ExpertForm(activation, bias13=b13, bias2=b2)
        actual = kernels.experts(x, ids, shares, w13, w2, form)
        yield error(actual, naive.experts(x, ids, shares, w13, w2, activation, b13, b2))


def check_router(dtype: torch.dtype) -> Errors:
    """Shares, and picks but for equals; weights of the inputs' type and float32 ones."""
    for tokens, hidden, experts, form in (
        (1, 2048, 128, RouterForm("softmax_then_top", 8, True)),
        (64, 2880, 32, RouterForm("top_then_softmax", 4)),
        (65, 2048, 512, RouterForm("softmax_then_top", 10, True)),
        (7, 1000, 20, RouterForm("sigmoid_in_groups", 6, True, scale=2.5)),
        (300, 256, 60, RouterForm("sigmoid_in_groups", 6, groups=4, groups_kept=2)),
    ):
        x, bias = normal(dtype, tokens, hidden), normal(torch.float32, experts)
        offset = None if form.kind == "softmax_then_top" else bias
        for kind in {dtype, torch.float32}:
            weight = normal(kind, experts, hidden) * hidden**-0.5
            ids, shares = kernels.route(x, weight, offset, form)
            added = None if offset is None else offset.cpu()
            expected_ids, expected = naive.route(x.cpu(), weight.cpu(), added, form)
            same = ids.cpu() == torch.tensor(expected_ids)
            yield error(shares.cpu(), expected) if same.float().mean() > 0.99 else math.inf


def check_units(dtype: torch.dtype) -> Errors:
    storage = normal(dtype, 40, 3, 2, 16, 5)
    before = storage.clone()
    kernels.copy_units(storage, torch.tensor([0, 9], device="cuda"), torch.tensor([30, 2], device="cuda"))
    before[30], before[2] = before[0], before[9]
    yield 0.0 if torch.equal(storage, before) else math.inf
    tier = torch.full_like(storage, NAN, device="cpu").pin_memory()
    down, up = torch.tensor([7, 1], device="cuda"), torch.tensor([3, 8], device="cuda")
    kernels.move_units(storage, down, tier, up)
    storage[[7, 1]] = NAN
    kernels.move_units(tier, up, storage, down)
    yield 0.0 if torch.equal(storage, before) else math.inf
    words, arrived = torch.arange(5003, dtype=torch.int32).pin_memory(), torch.zeros(6000).int().pin_memory()
    brought = torch.zeros(6000, dtype=torch.int32, device="cuda")
    kernels.carry(words[1:], brought[3 : 3 + 5002])
    kernels.carry(brought[2:5007], arrived[1:5006])
    torch.cuda.synchronize()
    yield 0.0 if arrived.tolist() == [0, 0, *range(1, 5003), *[0] * 996] else math.inf


def check_sampling(dtype: torch.dtype) -> Errors:
    """The same tokens as the reference on the CPU, except in rows that rounding decides."""
    rows, width = 96, 151_936
    logits = normal(dtype, rows, width) * torch.tensor([1.0, 2.0, 5.0], device="cuda").to(dtype).repeat(
        32
    ).unsqueeze(1)
    places = torch.arange(rows)
    given = [
        torch.tensor([0.0, 0.6, 1.0, 1.3]).repeat(24),
        torch.where(places % 2 == 0, 0, 20).int(),
        torch.where(places % 3 == 0, 1.0, 0.9),
        torch.where(places % 5 == 0, 0.05, 0.0),
        places * 1_000_003 + 2**40,
        (places + 7).int(),
    ]
    expected = reference.sample_tokens(logits.cpu(), *given)
    actual = kernels.sample_tokens(logits, *[value.cuda() for value in given]).cpu()
    yield 0.0 if int((actual != expected).sum()) <= 2 else math.inf
    logits[4, 77] = NAN
    yield 0.0 if int(kernels.sample_tokens(logits, *[value.cuda() for value in given])[4]) == -1 else math.inf


def check_masked_sampling(dtype: torch.dtype) -> Errors:
    """Under masks: the tokens of the float64 formula, except in rows that rounding decides."""
    rows, width = 24, 8_210
    logits = normal(dtype, rows, width) * torch.tensor([1.0, 4.0], device="cuda").to(dtype).repeat(
        12
    ).unsqueeze(1)
    places = torch.arange(rows)
    given = [
        torch.tensor([0.0, 0.6, 1.0, 1.3]).repeat(6),
        torch.where(places % 2 == 0, 0, 20).int(),
        torch.where(places % 3 == 0, 1.0, 0.9),
        torch.where(places % 5 == 0, 0.05, 0.0),
        places * 1_000_003 + 2**40,
        (places + 7).int(),
    ]
    shares = torch.tensor([0.0005, 0.05, 0.9, 1.0, 0.0]).unsqueeze(1)
    allowed = torch.rand(5, width) < shares
    allowed[:4, 17] = True
    mask_rows = (places % 6 - 1).int()
    on_device = [value.cuda() for value in given]
    masks = TokenMasks(naive.packed_mask(allowed).cuda(), mask_rows.cuda())
    actual = kernels.sample_tokens(logits, *on_device, masks=masks).tolist()
    heat, top_k, top_p, min_p, seeds, positions = given
    times = waiting_times(seeds, positions, torch.arange(width).unsqueeze(0))
    everything = torch.ones(width, dtype=torch.bool)
    values, different = logits.cpu(), 0
    for row in range(rows):
        mask = everything if mask_rows[row] < 0 else allowed[mask_rows[row]]
        numbers = float(heat[row]), int(top_k[row]), float(top_p[row]), float(min_p[row])
        expected = naive.sampled_token(values[row], mask, *numbers, times[row])
        different += actual[row] != expected
        yield 0.0 if actual[row] < 0 or mask[actual[row]] else math.inf
        yield 0.0 if (actual[row] < 0) == (expected < 0) else math.inf
    yield 0.0 if different <= 1 else math.inf
    # All tokens allowed: as without a mask. Logits that the mask forbids do not matter.
    whole = masks._replace(rows=torch.full((rows,), 3, dtype=torch.int32, device="cuda"))
    plain = kernels.sample_tokens(logits, *on_device)
    yield 0.0 if torch.equal(kernels.sample_tokens(logits, *on_device, masks=whole), plain) else math.inf
    only = torch.zeros(1, width, dtype=torch.bool)
    only[0, width - 1] = True
    logits[:, :100] = NAN
    last = TokenMasks(naive.packed_mask(only).cuda(), torch.zeros_like(whole.rows))
    yield (
        0.0
        if set(kernels.sample_tokens(logits, *on_device, masks=last).tolist()) == {width - 1}
        else math.inf
    )


KERNEL_CHECKS: dict[str, Callable[[torch.dtype], Errors]] = {
    "norms": check_norms,
    "activations": check_activations,
    "rotary": check_rotary,
    "attend": check_attend,
    "conv": check_conv,
    "mamba2": check_mamba2,
    "gated_delta": check_gated_delta,
    "pieces": check_pieces,
    "queue": check_queue,
    "queue overlap": check_queue_overlap,
    "experts": check_experts,
    "router": check_router,
    "units": check_units,
    "sampling": check_sampling,
    "masked sampling": check_masked_sampling,
}
