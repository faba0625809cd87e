"""GGUF files: header, metadata and tensors, under the names that Hugging Face checkpoints use.

`GgufFile` maps a file and parses its header (format versions 2 and 3). The parser is our own:
`gguf.GGUFReader` makes a NumPy view per array element (16 s and 610 MiB for a vocabulary of 150k, ours 0.5 s
and 36 MiB) and does not bound what a hostile header claims (docs/decisions/0019). Types and dequantisation
are the `gguf` package's. `GgufSource` serves the tensors to the weight reader: dense, or by their codes
(`gguf_codes`). `gguf_metadata` turns metadata into a configuration. Imported only for GGUF files.
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

from holdfast.kernels.quantised import QuantisedWeight, joined
from holdfast.models.fields import ConfigurationError, Json, reading, unreadable
from holdfast.models.gguf_codes import read_codes
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

    def codes(self, name: str) -> QuantisedWeight | None:
        """The codes of a matrix; None for formats without, parts of different ones, and changed values."""
        entries = self._entries(name)
        if self._tensors[name].change != Change() or any(len(entry.shape) != 2 for entry in entries):
            return None
        found = [
            read_codes(torch.from_numpy(self._file.raw(entry).copy()), entry.kind, *entry.shape)
            for entry in entries
        ]
        parts = [part for part in found if part is not None]
        whole = joined(parts) if len(parts) == len(found) else None
        order = self._tensors[name].order
        return whole if whole is None or order is None else whole.rows(order)

    def _in_order(self, name: str, tensor: Tensor) -> Tensor:
        """The rows in the checkpoint's order."""
        order = self._tensors[name].order
        return tensor if order is None else tensor[order]


def _expert_of(entry: TensorEntry, expert: int) -> TensorEntry:
    """One expert's matrix in a tensor of all experts."""
    size = entry.bytes // entry.shape[0]
    return replace(entry, shape=entry.shape[1:], offset=entry.offset + expert * size, bytes=size)
