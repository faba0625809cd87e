"""Weights in 4-bit and 8-bit integers: compressed-tensors, GPTQ and AWQ.

Each function reads one module in its layout and rearranges bytes; codes, scales and zero points are those of
the checkpoint. A part that is missing or does not fit is recorded by its name, and the answer is None.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from holdfast.kernels.quantised import Codes, QuantisedWeight
from holdfast.kernels.torch.quantised import halves
from holdfast.models.quantised.forms import Form

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of eight outputs in a word."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_WORD = 8
"""4-bit codes of an int32."""


class Parts(Protocol):
    """The tensors of a checkpoint, with a record of those that are missing or wrong."""

    def has(self, name: str) -> bool: ...

    def part(
        self, name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]
    ) -> Tensor | None:
        """A tensor as stored, of one of some shapes and dtypes; None, and recorded, where there is none."""
        ...

    def reject(self, problem: str) -> None:
        """Record something else that is wrong; the text names the tensor."""
        ...


def group_of(parts: Parts, name: str, form: Form, inputs: int) -> int | None:
    """The group of a module's rows; None, and recorded, where rows are no multiple of it."""
    group = inputs if form.group is None else form.group
    if inputs % group or inputs % (32 // form.bits):
        parts.reject(f"{name} has rows of {inputs}, which groups of {group} do not divide")
        return None
    return group


def read_packed(parts: Parts, module: str, form: Form, outputs: int, inputs: int) -> QuantisedWeight | None:
    """compressed-tensors' pack-quantized: codes plus half their range, packed along the inputs."""
    group = group_of(parts, f"{module}.weight_packed", form, inputs)
    if group is None:
        return None
    groups = inputs // group
    words = parts.part(f"{module}.weight_packed", ((outputs, inputs * form.bits // 32),), (torch.int32,))
    scales = parts.part(f"{module}.weight_scale", ((outputs, groups),), FLOATS)
    zeros: Tensor | None = None
    if not form.symmetric:
        packed = parts.part(f"{module}.weight_zero_point", ((-(-outputs // _WORD), groups),), (torch.int32,))
        if packed is None:
            return None
        zeros = _nibbles(packed.T)[:, :outputs].T
    if words is None or scales is None or not _stated_shape(parts, module, outputs, inputs):
        return None
    order = _order(parts, f"{module}.weight_g_idx", inputs, group, required=form.act_order)
    if form.bits == 8:
        codes = (words.contiguous().view(torch.uint8) ^ 0x80).view(torch.int8)
        return _permuted(Codes.INT8, codes, scales, group, None, order)
    return _permuted(Codes.INT4, words.contiguous().view(torch.uint8), scales, group, zeros, order)


def _stated_shape(parts: Parts, module: str, outputs: int, inputs: int) -> bool:
    """Whether `weight_shape`, where there is one, is the shape of the module."""
    name = f"{module}.weight_shape"
    if not parts.has(name):
        return True
    stated = parts.part(name, ((2,),), (torch.int64, torch.int32))
    if stated is None or stated.tolist() == [outputs, inputs]:
        return stated is not None
    parts.reject(f"{name} says {stated.tolist()}, not {[outputs, inputs]}")
    return False


def read_int8(parts: Parts, module: str, form: Form, outputs: int, inputs: int) -> QuantisedWeight | None:
    """compressed-tensors' int-quantized: one int8 an element; a scale for all, for each row or group."""
    group = group_of(parts, f"{module}.weight", form, inputs)
    if group is None:
        return None
    shapes: tuple[tuple[int, ...], ...] = ((outputs, inputs // group),)
    if form.group is None:
        shapes = ((outputs, 1), (1,), (), (1, 1), (outputs,))
    codes = parts.part(f"{module}.weight", ((outputs, inputs),), (torch.int8,))
    scales = parts.part(f"{module}.weight_scale", shapes, FLOATS)
    if codes is None or scales is None:
        return None
    spread = scales.reshape(-1, inputs // group).expand(outputs, inputs // group).contiguous()
    return QuantisedWeight(Codes.INT8, codes, spread, group)


def read_gptq(parts: Parts, module: str, form: Form, outputs: int, inputs: int) -> QuantisedWeight | None:
    """GPTQ: codes packed along the inputs, transposed; zero points along the outputs, stored less one."""
    group = group_of(parts, f"{module}.qweight", form, inputs)
    if group is None or not _whole_words(parts, f"{module}.qzeros", outputs):
        return None
    groups = inputs // group
    words = parts.part(f"{module}.qweight", ((inputs // _WORD, outputs),), (torch.int32,))
    scales = parts.part(f"{module}.scales", ((groups, outputs),), FLOATS)
    packed = parts.part(f"{module}.qzeros", ((groups, outputs // _WORD),), (torch.int32,))
    if words is None or scales is None or packed is None:
        return None
    zeros = _nibbles(packed)
    if form.off_by_one:
        zeros = (zeros + 1) & 15
    order = _order(parts, f"{module}.g_idx", inputs, group, required=form.act_order)
    codes = words.T.contiguous().view(torch.uint8)
    return _permuted(Codes.INT4, codes, scales.T, group, zeros.T, order)


def read_awq(parts: Parts, module: str, form: Form, outputs: int, inputs: int) -> QuantisedWeight | None:
    """AWQ: codes and zero points packed along the outputs, transposed, eight in an order of their own."""
    group = group_of(parts, f"{module}.qweight", form, inputs)
    if group is None or not _whole_words(parts, f"{module}.qweight", outputs):
        return None
    groups = inputs // group
    words = parts.part(f"{module}.qweight", ((inputs, outputs // _WORD),), (torch.int32,))
    scales = parts.part(f"{module}.scales", ((groups, outputs),), FLOATS)
    packed = parts.part(f"{module}.qzeros", ((groups, outputs // _WORD),), (torch.int32,))
    if words is None or scales is None or packed is None:
        return None
    codes = _unshuffled(words).T
    pairs = codes[:, 0::2] | codes[:, 1::2] << 4
    zeros = _unshuffled(packed).T.contiguous()
    return QuantisedWeight(Codes.INT4, pairs.contiguous(), scales.T.contiguous(), group, zeros)


def _whole_words(parts: Parts, name: str, outputs: int) -> bool:
    if outputs % _WORD:
        parts.reject(f"{name} packs {outputs} outputs, not a multiple of {_WORD}")
    return outputs % _WORD == 0


def _nibbles(words: Tensor) -> Tensor:
    """The 4-bit codes of int32 words along the last dimension, the lowest first."""
    return halves(words.contiguous().view(torch.uint8))


def _unshuffled(words: Tensor) -> Tensor:
    """The 4-bit codes of AWQ's words in the order of the outputs."""
    ordered: Tensor = _nibbles(words).unflatten(-1, (-1, _WORD))[..., list(AWQ_ORDER)].flatten(-2)
    return ordered


def _order(parts: Parts, name: str, inputs: int, group: int, *, required: bool) -> Tensor | None:
    """The inputs sorted by the group that `g_idx` gives them; None where that is their own order."""
    if not required and not parts.has(name):
        return None
    groups = parts.part(name, ((inputs,),), (torch.int32, torch.int64))
    if groups is None:
        return None
    own = torch.arange(inputs) // group
    if torch.equal(groups.long(), own):
        return None
    sorted_groups, order = torch.sort(groups.long(), stable=True)
    if not torch.equal(sorted_groups, own):
        parts.reject(f"{name} does not give {group} inputs to each of {inputs // group} groups")
        return None
    return order.to(torch.int32)


def _permuted(
    kind: Codes, codes: Tensor, scales: Tensor, group: int, zeros: Tensor | None, order: Tensor | None
) -> QuantisedWeight:
    """A weight whose codes are sorted by their groups."""
    if order is not None and kind is Codes.INT4:
        single = halves(codes)[:, order.long()]
        codes = single[:, 0::2] | single[:, 1::2] << 4
    elif order is not None:
        codes = codes[:, order.long()]
    zeros = None if zeros is None else zeros.contiguous()
    return QuantisedWeight(kind, codes.contiguous(), scales.contiguous(), group, zeros, None, order)
