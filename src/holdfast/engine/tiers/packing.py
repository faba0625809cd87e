"""Tensors in one buffer in the format of safetensors: packed with one copy, unpacked with none.

The disk's thread packs and unpacks gigabytes beside the engine's loop. The safetensors package copies them
more often, and keeps the interpreter lock meanwhile, which holds steps up; a copy of a tensor lets go of it.
The format: the size of the header in eight bytes, the header in JSON, filled up with spaces, and the tensors,
those with the largest elements first, so that all of them are aligned. Used by `files`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["UNREADABLE", "BadPack", "bytes_of", "pack", "unpack"]

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The types that memory may have, by their names in a header."""

NAMES = {dtype: name for name, dtype in TYPES.items()}
ALIGNMENT = 8
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
"""What reading a damaged header may raise."""


class BadPack(ValueError):
    """A buffer is not what `pack` makes; the message says why."""


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in order; the tensor's own memory where that is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> memoryview:
    """One buffer with all tensors."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % ALIGNMENT)
    place = 8 + len(head)
    packed = torch.empty(place + end, dtype=torch.uint8)
    content = packed.numpy().data
    content[:place] = len(head).to_bytes(8, "little") + head
    for _, tensor in ordered:
        packed[place : place + tensor.nbytes].copy_(bytes_of(tensor))
        place += tensor.nbytes
    return content


def unpack(content: memoryview) -> dict[str, Tensor]:
    """The tensors in a buffer, in the buffer's own memory; raises `BadPack` unless they fill it."""
    size = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(bytes(content[8 : 8 + size]))
        header.pop("__metadata__", None)
        entries = [(name, _entry(about)) for name, about in header.items()]
    except UNREADABLE as error:
        raise BadPack("its header cannot be read") from error
    entries.sort(key=lambda item: item[1].begin)
    packed = torch.frombuffer(content, dtype=torch.uint8)[8 + size :]
    tensors: dict[str, Tensor] = {}
    end = 0
    for name, (begin, dtype, shape) in entries:
        if begin != end or (8 + size + begin) % dtype.itemsize:
            raise BadPack(f"{name} is not at its place")
        end = begin + prod(shape) * dtype.itemsize
        if end > len(packed):
            raise BadPack(f"{name} is truncated")
        tensors[name] = packed[begin:end].view(dtype).reshape(shape)
    if end != len(packed):
        raise BadPack("bytes follow the last tensor")
    return tensors


class _Entry(NamedTuple):
    """What a header says of a tensor."""

    begin: int
    dtype: torch.dtype
    shape: list[int]


def _entry(about: dict[str, Any]) -> _Entry:
    dtype, shape = TYPES[about["dtype"]], [int(length) for length in about["shape"]]
    begin, end = map(int, about["data_offsets"])
    if any(length < 0 for length in shape) or end - begin != prod(shape) * dtype.itemsize:
        raise ValueError("a shape does not match its bytes")
    return _Entry(begin, dtype, shape)
