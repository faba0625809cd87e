"""The timed cases of `holdfast.bench.gpu.kernels`: real layer shapes, with the bytes and operations of each.

A case is built when its turn comes, so that the tensors of the last one are freed before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Literal, NamedTuple

import torch
from torch.nn import functional

from holdfast import kernels
from holdfast.bench.gpu.key_lists import allocate_pieces, allocate_queue, has_queue
from holdfast.kernels import Batch, Mamba2Weights, Pages, Rotation, ScaledCache

BF16 = torch.bfloat16
Reader = Literal["library", "ours", "twelve"]
"""Which kernels multiply: the library's, ours, or ours on weights packed in twelve bits."""

Way = Literal["alone", "pieces", "queue"]
"""How the keys of a step are split: per row, in pieces, or in a queue that the device fills."""


class Case(NamedTuple):
    """A call to time, with the bytes that it moves and its floating-point operations."""

    name: str
    shape: str
    call: Callable[[], object]
    bytes_moved: float
    operations: float = 0.0
    repeats: int = 20


def random_tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype).normal_()


def batch_of(
    counts: list[int], start: int, page_size: int | None = None, slots: int = 0
) -> tuple[Batch, int]:
    """Rows from `start` on, over shuffled pages; row i reads state slot i and writes slot i + `slots`."""
    rows, tokens = len(counts), sum(counts)
    contexts = torch.tensor([start + count for count in counts], dtype=torch.int32)
    row_start = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(start, start + count) for count in counts])
    pages, units = None, 0
    if page_size is not None:
        width = -(-int(contexts.max()) // page_size)
        units = rows * width
        table = torch.randperm(units).to(torch.int32).view(rows, width)
        token_row = torch.repeat_interleave(torch.arange(rows), torch.tensor(counts))
        places = table[token_row, positions // page_size].long() * page_size + positions % page_size
        pages = Pages(table.cuda(), places.cuda(), page_size)
    numbers = torch.arange(rows, dtype=torch.int32).cuda()
    batch = Batch(
        tokens=torch.zeros(tokens, dtype=torch.int64, device="cuda"),
        positions=positions.cuda(),
        row_start=row_start.cuda(),
        context=contexts.cuda(),
        state_source=numbers,
        state_destination=numbers + slots,
        full=pages,
        window=pages,
        rows=rows,
        count_max=max(counts),
        context_max=int(contexts.max()),
        rows_of_one=sum(count == 1 for count in counts),
    )
    return batch, units


class Heads(NamedTuple):
    """The attention heads of a model."""

    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    sinks: bool = False


DENSE = Heads(32, 8, 128)
GPT_OSS = Heads(64, 8, 64, 128, True)
GEMMA = Heads(8, 4, 256, 1024)


def share_keys(batch: Batch, heads: Heads, way: Way) -> None:
    """Split the batch's keys as the engine does."""
    group = heads.heads // heads.kv_heads
    if way == "pieces":
        batch.pieces = tuple(
            allocate_pieces(batch, heads.kv_heads, max(1, height // group), above, most)
            for height, above, most in ((16, 0, 64), (64, 64, batch.count_max))
            if most > above
        )
    elif way == "queue":
        batch.queue = allocate_queue(batch, heads.heads, heads.kv_heads, heads.dim)
    kernels.list_pieces(batch)
    torch.cuda.synchronize()


def attention(
    counts: list[int], start: int, page_size: int, heads: Heads, label: str, way: Way = "alone"
) -> Case:
    batch, units = batch_of(counts, start, page_size)
    share_keys(batch, heads, way)
    storage = random_tensor(units, 1, 2, page_size, heads.kv_heads, heads.dim)
    query = random_tensor(sum(counts), heads.heads, heads.dim)
    sinks = random_tensor(heads.heads, dtype=torch.float32) if heads.sinks else None
    assert batch.full is not None
    call = partial(
        kernels.attend, query, storage[:, 0, 0], storage[:, 0, 1], batch.full, batch,
        scale=heads.dim**-0.5, window=heads.window, sinks=sinks,
    )  # fmt: skip
    seen, read = 0.0, 0.0
    for count in counts:
        for position in range(start, start + count):
            seen += min(position + 1, heads.window or position + 1)
        read += min(start + count, (heads.window or start) + count)
    moved = read * 2 * heads.kv_heads * heads.dim * 2 + 2 * query.numel() * 2
    listed = "" if way == "alone" else f" {way}"
    shape = f"{label} {heads.heads}/{heads.kv_heads}x{heads.dim} page {page_size}{listed}"
    return Case("attend", shape, call, moved, 4.0 * seen * heads.heads * heads.dim, 5 if moved > 4e9 else 20)


def scaled_attention(rows: int, context: int, page_size: int, heads: Heads, way: Way) -> Case:
    """One-token rows over keys and values in eight bits."""
    batch, units = batch_of([1] * rows, context - 1, page_size)
    share_keys(batch, heads, way)
    shape = (units, 2, page_size, heads.kv_heads, heads.dim)
    codes = torch.randint(0, 120, shape, dtype=torch.uint8, device="cuda")
    scales = torch.full((units, 2, heads.kv_heads, page_size), 120, dtype=torch.uint8, device="cuda")
    key, value = (ScaledCache(codes[:, part], scales[:, part]) for part in range(2))
    query = random_tensor(rows, heads.heads, heads.dim)
    assert batch.full is not None
    call = partial(kernels.attend, query, key, value, batch.full, batch, scale=heads.dim**-0.5)
    moved = rows * context * 2 * heads.kv_heads * (heads.dim + 1) + 2 * query.numel() * 2
    label = f"decode {rows} x {context} {heads.heads}/{heads.kv_heads}x{heads.dim} page {page_size} {way}"
    operations = 4.0 * rows * context * heads.heads * heads.dim
    return Case("attend fp8", label, call, moved, operations, 5 if moved > 4e9 else 20)


def norm(tokens: int) -> Case:
    x, residual, weight = random_tensor(tokens, 4096), random_tensor(tokens, 4096), random_tensor(4096)
    call = partial(kernels.rms_norm_residual, x, residual, weight, 1e-6)
    return Case("norm_residual", f"{tokens} x 4096", call, tokens * 4096 * 2 * 4)


def gated_norm(tokens: int) -> Case:
    x, gate, weight = random_tensor(tokens, 8192), random_tensor(tokens, 8192), random_tensor(8192)
    call = partial(kernels.rms_norm_gated, x, gate, weight, 1e-6, group_size=1024)
    return Case("norm_gated", f"{tokens} x 8192 groups of 1024", call, tokens * 8192 * 2 * 3)


def swiglu(tokens: int) -> Case:
    gate_up = random_tensor(tokens, 2 * 12288)
    return Case("swiglu", f"{tokens} x 12288", partial(kernels.swiglu, gate_up), tokens * 12288 * 2 * 3)


def copies(weight: torch.Tensor, gated: bool, reader: Reader) -> kernels.TwelveBits | None:
    return kernels.pack_weight(weight, gated) if reader == "twelve" else None


def layer(tokens: int, reader: Reader) -> Case:
    """The products and norms of eight layers of Qwen3-8B in turn, so that no weight is cached."""
    shapes = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
    layers = [[random_tensor(*shape).mul_(0.02) for shape in shapes] for _ in range(8)]
    packed = cycle([copies(weights[2], True, reader) for weights in layers])
    turns, library = cycle(layers), reader == "library"
    x, scale = random_tensor(tokens, 4096), torch.ones(4096, dtype=BF16, device="cuda")

    def call() -> torch.Tensor:
        wide, back, first, second = next(turns)
        multiply = functional.linear if library else kernels.linear
        multiply(x, wide)
        inner = kernels.rms_norm(multiply(x, back), scale, 1e-6)
        if library:
            inner = kernels.swiglu(functional.linear(inner, first))
        else:
            inner = kernels.linear_gated(inner, first, None, "swiglu", next(packed))
        return kernels.rms_norm(multiply(inner, second), scale, 1e-6)

    weights = sum(rows * depth for rows, depth in shapes)
    shape = f"{tokens} tokens, products and norms, {reader}"
    return Case("layer", shape, call, 2.0 * weights, 2.0 * tokens * weights, 16)


def product(tokens: int, outputs: int, depth: int, reader: Reader) -> Case:
    """One product with eight weights in turn; a tall weight is gate and up, with the activation."""
    gated = outputs >= 24576
    weights = [random_tensor(outputs, depth).mul_(0.02) for _ in range(8)]
    turns, packed = cycle(weights), cycle([copies(weight, gated, reader) for weight in weights])
    x, library = random_tensor(tokens, depth), reader == "library"

    def call() -> torch.Tensor:
        weight, twelve = next(turns), next(packed)
        if not gated:
            return functional.linear(x, weight) if library else kernels.linear(x, weight, None, twelve)
        if library:
            return kernels.swiglu(functional.linear(x, weight))
        return kernels.linear_gated(x, weight, None, "swiglu", twelve)

    size = outputs * depth
    shape = f"{tokens} tokens, {outputs} x {depth}, {reader}"
    return Case("product", shape, call, 2.0 * size, 2.0 * tokens * size, 16)


def rotary(tokens: int) -> Case:
    batch, units = batch_of([1] * tokens, 1000, 16) if tokens <= 256 else batch_of([tokens], 0, 16)
    storage = random_tensor(units, 1, 2, 16, 8, 128)
    fused = random_tensor(tokens, 48 * 128)
    query, key, value = (part.view(tokens, -1, 128) for part in fused.split([4096, 1024, 1024], 1))
    rotation = Rotation(
        random_tensor(40960, 128, dtype=torch.float32), random_tensor(128), random_tensor(128)
    )
    assert batch.full is not None
    call = partial(
        kernels.rotate_and_write, query, key, value, storage[:, 0, 0], storage[:, 0, 1],
        batch.full.slots, batch.positions, rotation,
    )  # fmt: skip
    return Case("rotary_write", f"{tokens} tokens 32/8x128 with norms", call, tokens * 48 * 128 * 2 * 2)


def conv(counts: list[int], label: str) -> Case:
    batch, _ = batch_of(counts, 0, slots=len(counts))
    tokens, channels = sum(counts), 10240
    x, weight, bias = random_tensor(tokens, channels), random_tensor(channels, 4), random_tensor(channels)
    state = random_tensor(2 * len(counts), channels, 3)
    call = partial(kernels.causal_conv, x, weight, bias, state, batch)
    moved = 2 * 2 * (tokens * channels + len(counts) * channels * 3)
    return Case("conv", f"{label} x {channels}", call, moved)


def mamba2(counts: list[int], label: str) -> Case:
    batch, _ = batch_of(counts, 0, slots=len(counts))
    tokens, heads, dim, groups, size = sum(counts), 128, 64, 8, 128
    fused = random_tensor(tokens, heads * dim + 2 * groups * size)
    x, B, C = fused.split([heads * dim, groups * size, groups * size], 1)
    x, B, C = x.view(tokens, heads, dim), B.view(tokens, groups, size), C.view(tokens, groups, size)
    dt = random_tensor(tokens, heads)
    constants = [random_tensor(heads, dtype=torch.float32) for _ in range(3)]
    weights = Mamba2Weights(-constants[0].exp(), constants[1], constants[2])
    state = random_tensor(2 * len(counts), heads, dim, size, dtype=torch.float32)
    call = partial(kernels.mamba2_scan, x, dt, B, C, weights, state, batch)
    moved = 2 * (fused.numel() + tokens * heads * dim) + len(counts) * heads * dim * size * 8
    chunk = 64 if max(counts) > 1 else 0
    work = tokens * heads * 2.0 * (chunk * (size + dim) + 2 * size * dim) if chunk else 0.0
    return Case("mamba2", f"{label} 128x64 state 128", call, moved, work)


def delta(counts: list[int], label: str) -> Case:
    batch, _ = batch_of(counts, 0, slots=len(counts))
    tokens, key_heads, heads, dim = sum(counts), 16, 32, 128
    query, key = random_tensor(tokens, key_heads, dim), random_tensor(tokens, key_heads, dim)
    value = random_tensor(tokens, heads, dim)
    g = -random_tensor(tokens, heads, dtype=torch.float32).exp()
    beta = random_tensor(tokens, heads, dtype=torch.float32).sigmoid()
    state = random_tensor(2 * len(counts), heads, dim, dim, dtype=torch.float32)
    call = partial(kernels.gated_delta, query, key, value, g, beta, state, batch, normalise=True)
    moved = 2 * (query.numel() * 2 + value.numel() * 2) + len(counts) * heads * dim * dim * 8
    chunk = 64 if max(counts) > 1 else 0
    work = tokens * heads * 2.0 * (chunk * 4 * dim + 3 * dim * dim) if chunk else 0.0
    return Case("gated_delta", f"{label} 16/32x128", call, moved, work)


def moe(tokens: int) -> Case:
    hidden, inner, count, picks = 2048, 768, 128, 8
    x = random_tensor(tokens, hidden)
    ids = torch.stack([torch.randperm(count, device="cuda")[:picks] for _ in range(tokens)])
    shares = random_tensor(tokens, picks, dtype=torch.float32).softmax(-1)
    w13, w2 = random_tensor(count, 2 * inner, hidden), random_tensor(count, hidden, inner)
    call = partial(kernels.experts, x, ids, shares, w13, w2)
    used = int(ids.unique().numel())
    moved = used * 3 * inner * hidden * 2 + 2 * x.numel() * 2
    return Case(
        "experts", f"{tokens} x 2048, 8 of 128 x 768", call, moved, tokens * picks * 6.0 * inner * hidden
    )


def sampling(rows: int, label: str, temperature: float, top_k: int, top_p: float) -> Case:
    width = 151_936
    logits = random_tensor(rows, width) * 3
    given = [
        torch.full((rows,), value, device="cuda", dtype=dtype)
        for value, dtype in (
            (temperature, torch.float32),
            (top_k, torch.int32),
            (top_p, torch.float32),
            (0.0, torch.float32),
            (5, torch.int64),
            (9, torch.int32),
        )
    ]
    call = partial(kernels.sample_tokens, logits, *given, greedy=temperature == 0)
    return Case("sampling", f"{rows} x {width} {label}", call, logits.numel() * 2)


def unit_copies(units: int, pinned: bool) -> Case:
    storage = random_tensor(2 * units, 36, 2, 16, 8, 128)
    picked = torch.randperm(2 * units, device="cuda")
    moved = storage[0].numel() * 2 * units
    if pinned:
        host = torch.empty(units, *storage.shape[1:], dtype=BF16, pin_memory=True)
        call = partial(kernels.move_units, storage, picked[:units], host, torch.arange(units, device="cuda"))
        return Case("move_units", f"{units} pages of 36 layers to pinned host memory", call, moved, 0.0, 2)
    call = partial(kernels.copy_units, storage, picked[:units], picked[units:])
    return Case("copy_units", f"{units} pages of 36 layers", call, 2 * moved)


def cases(only: str) -> Iterator[Callable[[], Case]]:
    """Functions that build the cases of kernels with `only` in their name."""
    makers: list[tuple[str, Callable[[], Case]]] = []
    for rows in (1, 16, 64, 256):
        for context in (256, 1024, 8192, 32768):
            label = f"decode {rows} x {context}"
            makers.append(("attend", partial(attention, [1] * rows, context - 1, 16, DENSE, label)))
    makers += [
        ("attend", partial(attention, [1] * 64, 8191, 64, DENSE, "decode 64 x 8192")),
        ("attend", partial(attention, [1] * 64, 8191, 1, DENSE, "decode 64 x 8192")),
        ("attend", partial(attention, [1] * 64, 8191, 16, GPT_OSS, "decode 64 x 8192 window 128 sinks")),
        ("attend", partial(attention, [1] * 64, 8191, 16, GEMMA, "decode 64 x 8192 window 1024")),
        ("attend", partial(attention, [8192], 0, 16, DENSE, "prefill 1 x 8192")),
        ("attend", partial(attention, [2048] * 16, 0, 16, DENSE, "prefill 16 x 2048")),
        ("attend", partial(attention, [2048], 30000, 16, DENSE, "chunk of 2048 at 30000")),
        ("attend", partial(attention, [32], 1024, 16, DENSE, "turn of 32 at 1024")),
        ("attend", partial(attention, [32], 32768, 16, DENSE, "turn of 32 at 32768")),
        ("attend", partial(attention, [32] * 64, 1024, 16, DENSE, "64 turns of 32 at 1024")),
        ("attend", partial(attention, [8192], 0, 16, GPT_OSS, "prefill 1 x 8192 window 128 sinks")),
        ("attend", partial(attention, [8192], 0, 16, GEMMA, "prefill 1 x 8192 window 1024")),
        (
            "attend",
            partial(attention, [1] * 63 + [2048], 8192, 16, DENSE, "63 decode + chunk of 2048 at 8192"),
        ),
    ]
    ways: list[Way] = ["alone", "pieces", "queue"] if has_queue(BF16) else ["alone", "pieces"]
    for counts, start, label in (
        ([1] * 60 + [32] * 4, 1268, "60 decode + 4 turns of 32 at 1300"),
        ([1] * 56 + [32] * 8, 1268, "56 decode + 8 turns of 32 at 1300"),
        ([1] * 4, 1299, "decode 4 x 1300"),
        ([1] * 40, 1299, "decode 40 x 1300"),
        ([1] * 64, 1299, "decode 64 x 1300"),
        ([1] * 80, 1299, "decode 80 x 1300"),
        ([1] * 24, 8191, "decode 24 x 8192"),
    ):
        makers += [("attend", partial(attention, counts, start, 64, DENSE, label, way)) for way in ways]
    for counts, start in (
        *(([tokens], start) for tokens in (17, 32, 33, 64, 128, 256, 512) for start in (1024, 8192, 32768)),
        *(([tokens], 0) for tokens in (512, 2048, 8192)),
        ([2048] * 4, 0),
    ):
        label = f"turn of {len(counts)} x {counts[0]} at {start}"
        makers += [
            ("attend turn", partial(attention, counts, start, 64, DENSE, label, way))
            for way in ways
            if way != "pieces"
        ]
    for rows, context in ((4, 1300), (64, 1300), (24, 8192), (64, 8192), (1, 32768)):
        makers += [("attend fp8", partial(scaled_attention, rows, context, 64, DENSE, way)) for way in ways]
    for tokens in (1, 64, 256, 8192):
        makers += [
            (n, partial(f, tokens)) for n, f in (("norm", norm), ("norm", gated_norm), ("swiglu", swiglu))
        ]
        makers += [("rotary", partial(rotary, tokens)), ("experts", partial(moe, tokens))]
    readers: list[Reader] = ["library", "ours", "twelve"]
    for tokens in (1, 16, 64, 96, 128, 192):
        makers += [
            ("layer", partial(layer, tokens, reader)) for reader in readers[: 3 if tokens <= 96 else 2]
        ]
    for tokens in (1, 64, 128, 192):
        for outputs, depth in ((6144, 4096), (4096, 4096), (18560, 4096), (24576, 4096), (4096, 12288)):
            fitting = readers[: 3 if tokens <= 64 and outputs > 16384 else 2]
            makers += [("product", partial(product, tokens, outputs, depth, reader)) for reader in fitting]
    for name, make in (("conv", conv), ("mamba2", mamba2), ("gated_delta", delta)):
        makers += [(name, partial(make, [1] * rows, f"step {rows}")) for rows in (1, 16, 64, 256)]
        makers += [
            (name, partial(make, [32], "turn of 32")),
            (name, partial(make, [32] * 64, "64 turns of 32")),
        ]
        makers += [(name, partial(make, [8192], "1 x 8192")), (name, partial(make, [2048] * 16, "16 x 2048"))]
    for rows in (1, 64, 256):
        makers.append(("sampling", partial(sampling, rows, "greedy", 0.0, 0, 1.0)))
        makers.append(("sampling", partial(sampling, rows, "temperature", 1.0, 0, 1.0)))
        makers.append(("sampling", partial(sampling, rows, "top-k 20 top-p 0.9", 0.7, 20, 0.9)))
    makers += [
        ("units", partial(unit_copies, 256, pinned=False)),
        ("units", partial(unit_copies, 64, pinned=True)),
    ]
    return (make for name, make in makers if only in name)
