"""Attention over pages by the C kernels, for float32 tensors on the CPU.

`attend_pages` returns None where the kernels are unavailable or do not support the tensors; its caller, the
torch attention, then computes the result itself.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from holdfast.kernels.batch import Batch, Pages
from holdfast.kernels.cpu.library import library
from holdfast.kernels.cpu.structures import AttentionStructure, PagesStructure
from holdfast.kernels.scaled import KvCache, ScaledCache

HEAD_DIM_MAX = 256
QUERIES_OF_A_TOKEN_MAX = 16384  # elements of one token's queries that share a key head


def head_fits(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether the kernel supports heads of this shape."""
    shared = heads // kv_heads
    fits = shared <= HEAD_DIM_MAX and shared * head_dim <= QUERIES_OF_A_TOKEN_MAX
    return fits and head_dim <= HEAD_DIM_MAX and head_dim % 16 == 0


def pages_structure(
    batch: Batch, pages: Pages, key: Tensor, value: Tensor, layer_stride: int
) -> PagesStructure:
    """The addresses of a batch's keys and values; `key` and `value` are the first layer's views."""
    table = pages.table if pages.table.stride(-1) == 1 else pages.table.contiguous()
    pages.table = table
    assert table.dtype == torch.int32 and batch.row_start.dtype == batch.context.dtype == torch.int32
    assert pages.slots.dtype == batch.positions.dtype == torch.int64
    return PagesStructure(
        batch.positions.data_ptr(),
        pages.slots.data_ptr(),
        batch.row_start.data_ptr(),
        batch.context.data_ptr(),
        table.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        table.stride(0),
        key.stride(0),
        layer_stride,
        key.stride(1),
        batch.rows,
        batch.positions.shape[0],
        pages.page_size,
        0,
    )


def attend_pages(
    query: Tensor,
    key: KvCache,
    value: KvCache,
    pages: Pages,
    batch: Batch,
    rules: tuple[float, int | None, Tensor | None, float | None],
) -> Tensor | None:
    """`kernels.attend`; `rules` are scale, window, sinks and softcap."""
    if isinstance(key, ScaledCache) or isinstance(value, ScaledCache):
        return None
    loaded = library()
    heads, dim = query.shape[1:]
    kv_heads = key.shape[2]
    if loaded is None or not head_fits(heads, kv_heads, dim):
        return None
    if not query.dtype == key.dtype == value.dtype == torch.float32 or not query.is_cpu:
        return None
    same = key.stride() == value.stride() and key.shape == value.shape and key.shape[3] == dim
    if not same or key.stride(3) != 1 or key.stride(2) != dim or batch.positions.shape[0] != query.shape[0]:
        return None
    if query.stride(2) != 1 or query.stride(1) != dim:
        query = query.contiguous()
    scale, window, sinks, softcap = rules
    sinks = None if sinks is None else sinks.float().contiguous()
    structure = AttentionStructure(
        None if sinks is None else sinks.data_ptr(), scale, softcap or 0.0, heads, kv_heads, dim, window or 0
    )
    out = torch.empty((query.shape[0], heads, dim), dtype=torch.float32)
    loaded.hf_attend(
        ctypes.byref(structure),
        ctypes.byref(pages_structure(batch, pages, key, value, 0)),
        query.data_ptr(),
        query.stride(0),
        out.data_ptr(),
        out.stride(0),
    )
    return out
