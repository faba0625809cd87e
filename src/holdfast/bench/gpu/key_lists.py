"""Lists of keys for attention, as the engine allocates them: pieces and queues.

Used by the timed cases and by the checks in `tests/gpu`.
"""

from __future__ import annotations

import math

import torch

from holdfast.kernels import PIECE_FIELDS, Batch, PieceQueue, Pieces, build_queue, tile_count
from holdfast.kernels.cuda.driver import machine_of

__all__ = ["allocate_pieces", "allocate_queue", "has_queue"]

POISON = 1 << 30
"""A line of a list that was not written: reading it is an error."""


def allocate_pieces(batch: Batch, kv_heads: int, queries: int, above: int, most: int) -> Pieces:
    """Pieces that just fit a batch, for rows of more than `above` and at most `most` tokens."""
    wanted = 66
    lines = tile_count(batch.tokens.shape[0], batch.rows, queries) + wanted
    listed = torch.full((lines, PIECE_FIELDS), POISON, dtype=torch.int32, device="cuda")
    arrived = torch.zeros(lines * kv_heads, dtype=torch.int32, device="cuda")
    return Pieces(listed, arrived, queries, wanted, above, most)


def has_queue(dtype: torch.dtype) -> bool:
    """Whether attention of this type takes queues on this GPU; there the kernel must compile."""
    return dtype == torch.bfloat16 and machine_of(torch.cuda.current_device()) is not None


def allocate_queue(batch: Batch, heads: int, kv_heads: int, dim: int) -> PieceQueue:
    """A queue that just fits a batch, poisoned where it is not zero."""
    queue = build_queue(batch.tokens.shape[0], batch.rows, heads, kv_heads, dim, torch.device("cuda"))
    queue.listed.fill_(POISON)
    queue.partial.fill_(math.nan)
    return queue
