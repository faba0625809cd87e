"""One rank's part of a checkpoint: the rows and columns of each weight that it has, and a source of them.

A `Cut` is the part of one dimension that a rank has. `Cuts` has those of a whole checkpoint by name: of
single tensors, and of modules, whose quantised forms store rows and columns in groups, packed or transposed.
`CutSource` shows a checkpoint as if it were one of the rank's own sizes, and reads no more than the part; a
cut through a group of a quantised weight is rejected by name. `sharding` makes the cuts, `weights` reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.kernels.quantised import QuantisedWeight
from holdfast.models.fields import ConfigurationError
from holdfast.models.sources import Runs, Source, read_runs

__all__ = ["Cut", "CutSource", "Cuts", "beside"]

BLOCK = 128
"""Rows and columns of fp8 weights that share a scale, where they do; the last block may be smaller."""

Dimensions = tuple["Cut | None", ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """Runs (first, end) of a dimension of `total` elements; a run may come twice."""

    total: int
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def run(cls, total: int, first: int, count: int) -> Cut:
        """One run."""
        assert first >= 0 and first + count <= total
        return cls(total, ((first, first + count),))

    @classmethod
    def items(cls, total: int, items: Sequence[int]) -> Cut:
        """Single elements, such as heads, in this order."""
        runs: list[tuple[int, int]] = []
        for item in items:
            if runs and runs[-1][1] == item:
                runs[-1] = (runs[-1][0], item + 1)
            else:
                runs.append((item, item + 1))
        return cls(total, tuple(runs))

    @property
    def size(self) -> int:
        """Elements of the part."""
        return sum(end - first for first, end in self.runs)

    def times(self, factor: int) -> Cut:
        """The same part of a dimension in which each element is `factor` elements."""
        return Cut(self.total * factor, tuple((first * factor, end * factor) for first, end in self.runs))

    def stored(self, size: int, name: str) -> Cut | None:
        """The part of a dimension in which `size` elements stand for all; None where one does."""
        if size == self.total:
            return self
        if size == 1:
            return None
        group = BLOCK if size == -(-self.total // BLOCK) else -(-self.total // max(1, size))
        if -(-self.total // group) != size:
            raise ConfigurationError(f"{name} has a dimension of {size} where the model has {self.total}")
        runs: list[tuple[int, int]] = []
        for first, end in self.runs:
            if first % group or (end % group and end != self.total):
                raise ConfigurationError(
                    f"{name} is quantised in groups of {group}, which the part {first} to {end} of "
                    f"{self.total} cuts; use fewer ranks"
                )
            runs.append((first // group, -(-end // group)))
        return Cut(size, tuple(runs))


def beside(*cuts: Cut) -> Cut:
    """The cut of a dimension in which these dimensions follow each other."""
    runs: list[tuple[int, int]] = []
    offset = 0
    for cut in cuts:
        runs += [(first + offset, end + offset) for first, end in cut.runs]
        offset += cut.total
    return Cut(offset, tuple(runs))


_ROWS, _COLUMNS, _NEITHER = 0, 1, None
_AXES: dict[str, tuple[int | None, ...]] = {
    ".weight": (_ROWS, _COLUMNS),
    ".bias": (_ROWS,),
    ".weight_scale": (_ROWS, _COLUMNS),
    ".weight_scale_inv": (_ROWS, _COLUMNS),
    ".weight_packed": (_ROWS, _COLUMNS),
    ".weight_zero_point": (_ROWS, _COLUMNS),
    ".qweight": (_COLUMNS, _ROWS),
    ".scales": (_COLUMNS, _ROWS),
    ".qzeros": (_COLUMNS, _ROWS),
    ".g_idx": (_COLUMNS,),
    ".weight_g_idx": (_COLUMNS,),
    "_blocks": (_NEITHER, _ROWS, _COLUMNS, _NEITHER),
    "_scales": (_NEITHER, _ROWS, _COLUMNS),
    "_bias": (_NEITHER, _ROWS),
}
"""How the tensors of a module store its rows (outputs) and columns (inputs), by the ends of their names."""

_INDICES = (".g_idx", ".weight_g_idx")
_SHAPE = ".weight_shape"


class Cuts:
    """The parts of one rank, by the names of tensors and of modules."""

    __slots__ = ("_modules", "_tensors")

    def __init__(self) -> None:
        self._tensors: dict[str, Dimensions] = {}
        self._modules: dict[str, tuple[Cut | None, Cut | None]] = {}

    def tensor(self, name: str, *dimensions: Cut | None) -> None:
        """Cut a tensor, dimension by dimension; None: whole."""
        self._tensors[name] = dimensions

    def module(self, name: str, *, rows: Cut | None = None, columns: Cut | None = None) -> None:
        """Cut the outputs (rows) or the inputs (columns) of a projection, in whichever form it is stored."""
        self._modules[name] = (rows, columns)

    def of(self, name: str, shape: tuple[int, ...]) -> Dimensions | None:
        """The cut of a tensor that is stored with this shape; None: whole."""
        exact = self._tensors.get(name)
        if exact is not None:
            _require_dimensions(name, shape, len(exact))
            wanted = [size if cut is None else cut.total for cut, size in zip(exact, shape, strict=True)]
            if list(shape) != wanted:
                raise ConfigurationError(f"{name} is {list(shape)}, not {wanted}")
            return exact
        for ending, axes in _AXES.items():
            cuts = self._modules.get(name.removesuffix(ending)) if name.endswith(ending) else None
            if cuts is not None and shape:
                _require_dimensions(name, shape, len(axes), fewer=True)
                along = (None if axis is None else cuts[axis] for axis in axes[: len(shape)])
                return tuple(
                    None if cut is None else cut.stored(size, name)
                    for cut, size in zip(along, shape, strict=True)
                )
        return None

    def shape_of(self, name: str) -> Tensor | None:
        """The rank's own shape of a module that states its shape in a tensor of this name."""
        rows, columns = self._modules.get(name.removesuffix(_SHAPE), (None, None))
        if not name.endswith(_SHAPE) or (rows is None and columns is None):
            return None
        return torch.tensor([-1 if cut is None else cut.size for cut in (rows, columns)])

    def whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole tensor of which a rank has a part of this shape."""
        dimensions = self._tensors.get(name)
        if dimensions is None:
            cuts = self._modules.get(name.rpartition(".")[0], (None, None))
            axes = _AXES.get("." + name.rpartition(".")[2], ())
            dimensions = tuple(None if axis is None else cuts[axis] for axis in axes)
        if len(dimensions) != len(shape):
            return shape
        return tuple(size if cut is None else cut.total for cut, size in zip(dimensions, shape, strict=True))

    def part(self, name: str, whole: Tensor) -> Tensor:
        """The rank's part of a tensor in memory."""
        dimensions = self.of(name, tuple(whole.shape))
        return whole if dimensions is None else read_runs(whole.__getitem__, _runs(dimensions))


def _require_dimensions(name: str, shape: tuple[int, ...], count: int, *, fewer: bool = False) -> None:
    """Raise unless a tensor has so many dimensions, or also `fewer`."""
    if len(shape) > count or (len(shape) < count and not fewer):
        raise ConfigurationError(f"{name} is {list(shape)}: it should have {count} dimensions")


def _runs(dimensions: Dimensions) -> Runs:
    return tuple(None if cut is None else cut.runs for cut in dimensions)


def _local(dimensions: Dimensions | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    if dimensions is None:
        return shape
    return tuple(size if cut is None else cut.size for cut, size in zip(dimensions, shape, strict=True))


class CutSource:
    """A checkpoint as one rank sees it."""

    def __init__(self, source: Source, cuts: Cuts, ranks: int) -> None:
        self._source = source
        self._cuts = cuts
        self.total_bytes = source.total_bytes // ranks

    def names(self) -> frozenset[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        whole = self._source.shape(name)
        return _local(self._cuts.of(name, whole), whole)

    def dtype(self, name: str) -> str:
        return self._source.dtype(name)

    def bytes_of(self, name: str) -> int:
        part = math.prod(self.shape(name)) / max(1, math.prod(self._source.shape(name)))
        return round(self._source.bytes_of(name) * part)

    def read(self, name: str) -> Tensor:
        stated = self._cuts.shape_of(name)
        if stated is not None:
            whole = self._source.read(name)
            return torch.where(stated < 0, whole, stated)
        dimensions = self._cuts.of(name, self._source.shape(name))
        if dimensions is None or all(cut is None for cut in dimensions):
            return self._source.read(name)
        part = self._source.read_part(name, _runs(dimensions))
        return self._rebased(name, part) if name.endswith(_INDICES) else part

    def _rebased(self, name: str, groups: Tensor) -> Tensor:
        """The groups of a rank's inputs, counted from its first: in their own order a rank has whole ones."""
        if (self._source.read(name).diff() < 0).any():
            raise ConfigurationError(f"{name} orders inputs by activation: its rows cannot be divided")
        return groups - groups[:1]

    def read_part(self, name: str, runs: Runs) -> Tensor:
        """A part of what this source shows."""
        return read_runs(self.read(name).__getitem__, runs)

    def quantised(self, name: str) -> bool:
        return self._source.quantised(name)

    def codes(self, name: str) -> QuantisedWeight | None:
        """The part by its codes; None where it divides groups of inputs: it is read dense then."""
        found = self._source.codes(name)
        dimensions = self._cuts.of(name, self._source.shape(name))
        if found is None or dimensions is None:
            return found
        rows, columns = dimensions
        if rows is not None:
            found = found.rows(torch.cat([torch.arange(*run) for run in rows.runs]))
        return found if columns is None else found.columns(columns.runs)
