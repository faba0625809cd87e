# mypy: allow-untyped-defs, allow-incomplete-defs
"""Products whose depth is split over programs (split-K): how many splits, and the sum of their parts.

Each program of a tile stores its partial sums; the last to arrive adds them up in order, so results are
deterministic. Used by the products of `fp8` and `quantised`.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from holdfast.kernels.triton.launch import processors

SPLITS_MOST = 16
COUNTERS = 16_384
"""Most tiles whose depth may be split."""


@triton.jit
def add_splits(
    total, partial, arrived, tile, split, splits, token, ROWS: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """The sum of all splits of a tile, and whether this program has it: the last that arrives."""
    within = tl.arange(0, ROWS)[:, None] * TOKENS + token[None, :]
    parts = partial + tile.to(tl.int64) * splits * (ROWS * TOKENS) + within
    tl.store(parts + split * (ROWS * TOKENS), total)
    # All threads have stored before one of them signals it.
    tl.debug_barrier()
    last = tl.atomic_add(arrived + tile, 1) == splits - 1
    if last:
        tl.store(arrived + tile, 0)
        total = tl.zeros([ROWS, TOKENS], tl.float32)
        for other in tl.range(0, splits):
            # Written by other programs of this launch: bypass the L1 cache.
            total += tl.load(parts + other * (ROWS * TOKENS), cache_modifier=".cg")
    return total, last


@cache
def counters(device: torch.device) -> torch.Tensor:
    """The arrival counters of split tiles; zero between launches, which never run concurrently."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def split_depth(
    x: torch.Tensor, tiles: int, tile: int, iterations: int, filling: int
) -> tuple[int, torch.Tensor]:
    """How many programs share a tile of `tile` outputs, and the room for their partial sums.

    Each has at least two of the `iterations` along the depth; `filling` programs fill a multiprocessor.
    """
    wanted = processors(x.device.index) * filling // tiles
    splits = max(1, min(SPLITS_MOST, wanted, iterations // 2)) if tiles <= COUNTERS else 1
    if splits == 1:
        return 1, x
    return splits, torch.empty(tiles * splits * tile, dtype=torch.float32, device=x.device)
