"""The next token of each row by the C kernels, for float32 logits on the CPU.

`argmax` and `sample` return None where the kernels are unavailable or do not support the tensors; their
caller, the torch sampler, then computes the result itself.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from holdfast.kernels.cpu.library import library
from holdfast.kernels.cpu.structures import ChoiceStructure, MasksStructure
from holdfast.kernels.parameters import TokenMasks


def argmax(values: Tensor) -> tuple[Tensor, Tensor] | None:
    """(maximum, its first index) of each row of float32 values; NaN where a row has one."""
    loaded = library()
    if loaded is None or not _fits(values):
        return None
    rows, columns = values.shape
    peaks = torch.empty(rows, dtype=torch.float32)
    places = torch.empty(rows, dtype=torch.int64)
    loaded.hf_argmax(values.data_ptr(), values.stride(0), rows, columns, peaks.data_ptr(), places.data_ptr())
    return peaks, places


def sample(
    values: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    masks: TokenMasks | None = None,
) -> Tensor | None:
    """`kernels.sample_tokens`: the token of each row, -1 for a NaN or no finite maximum."""
    loaded = library()
    if loaded is None or not _fits(values):
        return None
    rows, columns = values.shape
    types = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
    given = (temperature, top_k, top_p, min_p, seeds, positions)
    assert all(tensor.shape == (rows,) for tensor in given)
    kept = [tensor.to(dtype).contiguous() for tensor, dtype in zip(given, types, strict=True)]
    choice = ChoiceStructure(*(tensor.data_ptr() for tensor in kept))
    tokens = torch.empty(rows, dtype=torch.int64)
    constraint = None
    if masks is not None:
        words = masks.words
        kept.append(masks.rows.to(torch.int64))
        constraint = ctypes.byref(
            MasksStructure(words.data_ptr(), kept[-1].data_ptr(), words.stride(0), words.shape[1])
        )
    failed = loaded.hf_sample(
        values.data_ptr(),
        values.stride(0),
        rows,
        columns,
        ctypes.byref(choice),
        constraint,
        tokens.data_ptr(),
    )
    if failed:
        raise MemoryError(f"no memory for the samples of {rows} rows")
    return tokens


def _fits(values: Tensor) -> bool:
    return values.dtype == torch.float32 and values.is_cpu and values.stride(-1) == 1
