"""Weights from a checkpoint into layers: reading, checking, converting, quantising.

Families ask a `WeightReader` for each weight by its checkpoint name and expected shape. It collects missing
names, wrong shapes, and names that were never asked for, so that a mismatch is one error that lists them all
(`finish`). Without a source it makes dummy weights. Modules of quantised checkpoints are read by `quantised`.
Called while a model is built.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.cpu.matrix import PackedMatrix, widens
from holdfast.kernels.cpu.packing import eight_bit, pack_matrix
from holdfast.kernels.quantised import QuantisedWeight, stacked
from holdfast.kernels.quantised import joined as joined_codes
from holdfast.kernels.torch.quantised import dequantise
from holdfast.models.cuts import Cuts, CutSource
from holdfast.models.fields import ConfigurationError, listed
from holdfast.models.fp8 import (
    BLOCK,
    DUMMY_SCALE,
    SCALE_SUFFIXES,
    UNUSED,
    Fp8Linear,
    Fp8Weight,
    joined,
    scale_shapes,
    stays,
)
from holdfast.models.linear import (
    DenseLinear,
    Embedding,
    Int4Linear,
    Int8Linear,
    Linear,
    PackedLinear,
    RefinedHead,
    packed_kernels,
    quantise_int8,
)
from holdfast.models.quantised.floats import read_mxfp4_experts
from holdfast.models.quantised.forms import Form, Layout, Quantisation
from holdfast.models.quantised.products import JoinedLinear, experts_of, linear_of
from holdfast.models.quantised.reading import dummy_module, read_module
from holdfast.models.ranks import Ranks
from holdfast.models.sources import Source

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in total) while weights load."""

_NUMBERS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Types that are not quantised by their names in files."""

_ELEMENTS_A_BYTE = 4
"""Upper bound on elements per byte of any weight format."""


class WeightMismatch(ConfigurationError):
    """The checkpoint's names or shapes do not match the model that its configuration describes."""


class RankPart(NamedTuple):
    """Which rank reads, and its parts of the weights, which are known by the time that one is read."""

    ranks: Ranks
    cuts: Cuts


@dataclass(frozen=True, slots=True)
class Placement:
    """Device, dtype and weight form.

    `quantised` keeps weights that the checkpoint has in 16 bits or fewer in the layout of the CPU kernels;
    `dense_copies` adds a dense copy to those whose kernels are slower in large batches.
    """

    device: torch.device
    dtype: torch.dtype
    quantised: bool = False
    dense_copies: bool = True

    def __post_init__(self) -> None:
        assert not self.quantised or self.device.type == "cpu", "quantised kernels are for the CPU"

    @property
    def keeps_codes(self) -> bool:
        """Whether weights of quantised checkpoints keep their codes."""
        return self.quantised or self.device.type != "cpu"


class WeightReader:
    """Reads the weights of one model, once each, and records mismatches."""

    def __init__(
        self,
        source: Source | None,
        placement: Placement,
        progress: Progress | None = None,
        quantisation: Quantisation | None = None,
        part: RankPart | None = None,
    ) -> None:
        """`part`: of a model that several ranks compute, the weights of this one."""
        self.placement = placement
        self._quantisation = quantisation
        self._part = part
        if source is not None and part is not None:
            source = CutSource(source, part.cuts, part.ranks.size)
        self._source: Source | None = source
        self._names = frozenset() if source is None else source.names()
        self._progress = progress
        self._bytes_read = 0
        self._used: set[str] = set()
        self._missing: list[str] = []
        self._wrong: list[str] = []
        self._unusable: list[str] = []
        self._codes: list[str] = []
        self.dense: list[DenseLinear] = []
        """The projections with dense weights."""
        self._ignored: list[re.Pattern[str]] = [re.compile(pattern) for pattern in UNUSED]

    def ignore(self, pattern: str) -> None:
        """Names that may be in the checkpoint without being read."""
        self._ignored.append(re.compile(pattern))

    @property
    def dummy(self) -> bool:
        """Whether weights are made rather than read."""
        return self._source is None

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor; dummy weights only have the tensors that are read."""
        return name in self._names

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """One tensor on the device, in `dtype` or the model's."""
        module = name.removesuffix(".weight")
        form = self._form(module) if len(shape) == 2 and module != name else None
        if form is not None:
            codes = self._codes_of(module, form, shape[0], shape[1])
            if codes is None:
                return self._placeholder(shape)
            dense = dequantise(codes, dtype or self.placement.dtype)
            return dense.to(self.placement.device)
        tensor = self._raw(name, shape)
        if tensor.dtype == torch.float8_e4m3fn:
            scale = self._scale(name, shape)
            tensor = Fp8Weight.of(tensor, scale).dense() if len(shape) == 2 else tensor.float()
        if not tensor.is_floating_point():
            self._codes.append(f"{name} is {str(tensor.dtype).removeprefix('torch.')}")
        return tensor.to(device=self.placement.device, dtype=dtype or self.placement.dtype)

    def stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor in the file's type; zeros, and recorded, where it cannot be read with that shape."""
        return self._raw(name, shape)

    def matrix(
        self, name: str, shape: tuple[int, int], dtype: torch.dtype | None = None
    ) -> Tensor | PackedMatrix:
        """A small projection's weight: packed as stored where the C kernels multiply it, else as `tensor`."""
        if self.keeps_numbers([name], shape[1]):
            return pack_matrix([self.stored(name, shape)])
        return self.tensor(name, shape, dtype)

    def norm(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        """A norm's weight in float32, plus the family's offset."""
        return self.tensor(f"{name}.weight", (size,), torch.float32) + offset

    def linear(
        self,
        names: Sequence[str],
        inputs: int,
        outputs: Sequence[int],
        *,
        bias: bool = False,
        order: Tensor | None = None,
        gated: bool = False,
        summed: bool = False,
    ) -> Linear:
        """The projections `names` concatenated along the outputs (then reordered by `order`).

        With `gated` they are both halves of a gated activation, which a quantised one may apply.
        With `summed` the outputs of all ranks are added up, so that only rank 0 adds the bias.
        """
        weights = [f"{name}.weight" for name in names]
        forms = [self._form(name) for name in names]
        # GPTQ checkpoints may have biases, of zeros or not, where the family has none.
        extra = [
            form is not None and f"{name}.bias" in self._names
            for name, form in zip(names, forms, strict=True)
        ]
        offset = None
        if bias or any(extra):
            parts = [
                self.tensor(f"{name}.bias", (size,)) if bias or more else self._placeholder((size,)).clone()
                for name, size, more in zip(names, outputs, extra, strict=True)
            ]
            offset = _reordered(torch.cat(parts), order)
            if summed and self._part is not None and self._part.ranks.rank:
                offset = None
        if any(form is not None for form in forms):
            return self._linear_of_codes(names, forms, inputs, outputs, offset, order, gated=gated)
        quantised = self._quantised_linear(weights, inputs, outputs, offset, order)
        if quantised is None and self.keeps_numbers(weights, inputs):
            quantised = self._packed_linear(weights, inputs, outputs, offset, order)
        if quantised is None and order is None:
            quantised = self._fp8_linear(weights, inputs, outputs, offset)
        if quantised is not None:
            return quantised
        parts = [self.tensor(name, (size, inputs)) for name, size in zip(weights, outputs, strict=True)]
        dense = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._dense(_reordered(dense, order), offset)

    def experts(
        self, modules: Sequence[Sequence[str]], inputs: int, outputs: int
    ) -> Tensor | QuantisedWeight | tuple[PackedMatrix, ...] | None:
        """The weights of experts, each of some modules concatenated along the outputs; None if read dense."""
        if not self.placement.keeps_codes:
            return None
        every = [f"{name}.weight" for names in modules for name in names]
        if self.keeps_numbers(every, inputs) or (self._keeps_quantised(every) and packed_kernels(inputs)):
            return self._packed_experts(modules, inputs, outputs)
        parts: list[QuantisedWeight] = []
        for names in modules:
            forms = [self._form(name, experts=True) for name in names]
            read = [
                None if form is None else self._codes_of(name, form, outputs // len(names), inputs)
                for name, form in zip(names, forms, strict=True)
            ]
            found = [part for part in read if part is not None]
            whole = joined_codes(found) if len(found) == len(names) else None
            if whole is None:
                return None
            parts.append(whole)
        together = stacked(parts)
        return None if together is None else self._kept_experts(together)

    def _packed_experts(
        self, modules: Sequence[Sequence[str]], inputs: int, outputs: int
    ) -> tuple[PackedMatrix, ...] | None:
        """Experts for the C kernels; None where a part does not fit."""
        found: list[PackedMatrix] = []
        for names in modules:
            weights = [f"{name}.weight" for name in names]
            stored = self._as_stored(weights, inputs, [outputs // len(names)] * len(names))
            if stored is None:
                return None
            found.append(pack_matrix(stored))
        return tuple(found)

    def stacked_experts(
        self, name: str, experts: int, outputs: int, inputs: int, order: Tensor | None = None
    ) -> Tensor | QuantisedWeight | tuple[PackedMatrix, ...] | None:
        """The MXFP4 weights `name` of all experts, outputs reordered by `order`; None if not in MXFP4."""
        form = self._form(name)
        if form is None or form.layout is not Layout.MXFP4_EXPERTS or name in self._names:
            return None
        shape = (experts, outputs, inputs)
        if self._source is None:
            return self._kept_experts(dummy_module(name, form, shape, self.placement.device))
        weight = read_mxfp4_experts(self, name, experts, outputs, inputs)
        if weight is None:
            return self._placeholder(shape)
        return self._kept_experts(weight if order is None else weight.rows(order))

    def _kept_experts(self, weight: QuantisedWeight) -> Tensor | QuantisedWeight | tuple[PackedMatrix, ...]:
        placement = self.placement
        return experts_of(weight, placement.device, placement.dtype, keep=placement.keeps_codes)

    def embedding(
        self, name: str, vocabulary: int, width: int, multiplier: float, *, tied: bool
    ) -> tuple[Embedding, Linear | None]:
        """The token embedding, and the output head where its weights are tied."""
        placement = self.placement
        weight = f"{name}.weight"
        quantised, plain = self._keeps_quantised([weight]), self.keeps_numbers([weight], width)
        if (quantised and packed_kernels(width)) or (plain and tied):
            parts = self._as_stored([weight], width, [vocabulary])
            if parts is not None:
                packed = PackedLinear(pack_matrix(parts))
                return Embedding(packed.matrix, None, placement.dtype, multiplier), packed if tied else None
        own = _NUMBERS[self._source.dtype(weight)] if plain and self._source is not None else None
        table = self.tensor(weight, (vocabulary, width), own)
        if not tied:
            return Embedding(table, None, placement.dtype, multiplier), None
        if not quantised:
            return Embedding(table, None, placement.dtype, multiplier), self._dense(table)
        codes, scale = quantise_int8(table)
        kept = table if placement.dense_copies else None
        head = RefinedHead(Int8Linear(codes, scale, None, kept))
        if kept is None:
            return Embedding(codes, scale, placement.dtype, multiplier), head
        return Embedding(table, None, placement.dtype, multiplier), head

    def _dense(self, weight: Tensor, bias: Tensor | None = None) -> DenseLinear:
        self.dense.append(DenseLinear(weight, bias))
        return self.dense[-1]

    def head(self, name: str, width: int, vocabulary: int) -> Linear:
        """An output head with weights of its own."""
        head = self.linear([name], width, [vocabulary])
        return RefinedHead(head) if isinstance(head, Int4Linear | Int8Linear) else head

    def finish(self) -> None:
        """Raise an error that lists every missing, unexpected or mismatched name."""
        unexpected = sorted(
            name
            for name in self._names - self._used
            if not any(pattern.search(name) for pattern in self._ignored)
        )
        problems = [
            f"{title} ({len(items)}): {listed(items)}"
            for title, items in (
                ("missing", list(dict.fromkeys(self._missing))),
                ("of another shape", list(dict.fromkeys(self._wrong))),
                ("not usable", list(dict.fromkeys(self._unusable))),
                ("in a quantised form that is not supported", self._codes),
                ("unexpected", unexpected),
            )
            if items
        ]
        if problems:
            raise WeightMismatch("the checkpoint does not match the model; " + "; ".join(problems))

    def part(
        self, name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]
    ) -> Tensor | None:
        """A tensor as stored, of one of some shapes and dtypes; None, and recorded, where there is none."""
        assert self._source is not None
        found = self._source.shape(name) if name in self._names else shapes[0]
        if not self._claim(name, found if found in shapes else shapes[0]):
            return None
        tensor = self._source.read(name)
        self._count(name)
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            self.reject(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not {wanted}")
            return None
        return tensor

    def reject(self, problem: str) -> None:
        """Record a problem of a tensor that the text names."""
        self._unusable.append(problem)

    def _form(self, module: str, *, experts: bool = False) -> Form | None:
        """How a module is stored, if quantised; None for fp8 too, which is read on its own, but in experts.

        What the files contain decides; the configuration says how to read it, and what is missing.
        """
        if self._quantisation is None:
            return None
        stated = self._quantisation.form(module)
        form: Form | None = None
        if self._source is None or f"{module}.weight" not in self._names:
            form = stated
        for each in (stated, *self._quantisation.forms()):
            if each is None or self._source is None:
                continue
            codes = module + each.layout.ending
            if codes in self._names and self._source.dtype(codes) == each.layout.dtype:
                form = each
                break
        if form is not None and form.layout is Layout.FP8 and not experts:
            return None
        return form

    def _codes_of(self, module: str, form: Form, outputs: int, inputs: int) -> QuantisedWeight | None:
        if self._source is None:
            return dummy_module(module, form, (outputs, inputs), self.placement.device)
        self._used |= {module + suffix for suffix in (".weight_shape", ".g_idx", ".weight_g_idx")}
        if form.symmetric:
            self._used.add(f"{module}.weight_zero_point")
        return read_module(self, module, form, outputs, inputs)

    def _placeholder(self, shape: tuple[int, ...]) -> Tensor:
        """Zeros that take no memory, in place of a weight that is recorded as unusable."""
        zero = torch.zeros(1, dtype=self.placement.dtype, device=self.placement.device)
        return zero.expand(shape)

    def _linear_of_codes(
        self,
        names: Sequence[str],
        forms: Sequence[Form | None],
        inputs: int,
        outputs: Sequence[int],
        bias: Tensor | None,
        order: Tensor | None,
        *,
        gated: bool,
    ) -> Linear:
        """Projections of which some are quantised: as one where their forms are equal, else one by one."""
        placement = self.placement
        if not placement.keeps_codes:
            parts = [
                self.tensor(f"{name}.weight", (size, inputs))
                for name, size in zip(names, outputs, strict=True)
            ]
            dense = parts[0] if len(parts) == 1 else torch.cat(parts)
            return self._dense(_reordered(dense, order), bias)
        found: list[QuantisedWeight] = []
        for name, form, size in zip(names, forms, outputs, strict=True):
            if form is not None:
                weight = self._codes_of(name, form, size, inputs)
                if weight is None:
                    return DenseLinear(self._placeholder((sum(outputs), inputs)))
                found.append(weight)
        whole = joined_codes(found) if len(found) == len(names) else None
        if whole is not None:
            return linear_of(whole if order is None else whole.rows(order), bias, placement, gated=gated)
        linears: list[Linear] = []
        for name, form, size in zip(names, forms, outputs, strict=True):
            if form is None:
                linears.append(self.linear([name], inputs, [size]))
            else:
                linears.append(linear_of(found.pop(0), None, placement))
        return JoinedLinear(linears, order, bias)

    def _raw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if self._source is None and self._part is not None:
            whole = _dummy(name, self._part.cuts.whole_shape(name, shape), self.placement.device)
            return self._part.cuts.part(name, whole)
        if self._source is None:
            return _dummy(name, shape, self.placement.device)
        if not self._claim(name, shape):
            if math.prod(shape) > self._source.total_bytes * _ELEMENTS_A_BYTE:
                self.finish()  # Do not allocate for sizes that the files cannot contain.
            return torch.zeros(shape)
        self._count(name)
        return self._source.read(name)

    def _claim(self, name: str, shape: tuple[int, ...]) -> bool:
        """Mark a name as used; False, and recorded, where it cannot be read with that shape."""
        assert self._source is not None
        self._used.add(name)
        if name not in self._names:
            self._missing.append(name)
            return False
        found = self._source.shape(name)
        if found != shape:
            self._wrong.append(f"{name} is {list(found)}, not {list(shape)}")
            return False
        return True

    def _count(self, name: str) -> None:
        assert self._source is not None
        self._bytes_read += self._source.bytes_of(name)
        if self._progress is not None:
            total = self._source.total_bytes
            self._progress(min(self._bytes_read, total), total)

    def _keeps_quantised(self, names: list[str]) -> bool:
        if not self.placement.quantised or self._source is None:
            return False
        return all(name in self._names and self._source.quantised(name) for name in names)

    def keeps_numbers(self, names: Sequence[str], inputs: int) -> bool:
        """Whether the C kernels multiply matrices as stored, of which some are not quantised."""
        source = self._source
        if not self.placement.quantised or source is None or not widens():
            return False
        if not all(name in self._names for name in names):
            return False
        plain = [name for name in names if not source.quantised(name)]
        if not plain or any(source.dtype(name) not in _NUMBERS for name in plain):
            return False
        return len(plain) == len(names) or packed_kernels(inputs)

    def _quantised_linear(
        self,
        names: list[str],
        inputs: int,
        outputs: Sequence[int],
        bias: Tensor | None,
        order: Tensor | None,
    ) -> Linear | None:
        """By its codes, or in 8 bits, if every part is quantised, else None."""
        if not self._keeps_quantised(names):
            return None
        assert self._source is not None
        if packed_kernels(inputs):
            return self._packed_linear(names, inputs, outputs, bias, order)
        parts = [self.tensor(name, (size, inputs)) for name, size in zip(names, outputs, strict=True)]
        dense = _reordered(torch.cat(parts), order)
        kept = dense if self.placement.dense_copies else None
        if self._missing or self._wrong:
            return DenseLinear(dense, bias)
        codes = [part for name in names if (part := self._source.codes(name)) is not None]
        whole = joined_codes(codes) if len(codes) == len(names) else None
        if whole is not None and Int4Linear.fits(whole):
            return Int4Linear(whole if order is None else whole.rows(order), bias, kept)
        return Int8Linear(*quantise_int8(dense), bias, kept)

    def _packed_linear(
        self,
        names: Sequence[str],
        inputs: int,
        outputs: Sequence[int],
        bias: Tensor | None,
        order: Tensor | None,
    ) -> Linear:
        """A projection of the C kernels."""
        found = self._as_stored(names, inputs, outputs)
        if found is None:
            return DenseLinear(self._placeholder((sum(outputs), inputs)), bias)
        return PackedLinear(pack_matrix(found, order, bias))

    def _as_stored(
        self, names: Sequence[str], inputs: int, outputs: Sequence[int]
    ) -> list[QuantisedWeight | Tensor] | None:
        """Matrices as the checkpoint has them; quantised ones without codes of the kernels in 8 bits.

        None, and recorded, where a tensor cannot be read with its shape.
        """
        source = self._source
        assert source is not None
        found: list[QuantisedWeight | Tensor] = []
        for name, size in zip(names, outputs, strict=True):
            if not self._claim(name, (size, inputs)):
                continue
            stored: QuantisedWeight | Tensor | None = source.codes(name) if source.quantised(name) else None
            if stored is None:
                stored = source.read(name)
                stored = eight_bit(stored) if source.quantised(name) else stored
            self._count(name)
            found.append(stored)
        return found if len(found) == len(names) else None

    def _scale(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The scales of an fp8 weight; ones, and recorded, where none fit."""
        found = next((name + suffix for suffix in SCALE_SUFFIXES if name + suffix in self._names), None)
        if found is None or self._source is None:
            self._missing.append(name + SCALE_SUFFIXES[0])
            return torch.ones(1)
        self._used.add(found)
        if self._source.shape(found) not in scale_shapes(shape):
            self._wrong.append(f"{found} is {list(self._source.shape(found))}, no scales of {list(shape)}")
            return torch.ones(1)
        return self._source.read(found)

    def _fp8_linear(
        self, names: list[str], inputs: int, outputs: Sequence[int], bias: Tensor | None
    ) -> Linear | None:
        """fp8 weights that stay fp8 on a GPU that supports it; None elsewhere."""
        if not stays(self.placement.device):
            return None
        shapes = {name: (size, inputs) for name, size in zip(names, outputs, strict=True)}
        parts = self._dummy_fp8(shapes) if self._source is None else self._read_fp8(shapes, self._source)
        if parts is None:
            return None
        whole = joined(parts)
        if whole is None:
            dense = torch.cat([part.dense() for part in parts])
            return self._dense(dense.to(self.placement.device, self.placement.dtype), bias)
        return Fp8Linear(whole, bias, self.placement.device)

    def _read_fp8(self, shapes: dict[str, tuple[int, int]], source: Source) -> list[Fp8Weight] | None:
        """Weights in fp8 with their scales; None where one is stored otherwise."""
        for name, shape in shapes.items():
            scaled = any(name + suffix in self._names for suffix in SCALE_SUFFIXES)
            if not scaled or name not in self._names or source.shape(name) != shape:
                return None
        return [
            Fp8Weight.of(self._raw(name, shape), self._scale(name, shape)) for name, shape in shapes.items()
        ]

    def _dummy_fp8(self, shapes: dict[str, tuple[int, int]]) -> list[Fp8Weight] | None:
        """Dummy weights of modules that the configuration says are in fp8."""
        if self._quantisation is None:
            return None
        parts: list[Fp8Weight] = []
        for name, shape in shapes.items():
            form = self._quantisation.form(name.removesuffix(".weight"))
            if form is None or form.layout is not Layout.FP8:
                return None
            places = tuple(-(-size // BLOCK) for size in shape)
            scale = torch.full(places, DUMMY_SCALE, device=self.placement.device)
            codes = (self._raw(name, shape) / DUMMY_SCALE).to(torch.float8_e4m3fn)
            parts.append(Fp8Weight.of(codes, scale))
        return parts


def _reordered(tensor: Tensor, order: Tensor | None) -> Tensor:
    return tensor if order is None else tensor[order.to(tensor.device)]


def _dummy(name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Random values that depend on the name alone: matrices keep magnitudes, vectors are near one."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, device=device)
    if name.endswith("bias"):
        return values * 0.02
    return 1.0 + 0.1 * values if len(shape) == 1 else values / math.sqrt(shape[-1])
