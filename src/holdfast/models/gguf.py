"""GGUF files: header, metadata and tensors, under the names that Hugging Face checkpoints use.

`GgufFile` maps a file and parses its header (format versions 2 and 3). The parser is our own:
`gguf.GGUFReader` makes a NumPy view per array element (16 s and 610 MiB for a vocabulary of 150k, ours 0.5 s
and 36 MiB) and does not bound what a hostile header claims (docs/decisions/0019). Types and dequantisation
are the `gguf` package's. `GgufSource` serves the tensors to the weight reader: dense, or as 4-bit codes with
scales where the format has 4-bit groups of 32 (Q4_0, Q4_1, Q4_K, MXFP4, IQ4). `gguf_metadata` turns metadata
into a configuration. Imported only for GGUF files.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray
from torch import Tensor

from holdfast.kernels.cpu.matrix import Table
from holdfast.kernels.torch.quantised import scale_values
from holdfast.models.fields import ConfigurationError, Json, reading, unreadable
from holdfast.models.linear import FourBitWeight
from holdfast.models.sources import Runs, read_runs

_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}

_KEYS_MAX = 1 << 16
_TENSORS_MAX = 1 << 20
_DIMENSIONS_MAX = 4
_ELEMENTS_MAX = 1 << 24
"""Limit of an array's elements; vocabularies have some hundred thousand."""
_TEXT_BYTES_MAX = 1 << 26

FOUR_BIT = frozenset(
    {
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.MXFP4,
        GGMLQuantizationType.IQ4_NL,
        GGMLQuantizationType.IQ4_XS,
    }
)
UNQUANTISED = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The location of a tensor in the file. `shape` is outermost first, as in torch."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    bytes: int


class GgufFile:
    """A memory-mapped GGUF file: `metadata` by key, `tensors` by the file's own names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ConfigurationError(f"cannot read {path}: {error}") from error
        self._position = 0
        self.metadata: dict[str, Json] = {}
        self.tensors: dict[str, TensorEntry] = {}
        with reading(path):
            try:
                self._parse()
            except (struct.error, KeyError, UnicodeDecodeError, ValueError) as error:
                raise unreadable(path, f"is not a readable GGUF file: {error}") from error

    def raw(self, entry: TensorEntry) -> NDArray[np.uint8]:
        """The bytes of a tensor."""
        return np.frombuffer(self._map, dtype=np.uint8, count=entry.bytes, offset=entry.offset)

    def _parse(self) -> None:
        if self._number("<I") != gguf.GGUF_MAGIC:
            raise ValueError("the magic number is missing")
        version = self._number("<I")
        if version not in (2, 3):
            raise ValueError(f"format version {version} is not supported")
        tensor_count = self._count("tensors", _TENSORS_MAX)
        key_count = self._count("keys", _KEYS_MAX)
        for _ in range(key_count):
            key = self._text()
            self.metadata[key] = self._value(self._value_type())
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"the alignment must be at least 1, not {alignment!r}")
        base = -(-self._position // alignment) * alignment
        for name, shape, kind, offset in infos:
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            elements = math.prod(shape)
            if not shape:
                raise ValueError(f"tensor {name} has no dimensions")
            if shape[-1] % block:
                raise ValueError(f"tensor {name} has rows of {shape[-1]}, not a multiple of {block}")
            size = elements // block * block_bytes
            if base + offset + size > len(self._map):
                raise ValueError(f"tensor {name} lies past the end of the file; the file is truncated")
            self.tensors[name] = TensorEntry(kind, shape, base + offset, size)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._text()
        dimensions = self._count("dimensions of a tensor", _DIMENSIONS_MAX, "<I")
        shape = tuple(int(self._number("<Q")) for _ in range(dimensions))
        kind = GGMLQuantizationType(int(self._number("<I")))
        return name, shape[::-1], kind, int(self._number("<Q"))

    def _count(self, what: str, most: int, layout: str = "<Q") -> int:
        """A count in the header; above the limit it is rejected before anything is read."""
        count = int(self._number(layout))
        if count > most:
            raise ValueError(f"the header claims {count} {what}; the limit is {most}")
        return count

    def _number(self, layout: str) -> int | float:
        (value,) = struct.unpack_from(layout, self._map, self._position)
        self._position += struct.calcsize(layout)
        assert isinstance(value, int | float)
        return value

    def _text(self) -> str:
        length = self._count("bytes in a string", _TEXT_BYTES_MAX)
        start = self._position
        if start + length > len(self._map):
            raise ValueError("a string lies past the end of the file")
        self._position = start + length
        return self._map[start : start + length].decode("utf-8")

    def _value_type(self) -> GGUFValueType:
        return GGUFValueType(int(self._number("<I")))

    def _value(self, kind: GGUFValueType, nested: bool = False) -> Json:
        if kind is GGUFValueType.STRING:
            return self._text()
        if kind is not GGUFValueType.ARRAY:
            return self._number(_SCALARS[kind])
        if nested:
            raise ValueError("nested arrays are not supported")
        inner = self._value_type()
        count = self._count("elements in an array", _ELEMENTS_MAX)
        if inner in _SCALARS:
            layout = _SCALARS[inner]
            values = struct.unpack_from(f"<{count}{layout[1]}", self._map, self._position)
            self._position += count * struct.calcsize(layout)
            return list(values)
        return [self._value(inner, nested=True) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Change:
    """How a tensor differs from the one of Hugging Face's checkpoints: negated exponential, sum, shape."""

    negated_exponential: bool = False
    """Whether the file has `-exp(x)` of the checkpoint's x."""
    offset: float = 0.0
    """Added to the file's values."""
    shape: tuple[int, ...] | None = None

    def undone(self, tensor: Tensor) -> Tensor:
        """The checkpoint's tensor, from the file's."""
        if self.negated_exponential:
            tensor = (-tensor).log()
        if self.offset:
            tensor = tensor + self.offset
        return tensor if self.shape is None else tensor.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Stored:
    """Where and how a file has a tensor of the checkpoint."""

    parts: tuple[str, ...]
    """The file's tensors; several are joined by their rows."""
    expert: int | None = None
    """Which part of a tensor of all experts."""
    order: Tensor | None = None
    """For each row of the checkpoint's matrix, that of the file."""
    change: Change = Change()


def half_split(rows: int, heads: int) -> Tensor:
    """The order of the rows of a projection that a file has in interleaved rotary order."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


class GgufSource:
    """The tensors of a GGUF file by their Hugging Face names, for the weight reader."""

    def __init__(self, file: GgufFile, tensors: Mapping[str, Stored]) -> None:
        self._file = file
        self._tensors = tensors

    def _entries(self, name: str) -> list[TensorEntry]:
        """The locations of a tensor's parts, or of one expert's part of a tensor."""
        stored = self._tensors[name]
        entries = [self._file.tensors[part] for part in stored.parts]
        if stored.expert is None:
            return entries
        return [_expert_of(entry, stored.expert) for entry in entries]

    @property
    def total_bytes(self) -> int:
        read = {part for stored in self._tensors.values() for part in stored.parts}
        return sum(self._file.tensors[part].bytes for part in read)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        changed = self._tensors[name].change.shape
        if changed is not None:
            return changed
        first, *others = self._entries(name)
        if not others:
            return first.shape
        return (*first.shape[:-2], sum(each.shape[-2] for each in (first, *others)), first.shape[-1])

    def dtype(self, name: str) -> str:
        return str(self._entries(name)[0].kind.name)

    def bytes_of(self, name: str) -> int:
        return sum(entry.bytes for entry in self._entries(name))

    def quantised(self, name: str) -> bool:
        return any(entry.kind not in UNQUANTISED for entry in self._entries(name))

    def read(self, name: str) -> Tensor:
        """The tensor dequantised to float32 (or as stored, for the 16-bit formats)."""
        parts = [self._dense(name, entry) for entry in self._entries(name)]
        dense = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        return self._tensors[name].change.undone(self._in_order(name, dense))

    def read_part(self, name: str, runs: Runs) -> Tensor:
        """A part of a tensor, of which all is read."""
        return read_runs(self.read(name).__getitem__, runs)

    def _dense(self, name: str, entry: TensorEntry) -> Tensor:
        raw = self._file.raw(entry)
        if entry.kind is GGMLQuantizationType.BF16:
            return torch.from_numpy(raw.copy()).view(torch.bfloat16).reshape(entry.shape)
        if entry.kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            dtype = torch.float32 if entry.kind is GGMLQuantizationType.F32 else torch.float16
            return torch.from_numpy(raw.copy()).view(dtype).reshape(entry.shape)
        rows = raw.reshape(-1, entry.bytes // max(1, int(np.prod(entry.shape[:-1]))))
        try:
            return torch.from_numpy(gguf.dequantize(rows, entry.kind)).reshape(entry.shape)
        except NotImplementedError as error:
            raise ConfigurationError(f"tensor {name}: format {entry.kind.name} is not supported") from error

    def four_bit(self, name: str) -> FourBitWeight | None:
        """The 4-bit codes of a matrix; None for other formats, different ones joined, and changed values."""
        entries = self._entries(name)
        changed = self._tensors[name].change != Change()
        if changed or any(entry.kind not in FOUR_BIT or len(entry.shape) != 2 for entry in entries):
            return None
        parts = [self._codes(entry) for entry in entries]
        if len({part.table for part in parts}) > 1:
            return None
        codes, scale, zero = (
            self._in_order(name, torch.cat(several))
            for several in zip(*((part.codes, part.scale, part.zero) for part in parts), strict=True)
        )
        return FourBitWeight(codes, scale, zero, parts[0].table)

    def _codes(self, entry: TensorEntry) -> FourBitWeight:
        block, block_bytes = gguf.GGML_QUANT_SIZES[entry.kind]
        raw = torch.from_numpy(self._file.raw(entry).copy())
        blocks = raw.view(entry.shape[0], entry.shape[1] // block, block_bytes)
        match entry.kind:
            case GGMLQuantizationType.Q4_0:
                return _q4_0(blocks)
            case GGMLQuantizationType.Q4_1:
                return _q4_1(blocks)
            case GGMLQuantizationType.MXFP4:
                return _mxfp4(blocks)
            case GGMLQuantizationType.IQ4_NL:
                return _iq4_nl(blocks)
            case GGMLQuantizationType.IQ4_XS:
                return _iq4_xs(blocks)
            case _:
                return _q4_k(blocks)

    def _in_order(self, name: str, tensor: Tensor) -> Tensor:
        """The rows in the checkpoint's order."""
        order = self._tensors[name].order
        return tensor if order is None else tensor[order]


def _expert_of(entry: TensorEntry, expert: int) -> TensorEntry:
    """One expert's matrix in a tensor of all experts."""
    size = entry.bytes // entry.shape[0]
    return replace(entry, shape=entry.shape[1:], offset=entry.offset + expert * size, bytes=size)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """16-bit floats at a byte offset of each block, as float32 [out, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0].to(torch.float32)


def _nibbles(packed: Tensor) -> Tensor:
    """Low nibbles of the last dimension's bytes, then the high nibbles."""
    return torch.cat((packed & 0x0F, packed >> 4), dim=-1)


def _q4_0(blocks: Tensor) -> FourBitWeight:
    scale = _halves(blocks, 0)
    return FourBitWeight(_nibbles(blocks[..., 2:]).flatten(1), scale, torch.zeros_like(scale))


def _q4_1(blocks: Tensor) -> FourBitWeight:
    scale, minimum = _halves(blocks, 0), _halves(blocks, 2)
    return FourBitWeight(_nibbles(blocks[..., 4:]).flatten(1), scale, minimum + 8.0 * scale)


def _mxfp4(blocks: Tensor) -> FourBitWeight:
    """An exponent with a bias of 127, then the codes of 32 4-bit floats."""
    scale = scale_values(blocks[..., 0].contiguous())
    return FourBitWeight(_nibbles(blocks[..., 1:]).flatten(1), scale, torch.zeros_like(scale), Table.E2M1)


def _iq4_nl(blocks: Tensor) -> FourBitWeight:
    scale = _halves(blocks, 0)
    return FourBitWeight(_nibbles(blocks[..., 2:]).flatten(1), scale, torch.zeros_like(scale), Table.IQ4)


def _iq4_xs(blocks: Tensor) -> FourBitWeight:
    """256 elements a block: 8 groups of 32 with 6-bit scales, stored as 4 and 2 bits, under a factor."""
    places = torch.arange(8)
    low = blocks[..., 4:8][..., places // 2] >> (4 * (places % 2)) & 15
    high = blocks[..., 2:4][..., places // 4] >> (2 * (places % 4)) & 3
    scale = _halves(blocks, 0)[..., None] * ((low | high << 4).float() - 32.0)
    codes = _nibbles(blocks[..., 8:].unflatten(-1, (8, 16)))
    scale = scale.flatten(1)
    return FourBitWeight(codes.flatten(1), scale, torch.zeros_like(scale), Table.IQ4)


def _q4_k(blocks: Tensor) -> FourBitWeight:
    """256 elements a block: 8 groups of 32 with 6-bit scales and minima under two 16-bit factors."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=-1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), dim=-1)
    scale = _halves(blocks, 0)[..., None] * scales
    minimum = _halves(blocks, 2)[..., None] * minima
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    return FourBitWeight(codes.flatten(1), scale.flatten(1), (8.0 * scale - minimum).flatten(1))
