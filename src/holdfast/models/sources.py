"""Checkpoints as sources of tensors by name: the protocol, and safetensors files.

GGUF files are in `gguf`. Read by `weights`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from holdfast.kernels.quantised import QuantisedWeight
from holdfast.models.fields import ConfigurationError, Fields, listed, reading, require_regular, unreadable

_ELEMENT_BYTES = {"F64": 8, "F32": 4, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
"""Bytes per element by the name in safetensors files; others have two."""


Runs: TypeAlias = tuple[tuple[tuple[int, int], ...] | None, ...]
"""A part of a tensor: for each dimension the runs (first, end) of it, or None for all."""


def read_runs(read: Callable[[tuple[slice, ...]], Tensor], runs: Runs) -> Tensor:
    """A part of a tensor, read run by run and joined."""

    def along(before: tuple[slice, ...], left: Runs) -> Tensor:
        if not left:
            return read(before)
        if left[0] is None:
            return along((*before, slice(None)), left[1:])
        parts = [along((*before, slice(*run)), left[1:]) for run in left[0]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=len(before))

    return along((), runs)


class Source(Protocol):
    """The tensors of one checkpoint by name."""

    @property
    def total_bytes(self) -> int: ...

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """The dtype as the file names it."""
        ...

    def bytes_of(self, name: str) -> int: ...

    def read(self, name: str) -> Tensor: ...

    def read_part(self, name: str, runs: Runs) -> Tensor:
        """A part of a tensor; files that store it plainly are not read further."""
        ...

    def quantised(self, name: str) -> bool:
        """Whether the checkpoint stores this tensor in fewer than 16 bits per element."""
        ...

    def codes(self, name: str) -> QuantisedWeight | None:
        """A matrix by its codes, where its bytes alone have them, as in GGUF files; else None."""
        ...


class SafetensorsSource:
    """The safetensors files of a directory, memory-mapped; sharded or not."""

    def __init__(self, directory: Path) -> None:
        paths = self._paths(directory)
        self._where: dict[str, safe_open] = {}
        self._path_of: dict[str, Path] = {}
        for path in paths:
            with reading(path):
                require_regular(path)
                file = _opened(path)
                names = file.keys()
            self._where |= dict.fromkeys(names, file)
            self._path_of |= dict.fromkeys(names, path)
        self.total_bytes = sum(path.stat().st_size for path in paths)

    @staticmethod
    def _paths(directory: Path) -> list[Path]:
        index = directory / "model.safetensors.index.json"
        if index.exists():
            shards = Fields.read(index).inner("weight_map")
            paths = sorted({directory / Path(shards.text(name)).name for name in shards.names()})
            missing = [path.name for path in paths if not path.exists()]
            if missing:
                raise ConfigurationError(
                    f"{directory} is missing the weight files ({len(missing)}): {listed(missing)}"
                )
            return paths
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise ConfigurationError(
                f"{directory} has no .safetensors files; give a directory with weights, a .gguf file, or "
                "--load-format dummy"
            )
        return paths

    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return str(self._where[name].get_slice(name).get_dtype())

    def bytes_of(self, name: str) -> int:
        return math.prod(self.shape(name)) * _ELEMENT_BYTES.get(self.dtype(name), 2)

    def read(self, name: str) -> Tensor:
        with self._reading(name):
            tensor: Tensor = self._where[name].get_tensor(name)
        return tensor

    def read_part(self, name: str, runs: Runs) -> Tensor:
        with self._reading(name):
            return read_runs(self._where[name].get_slice(name).__getitem__, runs)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        with reading(self._path_of[name]):
            try:
                yield
            except SafetensorError as error:
                raise unreadable(self._path_of[name], f"has no readable tensor {name}: {error}") from error

    def quantised(self, name: str) -> bool:
        assert name in self._where
        return False

    def codes(self, name: str) -> QuantisedWeight | None:
        assert name in self._where
        return None


def _opened(path: Path) -> safe_open:
    """Open a safetensors file whose header matches its length, or raise an error that names it."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise unreadable(
            path, f"is not a complete safetensors file ({error}); it may be truncated: fetch it again"
        ) from error
