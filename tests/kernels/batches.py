"""Ragged batches over scattered, poisoned storage, for the kernel tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from holdfast.kernels import Batch, ScaledCache, build_batch
from holdfast.kernels.torch.scaled import decode, encode

NAN = float("nan")


def scattered_units(contexts: Sequence[int], page_size: int, seed: int) -> tuple[list[list[int]], int]:
    """Units of each row in a random order, and how many units the storage needs (some stay unused)."""
    pages = [-(-context // page_size) for context in contexts]
    total = sum(pages) + 3
    units = list(range(total))
    random.Random(seed).shuffle(units)
    return [[units.pop() for _ in range(count)] for count in pages], total


def paged_batch(
    counts: Sequence[int],
    starts: Sequence[int],
    page_size: int,
    *,
    seed: int = 0,
    window: int | None = None,
    device: str = "cpu",
) -> tuple[Batch, int]:
    """A batch of full pages, or of window pages whose entries below the window are wild; and the units."""
    contexts = [start + count for start, count in zip(starts, counts, strict=True)]
    units, total = scattered_units(contexts, page_size, seed)
    tokens = [[0] * count for count in counts]
    if window is None:
        return build_batch(tokens, starts, full_units=units, full_page_size=page_size, device=device), total
    batch = build_batch(tokens, starts, window_units=units, window_page_size=page_size, device=device)
    assert batch.window is not None
    for row, start in enumerate(starts):
        batch.window.table[row, : max(0, start - window + 1) // page_size] = 2**30
    for row, context in enumerate(contexts):
        batch.window.table[row, -(-context // page_size) :] = 2**30
    return batch, total


def fill_cache(
    batch: Batch,
    total: int,
    kv_heads: int,
    dim: int,
    *,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator,
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Storage [units, layers, 2, page, kv_heads, dim] that is NaN wherever no row's token lies.

    Answers the storage and, for layer 1, the keys and values of each row in order.
    """
    pages = batch.full or batch.window
    assert pages is not None
    device = pages.table.device
    storage = torch.full((total, layers, 2, pages.page_size, kv_heads, dim), NAN, dtype=dtype, device=device)
    keys, values = [], []
    for row in range(batch.rows):
        context = int(batch.context[row])
        positions = torch.arange(context, device=device)
        units = pages.table[row].long()[positions // pages.page_size]
        live = units < total
        units, offsets = units[live], positions[live] % pages.page_size
        for kept, part in ((keys, 0), (values, 1)):
            kept.append(torch.randn(context, kv_heads, dim, generator=generator).to(device, dtype))
            storage[units, 1, part, offsets] = kept[-1][live]
    return storage, keys, values


def scaled_caches(
    storage: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> tuple[ScaledCache, ScaledCache, list[torch.Tensor], list[torch.Tensor]]:
    """Layer 1 of a filled storage in eight bits, and the keys and values of each row as they are stored.

    Where no token lies, codes are NaN and scales infinite.
    """
    codes, scales = encode(storage)
    scales = torch.where(storage.isnan().any(-1), 255, scales.int()).to(torch.uint8)
    scales = torch.empty_like(scales.transpose(-1, -2), memory_format=torch.contiguous_format).copy_(
        scales.transpose(-1, -2)
    )
    caches = [ScaledCache(codes[:, 1, part], scales[:, 1, part]) for part in (0, 1)]
    kept = [[decode(*encode(each)) for each in part] for part in (keys, values)]
    return caches[0], caches[1], kept[0], kept[1]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over that of `expected`; NaN where either has one, which passes no test."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    assert actual.shape == expected.shape
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
